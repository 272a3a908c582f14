"""Gradients of parameters that all ranks of `tp` hold and of which each has seen a part.

A norm between the parallel regions sees a rank's part of the sequence; key/value heads that several ranks hold see the
queries of each. The gradient is the sum, and it is made once a step: at the end of the last backward, after the sums
over the data ranks, in one all-reduce.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from meshtrain.parallel.collectives import Channel, ops


class PartialSums:
    """Sums such gradients over the ranks of `tp` when a backward of the model ends."""

    def __init__(self, model: nn.Module, parameters: Sequence[tuple[nn.Module, str]], channel: Channel) -> None:
        """
        Args:
            model: whose outputs' backward is waited for; after whatever else hooks into it.
            parameters: each as a module and the name it has there, because FSDP puts others in their place.
        """
        self._parameters, self._channel = list(parameters), channel
        self._last = True
        self._queued = False
        model.register_forward_hook(self._watch)

    def set_last(self, last: bool) -> None:
        """Whether the next backward is the last of its step, and so the one that sums."""
        self._last = last

    def reduce(self) -> None:
        """Sums now, after backwards none of which was the last."""
        self._finish()

    def _watch(self, model: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin)

    def _begin(self, grad: Tensor) -> None:
        if self._last and not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._after_the_others)

    def _after_the_others(self) -> None:
        """What DDP and FSDP have queued during the backward comes before what is queued now."""
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._queued = False
        grads = [self._grad(module, name) for module, name in self._parameters]
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            if grad is not None and grad.numel() > 0:
                by_type.setdefault(grad.dtype, []).append(grad)
        for some in by_type.values():
            total = ops.all_reduce(torch.cat([grad.flatten() for grad in some]), self._channel.name)
            for grad, part in zip(some, total.split([grad.numel() for grad in some]), strict=True):
                grad.copy_(part.view_as(grad))

    def _grad(self, module: nn.Module, name: str) -> Tensor | None:
        """This rank's part of a gradient; None where the model did not use the parameter, on all ranks of `tp`."""
        grad = module._parameters[name].grad  # type: ignore[union-attr]
        return grad.to_local() if isinstance(grad, DTensor) else grad
