"""Ulysses (Jacobs et al., https://arxiv.org/abs/2309.14509): neighbours on `cp` exchange parts of
the sequence, with all heads, for parts of the heads, with the neighbours' whole sequence.

    before: rank j of u has        (b, all heads, s, e)       at its s positions
    after:  rank j has             (b, its heads, u s, e)     at the positions of all u neighbours

It takes one all-to-all each way: a rank sends each head of its positions to the rank that computes
this head. The two operators are each other's inverse, and each other's gradient. `heads`: the
number of heads of each tensor over all neighbours, of queries (or outputs) first.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshtrain.data.sequence import head_ranges
from meshtrain.parallel.collectives import (
    AsyncResult,
    AxisGroup,
    axis_group_by_name,
    differentiable,
    operator,
)


def _heads_of_ranks(heads: Sequence[int], count: int, axis: AxisGroup) -> list[range]:
    """Of a tensor with `count` heads those of each rank: the ones that its share of the query heads
    attends to. With fewer key/value heads than ranks several ranks have the same one."""
    query_heads = heads[0]
    of_ranks = []
    for rank in range(axis.size):
        _, attended = head_ranges(query_heads, count, axis.size, rank)
        of_ranks.append(attended)
    return of_ranks


def _to_heads(xs: Sequence[Tensor], heads: Sequence[int], group: str) -> list[Tensor]:
    """Each x (b, heads, s, e) at this rank's positions -> (b, its heads, u s, e) at those of all u
    neighbours, ascending."""
    axis = axis_group_by_name(group)
    # All are under way before the first one is waited for.
    coming = []
    for x, count in zip(xs, heads, strict=True):
        of_ranks = _heads_of_ranks(heads, count, axis)
        coming.append(_send_heads(x, of_ranks, axis))
    return [_join_chunks(result) for result in coming]


def _send_heads(x: Tensor, of_ranks: Sequence[range], axis: AxisGroup) -> AsyncResult:
    """Sends each neighbour its heads of x (b, heads, s, e); this rank's come from all of them."""
    by_head = x.transpose(0, 1)  # (heads, b, s, e): the dim that is split comes first
    parts = []
    for its_heads in of_ranks:
        parts.append(by_head[its_heads.start : its_heads.stop])
    own_heads = len(of_ranks[axis.index])
    return axis.start_all_to_all(parts, [own_heads] * axis.size)


def _join_chunks(coming: AsyncResult) -> Tensor:
    """What the neighbours have sent, in the order of positions.

    Of the 2u chunks, of m = s / 2 positions each, neighbour r has chunks r and 2u - 1 - r. So the
    first halves of neighbours 0, 1, ..., u - 1 are chunks 0 to u - 1, and their second halves, read
    from the last neighbour to the first, are chunks u to 2u - 1.
    """
    parts = torch.stack(coming.wait())  # (u, its heads, b, s, e), by the rank that sent them
    halves = parts.unflatten(3, (2, -1))  # (u, its heads, b, 2, m, e)
    first_halves = halves[:, :, :, 0]
    second_halves = halves[:, :, :, 1]
    chunks = torch.cat([first_halves, second_halves.flip(0)])  # (2u, its heads, b, m, e)
    by_position = chunks.permute(2, 1, 0, 3, 4)  # (b, its heads, 2u, m, e)
    return by_position.flatten(2, 3)


def _to_sequence(xs: Sequence[Tensor], heads: Sequence[int], group: str) -> list[Tensor]:
    """The inverse of `_to_heads`: each x (b, this rank's heads, u s, e) -> (b, heads, s, e) at this
    rank's positions."""
    axis = axis_group_by_name(group)
    coming = []
    for x, count in zip(xs, heads, strict=True):
        of_ranks = _heads_of_ranks(heads, count, axis)
        coming.append(_send_chunks(x, of_ranks, axis))
    ys = []
    for x, count, result in zip(xs, heads, coming, strict=True):
        of_ranks = _heads_of_ranks(heads, count, axis)
        ys.append(_join_heads(result, x, count, of_ranks))
    return ys


def _send_chunks(x: Tensor, of_ranks: Sequence[range], axis: AxisGroup) -> AsyncResult:
    """Sends each neighbour its two chunks of x (b, this rank's heads, u s, e); those of this rank
    come from all of them, each with its heads. Which chunks a rank has: see `_join_chunks`."""
    u = axis.size
    chunks = x.unflatten(2, (2 * u, -1)).transpose(0, 1)  # (this rank's heads, b, 2u, m, e)
    parts = []
    for rank in range(u):
        first_half = chunks[:, :, rank]
        second_half = chunks[:, :, 2 * u - 1 - rank]
        parts.append(torch.cat([first_half, second_half], dim=2))
    numbers_of_heads = [len(its_heads) for its_heads in of_ranks]
    return axis.start_all_to_all(parts, numbers_of_heads)


def _join_heads(coming: AsyncResult, x: Tensor, count: int, of_ranks: Sequence[range]) -> Tensor:
    """What the neighbours have sent of all `count` heads; `of_ranks`: those of each."""
    received = coming.wait()  # from each rank (its heads, b, s, e)
    sent = sum(len(its_heads) for its_heads in of_ranks)
    if sent == count:  # each head is on one rank
        y = torch.cat(received)
    else:
        # Several ranks have the same key/value head, so these are gradients of it: their sum, in
        # rank order, which makes it reproducible.
        wide = torch.promote_types(x.dtype, torch.float32)
        _, b, s, e = received[0].shape
        y = x.new_zeros(count, b, s, e, dtype=wide)
        for its_heads, part in zip(of_ranks, received, strict=True):
            y[its_heads.start : its_heads.stop] += part
    # (heads, b, s, e) -> (b, heads, s, e), with heads adjacent in memory as a projection needs them
    by_token = y.permute(1, 2, 0, 3).contiguous()  # (b, s, heads, e)
    return by_token.to(x.dtype).transpose(1, 2)


def _to_heads_shapes(xs: Sequence[Tensor], heads: Sequence[int], group: str) -> list[Tensor]:
    axis = axis_group_by_name(group)
    shapes = []
    for x, count in zip(xs, heads, strict=True):
        b, _, s, e = x.shape
        of_ranks = _heads_of_ranks(heads, count, axis)
        own_heads = len(of_ranks[axis.index])
        shapes.append(x.new_empty(b, own_heads, axis.size * s, e))
    return shapes


def _to_sequence_shapes(xs: Sequence[Tensor], heads: Sequence[int], group: str) -> list[Tensor]:
    u = axis_group_by_name(group).size
    shapes = []
    for x, count in zip(xs, heads, strict=True):
        b, _, length, e = x.shape
        by_token = x.new_empty(b, length // u, count, e)
        shapes.append(by_token.transpose(1, 2))
    return shapes


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.heads, ctx.group = inputs


def _to_heads_backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None, None]:
    return ops.to_sequence(grads, ctx.heads, ctx.group), None, None


def _to_sequence_backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None, None]:
    return ops.to_heads(grads, ctx.heads, ctx.group), None, None


operator("to_heads", _to_heads, _to_heads_shapes)
operator("to_sequence", _to_sequence, _to_sequence_shapes)
ops = torch.ops.meshtrain
differentiable("to_heads", _to_heads_backward, _setup_context)
differentiable("to_sequence", _to_sequence_backward, _setup_context)
