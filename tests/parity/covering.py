"""Which cells the parity tests train: every pair of values of two factors stands together in at
least one cell.

A cell gives each factor a value: the size of each axis, a schedule, a precision, and so on. All
combinations would be hundreds of thousands; most errors need one value or the meeting of two.
`covering` chooses few cells that have every pair, but for the pairs that no run can have, of which
`why_not` gives the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

from meshtrain.pipeline.schedule import NAMES, build

Cell = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]  # two factors with their values

RANKS = 4  # at most

# The first value of each factor is the plain one. A number begins what an axis is: its size.
AXES: dict[str, tuple[str, ...]] = {
    "pp": ("1", "2"),
    "dp_replicate": ("1", "2"),
    "dp_shard": ("1", "2"),
    "cp": ("1", "2", "2, ring", "2, heads"),
    "tp": ("1", "2", "2, whole sequence"),
}
NO_SCHEDULE = "none"
FACTORS: dict[str, tuple[str, ...]] = {
    **AXES,
    "schedule": (NO_SCHEDULE, *NAMES),
    "model": (
        "llama",
        "qwen3",
        "qwen3_moe",
        "glm4_moe",
        "deepseek_v3",
        "convnet",
        "with terms",
        "lora",
    ),
    "optimizer": ("adamw", "muon", "sgd", "adamw, sharded", "adamw, averaged"),
    "recompute": ("none", "selective", "full"),
    "precision": ("float64", "float32", "float8"),
    "verify": ("false", "true"),
}
PLAIN: Cell = {name: values[0] for name, values in FACTORS.items()}
EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3")


def ranks_of(cell: Mapping[str, str]) -> int:
    return prod(size(cell, axis) for axis in AXES)


def size(cell: Mapping[str, str], axis: str) -> int:
    return int(cell.get(axis, "1").partition(",")[0])


def stages_per_rank(schedule: str) -> int:
    return (
        1 if schedule == NO_SCHEDULE else build(schedule, ranks=2, microbatches=2).stages_per_rank
    )


def why_not(cell: Mapping[str, str]) -> str | None:
    """Why no run can have these values, of some of the factors or all; None: it can."""
    model, precision = cell.get("model"), cell.get("precision")
    if ranks_of(cell) > RANKS:
        return f"a cell has at most {RANKS} ranks"
    if (
        "pp" in cell
        and "schedule" in cell
        and (cell["pp"] == "1") != (cell["schedule"] == NO_SCHEDULE)
    ):
        return "a schedule is of stages on several ranks"
    if model == "convnet":
        if size(cell, "tp") > 1:
            return "a convolution has no tp_plan"
        if size(cell, "cp") > 1:
            return "an image is no sequence"
        if size(cell, "pp") * stages_per_rank(cell.get("schedule", NO_SCHEDULE)) > 3:
            return "it has three blocks"
        if precision == "float8":
            return "its products are convolutions"
    if model in EXPERTS and precision == "float32":
        return "rounding may change a choice"
    if cell.get("optimizer") == "muon" and precision == "float32":
        return "Muon makes the small directions of a gradient large, and with them its rounding"
    if model == "lora" and precision == "float8":
        return "8 bits round what adapters are beside"
    if cell.get("optimizer") == "adamw, sharded" and size(cell, "dp_shard") * size(cell, "cp") > 1:
        return "FSDP has sharded the optimizer already"
    return None


def pairs(cell: Mapping[str, str]) -> Iterator[Pair]:
    yield from combinations(sorted(cell.items()), 2)


def all_pairs(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Every two values of different factors."""
    every = sorted((name, value) for name, values in factors.items() for value in values)
    return [(one, other) for one, other in combinations(every, 2) if one[0] != other[0]]


def covering(
    factors: Mapping[str, Sequence[str]], why_not: Callable[[Mapping[str, str]], str | None]
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
        cell = completed(dict(first), factors, missing, why_not)
        if cell is None:
            del missing[first]
            impossible.append(first)
            continue
        for pair in pairs(cell):
            missing.pop(pair, None)
        cells.append(cell)
    return cells, impossible


def completed(
    begun: Cell, factors: Mapping[str, Sequence[str]], missing: Mapping[Pair, Any], why_not: Any
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
        new = sum(pair in missing for pair in pairs(begun | {name: value}))
        cost = (
            1.0 * (ranks_of(begun | {name: value}) / max(1, ranks_of(begun)) - 1)
            if name in AXES
            else 0.0
        )
        return new - cost, -factors[name].index(value)

    for value in sorted(factors[name], key=gain, reverse=True):
        cell = completed(begun | {name: value}, factors, missing, why_not)
        if cell is not None:
            return cell
    return None
