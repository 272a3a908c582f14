"""Converts the nodes of a config into the values of dataclass fields, and reports what does not
fit.

The type of a value is the annotation of its field, its limits are those of `keys.key`. The only
coercion is from integers to floats.
"""

import dataclasses
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from meshtrain.config.errors import ConfigError, nearest
from meshtrain.config.keys import (
    NO_LIMITS,
    Key,
    Limits,
    describe_type,
    has_fixed_length,
    is_mapping,
    is_stepwise,
    is_union,
    keys_of,
    stepwise_type,
)
from meshtrain.config.removed import REMOVED_VALUES, what_replaces
from meshtrain.config.yaml_reader import Node, describe, read_scalar
from meshtrain.errors import yaml_text


class _Invalid(Enum):
    INVALID = "INVALID"


INVALID = _Invalid.INVALID  # stands for a value that has been reported as wrong
MOST_NAME, MOST_PATH = 255, 4095  # bytes of a name and of a path, on Linux


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
    is_section = node.value is None or isinstance(node.value, dict)
    if not is_section and not node.broken:
        message = (
            f"{section} is a section: expected keys such as `{next(iter(keys))}:`, found "
            f"{describe(node.value)}"
        )
        errors.append(ConfigError(node.at, message))
        return dict.fromkeys(keys, INVALID)

    children: dict[str, Node] = node.value if isinstance(node.value, dict) else {}
    misspelt = set()
    for name, child in children.items():
        if name in keys:
            continue
        message = describe_unknown_key(name, section, keys, elsewhere)
        errors.append(ConfigError(child.key_at, message))
        if what_replaces(section, name) is None:
            misspelt.add(meant_key(name, keys))
    if node.broken:
        return dict.fromkeys(keys, INVALID)

    values: dict[str, Any] = {}
    for name, key in keys.items():
        full_name = f"{section}.{name}"
        if name in children:
            child = children[name]
            values[name] = convert(child, key.hint, full_name, errors, key.limits, key.default)
        elif name in misspelt:
            # Its value is known to be another one than the default: no rule may judge that.
            values[name] = INVALID
        elif key.required:
            message = f"{full_name} is missing: give {describe_type(key.hint, key.limits)}"
            errors.append(ConfigError(node.key_at, message))
            values[name] = INVALID
        else:
            values[name] = key.default
    return values


def meant_key(name: str, keys: dict[str, Key]) -> str | None:
    """The key that an unknown name most likely means: one with that alias (`also`), else the
    nearest spelling."""
    for key in keys.values():
        if name in key.also:
            return key.name
    return nearest(name, keys)


def describe_unknown_key(
    name: str, section: str, keys: dict[str, Key], elsewhere: dict[str, str]
) -> str:
    """The sentence for a key that a section does not have, with the one that was meant."""
    full_name = yaml_text(f"{section}.{name}")
    replacement = what_replaces(section, name)
    if replacement is not None:
        return f"{full_name} is no longer a key: {replacement}"

    unknown = f"there is no key {full_name}"
    if ":" in name:
        with_space = name.replace(":", ": ", 1)
        return f"{unknown}: a colon needs a space after it, as in `{with_space}`"
    if "capacity" in name:
        return (
            f"{unknown}: which tokens a capacity drops depends on which others compete, so on the "
            "layout, and here no token is dropped: take it away"
        )
    suggestion = meant_key(name, keys) or elsewhere.get(name)
    if suggestion:
        return f"{unknown}: did you mean {suggestion}?"
    return f"{unknown}: the keys of {section} are {', '.join(keys)}"


@dataclass(frozen=True)
class _Target:
    """Where a value is to go: a key, or a place in a list of one."""

    name: str  # as errors print it, such as `optimizer.groups[0].lr`
    hint: Any
    limits: Limits
    errors: list[ConfigError]

    def report(self, node: Node, problem: str) -> None:
        self.errors.append(ConfigError(node.at, f"{self.name}: {problem}"))

    def report_misfit(self, node: Node, advice: str) -> None:
        """Reports that a value is not of the type or not within the limits. `advice` may be
        empty."""
        expected = describe_type(self.hint, self.limits)
        problem = f"expected {expected}, found {describe(node.value)}"
        self.report(node, f"{problem} ({advice})" if advice else problem)


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

    target = _Target(name, hint, limits, errors)
    for option in _options(hint):
        if _fits(node.value, option):
            return _convert_to(node, option, target)

    advice = _suggest(node.value, hint)
    foreign_values, equivalent = limits.instead
    removed_values = REMOVED_VALUES.get(name, {})
    if isinstance(node.value, str) and node.value in removed_values:
        advice = removed_values[node.value]
    elif node.value in foreign_values.split():
        advice = equivalent
    if not advice and default not in (dataclasses.MISSING, None):
        advice = f"the default is {yaml_text(default)}"
    target.report_misfit(node, advice)
    return INVALID


def _options(hint: Any) -> list[Any]:
    """The members of a union, the most specific first: 3 is an integer before it is a float."""
    options = list(get_args(hint)) if is_union(hint) else [hint]
    return sorted(options, key=lambda option: (option is float, option is Any, option is str))


def _fits(value: Any, option: Any) -> bool:
    """Whether a value has the type of an option, whatever it contains. `type(...)`, since a bool is
    an instance of int."""
    kind = get_origin(option) or option
    if kind is Any:
        return True
    if kind is Literal:
        literals = [(type(literal), literal) for literal in get_args(option)]
        return (type(value), value) in literals
    if kind is float:
        return type(value) in (int, float)
    if kind is tuple:
        return isinstance(value, list)
    if is_mapping(kind):
        return isinstance(value, dict)
    return type(value) is (type(None) if kind is None else kind)


def _convert_to(node: Node, option: Any, target: _Target) -> Any:
    """Converts a value to one of the types of its key, which it fits."""
    if option is Any:
        return INVALID if _is_broken(node) else node.plain
    if isinstance(node.value, list):
        return _convert_list(node, option, target)
    if is_mapping(option):
        values = read_section(node, target.name, keys_of(option), {}, target.errors)
        return INVALID if INVALID in values.values() else option(**values)
    if isinstance(node.value, dict):
        return _convert_dict(node, option, target)
    return _convert_scalar(node, option, target)


def _convert_scalar(node: Node, option: Any, target: _Target) -> Any:
    value = float(node.value) if option is float else node.value
    limits = target.limits

    if limits.path and isinstance(value, str):
        problem = path_problem(value)
        if problem is not None:
            target.report(node, problem)
            return INVALID

    if option not in (int, float, str):
        return value

    # Weights and their averages are float32, so what the optimizer multiplies them by must be too.
    of_optimizer = target.name.startswith("optimizer.") and isinstance(value, float)
    fits_float32 = not of_optimizer or in_float32(value)
    if fits_float32 and limits.hold(value):
        return value

    if isinstance(value, float) and not math.isfinite(value):
        advice = "give a finite number"
    elif not fits_float32:
        advice = "give a number that float32 can hold, 1e-45 to 3.4e38"
    else:
        advice = _did_you_mean(value, limits.names)
    target.report_misfit(node, advice)
    return INVALID


def in_float32(value: float) -> bool:
    """Whether a finite number is neither infinite nor zero in float32, the dtype of weights and
    their averages."""
    try:
        rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return False
    return rounded != 0 or value == 0


def path_problem(text: str) -> str | None:
    """Why no file or folder can have this path; None if one can."""
    if not text:
        return "expected a path, found an empty text: write . for the working directory"
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        home = yaml_text(expanded.partition("/")[0])
        return f"this machine knows no home folder {home}: write the path out"
    longest_name = max(len(part.encode()) for part in expanded.split("/"))
    if longest_name > MOST_NAME or len(expanded.encode()) > MOST_PATH:
        return (
            f"{yaml_text(text)} is too long for a path ({MOST_NAME} bytes a name, {MOST_PATH} in "
            "all): name another one"
        )
    return None


def _convert_dict(node: Node, option: Any, target: _Target) -> Any:
    """A mapping whose keys are free, or integers, all values of one type."""
    key_hint, hint = get_args(option) or (str, Any)
    values = {}
    for name, item in node.value.items():
        key = int(name) if key_hint is int and name.isdecimal() else name
        if key_hint is int and not isinstance(key, int):
            target.report(item, f"expected keys that are integers, found {yaml_text(name)}")
            return INVALID
        values[key] = convert(item, hint, f"{target.name}.{name}", target.errors, target.limits)
    return INVALID if INVALID in values.values() else values


def _convert_list(node: Node, option: Any, target: _Target) -> Any:
    if is_stepwise(option):
        return _convert_stepwise(node, option, target)

    items, arguments = node.value, get_args(option)
    if has_fixed_length(option):
        hints = list(arguments)
        if len(items) != len(hints):
            expected = describe_type(option, target.limits)
            target.report(node, f"expected {expected}, found a list of {len(items)}")
            return INVALID
    else:
        hints = [arguments[0] if arguments else Any] * len(items)

    values = []
    for i, (item, hint) in enumerate(zip(items, hints, strict=True)):
        name = f"{target.name}[{i}]"
        values.append(convert(item, hint, name, target.errors, target.limits))
    if INVALID in values:
        return INVALID
    kind = get_origin(option) or option
    return kind(values)


def _convert_stepwise(node: Node, option: Any, target: _Target) -> Any:
    """A list of changes, [[step, value], ...]."""
    name, errors = target.name, target.errors
    hint = stepwise_type(option)
    count_before = len(errors)

    changes = []
    for i, pair in enumerate(node.value):
        if not isinstance(pair.value, list) or len(pair.value) != 2:
            message = f"{name}[{i}]: expected [step, value], found {describe(pair.value)}"
            errors.append(ConfigError(pair.at, message))
            continue
        step_node, value_node = pair.value
        step = convert(step_node, int, f"{name}[{i}][0]", errors, Limits(minimum=0))
        value = convert(value_node, hint, f"{name}[{i}][1]", errors, target.limits)
        changes.append((step, value))
    if len(errors) > count_before:
        return INVALID

    steps = [step for step, _ in changes]
    ascends = steps == sorted(set(steps))
    if steps[:1] != [0] or not ascends:
        listed = ", ".join(map(str, steps)) or "none"
        target.report(node, f"expected steps that begin with 0 and ascend, found {listed}")
        return INVALID
    return tuple(changes)


def _is_broken(node: Node) -> bool:
    """Whether a node or one below it has been reported as wrong."""
    if isinstance(node.value, dict):
        children = list(node.value.values())
    elif isinstance(node.value, list):
        children = node.value
    else:
        children = []
    return node.broken or any(_is_broken(child) for child in children)


_BOOLEANS_OF_YAML_1_1 = {
    "yes": True,
    "on": True,
    "true": True,
    "no": False,
    "off": False,
    "false": False,
}


def _suggest(value: Any, hint: Any) -> str:
    """What was probably meant by a value of the wrong type; empty if nothing suggests itself."""
    options = _options(hint)
    if isinstance(value, float) and value.is_integer() and int in options:
        return f"write {int(value)}"

    if isinstance(value, int | float | str):
        lists = [option for option in options if (get_origin(option) or option) in (list, tuple)]
        plain_lists = [option for option in lists if not is_stepwise(option)]
        if plain_lists and not has_fixed_length(plain_lists[0]):
            return f"write [{yaml_text(value)}]"

    if not isinstance(value, str):
        return ""

    boolean = _BOOLEANS_OF_YAML_1_1.get(value.lower())
    if bool in options and boolean is not None:
        return f"write {yaml_text(boolean)}, without quotes"

    if int in options or float in options:
        number = read_scalar(value.replace("_", "").replace(",", "").replace(" ", ""))
        if type(number) in (int, float):
            return f"write {yaml_text(number)}, without quotes"

    names = []
    for option in options:
        if get_origin(option) is Literal:
            names += [literal for literal in get_args(option) if isinstance(literal, str)]
    return _did_you_mean(value, names)


def _did_you_mean(value: Any, names: Iterable[str]) -> str:
    near = nearest(value, names) if isinstance(value, str) else None
    return f"did you mean {near}?" if near else ""
