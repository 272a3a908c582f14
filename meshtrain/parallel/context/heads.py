"""Parts of the sequence with all heads become parts of the heads with all of the neighbours' sequence, and back.

(Ulysses, Jacobs et al., https://arxiv.org/abs/2309.14509.) Two operators, each the other's gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshtrain.data.sequence import head_ranges
from meshtrain.parallel.collectives import AxisGroup, axis_group_by_name, differentiable, operator


def _kv_ranges(queries: int, heads: int, axis: AxisGroup) -> list[range]:
    """Which of so many heads each rank has: those that its share of the query heads looks at."""
    return [head_ranges(queries, heads, axis.size, j)[1] for j in range(axis.size)]


def _to_heads(xs: Sequence[Tensor], queries: int, group: str) -> list[Tensor]:
    """(b, heads, s, e) at this rank's positions -> (b, its heads, u s, e) at those of all u neighbours, ascending.

    `queries`: how many query heads there are. Of keys and values a rank gets the heads that its queries look at.
    """
    axis = axis_group_by_name(group)
    coming = []
    for x in xs:
        ranges, by_head = _kv_ranges(queries, x.shape[1], axis), x.transpose(0, 1)
        parts = [by_head[own.start : own.stop] for own in ranges]
        coming.append(axis.start_all_to_all(parts, [len(ranges[axis.index])] * axis.size))
    ys = []
    for x, under_way in zip(xs, coming, strict=True):
        parts = torch.stack(under_way.wait()).unflatten(3, (2, -1))  # (u, heads, b, 2, m, e)
        # Later chunks lie the other way round: the first neighbour has the last one.
        chunks = torch.cat([parts[:, :, :, 0], parts[:, :, :, 1].flip(0)])
        ys.append(chunks.permute(2, 1, 0, 3, 4).reshape(x.shape[0], -1, axis.size * x.shape[2], x.shape[3]))
    return ys


def _to_sequence(xs: Sequence[Tensor], heads: Sequence[int], queries: int, group: str) -> list[Tensor]:
    """The way back: (b, this rank's heads, u s, e) -> (b, heads, s, e) at its positions, `heads` of each x.

    Where ranks have the same head (of keys and values, and so these are gradients), it is the sum in their order.
    """
    axis = axis_group_by_name(group)
    u, coming = axis.size, []
    for x, count in zip(xs, heads, strict=True):
        chunks = x.unflatten(2, (2 * u, -1)).transpose(0, 1)  # (its heads, b, 2u, m, e)
        parts = [torch.cat([chunks[:, :, j], chunks[:, :, 2 * u - 1 - j]], 2) for j in range(u)]
        ranges = _kv_ranges(queries, count, axis)
        coming.append((ranges, axis.start_all_to_all(parts, [len(own) for own in ranges])))
    ys = []
    for (ranges, under_way), count in zip(coming, heads, strict=True):
        received = under_way.wait()
        if sum(map(len, ranges)) == count:
            y = torch.cat(received)
        else:
            wide = torch.promote_types(received[0].dtype, torch.float32)
            y = received[0].new_zeros(count, *received[0].shape[1:], dtype=wide)
            for own, part in zip(ranges, received, strict=True):
                y[own.start : own.stop] += part
        ys.append(y.permute(1, 2, 0, 3).contiguous().to(received[0].dtype).transpose(1, 2))
    return ys


def _to_heads_shapes(xs: Sequence[Tensor], queries: int, group: str) -> list[Tensor]:
    axis = axis_group_by_name(group)
    own = [len(_kv_ranges(queries, x.shape[1], axis)[axis.index]) for x in xs]
    return [x.new_empty(len(x), n, axis.size * x.shape[2], x.shape[3]) for x, n in zip(xs, own, strict=True)]


def _to_sequence_shapes(xs: Sequence[Tensor], heads: Sequence[int], queries: int, group: str) -> list[Tensor]:
    u = axis_group_by_name(group).size
    shapes = ((len(x), x.shape[2] // u, n, x.shape[3]) for x, n in zip(xs, heads, strict=True))
    return [x.new_empty(shape).transpose(1, 2) for x, shape in zip(xs, shapes, strict=True)]


def _remember_heads(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    xs, *settings = inputs
    ctx.settings = [x.shape[1] for x in xs], *settings


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.settings = inputs[2:]


operator("to_heads", _to_heads, _to_heads_shapes)
operator("to_sequence", _to_sequence, _to_sequence_shapes)
ops = torch.ops.meshtrain
differentiable("to_heads", lambda ctx, grads: (ops.to_sequence(grads, *ctx.settings), None, None), _remember_heads)
differentiable("to_sequence", lambda ctx, grads: (ops.to_heads(grads, *ctx.settings), *[None] * 3), _remember)
