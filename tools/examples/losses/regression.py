"""A regression: the squared error as the loss, on numbers that a function of eight others gives.

configs/regression.yaml trains it. One file defines the model (`Config`, `Model`, `tp_plan`), the
loss, and the data (`dataset`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


@dataclass(frozen=True)
class Config:
    width: int = 32
    num_layers: int = 2


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """(b, 8) -> (b, 2)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first = nn.Linear(8, config.width)
        self.layers = nn.ModuleList(Layer(config.width) for _ in range(config.num_layers))
        self.last = nn.Linear(config.width, 2)

    def blocks(self) -> list[nn.Module]:
        return [self.first, *self.layers, self.last]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """(b, 2), (b, 2) -> (b,): the squared error of each sample; and the absolute error, which
    metrics.jsonl has as `absolute_error`."""
    difference = outputs - targets
    absolute = difference.abs().mean(1)
    metrics = {"absolute_error": (absolute, torch.ones_like(absolute))}
    return difference.square().mean(1), metrics


class Waves:
    """`n` samples of 8 numbers, with the sine of their sum and their product with a wave."""

    def __init__(self, first: int, n: int) -> None:
        self.first, self.n = first, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        x = torch.randn(8, generator=draw)
        wave = torch.cos(torch.arange(8.0))
        return x, torch.stack([torch.sin(x.sum()), (x * wave).sum()])


def dataset(config: Any, split: str) -> Waves:
    """2,000 samples to train on, and 200 others for validation."""
    return Waves(0, 2000) if split == "train" else Waves(2000, 200)
