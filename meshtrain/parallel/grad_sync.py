"""Gradient synchronization: what happens to a model's gradients when the last backward of a step ends.

Every kind of parallelism whose gradients have to be summed registers a `GradientSync`. A loop with gradient
accumulation says which backward is the last by `set_is_last_backward`; the others communicate what cannot wait only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from meshtrain.parallel.collectives import AxisGroup
from meshtrain.parallel.torch_private import (
    accumulates,
    after_end_of_backward,
    current_backward,
    to_local,
    without_dispatch_modes,
)


class GradientSync:
    """Something that sums gradients when the last backward of a step ends, or when it is told to."""

    waits = True  # at the end of the last backward; otherwise in `finish_reduce` (see `defer_waits`)

    def set_is_last_backward(self, last: bool) -> None:
        """Whether the next backward is the last of its step."""
        raise NotImplementedError

    def start_reduce(self) -> None:
        """Starts all sums that are not under way, also after backwards none of which was the last. Does not wait."""
        raise NotImplementedError

    def finish_reduce(self) -> None:
        """Waits for the sums, and makes those that come after them."""

    def accumulate(self) -> None:
        """Weight gradients came without a backward of the model (see `weight_grad.py`)."""


def add_gradient_sync(model: nn.Module, sync: GradientSync) -> None:
    """From now on the functions below reach this one too, in the order in which they were added."""
    model.gradient_syncs = (*gradient_syncs(model), sync)  # type: ignore[assignment]


def gradient_syncs(model: nn.Module) -> tuple[GradientSync, ...]:
    """Those of a parallelized model: none in a world of one."""
    return getattr(model, "gradient_syncs", ())


def set_is_last_backward(model: nn.Module, last: bool) -> None:
    """Says whether the next backward of a parallelized model is the last of its step.

    Only the last one sends what can wait until then. A loop without gradient accumulation need not call this; one with
    it must, because a second backward would sum again what the first has summed.
    """
    for sync in gradient_syncs(model):
        sync.set_is_last_backward(last)


def accumulate_gradients(model: nn.Module) -> None:
    """Takes weight gradients that were computed after their backward; the next ones would be added in 16 bits."""
    for sync in gradient_syncs(model):
        sync.accumulate()


def defer_waits(model: nn.Module) -> None:
    """From now on a last backward of a parallelized model only starts sums: `finish_reduce` has to be called."""
    for sync in gradient_syncs(model):
        sync.waits = False


def start_reduce(model: nn.Module) -> None:
    """Starts the sums of the gradients of all backwards of a step that the last backward has not started."""
    for sync in gradient_syncs(model):
        sync.start_reduce()


def finish_reduce(model: nn.Module) -> None:
    """Waits for the sums that were started. Gradients are whole then."""
    for sync in gradient_syncs(model):
        sync.finish_reduce()


def when_backward_begins(model: nn.Module, callback: Callable[[], None]) -> None:
    """Calls back once at the start of each backward of a model's outputs, also of one after a failed one."""
    latest = -1

    def in_backward(grad: Tensor) -> None:
        nonlocal latest
        if current_backward() != latest:
            latest = current_backward()
            callback()

    def after_forward(model: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(in_backward)

    model.register_forward_hook(after_forward)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of a model's output, also of dataclasses and other objects that hold them."""
    tensors, objects, leaves = [], set[int](), tree_leaves(output)
    while leaves:
        leaf = leaves.pop(0)
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif id(leaf) not in objects and not isinstance(leaf, type | nn.Module):
            objects.add(id(leaf))
            leaves += tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
    return tensors


class TPGradSync(GradientSync):
    """Sums gradients of parameters that all ranks of an axis hold and of which each has used a part.

    A norm between the parallel regions sees a rank's part of the sequence; key/value heads that several ranks hold see
    the queries of each. One all-reduce sums them at the end of a step, after the sums over the data ranks.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[tuple[nn.Module, str]], axis_group: AxisGroup) -> None:
        """`parameters`: each as a module and the name it has there, because FSDP puts others in their place."""
        self._parameters, self._axis_group = list(parameters), axis_group
        self._sharded = isinstance(model, FSDPModule)
        self._last = True
        when_backward_begins(model, self._begin)

    def set_is_last_backward(self, last: bool) -> None:
        self._last = last

    def start_reduce(self) -> None:
        """Nothing: it takes the sums over the data ranks."""

    def finish_reduce(self) -> None:
        """One all-reduce for all gradients of a type; a parameter that the model did not use is so on all ranks."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for module, name in self._parameters:
            grad = module._parameters[name].grad  # type: ignore[union-attr]
            if grad is not None and (local := to_local(grad)).numel() > 0:
                by_type.setdefault(local.dtype, []).append(local)
        for grads in by_type.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            with without_dispatch_modes():  # which see no communication, as it is inside of operators elsewhere
                total = self._axis_group.start_all_reduce(flat, overwrite=True).wait()
            parts = total.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])

    def _begin(self) -> None:
        # FSDP's backward accumulates into parameters of its own, so there `torch.autograd.grad` is not told apart.
        if not self._last or not self.waits:
            return
        if self._sharded or any(accumulates(m.get_parameter(name)) for m, name in self._parameters):
            after_end_of_backward(self.finish_reduce)  # the sums over the data ranks come first
