"""Which part of a parameter a rank holds.

`tp` splits a parameter first; FSDP then splits the rows of what is left. So the part is found by cutting along the
mesh's axes from the innermost outwards (`cuts.py`).
"""

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtrain.cuts import Part, part


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
