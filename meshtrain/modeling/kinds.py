"""Kinds of blocks: which blocks of a model are alike, and a copy of the model in which one of each
kind stands for all of them."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.config.model_spec import ModelSpec
from meshtrain.data.batch import Batch
from meshtrain.dropout import set_dropout
from meshtrain.errors import InputError
from meshtrain.parallel.predictions import depths_of
from meshtrain.parallel.torch_private import tree_leaves
from meshtrain.pipeline.stage import SETTINGS, blocks_of, first_argument, first_input, skip_blocks

# names of a layer's index
NUMBERS = ("layer", "layer_idx", "layer_index", "layer_id", "layer_number", "idx", "index")

OWN_TARGETS = "the model's file has a loss of its own, whose targets are known from the data alone"


class UntracedError(InputError):
    """The step of this model cannot be traced; the message says why."""


def batch_of(spec: ModelSpec, size: int, seq_len: int, mask_documents: bool) -> Batch:
    """A microbatch before it is split over `cp`: of tokens, or for a classifier of images. Raises
    UntracedError: the model's Config does not give the size of images."""
    if "vocab_size" in spec.keys:
        return _batch_of_tokens(spec, size, seq_len, mask_documents)
    settings = spec.config
    has_size = hasattr(settings, "image_size") and hasattr(settings, "in_channels")
    if not has_size and spec.loss is not None:
        raise UntracedError(OWN_TARGETS)
    if not has_size:
        raise UntracedError(
            "a classifier's Config says by image_size and in_channels how large images are: not "
            "this one"
        )
    images = torch.zeros(size, settings.in_channels, settings.image_size, settings.image_size)
    return Batch.of((images,), torch.zeros(size, dtype=torch.int64))


def _batch_of_tokens(spec: ModelSpec, size: int, seq_len: int, mask_documents: bool) -> Batch:
    tokens, positions, targets = (torch.zeros(size, seq_len, dtype=torch.int64) for _ in range(3))
    documents = torch.zeros_like(tokens) if mask_documents else None
    batch = Batch.of((tokens, positions, documents), targets).looking_ahead(depths_of(spec.meta))
    return batch.with_context() if spec.plan("cp_plan") else batch


def kind_of(block: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for blocks that compute alike: types of modules, their settings (such as
    a window, but not a layer's index), and shapes of parameters and whether they are trained."""
    types, settings = [], []
    for module in block.modules():
        types.append(type(module))
        for name, value in vars(module).items():
            # Plain values decide what a forward does; a layer's own number seldom does.
            if isinstance(value, SETTINGS) and name.strip("_") not in NUMBERS:
                settings.append((name, repr(value)))
    parameters = [(*parameter.shape, parameter.requires_grad) for parameter in block.parameters()]
    return tuple(types), tuple(settings), tuple(parameters)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model.

    Attributes:
        first: for each block the index of the first block that is like it, which stands for it in
            traces.
        outputs: number of elements of each block's output for one sample; 0: not known.
    """

    first: tuple[int, ...]
    outputs: tuple[int, ...]


def repeated(first: Sequence[int]) -> tuple[int, ...]:
    """Indices of the blocks for which an earlier one stands. `first`: the result of `alike`."""
    return tuple(i for i, other in enumerate(first) if i != other)


@lru_cache(maxsize=8)
def known_blocks(spec: ModelSpec, seq_len: int, mask_documents: bool) -> Blocks:
    """Finds the blocks that are alike, and confirms by a forward on the meta device, in which
    repeated blocks are the identity, that inputs and outputs of alike blocks have the same shapes.
    Raises UntracedError: see `batch_of`."""
    batch = batch_of(spec, 1, seq_len, mask_documents)
    each_its_own = tuple(range(len(blocks_of(spec.meta))))
    for first in (_alike_by_kind(spec), each_its_own):
        with suppress(Exception):  # of the model's code, which may need what skipped blocks do
            inputs, outputs = _sizes_in_forward(without(spec, repeated(first)).copy(), batch)
            # A skipped block hands on its input: it has to look like its substitute's output.
            if all(inputs[i] == inputs[first[i]] == outputs[first[i]] for i in repeated(first)):
                return Blocks(first, tuple(_first_elements(outputs[i]) for i in first))
    return Blocks(each_its_own, (0,) * len(each_its_own))


def _alike_by_kind(spec: ModelSpec) -> tuple[int, ...]:
    """For each block the index of the first one with the same code, settings and shapes."""
    blocks = blocks_of(spec.meta)
    # A parameter that blocks share gets gradients from all of them: none stands for another.
    uses = Counter(parameter for block in blocks for parameter in block.parameters())
    kinds: list[Any] = []
    # Whether anything before the block is trained, so that its input has a gradient.
    trained = False
    for i, block in enumerate(blocks):
        shares_parameters = any(uses[parameter] > 1 for parameter in block.parameters())
        if shares_parameters or block is blocks[-1]:
            kinds.append(i)
        else:
            kinds.append((trained, kind_of(block)))
        trained = trained or any(parameter.requires_grad for parameter in block.parameters())
    return tuple(kinds.index(kind) for kind in kinds)


Sizes = list[tuple[torch.Size, torch.dtype]]  # of the tensors in one call's input or output


def _sizes_in_forward(
    model: nn.Module, batch: Batch
) -> tuple[dict[int, list[Sizes]], dict[int, list[Sizes]]]:
    """Sizes of each block's inputs and outputs in a forward, call by call."""
    inputs: dict[int, list[Sizes]] = defaultdict(list)
    outputs: dict[int, list[Sizes]] = defaultdict(list)

    def record(i: int, block: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        name = first_argument(block.forward)
        inputs[i].append(_sizes(first_input(name, arguments, named)))
        outputs[i].append(_sizes(output))

    for i, block in enumerate(blocks_of(model)):
        block.register_forward_hook(partial(record, i), with_kwargs=True)
    set_dropout(model, seed=0, step=0, samples=range(len(batch.targets)))
    with torch.no_grad():
        model(*batch.to(torch.device("meta"), torch.float32).inputs)
    return inputs, outputs


def _first_elements(calls: list[Sizes]) -> int:
    """Elements of the output of a block's first call."""
    return sum(math.prod(shape) for sizes in calls[:1] for shape, _ in sizes)


def _sizes(values: Any) -> Sizes:
    return [(x.shape, x.dtype) for x in tree_leaves(values) if isinstance(x, Tensor)]


class _FewBlocks(ModelSpec):
    def __init__(self, whole: ModelSpec, skipped: tuple[int, ...]) -> None:
        super().__init__(whole.module, whole.keys, whole.freeze, whole.lora)
        self.whole, self.skipped = whole, skipped

    def _construct(self) -> nn.Module:
        model = self.whole.copy()
        skip_blocks(model, self.skipped)
        return model


def without(spec: ModelSpec, skipped: Iterable[int]) -> ModelSpec:
    """The model with some of its blocks replaced by the identity."""
    return _without(spec, tuple(skipped)) if skipped else spec


_without = lru_cache(maxsize=32)(_FewBlocks)
