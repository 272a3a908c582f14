"""What a run shows to whoever watches its steps from inside: `meshtrain verify`, and otherwise
nobody.

A run calls these functions at the few points at which layouts can be compared: what it reads, the
loss of each sample, and the gradients and weights around an update.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


class Observer:
    """Overridden by who watches; each function is called on every rank, in the order of a step."""

    def samples(self, items: Sequence[tuple[int, int]], tensors: Sequence["Tensor"]) -> None:
        """Samples were read: (epoch, index) each, and what was read of them, a row for each in
        every tensor."""

    def after_backward(self, model: "nn.Module") -> None:
        """The backward of a microbatch is done, outside of a pipeline."""

    def losses(self, first: int, real: int, losses: "Tensor", *, speaks: bool) -> None:
        """The loss of each of this rank's samples, which are those of the global batch from `first`
        on; what follows after `real` ones is padding. `speaks`: no other rank counts the same."""

    def updating(self, parameters: Sequence[Any]) -> AbstractContextManager[None]:
        """Encloses an update of this rank's parameters, `optim.grad_norm.LocalParameter` each, of
        which the gradients are collected and not clipped yet."""
        return nullcontext()


# One for the process: a script's run has nobody who could pass it on.
current: Observer | None = None


def updating(parameters: Sequence[Any]) -> AbstractContextManager[None]:
    return nullcontext() if current is None else current.updating(parameters)
