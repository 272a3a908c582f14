"""Errors that the user can fix, and how messages format lists, ranges and sizes. Pure."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)
V = TypeVar("V")


INPUT_STATUS = 2  # the exit status where the user's input is wrong


class InputError(ValueError):
    """The user's input is wrong: a config, a data file, a layout. The process ends with exit status
    2.

    The message says what was expected, what was found, where, and what would work.
    """


class AgreedError(InputError):
    """Wrong input that every rank detects, with the same message: all of them raise it, and it is
    printed once."""


class DamagedError(InputError):
    """A checkpoint differs from what was written: `file` is missing, truncated or changed, in
    `tensor` if known."""

    def __init__(self, file: Path, problem: str, tensor: str | None = None) -> None:
        self.file = file
        self.problem = problem
        self.tensor = tensor
        place = f"{file}" if tensor is None else f"{file}: {tensor}"
        super().__init__(f"{place}: {problem}")


class MissingError(DamagedError):
    """A file that a checkpoint must have is not there, as this host sees it."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, "is missing")


class UnreadableError(OSError):
    """A file cannot be read at present, which says nothing about its contents."""

    def __init__(self, file: object, reason: str | None, tensor: str | None = None) -> None:
        self.file = Path(str(file))
        self.reason = reason or "unknown error"
        self.tensor = tensor
        super().__init__(f"cannot read {file}: {self.reason}")


class TrainingError(RuntimeError):
    """The run cannot continue, and every rank detects this in the same step. The process ends with
    exit status 1."""


class DiskError(TrainingError):
    """A disk or a file server of a host fails, or is full: the same command may go on later, with
    nothing changed."""


class StartError(TimeoutError):
    """Not all ranks of a job have come, or one does not reach the others. The process ends with
    exit status 1.

    `follows`: another process has ended before, and says why.
    """

    def __init__(self, text: str, *, follows: bool = False) -> None:
        self.follows = follows
        super().__init__(text)


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns an OSError into an InputError: the user has named a file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def join_some(items: Sequence[str], most: int = 4) -> str:
    """`a, b, c, d and 12 more`."""
    text = ", ".join(items[:most])
    if len(items) > most:
        text += f" and {len(items) - most} more"
    return text


def any_of(names: Sequence[str], word: str = "or") -> str:
    """`a, b or c`."""
    if len(names) < 2:
        return "".join(names)
    *others, last = names
    return f"{', '.join(others)} {word} {last}"


def yaml_text(value: Any) -> str:
    """A value as YAML on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        items = [yaml_text(item) for item in value]
        return f"[{', '.join(items)}]"
    if isinstance(value, dict):
        items = [f"{key}: {yaml_text(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if value == "":
        return '""'
    return shorten(str(value))


def shorten(text: str) -> str:
    """Text on one line, truncated to 100 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


def plural(count: int, noun: str) -> str:
    """`1 stage`, `1,024 stages`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def ranges(numbers: Iterable[int]) -> list[str]:
    """`[0, 1, 2, 8]` as `["0-2", "8"]`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = []
    for run in runs:
        first = run[0]
        last = run[-1]
        texts.append(f"{first}-{last}" if last > first else f"{first}")
    return texts


def group_values(pairs: Iterable[tuple[T, V]]) -> dict[T, list[V]]:
    """The values of each key; keys and values keep the order of the pairs."""
    groups: dict[T, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def flat_items(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"optimizer": {"lr": 1e-3}}` as `("optimizer.lr", 1e-3)`: each value in nested mappings."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def fold_names(items: Iterable[tuple[str, T]]) -> list[tuple[str, int, T]]:
    """(name, number of names it stands for, value). Names that differ only in numbers and have
    equal values become one, with the numbers in braces: `layers.{0-3}.weight`."""
    lines = []
    for name, value in items:
        words = tuple(name.split("."))
        lines.append(_Names(words, count=1, value=value))
    most_words = max((len(line.words) for line in lines), default=0)

    # Lines that differ in a number at one place become one, which may become one with others at the
    # next place.
    for place in range(most_words):
        alike = group_values((line.but_for_number(place), line) for line in lines)
        lines = [_folded(group, place) for group in alike.values()]
    return [(".".join(line.words), line.count, line.value) for line in lines]


@dataclass(frozen=True)
class _Names(Generic[T]):
    """Names of which `fold_names` makes one line."""

    words: tuple[str, ...]  # between the dots
    count: int  # of names
    value: T

    def but_for_number(self, place: int) -> Hashable:
        """Equal for lines that may become one."""
        words = self.words
        if place < len(words) and words[place].isdecimal():
            words = _with_word(words, place, "")
        return words, self.value


def _folded(group: Sequence[_Names[T]], place: int) -> _Names[T]:
    first = group[0]
    if len(group) == 1:
        return first
    numbers = ",".join(ranges(int(line.words[place]) for line in group))
    in_braces = "{" + numbers + "}"
    words = _with_word(first.words, place, in_braces)
    return _Names(words, count=sum(line.count for line in group), value=first.value)


def _with_word(words: tuple[str, ...], place: int, word: str) -> tuple[str, ...]:
    return (*words[:place], word, *words[place + 1 :])


def printable(text: str) -> str:
    """Untrusted text, with U+FFFD in place of characters that could control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def short(ranks: Sequence[int], most: int = 8) -> str:
    """`[0, 1, 2]`, and `[0, 8, ..., 248]` when there are more than `most`."""
    if len(ranks) <= most:
        return str(list(ranks))
    return f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"


def bytes_text(*sizes: float) -> str:
    """`512 bytes`, `1.2 GiB`, `340 MiB`; for several sizes `12.0 + 24.0 MiB`, in the unit of the
    largest."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    largest = max(sizes)
    power = 0
    while power < len(units) - 1 and largest >= 1024 ** (power + 1):
        power += 1
    texts = []
    for size in sizes:
        number = size / 1024**power
        decimals = 0 if power == 0 or number >= 100 else 1
        texts.append(f"{number:.{decimals}f}")
    return f"{' + '.join(texts)} {units[power]}"
