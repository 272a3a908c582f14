"""Weight gradients: added where they belong by the product that makes them, and later than input gradients.

Autograd would make each gradient of a microbatch in memory of its own and add it to the parameter's in a second pass; a
product that adds to what is there needs neither. Wherever autograd may have to know of the gradient, it goes its way.

The backward of a linear layer computes two products, and only one of them is waited for by the stage before. A layer
with a `WeightGradQueue` leaves the other one there, to be done when there is nothing better to do (Qi et al.,
https://arxiv.org/abs/2401.10241). What costs little (norms, biases, embeddings) is computed at once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.parallel.linear.matmul import linear_weight_grad, linear_weight_grad_into
from meshtrain.parallel.torch_private import (
    accumulator_of,
    as_gradient,
    has_gradient_hooks,
    is_plain_gradient,
    runs_in_backward,
    to_local,
)


@dataclass(frozen=True)
class DeferredWeightGrad:
    """A weight's gradient that has not been computed."""

    weight: Tensor  # as the layer saw it: autograd leads the gradient from there to the parameter
    parameter: Tensor | None  # all of which the weight is, if it is of one
    compute: Callable[[], Tensor]
    write: Callable[[Tensor, bool], object] | None = None  # the same in memory that is there: added to it, or not


class WeightGradQueue:
    """Where the layers of a stage leave the weight gradients of a backward that computes input gradients only."""

    used = True  # for the microbatch whose forward or backward runs now

    def __init__(self) -> None:
        self._recorded: list[DeferredWeightGrad] | None = None

    @property
    def is_recording(self) -> bool:
        """Whether the backward that runs now computes input gradients only."""
        return self._recorded is not None

    def add(self, deferred: DeferredWeightGrad) -> None:
        assert self._recorded is not None  # the layer has asked
        self._recorded.append(deferred)

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


def let_products_accumulate(model: nn.Module) -> None:
    """From now on products may add to the gradients of parameters, but of those that several modules share."""
    places = [parameter for module in model.modules() for parameter in module._parameters.values()]
    for parameter, uses in Counter(parameter for parameter in places if parameter is not None).items():
        if uses == 1:
            parameter.gradient_place = None  # type: ignore[attr-defined]


def weight_grad(
    ctx: Any, index: int, compute: Callable[[], Tensor], write: Callable[[Tensor, bool], object] | None = None
) -> Tensor | None:
    """What the backward of a layer's autograd function returns for a weight; what its forward has left in `ctx` is
    `queue` and, where there is one, `weights`: saved ones may be copies, made by a recomputation, from which autograd
    finds no way to the parameters. `index`: of the weight among these; the rest: see `DeferredWeightGrad`."""
    if torch.compiler.is_compiling():
        return compute()
    node = ctx.next_functions[1 + index][0]
    parameter = getattr(accumulator_of(node), "variable", None)
    defers = ctx.queue is not None and ctx.queue.is_recording and runs_in_backward(node)
    if defers and not has_gradient_hooks(parameter):
        ctx.queue.add(DeferredWeightGrad(ctx.weights[index], parameter, compute, write))
        return None
    return add_or_compute(node, compute, write)


def product_weight_grad(ctx: Any, index: int, grad: Tensor, x: Tensor) -> Tensor | None:
    """`weight_grad` of a linear layer with this output's gradient (n, f) and this input (n, d)."""
    return weight_grad(ctx, index, partial(linear_weight_grad, grad, x), partial(linear_weight_grad_into, grad, x))


def add_or_compute(
    node: Any, compute: Callable[[], Tensor], write: Callable[[Tensor, bool], object] | None
) -> Tensor | None:
    """In a backward, what its next node gets: a gradient, or None if that has been added to the parameter's."""
    accumulator = accumulator_of(node)
    parameter = getattr(accumulator, "variable", None)
    if write is None or not takes_products(parameter) or not runs_in_backward(accumulator):
        return compute()
    add_product(parameter, write)
    return None


def run_weight_grads(deferred: Sequence[DeferredWeightGrad]) -> None:
    """Computes deferred gradients layer by layer, each added to its parameter's before the next one is made. Those of
    layers that share a parameter are added up first, as a whole backward does."""
    shared: dict[Any, list[DeferredWeightGrad]] = {}
    with torch.no_grad():
        for layer in deferred:
            if layer.write is not None and takes_products(layer.parameter):
                add_product(layer.parameter, layer.write)
            else:
                shared.setdefault(layer if layer.parameter is None else layer.parameter, []).append(layer)
        for layers in shared.values():
            torch.autograd.backward([layer.weight for layer in layers], [layer.compute() for layer in layers])


def takes_products(parameter: Any) -> bool:
    """Whether a product may add to a parameter's gradient, or begin it. Autograd does what could be seen otherwise."""
    if not hasattr(parameter, "gradient_place") or torch.is_grad_enabled() or torch.is_anomaly_enabled():
        return False
    if parameter.grad is not None and not is_plain_gradient(parameter.grad, parameter):
        return False
    return not has_gradient_hooks(parameter)


def write_grad(grad: Tensor, place: Tensor, add: bool) -> None:
    """A gradient that is there, perhaps in another type, as a product is written: in one pass over its memory."""
    place.add_(grad) if add else place.copy_(grad)


def add_product(parameter: Any, write: Callable[[Tensor, bool], object]) -> None:
    if parameter.grad is not None:
        write(to_local(parameter.grad), True)
        return
    place = parameter.gradient_place
    if place is None:
        place = as_gradient(torch.empty_like(to_local(parameter.detach())), parameter)
    write(to_local(place), False)
    parameter.grad = place
