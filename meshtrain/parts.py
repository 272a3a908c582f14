"""Which part of a parameter a rank holds.

`tp` splits a parameter first; FSDP then splits the rows of what is left. So the part is found by cutting along the
mesh's axes from the innermost outwards. Each cut is torch's own (`torch.chunk`): all parts are of one size but the last
ones, which may be smaller or empty.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

Part = tuple[slice, ...]  # of each dim of the whole


def cut(size: int, parts: int, index: int) -> slice:
    """The `index`-th of `parts` parts of a dim."""
    each = -(-size // parts)
    return slice(min(index * each, size), min((index + 1) * each, size))


def part(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Part:
    """What is left of a whole of this shape after cuts made one after the other: (dim, parts, index) each."""
    left = [slice(0, size) for size in shape]
    for dim, parts, index in cuts:
        inner = cut(left[dim].stop - left[dim].start, parts, index)
        left[dim] = slice(left[dim].start + inner.start, left[dim].start + inner.stop)
    return tuple(left)


def part_of(parameter: Tensor, rank: int) -> Part:
    """The part that a rank of the job holds; a scalar counts as one dim of size 1.

    `rank` is one of those that the parameter is spread over (`holders` names them); of a plain tensor all hold all.
    """
    shape = tuple(parameter.shape) or (1,)
    if not isinstance(parameter, DTensor):
        return part(shape, ())
    mesh = parameter.device_mesh
    coordinate = (mesh.mesh == rank).nonzero()[0].tolist()
    axes = reversed(list(enumerate(parameter.placements)))
    # A placement that cuts says which dim it cuts; one that replicates has no dim.
    cuts = [(placement.dim, mesh.size(i), coordinate[i]) for i, placement in axes if not placement.is_replicate()]  # type: ignore[attr-defined]
    return part(shape, cuts)


def local_part(parameter: Tensor) -> tuple[Tensor, Part]:
    """This rank's part of a parameter: the tensor that holds it, and where in the whole it lies."""
    if not isinstance(parameter, DTensor):
        return parameter, part_of(parameter, 0)
    return parameter.to_local(), part_of(parameter, parameter.device_mesh.get_rank())


def holders(parameter: Tensor) -> list[tuple[int, Part]]:
    """The different parts of a DTensor that are not empty, and of the ranks of its mesh that hold each the first one.

    Together the parts are the whole, and no two overlap.
    """
    assert isinstance(parameter, DTensor)
    first: dict[tuple, tuple[int, Part]] = {}
    for rank in sorted(parameter.device_mesh.mesh.flatten().tolist()):
        found = part_of(parameter, rank)
        if all(each.stop > each.start for each in found):
            first.setdefault(tuple((each.start, each.stop) for each in found), (rank, found))
    return list(first.values())
