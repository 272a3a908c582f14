"""How a tensor is sharded: one record per parameter, `ParameterSpec`, for init, optimizer, norm,
files and plans.

`tp` splits a parameter first; FSDP then splits the rows of each part. So a rank's part follows from
cutting along the mesh's axes from the innermost outwards. Each cut is as by `torch.chunk`: parts
have equal sizes, except the last ones, which may be smaller or empty. Pure: even the functions that
take tensors do not import torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from meshtrain.layout import Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

Part = tuple[slice, ...]  # a slice of each dim of the whole
Shape = tuple[int, ...]


class Cut(NamedTuple):
    """A cut of a dim into parts, one for each index on an axis of the layout, which may be a
    derived axis."""

    axis: str
    dim: int
    parts: int


@dataclass(frozen=True)
class ParameterSpec:
    """How a parameter, or a tensor of its optimizer state, is sharded over the ranks."""

    name: str  # the first of its names in the whole model
    shape: Shape  # of the whole; () for a scalar, which counts as one dim of size 1 in its parts
    cuts: tuple[Cut, ...] = ()  # in the order of cutting
    # the pipeline stages that hold it; several if their layers share it
    stages: tuple[int, ...] = (0,)
    trainable: bool = True
    tied: tuple[str, ...] = ()  # its other names, if known
    layer: str = ""  # the class of its layer, if known
    dtype: "torch.dtype | None" = None  # None: the master dtype

    @property
    def dims(self) -> Shape:
        """The shape with a scalar as one dim."""
        return self.shape or (1,)

    def part(self, position: Mapping[str, int]) -> Part:
        """The part of a rank. `position`: the rank's index on each axis in `cuts`."""
        cuts = [(cut.dim, cut.parts, position[cut.axis]) for cut in self.cuts]
        return local_slice(self.dims, cuts)

    def copies(self, layout: Layout) -> int:
        """The number of copies of each element on the ranks of a layout; a rank with two stages may
        hold two."""
        ranks_of_stage = layout.world_size // layout.size("pp")
        parts = math.prod(cut.parts for cut in self.cuts)
        return len(self.stages) * (ranks_of_stage // parts)

    def shapes(self, *axes: str) -> set[Shape]:
        """The distinct shapes of parts after the cuts over these axes; with no axes: after all
        cuts."""
        shapes = {self.dims}
        for cut in self.cuts:
            if axes and cut.axis not in axes:
                continue
            smaller = set()
            for shape in shapes:
                for size in chunk_sizes(shape[cut.dim], cut.parts):
                    smaller.add((*shape[: cut.dim], size, *shape[cut.dim + 1 :]))
            shapes = smaller
        return shapes


def chunk_range(size: int, parts: int, index: int) -> slice:
    """The `index`-th of `parts` parts of a dim."""
    chunk = -(-size // parts)
    return slice(min(index * chunk, size), min((index + 1) * chunk, size))


def chunk_lengths(size: int, parts: int) -> list[int]:
    """The size of each part of a dim."""
    ranges = (chunk_range(size, parts, index) for index in range(parts))
    return [part.stop - part.start for part in ranges]


def chunk_sizes(size: int, parts: int) -> set[int]:
    """The distinct sizes of the parts of a dim: full chunks, a remainder, and 0."""
    chunk = max(1, -(-size // parts))
    first, last = 0, parts - 1
    with_remainder = min(size // chunk, last)
    ranges = [chunk_range(size, parts, index) for index in (first, with_remainder, last)]
    return {part.stop - part.start for part in ranges}


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape, without a tensor: a trace counts those."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def expert_shard_dim(shape: Sequence[int], ep: int, efsdp: int) -> int:
    """The dim of a layer's experts (E, rows, ...) that FSDP cuts after `ep` has cut dim 0: the
    experts, or the rows of each if a rank has fewer experts than there are shards and the number of
    rows is divisible."""
    experts_of_rank = -(-shape[0] // ep)
    cuts_rows = experts_of_rank < efsdp and len(shape) > 1 and shape[1] % efsdp == 0
    return 1 if cuts_rows else 0


def local_slice(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Part:
    """The part of a tensor of this shape after successive cuts: (dim, parts, index) each."""
    spans = [slice(0, size) for size in shape]
    for dim, parts, index in cuts:
        start, stop = spans[dim].start, spans[dim].stop
        inner = chunk_range(stop - start, parts, index)
        spans[dim] = slice(start + inner.start, start + inner.stop)
    return tuple(spans)


def overlap(first: Part, second: Part) -> Part:
    """The intersection of two parts of a whole; it may be empty."""
    spans = []
    for a, b in zip(first, second, strict=True):
        start = max(a.start, b.start)
        stop = max(start, min(a.stop, b.stop))
        spans.append(slice(start, stop))
    return tuple(spans)


def within(inner: Part, outer: Part) -> Part:
    """The position of a part relative to another part that contains it."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True)
    )


def is_empty(part: Part) -> bool:
    return any(rows.stop <= rows.start for rows in part)


def shape_of(part: Part) -> tuple[int, ...]:
    return tuple(rows.stop - rows.start for rows in part)


def overlapping(
    cuts: Sequence[tuple[int, int]], whole: Part, part: Part
) -> Iterator[tuple[tuple[int, ...], Part]]:
    """The parts of a whole after cuts, (dim, parts) each, that overlap `part`, with their index in
    every cut."""
    if not cuts:
        if not is_empty(overlap(whole, part)):
            yield (), whole
        return
    (dim, parts), *other_cuts = cuts
    start, stop = whole[dim].start, whole[dim].stop
    size = stop - start
    if size == 0:
        return
    chunk = chunk_range(size, parts, 0).stop
    # The chunks that `part` overlaps, of which there may be far fewer than all.
    first = (max(part[dim].start, start) - start) // chunk
    end = -(-(min(part[dim].stop, stop) - start) // chunk)
    for index in range(first, min(parts, end)):
        rows = chunk_range(size, parts, index)
        inner = (*whole[:dim], slice(start + rows.start, start + rows.stop), *whole[dim + 1 :])
        for other_indices, piece in overlapping(other_cuts, inner, part):
            yield (index, *other_indices), piece


def optimizer_shard(spec: ParameterSpec, layout: Layout) -> ParameterSpec:
    """The rows of a parameter that one of its replicas updates under `parallel.shard_optimizer`
    (ZeRO-1)."""
    is_of_experts = any(cut.axis == "ep" for cut in spec.cuts)
    axis = "edp_replicate" if is_of_experts else "dp_replicate"
    copies = layout.size(axis)
    if copies == 1:
        return spec
    return replace(spec, cuts=(*spec.cuts, Cut(axis, dim=0, parts=copies)))


def tensor_spec(name: str, tensor: "Tensor", stages: tuple[int, ...] = (0,)) -> ParameterSpec:
    """The spec of a DTensor, or of a plain tensor, which every rank holds whole."""
    cuts: list[Cut] = []  # outermost axis first
    mesh = getattr(tensor, "device_mesh", None)  # of a DTensor
    if mesh is not None:
        placements: Any = tensor.placements  # type: ignore[attr-defined]
        for axis, placement, size in zip(_axes(mesh), placements, mesh.shape, strict=True):
            # A placement that shards has a dim; one that replicates has none.
            if not placement.is_replicate():
                cuts.append(Cut(axis, placement.dim, size))
    return ParameterSpec(
        name,
        tuple(tensor.shape),
        cuts=tuple(reversed(cuts)),  # the innermost axis cuts first
        stages=stages,
        trainable=tensor.requires_grad,
        dtype=tensor.dtype,
    )


def parameters_of(model: "nn.Module") -> "list[tuple[ParameterSpec, nn.Parameter]]":
    """The parameters of a model, or of this rank's stages. A parameter tied across two stages
    occurs twice."""
    stages_of: Any = getattr(model, "parameter_stages", None)  # of a Pipeline
    parameters = []
    for name, parameter in model.named_parameters():
        stages = (0,) if stages_of is None else stages_of[name]
        parameters.append((tensor_spec(name, parameter, stages), parameter))
    return parameters


def local_part(tensor: "Tensor") -> "tuple[Tensor, Part]":
    """This rank's part of a tensor: the local plain tensor, and its position in the whole."""
    spec = tensor_spec("", tensor)
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor, spec.part({})
    position = dict(zip(_axes(mesh), mesh.get_coordinate(), strict=True))
    return tensor.to_local(), spec.part(position)  # type: ignore[attr-defined]


def _axes(mesh: "DeviceMesh") -> Sequence[str]:
    """The axis name of each dim of a mesh; meshtrain's meshes have names."""
    return mesh.mesh_dim_names or [str(i) for i in range(mesh.ndim)]
