"""The three products of a linear layer: of its forward, of its input gradient and of its weight gradient.

Every linear layer of a split model computes by these, and so whoever computes them in other numbers changes this file.
"""

from collections.abc import Sequence

from torch import Tensor


def linear_forward(x: Tensor, weight: Tensor) -> Tensor:
    """(..., d) and (f, d) -> (..., f)."""
    return x @ weight.t()


def linear_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x (..., d) from that of the output (..., f)."""
    return grad @ weight


def linear_input_grad_sum(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of an x (n, d) that several layers read, from those of their outputs (n, f_i)."""
    dx = linear_input_grad(grads[0], weights[0])
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        dx.addmm_(grad, weight) if dx.dtype == grad.dtype else dx.add_(linear_input_grad(grad, weight))
    return dx


def linear_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight (f, d) from that of the output (n, f) and the input (n, d)."""
    return grad.t() @ x
