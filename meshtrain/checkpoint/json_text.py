"""JSON of a checkpoint: what manifests and the headers of its files are written with and read by.

JSON has no infinity (of a config) and no NaN (of a loss), so they become `$float` objects. Reading
does not trust the text: a value has a limited depth, each key stands once in an object, and a
number is one that JSON has.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain.errors import DamagedError

MAX_DEPTH = 50  # nesting depth; so recursion over a parsed value is safe
_FLOAT = "$float"  # the one key of an object that stands for a number


def dumps(value: Any) -> str:
    """JSON on one line."""
    return json.dumps(_with_float_objects(value), separators=(",", ":"), allow_nan=False)


def parse_json(text: str | bytes, path: Path) -> Any:
    """The value of a text written by `dumps`. Raises DamagedError, naming `path`: it is no such
    text."""
    if not text:
        raise DamagedError(path, "is empty")
    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode(),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, f"is no JSON as meshtrain writes it ({error})") from None
    if not _is_shallow(value, MAX_DEPTH):
        raise DamagedError(path, f"nests values more than {MAX_DEPTH} deep")
    return value


def is_count(value: object, most: int = 2**63 - 1) -> bool:
    """Whether this is an integer from 0 to `most`, and not a bool."""
    return type(value) is int and 0 <= value <= most


def _with_float_objects(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, Mapping):
        return {key: _with_float_objects(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_with_float_objects(member) for member in value]
    return value


def _object(pairs: list[tuple[str, Any]]) -> Any:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = max(names, key=names.count)
        raise ValueError(f"{twice[:80]!r} stands twice in an object")
    if len(pairs) == 1 and value.get(_FLOAT) in ("inf", "-inf", "nan"):
        return float(value[_FLOAT])
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _is_shallow(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        members = list(value.values())
    elif isinstance(value, list):
        members = value
    else:
        return True
    return depth > 0 and all(_is_shallow(member, depth - 1) for member in members)
