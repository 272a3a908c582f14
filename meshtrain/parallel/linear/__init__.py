"""Linear layers that compute with the products of `matmul.py`."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.parallel.linear.matmul import PLAIN, PRODUCTS, Products
from meshtrain.parallel.linear.shared_input import SharedInput, split_outputs
from meshtrain.parallel.linear.weight_grad import (
    SupportsDeferral,
    WeightGradQueue,
    product_weight_grad,
)
from meshtrain.parallel.torch_private import device_type_of, is_traced


class ProductsLayer(SupportsDeferral):
    """A linear layer, plain or tensor-parallel, that computes with a record of products."""

    products: str = PLAIN.name


class Linear(ProductsLayer, nn.Linear):
    """The plain linear layer."""

    shared_input: SharedInput | None = None  # with layers that read the same input

    def forward(self, input: Tensor) -> Tensor:  # named as in torch
        if self.shared_input is not None:
            return self.shared_input.output(self, input)
        return self._output(input)

    @staticmethod
    def outputs(layers: Sequence["Linear"], x: Tensor, weight: Tensor | None) -> list[Tensor]:
        """The outputs of layers with the same input x. `weight`: their concatenated weights, if
        they are merged."""
        if weight is None:
            return [layer._output(x) for layer in layers]
        products = split_outputs(F.linear(x, weight), [layer.out_features for layer in layers])
        return [
            y if layer.bias is None else y + layer.bias
            for layer, y in zip(layers, products, strict=True)
        ]

    def _output(self, input: Tensor) -> Tensor:
        queue = self.weight_grad_queue
        # Autocast, too, needs torch's own layer: it does not apply to our backward.
        torchs = is_traced() or torch.is_autocast_enabled(device_type_of(input))
        # torch's own is faster
        faster = queue is not None and not queue.used and device_type_of(input) == "cpu"
        if self.products == PLAIN.name and (torchs or faster):
            return F.linear(input, self.weight, self.bias)
        return LinearMatmul.apply(input, self.weight, self.bias, self.products, queue)


def use_products(
    model: nn.Module, products: Products = PLAIN, queue: WeightGradQueue | None = None
) -> None:
    """Makes a model's linear layers, plain or tensor-parallel, compute with `products`. While
    `queue` records, they and experts leave their weight gradients in it; None: keeps the queue set
    before."""
    for module in model.modules():
        # Not if hooks compute the weight from other parameters (pruning, weight norm): a backward
        # frees that graph.
        if type(module) is nn.Linear and "weight" in module._parameters:
            # still the same module object for references, copies and pickles
            module.__class__ = Linear
        if isinstance(module, ProductsLayer):
            module.products = products.name
        if isinstance(module, SupportsDeferral) and queue is not None:
            module.weight_grad_queue = queue


class LinearMatmul(torch.autograd.Function):
    """x (..., d) times a weight (f, d), plus a bias (f) if there is one -> (..., f)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: str,
        queue: WeightGradQueue | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue, ctx.weights, ctx.products = (
            queue,
            (weight,) if queue is not None else (),
            PRODUCTS[products],
        )
        y = ctx.products.forward(x, weight)
        return y if bias is None else y + bias  # not in place: selective recomputation holds y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        # once, because it may need a copy
        grads, dx, dw = (
            grad.reshape(-1, grad.shape[-1]),
            None,
            None,
        )
        if needs_dx:
            dx = ctx.products.input_grad_sum([grads], [weight]).view(x.shape)
        if needs_dw:
            # A queue must not keep the graph of x alive, but a second derivative needs it.
            inputs = (x if torch.is_grad_enabled() else x.detach()).reshape(-1, x.shape[-1])
            dw = product_weight_grad(ctx, 0, grads, inputs)
        return dx, dw, grads.sum(0) if needs_db else None, None, None
