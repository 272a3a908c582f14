"""Parameters of a model on a layout: how each one is sharded, and how much of them the ranks hold,
computed without a job.

`tp` cuts a parameter first, as the model's tp_plan says, or `ep` if it holds experts; FSDP then
cuts the rows left.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshtrain.config.model_spec import ModelSpec
from meshtrain.config.schema import OptimizerSection
from meshtrain.huggingface.stored_names import is_weight
from meshtrain.layout import EXPERT_AXES, FSDP_AXES, Layout
from meshtrain.optim.groups import state_specs
from meshtrain.parallel.sharding import (
    Cut,
    ParameterSpec,
    Shape,
    expert_shard_dim,
    optimizer_shard,
    shape_of,
)
from meshtrain.parallel.tp_plan import STYLES, expert_modules, split_layers, styled_parameters

if TYPE_CHECKING:
    import numpy as np
    from torch import nn


def parameter_specs(
    model: ModelSpec, layout: Layout, stages: Mapping[str, tuple[int, ...]] | None = None
) -> list[ParameterSpec]:
    """Every parameter of a model that is a weight, in the model's order and under the first of its
    names.

    `stages`: parameter -> the pipeline stages that hold it. Raises SplitError: `tp` cannot split
    the model.
    """
    meta = model.meta
    tp = layout.size("tp")
    splits = {}
    split_vectors = set[str]()
    if tp > 1:
        plan = model.plan("tp_plan")
        splits = {split.layer: split for split in split_layers(meta, plan, tp)}
        for vectors in styled_parameters(meta, plan):
            if STYLES[vectors.style].dim is not None:
                split_vectors.update(f"{vectors.layer}.{own}" for own in vectors.parameters)
    experts = expert_modules(meta, model.plan("ep_plan")) if layout.experts > 1 else {}
    stored_as = model.plan("stored_as") or {}
    names = _names_of(meta)
    by_fsdp = fsdp_cuts(layout)

    specs = []
    for name, parameter in meta.named_parameters():
        if not is_weight(name, stored_as):
            continue
        layer, _, own_name = name.rpartition(".")
        module = meta.get_submodule(layer)
        shape = tuple(parameter.shape)
        split = splits.get(layer)
        split_dim = None if split is None else split.dim_of(own_name)
        if name in split_vectors:
            split_dim = 0

        if layer in experts:
            cuts = expert_cuts(shape, layout)
        elif own_name in getattr(module, "state_parameters", ()):  # these are never cut
            cuts = []
        elif split_dim is not None:
            cuts = [Cut("tp", split_dim, tp), *by_fsdp]
        else:
            cuts = by_fsdp

        spec = ParameterSpec(
            name,
            shape,
            tuple(cuts),
            stages=(0,) if stages is None else stages[name],
            trainable=parameter.requires_grad,
            tied=tuple(names[id(parameter)][1:]),
            layer=type(module).__name__ if split is None else STYLES[split.style].becomes,
        )
        specs.append(spec)
    return specs


def _names_of(model: "nn.Module") -> dict[int, list[str]]:
    """The id of each parameter -> all of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def fsdp_cuts(layout: Layout) -> list[Cut]:
    """How FSDP cuts what remains after `tp`."""
    dims = [dim for dim in layout.mesh_dims if layout.covers(FSDP_AXES, dim)]
    return [Cut(dim, 0, layout.size(dim)) for dim in dims]


def expert_cuts(shape: Shape, layout: Layout) -> list[Cut]:
    """How `ep` and FSDP cut the experts of a layer."""
    ranks, shards = layout.size("ep"), layout.size("efsdp")
    cuts = [Cut("ep", 0, ranks)]
    if shards > 1:
        cuts.append(Cut("efsdp", expert_shard_dim(shape, ranks, shards), shards))
    return cuts


# Bytes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of weights, of their gradients, and of their optimizer states."""

    weights: int = 0
    gradients: int = 0
    states: int = 0

    def __add__(self, other: "HeldBytes") -> "HeldBytes":
        return HeldBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.states + other.states,
        )


def master_size(precision: str) -> int:
    """Bytes of an element of the weights, which float64 alone has in another type than float32."""
    return 8 if precision == "float64" else 4


def compute_size(precision: str) -> int:
    """Bytes of an element that blocks compute with."""
    return {"float64": 8, "float32": 4}.get(precision, 2)


def held_bytes(
    parameter: ParameterSpec,
    layout: Layout,
    precision: str,
    optimizer: OptimizerSection,
    shard_optimizer: bool = False,
) -> HeldBytes:
    """What the rank keeps of a parameter that is the first one on every axis: no other rank's part
    is larger."""
    size = master_size(precision)
    weights = size * first_part(parameter)
    if not parameter.trainable:
        return HeldBytes(weights)
    updated = optimizer_shard(parameter, layout) if shard_optimizer else parameter
    states = 0
    for state in state_specs(optimizer, updated).values():
        itemsize = size if state.dtype is None else state.dtype.itemsize
        states += itemsize * first_part(state)
    return HeldBytes(weights, weights, states)


def first_part(parameter: ParameterSpec) -> int:
    """Elements on the first rank of every axis. `torch.chunk` rounds the first part up, so a larger
    dim never has a smaller first part: it is the largest even after several cuts."""
    first = {cut.axis: 0 for cut in parameter.cuts}
    return math.prod(shape_of(parameter.part(first)))


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
    reference_bytes: int = 0  # of the weights of `train.reference`


def held_by_ranks(
    parameters: Iterable[ParameterSpec],
    layout: Layout,
    precision: str,
    optimizer: OptimizerSection,
    placement: Sequence[int] = (0,),
    shard_optimizer: bool = False,
) -> MemoryUse:
    """How many parameters the ranks of a layout hold, and their bytes: float64, or float32 in any
    other precision.

    `placement`: stage -> its index on `pp`. A parameter of two stages with the same index is held
    twice there.
    """
    total = 0
    nbytes = [HeldBytes() for _ in range(layout.size("pp"))]
    kinds: list[Counter[_Kind]] = [Counter() for _ in nbytes]
    for parameter in parameters:
        total += math.prod(parameter.dims)
        own = held_bytes(parameter, layout, precision, optimizer, shard_optimizer)
        for stage in parameter.stages:
            index = placement[stage]
            nbytes[index] += own
            kinds[index][parameter.dims, parameter.cuts] += 1

    by_pp = tuple(_fewest_and_most(of_stage, layout) for of_stage in kinds)
    return MemoryUse(
        total=total,
        fewest=min(fewest for fewest, _ in by_pp),
        most=max(most for _, most in by_pp),
        by_pp=by_pp,
        weight_bytes=max(own.weights for own in nbytes),
        gradient_bytes=max(own.gradients for own in nbytes),
        optimizer_bytes=max(own.states for own in nbytes),
    )


# Parameters of one shape with the same cuts: a stage has few kinds, however many layers.
_Kind = tuple[Shape, tuple[Cut, ...]]


def _fewest_and_most(kinds: Mapping[_Kind, int], layout: Layout) -> tuple[int, int]:
    """The fewest and the most elements on the ranks of a stage. `kinds`: how many parameters of
    each kind it has."""
    import numpy as np  # a plan starts without it

    # The axes of experts are another factorization of the same ranks: each family of parameters is
    # counted along its own axes, and the sums are joined rank by rank.
    dense_axes = tuple(dim for dim in layout.mesh_dims if dim != "pp")
    held = np.zeros(layout.world_size, dtype=np.int64)
    for (dims, cuts), count in kinds.items():
        has_experts = any(cut.axis in EXPERT_AXES for cut in cuts)
        axes = EXPERT_AXES if has_experts else dense_axes
        held[_ranks(layout, axes)] += count * _elements(dims, cuts, axes)
    stage = held[_ranks(layout, dense_axes)]
    return int(stage.min()), int(stage.max())


def _ranks(layout: Layout, axes: Sequence[str]) -> "np.ndarray":
    """The ranks of rank 0's group over these axes, as an array with a dim for each axis."""
    import numpy as np

    ranks = np.zeros([1] * len(axes), dtype=np.int64)
    for dim, axis in enumerate(axes):
        ranks = ranks + _along(dim, len(axes), layout.group(0, axis))
    return ranks


def _elements(dims: Shape, cuts: Sequence[Cut], axes: Sequence[str]) -> "np.ndarray":
    """Elements of a rank's part of a parameter, as an array over the rank's index on each axis; its
    dims are 1 for axes that do not cut."""
    import numpy as np

    sizes = [np.full([1] * len(axes), size) for size in dims]
    for cut in cuts:
        size = sizes[cut.dim]
        index = _along(axes.index(cut.axis), len(axes), range(cut.parts))
        chunk = -(-size // cut.parts)  # as `chunk_range`
        sizes[cut.dim] = np.clip(size - index * chunk, 0, chunk)
    elements = sizes[0]
    for size in sizes[1:]:
        elements = elements * size
    return elements


def _along(dim: int, dims: int, values: Iterable[int]) -> "np.ndarray":
    """Values along one of several dims, which broadcasts over the others."""
    import numpy as np

    shape = [1] * dims
    shape[dim] = -1
    return np.array(list(values)).reshape(shape)
