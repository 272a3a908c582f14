"""The three products of a linear layer: of its forward, of its input gradient and of its weight gradient.

Linear layers, plain or split, compute by a record of these (`use_products`): other numbers are one more record.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshtrain.parallel.torch_private import device_type_of

Maximum = Callable[[Tensor], Tensor]  # of each element over the ranks that have parts of what a product sums


def linear_forward(x: Tensor, weight: Tensor, maximum: Maximum | None = None) -> Tensor:
    """(..., d) and (f, d) -> (..., f). `maximum`: for products that scale; None: this rank has all of d."""
    return x @ weight.t()


def linear_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x (..., d) from that of the output (..., f)."""
    return grad @ weight


def linear_input_grad_sum(grads: Sequence[Tensor], weights: Sequence[Tensor], maximum: Maximum | None = None) -> Tensor:
    """The gradient of an x (n, d) that several layers read, from their outputs' (n, f_i). `maximum`: as above, of f."""
    dx = linear_input_grad(grads[0], weights[0])
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        dx.addmm_(grad, weight) if dx.dtype == grad.dtype else dx.add_(linear_input_grad(grad, weight))
    return dx


def linear_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight (f, d) from that of the output (n, f) and the input (n, d)."""
    return grad.t() @ x


def linear_weight_grad_into(grad: Tensor, x: Tensor, into: Tensor, add: bool = True) -> None:
    """The same in memory (f, d) of a wider type perhaps, added to what is there or in its place."""
    if grad.dtype == x.dtype == into.dtype:
        into.addmm_(grad.t(), x, beta=int(add))
    elif widens(grad, x, into):
        torch.addmm(into, grad.t(), x, out_dtype=into.dtype, beta=int(add), out=into)
    else:
        into.add_(grad.t() @ x) if add else into.copy_(grad.t() @ x)


def widens(grad: Tensor, x: Tensor, into: Tensor) -> bool:
    """Whether torch's product of 16-bit numbers can leave its float32 sums unrounded: on NVIDIA GPUs."""
    narrow = grad.dtype == x.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return narrow and into.dtype == torch.float32 and device_type_of(into) == "cuda" and not torch.version.hip


@dataclass(frozen=True)
class Products:
    """The numbers in which linear layers multiply for outputs and input gradients: by the functions above, or others.
    Weight gradients are always computed in the type of the layer."""

    name: str  # operators are given this, and look the record up in PRODUCTS
    forward: Callable[..., Tensor]
    input_grad_sum: Callable[..., Tensor]


PLAIN = Products("plain", linear_forward, linear_input_grad_sum)
PRODUCTS = {PLAIN.name: PLAIN}
