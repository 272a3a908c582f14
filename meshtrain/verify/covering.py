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
Setting = tuple[str, str]  # a factor with its value
Pair = tuple[Setting, Setting]  # of different factors
WhyNot = Callable[[Mapping[str, str]], str | None]  # why no cell can have these; None: it can
Cost = Callable[[Mapping[str, str]], float]  # of a cell that may lack values yet


def pairs(cell: Mapping[str, str]) -> Iterator[Pair]:
    yield from combinations(sorted(cell.items()), 2)


def all_pairs(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Every two values of different factors."""
    settings = [(factor, value) for factor, values in factors.items() for value in values]
    pairs = []
    for one, other in combinations(sorted(settings), 2):
        if one[0] != other[0]:
            pairs.append((one, other))
    return pairs


def covering(
    factors: Mapping[str, Sequence[str]], why_not: WhyNot, cost: Cost = lambda _: 1.0
) -> tuple[list[Cell], list[Pair]]:
    """Cells that together have every pair of values, and the pairs that no cell can have."""

    def cells_needed(pair: Pair) -> int:
        """Cells for all pairs of its two factors: one has one of them."""
        (one, _), (other, _) = pair
        return len(factors[one]) * len(factors[other])

    # Those that need most cells come first: the others find room in these.
    missing = dict.fromkeys(sorted(all_pairs(factors), key=cells_needed, reverse=True))
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
    name = max(open_factors, key=lambda factor: len(factors[factor]))

    def gain(value: str) -> float:
        """How many missing pairs a value brings, less what it adds to the cost."""
        cell = begun | {name: value}
        new = [pair for pair in pairs(cell) if pair in missing]
        dearer = cost(cell) / cost(begun) - 1
        return len(new) - dearer

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

    def few_axes_first(layout: Mapping[str, int]) -> tuple[int, list[int]]:
        return len(layout), [AXES.index(axis) for axis in layout]

    layouts: list[dict[str, int]] = []
    cells, _ = covering(factors, why_not)
    for cell in cells:
        sizes_above_1 = {axis: int(cell[axis]) for axis in AXES if cell[axis] != "1"}
        if sizes_above_1 not in layouts:
            layouts.append(sizes_above_1)
    return sorted(layouts, key=few_axes_first)
