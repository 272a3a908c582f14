"""Weight gradients that are computed later than input gradients, as zero-bubble schedules ask for.

The backward of a linear layer computes two products, and only one of them is waited for by the stage before. A layer
with a `Later` hands the other one over, to be done when there is nothing better to do (Qi et al.,
https://arxiv.org/abs/2401.10241). What costs little (norms, biases, embeddings) is computed at once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from meshtrain.parallel.products import input_product, weight_product


@dataclass(frozen=True)
class Due:
    """Gradients that have not been computed: of the weights as their layer saw them."""

    weights: Sequence[Tensor]
    compute: Callable[[], Sequence[Tensor]]


class Later:
    """Where the layers of a stage leave what is due."""

    def __init__(self) -> None:
        self._open: list[Due] | None = None

    @property
    def wanted(self) -> bool:
        """Whether the backward that runs now computes input gradients only."""
        return self._open is not None

    def add(self, weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        """`weights`: those that are trained."""
        assert self._open is not None  # the layer has asked
        self._open.append(Due(weights, compute))

    @contextmanager
    def collected(self) -> Iterator[list[Due]]:
        """A backward inside leaves its weight gradients in the list."""
        due: list[Due] = []
        self._open = due
        try:
            yield due
        finally:
            self._open = None


class Deferrable:
    """What a layer is that can hand its weight gradients over.

    Attributes:
        later: where it leaves those that are not wanted yet; None: it computes them at once.
    """

    later: Later | None = None


def compute(due: Sequence[Due]) -> None:
    """Computes what is due, layer by layer, each of whose gradients is added to its parameter's before the next one is
    made; autograd leads it there from the weight as the layer saw it (a cast, a part).

    Layers that share a parameter are done in one go, which adds their gradients up as a whole backward does.
    """
    parameters = [[_parameter(weight) for weight in one.weights] for one in due]
    uses = Counter(parameter for some in parameters for parameter in some)
    layers: list[list[Due]] = [[]]
    for one, seen in zip(due, parameters, strict=True):
        if any(uses[parameter] > 1 for parameter in seen):
            layers[0].append(one)
        else:
            layers.append([one])
    for together in layers:
        weights: list[Tensor] = []
        gradients: list[Tensor] = []
        with torch.no_grad():
            for one in together:
                weights += one.weights
                gradients += one.compute()
        if weights:
            torch.autograd.backward(weights, gradients)


def _parameter(weight: Tensor) -> Tensor:
    """The one from which autograd made what a layer saw."""
    node = weight.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0]
    return weight if node is None else node.variable


def defer(model: nn.Module, later: Later) -> None:
    """The linear layers of a model, plain or tensor-parallel, leave their weight gradients to `later` when asked to."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module, later)  # type: ignore[method-assign]
        elif isinstance(module, Deferrable):
            module.later = later


def _linear(layer: nn.Linear, later: Later, x: Tensor) -> Tensor:
    y = Linear.apply(x, layer.weight, later)
    return y if layer.bias is None else y + layer.bias


class Linear(torch.autograd.Function):
    """x (..., d) times a weight (f, d) -> (..., f)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, later: Later) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved with x: a recomputation would give back a copy of it that has lost its way to the parameter.
        ctx.weight, ctx.later = weight, later  # type: ignore[attr-defined]
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        weight, later = ctx.weight, ctx.later  # type: ignore[attr-defined]
        needs_dx, needed, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
        dx = input_product(grad, weight) if needs_dx else None
        if not needed:
            return dx, None, None
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        if later.wanted:
            later.add([weight], lambda: [weight_product(rows, inputs)])
            return dx, None, None
        return dx, weight_product(rows, inputs), None
