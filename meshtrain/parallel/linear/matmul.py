"""The three products of a linear layer, for x (n, d), W (f, d), y (n, f):

    y = x W^T          forward
    dx = dy W          input gradient
    dW = dy^T x        weight gradient

Linear layers, plain or split, compute with a record of these (`use_products`): another precision is
one more record.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshtrain.parallel.torch_private import device_type_of

# elementwise, over the ranks that split a product's summed dim
Maximum = Callable[[Tensor], Tensor]


def linear_forward(x: Tensor, weight: Tensor, maximum: Maximum | None = None) -> Tensor:
    """(..., d) and (f, d) -> (..., f). `maximum`: for products with scales; None: this rank has all
    of d."""
    return x @ weight.t()


def linear_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x (..., d) from that of the output (..., f)."""
    return grad @ weight


def linear_input_grad_sum(
    grads: Sequence[Tensor], weights: Sequence[Tensor], maximum: Maximum | None = None
) -> Tensor:
    """dx = sum_i dy_i W_i: the gradient of the input (n, d) of several layers, from their outputs'
    (n, f_i). `maximum`: as above, for f."""
    dx = linear_input_grad(grads[0], weights[0])
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        if dx.dtype == grad.dtype:
            dx.addmm_(grad, weight)
        else:
            dx.add_(linear_input_grad(grad, weight))
    return dx


def linear_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight (f, d) from that of the output (n, f) and the input (n, d)."""
    return grad.t() @ x


def linear_weight_grad_into(grad: Tensor, x: Tensor, into: Tensor, add: bool = True) -> None:
    """`linear_weight_grad` into a tensor (f, d), possibly of a wider dtype: added to its values, or
    replacing them."""
    beta = 1 if add else 0
    if grad.dtype == x.dtype == into.dtype:
        into.addmm_(grad.t(), x, beta=beta)
    elif widens(grad, x, into):
        torch.addmm(into, grad.t(), x, out_dtype=into.dtype, beta=beta, out=into)
    elif add:
        into.add_(grad.t() @ x)
    else:
        into.copy_(grad.t() @ x)


def widens(grad: Tensor, x: Tensor, into: Tensor) -> bool:
    """Whether torch's product of 16-bit numbers can output its float32 sums unrounded: on NVIDIA
    GPUs."""
    narrow = grad.dtype == x.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return (
        narrow
        and into.dtype == torch.float32
        and device_type_of(into) == "cuda"
        and not torch.version.hip
    )


@dataclass(frozen=True)
class Products:
    """The products with which linear layers compute outputs and input gradients: the functions
    above, or others. Weight gradients are always computed in the dtype of the layer."""

    name: str  # passed to operators, which look up the record in PRODUCTS
    forward: Callable[..., Tensor]
    input_grad_sum: Callable[..., Tensor]


PLAIN = Products("plain", linear_forward, linear_input_grad_sum)
PRODUCTS = {PLAIN.name: PLAIN}
