"""The matrices in the parameters, which rank of a stage computes each, and which ranks hold its
pieces. Pure."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def matrices_of(spec: ParameterSpec, table: Table) -> list[Part]:
    """The matrices of a parameter (m, n) or (E, m, n), divided as in the model's files
    (`stored_as`), so that each expert's gate and up are two matrices. A 3-D tensor of a file gives
    one matrix per index of dim 0. All have the same shape. A parameter that no file has, such as a
    LoRA adapter, is not divided further."""
    tensors = stored_tensors(spec.name, spec.shape, table)
    if not tensors:  # no file has the parameter: without a table it is one tensor
        tensors = stored_tensors(spec.name, spec.shape, {})
    matrices: list[Part] = []
    for stored in tensors:
        first, *rest = stored.part
        if len(rest) == 2:
            matrices += [(slice(i, i + 1), *rest) for i in range(first.start, first.stop)]
        else:
            matrices.append(stored.part)
    return matrices


def deal_out(shapes: Iterable[Shape], ranks: int) -> list[int]:
    """Assigns each matrix to a rank: the costliest remaining one to the least loaded rank (LPT;
    Graham, https://doi.org/10.1137/0117039)."""
    # of products m x n by n x m, and m x m by m x n
    costs = [min(shape) ** 2 * max(shape) for shape in shapes]
    costliest_first = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    owners = [0] * len(costs)
    loads = [(0, rank) for rank in range(ranks)]  # a heap: the least loaded rank is its first
    for i in costliest_first:
        load, rank = loads[0]
        owners[i] = rank
        heapq.heapreplace(loads, (load + costs[i], rank))
    return owners


def holders_of(
    spec: ParameterSpec, layout: Layout, ranks: Sequence[int]
) -> list[tuple[Part, list[int]]]:
    """Each nonempty part of a parameter that some of the ranks hold, and the indices of these ranks
    in `ranks`."""
    held: dict[tuple[tuple[int, int], ...], tuple[Part, list[int]]] = {}
    for place, rank in enumerate(ranks):
        indices = {cut.axis: layout.index(rank, cut.axis) for cut in spec.cuts}
        part = spec.part(indices)
        if is_empty(part):
            continue
        key = tuple((rows.start, rows.stop) for rows in part)  # a slice has no hash
        _, holders = held.setdefault(key, (part, []))
        holders.append(place)
    return list(held.values())


def piece_of(matrix: Matrix, part: Part, holders: Sequence[int], ranks: int) -> Piece | None:
    """The piece of a matrix that the holders of a part of its parameter have; None: they have none
    of it."""
    common = overlap(part, matrix.part)
    if is_empty(common):
        return None
    source = matrix.owner
    if matrix.owner not in holders:
        # One near it: at the same relative position among holders as the owner among all ranks.
        source = holders[matrix.owner * len(holders) // ranks]
    return Piece(matrix=matrix, part=common, holders=holders, source=source)


@dataclass(frozen=True)
class Transfer:
    """What a rank sends and receives in one exchange: pieces, with the rank at the other end.

    Ordered by that rank, and within a message by matrix: a rank holds at most one piece of each, so
    that both ends have the same order.
    """

    outgoing: Sequence[tuple[int, Piece]]
    arriving: Sequence[tuple[int, Piece]]

    @classmethod
    def of(
        cls, outgoing: Iterable[tuple[int, Piece]], arriving: Iterable[tuple[int, Piece]]
    ) -> "Transfer":
        """From pieces in the order of their matrices, which sorting keeps."""
        return cls(sorted(outgoing, key=_rank_of), sorted(arriving, key=_rank_of))


def _rank_of(message: tuple[int, Piece]) -> int:
    return message[0]


@dataclass(frozen=True)
class ExchangePlan:
    """What a rank of a stage sends and receives, so that one rank has each matrix whole.

    Attributes:
        shapes: the shape of the matrices of each parameter.
        own: the part of each parameter that this rank holds; (): it holds none.
        to_owners: sends the pieces that this rank holds to the ranks that compute their matrices.
        to_holders: sends the results to all ranks that hold a piece.
    """

    shapes: Sequence[Shape]
    own: Sequence[Part]
    to_owners: Transfer
    to_holders: Transfer


def plan_exchange(
    parameters: Sequence[tuple[ParameterSpec, Table]], layout: Layout, ranks: Sequence[int], me: int
) -> ExchangePlan:
    """The plan of the rank at the index `me` of the ranks of a stage, all of which have the same
    parameters, each with its table `stored_as`."""
    matrices = _assigned(parameters, len(ranks))
    holders = _holders(parameters, layout, ranks)
    held: list[Piece] = []  # by this rank
    computed: list[Piece] = []  # those of the matrices that it computes
    for matrix in matrices:
        computes = matrix.owner == me
        for part, who in holders[matrix.parameter]:
            holds = me in who
            if not holds and not computes:
                continue
            piece = piece_of(matrix, part, who, len(ranks))
            if piece is None:
                continue
            if holds:
                held.append(piece)
            if computes:
                computed.append(piece)

    shape_of_matrix = {matrix.parameter: matrix.shape for matrix in matrices}
    own = [next((part for part, who in known if me in who), ()) for known in holders]
    return ExchangePlan(
        shapes=[shape_of_matrix[i] for i in range(len(parameters))],
        own=own,
        to_owners=Transfer.of(
            outgoing=[(piece.matrix.owner, piece) for piece in held if piece.source == me],
            arriving=[(piece.source, piece) for piece in computed],
        ),
        to_holders=Transfer.of(
            outgoing=[(rank, piece) for piece in computed for rank in piece.holders],
            arriving=[(piece.matrix.owner, piece) for piece in held],
        ),
    )


def _assigned(parameters: Sequence[tuple[ParameterSpec, Table]], ranks: int) -> list[Matrix]:
    """All matrices, numbered, each with the rank that computes it."""
    matrices: list[Matrix] = []
    for i, (spec, table) in enumerate(parameters):
        for part in matrices_of(spec, table):
            matrices.append(Matrix(number=len(matrices), parameter=i, part=part, owner=0))
    owners = deal_out([matrix.shape for matrix in matrices], ranks)
    return [matrix._replace(owner=owner) for matrix, owner in zip(matrices, owners, strict=True)]


def _holders(
    parameters: Sequence[tuple[ParameterSpec, Table]], layout: Layout, ranks: Sequence[int]
) -> list[list[tuple[Part, list[int]]]]:
    """`holders_of` each parameter."""
    # Layers are alike: there are few kinds of parameters, and many ranks.
    of_kind: dict[object, list[tuple[Part, list[int]]]] = {}
    of_parameters = []
    for spec, _ in parameters:
        kind = (spec.dims, spec.cuts)
        if kind not in of_kind:
            of_kind[kind] = holders_of(spec, layout, ranks)
        of_parameters.append(of_kind[kind])
    return of_parameters
