"""Sums of a step over all ranks, by name: `StepSums`, which travel as one tensor in the one
all-reduce of a step, and `StepOutcome`, which the host reads later.

Both name their numbers, so that nobody counts positions in a tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from meshtrain.job.pending import Resource, waiting
from meshtrain.loss import Field, split_fields
from meshtrain.mesh import Mesh


@dataclass(frozen=True)
class NamedNumbers:
    """Scalars in float64, which a subclass names, and the `terms` of modules: (size,) each."""

    terms: dict[Field, Tensor]

    @classmethod
    def names(cls) -> list[str]:
        """Of the scalars."""
        return [field.name for field in fields(cls) if field.name != "terms"]

    def pack(self) -> Tensor:
        """All numbers as one tensor."""
        scalars = torch.stack([getattr(self, name) for name in self.names()])
        return torch.cat([scalars, *self.terms.values()])

    def unpack(self, packed: Tensor) -> Self:
        """The numbers of a packed tensor, under the names of this one."""
        names = self.names()
        scalars = dict(zip(names, packed[: len(names)].unbind(), strict=True))
        return replace(self, terms=split_fields(packed[len(names) :], list(self.terms)), **scalars)


@dataclass(frozen=True)
class StepSums(NamedNumbers):
    """What the ranks add up at the end of a step, on the device."""

    loss: Tensor  # of all samples
    squared_norm: Tensor  # of the gradients
    correct: Tensor  # predictions of a classifier
    targets: Tensor  # with a loss
    stop_requests: Tensor  # ranks that were asked to stop
    rows_without_room: Tensor  # of messages to experts under a `RowLimit`

    def over_ranks(self, mesh: Mesh) -> "StepSums":
        """The sums over all ranks of the job: the one all-reduce of a step."""
        return self.unpack(mesh.sum(self.pack()))


@dataclass(frozen=True)
class StepOutcome(NamedNumbers):
    """What a step tells the host; the same on every rank."""

    loss: Tensor  # mean over all valid targets, or by the samples' weights
    grad_norm: Tensor  # of the gradient of that loss, before clipping
    correct: Tensor
    targets: Tensor  # with a loss
    weight: Tensor  # what the loss was divided by: all valid targets, or the samples' weights
    loss_scale: Tensor  # of float16, else 1
    stop_requests: Tensor
    rows_without_room: Tensor

    def read_later(self) -> "Callable[[], StepOutcome]":
        """Starts the copy to the host. The returned function waits for it."""
        read = read_later(self.pack())
        return lambda: self.unpack(read())


def read_later(numbers: Tensor) -> Callable[[], Tensor]:
    """Copies numbers from the device to the host without waiting; the returned function waits for
    them."""
    if not numbers.is_cuda:
        return lambda: numbers
    # Only a copy to pinned memory does not block.
    copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copied.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> Tensor:
        with waiting("the device", resource=Resource.DEVICE):
            event.synchronize()
        return copied

    return read
