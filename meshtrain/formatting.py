"""How lists, ranges and sizes are written for people. Pure."""

from collections.abc import Iterable, Sequence


def join_some(items: Sequence[str], most: int = 4) -> str:
    """`a, b, c, d and 12 more`."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def plural(count: int, noun: str) -> str:
    """`1 stage`, `4 stages`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def ranges(numbers: Iterable[int]) -> list[str]:
    """`[0, 1, 2, 8]` as `["0-2", "8"]`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def short(ranks: Sequence[int], most: int = 8) -> str:
    """`[0, 1, 2]`, and `[0, 8, ..., 248]` when there are more than `most`."""
    if len(ranks) <= most:
        return str(list(ranks))
    return f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"


def bytes_text(*sizes: float) -> str:
    """`512 bytes`, `1.2 GiB`, `340 MiB`; of several `12.0 + 24.0 MiB`, in the unit of the largest."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = next((i for i in range(len(units)) if max(sizes) < 1024 ** (i + 1)), len(units) - 1)
    numbers = [size / 1024**power for size in sizes]
    return " + ".join(f"{n:.0f}" if power == 0 or n >= 100 else f"{n:.1f}" for n in numbers) + f" {units[power]}"
