"""Muon (Jordan et al., https://kellerjordan.github.io/posts/muon): momentum orthogonalized by
Newton-Schulz per matrix, with Moonlight's scale (Liu et al., https://arxiv.org/abs/2502.16982), for
which AdamW's rates and decays fit.

    M <- momentum M + (1 - momentum) G
    O  = orthogonalize(M), or with Nesterov orthogonalize(momentum M + (1 - momentum) G)
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) O        for each matrix W (m, n)

Matrices are stored in shards and orthogonalized whole, each on one rank of its stage: see
`matrix_exchange.py`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshtrain.mesh import Mesh
from meshtrain.optim.grad_norm import LocalParameter, scale_gradients
from meshtrain.optim.matrices import matrices_of
from meshtrain.optim.matrix_exchange import MatrixExchange
from meshtrain.optim.optimizer import ParamGroup, UpdateRule
from meshtrain.parallel.sharding import ParameterSpec, shape_of

if TYPE_CHECKING:
    from meshtrain.config.schema import OptimizerSection
    from meshtrain.huggingface.stored_names import Table

# a, b, c of the quintic polynomial p(s) = a s + b s^3 + c s^5 of a singular value s: steep at 0, so
# that five steps are enough.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7  # least Frobenius norm to divide by: the direction of a zero matrix is zero
# The root mean square of an element of AdamW's updates, which Muon's are scaled to: those of an
# orthogonal O (m, n) have 1 / sqrt(max(m, n)).
RMS = 0.2


class Muon(UpdateRule):
    title = "Muon"
    states = ("momentum_buffer",)

    def __init__(
        self, groups: Sequence[ParamGroup], config: "OptimizerSection", mesh: Mesh
    ) -> None:
        super().__init__(groups, config, mesh)
        self._momentum = config.momentum
        self._nesterov = config.nesterov
        self._parameters = [(group, p) for group in groups for p in group.parameters]
        self._exchange = MatrixExchange([p for _, p in self._parameters], mesh)

    @classmethod
    def update_bytes(cls, parameter: ParameterSpec, config: "OptimizerSection", size: int) -> int:
        # Bytes of an element that is sent and orthogonalized: bfloat16 for float32.
        sent = 2 if size == 4 else size
        # `where(skipped, old, new)` reads two tensors and writes one; `copy_` reads and writes one.
        new_unless_skipped = 5 * size

        # Bytes that each operator of `update` moves for one element, in order.
        moved = 0
        if config.clip_norm is not None:
            moved += 2 * size  # scale_gradients
        # The direction: momentum, and with Nesterov the gradient once more.
        moved += 3 * size
        if config.nesterov:
            moved += 3 * size
        if sent != size:
            moved += size + sent  # cast
        moved += new_unless_skipped
        # The whole matrices: five copies into and out of messages, matrices and batches.
        moved += 5 * 2 * sent
        # Division by the norm: one pass reads, another one reads and writes.
        moved += 3 * sent
        # The weights: decay, then the step along the direction.
        moved += 2 * size
        moved += 2 * size + sent
        moved += new_unless_skipped
        return moved * math.prod(parameter.shape)

    @classmethod
    def update_flops(cls, parameter: ParameterSpec, stored_as: "Table") -> int:
        flops = 0
        for part in matrices_of(parameter, stored_as):
            # A tall matrix is transposed, so that m <= n.
            m, n = sorted(shape_of(part)[-2:])
            # X X^T (m, n) x (n, m), its square (m, m) x (m, m), and their sum times X
            flops += STEPS * (2 * m * n * m + 2 * m * m * m + 2 * m * m * n)
        return flops

    @torch.no_grad()
    def update(self, skip: Tensor, factor: Tensor | None) -> None:
        scale_gradients([p for _, p in self._parameters], factor)
        skipped = skip.bool()
        # The momenta may be in the host's memory, and come some at a time.
        directions: list[Tensor] = []
        for parameters in self.home.visit():
            directions += [self._direction(p, skipped) for p in parameters]
        # This rank's parts of M go to the ranks that orthogonalize whole matrices; parts of O
        # return.
        orthogonal = self._exchange.apply(orthogonalize, directions)

        # (m, n) of the whole matrices, of which this rank has parts.
        shapes = self._exchange.shapes
        for (group, p), own_part, shape in zip(self._parameters, orthogonal, shapes, strict=True):
            local = p.local.detach()
            # W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) O
            decayed = local.mul(1 - group.lr * group.options.weight_decay)
            rate = group.lr * RMS * math.sqrt(max(shape))
            changed = decayed.add_(own_part, alpha=-rate)
            local.copy_(torch.where(skipped, local, changed))

    def _direction(self, p: LocalParameter, skipped: Tensor) -> Tensor:
        """Updates the momentum, unless the step is skipped; returns this rank's part of what is
        orthogonalized."""
        grad = p.local.grad
        assert grad is not None  # `squared_norm` has set it
        momentum = p.state["momentum_buffer"]
        # M <- momentum M + (1 - momentum) G
        updated = momentum.lerp(grad, 1 - self._momentum)
        direction = updated
        if self._nesterov:
            # momentum M + (1 - momentum) G once more, with the new M
            direction = grad.lerp(updated, self._momentum)
        # Sent and orthogonalized in bfloat16, as is usual, except for float64, which must not be
        # rounded.
        if grad.dtype != torch.float64:
            direction = direction.to(torch.bfloat16)
        momentum.copy_(torch.where(skipped, momentum, updated))
        return direction


def orthogonalize(x: Tensor) -> Tensor:
    """Approximates U V^T of each matrix U S V^T of x (b, m, n): singular values that are not close
    to 0 end between 0.7 and 1.2.

    Newton-Schulz with a quintic polynomial, which acts on the singular values alone:

        X_0 = X / |X|,    A = X_k X_k^T,    X_k+1 = a X_k + (b A + c A A) X_k
    """
    a, b, c = COEFFICIENTS
    # A, here `gram`, is (m, m): the smaller, the better.
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    # The polynomial needs singular values of at most 1. The Frobenius norm is no less than the
    # largest one.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
