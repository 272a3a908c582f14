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

# a, b, c of the quintic polynomial: steep at 0, so that five steps are enough
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7
RMS = 0.2  # typical of AdamW's updates; Muon's are scaled to it


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
        sent = 2 if size == 4 else size  # bytes of an element that is orthogonalized
        # `where` reads two tensors and writes one, and its copy back reads and writes one.
        kept_or_old = 5 * size
        moved = 3 * size  # the new momentum
        moved += kept_or_old
        moved += 2 * size + (2 * size + sent) + kept_or_old  # decay, step, and the values
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
        skipped = skip.bool()
        directions: list[Tensor] = []
        for parameters in self.home.visit():
            directions += [self._direction(p, skipped) for p in parameters]
        orthogonal = self._exchange.apply(orthogonalize, directions)

        shapes = self._exchange.shapes
        for (group, p), direction, shape in zip(self._parameters, orthogonal, shapes, strict=True):
            local = p.local.detach()
            # W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) O
            decayed = local.mul(1 - group.lr * group.options.weight_decay)
            rate = group.lr * RMS * math.sqrt(max(shape))
            changed = decayed.add_(direction, alpha=-rate)
            local.copy_(torch.where(skipped, local, changed))

    def _direction(self, p: LocalParameter, skipped: Tensor) -> Tensor:
        """Moves the momentum; returns this rank's part of what is orthogonalized."""
        grad = p.local.grad
        assert grad is not None  # `squared_norm` has set it
        momentum = p.state["momentum_buffer"]
        moved = momentum.lerp(grad, 1 - self._momentum)
        direction = moved
        if self._nesterov:
            direction = grad.lerp(moved, self._momentum)
        # Sent and orthogonalized in bfloat16, as is usual, except for float64, which must not be
        # rounded.
        if grad.dtype != torch.float64:
            direction = direction.to(torch.bfloat16)
        momentum.copy_(torch.where(skipped, momentum, moved))
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
    # By the Frobenius norm, which is no less than the largest singular value.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
