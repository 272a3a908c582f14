"""Step context: what a forward is told beside its inputs by the code that runs it.

Deep inside a model a router adds a term to the loss, and experts ask which tokens are padding; the
last layer learns whether the loss is wanted instead of logits. A model file's forward has no
argument for these. So whoever runs a model sets a `StepContext` around each forward, and around
each backward, which may recompute blocks.

The context belongs to the process. A variable of a thread, or of Python's `contextvars`, would not
do: autograd recomputes blocks in threads of its own, which do not inherit either. It cannot be a
race, because a process runs one forward or backward at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshtrain.loss import MicrobatchTerms
    from meshtrain.parallel.gather_samples import SampleShares
    from meshtrain.parallel.linear_cross_entropy import LossRequest
    from meshtrain.parallel.predictions import Predictions


@dataclass(frozen=True)
class StepContext:
    """Without arguments: that of a forward outside of a training step, which returns logits."""

    # asks the model's head for the loss in place of logits
    loss_request: "LossRequest | None" = None
    # asks layers that predict further tokens for their losses
    predictions: "Predictions | None" = None
    # takes the terms and statistics of modules, and knows the padding
    terms: "MicrobatchTerms | None" = None
    # knows the samples that other ranks have of the microbatch, for its loss
    shares: "SampleShares | None" = None


_current = StepContext()


def current_context() -> StepContext:
    """The context of the forward or backward that is running."""
    return _current


@contextmanager
def use_context(context: StepContext) -> Iterator[None]:
    """Encloses a forward or a backward with this context."""
    global _current  # noqa: PLW0603
    before, _current = _current, context
    try:
        yield
    finally:
        _current = before
