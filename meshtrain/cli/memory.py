"""Memory: how a layout shards each parameter of a model, and how much the ranks hold of it,
computed without a job.

`tp` cuts a parameter first, as the model's tp_plan says, or `ep` if it holds experts; FSDP then
cuts the rows left.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshtrain.config import Optimizer as OptimizerConfig
from meshtrain.config.model_spec import ModelSpec
from meshtrain.errors import fold_names
from meshtrain.huggingface.stored_names import is_weight
from meshtrain.layout import EXPERT_AXES, FSDP_AXES, Layout
from meshtrain.optim.groups import state_specs
from meshtrain.parallel.sharding import (
    Cut,
    ParameterSpec,
    Shape,
    chunk_range,
    expert_shard_dim,
    optimizer_shard,
)
from meshtrain.parallel.tp_plan import STYLES, expert_modules, split_layers

CUT = {0: "rows", 1: "columns", None: "held by all"}  # by the dim that `tp` cuts


@dataclass(frozen=True)
class MemoryUse:
    """What the ranks hold of the model: numbers of parameters, and bytes on the rank that holds the
    most."""

    total: int
    fewest: int
    most: int
    # by index on `pp`: the fewest and the most parameters on its ranks
    by_pp: tuple[tuple[int, int], ...]
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def parameters_of(
    model: ModelSpec, layout: Layout, stages: Mapping[str, tuple[int, ...]] | None = None
) -> list[ParameterSpec]:
    """Every parameter of a model that is a weight, in the model's order and under the first of its
    names.

    `stages`: parameter -> the pipeline stages that hold it. Raises SplitError: `tp` cannot split
    the model.
    """
    tp, meta = layout.size("tp"), model.meta
    splits = (
        {split.layer: split for split in split_layers(meta, model.module.tp_plan, tp)}
        if tp > 1
        else {}
    )
    names: dict[int, list[str]] = {}
    for name, parameter in meta.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    experts = expert_modules(meta, model.module.ep_plan) if layout.experts > 1 else {}
    specs, fsdp, table = [], fsdp_cut(layout), getattr(model.module, "stored_as", {})
    for name, parameter in meta.named_parameters():
        if not is_weight(name, table):
            continue
        layer, _, own = name.rpartition(".")
        split = splits.get(layer)
        module = meta.get_submodule(layer)
        kind = type(module).__name__ if split is None else STYLES[split.style].becomes
        dim = None if split is None else split.dim_of(own)
        cuts = fsdp if dim is None else [Cut("tp", dim, tp), *fsdp]
        if layer in experts:
            cuts = _expert_cuts(tuple(parameter.shape), layout)
        elif own in getattr(module, "state_parameters", ()):  # which are never cut
            cuts = []
        spec = ParameterSpec(
            name, tuple(parameter.shape), tuple(cuts), trainable=parameter.requires_grad, layer=kind
        )
        held_by = (0,) if stages is None else stages[name]
        specs.append(replace(spec, tied=tuple(names[id(parameter)][1:]), stages=held_by))
    return specs


def fsdp_cut(layout: Layout) -> list[Cut]:
    """How FSDP cuts what remains after `tp`."""
    return [
        Cut(dim, 0, layout.size(dim)) for dim in layout.mesh_dims if layout.covers(FSDP_AXES, dim)
    ]


def _expert_cuts(shape: Shape, layout: Layout) -> list[Cut]:
    """How `ep` and FSDP cut the experts of a layer."""
    ranks, shards = layout.size("ep"), layout.size("efsdp")
    return [
        Cut("ep", 0, ranks),
        *([Cut("efsdp", expert_shard_dim(shape, ranks, shards), shards)] * (shards > 1)),
    ]


def held_by_ranks(
    parameters: Iterable[ParameterSpec],
    layout: Layout,
    precision: str,
    optimizer: OptimizerConfig,
    placement: Sequence[int] = (0,),
    shard_optimizer: bool = False,
) -> MemoryUse:
    """How many parameters the ranks of a layout hold, and their bytes: float64, or float32 in any
    other precision.

    `placement`: stage -> its index on `pp`. A parameter of two stages with the same index is held
    twice there.
    """
    size = 8 if precision == "float64" else 4
    total = 0
    weights: list[Counter[_Kind]] = [Counter() for _ in range(layout.size("pp"))]
    gradients: list[Counter[_Kind]] = [Counter() for _ in weights]
    state: list[Counter[_Kind]] = [Counter() for _ in weights]
    for parameter in parameters:
        total += math.prod(parameter.dims)
        for index in (placement[stage] for stage in parameter.stages):
            weights[index][parameter.dims, parameter.cuts] += 1
            gradients[index][parameter.dims, parameter.cuts] += size * parameter.trainable
            updated = optimizer_shard(parameter, layout) if shard_optimizer else parameter
            for tensor in state_specs(optimizer, updated).values() if parameter.trainable else ():
                state[index][tensor.dims, tensor.cuts] += (
                    size if tensor.dtype is None else tensor.dtype.itemsize
                )
    by_pp = tuple(_fewest_and_most(kinds, layout) for kinds in weights)
    fewest, most = min(fewest for fewest, _ in by_pp), max(most for _, most in by_pp)
    gradient_bytes, state_bytes = (
        max(_fewest_and_most(of, layout)[1] for of in kinds) for kinds in (gradients, state)
    )
    return MemoryUse(total, fewest, most, by_pp, most * size, gradient_bytes, state_bytes)


# tensors of one shape with the same cuts: few kinds, however many layers
_Kind = tuple[Shape, tuple[Cut, ...]]


def _fewest_and_most(kinds: Mapping[_Kind, int], layout: Layout) -> tuple[int, int]:
    """The fewest and the most elements that ranks of one stage hold; `kinds`: the weight of an
    element of each kind."""
    experts = {
        kind: n for kind, n in kinds.items() if {cut.axis for cut in kind[1]} & set(EXPERT_AXES)
    }
    others = {kind: n for kind, n in kinds.items() if kind not in experts}
    families = [
        _held_by_position(others, layout, layout.mesh_dims),
        _held_by_position(experts, layout, EXPERT_AXES),
    ]
    # both differ: a rank's position decides the sum
    if all(len(set(counts.values())) > 1 for _, counts in families):
        stage = layout.group(0, *(axis for axis in layout.axes if axis != "pp"))
        sums = [
            sum(counts[_place(layout, rank, places)] for places, counts in families)
            for rank in stage
        ]
        return min(sums), max(sums)
    return sum(min(counts.values()) for _, counts in families), sum(
        max(counts.values()) for _, counts in families
    )


def _place(layout: Layout, rank: int, places: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    positions = layout.coordinate(rank, *places) if places else {}
    return tuple(
        starts[bisect_right(starts, positions[axis]) - 1] for axis, starts in places.items()
    )


def _held_by_position(
    kinds: Mapping[_Kind, int], layout: Layout, dims: Sequence[str]
) -> tuple[dict[str, list[int]], dict[tuple[int, ...], int]]:
    """The axes among `dims` that cut tensors, innermost first, each with the positions from which
    on ranks hold the same amount; and, for each combination of such positions, the number of
    elements: few, however many ranks."""
    cutting = {cut.axis for _, cuts in kinds for cut in cuts}
    places: dict[str, list[int]] = {dim: [] for dim in reversed(dims) if dim in cutting}
    ranks: dict[tuple[int, ...], frozenset[tuple[_Kind, int]]] = {(): frozenset(kinds.items())}
    for axis in places:
        cut_now = {
            (shape[cuts[0].dim], cuts[0].parts)
            for state in ranks.values()
            for (shape, cuts), _ in state
            if cuts and cuts[0].axis == axis
        }
        # of the full parts; a remainder follows
        ends = {size // max(1, -(-size // parts)) for size, parts in cut_now}
        starts = {start for end in ends for start in (end, end + 1) if start < layout.size(axis)}
        places[axis] = sorted({0} | starts)
        ranks = {
            (*at, i): _after(axis, i, state) for at, state in ranks.items() for i in places[axis]
        }
    return places, {at: _elements(state) for at, state in ranks.items()}


def _elements(kinds: frozenset[tuple[_Kind, int]]) -> int:
    return sum(math.prod(shape) * n for (shape, _), n in kinds)


def _after(
    axis: str, index: int, kinds: frozenset[tuple[_Kind, int]]
) -> frozenset[tuple[_Kind, int]]:
    """The tensors that remain for ranks with this index on an axis after its cut, with the cuts
    still to be made."""
    remaining: Counter[_Kind] = Counter()
    for (shape, cuts), n in kinds:
        if cuts and cuts[0].axis == axis:
            (_, dim, parts), *rest = cuts
            part = chunk_range(shape[dim], parts, index)
            remaining[(*shape[:dim], part.stop - part.start, *shape[dim + 1 :]), tuple(rest)] += n
        else:
            remaining[shape, cuts] += n
    return frozenset(remaining.items())


def parameter_json(parameter: ParameterSpec) -> dict[str, Any]:
    """A parameter as JSON; where ranks differ, with the largest and the smallest size of each
    dim."""
    return {
        "name": parameter.name,
        "tied": list(parameter.tied),
        "shape": list(parameter.dims),
        "layer": parameter.layer,
        "stages": list(parameter.stages),
        "over_tp": _over(parameter, "tp") or CUT[None],
        "after_tp": _largest_and_smallest(parameter.shapes("tp")),
        "over_ep": _over(parameter, "ep") or CUT[None],
        "on_a_rank": _largest_and_smallest(parameter.shapes()),
    }


def _over(parameter: ParameterSpec, axis: str) -> str | None:
    return next(
        ("experts" if axis == "ep" else CUT[cut.dim] for cut in parameter.cuts if cut.axis == axis),
        None,
    )


def table(parameters: Iterable[ParameterSpec], layout: Layout) -> list[list[str]]:
    """The rows of a table, titles first. Identical repeated layers share one row."""
    rows = []
    for name, n, parameter in fold_names(
        (spec.name, replace(spec, name="")) for spec in parameters
    ):
        row = {"parameter": name, "": f"x{n}" if n > 1 else ""}
        if layout.size("pp") > 1:
            row["stage"] = " and ".join(map(str, parameter.stages))
        row |= {"whole": _shape([parameter.dims]), "layer": parameter.layer}
        if inner := " or ".join(axis for axis in ("tp", "ep") if layout.size(axis) > 1):
            parts = [
                f"{word} / {axis}" for axis in ("tp", "ep") if (word := _over(parameter, axis))
            ]
            row[f"over {inner}"] = parts[0] if parts else CUT[None]
            row[f"after {inner}"] = _shape(parameter.shapes("tp", "ep"))
        or_experts = " or efsdp" * (layout.experts > 1 and layout.size("efsdp") > 1)
        row |= {
            f"after {cut.axis}{or_experts}": _shape(parameter.shapes()) for cut in fsdp_cut(layout)
        }
        more = f" and {len(parameter.tied) - 1} more" if len(parameter.tied) > 1 else ""
        rows.append(row | {"tied": f"also {parameter.tied[0]}{more}" if parameter.tied else ""})
    return [list(rows[0])[:-1], *(list(row.values()) for row in rows)]


def _largest_and_smallest(shapes: Iterable[Shape]) -> dict[str, list[int]]:
    sizes = list(zip(*shapes, strict=True))  # of each dim on every rank
    return {"largest": [*map(max, sizes)], "smallest": [*map(min, sizes)]}


def _shape(shapes: Iterable[Shape]) -> str:
    """`65 to 64 x 24`: 65 x 24 on some ranks, 64 x 24 on the rank with the least."""
    ends = _largest_and_smallest(shapes)
    pairs = zip(ends["largest"], ends["smallest"], strict=True)
    return " x ".join(str(most) if most == least else f"{most} to {least}" for most, least in pairs)
