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
        if self.products == PLAIN.name and self._takes_torchs(input):
            return F.linear(input, self.weight, self.bias)
        products, queue = self.products, self.weight_grad_queue
        return LinearMatmul.apply(input, self.weight, self.bias, products, queue)

    def _takes_torchs(self, input: Tensor) -> bool:
        # The compiler and torch.func know torch's own layer.
        if is_traced():
            return True
        # Autocast does not apply to our backward.
        device = device_type_of(input)
        if torch.is_autocast_enabled(device):
            return True
        # On CPUs torch's own is faster, where no weight gradient is to be deferred.
        queue = self.weight_grad_queue
        return queue is not None and not queue.used and device == "cpu"


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
        if hasattr(module, "weight_grad_queue") and queue is not None:
            module.weight_grad_queue = queue  # type: ignore[assignment]


class LinearMatmul(torch.autograd.Function):
    """y = x W^T + b, for x (..., d), W (f, d) and b (f) or None -> (..., f).

    Backward: dx = dy W, dW = dy^T x and db = sum dy over the tokens."""

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
        ctx.products = PRODUCTS[products]
        ctx.queue = queue
        ctx.weights = () if queue is None else (weight,)
        y = ctx.products.forward(x, weight)
        return y if bias is None else y + bias  # not in place: selective recomputation holds y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        grads = grad.reshape(-1, grad.shape[-1])  # once, because it may need a copy
        dx = dw = db = None
        if needs_dx:
            dx = ctx.products.input_grad_sum([grads], [weight]).view(x.shape)
        if needs_dw:
            # A queue must not keep the graph of x alive, but a second derivative needs it.
            inputs = x if torch.is_grad_enabled() else x.detach()
            dw = product_weight_grad(ctx, 0, grads, inputs.reshape(-1, x.shape[-1]))
        if needs_db:
            db = grads.sum(0)
        return dx, dw, db, None, None
