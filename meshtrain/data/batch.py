"""What a data set gives and what a model gets: samples, and microbatches of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from meshtrain.errors import InputError

IGNORE = -100  # the target of a position that carries no loss; torch's own default of `ignore_index`

Item = tuple[tuple[Tensor | None, ...], Tensor]


class Batch(NamedTuple):
    """One microbatch: `model(*inputs)` gives logits for `targets`.

    Of a language model: inputs tokens (b, s), positions (b, s), documents (b, s) or None, targets (b, s), all int64.
    Of a classifier: inputs images (b, c, height, width) float32, targets (b,) int64.
    Targets are IGNORE where there is no loss; a row of padding has no other.
    """

    inputs: tuple[Tensor | None, ...]
    targets: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """The batch on a device, its floating-point inputs (images) in the type that the model computes in."""
        inputs = (
            None if x is None else x.to(device, dtype if x.is_floating_point() else None, non_blocking=True)
            for x in self.inputs
        )
        return Batch(tuple(inputs), self.targets.to(device, non_blocking=True))


class Packed(Protocol):
    """A microbatch as it travels from a worker process: smaller than the tensors that it becomes."""

    def batch(self) -> Batch: ...

    def pin_memory(self) -> Batch: ...


class Samples(ABC):
    """A data set: `len(samples)` and any sample of it by (index, epoch), the same wherever and whenever it is read."""

    name: str  # for messages: which data set, which split

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def item(self, index: int, epoch: int) -> Item:
        """Sample `index` as epoch `epoch` sees it: (inputs, target), shaped as in `Batch` without b."""

    def read(self, items: Sequence[tuple[int, int]], valid: int) -> Batch | Packed:
        """The microbatch of these (epoch, index) pairs, of which those from `valid` on are padding.

        Raises:
            InputError: what the data holds cannot be trained on.
            RuntimeError: reading a sample failed; says which one.
        """
        rows = [self._row(index, epoch) for epoch, index in items]
        inputs = tuple(_stacked(column) for column in zip(*(inputs for inputs, _ in rows), strict=True))
        targets = torch.stack([target for _, target in rows])
        targets[valid:] = IGNORE
        return Batch(inputs, targets)

    def _row(self, index: int, epoch: int) -> Item:
        try:
            return self.item(index, epoch)
        except InputError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"sample {index} (epoch {epoch}) of {self.name} could not be read: {type(error).__name__}: {error}"
            ) from error


@dataclass(frozen=True)
class Subset(Samples):
    """Some samples of a data set, in ascending order."""

    name: str
    base: Samples
    indices: Sequence[int] | np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def item(self, index: int, epoch: int) -> Item:
        return self.base.item(int(self.indices[index]), epoch)

    def read(self, items: Sequence[tuple[int, int]], valid: int) -> Batch | Packed:
        return self.base.read([(epoch, int(self.indices[index])) for epoch, index in items], valid)


def _stacked(column: tuple[Tensor | None, ...]) -> Tensor | None:
    present = [tensor for tensor in column if tensor is not None]
    return torch.stack(present) if present else None
