"""Matrix exchange: sends the parts of matrices to the ranks that compute with whole ones, and the
parts of the results back.

Each matrix is assigned to one rank of its stage, balanced by cost (`matrices.py` plans that); one
exchange gathers it there, and another returns the result. Replicas share the work, so nothing is
computed twice.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshtrain.errors import group_values
from meshtrain.layout import STAGE
from meshtrain.mesh import Mesh
from meshtrain.optim.grad_norm import LocalParameter
from meshtrain.optim.matrices import Piece, plan_exchange
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
        self._ranks = len(ranks)
        self._axis: AxisGroup | None = None
        if self._ranks > 1:
            self._axis = axis_group(mesh, STAGE)
        self._plan = plan_exchange(
            [(p.spec, p.stored_as) for p in parameters], mesh.layout, ranks, mesh.index(STAGE)
        )
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
        plan = self._plan
        like = tensors[0]
        outgoing = [(piece.matrix.owner, self._view(tensors, piece)) for piece in plan.outgoing]
        arrived = self._send(outgoing, [(piece.source, piece) for piece in plan.arriving], like)
        matrices: dict[int, Tensor] = {}
        for piece, values in zip(plan.arriving, arrived, strict=True):
            matrix = piece.matrix
            if matrix.number not in matrices:
                matrices[matrix.number] = like.new_empty(matrix.shape)
            _in_matrix(matrices[matrix.number], piece).copy_(values.view(piece.shape[-2:]))
        return matrices

    def _compute(self, function: Callable[[Tensor], Tensor], matrices: dict[int, Tensor]) -> None:
        """Replaces each matrix by its result; matrices of one shape are computed in batches."""
        by_shape = group_values((matrices[number].shape, number) for number in sorted(matrices))
        for shape, numbers in by_shape.items():
            count = max(1, BATCH // math.prod(shape))
            for first in range(0, len(numbers), count):
                batch = numbers[first : first + count]
                results = function(torch.stack([matrices[number] for number in batch]))
                matrices.update(zip(batch, results.unbind(), strict=True))

    def _return(self, matrices: dict[int, Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of the results, in the shapes of the tensors."""
        plan = self._plan
        outgoing = [
            (rank, _in_matrix(matrices[piece.matrix.number], piece)) for rank, piece in plan.results
        ]
        arriving = [(piece.matrix.owner, piece) for piece in plan.returning]
        returned = self._send(outgoing, arriving, tensors[0])
        results = [torch.empty_like(tensor) for tensor in tensors]
        for piece, values in zip(plan.returning, returned, strict=True):
            self._view(results, piece).copy_(values.view(piece.shape))
        return results

    def _view(self, tensors: Sequence[Tensor], piece: Piece) -> Tensor:
        """A view of the piece in this rank's part of its parameter."""
        i = piece.matrix.parameter
        return tensors[i][within(piece.part, self._plan.own[i])]

    def _send(
        self,
        outgoing: Sequence[tuple[int, Tensor]],
        arriving: Sequence[tuple[int, Piece]],
        like: Tensor,
    ) -> Sequence[Tensor]:
        """(target rank, values) to send and (source rank, piece) to receive, each by rank -> the
        flat values of these pieces."""
        flat = torch.cat([like.new_empty(0), *(values.reshape(-1) for _, values in outgoing)])
        lengths = [math.prod(piece.shape) for _, piece in arriving]
        if self._axis is not None:
            send = [0] * self._ranks
            receive = [0] * self._ranks
            for rank, values in outgoing:
                send[rank] += values.numel()
            for (rank, _), length in zip(arriving, lengths, strict=True):
                receive[rank] += length
            flat = self._axis.start_all_to_all_single(flat, send, receive).wait()
        return flat.split(lengths)


def _in_matrix(whole: Tensor, piece: Piece) -> Tensor:
    return whole[within(piece.part, piece.matrix.part)[-2:]]
