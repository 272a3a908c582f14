"""FSDP: fully sharded data parallelism over `dp_shard` and `cp`; HSDP if `dp_replicate` is also
larger than 1.

Uses torch's `fully_shard` (Zhao et al., https://arxiv.org/abs/2304.11277), with sums instead of
means (see `ddp.py`) and its own collectives on CPUs.
"""

import math
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from meshtrain.errors import AgreedError
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import MeasuredWait
from meshtrain.parallel.ddp import REPLICATE
from meshtrain.parallel.expert import dispatched_modules
from meshtrain.parallel.gloo_collectives import all_gather, reduce_scatter
from meshtrain.parallel.grad_sync import GradientSync, add_gradient_sync, when_backward_begins
from meshtrain.parallel.mixed_precision import (
    compute_dtype,
    master_dtype,
    message_dtype,
    state_parameters,
)
from meshtrain.parallel.sharding import expert_shard_dim
from meshtrain.parallel.torch_private import (
    at_end_of_backward,
    current_backward,
    end_fsdp_backward,
    fsdp_collectives,
    send_unused_as_zeros,
)

SHARD = "fsdp"  # the axis over which parameters are sharded; REPLICATE has copies of the shards
# the same for experts distributed over `ep`
EXPERT_SHARD = "efsdp"
EXPERT_REPLICATE = "edp_replicate"
# devices with a separate stream for gathers; on others an early start only costs memory
PREFETCHED_ON = ("cuda",)
# a block with fewer parameters (4 MiB in 16 bits) is not worth its own gather
MIN_UNIT_SIZE = 2**21


def apply_fsdp(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: Mesh,
    *,
    precision: str = "float32",
    reduce_precision: str | None = None,
    reshard_after_forward: bool = True,
    registered_memory: bool = False,
    measured_wait: MeasuredWait = nullcontext,
) -> None:
    """Shards a model's parameters, so that each backward of it ends with sharded sums of gradients.

    Each block gathers its own parameters; small blocks join the next; blocks that share some stay
    with the model.

    Args:
        model: on any device, meta included. blocks: its modules in execution order.
        reduce_precision: dtype of gradient messages, if it differs from the dtype of accumulation.
        reshard_after_forward: frees a block's parameters after its forward and gathers them again
            for its backward.
        registered_memory: puts messages in memory registered with the backend (user buffer
            registration), if it supports that for this device: NCCL on GPUs with multicast.
    """
    types = MixedPrecisionPolicy(
        param_dtype=compute_dtype(precision), reduce_dtype=master_dtype(precision)
    )
    # Experts over `ep` are units of their own, over the ranks that have the same experts; unsharded
    # ones are ignored.
    experts = dispatched_modules(model)
    shards_experts = mesh.size(EXPERT_SHARD) > 1
    of_experts = {parameter for module in experts for parameter in module.parameters()}
    ignored = state_parameters(model)
    if not shards_experts:
        ignored |= of_experts
    units = _group_into_units(model, blocks, of_experts | ignored)

    # The backward of the last unit follows directly after its forward: freed in between, it would
    # be gathered twice.
    last_unit = units[-1] if units else []
    kept = {module for block in last_unit for module in block.modules()}

    # Inner units first, as `fully_shard` needs it: experts, blocks, the rest of the model.
    if shards_experts:
        for module in experts:
            reshard = reshard_after_forward and module not in kept
            _shard_experts(module, mesh, types, reshard=reshard)
    dims = mesh.submesh(REPLICATE, SHARD)
    shard = partial(fully_shard, mesh=dims, mp_policy=types, ignored_params=ignored)
    for unit in units:
        shard(unit, reshard_after_forward=reshard_after_forward and unit is not last_unit)
    shard(model, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)

    add_gradient_sync(model, FSDPGradSync(model, reshard_after_forward))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            is_experts = module in experts
            _set_communication(
                module,
                mesh,
                shard=EXPERT_SHARD if is_experts else SHARD,
                replicate=EXPERT_REPLICATE if is_experts else REPLICATE,
                message=message_dtype(precision, reduce_precision),
                registered_memory=registered_memory,
                measured_wait=measured_wait,
            )
    _set_prefetch(model, units, forward=mesh.device_type in PREFETCHED_ON)


def _set_communication(
    module: FSDPModule,
    mesh: Mesh,
    *,
    shard: str,
    replicate: str,
    message: torch.dtype | None,
    registered_memory: bool,
    measured_wait: MeasuredWait,
) -> None:
    """Makes a unit sum gradients instead of averaging them, by collectives that are counted.

    `shard`, `replicate`: its axes. `message`: dtype of gradient messages; None: the gradients'.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    memory: Any = fsdp_collectives.DefaultAllocMixin()
    if registered_memory:
        group = mesh.group(shard)
        assert group is not None  # the axis is larger than 1
        memory = fsdp_collectives.ProcessGroupAllocMixin(group)
    module.set_custom_all_gather(_AllGather(mesh, shard, measured_wait, memory))
    module.set_custom_reduce_scatter(_ReduceScatter(mesh, shard, measured_wait, memory, message))
    if mesh.size(replicate) > 1:
        module.set_all_reduce_hook(partial(_count_all_reduce, mesh, replicate))
    send_unused_as_zeros(module)


def _set_prefetch(model: FSDPModule, units: list[list[nn.Module]], forward: bool) -> None:
    """Sets which units are prefetched: one block with its experts, in forward and in backward.

    forward:   block i gathers its experts and block i + 1
    backward:  block i gathers its experts, and these (or else it) gather block i - 1
    """
    blocks: list[FSDPModule] = [unit[0] for unit in units]  # type: ignore[misc]  # the members share one state
    # Explicit also in backward: before the first unit, torch would prefetch the last unit of the
    # previous microbatch. The first unit names the model, which is already gathered, because with
    # an empty list torch would choose.
    previous: FSDPModule = model
    if forward:
        model.set_modules_to_forward_prefetch(blocks[:1])
    for i, (unit, block) in enumerate(zip(units, blocks, strict=True)):
        experts = _inner_units(unit)
        if forward:  # all by the block, whose experts may be recomputed in backward
            following = blocks[i + 1 : i + 2]
            block.set_modules_to_forward_prefetch([*experts, *following])
        block.set_modules_to_backward_prefetch(experts[::-1] or [previous])
        for module in experts:
            module.set_modules_to_backward_prefetch([previous])
        previous = block


def _inner_units(unit: list[nn.Module]) -> list[FSDPModule]:
    """The units within one, which are experts, in the order of the model."""
    inner: list[FSDPModule] = []
    for member in unit:
        for module in member.modules():
            if isinstance(module, FSDPModule) and module not in unit and module not in inner:
                inner.append(module)
    return inner


def _shard_experts(
    module: nn.Module, mesh: Mesh, types: MixedPrecisionPolicy, reshard: bool
) -> None:
    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(expert_shard_dim(parameter.shape, mesh.size("ep"), mesh.size(EXPERT_SHARD)))

    # The weights of a token's experts are float32 inputs that must not be rounded.
    types = replace(types, cast_forward_inputs=False)
    dims = mesh.submesh(EXPERT_REPLICATE, EXPERT_SHARD)
    fully_shard(
        module,
        mesh=dims,
        mp_policy=types,
        reshard_after_forward=reshard,
        shard_placement_fn=placement,
    )


def unmeasured_wait_phases(mesh: Mesh) -> tuple[str, ...]:
    """The phases of a step in which torch's FSDP waits for other ranks without entering
    `measured_wait`."""
    if not mesh.uses_fsdp:
        return ()
    if mesh.device_type != "cpu":
        return "forward", "backward"  # FSDP's own streams
    # On a CPU only HSDP's all-reduce over replicas.
    replicates_experts = mesh.size(EXPERT_REPLICATE) > 1 and mesh.size(EXPERT_SHARD) > 1
    if mesh.size(REPLICATE) > 1 or replicates_experts:
        return ("backward",)
    return ()


def _group_into_units(
    model: nn.Module, blocks: list[nn.Module], others: Collection[nn.Parameter] = ()
) -> list[list[nn.Module]]:
    """The blocks that gather their parameters together. `others`: parameters that belong to no unit
    of blocks."""
    sharing = _sharing_blocks(model, blocks, others)
    units: list[list[nn.Module]] = []
    unit: list[nn.Module] = []
    size = 0  # elements of `unit`
    for i, block in enumerate(blocks):
        own = [p for p in block.parameters() if p not in others]
        if i in sharing or block is model or not own:
            continue
        unit.append(block)
        size += sum(p.numel() for p in own)
        if size >= MIN_UNIT_SIZE:
            units.append(unit)
            unit = []
            size = 0
    return units  # small blocks at the end stay in the model's unit


def _sharing_blocks(
    model: nn.Module, blocks: list[nn.Module], others: Collection[nn.Parameter]
) -> set[int]:
    """The indices of blocks that share a parameter with another one, or with a module outside of
    all blocks: they stay in the model's unit."""
    users: dict[nn.Parameter, set[int]] = {}  # parameter -> its blocks; -1: outside
    inside = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        if module not in inside:
            for parameter in module.parameters(recurse=False):
                users[parameter] = {-1}
    for i, block in enumerate(blocks):
        for parameter in block.parameters():
            if parameter not in others:
                users.setdefault(parameter, set()).add(i)
    sharing = set[int]()
    for indices in users.values():
        if len(indices) > 1:
            sharing |= indices
    return sharing


class _AllGather(fsdp_collectives.DefaultAllGather):
    """FSDP's all-gather, counted. On a CPU it blocks, so its time counts as waiting; on a GPU it
    has its own stream."""

    def __init__(self, mesh: Mesh, axis: str, measured_wait: MeasuredWait, memory: Any) -> None:
        self._mesh = mesh
        self._axis = axis
        self._measured_wait = measured_wait
        self._unit = mesh.gather_order.units
        mesh.gather_order.units += 1
        self.allocate = memory.allocate  # type: ignore[method-assign]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        _count(self._mesh, self._axis, "all_gather", output_tensor)
        self._mesh.gather_order.add(self._unit)
        if self._mesh.device_type != "cpu":
            return super().__call__(output_tensor, input_tensor, group, async_op)
        with self._measured_wait():
            all_gather(output_tensor, input_tensor, group)
        return None


class _ReduceScatter(fsdp_collectives.DefaultReduceScatter):
    """FSDP's reduce-scatter, likewise. `op` is always the sum, because `apply_fsdp` sets that.

    With FSDP's own `reduce_dtype`, microbatches would be accumulated in the dtype of the message.
    Here only the message and its reduced result, which HSDP all-reduces over the replicas, have
    that dtype.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis: str,
        measured_wait: MeasuredWait,
        memory: Any,
        dtype: torch.dtype | None,
    ) -> None:
        """`dtype`: that of messages; None: that of the gradients."""
        self._mesh = mesh
        self._axis = axis
        self._measured_wait = measured_wait
        self._memory = memory
        self._dtype = dtype
        self._input_numel = 0  # elements of an input that has no output yet

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for the input of a reduction, and then for its output: FSDP calls it in turn for
        both (`foreach_reduce`, as read in torch 2.13), and does not say for which.

        A backward that fails in between breaks the turn, so the size decides: all reductions of a
        unit have one size, and an output has one n-th of its input's elements.
        """
        numel = math.prod(map(int, size))
        is_output = numel * self._mesh.size(self._axis) == self._input_numel
        if is_output:
            self._input_numel = 0
            dtype = self._dtype or dtype
        else:
            self._input_numel = numel
        return self._memory.allocate(size, dtype=dtype, device=device)

    def __call__(  # type: ignore[override]  # FSDP accepts None if there is nothing to wait for
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        # otherwise `allocate` has taken the one for the other
        assert output_tensor.dtype == (self._dtype or input_tensor.dtype)
        input_tensor = input_tensor.to(output_tensor.dtype)
        _count(self._mesh, self._axis, "reduce_scatter", input_tensor)
        if self._mesh.device_type != "cpu":
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        with self._measured_wait():
            reduce_scatter(output_tensor, input_tensor, group)
        return None


def _count(mesh: Mesh, axis: str, kind: str, whole: Tensor) -> None:
    if axis == SHARD and mesh.size("cp") == 1:
        axis = "dp_shard"  # the name of the mesh's dim
    mesh.comm_bytes.add(axis, kind, whole.nbytes * (1 - 1 / mesh.size(axis)))


def _count_all_reduce(mesh: Mesh, axis: str, shards: Tensor) -> None:
    """Counts HSDP's all-reduce over the replicas, which FSDP has just run on these gradients."""
    mesh.comm_bytes.add(axis, "all_reduce", 2 * shards.nbytes * (1 - 1 / mesh.size(axis)))


class FSDPGradSync(GradientSync):
    """When FSDP and HSDP send gradients. If parameters are freed after the forward, so are full
    gradients after every backward: every microbatch reduce-scatters them, and in the last HSDP
    all-reduces the shards over `dp_replicate`. If parameters stay gathered, full gradients are kept
    too, and sent once per step."""

    def __init__(self, model: FSDPModule, reshard_after_forward: bool) -> None:
        self._model = model
        self._keeps = not reshard_after_forward
        self._in_backward = False
        self._last = True  # whether the next backward is the last of its step
        self._sent = False  # whether the last backward of this step has ended
        assert isinstance(model, nn.Module)
        when_backward_begins(model, self._begin)
        model.register_forward_pre_hook(self._abandon, prepend=True)  # before FSDP's own

    def _begin(self) -> None:
        self._in_backward = True
        at_end_of_backward(self._end)

    def _end(self) -> None:
        self._in_backward = False
        self._sent = self._last

    def _abandon(self, *unused: Any) -> None:
        """After an exception in a backward: resets FSDP's state in progress, or it would send no
        more gradients."""
        is_recomputation = current_backward() >= 0
        if not self._in_backward or is_recomputation:
            return
        self._in_backward = False
        if not hasattr(self._model, "reset_iter_state"):
            raise RuntimeError(
                "the FSDP of this torch cannot go on after a backward that failed: use torch 2.13"
            )
        self._model.reset_iter_state()

    def set_is_last_backward(self, last: bool) -> None:
        self._last = last
        self._sent = False
        if self._keeps:
            self._model.set_requires_gradient_sync(last)
            self._model.set_reshard_after_backward(last)
            # its end then waits for its messages
            self._model.set_is_last_backward(last and self.waits)
        else:
            self._model.set_requires_all_reduce(last)

    def start_reduce(self) -> None:
        """Sends gradients if no backward was marked as the last: what FSDP does at the end of the
        last backward."""
        assert self._keeps  # otherwise every backward has sent its gradients
        if not self._sent:
            self.set_is_last_backward(True)
            end_fsdp_backward(self._model)
            self._sent = True

    def finish_reduce(self) -> None:
        """Repeats the end of the last backward, with nothing to send."""
        self._model.set_requires_gradient_sync(False)
        self._model.set_is_last_backward(True)
        end_fsdp_backward(self._model)

    def accumulate(self) -> None:
        """Adds gradients computed outside a backward to the float32 ones, as the end of a backward
        does."""
        end_fsdp_backward(self._model)


def order_sums(mesh: Mesh, like: Tensor) -> Tensor:
    """This rank's addends for `require_one_order`, (3,): 1, a number that stands for the order in
    which it has gathered units in this step, and its square. `like`: a scalar."""
    order = mesh.gather_order.value
    # Filled on the device: copying a number from the host would wait for all work queued on the
    # device.
    addends = [torch.full_like(like, float(number)) for number in (1, order, order**2)]
    return torch.stack(addends)


def require_one_order(sums: Tensor, *, step: int) -> None:
    """Raises AgreedError: ranks that share parameters gathered their units in different orders.

    `sums`: of `order_sums` over n ranks, on the host, of whole numbers x_i:

        n sum(x_i^2) - (sum x_i)^2 = sum over pairs of (x_i - x_j)^2

    It is 0 where all are equal. Where k of them differ from the others, it is k (n - k) at least,
    and so n - 1 or more.
    """
    ranks, total, squares = sums.tolist()
    apart = ranks * squares - total**2
    if apart > ranks / 2:
        raise AgreedError(
            f"step {step}: the model's forward ran its blocks in another order on some ranks, or "
            "others of them. With dp_shard or cp the ranks gather a block's weights together, and "
            "so got a mixture of those of two blocks: choose blocks by the step and the seed, the "
            "same on all ranks, and not by a rank's samples, or use dp_replicate. No checkpoint "
            "has this step"
        )
