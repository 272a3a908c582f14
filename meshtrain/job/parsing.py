"""JSON that somebody else wrote: side files, lines of data, records of other processes.

One reader with a limit and one kind of error, so that no caller has to know that a deep text raises
a RecursionError, a long integer a ValueError, and a byte order mark another one.
"""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from meshtrain.errors import InputError

MOST_BYTES = 64 << 20  # of a side file: the largest that is usual is a tokenizer.json


def parse_json(
    text: str | bytes, *, most: int = MOST_BYTES, unique: bool = False, finite: bool = False
) -> Any:
    """The value of a JSON text, which may begin with a byte order mark.

    Args:
        most: the most bytes, or characters of a str, that are looked at.
        unique: whether a key that stands twice in an object is refused; otherwise the last one
            counts.
        finite: whether NaN and infinite numbers become None.

    Raises InputError, the reason as a part of a sentence: it is too long, not UTF-8, not JSON, or
    too deeply nested.
    """
    if len(text) > most:
        raise InputError(f"it has {len(text):,} bytes, and at most {most:,} are read")
    options: dict[str, Any] = {}
    if unique:
        options["object_pairs_hook"] = _unique
    if finite:
        options |= {"parse_constant": lambda name: None, "parse_float": _finite}
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text.removeprefix("\ufeff"), **options)
    except RecursionError:
        raise InputError("it nests values too deeply") from None
    except ValueError as error:  # no UTF-8, no JSON, or an integer of thousands of digits
        raise InputError(str(error)) from None


def read_limited(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file in a folder that the user has named, also over a link. Raises InputError:
    it has more bytes, or is no regular file, so that a pipe keeps nobody waiting; OSError: it
    cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InputError("it is no file")
        data = file.read(most + 1)
    if len(data) > most:
        raise InputError(f"it has more than {most:,} bytes")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return values


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
