"""Several labels for each sample, of which some are not known: named outputs and targets, and
weights.

configs/multi-label.yaml trains it. A sample counts as many times as it has known labels.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LABELS = 5
tp_plan = {"hidden": "colwise", "mixed": "rowwise"}


@dataclass(frozen=True)
class Config:
    width: int = 48


class Model(nn.Module):
    """(b, 12) -> {"labels": (b, 5), "count": (b,)}: a logit for each label, and how many there
    are."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.hidden = nn.Linear(12, config.width)
        self.mixed = nn.Linear(config.width, config.width)
        self.heads = nn.Linear(config.width, LABELS + 1)

    def blocks(self) -> list[nn.Module]:
        return [self.hidden, self.mixed, self.heads]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.hidden(x))
        x = torch.tanh(self.mixed(x))
        x = self.heads(x)
        return {"labels": x[:, :LABELS], "count": x[:, LABELS]}


def loss(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Any:
    """-> (b,): the binary cross entropy of the known labels, and a small term for their number.
    metrics.jsonl has the share of right labels as `right`."""
    known = targets["known"]
    logits, labels = outputs["labels"], targets["labels"]
    each = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
    count = (outputs["count"] - labels.sum(1)).square()
    right = ((logits > 0) == labels) & known
    metrics = {"right": (right.sum(1), known.sum(1))}
    return (each * known).sum(1) + 0.1 * count, metrics


def weight(targets: dict[str, Tensor]) -> Tensor:
    """-> (b,): the number of known labels."""
    return targets["known"].sum(1)


class Sums:
    """`n` samples of 12 numbers; a label says whether the sum of two of them is positive."""

    def __init__(self, first: int, n: int) -> None:
        self.first, self.n = first, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(self.first + index)
        x = torch.randn(12, generator=draw)
        labels = x[:LABELS] + x[LABELS : 2 * LABELS] > 0
        known = torch.rand(LABELS, generator=draw) < 0.7
        return x, {"labels": labels, "known": known}


def dataset(config: Any, split: str) -> Sums:
    """2,000 samples to train on, and 200 others for validation."""
    return Sums(0, 2000) if split == "train" else Sums(2000, 200)
