"""How a tensor is sharded: one record per parameter, `ParameterSpec`, which init, optimizer, norm, files and plan read.

`tp` splits a parameter first; FSDP then splits the rows of what is left. So the part of a rank is found by cutting
along the mesh's axes from the innermost outwards. Each cut is torch's own (`torch.chunk`): parts are of one size but
the last ones, which may be smaller or empty. Pure: the functions that take tensors need no torch to be imported.
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

Part = tuple[slice, ...]  # of each dim of the whole
Shape = tuple[int, ...]


class Cut(NamedTuple):
    """A dim that is cut into parts, one for each index on an axis of the layout, which may be a derived one."""

    axis: str
    dim: int
    parts: int


@dataclass(frozen=True)
class ParameterSpec:
    """How a parameter, or a tensor of its optimizer state, is spread over the ranks."""

    name: str  # the first of its names in the whole model
    shape: Shape  # of the whole; () for a scalar, which counts as one dim of size 1 wherever parts are meant
    cuts: tuple[Cut, ...] = ()  # in the order in which they are made
    stages: tuple[int, ...] = (0,)  # of a pipeline, those that hold it; several if their layers share it
    trainable: bool = True
    tied: tuple[str, ...] = ()  # its other names, where they are known
    layer: str = ""  # the class of the layer that it belongs to, where it is known
    dtype: "torch.dtype | None" = None  # None: the type in which parameters are kept

    @property
    def dims(self) -> Shape:
        """The shape with a scalar as one dim."""
        return self.shape or (1,)

    def part(self, position: Mapping[str, int]) -> Part:
        """The part of a rank; `position`: its index on each axis that cuts."""
        return local_slice(self.dims, [(cut.dim, cut.parts, position[cut.axis]) for cut in self.cuts])

    def copies(self, layout: Layout) -> int:
        """How many copies of each element the ranks of a layout hold; a rank with two stages may hold two."""
        in_stage = layout.world_size // layout.size("pp") // math.prod(cut.parts for cut in self.cuts)
        return len(self.stages) * in_stage

    def shapes(self, *axes: str) -> set[Shape]:
        """The different shapes of parts after the cuts over these axes; without any: after all cuts."""
        shapes = {self.dims}
        for cut in self.cuts:
            if not axes or cut.axis in axes:
                shapes = {
                    (*shape[: cut.dim], size, *shape[cut.dim + 1 :])
                    for shape in shapes
                    for size in chunk_sizes(shape[cut.dim], cut.parts)
                }
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
    """The different sizes of the parts of a dim: whole ones, a remainder, and none."""
    chunk = max(1, -(-size // parts))
    ranges = (chunk_range(size, parts, index) for index in {0, min(size // chunk, parts - 1), parts - 1})
    return {part.stop - part.start for part in ranges}


def expert_shard_dim(shape: Sequence[int], ep: int, efsdp: int) -> int:
    """Which dim of a layer's experts (E, rows, ...) FSDP cuts once `ep` has cut dim 0: the experts, or the rows of each
    where a rank has fewer experts than there are shards and the rows divide."""
    fewer = -(-shape[0] // ep) < efsdp
    return 1 if fewer and len(shape) > 1 and shape[1] % efsdp == 0 else 0


def local_slice(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Part:
    """What is left of a whole of this shape after cuts made one after the other: (dim, parts, index) each."""
    spans = [slice(0, size) for size in shape]
    for dim, parts, index in cuts:
        inner = chunk_range(spans[dim].stop - spans[dim].start, parts, index)
        spans[dim] = slice(spans[dim].start + inner.start, spans[dim].start + inner.stop)
    return tuple(spans)


def overlap(first: Part, second: Part) -> Part:
    """What two parts of a whole have in common; it may be empty."""
    pairs = zip(first, second, strict=True)
    return tuple(slice(low := max(a.start, b.start), max(low, min(a.stop, b.stop))) for a, b in pairs)


def within(inner: Part, outer: Part) -> Part:
    """Where a part lies in another part that contains it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True))


def is_empty(part: Part) -> bool:
    return any(rows.stop <= rows.start for rows in part)


def shape_of(part: Part) -> tuple[int, ...]:
    return tuple(rows.stop - rows.start for rows in part)


def overlapping(cuts: Sequence[tuple[int, int]], whole: Part, part: Part) -> Iterator[tuple[tuple[int, ...], Part]]:
    """The parts of a whole after cuts, (dim, parts) each, that overlap with `part`, and their index on every cut."""
    if not cuts:
        if not is_empty(overlap(whole, part)):
            yield (), whole
        return
    dim, parts = cuts[0]
    start, size = whole[dim].start, whole[dim].stop - whole[dim].start
    if size == 0:
        return
    chunk = chunk_range(size, parts, 0).stop
    low, high = max(part[dim].start, start) - start, min(part[dim].stop, whole[dim].stop) - start
    for index in range(low // chunk, min(parts, -(-high // chunk))):
        rows = chunk_range(size, parts, index)
        inner = (*whole[:dim], slice(start + rows.start, start + rows.stop), *whole[dim + 1 :])
        for others, piece in overlapping(cuts[1:], inner, part):
            yield (index, *others), piece


def optimizer_shard(spec: ParameterSpec, layout: Layout) -> ParameterSpec:
    """The rows of a parameter that one of its copies updates under `parallel.shard_optimizer` (ZeRO-1)."""
    axis = "edp_replicate" if any(cut.axis == "ep" for cut in spec.cuts) else "dp_replicate"
    copies = layout.size(axis)
    return spec if copies == 1 else replace(spec, cuts=(*spec.cuts, Cut(axis, 0, copies)))


def tensor_spec(name: str, tensor: "Tensor", stages: tuple[int, ...] = (0,)) -> ParameterSpec:
    """The spec of a tensor as it lies: a DTensor, or a plain one, of which every rank holds all."""
    cuts: tuple[Cut, ...] = ()
    mesh = getattr(tensor, "device_mesh", None)  # of a DTensor
    if mesh is not None:
        placed: Any = zip(_axes(mesh), tensor.placements, mesh.shape, strict=True)  # type: ignore[attr-defined]
        # A placement that cuts says which dim it cuts; one that replicates has none. The innermost axis cuts first.
        sharded = [Cut(axis, placement.dim, size) for axis, placement, size in placed if not placement.is_replicate()]
        cuts = tuple(reversed(sharded))
    return ParameterSpec(name, tuple(tensor.shape), cuts, stages, tensor.requires_grad, dtype=tensor.dtype)


def parameters_of(model: "nn.Module") -> "list[tuple[ParameterSpec, nn.Parameter]]":
    """The parameters of a model, or of the stages that this rank has of one: a tied one of two of these comes twice."""
    stages: Any = getattr(model, "parameter_stages", None)  # of a Pipeline
    return [(tensor_spec(name, p, (0,) if stages is None else stages[name]), p) for name, p in model.named_parameters()]


def local_part(tensor: "Tensor") -> "tuple[Tensor, Part]":
    """This rank's part of a tensor: the plain tensor that holds it, and where in the whole it lies."""
    spec, mesh = tensor_spec("", tensor), getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor, spec.part({})
    return tensor.to_local(), spec.part(dict(zip(_axes(mesh), mesh.get_coordinate(), strict=True)))  # type: ignore[attr-defined]


def _axes(mesh: "DeviceMesh") -> Sequence[str]:
    """The axis of each dim of a mesh; meshtrain's name them."""
    return mesh.mesh_dim_names or [str(i) for i in range(mesh.ndim)]
