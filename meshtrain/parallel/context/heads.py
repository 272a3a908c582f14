"""Exchange between parts of the sequence with all heads and parts of the heads with the neighbours'
whole sequence.

(Ulysses, Jacobs et al., https://arxiv.org/abs/2309.14509.) Two operators, each the other's
gradient. `heads`: the number of heads of each tensor over all neighbours, queries (or outputs)
first.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshtrain.data.sequence import head_ranges
from meshtrain.parallel.collectives import AxisGroup, axis_group_by_name, differentiable, operator


def _ranges(heads: Sequence[int], axis: AxisGroup) -> list[list[range]]:
    """For each tensor, the heads of each rank: those that its share of the query heads attends
    to."""
    return [
        [head_ranges(heads[0], count, axis.size, j)[1] for j in range(axis.size)] for count in heads
    ]


def _to_heads(xs: Sequence[Tensor], heads: Sequence[int], group: str) -> list[Tensor]:
    """(b, heads, s, e) at this rank's positions -> (b, its heads, u s, e) at those of all u
    neighbours, ascending."""
    axis = axis_group_by_name(group)
    coming = []
    for x, ranges in zip(xs, _ranges(heads, axis), strict=True):
        by_head = x.transpose(0, 1)
        parts = [by_head[own.start : own.stop] for own in ranges]
        coming.append(axis.start_all_to_all(parts, [len(ranges[axis.index])] * axis.size))
    ys = []
    for x, under_way in zip(xs, coming, strict=True):
        parts = torch.stack(under_way.wait()).unflatten(3, (2, -1))  # (u, heads, b, 2, m, e)
        # Second chunks are in reverse order: the first neighbour has the last one.
        chunks = torch.cat([parts[:, :, :, 0], parts[:, :, :, 1].flip(0)])
        ys.append(
            chunks.permute(2, 1, 0, 3, 4).reshape(
                x.shape[0], -1, axis.size * x.shape[2], x.shape[3]
            )
        )
    return ys


def _to_sequence(xs: Sequence[Tensor], heads: Sequence[int], group: str) -> list[Tensor]:
    """The inverse of `_to_heads`: (b, this rank's heads, u s, e) -> (b, heads, s, e) at this rank's
    positions.

    If several ranks have the same head (of keys and values, so these are gradients), it is summed
    in rank order.
    """
    axis = axis_group_by_name(group)
    u, ranges, coming = axis.size, _ranges(heads, axis), []
    for x, of_ranks in zip(xs, ranges, strict=True):
        chunks = x.unflatten(2, (2 * u, -1)).transpose(0, 1)  # (its heads, b, 2u, m, e)
        parts = [torch.cat([chunks[:, :, j], chunks[:, :, 2 * u - 1 - j]], 2) for j in range(u)]
        coming.append(axis.start_all_to_all(parts, [len(own) for own in of_ranks]))
    ys = []
    for x, count, of_ranks, under_way in zip(xs, heads, ranges, coming, strict=True):
        received = under_way.wait()
        if sum(map(len, of_ranks)) == count:
            y = torch.cat(received)
        else:
            y = x.new_zeros(
                count, *received[0].shape[1:], dtype=torch.promote_types(x.dtype, torch.float32)
            )
            for own, part in zip(of_ranks, received, strict=True):
                y[own.start : own.stop] += part
        ys.append(y.permute(1, 2, 0, 3).contiguous().to(x.dtype).transpose(1, 2))
    return ys


def _to_heads_shapes(xs: Sequence[Tensor], heads: Sequence[int], group: str) -> list[Tensor]:
    axis = axis_group_by_name(group)
    own = [len(ranges[axis.index]) for ranges in _ranges(heads, axis)]
    return [
        x.new_empty(len(x), n, axis.size * x.shape[2], x.shape[3])
        for x, n in zip(xs, own, strict=True)
    ]


def _to_sequence_shapes(xs: Sequence[Tensor], heads: Sequence[int], group: str) -> list[Tensor]:
    u = axis_group_by_name(group).size
    shapes = ((len(x), x.shape[2] // u, n, x.shape[3]) for x, n in zip(xs, heads, strict=True))
    return [x.new_empty(shape).transpose(1, 2) for x, shape in zip(xs, shapes, strict=True)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.settings = inputs[1:]


operator("to_heads", _to_heads, _to_heads_shapes)
operator("to_sequence", _to_sequence, _to_sequence_shapes)
ops = torch.ops.meshtrain
differentiable(
    "to_heads",
    lambda ctx, grads: (ops.to_sequence(grads, *ctx.settings), None, None),
    _setup_context,
)
differentiable(
    "to_sequence",
    lambda ctx, grads: (ops.to_heads(grads, *ctx.settings), None, None),
    _setup_context,
)
