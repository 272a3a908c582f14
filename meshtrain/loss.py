"""The loss of a step: the sum over all valid targets of the global batch, divided by their number.

It is a sum over a count, and never an average of averages. So it does not matter which rank or microbatch holds which
sample, how many valid targets each has, or that a rank has none at all.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtrain.data.batch import IGNORE
from meshtrain.mesh import Mesh
from meshtrain.parallel.vocabulary import argmax, token_losses


def sample_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of every sample, summed over its valid targets.

    Args:
        logits: (b, s, v), or (b, v) for a classifier, in any floating-point type; the sum is made in float32 at least.
            As a DTensor split over v, as tensor-parallel models give them, they are not gathered.
        targets: (b, s) or (b,), int64; IGNORE where there is no loss.

    Returns:
        (b,), 0 for a sample without valid targets.
    """
    if isinstance(logits, DTensor):
        return token_losses(logits, targets.flatten()).view(targets.shape[0], -1).sum(1)
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    losses = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=IGNORE)
    return losses.view(targets.shape[0], -1).sum(1)


def correct_predictions(logits: Tensor, targets: Tensor) -> Tensor:
    """How many valid targets have the largest logit: a scalar."""
    predicted = argmax(logits) if isinstance(logits, DTensor) else logits.argmax(-1)
    return ((predicted == targets) & (targets != IGNORE)).sum()


def valid_targets(targets: Tensor) -> int:
    """How many targets have a loss. `targets` is on the CPU."""
    return int((targets != IGNORE).sum())


class GlobalCount:
    """The number of valid targets of the global batch, which every rank's loss is divided by.

    The sum over the ranks starts at once and is waited for when it is first needed, after the first forward.
    """

    def __init__(self, count: int, mesh: Mesh, device: torch.device) -> None:
        """`count`: the number of this rank's valid targets in all microbatches of the step."""
        # Filled on the device: a copy of a host's number would wait until the device has done all work before it.
        self._total = torch.full((), float(count), dtype=torch.float64, device=device)
        group = mesh.group("dp_replicate", "dp_shard", "cp")
        self._work = dist.all_reduce(self._total, group=group, async_op=True) if group is not None else None

    def total(self) -> Tensor:
        """A scalar in float64."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total

    def value(self) -> Tensor:
        """The same, but at least 1, to divide by: a batch without any valid target has a loss of 0."""
        return self.total().clamp(min=1)
