"""Which part of a parameter a rank holds.

`tp` splits a parameter first; FSDP then splits the rows of what is left. So the part is found by cutting along the
mesh's axes from the innermost outwards (`cuts.py`).
"""

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtrain.cuts import Part, part


def part_of(parameter: Tensor, rank: int) -> Part:
    """The part that a rank of the job holds; a scalar counts as one dim of size 1.

    `rank` is one of those that the parameter is spread over; of a plain tensor all hold all.
    """
    shape = tuple(parameter.shape) or (1,)
    if not isinstance(parameter, DTensor):
        return part(shape, ())
    mesh = parameter.device_mesh
    coordinate = (mesh.mesh == rank).nonzero()[0].tolist()
    return part(shape, [(dim, mesh.size(axis), coordinate[axis]) for axis, dim in _cuts(parameter)])


def cut_axes(parameter: Tensor) -> list[tuple[str, int]]:
    """Which axes of the layout cut a parameter, in the order of their cuts, each with the dim that it cuts."""
    if not isinstance(parameter, DTensor):
        return []
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None  # the project's meshes name their axes
    return [(names[axis], dim) for axis, dim in _cuts(parameter)]


def _cuts(parameter: DTensor) -> list[tuple[int, int]]:
    """(axis of the parameter's mesh, dim that it cuts), the innermost axis first."""
    axes = reversed(list(enumerate(parameter.placements)))
    # A placement that cuts says which dim it cuts; one that replicates has no dim.
    return [(i, placement.dim) for i, placement in axes if not placement.is_replicate()]  # type: ignore[attr-defined]


def local_part(parameter: Tensor) -> tuple[Tensor, Part]:
    """This rank's part of a parameter: the tensor that holds it, and where in the whole it lies."""
    if not isinstance(parameter, DTensor):
        return parameter, part_of(parameter, 0)
    return parameter.to_local(), part_of(parameter, parameter.device_mesh.get_rank())
