"""Steps of optimizers in one process, by gradients that are a function of the weights."""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from meshtrain.config.schema import OptimizerSection
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.optim import Optimizer

MESH = build_mesh(Layout({"dp_shard": 1}))


def table(name: str) -> Any:
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text())


def config(**settings: Any) -> OptimizerSection:
    """The config of an optimizer, by default with a constant rate."""
    return OptimizerSection(**{"schedule": "constant", "warmup_steps": 0, **settings})


def optimizer_of(model: nn.Module, **settings: Any) -> Optimizer:
    return Optimizer(model, config(**settings), MESH, 10)


def linear_and_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()


def set_gradients(model: nn.Module, step: int, factor: float = 1.0) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.cos(step * parameter.detach() * 100) * factor


def update(
    optimizer: Optimizer, step: int, factor: Tensor | None = None, skip: bool = False
) -> float:
    """Returns the learning rate."""
    optimizer.squared_norm()
    return optimizer.update(step, factor, torch.tensor(skip))


def assert_same(
    model: nn.Module, expected: nn.Module, rtol: float = 1e-12, atol: float = 1e-12
) -> None:
    for (name, own), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=rtol, atol=atol, msg=name)
