"""SGD with momentum, as in torch (Sutskever et al.,
https://proceedings.mlr.press/v28/sutskever13.html)."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtrain.mesh import Mesh
from meshtrain.optim.grad_norm import LocalParameter
from meshtrain.optim.optimizer import ParamGroup, UpdateRule
from meshtrain.parallel.sharding import ParameterSpec

if TYPE_CHECKING:
    from meshtrain.config.schema import OptimizerSection


class SGD(UpdateRule):
    title, states = "SGD", ("momentum_buffer",)

    def __init__(
        self, groups: Sequence[ParamGroup], config: "OptimizerSection", mesh: Mesh
    ) -> None:
        super().__init__(groups, config, mesh)
        self._momentum = config.momentum
        self._nesterov = config.nesterov

    @classmethod
    def update_bytes(cls, parameter: ParameterSpec, config: "OptimizerSection", size: int) -> int:
        # decay, momentum * m, momentum + gradient, parameter - lr * step
        tensors = 3 + 2 + 3 + 3
        if config.nesterov:
            tensors += 3
        own = tensors * size * math.prod(parameter.shape)
        return own + cls._bytes_around(parameter, config, size)

    def update_parameter(self, parameter: LocalParameter, lr: float, weight_decay: float) -> None:
        local = parameter.local
        grad = local.grad
        momentum = parameter.state["momentum_buffer"]
        assert grad is not None  # `squared_norm` has taken the gradient

        # As in torch, decay enters the momentum (it is not decoupled as in AdamW).
        grad = grad.add(local.detach(), alpha=weight_decay)
        momentum.mul_(self._momentum).add_(grad)

        step = momentum
        if self._nesterov:
            step = grad.add(momentum, alpha=self._momentum)
        local.add_(step, alpha=-lr)
