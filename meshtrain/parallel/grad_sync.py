"""Gradient synchronization: what happens to a model's gradients when the last backward of a step
ends.

Every kind of parallelism whose gradients have to be summed registers a `GradientSync`. A loop with
gradient accumulation marks the last backward with `set_is_last_backward`; earlier ones only
communicate what cannot wait.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshtrain.parallel.collectives import AxisGroup
from meshtrain.parallel.torch_private import (
    accumulates,
    after_end_of_backward,
    current_backward,
    hidden_from_dispatch_modes,
    to_local,
    tree_leaves,
)


class GradientSync:
    """Sums gradients at the end of the last backward of a step, or on an explicit call."""

    # whether the last backward waits at its end, or `finish_reduce` (see `defer_waits`)
    waits = True

    def set_is_last_backward(self, last: bool) -> None:
        """Sets whether the next backward is the last of its step."""
        raise NotImplementedError

    def start_reduce(self) -> None:
        """Starts all sums not yet started, even if no backward was marked as the last. Does not
        wait."""
        raise NotImplementedError

    def finish_reduce(self) -> None:
        """Waits for the sums, and computes the sums that depend on them."""

    def accumulate(self) -> None:
        """Called after weight gradients were computed outside a backward of the model (see
        `weight_grad.py`)."""


def add_gradient_sync(model: nn.Module, sync: GradientSync) -> None:
    """Registers a sync with the functions below, which call all syncs in the order of
    registration."""
    model.gradient_syncs = (*gradient_syncs(model), sync)  # type: ignore[assignment]


def gradient_syncs(model: nn.Module) -> tuple[GradientSync, ...]:
    """The syncs of a parallelized model: none if the world size is 1."""
    return getattr(model, "gradient_syncs", ())


def set_is_last_backward(model: nn.Module, last: bool) -> None:
    """Sets whether the next backward of a parallelized model is the last of its step.

    Communication that can wait happens only in the last one. A loop without gradient accumulation
    need not call this; one with it must, because a second backward would sum again what the first
    has already summed.
    """
    for sync in gradient_syncs(model):
        sync.set_is_last_backward(last)


def accumulate_gradients(model: nn.Module) -> None:
    """Accumulates weight gradients computed after their backward; otherwise the next would be added
    in 16 bits."""
    for sync in gradient_syncs(model):
        sync.accumulate()


def defer_waits(model: nn.Module) -> None:
    """Makes the last backwards of a parallelized model only start sums: the caller has to call
    `finish_reduce`."""
    for sync in gradient_syncs(model):
        sync.waits = False


def start_reduce(model: nn.Module) -> None:
    """Starts the gradient sums of a step that its backwards have not started."""
    for sync in gradient_syncs(model):
        sync.start_reduce()


def finish_reduce(model: nn.Module) -> None:
    """Waits for the started sums, after which gradients are complete."""
    for sync in gradient_syncs(model):
        sync.finish_reduce()


def when_backward_begins(model: nn.Module, callback: Callable[[], None]) -> None:
    """Calls `callback` once at the start of each backward from a model's outputs, also after a
    failed backward."""
    latest = -1

    def in_backward(grad: Tensor) -> None:
        nonlocal latest
        if current_backward() != latest:
            latest = current_backward()
            callback()

    # A hook on each output, because a loss may use any of them: the first that autograd reaches
    # tells. Ids of backwards are never used twice.
    def after_forward(model: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(in_backward)

    model.register_forward_hook(after_forward)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in a model's output, including those in dataclasses and other objects."""
    tensors: list[Tensor] = []
    seen = set[int]()  # ids of objects, which may refer to each other
    leaves = tree_leaves(output)
    while leaves:
        leaf = leaves.pop(0)
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif id(leaf) not in seen and not isinstance(leaf, type | nn.Module):
            seen.add(id(leaf))
            attributes = getattr(leaf, "__dict__", {})
            leaves += tree_leaves(list(attributes.values()))
    return tensors


class TPGradSync(GradientSync):
    """Sums gradients of parameters that all ranks of an axis hold, where each rank has only a part
    of the gradient.

    A norm between the parallel regions sees only the rank's part of the sequence; key/value heads
    that several ranks hold see only the rank's queries. One all-reduce at the end of a step sums
    them, after the sums over data ranks.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[tuple[nn.Module, str]], axis_group: AxisGroup
    ) -> None:
        """`parameters`: pairs of module and parameter name, because FSDP replaces the parameter
        objects."""
        self._parameters = list(parameters)
        self._axis_group = axis_group
        self._sharded = isinstance(model, FSDPModule)
        self._last = True
        when_backward_begins(model, self._begin)

    def set_is_last_backward(self, last: bool) -> None:
        self._last = last

    def start_reduce(self) -> None:
        """Nothing to start yet: it needs the sums over the data ranks."""

    def finish_reduce(self) -> None:
        """One all-reduce for all gradients of a dtype. A parameter unused on one rank is unused on
        all of them."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for module, name in self._parameters:
            grad = module._parameters[name].grad  # type: ignore[union-attr]
            if grad is None:
                continue
            local = to_local(grad)
            if local.numel() > 0:
                by_type.setdefault(local.dtype, []).append(local)
        for grads in by_type.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            # hides communication, which elsewhere is inside operators
            with hidden_from_dispatch_modes():
                total = self._axis_group.start_all_reduce(flat, overwrite=True).wait()
            parts = total.split([grad.numel() for grad in grads])
            sums = [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]
            torch._foreach_copy_(grads, sums)

    def _begin(self) -> None:
        # FSDP's backward accumulates into its own parameters, so with FSDP `torch.autograd.grad` is
        # not detected.
        if not self._last or not self.waits:
            return
        if self._sharded or any(accumulates(m.get_parameter(name)) for m, name in self._parameters):
            after_end_of_backward(self.finish_reduce)  # the sums over the data ranks come first
