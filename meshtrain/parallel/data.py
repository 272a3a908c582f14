"""Data parallelism: DDP over `dp_replicate`, FSDP over `dp_shard`, HSDP over both.

Gradients are *summed* over the data ranks, never averaged: the loss of a rank is its share of a sum that was divided by
a global count before, so the sum is the gradient of the global mean whatever each rank holds.

DDP is ours: parameters keep their names and may themselves be shards on other axes, which torch's wrapper does not
allow. FSDP and HSDP are torch's `fully_shard`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from meshtrain.mesh import Mesh
from meshtrain.numerics import compute_dtype, master_dtype
from meshtrain.parallel.exchange import all_gather, reduce_scatter
from meshtrain.parallel.torch_private import accumulates, end_fsdp_backward
from meshtrain.parallel.waiting import Waiting

REPLICAS = "dp_replicate"
BUCKET_BYTES = 25 * 2**20  # as torch's DDP: large enough for bandwidth, small enough to start early
SMALL = 2**21  # a block of fewer parameters than this (4 MiB in 16 bits) is not worth a gather of its own


class Replicas:
    """DDP: sums the gradients of parameters of which every rank of a group holds all.

    Gradients live in a few flat buckets. As soon as the last gradient of a bucket is there its all-reduce starts, and
    the backward of earlier layers goes on meanwhile (Li et al., https://arxiv.org/abs/2006.15704). The end of the
    backward waits for all of them, so that an ordinary loop needs no call of its own.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, waiting: Waiting) -> None:
        """
        Args:
            model: its parameters in the order of the forward; the backward, and so the buckets, go the other way round.
            mesh: whose ranks along `dp_replicate` hold copies.
            waiting: entered while the end of the backward waits.
        """
        self.group = mesh.group(REPLICAS)
        self.size, self.traffic = mesh.size(REPLICAS), mesh.traffic
        self.waiting = waiting
        self._model = model
        self._last = True
        self._begun = False
        self._works: list[dist.Work] = []
        self._buckets = [_Bucket(some) for some in _split([p for p in model.parameters() if p.requires_grad][::-1])]
        for bucket in self._buckets:
            for parameter in bucket.views:
                parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket))
        when_backward_begins(model, self._begin)

    def set_last(self, last: bool) -> None:
        """Whether the next backward is the last of its step, and so the one that sums."""
        self._abandon()
        self._last = last

    def reduce(self) -> None:
        """Sums now, after backwards none of which was the last."""
        self._finish()

    def _begin(self) -> None:
        self._abandon()
        if self._last and any(accumulates(p) for bucket in self._buckets for p in bucket.views):
            self._refuse_unknown()
            self._begun = True
            Variable._execution_engine.queue_callback(self._finish)

    def _ready(self, bucket: "_Bucket", parameter: Tensor) -> None:
        bucket.adopt(parameter)
        if not self._last:
            return
        if not self._begun:  # a backward of something else than the model's output
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
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter not in known:
                raise RuntimeError(
                    f"{name} was unfrozen or replaced after parallelize, so its gradient would not be summed over "
                    f"{REPLICAS}: unfreeze before parallelize, and use load_state_dict without assign=True"
                )

    def _start_full_buckets(self, all_of_them: bool = False) -> None:
        """Starts all-reduces, bucket by bucket in one fixed order: every rank's first is the same bucket."""
        while len(self._works) < len(self._buckets):
            bucket = self._buckets[len(self._works)]
            if bucket.missing and not all_of_them:
                return
            for parameter in bucket.views:
                bucket.adopt(parameter)
            self.traffic.add(REPLICAS, "all_reduce", 2 * bucket.flat.nbytes * (self.size - 1) / self.size)
            self._start(bucket.flat)

    def _start(self, flat: Tensor) -> None:
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None  # this rank is in the group
        self._works.append(work)

    def _finish(self) -> None:
        """The end of the backward: what no gradient came for is summed too, because another rank may have one."""
        self._start_full_buckets(all_of_them=True)
        with self.waiting():
            for work in self._works:
                work.wait()
        self._works.clear()
        self._begun = False
        for bucket in self._buckets:
            bucket.missing = set(bucket.views)

    def _abandon(self) -> None:
        """After a last backward that an exception has ended: makes the sums that are left of it, of NaN.

        Every rank then goes on with the same sum next, wherever each of them had the exception; and where one had none
        its gradients of that step are not finite, as this rank's part is missing in them. Gradients begin anew.
        """
        if not self._begun:
            return
        for bucket in self._buckets[len(self._works) :]:
            self._start(torch.full_like(bucket.flat, torch.nan))
        self._finish()
        for bucket in self._buckets:
            bucket.flat.zero_()


class _Bucket:
    """Some parameters, and one flat tensor that holds the gradients of this rank's parts, one after the other."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.missing: set[Tensor] = set(parameters)  # whose gradients are not there yet in a last backward
        parts = [_local(p.detach()) for p in parameters]
        self.flat = torch.zeros(sum(p.numel() for p in parts), dtype=parts[0].dtype, device=parts[0].device)
        views = self.flat.split([p.numel() for p in parts])
        held = zip(parameters, views, parts, strict=True)
        self.views: dict[Tensor, Tensor] = {p: _like(p, view.view_as(part)) for p, view, part in held}

    def adopt(self, parameter: Tensor) -> None:
        """Moves a gradient that autograd or the user's `zero_grad` put elsewhere into the flat tensor, to be its view:
        so there is no second memory for gradients, and further microbatches add to it in place."""
        view = self.views[parameter]
        if parameter.grad is view:
            return
        if parameter.grad is None:
            _local(view).zero_()
        elif _local(parameter.grad).data_ptr() != _local(view).data_ptr():
            _local(view).copy_(_local(parameter.grad))
        parameter.grad = view


def when_backward_begins(model: nn.Module, act: Callable[[], None]) -> None:
    """Calls `act` once at the start of each backward of a model's outputs, also of one after a failed one."""
    latest = -1

    def in_backward(grad: Tensor) -> None:
        nonlocal latest
        current = torch._C._current_graph_task_id()
        if current != latest:
            latest = current
            act()

    def after_forward(model: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(in_backward)

    model.register_forward_hook(after_forward)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """A gradient of this parameter on this memory."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _split(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Neighbouring parameters of one type and device, up to `BUCKET_BYTES` together."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        fits = buckets and buckets[-1][0].dtype == p.dtype and buckets[-1][0].device == p.device
        own = _local(p.detach()).nbytes
        if not fits or size + own > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += own
    return buckets


def replicate(model: nn.Module, mesh: Mesh, waiting: Waiting = nullcontext) -> None:
    """DDP over `dp_replicate`: from now on every backward ends with summed gradients."""
    sync_when_last(model, Replicas(model, mesh, waiting))


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
    sync_when_last(model, Shards(model, reshard_after_forward))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(_AllGather(mesh, waiting))
            module.set_custom_reduce_scatter(_ReduceScatter(mesh, waiting))
            if mesh.size(REPLICAS) > 1:
                module.set_all_reduce_hook(partial(_count_all_reduce, mesh))
            gathered = module._get_fsdp_state()._fsdp_param_group
            if gathered is not None:  # all parameters may be in blocks inside
                gathered.post_backward = partial(_send_all, gathered, gathered.post_backward)  # type: ignore[method-assign]


def _send_all(unit: FSDPParamGroup, post_backward: Callable[[], None], *unused: Any) -> None:
    """FSDP's `post_backward` of a unit, with a gradient for every parameter: zeros where the model did not use it.

    FSDP sends those that are there, one after the other in one tensor: of ranks, or in HSDP of microbatches, that have
    used different parameters it would add one's gradient to another's. In 16 bits all are of one type then.
    """
    gathered = [p for p in unit.fsdp_params if hasattr(p, "_unsharded_param")]
    if not gathered:
        return  # no forward has run of it
    trained = [p for p in gathered if unit.reduce_grads and p._unsharded_param.requires_grad]
    widened = any(p.unsharded_accumulated_grad is not None for p in trained)
    for p in trained:
        if p.unsharded_accumulated_grad is None:
            if p._unsharded_param.grad is None:
                p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
            if widened:
                p.to_accumulated_grad_if_needed()
    post_backward()


def hidden_waits(mesh: Mesh) -> tuple[str, ...]:
    """The phases of a step in which torch's FSDP waits for other ranks, unseen by `waiting`."""
    if mesh.size("dp_shard") == 1:
        return ()
    if mesh.device_type != "cpu":
        return "forward", "backward"  # its own streams
    return ("backward",) if mesh.size(REPLICAS) > 1 else ()  # HSDP's sum over the copies


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
    """FSDP's all-gather, counted. On a CPU it blocks, so the time in it is time that the rank waits; on a GPU it runs
    on a stream of its own."""

    def __init__(self, mesh: Mesh, waiting: Waiting) -> None:
        self._mesh, self._waiting = mesh, waiting

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        _count(self._mesh, "all_gather", output_tensor)
        if self._mesh.device_type != "cpu":
            return super().__call__(output_tensor, input_tensor, group, async_op)
        with self._waiting():
            all_gather(output_tensor, input_tensor, group)
        return None


class _ReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter, in the same way. `op` is always the sum, because `shard` says so to FSDP."""

    def __init__(self, mesh: Mesh, waiting: Waiting) -> None:
        self._mesh, self._waiting = mesh, waiting

    def __call__(  # type: ignore[override]  # FSDP asks for no work where there is nothing to wait for
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        _count(self._mesh, "reduce_scatter", input_tensor)
        if self._mesh.device_type != "cpu":
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        with self._waiting():
            reduce_scatter(output_tensor, input_tensor, group)
        return None


def _count(mesh: Mesh, kind: str, whole: Tensor) -> None:
    mesh.traffic.add("dp_shard", kind, whole.nbytes * (1 - 1 / mesh.size("dp_shard")))


def _count_all_reduce(mesh: Mesh, shards: Tensor) -> None:
    """HSDP's sum over `dp_replicate`, which FSDP has just made of these gradients."""
    mesh.traffic.add(REPLICAS, "all_reduce", 2 * shards.nbytes * (1 - 1 / mesh.size(REPLICAS)))


class Shards:
    """When FSDP and HSDP send gradients.

    FSDP that frees parameters after the forward frees the full gradients after every backward too, which is what keeps
    its memory small: it reduce-scatters in every microbatch, and HSDP sums the shards over `dp_replicate` in the last.
    FSDP that keeps its parameters keeps its gradients as well, and sends them once a step.
    """

    def __init__(self, model: FSDPModule, reshard_after_forward: bool) -> None:
        self._model = model
        self._keeps = not reshard_after_forward
        self._begun = False
        assert isinstance(model, nn.Module)
        when_backward_begins(model, self._begin)
        model.register_forward_pre_hook(self._abandon, prepend=True)  # before FSDP's own

    def _begin(self) -> None:
        self._begun = True
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._begun = False

    def _abandon(self, *unused: Any) -> None:
        """After a backward that an exception has ended: lets go what FSDP has under way, or it would send no more."""
        if self._begun and torch._C._current_graph_task_id() < 0:  # and no forward that runs again in the backward
            self._begun = False
            if not hasattr(self._model, "reset_iter_state"):
                raise RuntimeError("the FSDP of this torch cannot go on after a backward that failed: use torch 2.13")
            self._model.reset_iter_state()

    def set_last(self, last: bool) -> None:
        """Whether the next backward is the last of its step."""
        if self._keeps:
            self._model.set_requires_gradient_sync(last)
            self._model.set_reshard_after_backward(last)
            self._model.set_is_last_backward(last)
        else:
            self._model.set_requires_all_reduce(last)

    def reduce(self) -> None:
        """Sends now, after backwards none of which was the last: what FSDP itself does at the end of the last one."""
        assert self._keeps  # otherwise every backward has sent its own
        self.set_last(True)
        end_fsdp_backward(self._model)

    def accumulate(self) -> None:
        """Adds gradients that came without a backward of the model to those in float32, as the end of one does."""
        end_fsdp_backward(self._model)


class GradientSync(Protocol):
    """Something that sums gradients when the last backward of a step ends, or when it is told to."""

    def set_last(self, last: bool) -> None: ...

    def reduce(self) -> None: ...


def sync_when_last(model: nn.Module, sync: GradientSync) -> None:
    """`last_microbatch(model, ...)` tells this one too."""
    syncs = getattr(model, "gradient_syncs", ())
    model.gradient_syncs = (*syncs, sync)  # type: ignore[assignment]


def last_microbatch(model: nn.Module, last: bool) -> None:
    """Says whether the next backward of a parallelized model is the last of its step.

    Only the last one sends what can wait until then. A loop without gradient accumulation need not call this; one with
    it must, because a second backward would sum again what the first has summed.
    """
    for sync in getattr(model, "gradient_syncs", ()):  # a model in a world of one has none
        sync.set_last(last)


def accumulate_gradients(model: nn.Module) -> None:
    """Takes weight gradients that were computed after their backward; the next ones would be added in 16 bits."""
    for sync in getattr(model, "gradient_syncs", ()):
        if isinstance(sync, Shards):
            sync.accumulate()


def reduce_gradients(model: nn.Module) -> None:
    """Sums the gradients of all backwards of a step, which were told that none of them is the last."""
    for sync in getattr(model, "gradient_syncs", ()):
        sync.reduce()
