"""Muon (Jordan et al., https://kellerjordan.github.io/posts/muon): momentum orthogonalized by
Newton-Schulz per matrix, with Moonlight's scale (Liu et al., https://arxiv.org/abs/2502.16982), for
which AdamW's rates and decays fit.

Matrices are stored in shards and orthogonalized whole. So each is assigned to one rank of its
stage, balanced by cost; one exchange gathers it there, and another returns the result. Replicas
share the work, so nothing is computed twice.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshtrain.errors import group_values
from meshtrain.layout import STAGE
from meshtrain.mesh import Mesh
from meshtrain.optim.grad_norm import LocalParameter, scale_gradients
from meshtrain.optim.matrices import Matrix, Piece, deal_out, holders_of, matrices_of, piece_of
from meshtrain.optim.optimizer import ParamGroup, UpdateRule
from meshtrain.parallel.collectives import axis_group
from meshtrain.parallel.sharding import ParameterSpec, shape_of, within

if TYPE_CHECKING:
    from meshtrain.config import Optimizer as OptimizerConfig
    from meshtrain.huggingface.stored_names import Table

# of the quintic polynomial: steep at 0, so that five steps are enough
COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)
STEPS = 5
EPS = 1e-7
RMS = 0.2  # typical of AdamW's updates; Muon's are scaled to it
BATCH = 2**26  # elements, over matrices of one shape, that are orthogonalized together


class Muon(UpdateRule):
    title, states = "Muon", ("momentum_buffer",)

    def __init__(self, groups: Sequence[ParamGroup], config: "OptimizerConfig", mesh: Mesh) -> None:
        super().__init__(groups, config, mesh)
        self._momentum, self._nesterov = config.momentum, config.nesterov
        self._parameters = [(group, p) for group in groups for p in group.parameters]
        self._exchange = MatrixExchange([p for _, p in self._parameters], mesh)

    @classmethod
    def update_bytes(cls, parameter: ParameterSpec, config: "OptimizerConfig", size: int) -> int:
        sent = 2 if size == 4 else size  # bytes of an element that is orthogonalized
        moved = 3 * size  # the new momentum
        moved += 5 * size  # kept, or the old one
        moved += 2 * size + (2 * size + sent) + 5 * size  # decay, step, kept or the old values
        if config.clip_norm is not None:
            moved += 2 * size
        if config.nesterov:
            moved += 3 * size
        if sent != size:
            moved += size + sent  # cast
        moved += 5 * 2 * sent  # copies into and out of messages, matrices and batches
        moved += 3 * sent  # division by the norm
        return moved * math.prod(parameter.shape)

    @classmethod
    def update_flops(cls, parameter: ParameterSpec, stored_as: "Table") -> int:
        flops = 0
        for part in matrices_of(parameter, stored_as):
            m, n = sorted(shape_of(part)[-2:])
            # X X^T (m, n) x (n, m), its square (m, m) x (m, m), and their sum times X
            flops += STEPS * (2 * m * n * m + 2 * m * m * m + 2 * m * m * n)
        return flops

    @torch.no_grad()
    def update(self, skip: Tensor, factor: Tensor | None) -> None:
        scale_gradients([p for _, p in self._parameters], factor)
        skipped, steps = skip.bool(), []
        for _, p in self._parameters:
            grad, buffer = p.local.grad, p.state["momentum_buffer"]
            assert grad is not None  # `squared_norm` has taken the gradient
            moved = buffer.lerp(grad, 1 - self._momentum)
            # Sent and orthogonalized in bfloat16, as is usual, except for float64, which must not
            # be rounded.
            dtype = grad.dtype if grad.dtype == torch.float64 else torch.bfloat16
            steps.append((grad.lerp(moved, self._momentum) if self._nesterov else moved).to(dtype))
            buffer.copy_(torch.where(skipped, buffer, moved))
        steps = self._exchange.apply(orthogonalize, steps)
        for (group, p), step, shape in zip(
            self._parameters, steps, self._exchange.shapes, strict=True
        ):
            local, rate = p.local.detach(), group.lr * RMS * math.sqrt(max(shape))
            changed = local.mul(1 - group.lr * group.options.weight_decay).add_(step, alpha=-rate)
            local.copy_(torch.where(skipped, local, changed))


def orthogonalize(x: Tensor) -> Tensor:
    """(b, m, n) -> approximately U V^T of each matrix U S V^T: singular values end between 0.7 and
    1.2."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class MatrixExchange:
    """Sends matrices to the ranks that compute them, and the results to all ranks that hold a part.

    Attributes:
        shapes: the shape of the matrices of each parameter.
    """

    def __init__(self, parameters: Sequence[LocalParameter], mesh: Mesh) -> None:
        """All ranks of a stage have the same parameters, in the same order."""
        ranks, me = mesh.layout.group(mesh.rank, STAGE), mesh.index(STAGE)
        self._axis, self._size = (axis_group(mesh, STAGE) if len(ranks) > 1 else None), len(ranks)
        of_each = [matrices_of(p.spec, p.stored_as) for p in parameters]
        self.shapes = [shape_of(parts[0])[-2:] for parts in of_each]
        all_of_them = [(i, part) for i, parts in enumerate(of_each) for part in parts]
        owners = deal_out([shape_of(part)[-2:] for _, part in all_of_them], len(ranks))
        # few, even with many layers
        kinds = {(p.spec.dims, p.spec.cuts): p.spec for p in parameters}
        known = {kind: holders_of(spec, mesh.layout, ranks) for kind, spec in kinds.items()}
        holders = [known[p.spec.dims, p.spec.cuts] for p in parameters]
        self._own = [next((part for part, who in parts if me in who), ()) for parts in holders]
        own, computed = list[Piece](), list[Piece]()  # pieces that this rank holds, and computes
        for number, ((i, part), owner) in enumerate(zip(all_of_them, owners, strict=True)):
            matrix = Matrix(number, i, part, owner)
            for rows, who in holders[i]:
                piece = (
                    piece_of(matrix, rows, who, len(ranks)) if owner == me or me in who else None
                )
                if piece is not None:
                    own += [piece] * (me in who)
                    computed += [piece] * (owner == me)
        # Both ends of a message order its pieces by matrix; a rank holds at most one piece of a
        # matrix.
        self._outgoing = sorted(
            (p for p in own if p.source == me), key=lambda piece: piece.matrix.owner
        )
        self._arriving = sorted(computed, key=lambda piece: piece.source)
        results = ((rank, piece) for piece in computed for rank in piece.holders)
        self._results = sorted(results, key=lambda result: result[0])
        self._returning = sorted(own, key=lambda piece: piece.matrix.owner)

    def apply(
        self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Applies `function`, (b, m, n) -> (b, m, n), to the matrices of tensors sharded like the
        parameters."""
        out = [(p.matrix.owner, self._of(tensors, p)) for p in self._outgoing]
        arrived = self._send(out, [(p.source, p) for p in self._arriving], tensors[0])
        whole = {p.matrix.number: tensors[0].new_empty(p.matrix.shape) for p in self._arriving}
        for p, values in zip(self._arriving, arrived, strict=True):
            _in_matrix(whole[p.matrix.number], p).copy_(values.view(p.shape[-2:]))
        for shape, matrices in group_values(
            (whole[number].shape, number) for number in sorted(whole)
        ).items():
            count = max(1, BATCH // math.prod(shape))
            for first in range(0, len(matrices), count):
                batch = matrices[first : first + count]
                done = function(torch.stack([whole[number] for number in batch]))
                whole.update(zip(batch, done.unbind(), strict=True))
        back = [(rank, _in_matrix(whole[p.matrix.number], p)) for rank, p in self._results]
        returned = self._send(back, [(p.matrix.owner, p) for p in self._returning], tensors[0])
        results = [torch.empty_like(tensor) for tensor in tensors]
        for p, values in zip(self._returning, returned, strict=True):
            self._of(results, p).copy_(values.view(p.shape))
        return results

    def _of(self, tensors: Sequence[Tensor], piece: Piece) -> Tensor:
        """A view of the piece in this rank's part of its parameter."""
        i = piece.matrix.parameter
        return tensors[i][within(piece.part, self._own[i])]

    def _send(
        self,
        outgoing: Sequence[tuple[int, Tensor]],
        arriving: Sequence[tuple[int, Piece]],
        like: Tensor,
    ) -> Sequence[Tensor]:
        """(target rank, values) to send and (source rank, piece) to receive -> the flat values of
        these pieces."""
        flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for _, tensor in outgoing)])
        if self._axis is not None:
            send, receive = [0] * self._size, [0] * self._size
            for rank, tensor in outgoing:
                send[rank] += tensor.numel()
            for rank, piece in arriving:
                receive[rank] += math.prod(piece.shape)
            flat = self._axis.start_all_to_all_single(flat, send, receive).wait()
        return flat.split([math.prod(piece.shape) for _, piece in arriving])


def _in_matrix(whole: Tensor, piece: Piece) -> Tensor:
    return whole[within(piece.part, piece.matrix.part)[-2:]]
