"""Features of images without labels, as SimCLR learns them (https://arxiv.org/abs/2002.05709): of
all views in a step, the two of one image have to find each other.

configs/simclr.yaml trains the stages of models/convnet.py on drawn bars. `gather_samples` brings
the views of other ranks, so a step is the same on every layout.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain import gather_samples, sample_positions
from meshtrain.job.locate import model_file

SIDE, TEMPERATURE = 16, 0.2

convnet = model_file("convnet")


@dataclass(frozen=True)
class Config:
    channels: tuple[int, ...] = (8, 16)  # width of each stage
    features: int = 16


class Model(nn.Module):
    """Two views of each image (b, 2, 1, side, side) -> their features (b, 2, f), of length 1."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = (1, *config.channels)
        stages = [convnet.Stage(c_in, c_out, halve=True) for c_in, c_out in pairwise(widths)]
        self.stages = nn.ModuleList(stages)
        self.head = convnet.Head(widths[-1], config.features)

    def blocks(self) -> list[nn.Module]:
        return [*self.stages, self.head]

    def forward(self, views: Tensor) -> Tensor:
        x = views.flatten(0, 1)
        for block in self.blocks():
            x = block(x)
        return F.normalize(x.unflatten(0, (-1, 2)), dim=-1)


def loss(outputs: Tensor, targets: Tensor) -> Any:
    """-> (b,): the mean cross entropy of the two views of each image, each among all other views.
    metrics.jsonl has the share of views that find the other one as `found`."""
    every_view = gather_samples(outputs).flatten(0, 1)  # (2B, d): two rows for each image
    first = 2 * sample_positions(outputs)
    own = torch.stack([first, first + 1], dim=1)  # (b, 2): where these views are among all
    other = own.flip(1)

    logits = outputs @ every_view.T / TEMPERATURE  # (b, 2, 2B)
    logits = logits.scatter(2, own[..., None], -torch.inf)  # a view does not find itself
    of_views = F.cross_entropy(logits.flatten(0, 1), other.flatten(), reduction="none")
    found = logits.argmax(2) == other
    metrics = {"found": (found.sum(1), torch.full_like(first, 2))}
    return of_views.unflatten(0, (-1, 2)).mean(1), metrics


class Views:
    """Two views of each of `n` images of a bar: shifted, with noise of their own. They differ from
    epoch to epoch."""

    def __init__(self, first: int, n: int) -> None:
        self.first, self.n = first, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.item(index, epoch=0)

    def item(self, index: int, epoch: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(self.first + index)
        image = torch.zeros(SIDE, SIDE)
        way, place, begin = torch.randint(2, SIDE - 6, (3,), generator=draw).tolist()
        image.select(way % 2, place)[begin : begin + 6] = 2

        draw.manual_seed(10_000 * epoch + self.first + index)
        views = []
        for _ in range(2):
            shift = tuple(torch.randint(-1, 2, (2,), generator=draw).tolist())
            noise = 0.3 * torch.randn(SIDE, SIDE, generator=draw)
            views.append(image.roll(shift, (0, 1)) + noise)
        return torch.stack(views)[:, None], 0  # there is no target


def dataset(config: Any, split: str) -> Views:
    """2,000 images to train on, and 200 others for validation."""
    return Views(0, 2000) if split == "train" else Views(2000, 200)
