"""Samples, which a data set yields, and microbatches of them, which a model takes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from meshtrain.attention import AttentionContext, cumulative_lengths
from meshtrain.errors import InputError

# the target of a position that carries no loss; torch's own default of `ignore_index`
IGNORE = -100

Item = tuple[tuple[Tensor | None, ...], Tensor]
Input = Tensor | AttentionContext | None

# a language model's inputs, in order; a classifier takes images
LANGUAGE = ("tokens", "positions", "documents")
# sequence dim of each named tensor
SEQUENCE_DIM = {"tokens": 1, "positions": 1, "documents": 1, "targets": 1}


@dataclass(frozen=True)
class Batch:
    """One microbatch: `model(*inputs)` gives logits for `targets`.

    Attributes:
        tensors: the model's inputs by name, in order. For a language model tokens and positions,
            (b, s) int64, and documents: (b, s) int64, None, or an AttentionContext. For a
            classifier images, (b, c, h, w) float32.
        targets: (b, s) or (b,) int64; IGNORE where there is no loss. All targets of a padding row
            are IGNORE.
    """

    tensors: Mapping[str, Input]
    targets: Tensor

    @classmethod
    def of(cls, inputs: Sequence[Input], targets: Tensor) -> "Batch":
        """Names inputs given in the model's order: a language model's if targets are (b, s), else a
        classifier's."""
        names = LANGUAGE if targets.ndim == 2 else ("images",)
        tensors = {}
        for i, x in enumerate(inputs):
            name = names[i] if i < len(names) else f"input_{i}"
            tensors[name] = x
        return cls(tensors, targets)

    @property
    def inputs(self) -> tuple[Any, ...]:
        return tuple(self.tensors.values())

    def __iter__(self) -> Iterator[Any]:
        """`inputs, targets = batch`"""
        return iter((self.inputs, self.targets))

    def apply(self, function: Callable[[Any], Any]) -> "Batch":
        """The batch with `function` applied to each of its tensors and AttentionContexts."""
        tensors = {name: None if x is None else function(x) for name, x in self.tensors.items()}
        return Batch(tensors, function(self.targets))

    def along_sequence(self, function: Callable[[Tensor, int], Tensor]) -> "Batch":
        """The batch with `function(tensor, sequence dim)` applied to each tensor that has a
        sequence dim."""
        length = self.targets.shape[-1]

        def changed(name: str, x: Input) -> Any:
            if not isinstance(x, Tensor):
                return x
            dim = SEQUENCE_DIM.get(name)
            # An additional input of a user's data set that has the targets' shape has their
            # sequence dim, too.
            if dim is None and x.ndim == 2 and x.shape == self.targets.shape:
                dim = 1
            if dim is None or dim >= x.ndim or x.shape[dim] != length:
                return x
            return function(x, dim)

        tensors = {name: changed(name, x) for name, x in self.tensors.items()}
        return Batch(tensors, changed("targets", self.targets))

    def shortened(self, length: int) -> "Batch":
        """The batch with each sample cut to its first `length` tokens."""

        def cut(x: Tensor, dim: int) -> Tensor:
            return x.narrow(dim, 0, min(length, x.shape[dim])).contiguous()

        return self.along_sequence(cut)

    def with_context(self) -> "Batch":
        """The batch with an `AttentionContext` in place of documents, for a model that takes
        one."""
        documents = self.tensors.get("documents")
        if "documents" not in self.tensors or isinstance(documents, AttentionContext):
            return self
        lengths = None
        if documents is not None:
            lengths = cumulative_lengths(documents)
            if lengths is not None and documents.is_pinned():
                lengths = lengths.pin_memory()
        context = AttentionContext(documents, lengths)
        return Batch({**self.tensors, "documents": context}, self.targets)

    def to(self, device: torch.device, dtype: torch.dtype, with_targets: bool = True) -> "Batch":
        """The batch on a device, floating-point inputs (images) in the model's compute dtype.
        `with_targets`: whether this rank uses the targets; else they stay where they are."""

        def moved(x: Any) -> Any:
            if x is None:
                return None
            is_ids = isinstance(x, Tensor) and not x.is_floating_point()
            return x.to(device, None if is_ids else dtype, non_blocking=True)

        tensors = {name: moved(x) for name, x in self.tensors.items()}
        return Batch(tensors, moved(self.targets) if with_targets else self.targets)

    def pin_memory(self) -> "Batch":
        """The batch in pinned memory; torch's DataLoader calls this in its pinning thread."""
        return self.apply(lambda x: x.pin_memory())

    def batch(self) -> "Batch":
        """The batch itself, so that it can stand in for a `Packed` one."""
        return self


@dataclass(frozen=True)
class LossTargets:
    """Of the targets of some samples, those that have a loss."""

    all: int
    with_loss: int

    @property
    def line(self) -> str:
        share = 100 * self.with_loss / max(self.all, 1)
        return f"{self.with_loss:,} of {self.all:,} targets have a loss ({share:.3g} %)"


class Packed(Protocol):
    """A microbatch as a worker process sends it: smaller than the tensors it becomes."""

    def batch(self) -> Batch: ...

    def pin_memory(self) -> Batch: ...


class Samples(ABC):
    """A data set: `len(samples)`, and a sample by (index, epoch), the same wherever and whenever it
    is read."""

    name: str  # data set and split, for messages

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def item(self, index: int, epoch: int) -> Item:
        """Sample `index` of epoch `epoch`: (inputs, target), shaped as in `Batch` without the batch
        dim."""

    def read(self, items: Sequence[tuple[int, int]], valid: int) -> Batch | Packed:
        """The microbatch of these (epoch, index) pairs; items from `valid` on are padding.

        Raises:
            InputError: the data cannot be trained on.
            RuntimeError: reading a sample failed; names the sample.
        """
        rows = [self._row(index, epoch) for epoch, index in items]
        shapes = [_shapes(row) for row in rows]
        for (_, index), shape in zip(items, shapes, strict=True):
            if shape != shapes[0]:
                raise InputError(
                    f"{self.name}: the inputs and the target of sample {items[0][1]} have the "
                    f"shapes {shapes[0]}, and of sample {index} {shape}: samples of a microbatch "
                    f"are of one shape (pad a text at its end, with targets of {IGNORE})"
                )
        columns = zip(*[inputs for inputs, _ in rows], strict=True)
        targets = torch.stack([target for _, target in rows])
        targets[valid:] = IGNORE
        return Batch.of([_stack(column) for column in columns], targets)

    def document_lengths(self, indices: Sequence[int]) -> np.ndarray | None:
        """Lengths of the document parts in these samples, in any order; None: not known without
        reading them."""
        return None

    def loss_targets(self) -> "dict[str, LossTargets]":
        """By source, how many targets of its samples have a loss; {}: not known without reading
        every sample."""
        return {}

    def _row(self, index: int, epoch: int) -> Item:
        try:
            return self.item(index, epoch)
        except InputError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"sample {index} (epoch {epoch}) of {self.name} could not be read: "
                f"{type(error).__name__}: {error}"
            ) from error


@dataclass(frozen=True)
class Subset(Samples):
    name: str
    base: Samples
    indices: Sequence[int] | np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def item(self, index: int, epoch: int) -> Item:
        return self.base.item(int(self.indices[index]), epoch)

    def read(self, items: Sequence[tuple[int, int]], valid: int) -> Batch | Packed:
        of_base = [(epoch, int(self.indices[index])) for epoch, index in items]
        return self.base.read(of_base, valid)


def _shapes(row: Item) -> list[tuple[int, ...] | None]:
    """Of each input of a sample, and of its target."""
    inputs, target = row
    return [None if x is None else tuple(x.shape) for x in (*inputs, target)]


def _stack(column: tuple[Tensor | None, ...]) -> Tensor | None:
    present = [tensor for tensor in column if tensor is not None]
    return torch.stack(present) if present else None
