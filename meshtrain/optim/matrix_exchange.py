"""Matrix exchange: sends the parts of matrices to the ranks that compute with whole ones, and the
parts of the results back.

Each matrix is assigned to one rank of its stage, balanced by cost (`matrices.py` plans that); one
exchange gathers it there, and another returns the result. Replicas share the work, so nothing is
computed twice.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshtrain.errors import group_values
from meshtrain.layout import STAGE
from meshtrain.mesh import Mesh
from meshtrain.optim.grad_norm import LocalParameter
from meshtrain.optim.matrices import Piece, Transfer, plan_exchange
from meshtrain.parallel.collectives import AxisGroup, axis_group
from meshtrain.parallel.sharding import within

BATCH = 2**26  # elements, over matrices of one shape, that are computed together


class MatrixExchange:
    """
    Attributes:
        shapes: the shape of the matrices of each parameter.
    """

    def __init__(self, parameters: Sequence[LocalParameter], mesh: Mesh) -> None:
        """All ranks of a stage have the same parameters, in the same order."""
        ranks = mesh.layout.group(mesh.rank, STAGE)
        me = mesh.index(STAGE)
        self._ranks = len(ranks)
        self._axis: AxisGroup | None = None
        if self._ranks > 1:
            self._axis = axis_group(mesh, STAGE)

        described = []
        for parameter in parameters:
            described.append((parameter.spec, parameter.stored_as))
        self._plan = plan_exchange(described, mesh.layout, ranks, me)
        self.shapes = self._plan.shapes

    def apply(
        self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Applies `function`, (b, m, n) -> (b, m, n), to the matrices of tensors sharded like the
        parameters."""
        matrices = self._gather(tensors)
        self._compute(function, matrices)
        return self._return(matrices, tensors)

    def _gather(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """The whole matrices that this rank computes, by number."""
        transfer = self._plan.to_owners
        like = tensors[0]
        outgoing = [self._in_tensor(tensors, piece) for _, piece in transfer.outgoing]

        # A matrix is put together from the pieces of several ranks.
        matrices: dict[int, Tensor] = {}
        for piece, values in self._exchange(transfer, outgoing, like):
            matrix = piece.matrix
            if matrix.number not in matrices:
                matrices[matrix.number] = like.new_empty(matrix.shape)
            place = _in_matrix(matrices, piece)
            place.copy_(values.view(place.shape))
        return matrices

    def _compute(self, function: Callable[[Tensor], Tensor], matrices: dict[int, Tensor]) -> None:
        """Replaces each matrix by its result."""
        # One product of a batch costs less than one of each matrix, but a batch needs one shape.
        by_shape = group_values((matrices[number].shape, number) for number in sorted(matrices))
        for shape, numbers in by_shape.items():
            most = max(1, BATCH // math.prod(shape))
            for first in range(0, len(numbers), most):
                batch = numbers[first : first + most]
                stacked = torch.stack([matrices[number] for number in batch])
                results = function(stacked)
                for number, result in zip(batch, results.unbind(), strict=True):
                    matrices[number] = result

    def _return(self, matrices: dict[int, Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of the results, in the shapes of the tensors."""
        transfer = self._plan.to_holders
        like = tensors[0]
        outgoing = [_in_matrix(matrices, piece) for _, piece in transfer.outgoing]

        results = [torch.empty_like(tensor) for tensor in tensors]
        for piece, values in self._exchange(transfer, outgoing, like):
            place = self._in_tensor(results, piece)
            place.copy_(values.view(place.shape))
        return results

    def _in_tensor(self, tensors: Sequence[Tensor], piece: Piece) -> Tensor:
        """A view of the piece in this rank's part of its parameter."""
        i = piece.matrix.parameter
        place = within(piece.part, self._plan.own[i])
        return tensors[i][place]

    def _exchange(
        self, transfer: Transfer, outgoing: Sequence[Tensor], like: Tensor
    ) -> Iterator[tuple[Piece, Tensor]]:
        """Sends the values of the outgoing pieces; returns each arriving piece with its values, in
        one dim."""
        # A rank may have nothing to send, and `cat` takes no empty list.
        parts = [like.new_empty(0)]
        for values in outgoing:
            parts.append(values.reshape(-1))
        message = torch.cat(parts)
        if self._axis is not None:
            send = self._elements_by_rank(transfer.outgoing)
            receive = self._elements_by_rank(transfer.arriving)
            coming = self._axis.start_all_to_all_single(message, send, receive)
            message = coming.wait()

        pieces = [piece for _, piece in transfer.arriving]
        values_of_pieces = message.split([piece.numel for piece in pieces])
        return zip(pieces, values_of_pieces, strict=True)

    def _elements_by_rank(self, pieces: Sequence[tuple[int, Piece]]) -> list[int]:
        elements = [0] * self._ranks
        for rank, piece in pieces:
            elements[rank] += piece.numel
        return elements


def _in_matrix(matrices: Mapping[int, Tensor], piece: Piece) -> Tensor:
    """A view of the piece in its matrix."""
    place = within(piece.part, piece.matrix.part)
    # The matrix of one expert is part of a parameter of three dims, and has the last two itself.
    rows_and_columns = place[-2:]
    return matrices[piece.matrix.number][rows_and_columns]
