"""A user's own data set: a Python file that exports `dataset(config, split)`.

The function returns any object with `len()` and `[index]` whose items are pairs (inputs, target),
or None if it has no such split ("train" or "validation"). `config` is the `data` section.
docs/data.md has an example.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from meshtrain.data.batch import IGNORE, Batch, Item, Packed, Samples, Targets
from meshtrain.data.tokens import outside_vocabulary
from meshtrain.errors import InputError
from meshtrain.job import locate

if TYPE_CHECKING:
    from meshtrain.config.schema import DataSection


class CustomSamples(Samples):
    """A user's map-style data set.

    An item's inputs are a tensor or a tuple of tensors, its target a tensor or a number. An item
    whose target has one dim is text, with the inputs tokens, positions and documents, (s,) each;
    tokens alone are given positions. For a loss of the user's own a target may be of any dtype, or
    a dict of tensors, and text is what has tokens, (s,), before all else. A data set whose items
    differ between epochs (augmentation) has a method `item(index, epoch)`, used instead of
    `[index]`.
    """

    def __init__(
        self,
        name: str,
        dataset: Any,
        n_outputs: int | None,
        vocab_size: int | None = None,
        own_loss: bool = False,
    ) -> None:
        """`own_loss`: the model's file defines a loss, which says what targets are."""
        self.name = name
        self.own_loss = own_loss
        self.n_outputs = n_outputs
        self.vocab_size = vocab_size
        self._dataset = dataset
        self._by_epoch = hasattr(dataset, "item")

    def __len__(self) -> int:
        return len(self._dataset)

    def item(self, index: int, epoch: int) -> Item:
        if self._by_epoch:
            item = self._dataset.item(index, epoch)
        else:
            item = self._dataset[index]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise InputError(
                f"{self.name}: item {index} is {type(item).__name__}, expected a pair (inputs, "
                "target)"
            )
        given, target = item
        if not isinstance(given, (tuple, list)):
            given = (given,)
        inputs = tuple(None if x is None else torch.as_tensor(x) for x in given)

        problem = None
        if self.own_loss:
            target, problem = _any_target(target)
        elif isinstance(target, Mapping):
            problem = f"its target is a dict: {WHOLE_OR_LOSS}"
        else:
            target = torch.as_tensor(target)
            problem = _problem(inputs, target)
        if problem is not None:
            raise InputError(f"{self.name}: item {index}: {problem}")
        if not self.own_loss:
            target = target.long()

        # Tokens alone: positions count from their beginning, and they are one document.
        if len(inputs) == 1 and is_text(inputs, target, self.own_loss):
            tokens = inputs[0]
            assert tokens is not None
            inputs = (tokens, torch.arange(len(tokens)), None)
        return inputs, target

    def read(self, items: Sequence[tuple[int, int]], valid: int) -> Batch | Packed:
        batch = super().read(items, valid)
        assert isinstance(batch, Batch)
        self._check_targets(batch, items)
        self._check_tokens(batch, items)
        return batch

    def _check_targets(self, batch: Batch, items: Sequence[tuple[int, int]]) -> None:
        """Raises InputError at a target that is no output of the model."""
        if self.own_loss:
            return
        wrong = (batch.targets < 0) & (batch.targets != IGNORE)
        if self.n_outputs is not None:
            wrong |= batch.targets >= self.n_outputs
        if not bool(wrong.any()):
            return
        first = _first(wrong)
        _, index = items[first[0]]
        target = int(batch.targets[first])
        raise InputError(
            f"{self.name}: the target {target} of sample {index} is outside of the "
            f"model's {self.n_outputs} outputs: expected 0 to {(self.n_outputs or 0) - 1}, or "
            f"{IGNORE} for no loss"
        )

    def _check_tokens(self, batch: Batch, items: Sequence[tuple[int, int]]) -> None:
        """Raises InputError at a token that the vocabulary does not have."""
        tokens = batch.tensors.get("tokens")
        if self.vocab_size is None or not isinstance(tokens, torch.Tensor):
            return
        wrong = (tokens < 0) | (tokens >= self.vocab_size)
        if not bool(wrong.any()):
            return
        first = _first(wrong)
        _, index = items[first[0]]
        place = f"{self.name}: sample {index}"
        raise outside_vocabulary(place, int(tokens[first]), self.vocab_size, None)


def _first(marked: torch.Tensor) -> tuple[int, ...]:
    """Where the first marked element is, its row before all else."""
    return tuple(marked.nonzero()[0].tolist())


WHOLE_OR_LOSS = (
    "expected whole numbers, or a `loss(outputs, targets)` in the model's file, which takes "
    "targets of any kind (docs/losses.md)"
)


def is_text(inputs: Sequence[torch.Tensor | None], target: Targets, own_loss: bool) -> bool:
    """Whether an item is text. For a loss of the user's own, targets tell less: whether the first
    input is tokens, (s,), and, of whole numbers in one tensor, whether there is one for each."""
    if not own_loss:
        return isinstance(target, torch.Tensor) and target.ndim == 1
    first = inputs[0]
    if first is None or first.is_floating_point() or first.ndim != 1:
        return False
    return not isinstance(target, torch.Tensor) or target.shape[:1] == first.shape


def _any_target(target: Any) -> tuple[Targets, str | None]:
    """A target for a loss of the user's own, and what is wrong with it."""
    if not isinstance(target, Mapping):
        return torch.as_tensor(target), None
    if not target or not all(isinstance(name, str) for name in target):
        return {}, f"its target is a dict with the keys {list(target)}: expected names"
    return {name: torch.as_tensor(x) for name, x in target.items()}, None


def _problem(inputs: Sequence[torch.Tensor | None], target: torch.Tensor) -> str | None:
    if target.is_floating_point():
        broken = target[target != target.round()]
        if len(broken):
            return f"its target holds {float(broken[0])}: {WHOLE_OR_LOSS}"
    if target.ndim == 1 and any(x is not None and x.ndim == 0 for x in inputs):
        return (
            f"its inputs are {len(inputs)} numbers: expected a tensor of tokens, and not a list of "
            "them"
        )
    return None


def open_custom(
    config: "DataSection",
    n_outputs: int | None,
    vocab_size: int | None = None,
    own_loss: bool = False,
) -> tuple[CustomSamples, Samples | None]:
    """The training and validation sets of the file `data.source`. `own_loss`: see `CustomSamples`.
    Raises InputError: it does not provide them."""
    make = getattr(locate.users_file("data.source", config.source), "dataset", None)
    if not callable(make):
        raise InputError(
            f"{config.source} exports no function `dataset(config, split)`: see docs/data.md"
        )
    samples: dict[str, CustomSamples | None] = {}
    for split in ("train", "validation"):
        try:
            dataset = make(config, split)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise InputError(
                f"{config.source}: dataset(config, {split!r}) cannot be used: "
                f"{locate.raised(error)}"
            ) from error
        if dataset is None:
            samples[split] = None
            continue
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise InputError(
                f"{config.source}: dataset(config, {split!r}) gave {type(dataset).__name__}; "
                "expected an object with len() and [index], or None"
            )
        name = f"{config.source} ({split})"
        samples[split] = CustomSamples(name, dataset, n_outputs, vocab_size, own_loss)
    train = samples["train"]
    if train is None or len(train) == 0:
        raise InputError(
            f"{config.source}: dataset(config, 'train') has no samples: there is nothing to train "
            "on"
        )
    return train, samples["validation"]
