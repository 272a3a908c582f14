"""JSON that nobody has to trust, and that holds every float: what the files of a checkpoint are written in."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain.errors import DamagedError

MAX_DEPTH = 50  # of objects in objects; what was read can be walked through without care


def parse(text: str | bytes, where: Path) -> Any:
    """The value of a text as `dumps` makes it; `where` is its file, for messages.

    Raises:
        DamagedError: it is no JSON, has a name twice in an object, or numbers that are none or too large.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DamagedError(where, f"is no JSON as meshtrain writes it ({error})" if text else "is empty") from None
    if not _is_shallow(found, MAX_DEPTH):
        raise DamagedError(where, f"nests values more than {MAX_DEPTH} deep")
    return found


def dumps(value: Any) -> str:
    """JSON on one line. It has no infinity, which a config may hold, and no NaN, which a loss can be: `$float` here."""
    return json.dumps(_with_floats(value), separators=(",", ":"), allow_nan=False)


def is_count(value: object, most: int = 2**63 - 1) -> bool:
    """Whether this is a whole number from 0 on that counts something, which True does not."""
    return type(value) is int and 0 <= value <= most


def _with_floats(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, Mapping):
        return {key: _with_floats(each) for key, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list | tuple) else value


def _is_shallow(value: Any, left: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left > 0 and all(_is_shallow(each, left - 1) for each in inside if isinstance(each, dict | list))


def _object(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)[:80]!r} stands twice in an object")
    if len(pairs) == 1 and found.get("$float") in ("inf", "-inf", "nan"):
        return float(found["$float"])
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number
