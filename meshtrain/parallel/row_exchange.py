"""Rows of a weight that ranks of `tp` use, but that others hold.

A weight of several layers in one (queries, keys and values; gate and up) is held as any other: its
rows are cut into equal parts. So its checkpoint, its export, its shards over the data ranks and its
optimizer know nothing of the layers in it. But a rank needs its rows of *each* of them: the ranks
exchange what they need before the product, and the gradients of these rows after it.

    two layers of 4 rows, 2 ranks        0 1 2 3 | 4 5 6 7
    rank 0 holds 0 1 2 3, and uses       0 1       4 5
    rank 1 holds 4 5 6 7, and uses           2 3       6 7

Each of t ranks sends about 1/t of its rows to each other one, and as much of their gradients: for n
tokens less than the exchange of their outputs, if n is larger than the layer's inputs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshtrain.parallel.collectives import AxisGroup, axis_group_by_name, operator
from meshtrain.parallel.sharding import chunk_range


class RowExchange:
    """Gives each rank the rows that it uses of a weight, or bias, of which it holds its part."""

    def __init__(self, axis: AxisGroup, rows: int, used: Sequence[Sequence[slice]]) -> None:
        """`rows`: of the whole. `used`: for each rank the rows that it uses, in their order;
        several ranks may use the same row."""
        self.axis = axis
        self.rows = rows
        # For operators, which take numbers only: start and end of each run, and their counts.
        self.runs = [end for runs in used for run in runs for end in (run.start, run.stop)]
        self.counts = [len(runs) for runs in used]

    def used(self, held: Tensor) -> Tensor:
        """The rows that this rank uses, from those that it holds. All ranks call it together."""
        return _Used.apply(held, self.axis.name, self.rows, self.runs, self.counts)


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, held: Tensor, group: str, rows: int, runs: list[int], counts: list[int]
    ) -> Tensor:
        ctx.exchange = group, rows, runs, counts
        return ops.used_rows(held, *ctx.exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ops.held_rows(grad, *ctx.exchange), None, None, None, None


class _Pieces:
    """Which rows travel: each run that a rank uses is made of pieces that ranks hold."""

    def __init__(self, group: str, rows: int, runs: Sequence[int], counts: Sequence[int]) -> None:
        self.axis = axis_group_by_name(group)
        self._held = [chunk_range(rows, self.axis.size, rank) for rank in range(self.axis.size)]
        ends = list(zip(runs[::2], runs[1::2], strict=True))
        self._used = []
        for count in counts:
            self._used.append(ends[:count])
            ends = ends[count:]

    @property
    def own_used(self) -> int:
        """How many rows this rank uses."""
        return sum(stop - start for start, stop in self._used[self.axis.index])

    @property
    def own_held(self) -> int:
        held = self._held[self.axis.index]
        return held.stop - held.start

    def sent_to(self, user: int) -> list[slice]:
        """Where the pieces that a rank uses lie among those that this rank holds."""
        held = self._held[self.axis.index]
        return [
            slice(start - held.start, stop - held.start)
            for _, start, stop in self._between(self.axis.index, user)
        ]

    def from_holder(self, holder: int) -> list[slice]:
        """Where the pieces that a rank holds lie among those that this rank uses."""
        return [
            slice(place, place + stop - start)
            for place, start, stop in self._between(holder, self.axis.index)
        ]

    def _between(self, holder: int, user: int) -> list[tuple[int, int, int]]:
        """Pieces that one rank holds and another one uses: (place among the used rows, start,
        end)."""
        held = self._held[holder]
        pieces = []
        place = 0
        for run_start, run_stop in self._used[user]:
            start, stop = max(run_start, held.start), min(run_stop, held.stop)
            if start < stop:
                pieces.append((place + start - run_start, start, stop))
            place += run_stop - run_start
        return pieces


def _used_rows(
    held: Tensor, group: str, rows: int, runs: Sequence[int], counts: Sequence[int]
) -> Tensor:
    pieces = _Pieces(group, rows, runs, counts)
    ranks = range(pieces.axis.size)
    sent = [_joined(held, pieces.sent_to(user)) for user in ranks]
    places = [pieces.from_holder(holder) for holder in ranks]
    received = _exchange(pieces.axis, sent, places)
    used = held.new_empty(pieces.own_used, *held.shape[1:])
    for place, piece in _placed(received, places):
        used[place] = piece
    return used


def _held_rows(
    grad: Tensor, group: str, rows: int, runs: Sequence[int], counts: Sequence[int]
) -> Tensor:
    """The gradient of held rows: the sum over all that use them, in the order of the ranks."""
    pieces = _Pieces(group, rows, runs, counts)
    ranks = range(pieces.axis.size)
    sent = [_joined(grad, pieces.from_holder(holder)) for holder in ranks]
    places = [pieces.sent_to(user) for user in ranks]
    received = _exchange(pieces.axis, sent, places)
    held = grad.new_zeros(pieces.own_held, *grad.shape[1:])
    for place, piece in _placed(received, places):
        held[place] += piece
    return held


def _placed(
    received: Sequence[Tensor], places: Sequence[Sequence[slice]]
) -> Iterator[tuple[slice, Tensor]]:
    """Where each received piece belongs, in the order of the ranks."""
    for part, of_part in zip(received, places, strict=True):
        lengths = [_length(place) for place in of_part]
        yield from zip(of_part, part.split(lengths), strict=True)


def _exchange(
    axis: AxisGroup, sent: Sequence[Tensor], places: Sequence[Sequence[slice]]
) -> list[Tensor]:
    sizes = [sum(_length(place) for place in of_rank) for of_rank in places]
    received: list[Tensor] = axis.start_all_to_all(sent, sizes).wait()
    return received


def _joined(x: Tensor, places: Sequence[slice]) -> Tensor:
    return torch.cat([x[place] for place in places]) if places else x[:0]


def _length(place: slice) -> int:
    return int(place.stop - place.start)


def _used_rows_shape(
    held: Tensor, group: str, rows: int, runs: Sequence[int], counts: Sequence[int]
) -> Tensor:
    return held.new_empty(_Pieces(group, rows, runs, counts).own_used, *held.shape[1:])


def _held_rows_shape(
    grad: Tensor, group: str, rows: int, runs: Sequence[int], counts: Sequence[int]
) -> Tensor:
    return grad.new_empty(_Pieces(group, rows, runs, counts).own_held, *grad.shape[1:])


operator("used_rows", _used_rows, _used_rows_shape)
operator("held_rows", _held_rows, _held_rows_shape)
ops = torch.ops.meshtrain
