"""A data set of one's own, of samples whose targets begin late: `data.source:
tests/fuzz/answers.py`."""

from typing import Any

import torch
from torch import Tensor

LENGTH = 20


class Answers:
    """Random tokens below 61; only the last ones of a sample are targets, in every fifth sample
    none."""

    def __init__(self, first: int, n: int) -> None:
        self.first, self.n = first, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = self.first + index
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(61, (LENGTH + 1,), generator=draw)
        targets = tokens[1:].clone()
        targets[: LENGTH - number % 5 * 4] = -100
        return tokens[:-1], targets


def dataset(config: Any, split: str) -> Answers:
    return Answers(0, 200) if split == "train" else Answers(200, 20)
