"""What becomes of each parameter of a model under a layout: which part of it a rank holds, computed without a job.

A parameter belongs to one or several stages, which `pp` deals out to ranks. `tp` cuts it first, as the model's tp_plan
says; FSDP then cuts the rows of what is left. The cuts are those of training (`cuts.py`), so every number here is the
one that a rank will have.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshtrain.cuts import part
from meshtrain.layout import Layout
from meshtrain.locate import model_file
from meshtrain.split import STYLES, split_layers

CUT = {0: "rows", 1: "columns", None: "held by all"}  # by the dim that `tp` cuts

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model, and what `tp` does to it.

    Attributes:
        name, shape: of the whole model's; a scalar counts as one dim of size 1.
        layer: the kind of layer that it belongs to, once `tp` has put its own in the place of plain ones.
        dim: which `tp` cuts; None: every rank holds all of it.
        tied: its other names, where several layers use it.
        stages: of a pipeline, those that hold it: one, or several if layers of several use it.
    """

    name: str
    shape: Shape
    layer: str
    dim: int | None = None
    tied: tuple[str, ...] = ()
    stages: tuple[int, ...] = (0,)

    def after_tp(self, tp: int) -> list[Shape]:
        """What each rank of `tp` holds before FSDP."""
        return [_left(self.shape, [] if self.dim is None else [(self.dim, tp, i)]) for i in range(tp)]

    def on_ranks(self, tp: int, shards: int) -> set[Shape]:
        """The different shapes that ranks hold in the end: the largest, the smallest, and what may be between."""
        ends = {0, shards - 1}  # of the parts of one dim none is larger than the one before it
        return {_left(shape, [(0, shards, i)]) for shape in set(self.after_tp(tp)) for i in ends}


@dataclass(frozen=True)
class Held:
    """What the ranks hold of the model: numbers of parameters, and bytes on the rank with the most.

    `by_pp`: the fewest and the most on ranks with one index on `pp`, for each of these.
    """

    total: int
    fewest: int
    most: int
    by_pp: tuple[tuple[int, int], ...]
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # AdamW: two averages per parameter


def parameters_of(name: str, keys: Mapping[str, Any], tp: int = 1) -> list[Parameter]:
    """Every parameter of a model, in its order and under the first of its names.

    The model is built on the meta device: no memory, whatever its size.

    Raises:
        SplitError: it cannot be split over `tp` ranks.
    """
    import torch  # here, so that the command line starts without it

    module = model_file(name)
    with torch.device("meta"):
        model = module.Model(module.Config(**keys))
    splits = {split.layer: split for split in split_layers(model, module.tp_plan, tp)} if tp > 1 else {}
    names: dict[int, list[str]] = {}
    for each, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(each)
    found = []
    for each, parameter in model.named_parameters():
        layer, _, own = each.rpartition(".")
        split = splits.get(layer)
        kind = type(model.get_submodule(layer)).__name__ if split is None else STYLES[split.style].becomes
        dim = None if split is None else split.dim_of(own)
        shape = tuple(parameter.shape) or (1,)
        found.append(Parameter(each, shape, kind, dim, tuple(names[id(parameter)][1:])))
    return found


def held_by_ranks(
    parameters: Iterable[Parameter], layout: Layout, precision: str, placement: Sequence[int] = (0,)
) -> Held:
    """How many parameters the ranks of a layout hold, and their bytes.

    Weights, gradients and optimizer state are kept in float32 whatever the precision of the computation, or in
    float64.

    Args:
        placement: stage -> its index on `pp`. A parameter of two stages with one index is there twice.
    """
    # Few different ones, whatever the number of layers.
    kinds = Counter((one.shape, one.dim, tuple(placement[stage] for stage in one.stages)) for one in parameters)
    total = sum(math.prod(shape) * n for (shape, _, _), n in kinds.items())
    here: list[Counter[tuple[Shape, int | None]]] = [Counter() for _ in range(layout.size("pp"))]
    for (shape, dim, indices), n in kinds.items():
        for index in indices:
            here[index][shape, dim] += n
    by_pp = tuple(_fewest_and_most(held, layout.size("tp"), layout.size("dp_shard")) for held in here)
    fewest, most = min(fewest for fewest, _ in by_pp), max(most for _, most in by_pp)
    size = 8 if precision == "float64" else 4
    return Held(total, fewest, most, by_pp, most * size, most * size, 2 * most * size)


def _fewest_and_most(kinds: Mapping[tuple[Shape, int | None], int], tp: int, shards: int) -> tuple[int, int]:
    """Numbers of parameters on the ranks of `tp` and `dp_shard`; `kinds`: how many there are of each (shape, dim)."""
    after_tp: list[Counter[Shape]] = [Counter() for _ in range(tp)]
    for (shape, dim), n in kinds.items():
        for i, left in enumerate(Parameter("", shape, "", dim).after_tp(tp)):
            after_tp[i][left] += n
    different = {frozenset(shapes.items()) for shapes in after_tp}
    counts = [
        sum(math.prod(_left(shape, [(0, shards, i)])) * n for shape, n in shapes)
        for shapes in different
        for i in range(shards)
    ]
    return min(counts), max(counts)


def _left(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Shape:
    """The shape of what is left of a tensor after cuts: (dim, parts, index) each."""
    return tuple(each.stop - each.start for each in part(shape, cuts))


# For people and programs --------------------------------------------------------------------------------------------


def parameter_json(parameter: Parameter, layout: Layout) -> dict[str, Any]:
    """A parameter for a program; where ranks differ, the largest and the smallest size of each dim."""
    tp, shards = layout.size("tp"), layout.size("dp_shard")
    return {
        "name": parameter.name,
        "tied": list(parameter.tied),
        "shape": list(parameter.shape),
        "layer": parameter.layer,
        "stages": list(parameter.stages),
        "over_tp": CUT[parameter.dim],
        "after_tp": _largest_and_smallest(parameter.after_tp(tp)),
        "on_a_rank": _largest_and_smallest(parameter.on_ranks(tp, shards)),
    }


def table(parameters: Iterable[Parameter], layout: Layout) -> list[list[str]]:
    """The rows of a table for people, the titles first. Repeated layers that are the same make one row."""
    pp, tp, shards = layout.size("pp"), layout.size("tp"), layout.size("dp_shard")
    titles = [
        "parameter",
        "",
        *["stage"] * (pp > 1),
        "whole",
        "layer",
        *["over tp", "after tp"] * (tp > 1),
        *["after dp_shard"] * (shards > 1),
    ]
    rows = [titles]
    for name, n, one in _folded(parameters):
        row = [name, f"x{n}" if n > 1 else ""]
        if pp > 1:
            row.append(" and ".join(map(str, one.stages)))
        row += [_shape([one.shape]), one.layer]
        if tp > 1:
            row += [CUT[one.dim] + " / tp" * (one.dim is not None), _shape(one.after_tp(tp))]
        if shards > 1:
            row.append(_shape(one.on_ranks(tp, shards)))
        rows.append([*row, _also(one.tied)])
    return rows


def _largest_and_smallest(shapes: Iterable[Shape]) -> dict[str, list[int]]:
    sizes = list(zip(*shapes, strict=True))  # of each dim on every rank
    return {"largest": [max(each) for each in sizes], "smallest": [min(each) for each in sizes]}


def _shape(shapes: Iterable[Shape]) -> str:
    """`65 to 64 x 24`: 65 x 24 on some ranks, 64 x 24 on the one with the least."""
    ends = _largest_and_smallest(shapes)
    pairs = zip(ends["largest"], ends["smallest"], strict=True)
    return " x ".join(str(most) if most == least else f"{most} to {least}" for most, least in pairs)


def _also(tied: Sequence[str]) -> str:
    more = f" and {len(tied) - 1} more" if len(tied) > 1 else ""
    return f"also {tied[0]}{more}" if tied else ""


def _folded(parameters: Iterable[Parameter]) -> list[tuple[str, int, Parameter]]:
    """Names with the numbers of equal layers in braces; how many parameters each stands for, and the first of them."""
    lines = [(tuple(one.name.split(".")), 1, one) for one in parameters]
    for at in range(max((len(parts) for parts, _, _ in lines), default=0)):
        groups: dict[Any, list[tuple[tuple[str, ...], int, Parameter]]] = {}
        for parts, n, one in lines:
            numbered = at < len(parts) and parts[at].isdigit()
            same = (*parts[:at], "", *parts[at + 1 :]) if numbered else parts
            alike = same, n, one.shape, one.layer, one.dim, one.tied, one.stages
            groups.setdefault(alike, []).append((parts, n, one))
        lines = []
        for group in groups.values():
            parts, n, one = group[0]
            if len(group) > 1:
                parts = (*parts[:at], _numbers([int(each[at]) for each, _, _ in group]), *parts[at + 1 :])
            lines.append((parts, n * len(group), one))
    return [(".".join(parts), n, one) for parts, n, one in lines]


def _numbers(numbers: Sequence[int]) -> str:
    """`{0-2,5}`"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) + "}"
