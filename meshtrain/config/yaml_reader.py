"""Reads YAML into plain nodes that know their line, and applies overrides from the command line to
them.

PyYAML's own loaders follow YAML 1.1 (`1e-3` is a string, `no` is False), let the last of two equal
keys win, and lose the position of a value. So only its parser is used, and plain scalars are read
by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema). Tags, anchors,
aliases and merge keys are refused.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshtrain.config.errors import ConfigError, Place
from meshtrain.config.layout_advice import add_axis
from meshtrain.errors import InputError, shorten, yaml_text

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_DIGITS = 100  # of an integer

# The scalars of YAML 1.2's core schema, in the order in which it tries them.
_NULL = re.compile(r"(null|Null|NULL|~|)\Z")
_BOOL = re.compile(r"(true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")

# Fragments of PyYAML's messages, and how to fix the usual cause.
_HINTS = (
    ("'\\t'", "indent with spaces, not with tabs"),
    (
        "mapping values are not allowed here",
        "check the indentation, and put quotes around a value that holds ': '",
    ),
    ("could not find expected ':'", "a key is followed by a colon and a space"),
    ("found character '@'", "put quotes around a value that starts with @"),
    ("found character '`'", "put quotes around a value that starts with `"),
    ("found character '%'", "put quotes around a value that starts with %"),
    ("expected <block end>", "lines of one section start in the same column"),
    ("expected ',' or '}'", "separate the keys with commas and close the brace"),
    ("expected ',' or ']'", "separate the items with commas and close the bracket"),
    ("while scanning a quoted scalar", "close the quotes"),
)


@dataclass
class Node:
    """A value of the config: a scalar, a list of nodes, or a mapping of nodes."""

    value: Any  # None | bool | int | float | str | list[Node] | dict[str, Node]
    at: Place
    key_at: Place  # the place of its key; the same as `at` without a key
    broken: bool = False  # already reported: report nothing more about it

    def get(self, *path: str) -> "Node | None":
        """The node under the keys of a path below this one, or None."""
        node: Node | None = self
        for key in path:
            if node is None or not isinstance(node.value, dict):
                return None
            node = node.value.get(key)
        return node

    @property
    def plain(self) -> Any:
        """The value as plain Python lists, dicts and scalars. (Nodes are nested at most `MAX_DEPTH`
        deep.)"""
        if isinstance(self.value, dict):
            return {key: node.plain for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain for node in self.value]
        return self.value


def read_scalar(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar in YAML 1.2."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        # No key needs a longer integer, and Python refuses to read integers of thousands of digits.
        if len(text) > MAX_DIGITS:
            return text
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base)
    if _FLOAT.match(text):
        return float(text)
    if _INFINITE.match(text):
        return float(text.replace(".", ""))
    return text


def read_file(path: Path, name: str, errors: list[ConfigError]) -> Node | None:
    """The root of a config file, always a mapping; None if it cannot be read. `name`: the file's
    name in errors."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        message = (
            f"a config is at most {MAX_BYTES:,} bytes and this file has {size:,}: is it another "
            "file?"
        )
        errors.append(ConfigError(Place.in_file(name, 1), message))
        return None

    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        message = (
            f"expected UTF-8, found the byte 0x{data[error.start]:02x}: save the file as UTF-8"
        )
        errors.append(ConfigError(Place.in_file(name, line), message))
        return None

    count_before = len(errors)
    root = read_text(text, lambda line, column: Place.in_file(name, line, column), errors)
    if root is not None and isinstance(root.value, dict):
        return root

    # It may be YAML and no mapping: a list, a text, or nothing at all.
    if len(errors) == count_before:
        place = Place.in_file(name, 1) if root is None else root.at
        content = "nothing (the file is empty)"
        if root is not None and root.value is not None:
            content = describe(root.value)
        message = f"expected sections such as `model:` and `train:`, found {content}"
        errors.append(ConfigError(place, message))
    return None


def describe(value: Any) -> str:
    """A value in the words of "expected ..., found ...". Takes values of nodes and plain values."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        return f"the text {yaml_text(value)!r}" if value else "an empty text"
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return yaml_text(value)
    kind = "integer" if isinstance(value, int) else "number"
    return f"the {kind} {yaml_text(value)}"


def read_text(
    text: str, place: Callable[[int, int], Place], errors: list[ConfigError]
) -> Node | None:
    """The root node of a YAML text; None if it is empty or cannot be parsed. `place`: (line, column
    or 0) -> Place."""
    try:
        events = yaml.parse(text, Loader=yaml.SafeLoader)
        return _Composer(place, errors).compose(events)
    except yaml.MarkedYAMLError as error:
        problem = " ".join(filter(None, (error.context, error.problem)))
        mark = error.problem_mark or error.context_mark
        location = place(mark.line + 1, mark.column + 1) if mark else place(1, 0)
        message = f"this is not YAML: {problem}{_hint_for(problem)}"
    except yaml.reader.ReaderError as error:
        location = place(text.count("\n", 0, error.position) + 1, 0)
        message = f"the character U+{error.character:04X} is not allowed in YAML: take it out"
    except (ValueError, OverflowError) as error:
        # PyYAML's scanner raises these at an escape such as "\\UFFFFFFFF".
        location = place(1, 0)
        message = f"this is not YAML: {error}"
    errors.append(ConfigError(location, message))
    return None


def _hint_for(problem: str) -> str:
    """` (how to fix it)` for the usual cause of one of PyYAML's messages; empty without one."""
    for fragment, hint in _HINTS:
        if fragment in problem:
            return f" ({hint})"
    return ""


def parse_yaml(text: str | bytes) -> Any:
    """The plain value of a YAML text that somebody else wrote, by the rules of a config.

    Raises InputError, the reason as a part of a sentence: it is too long, not UTF-8, not YAML, too
    deeply nested, or has tags or anchors.
    """
    if len(text) > MAX_BYTES:
        raise InputError(f"it has {len(text):,} bytes, and at most {MAX_BYTES:,} are read")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(str(error)) from None
    text = text.removeprefix("\ufeff")  # a byte order mark

    errors: list[ConfigError] = []
    root = read_text(text, lambda line, column: Place.in_file("it", line, column), errors)
    if errors:
        raise InputError(str(errors[0]))
    return None if root is None else root.plain


@dataclass
class _OpenCollection:
    """A list or a mapping whose end has not come yet."""

    node: Node
    # Of a mapping: the key whose value comes next, and its place. The key None: its value is to be
    # ignored.
    pending: tuple[str | None, Place] | None = None


class _Composer:
    """Builds nodes from PyYAML's events, with a stack of its own: deep nesting cannot exhaust
    Python's recursion."""

    def __init__(self, place: Callable[[int, int], Place], errors: list[ConfigError]) -> None:
        self.place = place
        self.errors = errors
        self.open: list[_OpenCollection] = []  # outermost first
        self.root: Node | None = None
        self.aliases_refused = False

    def compose(self, events: Iterator[Any]) -> Node | None:
        documents = 0
        for event in events:
            at = self.place(event.start_mark.line + 1, 0)
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.report(
                        at,
                        "a second document starts here: a config is one document; take the `---` "
                        "away",
                    )
                    return self.root
            elif isinstance(event, yaml.NodeEvent):
                if len(self.open) >= MAX_DEPTH:
                    self.report(
                        at, f"nested more than {MAX_DEPTH} deep: no key of a config needs that"
                    )
                    return None
                self.add(event, at)
            elif isinstance(event, yaml.CollectionEndEvent):
                self.open.pop()
        return self.root

    def report(self, at: Place, message: str) -> None:
        self.errors.append(ConfigError(at, message))

    def add(self, event: Any, at: Place) -> None:
        """Adds the node of an event to the innermost open collection: to a list as an item, to a
        mapping as a key, or as the value of the key before it."""
        node = Node(self.value(event), at, at, broken=self.refused(event, at))
        if not self.open:
            self.root = node
        elif isinstance(self.open[-1].node.value, list):
            self.open[-1].node.value.append(node)
        else:
            self.add_to_mapping(self.open[-1], event, node)
        if isinstance(event, yaml.CollectionStartEvent):
            self.open.append(_OpenCollection(node))

    def add_to_mapping(self, mapping: _OpenCollection, event: Any, node: Node) -> None:
        if mapping.pending is None:
            mapping.pending = self.key(event, node, mapping.node), node.at
            return
        key, node.key_at = mapping.pending
        mapping.pending = None
        if key is not None:
            mapping.node.value[key] = node

    def value(self, event: Any) -> Any:
        if isinstance(event, yaml.ScalarEvent):
            return read_scalar(event.value) if event.implicit[0] else event.value
        return {} if isinstance(event, yaml.MappingStartEvent) else []

    def refused(self, event: Any, at: Place) -> bool:
        """Whether a config may not hold this node; reports the reason."""
        # PyYAML stores the name of an anchor and that of an alias here.
        if event.anchor is not None:
            if not self.aliases_refused:
                self.aliases_refused = True
                self.report(
                    at,
                    "anchors (&name) and aliases (*name) are refused: write the value out where "
                    "it is used",
                )
            return True
        if getattr(event, "tag", None) is not None:
            tag = shorten(event.tag.replace("tag:yaml.org,2002:", "!!"))
            self.report(
                at, f"tags such as {tag} are refused: leave it out, the key decides the type"
            )
            return True
        if not isinstance(event, yaml.ScalarEvent):
            return False
        if any("\ud800" <= character <= "\udfff" for character in event.value):
            self.report(
                at, "an escape such as \\ud800 stands for no character: write the character itself"
            )
            return True
        if "\0" in event.value:
            self.report(at, "the character U+0000 is in no name and no path: take the escape out")
            return True
        return False

    def key(self, event: Any, node: Node, parent: Node) -> str | None:
        """The name of a mapping's key, or None if its value is to be ignored."""
        if node.broken:
            return None
        name = node.value
        if type(name) is int:
            name = str(name)  # as JSON has it
        if not isinstance(name, str):
            self.report(
                node.at,
                f"a key is a name; found {describe(name)}: put quotes around it, or take it out",
            )
        elif name == "<<" and event.implicit[0]:
            self.report(node.at, "merge keys (<<) are refused: write the keys out")
        elif name in parent.value:
            first = parent.value[name]
            first.broken = True  # it is unclear which of the two is meant
            self.report(
                node.at,
                f"the key {name} is given twice, first at {first.key_at}: take one of them away",
            )
        else:
            return name
        return None


def apply_overrides(root: Node, overrides: Sequence[str], errors: list[ConfigError]) -> list[str]:
    """Applies overrides `key.path=value` to the file's nodes, in order: the last one wins. Values
    are YAML.

    Returns a line for people per override: its value, and what it replaced.
    """
    applied = []
    for number, text in enumerate(overrides, start=1):
        place = Place.on_command_line(number, text)
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys) or path.startswith("-"):
            message = (
                "an override reads section.key=value, without dashes in front: for example "
                "train.steps=50"
            )
            errors.append(ConfigError(place, message))
            continue

        count_before = len(errors)
        node = _read_value(value, place, errors)
        replaced = _put(root, keys, node, errors)
        if len(errors) > count_before:
            continue

        if replaced is None:
            origin = "the file does not give it"
        elif replaced.at.override:
            origin = f"in place of {yaml_text(replaced.plain)} from earlier on the {replaced.at}"
        else:
            origin = f"the file says {yaml_text(replaced.plain)} at {replaced.at}"
        applied.append(f"{'.'.join(keys)} = {yaml_text(node.plain)} (command line; {origin})")
    return applied


def _read_value(text: str, place: Place, errors: list[ConfigError]) -> Node:
    count_before = len(errors)
    node = read_text(text, lambda line, column: place, errors)
    if node is not None:
        return node
    # An empty text is the value null.
    return Node(None, place, place, broken=len(errors) > count_before)


def _put(root: Node, keys: list[str], node: Node, errors: list[ConfigError]) -> Node | None:
    """Sets the node under `keys`, creating sections on the way; returns the node it replaces, or
    None."""
    parent = root
    for depth, key in enumerate(keys[:-1], start=1):
        child = parent.value.get(key)
        if child is None or child.value is None:
            child = Node(_default_keys(keys[:depth], node.at), node.at, node.at)
            parent.value[key] = child
        if not isinstance(child.value, dict):
            if not child.broken:
                name = ".".join(keys[:depth])
                message = (
                    f"{name} is {describe(child.value)} at {child.at} and has no keys: override "
                    f"{name} itself"
                )
                errors.append(ConfigError(node.at, message))
            return None
        parent = child

    replaced = parent.value.get(keys[-1])
    if keys[0] == "layout" and len(keys) == 2:
        parent.value = add_axis(parent.value, keys[1], node)
    else:
        parent.value[keys[-1]] = node
    return replaced


def _default_keys(path: Sequence[str], at: Place) -> dict[str, Node]:
    """The keys of a section that the file does not have. A file without a layout means all
    processes in dp_shard, which an override of another axis must not change."""
    if list(path) == ["layout"]:
        return {"dp_shard": Node(-1, at, at)}
    return {}


def write(value: Any) -> str:
    """YAML that `read_text` and YAML 1.1 readers read as the same value. Lists are written on one
    line."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=120,
    )


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # `read_text` refuses aliases


_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
for _kind in (list, tuple):
    _Dumper.add_representer(
        _kind,
        lambda dumper, items: dumper.represent_sequence(
            "tag:yaml.org,2002:seq", items, flow_style=True
        ),
    )
