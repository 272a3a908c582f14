"""Keys of a config as fields of a dataclass: the annotation is the type of the value, and
`key(...)` gives its default and its limits.

    class Batch:
        micro_size: int = key(minimum=1, also="micro_batch_size")

`keys_of(Batch)` reads them back. `describe_type` says in words what a key takes.
"""

import dataclasses
import math
import re
import types
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

from meshtrain.errors import any_of, yaml_text
from meshtrain.job.hub import hub_name

# Where the declaration of a key stands in the metadata of its field, which may have more of others.
_DECLARED = "meshtrain.key"
_PLAIN_TYPES = (None, type(None), bool, int, float, str, list, tuple, dict, Any)


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
    hub: bool = False  # ... or a name on the Hugging Face hub
    instead: tuple[str, str] = ("", "")  # values of other frameworks, and the equivalent here

    def hold(self, value: float | str) -> bool:
        """Whether a value is within the limits."""
        if isinstance(value, str):
            is_file = self.suffix is not None and value.endswith(self.suffix)
            is_on_hub = self.hub and hub_name(value) is not None
            return not self.names or value in self.names or is_file or is_on_hub
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
        if not bounds:
            return ""
        preposition = " of " if self.minimum is not None else " "
        return preposition + " and ".join(bounds)


NO_LIMITS = Limits()


def key(default: Any = dataclasses.MISSING, *, doc: str = "", also: str = "", **limits: Any) -> Any:
    """A field of a section: its default (without one the key is required) and its `Limits`.

    Args:
        doc: the field's documentation, if it is not the text below the field.
        also: names of the key in other frameworks, for "did you mean".
    """
    declared = {"doc": doc, "limits": Limits(**limits), "also": tuple(also.split())}
    return dataclasses.field(default=default, metadata={_DECLARED: declared})


@dataclass(frozen=True)
class Key:
    """A key of a section, as read from a field of its dataclass."""

    name: str
    hint: Any  # the annotation
    default: Any  # dataclasses.MISSING if the key is required
    limits: Limits = NO_LIMITS
    doc: str = ""
    also: tuple[str, ...] = ()

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
        hint = hints[field.name]
        if not _is_supported(hint):
            raise TypeError(
                f"{cls.__qualname__}.{field.name} has the type {hint}, which no YAML value has: "
                "use bool, int, float, str, Literal, list, tuple, dict, Any, or one of them | None"
            )
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        declared = field.metadata.get(_DECLARED, {})
        keys[field.name] = Key(field.name, hint, default, **declared)
    return keys


def _is_supported(hint: Any) -> bool:
    """Whether a value of YAML can have this type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_union(hint):
        return all(_is_supported(option) for option in arguments)
    if origin in (list, tuple):
        return all(argument is Ellipsis or _is_supported(argument) for argument in arguments)
    if origin is dict:
        return arguments[0] in (str, int, Any) and _is_supported(arguments[1])
    return origin is Literal or is_mapping(hint) or hint in _PLAIN_TYPES


def is_union(hint: Any) -> bool:
    """Whether an annotation is one of several types, such as `int | None`."""
    return get_origin(hint) in (Union, types.UnionType)


def is_mapping(hint: Any) -> TypeGuard[type]:
    """Whether this annotation is a dataclass: a mapping with the keys that the dataclass
    declares."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def is_stepwise(hint: Any) -> bool:
    """Whether an annotation is a list of changes at steps, such as [[0, 64], [2000, 256]]."""
    arguments = get_args(hint)
    if not arguments or arguments[1:] != (...,) or get_origin(arguments[0]) is not tuple:
        return False
    return get_args(arguments[0])[0] is int


def stepwise_type(hint: Any) -> Any:
    """The type of the values of a list of changes at steps: `tuple[tuple[int, X], ...]` -> X."""
    pair = get_args(hint)[0]
    return get_args(pair)[1]


def has_fixed_length(hint: Any) -> bool:
    """Whether an annotation is a tuple of so many values, such as `tuple[float, float]`."""
    return get_origin(hint) is tuple and Ellipsis not in get_args(hint)


def describe_type(hint: Any, limits: Limits = NO_LIMITS) -> str:
    """An annotation in words, to follow "expected": "an integer of at least 1, or `epoch`"."""
    options = get_args(hint) if is_union(hint) else (hint,)
    return ", or ".join(_describe_option(option, limits) for option in options)


def _describe_option(option: Any, limits: Limits) -> str:
    """One of the types of a union, in words."""
    kind, arguments = get_origin(option) or option, get_args(option)
    if kind is Literal:
        return _one_of([f"`{yaml_text(literal)}`" for literal in arguments])
    if kind is int:
        return f"an integer{limits.words}"
    if kind is float:
        return f"a number{limits.words}"
    if kind is str and limits.names:
        names = _one_of(limits.names)
        if limits.suffix is None:
            return names
        on_hub = ", or a name on the hub, such as org/name" if limits.hub else ""
        return f"{names}, or the path of a file that ends in {limits.suffix}{on_hub}"
    if is_stepwise(option):
        value = _describe_option(stepwise_type(option), limits)
        return f"a list of changes [[0, value], [step, value]] with {value}"
    if kind in (list, tuple):
        return _describe_list(option, limits)
    if is_mapping(kind):
        return "a mapping"
    words = {
        bool: "true or false",
        str: "a text",
        dict: "a mapping",
        type(None): "null",
        Any: "any value",
    }
    return words[kind]


def _describe_list(option: Any, limits: Limits) -> str:
    arguments = get_args(option)
    inner = arguments[0] if arguments else Any
    if is_mapping(inner):
        items = "mappings"
    else:
        words = {bool: "values true or false", int: "integers", float: "numbers", str: "texts"}
        items = words.get(inner, "values")
    count = f"{len(arguments)} " if has_fixed_length(option) else ""
    return f"a list of {count}{items}{limits.words}"


def _one_of(names: list[str] | tuple[str, ...]) -> str:
    return f"one of {any_of(names)}" if len(names) > 1 else any_of(names)


_DURATION = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?\Z", re.ASCII)
_UNITS_S = (86400.0, 3600.0, 60.0, 1.0)  # of the four groups: days, hours, minutes, seconds


def seconds(length: str | float) -> float:
    """A duration (`3h50m`, `90s`, `2d` or a number of seconds) in seconds. Raises ValueError: it is
    not a duration."""
    if not isinstance(length, str):
        return float(length)
    match = _DURATION.match(length.replace(" ", ""))
    if match is None:
        raise ValueError(
            f"{length!r} is no length of time: write it as 3h50m, 90s, 2d, or as a number of "
            "seconds"
        )
    total = 0.0
    for count, unit in zip(match.groups(), _UNITS_S, strict=True):
        if count is not None:
            total += int(count) * unit
    return total
