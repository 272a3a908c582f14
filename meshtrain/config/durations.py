"""Lengths of time as people write them: `3h50m`, `90s`, `2d`, or a number of seconds."""

import re

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_WRITTEN = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?\Z", re.ASCII)


def seconds(length: str | float) -> float:
    """A length of time in seconds.

    Raises:
        ValueError: the text is no length of time.
    """
    if not isinstance(length, str):
        return float(length)
    match = _WRITTEN.match(length.replace(" ", ""))
    if match is None:
        raise ValueError(f"{length!r} is no length of time: write it as 3h50m, 90s, 2d, or as a number of seconds")
    return sum(int(count) * unit for count, unit in zip(match.groups(), _UNITS.values(), strict=True) if count)
