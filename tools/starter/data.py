"""The data: sums of two numbers below 100, `12+7=19`, as tokens. Replace it by data of your own."""

from typing import Any

import torch
from torch import Tensor

SYMBOLS = "0123456789+=. "  # a token is the index of its symbol in this string
LENGTH = 10
IGNORE = -100  # a target that carries no loss


class Sums:
    """`n` sums. Sum number i is always the same, so every layout and every restart sees the same
    samples."""

    def __init__(self, first: int, n: int) -> None:
        self.first, self.n = first, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor, None], Tensor]:
        """((tokens, positions, documents), targets), (LENGTH,) int64 each. Only digits of the
        result carry a loss."""
        draw = torch.Generator().manual_seed(self.first + index)
        a, b = torch.randint(0, 100, (2,), generator=draw).tolist()
        text = f"{a}+{b}={a + b}.".ljust(LENGTH + 1)
        ids = torch.tensor([SYMBOLS.index(symbol) for symbol in text])
        targets = ids[1:].clone()
        targets[: text.index("=")] = IGNORE
        targets[text.index(".") :] = IGNORE
        return (ids[:-1], torch.arange(LENGTH), None), targets


def dataset(config: Any, split: str) -> Sums:
    """`config`: the section `data` of train.yaml; `split`: "train" or "validation"."""
    return Sums(0, 20000) if split == "train" else Sums(20000, 500)
