"""Samples, which a data set yields, and microbatches of them, which a model takes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from meshtrain.attention import AttentionContext, cumulative_lengths
from meshtrain.errors import InputError

# the target of a position that carries no loss; torch's own default of `ignore_index`
IGNORE = -100

# what a data set gives as the targets of a sample, or of a microbatch; names are for a loss of the
# user's own
Targets = Tensor | dict[str, Tensor]
Item = tuple[tuple[Tensor | None, ...], Targets]
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
            are IGNORE. For a loss of the user's own: (b, ...) of any dtype, or such tensors by
            name, whose padding rows are copies of some sample.
        samples: the indices in the data set of the rows that are no padding, which come first;
            None: all rows are samples, and their indices are not known.
        together: how many samples this microbatch has on all data ranks, where it is all of a step;
            None: it is a part of one.
        ahead: for a model that predicts further tokens (`looking_ahead`), (b, s, depths, 2) int64:
            the token that is so many further, and its target; None: for others.
    """

    tensors: Mapping[str, Input]
    targets: Any
    samples: tuple[int, ...] | None = None
    together: int | None = None
    ahead: Tensor | None = None

    @classmethod
    def of(
        cls,
        inputs: Sequence[Input],
        targets: Targets,
        samples: tuple[int, ...] | None = None,
    ) -> "Batch":
        """Names inputs given in the model's order: a language model's if targets belong to tokens,
        (b, s), else a classifier's."""
        names = LANGUAGE if _of_tokens(inputs, targets) else ("images",)
        tensors = {}
        for i, x in enumerate(inputs):
            name = names[i] if i < len(names) else f"input_{i}"
            tensors[name] = x
        return cls(tensors, targets, samples)

    @property
    def rows(self) -> int:
        """The number of rows, padding included."""
        return len(target_tensors(self.targets)[0])

    @property
    def real(self) -> int:
        """The number of rows that are samples and not padding: the first ones."""
        return self.rows if self.samples is None else len(self.samples)

    @property
    def inputs(self) -> tuple[Any, ...]:
        return tuple(self.tensors.values())

    def __iter__(self) -> Iterator[Any]:
        """`inputs, targets = batch`"""
        return iter((self.inputs, self.targets))

    def apply(self, function: Callable[[Any], Any]) -> "Batch":
        """The batch with `function` applied to each of its tensors and AttentionContexts."""
        tensors = {name: None if x is None else function(x) for name, x in self.tensors.items()}
        targets = each_target(function, self.targets)
        ahead = None if self.ahead is None else function(self.ahead)
        return replace(self, tensors=tensors, targets=targets, ahead=ahead)

    def along_sequence(
        self,
        function: Callable[[Tensor, int], Tensor],
        of_targets: Callable[[Tensor, int], Tensor] | None = None,
    ) -> "Batch":
        """The batch with `function(tensor, sequence dim)` applied to each tensor that has a
        sequence dim. `of_targets`: for targets; None: the same."""
        shape = self.sequence_shape()
        if shape is None:
            return self

        def changed(name: str, x: Input, change: Callable[[Tensor, int], Tensor]) -> Any:
            if not isinstance(x, Tensor):
                return x
            dim = SEQUENCE_DIM.get(name)
            # An additional input of a user's data set that has the targets' shape has their
            # sequence dim, too.
            if dim is None and x.ndim == 2 and x.shape == shape:
                dim = 1
            if dim is None or dim >= x.ndim or x.shape[dim] != shape[-1]:
                return x
            return change(x, dim)

        tensors = {name: changed(name, x, function) for name, x in self.tensors.items()}
        of_targets = of_targets or function
        targets = each_target(lambda x: changed("targets", x, of_targets), self.targets)
        ahead = None if self.ahead is None else of_targets(self.ahead, 1)
        return replace(self, tensors=tensors, targets=targets, ahead=ahead)

    def sequence_shape(self) -> torch.Size | None:
        """(b, s), the shape of what there is one of for each token; None: no sequences."""
        tokens = self.tensors.get("tokens")
        if not isinstance(tokens, Tensor):
            return None
        if _one_for_each_token(self.targets):
            return self.targets.shape
        return tokens.shape[:2]

    def shortened(self, length: int) -> "Batch":
        """The batch with each sample cut to its first `length` tokens."""

        def cut(x: Tensor, dim: int) -> Tensor:
            return x.narrow(dim, 0, min(length, x.shape[dim])).contiguous()

        return self.along_sequence(cut)

    def looking_ahead(self, depths: int) -> "Batch":
        """The batch with `ahead`: for each token and depth k the token that is k further, and its
        target. Both are IGNORE where the sequence ends before, or the document, if documents are
        kept apart.

        To be called on whole sequences: parts of them are cut from the result.

        Raises InputError: the batch does not have one target per token.
        """
        if depths == 0:
            return self
        tokens = self.tensors.get("tokens")
        if not _one_for_each_token(tokens) or not _one_for_each_token(self.targets):
            raise InputError(
                "a model that predicts further tokens learns from whole numbers, a token and its "
                "target at each place, and this batch has others: use a model without such layers "
                "(model.num_nextn_predict_layers: 0)"
            )
        assert isinstance(tokens, Tensor)
        documents = self.tensors.get("documents")
        if isinstance(documents, AttentionContext):
            documents = documents.documents

        length = tokens.shape[1]
        ahead = tokens.new_full((*tokens.shape, depths, 2), IGNORE)
        ends = torch.zeros_like(tokens, dtype=torch.bool)  # whether the document ends before
        for depth in range(1, min(depths, length - 1) + 1):
            here, there = slice(0, length - depth), slice(depth, length)
            if documents is not None:
                ends[:, here] |= documents[:, here] != documents[:, there]
            pair = torch.stack([tokens[:, there], self.targets[:, there]], dim=-1)
            ahead[:, here, depth - 1] = pair.masked_fill(ends[:, here, None], IGNORE)
        return replace(self, ahead=ahead)

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
        return replace(self, tensors={**self.tensors, "documents": context})

    def to(self, device: torch.device, dtype: torch.dtype, with_targets: bool = True) -> "Batch":
        """The batch on a device, floating-point inputs (images) in the model's compute dtype;
        targets keep theirs. `with_targets`: whether this rank uses the targets; else they stay
        where they are."""

        def moved(x: Any) -> Any:
            if x is None:
                return None
            is_ids = isinstance(x, Tensor) and not x.is_floating_point()
            return x.to(device, None if is_ids else dtype, non_blocking=True)

        tensors = {name: moved(x) for name, x in self.tensors.items()}
        ahead = moved(self.ahead)
        targets = self.targets
        if with_targets:
            targets = each_target(lambda x: x.to(device, non_blocking=True), targets)
        return replace(self, tensors=tensors, targets=targets, ahead=ahead)

    def pin_memory(self) -> "Batch":
        """The batch in pinned memory; torch's DataLoader calls this in its pinning thread."""
        return self.apply(lambda x: x.pin_memory())

    def batch(self) -> "Batch":
        """The batch itself, so that it can stand in for a `Packed` one."""
        return self


def target_tensors(targets: Targets) -> list[Tensor]:
    """The tensors of a microbatch's targets, which are one tensor or several by name."""
    return [targets] if isinstance(targets, Tensor) else list(targets.values())


def each_target(function: Callable[[Tensor], Tensor], targets: Targets) -> Targets:
    """Targets with `function` applied to each of their tensors."""
    if isinstance(targets, Tensor):
        return function(targets)
    return {name: function(x) for name, x in targets.items()}


def _of_tokens(inputs: Sequence[Input], targets: Targets) -> bool:
    """Whether a microbatch is of sequences of tokens."""
    first = inputs[0]
    if _one_for_each_token(targets):
        return not isinstance(first, Tensor) or first.ndim <= 3  # more than features are images
    # Other targets may belong to anything.
    if not isinstance(first, Tensor) or first.is_floating_point() or first.ndim != 2:
        return False
    return not isinstance(targets, Tensor) or targets.shape[:2] == first.shape


def _one_for_each_token(x: Any) -> bool:
    """Whether targets, or tokens, are whole numbers (b, s)."""
    return isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point()


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
        targets = _stack_targets([target for _, target in rows])
        if isinstance(targets, Tensor) and targets.dtype == torch.int64:
            targets[valid:] = IGNORE
        samples = tuple(index for _, index in items[:valid])
        return Batch.of([_stack(column) for column in columns], targets, samples)

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


def _shapes(row: Item) -> list[Any]:
    """Of each input of a sample, and of its target."""
    inputs, target = row
    shapes: list[Any] = [None if x is None else tuple(x.shape) for x in inputs]
    if isinstance(target, Tensor):
        return [*shapes, tuple(target.shape)]
    return [*shapes, {name: tuple(x.shape) for name, x in target.items()}]


def _stack_targets(targets: Sequence[Targets]) -> Targets:
    first = targets[0]
    if isinstance(first, Tensor):
        return torch.stack(list(targets))  # type: ignore[arg-type]  # of one kind: see `_shapes`
    columns: dict[str, list[Tensor]] = {name: [] for name in first}
    for row in targets:
        assert not isinstance(row, Tensor)
        for name, x in row.items():
            columns[name].append(x)
    return {name: torch.stack(column) for name, column in columns.items()}


def _stack(column: tuple[Tensor | None, ...]) -> Tensor | None:
    present = [tensor for tensor in column if tensor is not None]
    return torch.stack(present) if present else None
