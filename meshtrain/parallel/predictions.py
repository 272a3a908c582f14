"""Predictions of further tokens: what the layers that make them (`meshtrain.prediction`) are told
by the code that runs a model.

The k-th of them predicts, at token i, the one behind t_{i+k}, and is given t_{i+k} for it. Which
tokens these are is known before a batch is split (`Batch.looking_ahead`), so that no rank asks
another for its neighbours' tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.data.batch import IGNORE, LANGUAGE, Batch
from meshtrain.parallel.cross_entropy import CROSS_ENTROPY, LossOptions
from meshtrain.parallel.linear_cross_entropy import LossRequest, WeightGradSum
from meshtrain.parallel.step_context import current_context, use_context

# (depth, sum of its losses, number of its targets), scalars in float64
Take = Callable[[int, Tensor, Tensor], None]


def _whole(x: Tensor) -> Tensor:
    return x


def _take_nothing(depth: int, total: Tensor, count: Tensor) -> None:
    pass


@dataclass(frozen=True)
class Predictions:
    """Asks a forward of a microbatch for the losses of its predictions.

    Attributes:
        ahead: returns `Batch.ahead`, (b, s, depths, 2), on the device.
        factor: returns that of the gradient of a sum of losses; None: no backward follows.
        options: of the losses.
        take: gets the losses of each depth.
        weight_grads: of a step, in which several forwards may precede backwards, by depth; None:
            each forward has its own.
        part: the tokens of (b, s) that this rank has between layers.
    """

    ahead: Callable[[], Tensor]
    factor: Callable[[], Tensor] | None = None
    options: LossOptions = CROSS_ENTROPY
    take: Take = _take_nothing
    weight_grads: dict[int, WeightGradSum] | None = None
    part: Callable[[Tensor], Tensor] = _whole

    def tokens(self, depth: int) -> Tensor:
        """(b, s): the token that is `depth` further; any one where the sequence ends before."""
        return self._tokens(depth).clamp(min=0)

    def targets(self, depth: int) -> Tensor:
        """(b, s): the target of that token, IGNORE where there is no loss."""
        return self.ahead()[..., depth - 1, 1]

    def _tokens(self, depth: int) -> Tensor:
        return self.ahead()[..., depth - 1, 0]

    def request(self, depth: int) -> LossRequest:
        """Asks the head of this depth for the loss."""
        weight_grad = None
        if self.weight_grads is not None:
            weight_grad = self.weight_grads.setdefault(depth, WeightGradSum())
        targets = self.targets(depth)
        return LossRequest(lambda: targets, self.factor, weight_grad, self.options)

    @contextmanager
    def only_real(self, depth: int) -> Iterator[None]:
        """Inside, tokens behind which the sequence ends before t_{i+k} are padding, as in shorter
        sequences: no expert computes them, and no statistics counts them. Attention needs no mask:
        they are the last ones."""
        context = current_context()
        if context.terms is None:
            yield
            return
        real = self.part(self._tokens(depth) != IGNORE)
        with use_context(replace(context, terms=replace(context.terms, tokens=real))):
            yield


def prediction_heads(model: nn.Module) -> list[nn.Module]:
    """The heads of a model's predictions, or of those of a stage, one for each depth."""
    # By their class: the placeholder of a block in another stage has what the block's instance has.
    heads = [module for module in model.modules() if getattr(type(module), "predicts_ahead", False)]
    return [head.lm_head for head in heads]  # type: ignore[misc]  # of `PredictionHead`


def depths_of(model: nn.Module) -> int:
    """How many further tokens a whole model predicts."""
    return len(prediction_heads(model))


@contextmanager
def predicting(
    model: nn.Module, inputs: Sequence[Any], ahead: Tensor | None = None
) -> Iterator[None]:
    """A forward inside makes its predictions as in training, so that what looks at it sees them.
    Nothing for a model that makes none.

    Args:
        inputs: the arguments of `model(*inputs)`, on the device where it runs.
        ahead: `Batch.ahead` of parts of sequences; None: they are whole, and their tokens are their
            targets.
    """
    depths = depths_of(model)
    if depths == 0:
        yield
        return
    tokens = inputs[0]
    if ahead is None:
        batch = Batch(dict(zip(LANGUAGE, inputs, strict=False)), tokens)
        ahead = batch.looking_ahead(depths).ahead
    found = ahead
    assert found is not None  # there is a depth
    predictions = Predictions(lambda: found, factor=lambda: torch.ones((), device=found.device))
    with use_context(replace(current_context(), predictions=predictions)):
        yield
