"""meshtrain.train with a user's optimizer, which needs whole matrices and keeps several kinds of
state."""

import sys
from dataclasses import replace

import torch

from meshtrain.config import schema
from meshtrain.optim.grad_norm import LocalParameter
from meshtrain.optim.optimizer import UpdateRule
from meshtrain.optim.registry import OPTIMIZERS
from meshtrain.parallel.sharding import ParameterSpec
from meshtrain.train import main


class NormalizedMomentum(UpdateRule):
    """Updates matrices by their momentum divided by its largest norm so far, and vectors by their
    gradient."""

    title = "normalized momentum"

    @staticmethod
    def state_specs(parameter: ParameterSpec) -> dict[str, ParameterSpec]:
        if len(parameter.shape) < 2:
            return {}
        largest = ParameterSpec(
            f"{parameter.name}.largest", (), stages=parameter.stages, dtype=torch.float64
        )
        return {
            "momentum": replace(parameter, name=f"{parameter.name}.momentum"),
            "largest": largest,
        }

    def update_parameter(self, parameter: LocalParameter, lr: float, weight_decay: float) -> None:
        gradient = parameter.local.grad
        assert gradient is not None
        parameter.local.mul_(1 - lr * weight_decay)
        if not parameter.state:
            parameter.local.add_(gradient, alpha=-lr)
            return
        momentum, largest = parameter.state["momentum"], parameter.state["largest"]
        momentum.mul_(0.9).add_(gradient)
        largest.copy_(torch.maximum(largest, parameter.whole(momentum).double().norm()))
        parameter.local.sub_(lr * momentum / (largest.to(momentum.dtype) + 1e-3))


if __name__ == "__main__":
    OPTIMIZERS["normalized"] = "tests.optim.toy_optimizer:NormalizedMomentum"
    schema.OptimizerSection.__annotations__["name"] = str  # the name is none of the config's words

    sys.exit(main(sys.argv[1:]))
