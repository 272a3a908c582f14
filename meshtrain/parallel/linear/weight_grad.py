"""Weight gradients: where the product dW = dY^T X of a layer goes, and when it is computed.

**Where.** Autograd would allocate each gradient of a microbatch and add it to the parameter's in a
second pass over memory. A product that accumulates (beta 1 of a GEMM) needs neither. All weight
gradients pass `add_or_compute`, the one place that decides:

    what autograd may have to see is returned to it as always: in compiled code, for a second
        derivative, in anomaly mode, in `torch.autograd.grad`, for a parameter with hooks
    parameter.grad is a tensor   the product is added to it
    parameter.grad is None       the product creates it, in `parameter.gradient_place`

and three states of that attribute say what a parameter allows (`set_gradient_place`):

    a tensor   where its first gradient is written: its part of a flat bucket of `ddp.py`, which is
               all-reduced as a whole, so that nothing has to be copied into it
    None       in new memory (`let_products_accumulate`)
    absent     nowhere: gradients come from autograd alone. So it is with FSDP, whose gathered
               parameters have gradients of their own, and where several modules share a parameter

Those who ask: `weight_grad`, for linear layers and experts; `mixed_precision.Cast`, whose 16-bit
gradient is added to the float32 one of the parameter in one pass (`write_grad`); and
`linear_cross_entropy`, for the head's gradient, which its forward has made.

**When.** The backward of a linear layer computes two products, dX = dY W and dW, and the previous
pipeline stage waits for only the first. A layer with a `WeightGradQueue` leaves the other one
there, to be computed when the rank would be idle (Qi et al., https://arxiv.org/abs/2401.10241).
Cheap gradients (norms, biases, embeddings) are computed at once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    plain_part,
    runs_in_backward,
    with_spec,
)

# Computes a gradient into a tensor: added to its values, or replacing them.
Write = Callable[[Tensor, bool], object]


@dataclass(frozen=True)
class DeferredWeightGrad:
    """A weight gradient that has not been computed yet."""

    weight: Tensor  # as the layer saw it: autograd passes the gradient from there to the parameter
    parameter: Tensor | None  # the parameter that the weight is the whole of, if any
    compute: Callable[[], Tensor]
    write: Write | None = None


class WeightGradQueue:
    """Where the layers of a stage leave the weight gradients of a backward that computes only input
    gradients."""

    used = True  # whether the current microbatch uses the queue

    def __init__(self) -> None:
        self._recorded: list[DeferredWeightGrad] | None = None

    @property
    def is_recording(self) -> bool:
        """Whether the current backward computes only input gradients."""
        return self._recorded is not None

    def add(self, deferred: DeferredWeightGrad) -> None:
        assert self._recorded is not None  # the layer has checked `is_recording`
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
    """A layer that can defer its weight gradients."""

    weight_grad_queue: WeightGradQueue | None = None  # None: computes them at once


def let_products_accumulate(model: nn.Module) -> None:
    """Lets products create and add to gradients of parameters, except of those that several modules
    share: autograd sums their gradients before it adds them."""
    uses = Counter(
        parameter
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    for parameter, count in uses.items():
        if count == 1:
            set_gradient_place(parameter, None)


def set_gradient_place(parameter: Tensor, place: Tensor | None) -> None:
    """Lets products write a parameter's first gradient of a step to `place`, sharded like the
    parameter; None: to new memory."""
    parameter.gradient_place = place  # type: ignore[attr-defined]


def weight_grad(
    ctx: Any, index: int, compute: Callable[[], Tensor], write: Write | None = None
) -> Tensor | None:
    """What the backward of a layer's autograd function returns for a weight.

    Args:
        ctx: of a function whose tensors are its input and then weights, and whose forward has set
            `ctx.queue` and, if there is a queue, `ctx.weights`: saved weights may be copies made by
            a recomputation, from which autograd has no path to the parameters.
        index: of the weight among these.
        compute, write: as in `DeferredWeightGrad`.
    """
    if torch.compiler.is_compiling():
        return compute()
    node = ctx.next_functions[1 + index][0]  # where autograd passes the weight's gradient
    defers = ctx.queue is not None and ctx.queue.is_recording and runs_in_backward(node)
    if defers:
        parameter = getattr(accumulator_of(node), "variable", None)
        if not has_gradient_hooks(parameter):
            ctx.queue.add(DeferredWeightGrad(ctx.weights[index], parameter, compute, write))
            return None
    with noticed():
        return add_or_compute(node, compute, write)


# What is entered around each weight gradient that is computed; see `around_weight_grads`.
_around: list[Callable[[], AbstractContextManager[object]]] = []
_NOTHING = nullcontext()  # one for all weight gradients, of which a step has hundreds


def noticed() -> AbstractContextManager[object]:
    """What encloses the computation of a weight gradient."""
    return _around[-1]() if _around else _NOTHING


@contextmanager
def around_weight_grads(enter: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Inside, each weight gradient that is not put off is computed in a context of its own, by
    which foresight tells it from what else a step computes."""
    _around.append(enter)
    try:
        yield
    finally:
        _around.pop()


def product_weight_grad(
    ctx: Any, index: int, grad: Tensor, x: Tensor, spec: Any = None
) -> Tensor | None:
    """`weight_grad` of a linear layer from the output's gradient (n, f) and the input (n, d).
    `spec`: how the weight is sharded, if the layer got it whole (`for_product`)."""
    return weight_grad(
        ctx,
        index,
        compute=lambda: with_spec(linear_weight_grad(grad, x), spec),
        write=partial(linear_weight_grad_into, grad, x),
    )


def add_or_compute(node: Any, compute: Callable[[], Tensor], write: Write | None) -> Tensor | None:
    """The gradient for a backward's next node, or None if it was added to the parameter's gradient
    directly."""
    accumulator = accumulator_of(node)
    parameter = getattr(accumulator, "variable", None)
    # `torch.autograd.grad` of other tensors does not run the accumulator: it must not change .grad.
    if write is None or not takes_products(parameter) or not runs_in_backward(accumulator):
        return compute()
    add_product(parameter, write)
    return None


def run_weight_grads(deferred: Sequence[DeferredWeightGrad]) -> None:
    """Computes deferred gradients layer by layer, each added to its parameter's before the next is
    computed. Gradients of layers that share a parameter are summed first, as in a whole
    backward."""
    by_autograd: dict[Any, list[DeferredWeightGrad]] = {}
    with torch.no_grad():
        for layer in deferred:
            if layer.write is not None and takes_products(layer.parameter):
                add_product(layer.parameter, layer.write)
            else:
                key = layer if layer.parameter is None else layer.parameter
                by_autograd.setdefault(key, []).append(layer)
        for layers in by_autograd.values():
            weights = [layer.weight for layer in layers]
            torch.autograd.backward(weights, [layer.compute() for layer in layers])


def takes_products(parameter: Any) -> bool:
    """Whether a product may add to, or create, a parameter's gradient. Autograd does if the user
    could observe it."""
    if not hasattr(parameter, "gradient_place"):
        return False
    # A second derivative needs the graph of the gradient, and anomaly mode looks for NaN in what a
    # backward returns.
    if torch.is_grad_enabled() or torch.is_anomaly_enabled():
        return False
    if parameter.grad is not None and not is_plain_gradient(parameter.grad, parameter):
        return False
    return not has_gradient_hooks(parameter)


def write_grad(grad: Tensor, place: Tensor, add: bool) -> None:
    """Writes an existing gradient, possibly of another dtype, like a product: in one pass over
    memory."""
    if add:
        place.add_(grad)
    else:
        place.copy_(grad)


def add_product(parameter: Any, write: Write) -> None:
    if parameter.grad is not None:
        write(plain_part(parameter.grad), True)
        return
    place = parameter.gradient_place
    if place is None:
        part = torch.empty_like(plain_part(parameter.detach()))
        place = as_gradient(part, parameter)
    # Its former values are those of an earlier step.
    write(plain_part(place), False)
    parameter.grad = place
