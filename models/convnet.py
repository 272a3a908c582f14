"""A small image classifier, as single-device PyTorch: convolutions, group norm, average pooling, a
linear head.

Group norm, not batch norm: a sample's output must not depend on the other samples of its
microbatch, or the layout would be part of the experiment. SiLU, not ReLU: a smooth network does not
amplify rounding, so layouts can be compared.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    image_size: int = 28  # height and width of the images in pixels
    in_channels: int = 1  # 1 for grey, 3 for colour
    # width of each stage; after each except the last the image is halved
    channels: tuple[int, ...] = (32, 64)
    num_classes: int = 10  # number of classes


class Stage(nn.Module):
    """Two convolutions with a shortcut: (b, c_in, height, width) -> (b, c_out, height, width)."""

    def __init__(self, c_in: int, c_out: int, halve: bool) -> None:
        super().__init__()
        self.halve = halve
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups(c_out), c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups(c_out), c_out)
        self.shortcut = nn.Conv2d(c_in, c_out, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.conv1(x)))
        y = F.silu(self.norm2(self.conv2(y)) + self.shortcut(x))
        return F.avg_pool2d(y, 2) if self.halve else y


class Head(nn.Module):
    """Average over the image, then one linear layer: (b, c, height, width) -> logits (b,
    classes)."""

    def __init__(self, c_in: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(c_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(dim=(2, 3)))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = (config.in_channels, *config.channels)
        last = len(config.channels) - 1
        self.stages = nn.ModuleList()
        for i, (c_in, c_out) in enumerate(pairwise(widths)):
            self.stages.append(Stage(c_in, c_out, halve=i < last))
        self.head = Head(widths[-1], config.num_classes)

    def blocks(self) -> list[nn.Module]:
        """The modules in execution order; any contiguous run of them can be a pipeline stage."""
        return [*self.stages, self.head]

    def forward(self, images: Tensor) -> Tensor:
        """Images (b, c, height, width) to logits (b, classes)."""
        x = images
        for block in self.blocks():
            x = block(x)
        return x


def groups(channels: int) -> int:
    """The largest number of groups, up to 8, that divides the channels."""
    return max(n for n in range(1, 9) if channels % n == 0)


def check(config: Config) -> list[tuple[str, str]]:
    """Invalid combinations of keys: (key, what is wrong and what would work)."""
    if not config.channels or min(config.channels) < 1:
        message = "at least one stage is needed, each at least 1 wide, for instance [32, 64]"
        return [("channels", message)]
    for key in ("image_size", "in_channels", "num_classes"):
        if getattr(config, key) < 1:
            return [(key, f"{key} is {getattr(config, key)}: use at least 1")]
    stages = len(config.channels)
    halvings = stages - 1
    if config.image_size < 2**halvings:
        most = config.image_size.bit_length()  # stages that leave a pixel
        message = (
            f"{stages} stages halve the image {halvings} times, and {config.image_size} pixels "
            f"allow {most - 1}: use at most {most} stages"
        )
        return [("channels", message)]
    return []


# Initial values, by the first matching pattern: "kaiming" is normal with variance 2 / (inputs of
# one output).
init_plan = {"*norm?.weight": "ones", "*.bias": "zeros", "*": "kaiming"}

# Nothing is split over `tp`.
tp_plan: dict[str, str] = {}
