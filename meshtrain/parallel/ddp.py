"""DDP: distributed data parallelism over `dp_replicate`, by bucketed all-reduce.

Gradients are *summed* over the data ranks, never averaged: the loss of a rank is its share of a sum that was divided by
a global count before, so the sum is the gradient of the global mean whatever each rank holds.

Not torch's wrapper, which renames parameters and allows none that are shards on other axes.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.job.pending import waiting
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import Waiting
from meshtrain.parallel.grad_sync import GradientSync, when_backward_begins
from meshtrain.parallel.torch_private import accumulates, at_end_of_backward, from_local, to_local, when_accumulated

REPLICATE = "dp_replicate"
NamedParameter = tuple[str, nn.Parameter]
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
