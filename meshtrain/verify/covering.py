"""Chooses few combinations that together have every two values of different factors. Pure.

All combinations of layouts, schedules, models and so on would be hundreds of thousands; most errors
need one value or the meeting of two.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

from meshtrain.layout import AXES

Cell = dict[str, str]  # factor -> its value
Pair = tuple[tuple[str, str], tuple[str, str]]  # two factors with their values
WhyNot = Callable[[Mapping[str, str]], str | None]  # why no cell can have these; None: it can
Cost = Callable[[Mapping[str, str]], float]  # of a cell that may lack values yet


def pairs(cell: Mapping[str, str]) -> Iterator[Pair]:
    yield from combinations(sorted(cell.items()), 2)


def all_pairs(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Every two values of different factors."""
    every = sorted((name, value) for name, values in factors.items() for value in values)
    return [(one, other) for one, other in combinations(every, 2) if one[0] != other[0]]


def covering(
    factors: Mapping[str, Sequence[str]], why_not: WhyNot, cost: Cost = lambda _: 1.0
) -> tuple[list[Cell], list[Pair]]:
    """Cells that together have every pair of values, and the pairs that no cell can have."""
    # The pairs of the two factors with most values need most cells: the others find room in these.
    largest = sorted(
        all_pairs(factors), key=lambda pair: -len(factors[pair[0][0]]) * len(factors[pair[1][0]])
    )
    missing = dict.fromkeys(largest)
    impossible: list[Pair] = []
    cells: list[Cell] = []
    while missing:
        first = next(iter(missing))
        cell = _completed(dict(first), factors, missing, why_not, cost)
        if cell is None:
            del missing[first]
            impossible.append(first)
            continue
        for pair in pairs(cell):
            missing.pop(pair, None)
        cells.append(cell)
    return cells, impossible


def _completed(
    begun: Cell,
    factors: Mapping[str, Sequence[str]],
    missing: Mapping[Pair, Any],
    why_not: WhyNot,
    cost: Cost,
) -> Cell | None:
    """Gives each factor a value, the one with which most pairs are there that are still missing;
    None: nothing fits."""
    if why_not(begun) is not None:
        return None
    open_factors = [name for name in factors if name not in begun]
    if not open_factors:
        return begun
    name = max(open_factors, key=lambda name: len(factors[name]))

    def gain(value: str) -> tuple[float, int]:
        with_value = begun | {name: value}
        new = sum(pair in missing for pair in pairs(with_value))
        dearer = cost(with_value) / cost(begun) - 1
        return new - dearer, -factors[name].index(value)

    for value in sorted(factors[name], key=gain, reverse=True):
        cell = _completed(begun | {name: value}, factors, missing, why_not, cost)
        if cell is not None:
            return cell
    return None


def covering_layouts(ranks: int) -> Sequence[Mapping[str, int]]:
    """Layouts of so many ranks: each axis alone, and every two axes together, as far as the number
    of ranks can be divided."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    factors = {axis: [str(size) for size in sizes] for axis in AXES}

    def why_not(cell: Mapping[str, str]) -> str | None:
        world = prod(int(size) for size in cell.values())
        is_whole = len(cell) == len(AXES)
        if ranks % world or (is_whole and world != ranks):
            return f"it has {ranks} ranks"
        return None

    cells, _ = covering(factors, why_not)
    layouts = [{axis: int(cell[axis]) for axis in AXES if cell[axis] != "1"} for cell in cells]
    unique = {tuple(sorted(layout.items())): layout for layout in layouts}
    return sorted(unique.values(), key=lambda layout: (len(layout), list(map(AXES.index, layout))))
