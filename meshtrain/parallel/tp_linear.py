"""Column- and row-parallel matrix products with their communication, as operators.

Everything is two-dimensional here: X is (n, d), a row per token. Rank i of t has a part W_i of the
weight (Shoeybi et al., https://arxiv.org/abs/1909.08053):

    column-parallel, W_i (f/t, d)               row-parallel, W_i (d, f/t)
    Y_i  = X W_i^T             (n, f/t)         Y    = sum_i X_i W_i^T     (n, d)
    dX   = sum_i dY_i W_i      (n, d)           dX_i = dY W_i              (n, f/t)
    dW_i = dY_i^T X            (f/t, d)         dW_i = dY^T X_i            (d, f/t)

The sums are all-reduces. With sequence parallelism (Korthikanti et al.,
https://arxiv.org/abs/2205.05198) a rank has only its n/t tokens of X and dX on the left, and of Y
and dY on the right: sums are reduce-scatters, and X and dY are all-gathered first. Tokens are
ordered by sequence position first, so that the parts of the ranks are contiguous in memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshtrain.parallel.collectives import AsyncResult, AxisGroup, axis_group_by_name, operator
from meshtrain.parallel.linear.matmul import PLAIN, PRODUCTS, linear_weight_grad
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, product_weight_grad
from meshtrain.parallel.torch_private import hidden_from_dispatch_modes, plain_part, spec_of

Tensors = Sequence[Tensor]
Flags = Sequence[bool]


def flatten_tokens(x: Tensor, sequence_first: bool) -> Tensor:
    """(..., s, d) -> (n, d), a row per token; with `sequence_first`, to gather it, the sequence dim
    varies slowest."""
    if sequence_first:
        x = x.movedim(-2, 0)
    return x.reshape(-1, x.shape[-1])


def unflatten_tokens(rows: Tensor, shape: Sequence[int], sequence_first: bool) -> Tensor:
    """The inverse of `flatten_tokens`: (n, f) -> (..., s, f), where `shape` is (..., s, any)."""
    *batch, s, _ = shape
    if not sequence_first:
        return rows.view(*batch, s, rows.shape[-1])
    return rows.view(s, *batch, rows.shape[-1]).movedim(0, -2)


# Column-parallel ---------------------------------------------------------------------------------


def _columns(
    x: Tensor, weights: Tensors, group: str, sequence: bool, keep: bool, products: str
) -> list[Tensor]:
    """Y_i = X W_i^T for several weights, with `sequence` after gathering X (and returning it, with
    `keep`): [X,] y1, y2, ..."""
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
    if sequence and keep:
        return [x.new_empty(n, x.shape[1]), *ys]
    return ys


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
    """[dX, dW_i of each trainable weight]. Without `keep`, x is this rank's part of the input,
    which is gathered again."""
    axis = axis_group_by_name(group)
    trains = any(needs_dw)
    whole = None
    if sequence and not keep and trains:  # under way while dX is multiplied
        whole = axis.start_all_gather(x.contiguous())
    # The sum travels while the weights' gradients are computed.
    dx = _start_input_grad(grads, weights, axis, sequence, products, fuse=not trains)
    inputs = x if whole is None else whole.wait()
    dws = [
        linear_weight_grad(grad, inputs)
        for grad, needed in zip(grads, needs_dw, strict=True)
        if needed
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
    trained = [weight for weight, needed in zip(weights, needs_dw, strict=True) if needed]
    return [x.new_empty(n, x.shape[1]), *(torch.empty_like(weight) for weight in trained)]


def _start_input_grad(
    grads: Tensors,
    weights: Tensors,
    axis: AxisGroup,
    sequence: bool,
    products: str,
    *,
    fuse: bool,
) -> AsyncResult:
    """Starts dX = sum_i dY_i W_i, over the weights and the ranks. `fuse`: nothing is computed in
    the meantime, so one kernel may compute the product and its sum."""
    if fuse and _are_fused(axis, sequence, products):
        grad, weight = grads[0], weights[0]
        if len(grads) > 1:  # a sum of products is a product of concatenated matrices
            grad, weight = torch.cat(list(grads), 1), torch.cat(list(weights), 0)
        dx = axis.matmul_scatter(grad, weight)
        return AsyncResult(axis, [], lambda: dx)
    addends = PRODUCTS[products].input_grad_sum(grads, weights, axis.maximum)
    return _start_sum(axis, addends, sequence)


# Row-parallel ------------------------------------------------------------------------------------


def _row(x: Tensor, weight: Tensor, group: str, sequence: bool, products: str) -> Tensor:
    """Y = sum_i X_i W_i^T: the whole (n, d), or with `sequence` this rank's part (n/t, d)."""
    axis = axis_group_by_name(group)
    if _are_fused(axis, sequence, products):
        return axis.matmul_scatter(x, weight.t())
    addends = PRODUCTS[products].forward(x, weight, axis.maximum)
    return _start_sum(axis, addends, sequence).wait()


def _row_shapes(x: Tensor, weight: Tensor, group: str, sequence: bool, products: str) -> Tensor:
    return x.new_empty(x.shape[0] // _parts(group, sequence), weight.shape[0])


def _row_input(
    grad: Tensor, weight: Tensor, group: str, sequence: bool, products: str
) -> list[Tensor]:
    """[dX_i = dY W_i, and dY, if it had to be gathered]."""
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
    if sequence:
        return axis.start_reduce_scatter(addends)
    return axis.start_all_reduce(addends, overwrite=True)


def _are_fused(axis: AxisGroup, sequence: bool, products: str) -> bool:
    return axis.fused and sequence and products == PLAIN.name


def _parts(group: str, sequence: bool) -> int:
    """Over how many ranks tokens are split outside of the layer."""
    return axis_group_by_name(group).size if sequence else 1


operator("columns", _columns, _columns_shapes)
operator("columns_backward", _columns_backward, _columns_backward_shapes)
operator("row", _row, _row_shapes)
operator("row_input", _row_input, _row_input_shapes)
ops = torch.ops.meshtrain


class ColumnParallelMatmul(torch.autograd.Function):
    """Y_i = X W_i^T for several weights: x (n, d), or (n/t, d) with `sequence`, and (f/t, d) each
    -> (n, f/t) each."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """`inputs`: x, axis, sequence, keep, products, queue, and the weights. A variadic
        parameter, because without gradients the compiler omits `ctx` if the number of arguments
        equals the number of parameters."""
        x, axis, sequence, keep, products, queue, *weights = inputs
        parts = [plain_part(weight) for weight in weights]
        ys = ops.columns(x, parts, axis.name, sequence, keep, products)
        saved = x
        if sequence and keep:
            saved, *ys = ys
        ctx.save_for_backward(saved, *parts)
        ctx.specs = [spec_of(weight) for weight in weights]
        ctx.group = axis.name
        ctx.sequence = sequence
        ctx.keep = keep
        ctx.products = products
        ctx.queue = queue
        ctx.weights = [] if queue is None else weights
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_dw = list(ctx.needs_input_grad[6:])
        trains = any(needs_dw)
        sequence, products = ctx.sequence, ctx.products
        nothing = None, None, None, None, None
        if torch.compiler.is_compiling():
            dx, *dws = ops.columns_backward(
                grads, x, weights, ctx.group, sequence, ctx.keep, products, needs_dw
            )
            computed = iter(dws)  # torch 2.11 traces the list as a tuple
            return dx, *nothing, *(next(computed) if need else None for need in needs_dw)

        # As the operator does, but a weight's gradient may be deferred, or added in place.
        axis = axis_group_by_name(ctx.group)
        is_deferred = ctx.queue is not None and ctx.queue.is_recording
        whole = None
        # Communication, which elsewhere is inside operators.
        with hidden_from_dispatch_modes():
            if sequence and not ctx.keep and trains:
                whole = axis.start_all_gather(x.contiguous())
            computes_in_meantime = trains and not is_deferred
            dx = _start_input_grad(
                grads, weights, axis, sequence, products, fuse=not computes_in_meantime
            )
            inputs = x if whole is None else whole.wait()
            inputs = inputs.detach()  # a queue must not keep the graph of x alive
        dws = [
            product_weight_grad(ctx, i, grad, inputs, spec) if needs_dw[i] else None
            for i, (grad, spec) in enumerate(zip(grads, ctx.specs, strict=True))
        ]
        with hidden_from_dispatch_modes():
            return dx.wait(), *nothing, *dws


class RowParallelMatmul(torch.autograd.Function):
    """Y = sum_i X_i W_i^T: x (..., s, f/t) and (d, f/t) -> (n, d), or (n/t, d) with `sequence`.

    Saves the original x: reordering its rows again in backward is cheaper than keeping both in
    memory."""

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
        part = plain_part(weight)
        ctx.save_for_backward(x, part)
        ctx.spec = spec_of(weight)
        ctx.settings = axis.name, sequence, products
        ctx.sequence = sequence
        ctx.queue = queue
        ctx.weights = () if queue is None else (weight,)
        return ops.row(flatten_tokens(x, sequence), part, axis.name, sequence, products)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, *gathered = ops.row_input(grad, weight, *ctx.settings)
        dw = None
        if ctx.needs_input_grad[1]:
            whole = gathered[0] if gathered else grad  # dY of all tokens, for both products
            inputs = flatten_tokens(x.detach(), ctx.sequence)
            dw = product_weight_grad(ctx, 0, whole, inputs, ctx.spec)
        return unflatten_tokens(dx, x.shape, ctx.sequence), dw, None, None, None, None
