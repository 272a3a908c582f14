"""The matrix products of column- and row-parallel layers with the communication between them, as operators.

Everything is two-dimensional here: x is (n, d), a row per token. With sequence sharding a rank has (n/t, d), and tokens
are in the order of the sequence first, so that the parts of the ranks lie one behind the other in memory.

A layer's forward, its input gradient and its weight gradient are three functions at the top: whoever computes them in
other numbers changes these.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from meshtrain.parallel.collectives import Channel, named, operator

if TYPE_CHECKING:
    from meshtrain.parallel.later import Later


def forward_product(x: Tensor, weight: Tensor) -> Tensor:
    """(n, d) and (f, d) -> (n, f)."""
    return x @ weight.t()


def input_product(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x (n, d) from that of the output (n, f)."""
    return grad @ weight


def weight_product(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight (f, d) from that of the output (n, f)."""
    return grad.t() @ x


def to_rows(x: Tensor, sequence_first: bool) -> Tensor:
    """(..., s, d) -> (n, d), a row per token; the sequence varies slowest where it is what is gathered."""
    return (x.movedim(-2, 0) if sequence_first else x).reshape(-1, x.shape[-1])


def from_rows(rows: Tensor, shape: Sequence[int], sequence_first: bool) -> Tensor:
    """The way back: (n, f) -> (..., s, f), where `shape` is (..., s, any)."""
    *batch, s, _ = shape
    if not sequence_first:
        return rows.view(*batch, s, rows.shape[-1])
    return rows.view(s, *batch, rows.shape[-1]).movedim(0, -2)


def _columns(x: Tensor, weights: Sequence[Tensor], channel: str, sequence: bool, keep: bool) -> list[Tensor]:
    """Products of one input with several weights. With `sequence` the input is gathered first, and given back if
    it is to be kept for the backward: [gathered,] y1, y2, ..."""
    if not sequence:
        return [forward_product(x, weight) for weight in weights]
    over = named(channel)
    if over.fused:
        gathered, ys = torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), [weight.t() for weight in weights], 0, channel, return_A=keep
        )
        return [gathered, *ys] if keep else list(ys)
    gathered = over.start_all_gather(x.contiguous()).wait()
    ys = [forward_product(gathered, weight) for weight in weights]
    return [gathered, *ys] if keep else ys


def _columns_shapes(x: Tensor, weights: Sequence[Tensor], channel: str, sequence: bool, keep: bool) -> list[Tensor]:
    n = x.shape[0] * (named(channel).size if sequence else 1)
    ys = [x.new_empty(n, weight.shape[0]) for weight in weights]
    return [x.new_empty(n, x.shape[1]), *ys] if sequence and keep else ys


def _columns_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    channel: str,
    sequence: bool,
    kept: bool,
    needed: Sequence[bool],
) -> list[Tensor]:
    """The gradients of the input and of each weight that is trained; the input's is summed over the ranks while the
    weights' are computed. Without `kept` x is this rank's part of the input, which is gathered again meanwhile."""
    over = named(channel)
    again = over.start_all_gather(x.contiguous()) if sequence and not kept and any(needed) else None
    dx = _sum_of_products(grads, weights)
    summed = over.start_reduce_scatter(dx) if sequence else over.start_all_reduce(dx)
    whole = x if again is None else again.wait()
    products = [weight_product(grad, whole) for grad, need in zip(grads, needed, strict=True) if need]
    return [summed.wait(), *products]


def _columns_backward_shapes(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    channel: str,
    sequence: bool,
    kept: bool,
    needed: Sequence[bool],
) -> list[Tensor]:
    n = grads[0].shape[0] // (named(channel).size if sequence else 1)
    trained = (weight for weight, need in zip(weights, needed, strict=True) if need)
    return [x.new_empty(n, x.shape[1]), *(torch.empty_like(weight) for weight in trained)]


def _columns_input(
    grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], channel: str, sequence: bool, kept: bool
) -> list[Tensor]:
    """The gradient of the input alone; and the whole input, if that had to be gathered again for the weights' ones."""
    over = named(channel)
    again = over.start_all_gather(x.contiguous()) if sequence and not kept else None
    dx = _sum_of_products(grads, weights)
    summed = over.start_reduce_scatter(dx) if sequence else over.start_all_reduce(dx)
    return [summed.wait()] if again is None else [summed.wait(), again.wait()]


def _columns_input_shapes(
    grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], channel: str, sequence: bool, kept: bool
) -> list[Tensor]:
    n = grads[0].shape[0]
    dx = x.new_empty(n // (named(channel).size if sequence else 1), x.shape[1])
    return [dx, x.new_empty(n, x.shape[1])] if sequence and not kept else [dx]


def _sum_of_products(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    dx = input_product(grads[0], weights[0])
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        dx.addmm_(grad, weight) if dx.dtype == grad.dtype else dx.add_(input_product(grad, weight))
    return dx


def _row(x: Tensor, weight: Tensor, channel: str, sequence: bool) -> Tensor:
    """The product of all ranks' parts, summed: the whole (n, d), or with `sequence` this rank's part (n/t, d)."""
    over = named(channel)
    if sequence and over.fused:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), weight.t(), "sum", 0, channel)
    y = forward_product(x, weight)
    return (over.start_reduce_scatter(y) if sequence else over.start_all_reduce(y)).wait()


def _row_shapes(x: Tensor, weight: Tensor, channel: str, sequence: bool) -> Tensor:
    return x.new_empty(x.shape[0] // (named(channel).size if sequence else 1), weight.shape[0])


def _row_backward(grad: Tensor, x: Tensor, weight: Tensor, channel: str, sequence: bool) -> list[Tensor]:
    """The gradients of the input and the weight."""
    whole = named(channel).start_all_gather(grad.contiguous()).wait() if sequence else grad
    return [input_product(whole, weight), weight_product(whole, x)]


def _row_input(grad: Tensor, weight: Tensor, channel: str, sequence: bool) -> list[Tensor]:
    """The gradient of the input alone; and the whole of `grad`, if it had to be gathered."""
    if not sequence:
        return [input_product(grad, weight)]
    whole = named(channel).start_all_gather(grad.contiguous()).wait()
    return [input_product(whole, weight), whole]


def _row_input_shapes(grad: Tensor, weight: Tensor, channel: str, sequence: bool) -> list[Tensor]:
    n = grad.shape[0] * (named(channel).size if sequence else 1)
    dx = grad.new_empty(n, weight.shape[1])
    return [dx, grad.new_empty(n, grad.shape[1])] if sequence else [dx]


def _row_backward_shapes(grad: Tensor, x: Tensor, weight: Tensor, channel: str, sequence: bool) -> list[Tensor]:
    return [x.new_empty(x.shape), torch.empty_like(weight)]


operator(
    "columns(Tensor x, Tensor[] weights, str channel, bool sequence, bool keep) -> Tensor[]", _columns, _columns_shapes
)
operator(
    "columns_backward(Tensor[] grads, Tensor x, Tensor[] weights, str channel, bool sequence, bool kept, "
    "bool[] needed) -> Tensor[]",
    _columns_backward,
    _columns_backward_shapes,
)
operator(
    "columns_input(Tensor[] grads, Tensor x, Tensor[] weights, str channel, bool sequence, bool kept) -> Tensor[]",
    _columns_input,
    _columns_input_shapes,
)
operator("row(Tensor x, Tensor weight, str channel, bool sequence) -> Tensor", _row, _row_shapes)
operator(
    "row_backward(Tensor grad, Tensor x, Tensor weight, str channel, bool sequence) -> Tensor[]",
    _row_backward,
    _row_backward_shapes,
)
operator("row_input(Tensor grad, Tensor weight, str channel, bool sequence) -> Tensor[]", _row_input, _row_input_shapes)
ops = torch.ops.meshtrain


class Columns(torch.autograd.Function):
    """x (n, d), or (n/t, d) with `sequence`, times several weights (f_i/t, d) -> each (n, f_i/t)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        over: Channel,
        sequence: bool,
        keep: bool,
        later: "Later | None",
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ys = ops.columns(x, weights, over.name, sequence, keep)
        saved = x
        if sequence and keep:
            saved, *ys = ys
        ctx.save_for_backward(saved, *weights)
        ctx.how = over.name, sequence, keep  # type: ignore[attr-defined]
        # A recomputation saves copies of the weights that have lost their way to the parameters.
        ctx.later, ctx.weights = later, weights if later is not None else ()  # type: ignore[attr-defined]
        return tuple(ys)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors  # type: ignore[attr-defined]
        later, how = ctx.later, ctx.how  # type: ignore[attr-defined]
        needed = list(ctx.needs_input_grad[5:])  # type: ignore[attr-defined]
        if later is None or not later.wanted or not any(needed):
            dx, *products = ops.columns_backward(grads, x, weights, *how, needed)
            return dx, None, None, None, None, *(products.pop(0) if need else None for need in needed)
        dx, *again = ops.columns_input(grads, x, weights, *how)
        whole = (again[0] if again else x).detach()  # not what made x: that is over
        trained = [(w, grad) for w, grad, need in zip(ctx.weights, grads, needed, strict=True) if need]  # type: ignore[attr-defined]
        later.add([w for w, _ in trained], lambda: [weight_product(grad, whole) for _, grad in trained])
        return dx, None, None, None, None, *(None for _ in weights)


class Row(torch.autograd.Function):
    """x (..., s, f/t) times a weight (d, f/t), summed over the ranks -> (n, d), or (n/t, d) with `sequence`.

    It keeps x as it came: where its rows have to be copied into the order of the sequence (attention's output), the
    copy is made again in backward, which is cheaper than to hold both.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, over: Channel, sequence: bool, later: "Later | None"
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = over.name, sequence  # type: ignore[attr-defined]
        ctx.later, ctx.weight = later, weight if later is not None else None  # type: ignore[attr-defined]
        return ops.row(to_rows(x, sequence), weight, over.name, sequence)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        later, (name, sequence) = ctx.later, ctx.how  # type: ignore[attr-defined]
        needed = ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        if needed and (later is None or not later.wanted):
            dx, product = ops.row_backward(grad, to_rows(x, sequence), weight, name, sequence)
            return from_rows(dx, x.shape, sequence), product, None, None, None
        dx, *again = ops.row_input(grad, weight, name, sequence)
        if not needed:
            return from_rows(dx, x.shape, sequence), None, None, None, None
        whole, kept = again[0] if again else grad, x.detach()
        later.add([ctx.weight], lambda: [weight_product(whole, to_rows(kept, sequence))])  # type: ignore[attr-defined]
        return from_rows(dx, x.shape, sequence), None, None, None, None
