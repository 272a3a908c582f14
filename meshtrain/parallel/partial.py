"""Gradients of parameters that all ranks of `tp` hold and of which each has seen a part.

A norm between the parallel regions sees a rank's part of the sequence; key/value heads that several ranks hold see the
queries of each. The gradient is the sum, and it is made once a step: at the end of the last backward, after the sums
over the data ranks, in one all-reduce.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshtrain.parallel.collectives import Channel, ops
from meshtrain.parallel.data import when_backward_begins
from meshtrain.parallel.torch_private import accumulates


class PartialSums:
    """Sums such gradients over the ranks of `tp` when a backward of the model ends."""

    def __init__(self, model: nn.Module, parameters: Sequence[tuple[nn.Module, str]], channel: Channel) -> None:
        """
        Args:
            model: whose outputs' backward is waited for; after whatever else hooks into it.
            parameters: each as a module and the name it has there, because FSDP puts others in their place.
        """
        self._parameters, self._channel = list(parameters), channel
        self._sharded = isinstance(model, FSDPModule)
        self._last = True
        when_backward_begins(model, self._begin)

    def set_last(self, last: bool) -> None:
        """Whether the next backward is the last of its step, and so the one that sums."""
        self._last = last

    def reduce(self) -> None:
        """Sums now, after backwards none of which was the last."""
        self._finish()

    def _begin(self) -> None:
        # FSDP's backward accumulates into parameters of its own, so there `torch.autograd.grad` is not told apart.
        if self._last and (self._sharded or any(accumulates(m.get_parameter(name)) for m, name in self._parameters)):
            Variable._execution_engine.queue_callback(self._after_the_others)

    def _after_the_others(self) -> None:
        """What DDP and FSDP have queued during the backward comes before what is queued now."""
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
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
