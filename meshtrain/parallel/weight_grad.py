"""Zero-bubble weight-gradient split: weight gradients that are computed later than input gradients.

The backward of a linear layer computes two products, and only one of them is waited for by the stage before. A layer
with a `WeightGradQueue` leaves the other one there, to be done when there is nothing better to do (Qi et al.,
https://arxiv.org/abs/2401.10241). What costs little (norms, biases, embeddings) is computed at once.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.parallel.matmul import linear_forward, linear_input_grad, linear_weight_grad


@dataclass(frozen=True)
class DeferredWeightGrad:
    """Gradients that have not been computed: of the weights as their layer saw them."""

    weights: Sequence[Tensor]
    compute: Callable[[], Sequence[Tensor]]


class WeightGradQueue:
    """Where the layers of a stage leave the weight gradients of a backward that computes input gradients only."""

    def __init__(self) -> None:
        self._recorded: list[DeferredWeightGrad] | None = None

    @property
    def is_recording(self) -> bool:
        """Whether the backward that runs now computes input gradients only."""
        return self._recorded is not None

    def add(self, weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        """`weights`: those that are trained."""
        assert self._recorded is not None  # the layer has asked
        self._recorded.append(DeferredWeightGrad(weights, compute))

    @contextmanager
    def record(self) -> Iterator[list[DeferredWeightGrad]]:
        """A backward inside leaves its weight gradients in the list."""
        recorded: list[DeferredWeightGrad] = []
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None


class SupportsDeferral:
    """A layer that can leave its weight gradients for later."""

    weight_grad_queue: WeightGradQueue | None = None  # where it leaves them; None: it computes them at once


def run_weight_grads(deferred: Sequence[DeferredWeightGrad]) -> None:
    """Computes deferred gradients layer by layer, each added to its parameter's before the next one is made; autograd
    leads it there from the weight as the layer saw it (a cast, a part). Layers that share a parameter are done in one
    go, which adds their gradients up as a whole backward does."""
    parameters = [[_parameter_of(weight) for weight in layer.weights] for layer in deferred]
    uses = Counter(itertools.chain(*parameters))
    shares = [any(uses[parameter] > 1 for parameter in own) for own in parameters]
    sharing = list(itertools.compress(deferred, shares))
    alone = [[layer] for layer, shared in zip(deferred, shares, strict=True) if not shared]
    for layers in (sharing, *alone) if sharing else alone:
        with torch.no_grad():
            gradients = [gradient for layer in layers for gradient in layer.compute()]
        torch.autograd.backward([weight for layer in layers for weight in layer.weights], gradients)
        del gradients  # their memory is free when the next ones are made


def _parameter_of(weight: Tensor) -> Tensor:
    """The parameter from which autograd made what a layer saw."""
    node = weight.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0]
    return weight if node is None else node.variable


def defer_weight_grads(model: nn.Module, queue: WeightGradQueue) -> None:
    """A model's linear layers, plain or tensor-parallel, leave weight gradients in `queue` while it records."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module, queue)  # type: ignore[method-assign]
        elif isinstance(module, SupportsDeferral):
            module.weight_grad_queue = queue


def _linear(layer: nn.Linear, queue: WeightGradQueue, x: Tensor) -> Tensor:
    y = Linear.apply(x, layer.weight, queue)
    return y if layer.bias is None else y + layer.bias


class Linear(torch.autograd.Function):
    """x (..., d) times a weight (f, d) -> (..., f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: WeightGradQueue) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved with x: a recomputation would give back a copy of it that has lost its way to the parameter.
        ctx.weight, ctx.queue = weight, queue
        return linear_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        weight, queue = ctx.weight, ctx.queue
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        dx = linear_input_grad(grad, weight) if needs_dx else None
        if not needs_dw:
            return dx, None, None
        grads, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        if queue.is_recording:
            queue.add([weight], lambda: [linear_weight_grad(grads, inputs)])
            return dx, None, None
        return dx, linear_weight_grad(grads, inputs), None
