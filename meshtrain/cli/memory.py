"""What becomes of each parameter of a model under a layout: which part of it a rank holds, computed without a job.

`tp` cuts it first, as the model's tp_plan says; FSDP then cuts the rows of what is left.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshtrain.config.model_spec import ModelSpec
from meshtrain.formatting import ranges
from meshtrain.layout import FSDP_AXES, Layout
from meshtrain.optim.registry import update_rule
from meshtrain.parallel.sharding import Cut, ParameterSpec, Shape, chunk_range
from meshtrain.parallel.tp_plan import STYLES, split_layers

CUT = {0: "rows", 1: "columns", None: "held by all"}  # by the dim that `tp` cuts


@dataclass(frozen=True)
class MemoryUse:
    """What the ranks hold of the model: numbers of parameters, and bytes on the rank with the most."""

    total: int
    fewest: int
    most: int
    by_pp: tuple[tuple[int, int], ...]  # by index on `pp`: the fewest and the most on its ranks
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def parameters_of(
    model: ModelSpec, layout: Layout, stages: Mapping[str, tuple[int, ...]] | None = None
) -> list[ParameterSpec]:
    """Every parameter of a model, in its order and under the first of its names.

    `stages`: parameter -> the stages of a pipeline that hold it. Raises SplitError: `tp` cannot split it.
    """
    tp, meta = layout.size("tp"), model.meta
    splits = {split.layer: split for split in split_layers(meta, model.module.tp_plan, tp)} if tp > 1 else {}
    names: dict[int, list[str]] = {}
    for name, parameter in meta.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    specs, fsdp = [], fsdp_cut(layout)
    for name, parameter in meta.named_parameters():
        layer, _, own = name.rpartition(".")
        split = splits.get(layer)
        kind = type(meta.get_submodule(layer)).__name__ if split is None else STYLES[split.style].becomes
        dim = None if split is None else split.dim_of(own)
        cuts = fsdp if dim is None else [Cut("tp", dim, tp), *fsdp]
        spec = ParameterSpec(name, tuple(parameter.shape), tuple(cuts), trainable=parameter.requires_grad, layer=kind)
        held_by = (0,) if stages is None else stages[name]
        specs.append(replace(spec, tied=tuple(names[id(parameter)][1:]), stages=held_by))
    return specs


def fsdp_cut(layout: Layout) -> list[Cut]:
    """How FSDP cuts what `tp` leaves."""
    return [Cut(dim, 0, layout.size(dim)) for dim in layout.mesh_dims if layout.covers(FSDP_AXES, dim)]


def held_by_ranks(
    parameters: Iterable[ParameterSpec], layout: Layout, precision: str, optimizer: str, placement: Sequence[int] = (0,)
) -> MemoryUse:
    """How many parameters the ranks of a layout hold, and their bytes; float32 whatever is computed in, or float64.

    `placement`: stage -> its index on `pp`. A parameter of two stages with one index is there twice.
    """
    size = 8 if precision == "float64" else 4
    state_of = update_rule(optimizer).state_specs
    total = 0
    weights: list[Counter[_Kind]] = [Counter() for _ in range(layout.size("pp"))]
    state: list[Counter[_Kind]] = [Counter() for _ in weights]
    for parameter in parameters:
        total += math.prod(parameter.dims)
        for index in (placement[stage] for stage in parameter.stages):
            weights[index][parameter.dims, parameter.cuts] += 1
            for tensor in state_of(parameter).values() if parameter.trainable else ():
                state[index][tensor.dims, tensor.cuts] += size if tensor.dtype is None else tensor.dtype.itemsize
    by_pp = tuple(_fewest_and_most(kinds, layout) for kinds in weights)
    fewest, most = min(fewest for fewest, _ in by_pp), max(most for _, most in by_pp)
    state_bytes = max(_fewest_and_most(kinds, layout)[1] for kinds in state)
    return MemoryUse(total, fewest, most, by_pp, most * size, most * size, state_bytes)


_Kind = tuple[Shape, tuple[Cut, ...]]  # tensors of one shape that are cut in the same way: few, however many layers


def _fewest_and_most(kinds: Mapping[_Kind, int], layout: Layout) -> tuple[int, int]:
    """Elements that the ranks of one stage hold of tensors; `kinds`: how much an element of each counts."""
    ranks = {frozenset(kinds.items())}  # the different ones after the cuts so far
    cutting = {cut.axis for _, cuts in kinds for cut in cuts}
    for axis in (dim for dim in reversed(layout.mesh_dims) if dim in cutting):  # from the innermost axis outwards
        ranks = {_after(axis, index, rank) for rank in ranks for index in range(layout.size(axis))}
    counts = [sum(math.prod(shape) * n for (shape, _), n in rank) for rank in ranks]
    return min(counts), max(counts)


def _after(axis: str, index: int, kinds: Iterable[tuple[_Kind, int]]) -> frozenset[tuple[_Kind, int]]:
    """What the ranks with this index on an axis have left of tensors, and the cuts that are still to be made."""
    remaining: Counter[_Kind] = Counter()
    for (shape, cuts), n in kinds:
        if cuts and cuts[0].axis == axis:
            (_, dim, parts), *rest = cuts
            part = chunk_range(shape[dim], parts, index)
            remaining[(*shape[:dim], part.stop - part.start, *shape[dim + 1 :]), tuple(rest)] += n
        else:
            remaining[shape, cuts] += n
    return frozenset(remaining.items())


# For people and programs --------------------------------------------------------------------------------------------


def parameter_json(parameter: ParameterSpec) -> dict[str, Any]:
    """A parameter for a program; where ranks differ, the largest and the smallest size of each dim."""
    return {
        "name": parameter.name,
        "tied": list(parameter.tied),
        "shape": list(parameter.dims),
        "layer": parameter.layer,
        "stages": list(parameter.stages),
        "over_tp": CUT[_tp_dim(parameter)],
        "after_tp": _largest_and_smallest(parameter.shapes("tp")),
        "on_a_rank": _largest_and_smallest(parameter.shapes()),
    }


def _tp_dim(parameter: ParameterSpec) -> int | None:
    return next((cut.dim for cut in parameter.cuts if cut.axis == "tp"), None)


def table(parameters: Iterable[ParameterSpec], layout: Layout) -> list[list[str]]:
    """The rows of a table for people, the titles first. Repeated layers that are the same make one row."""
    rows = []
    for name, n, parameter in _folded(parameters):
        row = {"parameter": name, "": f"x{n}" if n > 1 else ""}
        if layout.size("pp") > 1:
            row["stage"] = " and ".join(map(str, parameter.stages))
        row |= {"whole": _shape([parameter.dims]), "layer": parameter.layer}
        if layout.size("tp") > 1:
            dim = _tp_dim(parameter)
            row["over tp"] = CUT[dim] + " / tp" * (dim is not None)
            row["after tp"] = _shape(parameter.shapes("tp"))
        row |= {f"after {cut.axis}": _shape(parameter.shapes()) for cut in fsdp_cut(layout)}
        more = f" and {len(parameter.tied) - 1} more" if len(parameter.tied) > 1 else ""
        rows.append(row | {"tied": f"also {parameter.tied[0]}{more}" if parameter.tied else ""})
    return [list(rows[0])[:-1], *(list(row.values()) for row in rows)]


def _largest_and_smallest(shapes: Iterable[Shape]) -> dict[str, list[int]]:
    sizes = list(zip(*shapes, strict=True))  # of each dim on every rank
    return {"largest": [*map(max, sizes)], "smallest": [*map(min, sizes)]}


def _shape(shapes: Iterable[Shape]) -> str:
    """`65 to 64 x 24`: 65 x 24 on some ranks, 64 x 24 on the one with the least."""
    ends = _largest_and_smallest(shapes)
    pairs = zip(ends["largest"], ends["smallest"], strict=True)
    return " x ".join(str(most) if most == least else f"{most} to {least}" for most, least in pairs)


def _folded(parameters: Iterable[ParameterSpec]) -> list[tuple[str, int, ParameterSpec]]:
    """Names with the numbers of equal layers in braces; how many parameters each stands for, and the first of them."""
    lines = [(tuple(spec.name.split(".")), 1, spec) for spec in parameters]
    for at in range(max((len(words) for words, _, _ in lines), default=0)):
        groups: dict[Any, list[tuple[tuple[str, ...], int, ParameterSpec]]] = {}
        for words, n, spec in lines:
            numbered = at < len(words) and words[at].isdigit()
            same = (*words[:at], "", *words[at + 1 :]) if numbered else words
            groups.setdefault((same, n, replace(spec, name="")), []).append((words, n, spec))
        lines = []
        for group in groups.values():
            words, n, spec = group[0]
            if len(group) > 1:
                numbers = ",".join(ranges(int(words[at]) for words, _, _ in group))
                words = (*words[:at], f"{{{numbers}}}", *words[at + 1 :])
            lines.append((words, n * len(group), spec))
    return [(".".join(words), n, spec) for words, n, spec in lines]
