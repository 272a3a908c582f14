"""A classifier with batch norms, of which each channel's statistics are those of a batch."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    image_size: int = 8
    in_channels: int = 1
    channels: tuple[int, ...] = (6, 10)
    num_classes: int = 10


class Stage(nn.Module):
    """(b, c_in, height, width) -> (b, c_out, height, width)."""

    def __init__(self, c_in: int, c_out: int, momentum: float | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(c_out, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class Head(nn.Module):
    """Means over the image, without scales of their own: (b, c, height, width) -> logits (b,
    classes)."""

    def __init__(self, c_in: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(c_in, affine=False)
        self.linear = nn.Linear(c_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.mean(dim=(2, 3))))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        first, second = config.channels
        self.stages = nn.ModuleList(
            [Stage(config.in_channels, first, 0.1), Stage(first, second, None)]
        )
        self.head = Head(second, config.num_classes)

    def blocks(self) -> list[nn.Module]:
        return [*self.stages, self.head]

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for stage in self.stages:
            x = stage(x)
        return self.head(x)
