"""ZeRO-1 (Rajbhandari et al., https://arxiv.org/abs/1910.02054): copies of a model that share the optimizer's work.

Each rank of an axis of copies gets the sums of the gradients of its rows of every parameter alone (reduce-scatter). It
updates these rows, keeps the optimizer's states of them, and has the other rows sent (all-gather). Rows are cut as
`sharding.py` cuts, so the states are tensors like all others to checkpoints and plans.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshtrain.parallel.collectives import AsyncResult, AxisGroup, axis_group
from meshtrain.parallel.ddp import Bucket, BucketedAllReduce
from meshtrain.parallel.sharding import chunk_range
from meshtrain.parallel.torch_private import to_local

IN_FLIGHT = 4  # messages of gradients at once, each as large as a bucket


class BucketedReduceScatter(BucketedAllReduce):
    """Sums this rank's rows of the gradients over an axis of copies at the end of every last backward. What gradients
    have in other rows is of no use then."""

    def __init__(self, model: Any, mesh: Any, axis: str, *arguments: Any) -> None:
        super().__init__(model, mesh, axis, *arguments)
        self._copies = axis_group(mesh, axis)
        self._rows = {
            bucket: Rows([to_local(p.detach()) for p in bucket.views], self._copies) for bucket in self._buckets
        }
        self._sums: deque[tuple[Bucket, AsyncResult]] = deque()
        self.parameters = {p for bucket in self._buckets for p in bucket.views}

    def _start(self, bucket: Bucket, flat: Tensor) -> None:
        while len(self._sums) >= IN_FLIGHT:
            self._finish_first()
        rows = self._rows[bucket]
        message = rows.scattered(flat.split([t.numel() for t in rows.tensors]))
        self._sums.append((bucket, self._copies.start_reduce_scatter(self._in_message_type(message))))

    def _finish_buckets(self) -> None:
        while self._sums:
            self._finish_first()

    def _finish_first(self) -> None:
        bucket, result = self._sums.popleft()
        with self.waiting():
            part = result.wait()
        rows = self._rows[bucket]
        rows.take_own(bucket.flat.split([t.numel() for t in rows.tensors]), part)

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Every rank has changed its rows of the parameters: brings them to all."""
        for rows in self._rows.values():
            with self.waiting():
                rows.gather()


class Rows:
    """Which rows of some tensors are whose: of each as many, but of the last ranks fewer."""

    def __init__(self, tensors: Sequence[Tensor], copies: AxisGroup) -> None:
        self.tensors, self.copies = tensors, copies
        self._places: list[tuple[int, int, int, int]] = []  # begin in a part, rows of a rank, all rows, width
        self.length = 0  # of a rank's part
        for tensor in tensors:
            rows = tensor.shape[0] if tensor.dim() else 1
            width, chunk = tensor.numel() // max(rows, 1), -(-rows // copies.size)
            self._places.append((self.length, chunk, rows, width))
            self.length += chunk * width

    def scattered(self, tensors: Sequence[Tensor]) -> Tensor:
        """Flat tensors as one message, (ranks x length,): the part of each rank, with zeros where it has fewer rows."""
        message = tensors[0].new_zeros(self.copies.size, self.length)
        for piece, place in self._pieces(tensors, message):
            place.copy_(piece)
        return message.view(-1)

    def gather(self) -> None:
        """The rows of all ranks."""
        flat = [tensor.view(-1) for tensor in self.tensors]
        part = flat[0].new_zeros(self.length)
        for piece, place in self._own(flat, part):
            place.copy_(piece)
        message = self.copies.start_all_gather(part).wait().view(self.copies.size, -1)
        for piece, place in self._pieces(flat, message):
            piece.copy_(place)

    def take_own(self, tensors: Sequence[Tensor], part: Tensor) -> None:
        """Writes this rank's part into its rows of flat tensors."""
        for piece, place in self._own(tensors, part):
            piece.copy_(place)

    def _own(self, tensors: Sequence[Tensor], part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for tensor, (begin, _, rows, width) in zip(tensors, self._places, strict=True):
            own = chunk_range(rows, self.copies.size, self.copies.index)
            piece = tensor[own.start * width : own.stop * width]
            yield piece, part[begin : begin + piece.numel()]

    def _pieces(self, tensors: Sequence[Tensor], message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of all ranks that have as many, together, and those of the one that has some rows less."""
        for tensor, (begin, chunk, rows, width) in zip(tensors, self._places, strict=True):
            full, size = rows // max(chunk, 1), chunk * width
            yield tensor[: full * size].view(full, size), message[:full, begin : begin + size]
            rest = tensor[full * size :]
            if rest.numel() > 0:
                yield rest, message[full, begin : begin + rest.numel()]
