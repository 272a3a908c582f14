"""Two towers that learn from pairs, as CLIP does (https://arxiv.org/abs/2103.00020): each image has
to find its caption among those of the whole step, and each caption its image.

configs/clip.yaml trains them on drawn bars. `gather_samples` brings the others' features, so a step
is the same on every layout.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain import gather_samples, sample_positions

SIDE, WORDS = 12, 32
tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


@dataclass(frozen=True)
class Config:
    width: int = 48
    num_layers: int = 2
    features: int = 16


class Tower(nn.Module):
    """A layer of one tower: (b, d) -> (b, d)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Embed(nn.Module):
    """Images (b, 1, side, side) and captions (b, words) -> two times (b, d)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pixels = nn.Linear(SIDE * SIDE, width)
        self.words = nn.Embedding(WORDS, width)

    def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
        return self.pixels(images.flatten(1)), self.words(captions).sum(1)


class Layer(nn.Module):
    """A layer of both towers, so that a pipeline can cut between layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.image = Tower(width)
        self.caption = Tower(width)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        image, caption = both
        return self.image(image), self.caption(caption)


class Head(nn.Module):
    """Features of length 1; those of images are divided by the temperature."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.image = nn.Linear(width, features, bias=False)
        self.caption = nn.Linear(width, features, bias=False)
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, both: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        image, caption = both
        scale = self.log_scale.exp()
        return {
            "image": scale * F.normalize(self.image(image), dim=-1),
            "caption": F.normalize(self.caption(caption), dim=-1),
        }


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = Embed(config.width)
        self.layers = nn.ModuleList(Layer(config.width) for _ in range(config.num_layers))
        self.head = Head(config.width, config.features)

    def blocks(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.head]

    def forward(self, images: Tensor, captions: Tensor) -> dict[str, Tensor]:
        both = self.embed(images, captions)
        for layer in self.layers:
            both = layer(both)
        return self.head(both)


def loss(outputs: dict[str, Tensor], targets: Tensor) -> Any:
    """-> (b,): the mean of the two cross entropies of each pair. metrics.jsonl has the probability
    with which an image takes its own caption as `own_caption`. (How often that is the largest would
    be decided by rounding here: several images of a step have the same caption.)"""
    image, caption = outputs["image"], outputs["caption"]
    pairs = sample_positions(image)  # (b,): which of all pairs of the step are these
    to_captions = image @ gather_samples(caption).T  # (b, B)
    to_images = caption @ gather_samples(image).T  # (b, B)
    of_images = F.cross_entropy(to_captions, pairs, reduction="none")
    of_captions = F.cross_entropy(to_images, pairs, reduction="none")
    own_caption = of_images.neg().exp()
    metrics = {"own_caption": (own_caption, torch.ones_like(own_caption))}
    return (of_images + of_captions) / 2, metrics


class Bars:
    """`n` images of a bar, each with a caption of two words: which way it lies, and where."""

    def __init__(self, first: int, n: int) -> None:
        self.first, self.n = first, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], int]:
        draw = torch.Generator().manual_seed(self.first + index)
        way = int(torch.randint(2, (), generator=draw))
        place = int(torch.randint(SIDE, (), generator=draw))
        image = 0.3 * torch.randn(SIDE, SIDE, generator=draw)
        image.select(way, place).add_(1)
        return (image[None], torch.tensor([way, 2 + place])), 0  # there is no target


def dataset(config: Any, split: str) -> Bars:
    """2,000 pairs to train on, and 200 others for validation."""
    return Bars(0, 2000) if split == "train" else Bars(2000, 200)
