"""The three matrix products of expert layers, in which each row is multiplied by the matrix of its
own expert.

    y_r = x_r W_e^T,    dx_r = dy_r W_e,    dW_e = sum over rows r of expert e: dy_r^T x_r

Rows (n, in) are sorted by expert, and `counts` (E,) int64 has the number of rows of each. Rows
beyond the sum of `counts` belong to no expert, like the slots of padding: their results are zeros.
So shapes never depend on values, and everything works on the meta device.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshtrain.parallel.collectives import operator
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, weight_grad
from meshtrain.parallel.torch_private import device_type_of


def _product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """(n, in) and (E, out, in) -> (n, out)."""
    return _rows_times(x, weight.transpose(1, 2), counts)


def _input_grad(grad: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The gradient of x (n, in) from that of the output (n, out)."""
    return _rows_times(grad, weight, counts)


def _weight_grad(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """The gradient of the weight (E, out, in): zeros for an expert without rows."""
    if _has_kernel(grad, x):
        return F.grouped_mm(grad.t(), x, offs=_ends(counts))
    # One product for each expert: the host has to know the counts.
    output = grad.new_empty(len(counts), grad.shape[1], x.shape[1])
    start = 0
    for matrix, count in zip(output, counts.tolist(), strict=True):
        rows = slice(start, start + count)
        torch.mm(grad[rows].t(), x[rows], out=matrix)
        start += count
    return output


def _rows_times(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Rows (n, in) times the matrix of each row's expert (E, in, out) -> (n, out)."""
    if _has_kernel(x, matrices):
        # The kernel reads the counts on the device, so the host does not wait.
        y = F.grouped_mm(x, matrices, offs=_ends(counts))
        # The kernel leaves rows beyond the counts uninitialized.
        of_no_expert = torch.arange(len(x), device=x.device) >= counts.sum()
        return y.masked_fill_(of_no_expert[:, None], 0)
    y = x.new_empty(len(x), matrices.shape[2])
    start = 0
    for matrix, count in zip(matrices, counts.tolist(), strict=True):
        rows = slice(start, start + count)
        torch.mm(x[rows], matrix, out=y[rows])
        start += count
    y[start:].zero_()
    return y


def _has_kernel(*tensors: Tensor) -> bool:
    """Whether torch's kernel accepts the tensors: bfloat16 on GPUs, and rows of a multiple of 16
    bytes."""
    return all(
        device_type_of(t) == "cuda"
        and t.dtype == torch.bfloat16
        and t.shape[-1] % 8 == 0
        and t.shape[-2] > 0
        for t in tensors
    )


def _ends(counts: Tensor) -> Tensor:
    """Where the rows of each expert end, as the kernel takes it."""
    return counts.cumsum(0).to(torch.int32)


def _product_shape(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _input_grad_shape(grad: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[2])


def _weight_grad_shape(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return grad.new_empty(counts.shape[0], grad.shape[1], x.shape[1])


operator("grouped", _product, _product_shape)
operator("grouped_input_grad", _input_grad, _input_grad_shape)
operator("grouped_weight_grad", _weight_grad, _weight_grad_shape)
ops = torch.ops.meshtrain


@register_flop_formula([ops.grouped, ops.grouped_input_grad])
def _rows_flops(rows: torch.Size, weight: torch.Size, *unused: Any, **named: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(ops.grouped_weight_grad)
def _weight_flops(grad: torch.Size, x: torch.Size, *unused: Any, **named: Any) -> int:
    return 2 * grad[0] * grad[1] * x[1]


class GroupedMatmul(torch.autograd.Function):
    """x (n, in) times the matrix of each row's expert in `weight` (E, out, in) -> (n, out).
    `transposed`: the weight is (E, in, out), and so is its gradient, in this order in memory too:
    optimizers go over both alike."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        queue: WeightGradQueue | None,
        transposed: bool = False,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        ctx.queue = queue
        ctx.weights = () if queue is None else (weight,)
        ctx.transposed = transposed
        product = ops.grouped_input_grad if transposed else ops.grouped
        return product(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, counts = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        grad = grad.contiguous()
        dx = dw = None
        if needs_dx:
            product = ops.grouped if ctx.transposed else ops.grouped_input_grad
            dx = product(grad, weight, counts)
        if needs_dw:
            inputs = x.detach()  # a queue must not keep the graph of x alive
            factors = (inputs, grad) if ctx.transposed else (grad, inputs)
            dw = weight_grad(ctx, 0, lambda: ops.grouped_weight_grad(*factors, counts))
        return dx, dw, None, None, None


class GatherRows(torch.autograd.Function):
    """x (n, d) -> (n·j, d): row i is the row of the token with slot `order[i]`; `inverse` is the
    inverse permutation. With j = `slots` = 1 the result is x[order]. The gradient of a token is
    summed over its slots in slot order, not in order of arrival: bitwise the same each time, also
    on GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.tokens, ctx.slots = len(x), slots
        row = order if slots == 1 else order // slots
        return x[row]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        [inverse] = ctx.saved_tensors
        dx = grad[inverse]  # (n·j, d), the slots of a token adjacent
        if ctx.slots > 1:
            dx = dx.view(ctx.tokens, ctx.slots, grad.shape[1]).sum(1)
        return dx, None, None, None
