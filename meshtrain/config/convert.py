"""Converts the nodes of a config into the values of dataclass fields, and reports what does not
fit.

A field's annotation is its type, and `key(...)` gives its limits. The only coercion is from
integers to floats.
"""

import dataclasses
import math
import os
import re
import struct
import types
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

from meshtrain.config.errors import ConfigError, nearest, yaml_text
from meshtrain.config.removed import REMOVED_VALUES, what_replaces
from meshtrain.config.yaml_reader import Node, describe, read_scalar
from meshtrain.errors import any_of


class _Invalid(Enum):
    INVALID = "INVALID"


INVALID = _Invalid.INVALID  # stands for a value that has been reported as wrong
MOST_NAME, MOST_PATH = 255, 4095  # bytes of a name and of a path, on Linux


@dataclass(frozen=True)
class Limits:
    """Constraints on a key's value besides its type; for a list, on each of its numbers."""

    minimum: float | None = None  # at least
    above: float | None = None  # more than
    maximum: float | None = None  # at most
    below: float | None = None  # less than
    names: tuple[str, ...] = ()  # a string must be one of these, ...
    suffix: str | None = None  # ... or the path of a file with this suffix
    path: bool = False  # a string is the path of a file or folder
    instead: tuple[str, str] = ("", "")  # values of other frameworks, and the equivalent here

    def hold(self, value: float | str) -> bool:
        if isinstance(value, str):
            return (
                not self.names
                or value in self.names
                or (self.suffix is not None and value.endswith(self.suffix))
            )
        return (
            math.isfinite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    @property
    def words(self) -> str:
        """` of at least 1 and below 2`, to follow "a number"; empty without limits."""
        known = (
            ("at least", self.minimum),
            ("above", self.above),
            ("at most", self.maximum),
            ("below", self.below),
        )
        bounds = [f"{word} {bound}" for word, bound in known if bound is not None]
        return (
            (" of " if self.minimum is not None else " ") + " and ".join(bounds) if bounds else ""
        )


NO_LIMITS = Limits()


def key(default: Any = dataclasses.MISSING, *, doc: str = "", also: str = "", **limits: Any) -> Any:
    """A field of a section: its default (without one the key is required) and its `Limits`.

    Args:
        doc: the field's documentation, if it is not the text below the field.
        also: names of the key in other frameworks, for "did you mean".
    """
    metadata = {"doc": doc, "limits": Limits(**limits), "also": tuple(also.split())}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Key:
    """A key of a section, as read from a field of its dataclass."""

    name: str
    hint: Any  # the annotation
    default: Any  # dataclasses.MISSING if the key is required
    limits: Limits
    doc: str
    also: tuple[str, ...]

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def keys_of(cls: type) -> dict[str, Key]:
    """The keys that a dataclass declares: its fields except those with `init=False`.

    Raises TypeError: an annotation that no YAML value fits; names the field.
    """
    hints = get_type_hints(cls)
    keys = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if not _is_supported(hints[field.name]):
            raise TypeError(
                f"{cls.__qualname__}.{field.name} has the type {hints[field.name]}, which no YAML "
                "value has: use "
                "bool, int, float, str, Literal, list, tuple, dict, Any, or one of them | None"
            )
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        metadata: dict[str, Any] = {"limits": NO_LIMITS, "doc": "", "also": ()} | dict(
            field.metadata
        )
        keys[field.name] = Key(field.name, hints[field.name], default, **metadata)
    return keys


def read_section(
    node: Node,
    section: str,
    keys: dict[str, Key],
    elsewhere: dict[str, str],
    errors: list[ConfigError],
) -> dict[str, Any]:
    """The values of a section's keys, defaults included; `INVALID` for wrong or missing ones.

    `elsewhere`: every key of every section -> its full name, for "did you mean".
    """
    children: dict[str, Node] = node.value if isinstance(node.value, dict) else {}
    if not isinstance(node.value, dict) and not (node.value is None or node.broken):
        message = (
            f"{section} is a section: expected keys such as `{next(iter(keys))}:`, found "
            f"{describe(node.value)}"
        )
        errors.append(ConfigError(node.at, message))
        return dict.fromkeys(keys, INVALID)
    misspelt = set()
    for name, unknown in children.items():
        if name not in keys:
            errors.append(
                ConfigError(unknown.key_at, describe_unknown_key(name, section, keys, elsewhere))
            )
            misspelt.add(meant_key(name, keys))
    if node.broken:
        return dict.fromkeys(keys, INVALID)
    values: dict[str, Any] = {}
    for name, key in keys.items():
        if (child := children.get(name)) is not None:
            values[name] = convert(
                child, key.hint, f"{section}.{name}", errors, key.limits, key.default
            )
        elif name in misspelt:
            values[name] = INVALID
        elif key.required:
            message = f"{section}.{name} is missing: give {describe_type(key.hint, key.limits)}"
            errors.append(ConfigError(node.key_at, message))
            values[name] = INVALID
        else:
            values[name] = key.default
    return values


def meant_key(name: str, keys: dict[str, Key]) -> str | None:
    """The key that an unknown name most likely means: one with that alias (`also`), else the
    nearest spelling."""
    return next((key.name for key in keys.values() if name in key.also), None) or nearest(
        name, keys
    )


def describe_unknown_key(
    name: str, section: str, keys: dict[str, Key], elsewhere: dict[str, str]
) -> str:
    unknown = f"there is no key {yaml_text(f'{section}.{name}')}: "
    if ":" in name:
        return f"{unknown}a colon needs a space after it, as in `{name.replace(':', ': ', 1)}`"
    if "capacity" in name:
        return (
            f"{unknown}which tokens a capacity drops depends on which others compete, so on the "
            "layout, and here no "
            "token is dropped: take it away"
        )
    replacement = what_replaces(section, name)
    if replacement is not None:
        return f"{yaml_text(f'{section}.{name}')} is no longer a key: {replacement}"
    suggestion = meant_key(name, keys) or elsewhere.get(name)
    return unknown + (
        f"did you mean {suggestion}?"
        if suggestion
        else f"the keys of {section} are {', '.join(keys)}"
    )


def convert(
    node: Node,
    hint: Any,
    name: str,
    errors: list[ConfigError],
    limits: Limits = NO_LIMITS,
    default: Any = dataclasses.MISSING,
) -> Any:
    """The node's value as `hint` requires; `INVALID`, with an error that may name `default`, if it
    does not fit."""
    if node.broken:
        return INVALID
    if node.value == [] and default == ():
        return ()  # a resolved config writes the default () as []
    for option in _options(hint):
        if _fits(node.value, option):
            return _convert_to(node, option, hint, name, errors, limits)
    removed = REMOVED_VALUES.get(name, {})
    if isinstance(node.value, str) and node.value in removed:
        out = removed[node.value]
    elif node.value in limits.instead[0].split():
        out = limits.instead[1]
    else:
        out = _suggest(node.value, hint)
    if not out and default not in (dataclasses.MISSING, None):
        out = f"the default is {yaml_text(default)}"
    _report_misfit(node, hint, name, errors, limits, out)
    return INVALID


def _convert_to(
    node: Node, option: Any, hint: Any, name: str, errors: list[ConfigError], limits: Limits
) -> Any:
    value = node.value
    if isinstance(value, list) and option is not Any:
        return _convert_list(node, option, name, errors, limits)
    if is_mapping(option):
        values = read_section(node, name, keys_of(option), {}, errors)
        return INVALID if INVALID in values.values() else option(**values)
    if isinstance(value, dict) and option is not Any:
        inner = (get_args(option) or (str, Any))[1]
        items = {key: convert(item, inner, f"{name}.{key}", errors) for key, item in value.items()}
        return INVALID if INVALID in items.values() else items
    if isinstance(value, list | dict):
        return INVALID if _is_broken(node) else node.plain
    if option is float:
        value = float(value)
    if limits.path and isinstance(value, str):
        problem = path_problem(value)
        if problem:
            errors.append(ConfigError(node.at, f"{name}: {problem}"))
            return INVALID
    beyond = name.startswith("optimizer.") and isinstance(value, float) and not in_float32(value)
    if option in (int, float, str) and (beyond or not limits.hold(value)):
        out = _did_you_mean(value, limits.names)
        if isinstance(value, float) and not math.isfinite(value):
            out = "give a finite number"
        elif beyond:
            out = "give a number that float32 can hold, 1e-45 to 3.4e38"
        _report_misfit(node, hint, name, errors, limits, out)
        return INVALID
    return value


def in_float32(value: float) -> bool:
    """Whether a finite number is neither infinite nor zero in float32, the dtype of weights and
    their averages."""
    try:
        return value == 0 or struct.unpack("<f", struct.pack("<f", value))[0] != 0
    except OverflowError:
        return False


def path_problem(text: str) -> str | None:
    """Why no file or folder can have this path; None if one can."""
    if not text:
        return "expected a path, found an empty text: write . for the working directory"
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        return (
            f"this machine knows no home folder {yaml_text(expanded.partition('/')[0])}: write the "
            "path out"
        )
    longest = max((len(part.encode()) for part in expanded.split("/")), default=0)
    if longest > MOST_NAME or len(expanded.encode()) > MOST_PATH:
        return (
            f"{yaml_text(text)} is too long for a path ({MOST_NAME} bytes a name, {MOST_PATH} in "
            "all): name another one"
        )
    return None


def _report_misfit(
    node: Node, hint: Any, name: str, errors: list[ConfigError], limits: Limits, out: str
) -> None:
    message = f"{name}: expected {describe_type(hint, limits)}, found {describe(node.value)}"
    errors.append(ConfigError(node.at, message + (f" ({out})" if out else "")))


def _convert_list(
    node: Node, option: Any, name: str, errors: list[ConfigError], limits: Limits
) -> Any:
    if is_stepwise(option):
        return _convert_stepwise(node, option, name, errors, limits)
    items, args = node.value, get_args(option)
    kind = get_origin(option) or option
    if _has_fixed_length(option):
        inner = list(args)
        if len(items) != len(inner):
            message = (
                f"{name}: expected {describe_type(option, limits)}, found a list of {len(items)}"
            )
            errors.append(ConfigError(node.at, message))
            return INVALID
    else:
        inner = [args[0] if args else Any] * len(items)
    pairs = enumerate(zip(items, inner, strict=True))
    values = [convert(item, hint, f"{name}[{i}]", errors, limits) for i, (item, hint) in pairs]
    return INVALID if INVALID in values else kind(values)


def is_stepwise(option: Any) -> bool:
    """Whether an annotation is a list of changes at steps, such as [[0, 64], [2000, 256]]."""
    args = get_args(option)
    return (
        bool(args)
        and get_origin(args[0]) is tuple
        and args[1:] == (...,)
        and get_args(args[0])[0] is int
    )


def _convert_stepwise(
    node: Node, option: Any, name: str, errors: list[ConfigError], limits: Limits
) -> Any:
    before, hint = len(errors), get_args(get_args(option)[0])[1]
    pairs = []
    for i, pair in enumerate(node.value):
        if not isinstance(pair.value, list) or len(pair.value) != 2:
            message = f"{name}[{i}]: expected [step, value], found {describe(pair.value)}"
            errors.append(ConfigError(pair.at, message))
            continue
        step, value = pair.value
        first = convert(step, int, f"{name}[{i}][0]", errors, Limits(minimum=0))
        pairs.append((first, convert(value, hint, f"{name}[{i}][1]", errors, limits)))
    steps = [step for step, _ in pairs]
    if len(errors) == before and (steps[:1] != [0] or steps != sorted(set(steps))):
        listed = ", ".join(map(str, steps)) or "none"
        errors.append(
            ConfigError(
                node.at, f"{name}: expected steps that begin with 0 and ascend, found {listed}"
            )
        )
    return tuple(pairs) if len(errors) == before else INVALID


def _is_broken(node: Node) -> bool:
    value = node.value
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    return node.broken or any(map(_is_broken, children))


def _options(hint: Any) -> list[Any]:
    """The members of a union, the most specific first: 3 is an integer before it is a float."""
    options = list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]
    return sorted(options, key=lambda option: (option is float, option is Any, option is str))


def _is_supported(hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return all(_is_supported(option) for option in get_args(hint))
    if origin in (list, tuple):
        return all(argument is Ellipsis or _is_supported(argument) for argument in get_args(hint))
    if origin is dict:
        return get_args(hint)[0] in (str, Any) and _is_supported(get_args(hint)[1])
    if is_mapping(hint):
        return True
    return origin is Literal or hint in (
        None,
        type(None),
        bool,
        int,
        float,
        str,
        list,
        tuple,
        dict,
        Any,
    )


def _fits(value: Any, option: Any) -> bool:
    kind = get_origin(option) or option
    if kind is Any:
        return True
    if kind is Literal:
        return any(
            type(value) is type(literal) and value == literal for literal in get_args(option)
        )
    if kind is float:
        return type(value) in (int, float)
    if kind is tuple:
        return isinstance(value, list)
    if is_mapping(kind):
        return isinstance(value, dict)
    return type(value) is (type(None) if kind is None else kind)


def is_mapping(hint: Any) -> TypeGuard[type]:
    """Whether this annotation is a dataclass: a mapping with the keys that the dataclass
    declares."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def describe_type(hint: Any, limits: Limits = NO_LIMITS) -> str:
    """An annotation in words, to follow "expected": "an integer of at least 1, or `epoch`"."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return ", or ".join(
        "null" if option is type(None) else _kind(option, limits) for option in options
    )


def _kind(option: Any, limits: Limits) -> str:
    kind, args = get_origin(option) or option, get_args(option)
    if kind is Literal:
        return ("one of " if len(args) > 1 else "") + any_of(
            [f"`{yaml_text(literal)}`" for literal in args]
        )
    if kind in (int, float):
        return ("an integer" if kind is int else "a number") + limits.words
    if kind is str and limits.names:
        path = f", or the path of a file that ends in {limits.suffix}" if limits.suffix else ""
        return ("one of " if len(limits.names) > 1 else "") + any_of(limits.names) + path
    if is_stepwise(option):
        return (
            "a list of changes [[0, value], [step, value]] with "
            f"{_kind(get_args(args[0])[1], limits)}"
        )
    if kind in (list, tuple):
        items = {bool: "values true or false", int: "integers", float: "numbers", str: "texts"}
        inner = args[0] if args else Any
        words = "mappings" if is_mapping(inner) else items.get(inner, "values")
        count = f"{len(args)} " if _has_fixed_length(option) else ""
        return f"a list of {count}{words}{limits.words}"
    if is_mapping(kind):
        return "a mapping"
    return {bool: "true or false", str: "a text", dict: "a mapping", Any: "any value"}[kind]


def _has_fixed_length(option: Any) -> bool:
    return get_origin(option) is tuple and Ellipsis not in get_args(option)


def _suggest(value: Any, hint: Any) -> str:
    options = _options(hint)
    if isinstance(value, float) and value.is_integer() and int in options:
        return f"write {int(value)}"
    lists = [o for o in options if (get_origin(o) or o) in (list, tuple) and not is_stepwise(o)]
    if lists and isinstance(value, int | float | str) and not _has_fixed_length(lists[0]):
        return f"write [{yaml_text(value)}]"
    if not isinstance(value, str):
        return ""
    boolean = {
        "yes": True,
        "on": True,
        "true": True,
        "no": False,
        "off": False,
        "false": False,
    }.get(value.lower())
    if bool in options and boolean is not None:
        return f"write {yaml_text(boolean)}, without quotes"
    if int in options or float in options:
        number = read_scalar(value.replace("_", "").replace(",", "").replace(" ", ""))
        if type(number) in (int, float):
            return f"write {yaml_text(number)}, without quotes"
    literals = [
        literal
        for option in options
        if get_origin(option) is Literal
        for literal in get_args(option)
    ]
    return _did_you_mean(value, [literal for literal in literals if isinstance(literal, str)])


def _did_you_mean(value: Any, names: Iterable[str]) -> str:
    near = nearest(value, names) if isinstance(value, str) else None
    return f"did you mean {near}?" if near else ""


_LENGTH = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?\Z", re.ASCII)


def seconds(length: str | float) -> float:
    """A duration (`3h50m`, `90s`, `2d` or a number of seconds) in seconds. Raises ValueError: it is
    not a duration."""
    if not isinstance(length, str):
        return float(length)
    match = _LENGTH.match(length.replace(" ", ""))
    if match is None:
        raise ValueError(
            f"{length!r} is no length of time: write it as 3h50m, 90s, 2d, or as a number of "
            "seconds"
        )
    return sum(
        int(count) * unit
        for count, unit in zip(match.groups(), (86400.0, 3600.0, 60.0, 1.0), strict=True)
        if count
    )
