"""Column- and row-parallel matrix products with the communication between them, as operators.

Everything is two-dimensional here: x is (n, d), a row per token. With sequence parallelism a rank has (n/t, d), and
tokens are in the order of the sequence first, so that the parts of the ranks lie one behind the other in memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshtrain.parallel.collectives import AsyncResult, AxisGroup, axis_group_by_name, operator
from meshtrain.parallel.matmul import linear_forward, linear_input_grad, linear_input_grad_sum, linear_weight_grad
from meshtrain.parallel.weight_grad import WeightGradQueue

Tensors = Sequence[Tensor]


def flatten_tokens(x: Tensor, sequence_first: bool) -> Tensor:
    """(..., s, d) -> (n, d), a row per token; the sequence varies slowest where it is what is gathered."""
    return (x.movedim(-2, 0) if sequence_first else x).reshape(-1, x.shape[-1])


def unflatten_tokens(rows: Tensor, shape: Sequence[int], sequence_first: bool) -> Tensor:
    """The way back: (n, f) -> (..., s, f), where `shape` is (..., s, any)."""
    *batch, s, _ = shape
    if not sequence_first:
        return rows.view(*batch, s, rows.shape[-1])
    return rows.view(s, *batch, rows.shape[-1]).movedim(0, -2)


def _columns(x: Tensor, weights: Tensors, group: str, sequence: bool, keep: bool) -> list[Tensor]:
    """Products of one input with several weights. With `sequence` the input is gathered first, and given back if
    it is to be kept for the backward: [gathered,] y1, y2, ..."""
    if not sequence:
        return [linear_forward(x, weight) for weight in weights]
    axis = axis_group_by_name(group)
    if axis.fused:
        gathered, ys = torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), [weight.t() for weight in weights], 0, group, return_A=keep
        )
    else:
        gathered = axis.start_all_gather(x.contiguous()).wait()
        ys = [linear_forward(gathered, weight) for weight in weights]
    return [gathered, *ys] if keep else list(ys)


def _columns_shapes(x: Tensor, weights: Tensors, group: str, sequence: bool, keep: bool) -> list[Tensor]:
    n = x.shape[0] * _parts(group, sequence)
    ys = [x.new_empty(n, weight.shape[0]) for weight in weights]
    return [x.new_empty(n, x.shape[1]), *ys] if sequence and keep else ys


def _columns_backward(
    grads: Tensors, x: Tensor, weights: Tensors, group: str, sequence: bool, keep: bool, needs_dw: Sequence[bool]
) -> list[Tensor]:
    """The gradients of the input and of each weight that is trained; the input's is summed over the ranks while the
    weights' are computed. Without `keep` x is this rank's part of the input, which is gathered again meanwhile."""
    gather = sequence and not keep and any(needs_dw)
    dx, whole = _start_columns_input(grads, x, weights, group, sequence, gather)
    inputs = x if whole is None else whole.wait()
    dws = [linear_weight_grad(grad, inputs) for grad, need in zip(grads, needs_dw, strict=True) if need]
    return [dx.wait(), *dws]


def _columns_backward_shapes(
    grads: Tensors, x: Tensor, weights: Tensors, group: str, sequence: bool, keep: bool, needs_dw: Sequence[bool]
) -> list[Tensor]:
    n = grads[0].shape[0] // _parts(group, sequence)
    trained = (weight for weight, need in zip(weights, needs_dw, strict=True) if need)
    return [x.new_empty(n, x.shape[1]), *(torch.empty_like(weight) for weight in trained)]


def _columns_input(grads: Tensors, x: Tensor, weights: Tensors, group: str, sequence: bool, keep: bool) -> list[Tensor]:
    """The gradient of the input alone; and the whole input, if that had to be gathered again for the weights' ones."""
    dx, whole = _start_columns_input(grads, x, weights, group, sequence, sequence and not keep)
    return [dx.wait()] if whole is None else [dx.wait(), whole.wait()]


def _columns_input_shapes(
    grads: Tensors, x: Tensor, weights: Tensors, group: str, sequence: bool, keep: bool
) -> list[Tensor]:
    n = grads[0].shape[0]
    dx = x.new_empty(n // _parts(group, sequence), x.shape[1])
    return [dx, x.new_empty(n, x.shape[1])] if sequence and not keep else [dx]


def _start_columns_input(
    grads: Tensors, x: Tensor, weights: Tensors, group: str, sequence: bool, gather: bool
) -> tuple[AsyncResult, AsyncResult | None]:
    """Starts the sum of the input's gradient, and before that with `gather` the gathering of the input."""
    axis = axis_group_by_name(group)
    whole = axis.start_all_gather(x.contiguous()) if gather else None
    return _start_sum(axis, linear_input_grad_sum(grads, weights), sequence), whole


def _row(x: Tensor, weight: Tensor, group: str, sequence: bool) -> Tensor:
    """The product of all ranks' parts, summed: the whole (n, d), or with `sequence` this rank's part (n/t, d)."""
    axis = axis_group_by_name(group)
    if sequence and axis.fused:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), weight.t(), "sum", 0, group)
    return _start_sum(axis, linear_forward(x, weight), sequence).wait()


def _row_shapes(x: Tensor, weight: Tensor, group: str, sequence: bool) -> Tensor:
    return x.new_empty(x.shape[0] // _parts(group, sequence), weight.shape[0])


def _row_input(grad: Tensor, weight: Tensor, group: str, sequence: bool) -> list[Tensor]:
    """The gradient of the input; and the whole of `grad`, if it had to be gathered."""
    if not sequence:
        return [linear_input_grad(grad, weight)]
    whole = axis_group_by_name(group).start_all_gather(grad.contiguous()).wait()
    return [linear_input_grad(whole, weight), whole]


def _row_input_shapes(grad: Tensor, weight: Tensor, group: str, sequence: bool) -> list[Tensor]:
    n = grad.shape[0] * _parts(group, sequence)
    dx = grad.new_empty(n, weight.shape[1])
    return [dx, grad.new_empty(n, grad.shape[1])] if sequence else [dx]


def _start_sum(axis: AxisGroup, addends: Tensor, sequence: bool) -> AsyncResult:
    return axis.start_reduce_scatter(addends) if sequence else axis.start_all_reduce(addends)


def _parts(group: str, sequence: bool) -> int:
    return axis_group_by_name(group).size if sequence else 1


operator("columns", _columns, _columns_shapes)
operator("columns_backward", _columns_backward, _columns_backward_shapes)
operator("columns_input", _columns_input, _columns_input_shapes)
operator("row", _row, _row_shapes)
operator("row_input", _row_input, _row_input_shapes)
ops = torch.ops.meshtrain


class ColumnParallelMatmul(torch.autograd.Function):
    """x (n, d), or (n/t, d) with `sequence`, times several weights (f_i/t, d) -> each (n, f_i/t)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: AxisGroup,
        sequence: bool,
        keep: bool,
        queue: WeightGradQueue | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ys = ops.columns(x, weights, axis.name, sequence, keep)
        saved = x
        if sequence and keep:
            saved, *ys = ys
        ctx.save_for_backward(saved, *weights)
        ctx.settings = axis.name, sequence, keep
        # Saved tensors may be copies, made by a recomputation, from which autograd finds no way to the parameters. A
        # deferred gradient needs that way, so here are the weights themselves.
        ctx.queue, ctx.weights = queue, weights if queue is not None else ()
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        queue, settings = ctx.queue, ctx.settings
        needs_dw = list(ctx.needs_input_grad[5:])
        if queue is None or not queue.is_recording or not any(needs_dw):
            dx, *dws = ops.columns_backward(grads, x, weights, *settings, needs_dw)
            return dx, None, None, None, None, *(dws.pop(0) if need else None for need in needs_dw)
        dx, *gathered = ops.columns_input(grads, x, weights, *settings)
        whole = (gathered[0] if gathered else x).detach()  # the queue must not hold the graph that made x
        trained = [(w, grad) for w, grad, need in zip(ctx.weights, grads, needs_dw, strict=True) if need]
        queue.add([w for w, _ in trained], lambda: [linear_weight_grad(grad, whole) for _, grad in trained])
        return dx, None, None, None, None, *(None for _ in weights)


class RowParallelMatmul(torch.autograd.Function):
    """x (..., s, f/t) times a weight (d, f/t), summed over the ranks -> (n, d), or (n/t, d) with `sequence`. Keeps x as
    it came: to copy its rows into the order of the sequence again in backward is cheaper than to hold both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, axis: AxisGroup, sequence: bool, queue: WeightGradQueue | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = axis.name, sequence
        ctx.queue, ctx.weight = queue, weight if queue is not None else None
        return ops.row(flatten_tokens(x, sequence), weight, axis.name, sequence)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        queue, (group, sequence) = ctx.queue, ctx.settings
        needs_dw = ctx.needs_input_grad[1]
        dx, *gathered = ops.row_input(grad, weight, group, sequence)
        whole, dw = gathered[0] if gathered else grad, None
        if needs_dw and queue is not None and queue.is_recording:
            inputs = x.detach()
            queue.add([ctx.weight], lambda: [linear_weight_grad(whole, flatten_tokens(inputs, sequence))])
        elif needs_dw:
            dw = linear_weight_grad(whole, flatten_tokens(x, sequence))
        return unflatten_tokens(dx, x.shape, sequence), dw, None, None, None
