"""The matrices in the parameters, which rank of a stage computes each, and which ranks hold its
pieces. Pure."""

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshtrain.huggingface.stored_names import Table, stored_tensors
from meshtrain.layout import Layout
from meshtrain.parallel.sharding import ParameterSpec, Part, Shape, is_empty, overlap, shape_of


class Matrix(NamedTuple):
    """A matrix, which is a whole parameter or a part of one."""

    number: int  # index among all matrices
    parameter: int  # index of its parameter
    part: Part  # its position in the whole parameter
    owner: int  # the rank that computes it, as its index in the stage

    @property
    def shape(self) -> Shape:
        return shape_of(self.part)[-2:]


class Piece(NamedTuple):
    """A piece of a matrix that some ranks hold."""

    matrix: Matrix
    part: Part  # its position in the whole parameter
    holders: Sequence[int]  # the ranks that hold it, ascending
    source: int  # the holder that sends it to the owner

    @property
    def shape(self) -> Shape:
        return shape_of(self.part)


def matrices_of(spec: ParameterSpec, table: Table) -> list[Part]:
    """The matrices of a parameter (m, n) or (E, m, n), divided as in the model's files
    (`stored_as`), so that each expert's gate and up are two matrices. A 3-D tensor of a file gives
    one matrix per index of dim 0. All have the same shape. A parameter that no file has, such as a
    LoRA adapter, is not divided further."""
    matrices = []
    for stored in stored_tensors(spec.name, spec.shape, table) or stored_tensors(
        spec.name, spec.shape, {}
    ):
        first, *rest = stored.part
        stacked = len(rest) == 2
        firsts = [slice(i, i + 1) for i in range(first.start, first.stop)] if stacked else [first]
        matrices += [(rows, *rest) for rows in firsts]
    return matrices


def deal_out(shapes: Iterable[Shape], ranks: int) -> list[int]:
    """Assigns each matrix to a rank: the costliest remaining one to the least loaded rank (LPT;
    Graham, https://doi.org/10.1137/0117039)."""
    # of products m x n by n x m, and m x m by m x n
    costs = [min(shape) ** 2 * max(shape) for shape in shapes]
    load, owners = [(0, rank) for rank in range(ranks)], [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least, owners[i] = load[0]
        heapq.heapreplace(load, (least + costs[i], owners[i]))
    return owners


def holders_of(
    spec: ParameterSpec, layout: Layout, ranks: Sequence[int]
) -> list[tuple[Part, list[int]]]:
    """Each nonempty part of a parameter that some of the ranks hold, and the indices of these ranks
    in `ranks`."""
    holders: dict[tuple[tuple[int, int], ...], tuple[Part, list[int]]] = {}
    for place, rank in enumerate(ranks):
        part = spec.part({cut.axis: layout.index(rank, cut.axis) for cut in spec.cuts})
        if not is_empty(part):
            holders.setdefault(tuple((rows.start, rows.stop) for rows in part), (part, []))[
                1
            ].append(place)
    return list(holders.values())


def piece_of(matrix: Matrix, part: Part, holders: Sequence[int], ranks: int) -> Piece | None:
    """The piece of a matrix that the holders of a part of its parameter have; None: they have none
    of it."""
    common = overlap(part, matrix.part)
    if is_empty(common):
        return None
    # The owner itself, or else a holder near it: at the same relative position among holders as the
    # owner among all.
    source = (
        matrix.owner if matrix.owner in holders else holders[matrix.owner * len(holders) // ranks]
    )
    return Piece(matrix, common, holders, source)
