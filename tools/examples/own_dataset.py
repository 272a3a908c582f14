"""A data set of your own: images of a horizontal, vertical or diagonal bar, drawn on access.

configs/own-dataset.yaml trains on it. A file for `data.source` exports `dataset(config, split)`,
where `config` is the `data` section and `split` is "train" or "validation". It returns an object
with `len()` and `[index]`, or None. An item is a pair (inputs, target) and should depend on its
index alone, so that every layout and restart sees the same samples.
"""

from typing import Any

import torch
from torch import Tensor


class Bars:
    """`n` images, (1, 16, 16) float32, of three classes: numbers `first` to `first + n`."""

    def __init__(self, first: int, n: int) -> None:
        self.first, self.n = first, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(self.first + index)
        label = (self.first + index) % 3
        image = 0.3 * torch.randn(16, 16, generator=draw)
        at = int(torch.randint(2, 14, (), generator=draw))
        if label == 0:
            image[at, 2:14] += 1
        elif label == 1:
            image[2:14, at] += 1
        else:
            image += torch.eye(16).roll(at, dims=1)
        return image.unsqueeze(0), label


def dataset(config: Any, split: str) -> Bars:
    """3,000 training images, and 300 others for validation."""
    return Bars(0, 3000) if split == "train" else Bars(3000, 300)
