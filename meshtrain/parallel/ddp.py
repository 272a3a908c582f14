"""DDP: distributed data parallelism over `dp_replicate`, by bucketed all-reduce; ZeRO-1, by reduce-scatter.

Gradients are *summed* over the data ranks, never averaged: the loss of a rank is its share of a sum that was divided by
a global count before, so the sum is the gradient of the global mean whatever each rank holds.

With ZeRO-1 (Rajbhandari et al., https://arxiv.org/abs/1910.02054) copies share the optimizer's work: each gets the sums
of the gradients of its rows of every parameter alone, updates these, keeps the optimizer's states of them, and has the
other rows sent. Rows are cut as `sharding.py` cuts, so states are tensors like all others to checkpoints and plans.

Not torch's wrapper, which renames parameters and allows none that are shards on other axes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.job.pending import waiting
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import AsyncResult, AxisGroup, Waiting, axis_group
from meshtrain.parallel.grad_sync import GradientSync, when_backward_begins
from meshtrain.parallel.sharding import chunk_range
from meshtrain.parallel.torch_private import accumulates, at_end_of_backward, from_local, to_local, when_accumulated

REPLICATE = "dp_replicate"
NamedParameter = tuple[str, nn.Parameter]
IN_FLIGHT = 4  # messages of ZeRO-1 at once, each as large as a bucket
BUCKET_BYTES = 25 * 2**20  # as torch's DDP: large enough for bandwidth, small enough to start early


class BucketedAllReduce(GradientSync):
    """Sums gradients of a model over an axis of copies at the end of every last backward.

    Gradients live in a few flat buckets. As soon as the last gradient of a bucket is there its all-reduce starts, and
    the backward of earlier layers goes on meanwhile (Li et al., https://arxiv.org/abs/2006.15704). The end of the
    backward waits for all of them, so that an ordinary loop needs no call of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        axis: str,
        waiting: Waiting,
        named: Callable[[], list[NamedParameter]],
        dtype: torch.dtype | None = None,
    ) -> None:
        """`named`: parameters with copies over this axis. `dtype`: of the sums of gradients; None: their own."""
        self.axis, self.group = axis, mesh.group(axis)
        self.size, self.comm_bytes = mesh.size(axis), mesh.comm_bytes
        self.waiting = waiting
        self._named = named
        self._last = True
        self._in_backward = False
        self._dtype = dtype
        self._started = 0  # buckets of this backward
        self._works: list[tuple[dist.Work, Tensor, Tensor]] = []  # with the gradients and the message of them
        trained = [p for _, p in self._named() if p.requires_grad][::-1]  # in the order of the backward
        self._buckets = [Bucket(parameters) for parameters in _group_into_buckets(trained)]
        ready = [(p, partial(self._ready, bucket, p)) for bucket in self._buckets for p in bucket.views]
        self._accumulators = [when_accumulated(parameter, callback) for parameter, callback in ready]
        when_backward_begins(model, self._begin)

    def set_is_last_backward(self, last: bool) -> None:
        self._abandon()
        self._last = last

    def start_reduce(self) -> None:
        """What no gradient came for is summed too, because another rank may have one."""
        self._in_backward = True
        self._start_full_buckets(all_of_them=True)

    def finish_reduce(self) -> None:
        self._finish_buckets()
        self._in_backward, self._started = False, 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.views)

    def _begin(self) -> None:
        self._abandon()
        if self._last and any(accumulates(p) for bucket in self._buckets for p in bucket.views):
            self._refuse_unknown()
            self._in_backward = True
            at_end_of_backward(self._end)

    def _end(self) -> None:
        self.start_reduce()
        if self.waits:
            self.finish_reduce()

    def _ready(self, bucket: "Bucket", parameter: Tensor) -> None:
        if parameter.grad is not None:  # else it has been left for later
            bucket.adopt(parameter)
        if not self._last:
            return
        if not self._in_backward:  # a backward of something else than the model's output
            self._begin()
        if parameter not in bucket.missing:
            raise RuntimeError(
                "a parameter's gradient came twice in one backward, the second time when it may have been sent: "
                "torch.utils.checkpoint needs use_reentrant=False"
            )
        bucket.missing.remove(parameter)
        self._start_full_buckets()

    def _refuse_unknown(self) -> None:
        known = {p for bucket in self._buckets for p in bucket.views}
        for name, parameter in self._named():
            if parameter.requires_grad and parameter not in known:
                raise RuntimeError(
                    f"{name} was unfrozen or replaced after parallelize, so its gradient would not be summed over "
                    f"{self.axis}: unfreeze before parallelize, and use load_state_dict without assign=True"
                )

    def _start_full_buckets(self, all_of_them: bool = False) -> None:
        """Starts all-reduces, bucket by bucket in one fixed order: every rank's first is the same bucket."""
        while self._started < len(self._buckets):
            bucket = self._buckets[self._started]
            if bucket.missing and not all_of_them:
                return
            for parameter in bucket.views:
                bucket.adopt(parameter)
            self._start(bucket, bucket.flat)
            self._started += 1

    def _in_message_type(self, flat: Tensor) -> Tensor:
        return flat.to(self._dtype) if self._dtype is not None and flat.is_floating_point() else flat

    def _start(self, bucket: "Bucket", flat: Tensor) -> None:
        """Starts the sum of a bucket's gradients, which are `flat`."""
        message = self._in_message_type(flat)
        work = dist.all_reduce(message, group=self.group, async_op=True)
        assert work is not None  # this rank is in the group
        self._works.append((work, flat, message))
        self.comm_bytes.add(self.axis, "all_reduce", 2 * message.nbytes * (self.size - 1) / self.size)

    def _finish_buckets(self) -> None:
        with self.waiting(), waiting("all_reduce", self.group):
            for work, flat, message in self._works:
                work.wait()
                if message is not flat:
                    flat.copy_(message)
        self._works.clear()

    def _abandon(self) -> None:
        """After a last backward that an exception has ended: makes the sums that are left of NaN, so that all ranks go
        on with the same sum, and those without an exception get gradients that are not finite."""
        if not self._in_backward:
            return
        for bucket in self._buckets[self._started :]:
            self._start(bucket, torch.full_like(bucket.flat, torch.nan))
        self.finish_reduce()
        for bucket in self._buckets:
            bucket.flat.zero_()


class Bucket:
    """Some parameters, and one flat tensor that holds the gradients of this rank's parts, one after the other."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.missing: set[Tensor] = set(parameters)  # whose gradients are not there yet in a last backward
        parts = [to_local(p.detach()) for p in parameters]
        self.flat = torch.zeros(sum(p.numel() for p in parts), dtype=parts[0].dtype, device=parts[0].device)
        slices = zip(parameters, self.flat.split([p.numel() for p in parts]), parts, strict=True)
        self.views: dict[Tensor, Tensor] = {p: from_local(view.view_as(part), p) for p, view, part in slices}
        for parameter, view in self.views.items():
            parameter.gradient_place = view  # type: ignore[attr-defined]  # where products begin its gradient

    def adopt(self, parameter: Tensor) -> None:
        """Moves a gradient that autograd or the user's `zero_grad` put elsewhere into the flat tensor, to be its view:
        so there is no second memory for gradients, and further microbatches add to it in place."""
        view = self.views[parameter]
        if parameter.grad is view:
            return
        if parameter.grad is None:
            to_local(view).zero_()
        elif to_local(parameter.grad).data_ptr() != to_local(view).data_ptr():
            to_local(view).copy_(to_local(parameter.grad))
        parameter.grad = view


def _group_into_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Neighbouring parameters of one type and device, up to `BUCKET_BYTES` together."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        fits = buckets and buckets[-1][0].dtype == p.dtype and buckets[-1][0].device == p.device
        local_bytes = to_local(p.detach()).nbytes
        if not fits or size + local_bytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += local_bytes
    return buckets


class BucketedReduceScatter(BucketedAllReduce):
    """Sums this rank's rows of the gradients over an axis of copies at the end of every last backward. What gradients
    have in other rows is of no use then."""

    def __init__(self, model: nn.Module, mesh: Mesh, axis: str, *arguments: Any) -> None:
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
