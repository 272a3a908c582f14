"""Column- and row-parallel matrix products with their communication, as operators.

Everything is two-dimensional here: x is (n, d), a row per token. With sequence parallelism a rank
has (n/t, d), and tokens are ordered by sequence position first, so that the parts of the ranks are
contiguous in memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshtrain.parallel.collectives import AsyncResult, AxisGroup, axis_group_by_name, operator
from meshtrain.parallel.linear.matmul import PLAIN, PRODUCTS, linear_weight_grad
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, product_weight_grad
from meshtrain.parallel.torch_private import hidden_from_dispatch_modes

Tensors = Sequence[Tensor]
Flags = Sequence[bool]


def flatten_tokens(x: Tensor, sequence_first: bool) -> Tensor:
    """(..., s, d) -> (n, d), a row per token; with `sequence_first`, to gather it, the sequence dim
    varies slowest."""
    return (x.movedim(-2, 0) if sequence_first else x).reshape(-1, x.shape[-1])


def unflatten_tokens(rows: Tensor, shape: Sequence[int], sequence_first: bool) -> Tensor:
    """The inverse of `flatten_tokens`: (n, f) -> (..., s, f), where `shape` is (..., s, any)."""
    *batch, s, _ = shape
    if not sequence_first:
        return rows.view(*batch, s, rows.shape[-1])
    return rows.view(s, *batch, rows.shape[-1]).movedim(0, -2)


def _columns(
    x: Tensor, weights: Tensors, group: str, sequence: bool, keep: bool, products: str
) -> list[Tensor]:
    """Products of one input, with `sequence` gathered first (and returned, with `keep`):
    [gathered,] y1, y2, ..."""
    forward = PRODUCTS[products].forward
    if not sequence:
        return [forward(x, weight) for weight in weights]
    axis = axis_group_by_name(group)
    if _are_fused(axis, sequence, products):
        gathered, ys = axis.gather_matmul(x, [weight.t() for weight in weights], keep)
    else:
        gathered = axis.start_all_gather(x.contiguous()).wait()
        ys = [forward(gathered, weight) for weight in weights]
    return [gathered, *ys] if keep else list(ys)


def _columns_shapes(
    x: Tensor, weights: Tensors, group: str, sequence: bool, keep: bool, products: str
) -> list[Tensor]:
    n = x.shape[0] * _parts(group, sequence)
    ys = [x.new_empty(n, weight.shape[0]) for weight in weights]
    return [x.new_empty(n, x.shape[1]), *ys] if sequence and keep else ys


def _columns_backward(
    grads: Tensors,
    x: Tensor,
    weights: Tensors,
    group: str,
    sequence: bool,
    keep: bool,
    products: str,
    needs_dw: Flags,
) -> list[Tensor]:
    """The gradients of the input and of each trainable weight; the input's is summed over the ranks
    while the weights' are computed. Without `keep`, x is this rank's part of the input, which is
    gathered again in the meantime."""
    gather = sequence and not keep and any(needs_dw)
    dx, whole = _start_columns_input(
        grads, x, weights, group, sequence, gather, products, any(needs_dw)
    )
    inputs = x if whole is None else whole.wait()
    dws = [
        linear_weight_grad(grad, inputs) for grad, need in zip(grads, needs_dw, strict=True) if need
    ]
    return [dx.wait(), *dws]


def _columns_backward_shapes(
    grads: Tensors,
    x: Tensor,
    weights: Tensors,
    group: str,
    sequence: bool,
    keep: bool,
    products: str,
    needs_dw: Flags,
) -> list[Tensor]:
    n = grads[0].shape[0] // _parts(group, sequence)
    trained = (weight for weight, need in zip(weights, needs_dw, strict=True) if need)
    return [x.new_empty(n, x.shape[1]), *(torch.empty_like(weight) for weight in trained)]


def _start_columns_input(
    grads: Tensors,
    x: Tensor,
    weights: Tensors,
    group: str,
    sequence: bool,
    gather: bool,
    products: str,
    hidden: bool,
) -> tuple[AsyncResult, AsyncResult | None]:
    """Starts the sum of the input's gradient, and before that, with `gather`, the all-gather of the
    input. `hidden`: weight gradients are computed in the meantime; otherwise one kernel may compute
    the product and its sum."""
    axis = axis_group_by_name(group)
    whole = axis.start_all_gather(x.contiguous()) if gather else None
    if not hidden and _are_fused(axis, sequence, products):
        whole_of = torch.cat if len(grads) > 1 else lambda parts, dim: parts[0]
        dx = axis.matmul_scatter(whole_of(list(grads), 1), whole_of(list(weights), 0))
        return AsyncResult(axis, [], lambda: dx), whole
    return _start_sum(
        axis, PRODUCTS[products].input_grad_sum(grads, weights, axis.maximum), sequence
    ), whole


def _row(x: Tensor, weight: Tensor, group: str, sequence: bool, products: str) -> Tensor:
    """The product, summed over ranks: the whole (n, d), or with `sequence` this rank's part (n/t,
    d)."""
    axis = axis_group_by_name(group)
    if _are_fused(axis, sequence, products):
        return axis.matmul_scatter(x, weight.t())
    return _start_sum(axis, PRODUCTS[products].forward(x, weight, axis.maximum), sequence).wait()


def _row_shapes(x: Tensor, weight: Tensor, group: str, sequence: bool, products: str) -> Tensor:
    return x.new_empty(x.shape[0] // _parts(group, sequence), weight.shape[0])


def _row_input(
    grad: Tensor, weight: Tensor, group: str, sequence: bool, products: str
) -> list[Tensor]:
    """The gradient of the input, and the gathered `grad`, if it had to be gathered."""
    input_grad_sum = PRODUCTS[products].input_grad_sum
    if not sequence:
        return [input_grad_sum([grad], [weight])]
    axis = axis_group_by_name(group)
    if _are_fused(axis, sequence, products):
        gathered, (dx,) = axis.gather_matmul(grad, [weight], True)
        return [dx, gathered]
    whole = axis.start_all_gather(grad.contiguous()).wait()
    return [input_grad_sum([whole], [weight]), whole]


def _row_input_shapes(
    grad: Tensor, weight: Tensor, group: str, sequence: bool, products: str
) -> list[Tensor]:
    n = grad.shape[0] * _parts(group, sequence)
    dx = grad.new_empty(n, weight.shape[1])
    return [dx, grad.new_empty(n, grad.shape[1])] if sequence else [dx]


def _start_sum(axis: AxisGroup, addends: Tensor, sequence: bool) -> AsyncResult:
    """Sums `addends`, whose memory has no other use, over the ranks."""
    return (
        axis.start_reduce_scatter(addends)
        if sequence
        else axis.start_all_reduce(addends, overwrite=True)
    )


def _are_fused(axis: AxisGroup, sequence: bool, products: str) -> bool:
    return axis.fused and sequence and products == PLAIN.name


def _parts(group: str, sequence: bool) -> int:
    return axis_group_by_name(group).size if sequence else 1


operator("columns", _columns, _columns_shapes)
operator("columns_backward", _columns_backward, _columns_backward_shapes)
operator("row", _row, _row_shapes)
operator("row_input", _row_input, _row_input_shapes)
ops = torch.ops.meshtrain


class ColumnParallelMatmul(torch.autograd.Function):
    """x (n, d), or (n/t, d) with `sequence`, times several weights (f_i/t, d) -> each (n,
    f_i/t)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """`inputs`: x, axis, sequence, keep, products, queue, and the weights. A variadic
        parameter, because without gradients the compiler omits `ctx` if the number of arguments
        equals the number of parameters."""
        x, axis, sequence, keep, products, queue, *weights = inputs
        ys = ops.columns(x, weights, axis.name, sequence, keep, products)
        saved = x
        if sequence and keep:
            saved, *ys = ys
        ctx.save_for_backward(saved, *weights)
        ctx.settings = axis.name, sequence, keep, products
        ctx.queue, ctx.weights = queue, weights if queue is not None else []
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_dw = list(ctx.needs_input_grad[6:])
        nothing = None, None, None, None, None
        if torch.compiler.is_compiling():
            dx, *dws = ops.columns_backward(grads, x, weights, *ctx.settings, needs_dw)
            computed = iter(dws)  # torch 2.11 traces the list as a tuple
            return dx, *nothing, *(next(computed) if need else None for need in needs_dw)
        group, sequence, keep, products = ctx.settings
        gather = sequence and not keep and any(needs_dw)
        hidden = any(needs_dw) and not (ctx.queue is not None and ctx.queue.is_recording)
        with (
            hidden_from_dispatch_modes()
        ):  # hides communication, which elsewhere is inside operators
            dx, whole = _start_columns_input(
                grads, x, weights, group, sequence, gather, products, hidden
            )
            inputs = (
                x if whole is None else whole.wait()
            ).detach()  # a queue must not keep the graph of x alive
        dws = [
            product_weight_grad(ctx, i, grad, inputs) if needs_dw[i] else None
            for i, grad in enumerate(grads)
        ]
        with hidden_from_dispatch_modes():
            return dx.wait(), *nothing, *dws


class RowParallelMatmul(torch.autograd.Function):
    """x (..., s, f/t) times a weight (d, f/t), summed over the ranks -> (n, d), or (n/t, d) with
    `sequence`. Saves the original x: reordering its rows again in backward is cheaper than keeping
    both in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        axis: AxisGroup,
        sequence: bool,
        products: str,
        queue: WeightGradQueue | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = axis.name, sequence, products
        ctx.queue, ctx.weights = queue, (weight,) if queue is not None else ()
        return ops.row(flatten_tokens(x, sequence), weight, axis.name, sequence, products)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, *gathered = ops.row_input(grad, weight, *ctx.settings)
        sequence, dw = ctx.settings[1], None
        if ctx.needs_input_grad[1]:
            inputs = flatten_tokens(x.detach(), sequence)
            dw = product_weight_grad(ctx, 0, gathered[0] if gathered else grad, inputs)
        return unflatten_tokens(dx, x.shape, sequence), dw, None, None, None, None
