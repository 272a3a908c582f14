"""A classifier of the digits with a layer for bright images only, which is not run for a batch without any."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

BRIGHT = 0.11  # about a tenth of the images


@dataclass(frozen=True)
class Config:
    image_size: int = 8
    in_channels: int = 1
    channels: tuple[int, ...] = (16, 32)
    num_classes: int = 10


class Rare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.common = nn.Linear(width, width)
        self.rare = nn.Linear(width, width)

    def forward(self, x: Tensor, bright: Tensor) -> Tensor:
        y = x + torch.tanh(self.common(x))
        if not bright.any():
            return y
        return y.index_put((bright,), y[bright] + torch.tanh(self.rare(y[bright])))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.image_size**2
        self.rare = Rare(width)
        self.head = nn.Linear(width, config.num_classes)

    def blocks(self) -> list[nn.Module]:
        return [self.rare, self.head]

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        return self.head(self.rare(x, x.mean(1) > x.new_tensor(BRIGHT)))
