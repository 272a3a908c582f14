"""What is wrong with a config: each error with its place, all of them together.

Errors are collected in a list that is passed along; only `Config.load` raises.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from meshtrain.errors import InputError, plural


@dataclass(frozen=True, order=True)
class Place:
    """A line of the file, or an override on the command line. Places sort as a person reads: the file comes first."""

    override: int  # 0: in the file; n: the nth override on the command line
    line: int  # from 1; 0 on the command line
    column: int  # from 1; 0 where the line says enough
    text: str = field(compare=False)

    @classmethod
    def in_file(cls, file: str, line: int, column: int = 0) -> "Place":
        return cls(0, line, column, f"{file}:{line}" + (f":{column}" if column else ""))

    @classmethod
    def on_command_line(cls, number: int, override: str) -> "Place":
        return cls(number, 0, 0, f"command line: {shorten(override)}")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, order=True)
class ConfigError:
    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class ConfigErrors(InputError):  # noqa: N818 it is several
    """Everything that is wrong with a config. `str()` is the block to print: a count, then one line per error."""

    def __init__(self, file: str, errors: Iterable[ConfigError]) -> None:
        self.file = file
        self.errors = sorted(errors)
        super().__init__("\n".join([f"{file}: {plural(len(self.errors), 'error')}", *map(str, self.errors)]))

    def __reduce__(self) -> tuple[Any, ...]:  # a worker process may hand it over
        return type(self), (self.file, self.errors)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one most likely means, or None."""
    plain = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    match = difflib.get_close_matches(name.lower().replace("-", "_"), plain, n=1, cutoff=0.6)
    return plain[match[0]] if match else None


def yaml_text(value: Any) -> str:
    """A value as it stands in YAML, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml_text(item)}" for key, item in value.items()) + "}"
    return shorten(str(value)) if value != "" else '""'


def shorten(text: str, most: int = 100) -> str:
    """Text on one line, cut where it is longer than a person wants to read in a message."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
