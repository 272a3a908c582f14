"""SGD with momentum, as in torch (Sutskever et al.,
https://proceedings.mlr.press/v28/sutskever13.html)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtrain.mesh import Mesh
from meshtrain.optim.grad_norm import LocalParameter
from meshtrain.optim.optimizer import ParamGroup, UpdateRule

if TYPE_CHECKING:
    from meshtrain.config import Optimizer as OptimizerConfig


class SGD(UpdateRule):
    title, states = "SGD", ("momentum_buffer",)

    def __init__(self, groups: Sequence[ParamGroup], config: "OptimizerConfig", mesh: Mesh) -> None:
        super().__init__(groups, config, mesh)
        self._momentum, self._nesterov = config.momentum, config.nesterov

    def update_parameter(self, parameter: LocalParameter, lr: float, weight_decay: float) -> None:
        local, grad, buffer = (
            parameter.local,
            parameter.local.grad,
            parameter.state["momentum_buffer"],
        )
        assert grad is not None  # `squared_norm` has taken the gradient
        # as in torch, decay enters the momentum
        grad = grad.add(local.detach(), alpha=weight_decay)
        buffer.mul_(self._momentum).add_(grad)
        local.add_(grad.add(buffer, alpha=self._momentum) if self._nesterov else buffer, alpha=-lr)
