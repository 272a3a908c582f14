"""A data set of one's own: images of a bar that lies, stands or leans, drawn when they are asked for.

configs/own-dataset.yaml trains on it. A file for `data.source` exports `dataset(config, split)`, where `config` is the
`data` section and `split` "train" or "validation"; it returns anything with `len()` and `[index]`, or None. An item is
a pair (inputs, target). It should depend on its index alone, so that every layout and every restart sees the same.
"""

from typing import Any

import torch
from torch import Tensor


class Bars:
    """`n` images (1, 16, 16) float32 of three classes, those from number `first` on."""

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
    """3,000 images to train on, and 300 others."""
    return Bars(0, 3000) if split == "train" else Bars(3000, 300)
