"""Data parallelism: DDP over `dp_replicate`, FSDP over `dp_shard`, HSDP over both.

Gradients are *summed* over the data ranks, never averaged: the loss of a rank is its share of a sum that was divided by
a global count before, so the sum is the gradient of the global mean whatever each rank holds.

DDP is ours: parameters keep their names and may themselves be shards on other axes, which torch's wrapper does not
allow. FSDP and HSDP are torch's `fully_shard`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from meshtrain.mesh import Mesh
from meshtrain.numerics import compute_dtype, master_dtype
from meshtrain.parallel.exchange import all_gather, reduce_scatter

BUCKET_BYTES = 25 * 2**20  # as torch's DDP: large enough for bandwidth, small enough to start early
SMALL = 2**21  # a block of fewer parameters than this (4 MiB in 16 bits) is not worth a gather of its own

Waiting = Callable[[], AbstractContextManager]  # entered where this rank waits for others: it measures


class Replicas:
    """DDP: sums the gradients of parameters of which every rank of a group holds all.

    Gradients live in a few flat buckets. As soon as the last gradient of a bucket is there its all-reduce starts, and
    the backward of earlier layers goes on meanwhile (Li et al., https://arxiv.org/abs/2006.15704). The end of the
    backward waits for all of them, so that an ordinary loop needs no call of its own.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, waiting: Waiting) -> None:
        """
        Args:
            parameters: in the order of the forward; the backward, and so the buckets, go the other way round.
            group: the ranks that hold copies.
            waiting: entered while the end of the backward waits.
        """
        self.group = group
        self.waiting = waiting
        self._last = True
        self._buckets = [_Bucket(some) for some in _split(list(reversed(parameters)))]
        self._works: list[dist.Work] = []
        self._in_backward = False
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._ready(bucket))

    def set_last(self, last: bool) -> None:
        """Whether the next backward is the last of its step, and so the one that sums."""
        self._last = last

    def _ready(self, bucket: "_Bucket") -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not self._last:
                return
            if not self._in_backward:
                self._in_backward = True
                Variable._execution_engine.queue_callback(self._finish)
            bucket.missing -= 1
            self._start_full_buckets()

        return hook

    def _start_full_buckets(self, all_of_them: bool = False) -> None:
        """Starts all-reduces, bucket by bucket in one fixed order: every rank's first is the same bucket."""
        while len(self._works) < len(self._buckets):
            bucket = self._buckets[len(self._works)]
            if bucket.missing > 0 and not all_of_them:
                return
            bucket.adopt()
            work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            assert work is not None  # this rank is in the group
            self._works.append(work)

    def _finish(self) -> None:
        """The end of the backward: what no gradient came for is summed too, because another rank may have one."""
        self._start_full_buckets(all_of_them=True)
        with self.waiting():
            for work in self._works:
                work.wait()
        self._works.clear()
        self._in_backward = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)


class _Bucket:
    """Some parameters, and one flat tensor that holds their gradients one after the other."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.views = [
            part.view_as(p)
            for part, p in zip(self.flat.split([p.numel() for p in parameters]), parameters, strict=True)
        ]

    def adopt(self) -> None:
        """Moves gradients that autograd or the user's `zero_grad` put elsewhere into the flat tensor."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view


def _split(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Neighbouring parameters of one type and device, up to `BUCKET_BYTES` together."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        fits = buckets and buckets[-1][0].dtype == p.dtype and buckets[-1][0].device == p.device
        if not fits or size + p.numel() * p.element_size() > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.numel() * p.element_size()
    return buckets


def replicate(model: nn.Module, mesh: Mesh, waiting: Waiting = nullcontext) -> None:
    """DDP over `dp_replicate`: from now on every backward ends with summed gradients."""
    group = mesh.group("dp_replicate")
    assert group is not None  # the axis is larger than 1
    model.gradient_sync = Replicas([p for p in model.parameters() if p.requires_grad], group, waiting)  # type: ignore[assignment]


def shard(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: Mesh,
    *,
    precision: str = "float32",
    reshard_after_forward: bool = True,
    waiting: Waiting = nullcontext,
) -> None:
    """FSDP over `dp_shard`, HSDP if `dp_replicate` is larger than 1 too (Zhao et al., https://arxiv.org/abs/2304.11277).

    Each block gathers its parameters for its own forward and backward; small blocks join the one after them, and what
    two blocks share stays with the whole model.

    Args:
        model: on any device, meta included.
        blocks: its modules in the order in which they run.
        precision: the type to compute in; see `precision.py`.
        reshard_after_forward: frees a block's parameters after its forward and gathers them again for its backward.
        waiting: entered while this rank waits for the others.
    """
    types = MixedPrecisionPolicy(param_dtype=compute_dtype(precision), reduce_dtype=master_dtype(precision))
    group = mesh.submesh("dp_replicate", "dp_shard")
    units = _units(model, blocks)
    for unit in units:
        # The last unit's backward follows its forward at once: freeing it between the two would gather it twice.
        reshard = reshard_after_forward and unit is not units[-1]
        fully_shard(unit, mesh=group, mp_policy=types, reshard_after_forward=reshard)
    fully_shard(model, mesh=group, mp_policy=types, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)
    model.gradient_sync = Shards(model, reshard_after_forward)  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if mesh.device_type == "cpu":  # on a GPU communication runs on streams of its own
                module.set_custom_all_gather(_AllGather(waiting))
                module.set_custom_reduce_scatter(_ReduceScatter(waiting))


def _units(model: nn.Module, blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Which blocks gather together."""
    holders: dict[nn.Parameter, set[int]] = {}
    for i, block in enumerate(blocks):
        for parameter in block.parameters():
            holders.setdefault(parameter, set()).add(i)
    sharing = {i for held_by in holders.values() if len(held_by) > 1 for i in held_by}
    units: list[list[nn.Module]] = []
    waiting: list[nn.Module] = []
    for i, block in enumerate(blocks):
        if i in sharing or block is model or not any(True for _ in block.parameters()):
            continue
        waiting.append(block)
        if sum(p.numel() for unit in waiting for p in unit.parameters()) >= SMALL:
            units.append(waiting)
            waiting = []
    return units  # small ones at the end stay with the whole model


class _AllGather(DefaultAllGather):
    """FSDP's all-gather on a CPU, where it blocks: the time in it is time that the rank waits."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        with self._waiting():
            all_gather(output_tensor, input_tensor, group)


class _ReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter on a CPU. `op` is always the sum, because `shard` says so to FSDP."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def __call__(  # type: ignore[override]  # FSDP asks for no work to wait for
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        with self._waiting():
            reduce_scatter(output_tensor, input_tensor, group)


class Shards:
    """When FSDP and HSDP send gradients.

    FSDP that frees parameters after the forward frees the full gradients after every backward too, which is what keeps
    its memory small: it reduce-scatters in every microbatch, and HSDP sums the shards over `dp_replicate` in the last.
    FSDP that keeps its parameters keeps its gradients as well, and sends them once a step.
    """

    def __init__(self, model: FSDPModule, reshard_after_forward: bool) -> None:
        self._model = model
        self._keeps = not reshard_after_forward

    def set_last(self, last: bool) -> None:
        """Whether the next backward is the last of its step."""
        if self._keeps:
            self._model.set_requires_gradient_sync(last)
            self._model.set_reshard_after_backward(last)
            self._model.set_is_last_backward(last)
        else:
            self._model.set_requires_all_reduce(last)


def last_microbatch(model: nn.Module, last: bool) -> None:
    """Says whether the next backward of a parallelized model is the last of its step.

    Only the last one sends what can wait until then. A loop without gradient accumulation need not call this; one with
    it must, because under DDP a second backward would sum again what the first has summed.
    """
    sync = getattr(model, "gradient_sync", None)  # a model in a world of one has none
    if sync is not None:
        sync.set_last(last)
