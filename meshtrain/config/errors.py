"""Errors of a config, each with its place, reported all together.

Errors are collected in a list that is passed along; only `Config.load` raises them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from meshtrain.errors import InputError, plural, shorten


@dataclass(frozen=True, order=True)
class Place:
    """A line of the file, or an override on the command line. Places sort in reading order, the
    file first."""

    override: int  # 0: in the file; n: the nth override on the command line
    line: int  # from 1; 0 on the command line
    column: int  # from 1; 0 if the line suffices
    text: str = field(compare=False)

    @classmethod
    def in_file(cls, file: str, line: int, column: int = 0) -> "Place":
        text = f"{file}:{line}:{column}" if column else f"{file}:{line}"
        return cls(0, line, column, text)

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


class ConfigErrors(InputError):  # noqa: N818 plural: it holds several errors
    """All errors of a config. `str()` is the block to print: a count, then one line per error."""

    def __init__(self, file: str, errors: Iterable[ConfigError]) -> None:
        self.file = file
        self.errors = sorted(errors)
        head = f"{file}: {plural(len(self.errors), 'error')}"
        super().__init__("\n".join([head, *map(str, self.errors)]))

    def __reduce__(self) -> tuple[Any, ...]:  # pickled when a worker process raises it
        return type(self), (self.file, self.errors)
