"""DDP: distributed data parallelism over `dp_replicate`, with bucketed all-reduce; ZeRO-1, with
reduce-scatter.

Gradients are *summed* over the data ranks, never averaged: a rank's loss is its share of a sum that
is already divided by a global count, so the sum is the gradient of the global mean, however samples
are distributed over ranks.

With ZeRO-1 (Rajbhandari et al., https://arxiv.org/abs/1910.02054) replicas share the optimizer's
work: each receives the summed gradients only of its rows of every parameter, keeps the optimizer
state of these rows, updates them, and all-gathers the others. Rows are split as in `sharding.py`,
so checkpoints and plans treat states like other tensors.

torch's wrapper is not used, because it renames parameters and rejects parameters that are sharded
over other axes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.job.pending import waiting
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import AsyncResult, AxisGroup, MeasuredWait, axis_group
from meshtrain.parallel.grad_sync import GradientSync, when_backward_begins
from meshtrain.parallel.linear.weight_grad import set_gradient_place
from meshtrain.parallel.sharding import chunk_range
from meshtrain.parallel.torch_private import (
    accumulates,
    at_end_of_backward,
    from_local,
    to_local,
    when_accumulated,
)

REPLICATE = "dp_replicate"
NamedParameter = tuple[str, nn.Parameter]
IN_FLIGHT = 4  # ZeRO-1 messages in flight at once, each as large as a bucket
BUCKET_BYTES = 25 * 2**20  # as torch's DDP: large enough for bandwidth, small enough to start early


class BucketedAllReduce(GradientSync):
    """Sums a model's gradients over an axis of replicas at the end of every last backward.

    Gradients live in a few flat buckets. The all-reduce of a bucket starts as soon as its last
    gradient is ready, and overlaps with the backward of earlier layers (Li et al.,
    https://arxiv.org/abs/2006.15704). The end of the backward waits for all of them, so that an
    ordinary loop needs no extra call.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        axis: str,
        measured_wait: MeasuredWait,
        named: Callable[[], list[NamedParameter]],
        dtype: torch.dtype | None = None,
    ) -> None:
        """`named`: parameters replicated over this axis. `dtype`: that of the messages; None: the
        gradients' own."""
        self.axis = axis
        self.group = mesh.group(axis)
        self.size = mesh.size(axis)
        self.comm_bytes = mesh.comm_bytes
        self._measured_wait = measured_wait
        self._named = named
        self._dtype = dtype

        self._last = True  # whether the next backward is the last of its step
        self._in_backward = False
        self._started = 0  # number of buckets started in this backward
        self._works: list[tuple[dist.Work, Tensor, Tensor]] = []  # work, gradients, message

        # The backward runs through the model from its end, so its last parameters are ready first.
        trained = [p for _, p in self._named() if p.requires_grad]
        trained.reverse()
        self._buckets = [Bucket(parameters) for parameters in _group_into_buckets(trained)]
        self._accumulators = []  # kept alive: see `when_accumulated`
        for bucket in self._buckets:
            for parameter in bucket.views:
                ready = partial(self._ready, bucket, parameter)
                self._accumulators.append(when_accumulated(parameter, ready))
        when_backward_begins(model, self._begin)

    def set_is_last_backward(self, last: bool) -> None:
        self._abandon()
        self._last = last

    def start_reduce(self) -> None:
        """Parameters without a gradient take part too, because another rank may have one."""
        self._in_backward = True
        self._start_full_buckets(all_of_them=True)

    def finish_reduce(self) -> None:
        self._finish_buckets()
        self._in_backward = False
        self._started = 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.views)

    def _begin(self) -> None:
        self._abandon()
        # A backward by `torch.autograd.grad` accumulates nothing, so there is nothing to sum.
        if self._last and any(accumulates(p) for bucket in self._buckets for p in bucket.views):
            self._refuse_unknown()
            self._in_backward = True
            at_end_of_backward(self._end)

    def _end(self) -> None:
        self.start_reduce()
        if self.waits:
            self.finish_reduce()

    def _ready(self, bucket: "Bucket", parameter: Tensor) -> None:
        # In earlier backwards, too: later ones then add to the bucket in place.
        if parameter.grad is not None:  # otherwise it was deferred
            bucket.adopt(parameter)
        if not self._last:
            return
        if not self._in_backward:  # a backward of something other than the model's output
            self._begin()
        if parameter not in bucket.missing:
            raise RuntimeError(
                "a parameter's gradient came twice in one backward, the second time when it may "
                "have been sent: torch.utils.checkpoint needs use_reentrant=False"
            )
        bucket.missing.remove(parameter)
        self._start_full_buckets()

    def _refuse_unknown(self) -> None:
        known = {p for bucket in self._buckets for p in bucket.views}
        for name, parameter in self._named():
            if parameter.requires_grad and parameter not in known:
                raise RuntimeError(
                    f"{name} was unfrozen or replaced after parallelize, so its gradient would not "
                    f"be summed over {self.axis}: unfreeze before parallelize, and use "
                    "load_state_dict without assign=True"
                )

    def _start_full_buckets(self, all_of_them: bool = False) -> None:
        """Starts all-reduces, bucket by bucket in one fixed order, which is the same on every
        rank."""
        # A backend pairs the collectives of ranks by their order alone. So a full bucket waits for
        # those before it: another rank's gradients may be ready in another order.
        while self._started < len(self._buckets):
            bucket = self._buckets[self._started]
            if bucket.missing and not all_of_them:
                return
            for parameter in bucket.views:
                bucket.adopt(parameter)
            self._start(bucket, bucket.flat)
            self._started += 1

    def _in_message_type(self, flat: Tensor) -> Tensor:
        if self._dtype is None or not flat.is_floating_point():
            return flat
        return flat.to(self._dtype)

    def _start(self, bucket: "Bucket", flat: Tensor) -> None:
        """Starts the reduction of a bucket's gradients `flat`."""
        message = self._in_message_type(flat)
        work = dist.all_reduce(message, group=self.group, async_op=True)
        assert work is not None  # this rank is in the group
        self._works.append((work, flat, message))
        sent = 2 * message.nbytes * (self.size - 1) / self.size
        self.comm_bytes.add(self.axis, "all_reduce", sent)

    def _finish_buckets(self) -> None:
        with self._measured_wait(), waiting("all_reduce", self.group):
            for work, flat, message in self._works:
                work.wait()
                if message is not flat:  # it was of another dtype
                    flat.copy_(message)
        self._works.clear()

    def _abandon(self) -> None:
        """After an exception in a last backward: contributes NaN to the remaining reductions, so
        that all ranks go on with the same collectives, and ranks without an exception get gradients
        that are not finite."""
        if not self._in_backward:
            return
        for bucket in self._buckets[self._started :]:
            self._start(bucket, torch.full_like(bucket.flat, torch.nan))
        self.finish_reduce()
        for bucket in self._buckets:
            bucket.flat.zero_()


class Bucket:
    """Some parameters, and one flat tensor with the concatenated gradients of this rank's parts.

    flat    [ gradient of p1 | gradient of p2 | ... ]     one all-reduce for all of them
    views      p1.grad          p2.grad                   the same memory, in the parts' shapes
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.missing: set[Tensor] = set(parameters)  # gradients not yet ready in a last backward
        self.views: dict[Tensor, Tensor] = {}

        parts = [to_local(p.detach()) for p in parameters]
        sizes = [part.numel() for part in parts]
        first = parts[0]  # all have its dtype and device
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        pieces = self.flat.split(sizes)
        for parameter, part, piece in zip(parameters, parts, pieces, strict=True):
            view = from_local(piece.view_as(part), like=parameter)
            self.views[parameter] = view
            # Products write the first gradient of a step here at once, instead of to new memory
            # that `adopt` would have to copy (`linear/weight_grad.py`).
            set_gradient_place(parameter, view)

    def adopt(self, parameter: Tensor) -> None:
        """Makes the gradient a view of the flat tensor, if autograd or the user's `zero_grad`
        placed it elsewhere. So gradients are stored once, and further microbatches add to them in
        place."""
        view = self.views[parameter]
        if parameter.grad is view:
            return
        place = to_local(view)
        if parameter.grad is None:
            place.zero_()
        else:
            grad = to_local(parameter.grad)
            if grad.data_ptr() != place.data_ptr():
                place.copy_(grad)
        parameter.grad = view


def _group_into_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Neighbouring parameters of the same dtype and device, up to `BUCKET_BYTES` per bucket."""
    buckets: list[list[nn.Parameter]] = []
    kind = None  # dtype and device of the last bucket: a message has one of each
    size = 0  # bytes of the last bucket
    for p in parameters:
        local_bytes = to_local(p.detach()).nbytes
        is_full = size + local_bytes > BUCKET_BYTES
        if is_full or kind != (p.dtype, p.device):
            buckets.append([])
            kind = p.dtype, p.device
            size = 0
        buckets[-1].append(p)
        size += local_bytes
    return buckets


class BucketedReduceScatter(BucketedAllReduce):
    """ZeRO-1's: sums this rank's rows of the gradients over an axis of replicas at the end of every
    last backward. Gradients in other rows are meaningless after that."""

    def __init__(self, model: nn.Module, mesh: Mesh, axis: str, *arguments: Any) -> None:
        super().__init__(model, mesh, axis, *arguments)
        self.parameters: set[Tensor] = set()  # whose rows are shared out
        self._copies = axis_group(mesh, axis)
        self._rows: dict[Bucket, Rows] = {}
        self._in_flight: deque[tuple[Bucket, AsyncResult]] = deque()
        for bucket in self._buckets:
            parameters = list(bucket.views)
            self.parameters.update(parameters)
            parts = [to_local(p.detach()) for p in parameters]
            self._rows[bucket] = Rows(parts, self._copies)

    def _start(self, bucket: Bucket, flat: Tensor) -> None:
        # Each message in flight is a copy of a bucket, so there are only a few.
        while len(self._in_flight) >= IN_FLIGHT:
            self._finish_first()
        rows = self._rows[bucket]
        message = rows.scattered(flat.split(rows.sizes))
        result = self._copies.start_reduce_scatter(self._in_message_type(message))
        self._in_flight.append((bucket, result))

    def _finish_buckets(self) -> None:
        while self._in_flight:
            self._finish_first()

    def _finish_first(self) -> None:
        bucket, result = self._in_flight.popleft()
        with self._measured_wait():
            part = result.wait()
        rows = self._rows[bucket]
        rows.take_own(bucket.flat.split(rows.sizes), part)

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """All-gathers the rows of the parameters that each rank has updated."""
        for rows in self._rows.values():
            with self._measured_wait():
                rows.gather()


class RowsOfTensor(NamedTuple):
    """How the rows of one tensor are split over the ranks."""

    begin: int  # where they begin in a rank's part of a message
    chunk: int  # rows per rank; the last ranks may have fewer
    rows: int  # of all ranks
    width: int  # elements of a row


class Rows:
    """The split of the rows of some tensors over ranks: equal numbers, but fewer on the last
    ranks.

        tensor of 5 rows, 2 ranks: rows 0 1 2 | 3 4
        message: (rank 0: its rows of each tensor | rank 1: its rows of each tensor, zero-padded)
    """

    def __init__(self, tensors: Sequence[Tensor], copies: AxisGroup) -> None:
        self.tensors = tensors
        self.sizes = [tensor.numel() for tensor in tensors]
        self.copies = copies
        self._splits: list[RowsOfTensor] = []
        self.length = 0  # elements of a rank's part
        for tensor in tensors:
            rows = tensor.shape[0] if tensor.dim() else 1
            width = tensor.numel() // max(rows, 1)
            chunk = -(-rows // copies.size)  # as `chunk_range` splits a dim
            self._splits.append(RowsOfTensor(self.length, chunk, rows, width))
            self.length += chunk * width

    def scattered(self, tensors: Sequence[Tensor]) -> Tensor:
        """Packs flat tensors into one message (ranks x length,): each rank's part, zero-padded if
        it has fewer rows."""
        message = tensors[0].new_zeros(self.copies.size, self.length)
        for piece, place in self._pieces(tensors, message):
            place.copy_(piece)
        return message.view(-1)

    def gather(self) -> None:
        """All-gathers the rows of all ranks into the tensors."""
        flat = [tensor.view(-1) for tensor in self.tensors]
        own_part = flat[0].new_zeros(self.length)
        for piece, place in self._own(flat, own_part):
            place.copy_(piece)
        gathered = self.copies.start_all_gather(own_part).wait()

        message = gathered.view(self.copies.size, self.length)
        for piece, place in self._pieces(flat, message):
            piece.copy_(place)

    def take_own(self, tensors: Sequence[Tensor], part: Tensor) -> None:
        """Writes this rank's part into its rows of flat tensors."""
        for piece, place in self._own(tensors, part):
            piece.copy_(place)

    def _own(self, tensors: Sequence[Tensor], part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views: this rank's rows of each flat tensor, and their place in its part."""
        for tensor, split in zip(tensors, self._splits, strict=True):
            rows = chunk_range(split.rows, self.copies.size, self.copies.index)
            piece = tensor[rows.start * split.width : rows.stop * split.width]
            end = split.begin + piece.numel()
            yield piece, part[split.begin : end]

    def _pieces(
        self, tensors: Sequence[Tensor], message: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views of each flat tensor and the message (ranks, length): the rows of all ranks
        with a full chunk at once, then those of the rank with a partial chunk."""
        for tensor, split in zip(tensors, self._splits, strict=True):
            full_ranks = split.rows // max(split.chunk, 1)
            size = split.chunk * split.width  # of a full chunk
            full = tensor[: full_ranks * size].view(full_ranks, size)
            yield full, message[:full_ranks, split.begin : split.begin + size]

            rest = tensor[full_ranks * size :]
            if rest.numel() > 0:
                end = split.begin + rest.numel()
                yield rest, message[full_ranks, split.begin : end]
