"""All-gather, reduce-scatter, all-reduce and all-to-all in a model's forward and backward over one
axis of the mesh.

All communication of a forward goes through this module, which counts the bytes sent. Each
collective is also a torch operator, which torch.compile and selective recomputation can handle.
Operators take no Python objects, so they find their `AxisGroup` by the name of its process group.
All of them act on the first dim of contiguous tensors.
"""

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshtrain.errors import InputError
from meshtrain.layout import CONTEXT_AXES, EXPERT_AXES
from meshtrain.mesh import Mesh
from meshtrain.parallel import gloo_collectives as gloo
from meshtrain.parallel.torch_private import (
    enable_symmetric_memory,
    nvlink_neighbours,
    try_symmetric_memory,
)

# entered while a rank waits for others, to measure the time
MeasuredWait = Callable[[], AbstractContextManager]

# By the process group's name (`_name`), as in torch. An entry lives as long as the layers that use
# it.
_axis_groups: WeakValueDictionary[str, "AxisGroup"] = WeakValueDictionary()


class AsyncResult:
    """A collective in progress."""

    def __init__(
        self, axis_group: "AxisGroup", works: Sequence[dist.Work], result: Callable[[], Any]
    ) -> None:
        self.group = axis_group.group
        self._measured_wait = axis_group.measured_wait
        self._works = works
        self._result = result

    def wait(self) -> Any:
        """Waits for the result, a tensor or a list of them, and returns it (on CUDA only the
        current stream waits)."""
        with self._measured_wait():
            gloo.wait(self._works, self.group)
            return self._result()


class AxisGroup:
    """This rank's process group over one axis, and the collectives over it.

    Attributes:
        size: the number t of ranks. index: this rank's position among them.
        name: the name by which operators find it.
        fused: whether products and collectives run as fused kernels of torch's symmetric memory
            (CUDA only).
        choice: a message that says whether `fuse_if_possible` fused them, and why not.
    """

    def __init__(self, mesh: Mesh, axis: str) -> None:
        """Raises ValueError: the axis has size 1."""
        group = mesh.group(axis)
        if group is None:
            raise ValueError(
                f"the axis {axis} has size 1 in {mesh.layout}: there is nobody to talk to"
            )
        # the axis under which bytes are counted
        self.axis = "cp" if axis in CONTEXT_AXES else axis
        self.group = group
        self.comm_bytes = mesh.comm_bytes
        self.size = mesh.size(axis)
        self.index = mesh.index(axis)
        self.on_cpu = mesh.device_type == "cpu"
        self.measured_wait: MeasuredWait = nullcontext
        self.fused = False
        self.choice = ""
        self.name = _name(group, axis)
        _axis_groups[self.name] = self

    def fuse(self) -> None:
        """Enables fused kernels for the products and collectives of sequence parallelism. Raises
        InputError: on CPU."""
        if self.on_cpu:
            raise InputError("parallel.symmetric_memory needs GPUs: leave it false on CPUs")
        enable_symmetric_memory(self.group)
        self.fused = True

    def fuse_if_possible(self, device: torch.device) -> None:
        """`fuse` if all ranks of the group support it. All of them call this."""
        gpu, linked = nvlink_neighbours(device)
        own = Endpoint(socket.gethostname(), gpu, linked)
        problem = symmetric_memory_problem(_of_all_ranks(self, own))
        # All ranks must have passed the first half of the test before any enters the second one,
        # which is collective.
        for together in (False, True):
            if problem is None:
                problems = _of_all_ranks(self, try_symmetric_memory(self.group, together))
                problem = next(filter(None, problems), None)
        self.choice = "on" if problem is None else f"off: {problem}"
        self.fused = problem is None

    def gather_matmul(
        self, part: Tensor, factors: Sequence[Tensor], keep: bool
    ) -> tuple[Any, Sequence[Tensor]]:
        """All-gathers (m, d), times (d, f) of each factor: all (t·m, d), or None without `keep`,
        and each (t·m, f). One kernel multiplies parts as they arrive."""
        self._count("all_gather", part, times=self.size)
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        return fused(part.contiguous(), list(factors), 0, self.group.group_name, return_A=keep)

    def matmul_scatter(self, x: Tensor, factor: Tensor) -> Tensor:
        """x (t·m, d) times (d, f), summed over the ranks -> this rank's part (m, f)."""
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        part = fused(x.contiguous(), factor, "sum", 0, self.group.group_name)
        self._count("reduce_scatter", part, times=self.size)
        return part

    def start_all_gather(self, part: Tensor) -> AsyncResult:
        """(m, ...) of every rank -> (t·m, ...)."""
        rows = self.size * part.shape[0]
        output = part.new_empty(rows, *part.shape[1:])
        self._count("all_gather", output)
        if self.on_cpu:
            works = gloo.start_all_gather(output, part, self.group)
        else:
            work = dist.all_gather_into_tensor(output, part, group=self.group, async_op=True)
            works = _started(work)
        return AsyncResult(self, works, lambda: output)

    def start_reduce_scatter(self, whole: Tensor) -> AsyncResult:
        """(t·m, ...) of every rank -> this rank's part of their sum (m, ...)."""
        self._count("reduce_scatter", whole)
        rows = whole.shape[0] // self.size
        output = whole.new_empty(rows, *whole.shape[1:])
        if not self.on_cpu:
            work = dist.reduce_scatter_tensor(output, whole, group=self.group, async_op=True)
            return AsyncResult(self, _started(work), lambda: output)
        # What arrives is added up by whoever waits for the result.
        parts = whole.chunk(self.size)
        works, received = gloo.start_reduce_scatter(parts, self.group)
        return AsyncResult(self, works, lambda: gloo.ordered_sum(received, output))

    def start_all_reduce(self, tensor: Tensor, *, overwrite: bool = False) -> AsyncResult:
        """The sum of a tensor over the ranks. `overwrite`: it may overwrite `tensor`, which has no
        other use."""
        self._count("all_reduce", tensor, times=2)
        if not self.on_cpu:
            # Backends sum in place, and others may still read the tensor.
            output = tensor if overwrite else tensor.clone()
            work = dist.all_reduce(output, group=self.group, async_op=True)
            return AsyncResult(self, _started(work), lambda: output)
        # A reduce-scatter, and then an all-gather of the sums: see `_gather_sums`.
        parts = tensor.flatten().tensor_split(self.size)
        works, received = gloo.start_reduce_scatter(parts, self.group)
        return AsyncResult(self, works, lambda: self._gather_sums(received, tensor))

    def maximum(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over the ranks."""
        return self.start_all_gather(tensor[None]).wait().amax(0)

    def start_all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> AsyncResult:
        """Sends parts[i] (m, ...) to rank i and receives sizes[i] rows from it -> the list of
        received tensors.

        Empty parts send no message. All ranks have to call it, in the same order.
        """
        output, works = self._exchange(parts, sizes)
        received = list(output.split(list(sizes)))
        return AsyncResult(self, works, lambda: received)

    def start_all_to_all_single(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> AsyncResult:
        """`start_all_to_all` from one tensor into one tensor: send[i] rows of x go to rank i, in
        order."""
        x = x.contiguous()
        output, works = self._exchange(x.split(list(send)), receive, whole=x)
        return AsyncResult(self, works, lambda: output)

    def _exchange(
        self, parts: Sequence[Tensor], sizes: Sequence[int], whole: Tensor | None = None
    ) -> tuple[Tensor, list[dist.Work]]:
        """`whole`: the concatenated parts, if they are already contiguous."""
        output = parts[0].new_empty(sum(sizes), *parts[0].shape[1:])
        sent = sum(part.nbytes for rank, part in enumerate(parts) if rank != self.index)
        self.comm_bytes.add(self.axis, "all_to_all", sent)
        if self.on_cpu:
            parts = [part.contiguous() for part in parts]
            received = output.split(list(sizes))
            received[self.index].copy_(parts[self.index])
            return output, gloo.start_exchange(parts, received, self.group)
        if whole is None:
            whole = torch.cat(list(parts))
        work = dist.all_to_all_single(
            output,
            whole,
            output_split_sizes=list(sizes),
            input_split_sizes=[len(part) for part in parts],
            group=self.group,
            async_op=True,
        )
        return output, _started(work)

    def _gather_sums(self, received: Sequence[Tensor], tensor: Tensor) -> Tensor:
        """The second half of an all-reduce: every rank sums its part and sends the sum to all
        others."""
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        parts = output.view(-1).tensor_split(self.size)
        mine = gloo.ordered_sum(received, parts[self.index])
        gloo.wait(gloo.start_exchange([mine] * self.size, parts, self.group), self.group)
        return output

    def _count(self, kind: str, whole: Tensor, times: int = 1) -> None:
        sent = times * whole.numel() * whole.element_size() * (self.size - 1) / self.size
        self.comm_bytes.add(self.axis, kind, sent)


def _of_all_ranks(axis_group: AxisGroup, value: Any) -> list[Any]:
    """The values of all ranks, which may be any Python objects."""
    values: list[Any] = [None] * axis_group.size
    dist.all_gather_object(values, value, group=axis_group.group)
    return values


class Endpoint(NamedTuple):
    """The host and GPU of a rank."""

    host: str
    gpu: str  # a unique identifier
    # GPUs of this host that it reaches over NVLink, among those visible to this rank
    linked: frozenset[str]


def symmetric_memory_problem(ranks: Sequence[Endpoint]) -> str | None:
    """A message why ranks cannot access each other's memory over NVLink; None if they can."""
    if len({rank.host for rank in ranks}) > 1:
        return "the ranks of tp are on several hosts"
    for one in ranks:
        for other in ranks:
            if other != one and other.gpu not in one.linked:
                return f"GPUs {one.gpu} and {other.gpu} of {one.host} have no NVLink that is known"
    return None


def axis_group(mesh: Mesh, axis: str) -> AxisGroup:
    """This rank's `AxisGroup` over an axis of the mesh: the existing one, or a new one."""
    group = mesh.group(axis)
    if group is not None:
        existing = _axis_groups.get(_name(group, axis))
        # Another mesh of the same layout may have the group, too, and counts for itself.
        if existing is not None and existing.comm_bytes is mesh.comm_bytes:
            return existing
    return AxisGroup(mesh, axis)


def _name(group: dist.ProcessGroup, axis: str) -> str:
    """Axes of experts may share the process group of another axis with the same ranks, but count
    their own bytes."""
    return f"{group.group_name}/{axis}" if axis in EXPERT_AXES else group.group_name


def axis_group_by_name(name: str) -> AxisGroup:
    """Looks up an `AxisGroup` for an operator. Raises RuntimeError: its owner no longer exists."""
    found = _axis_groups.get(name)
    if found is None:
        raise RuntimeError(
            "the ContextParallel that sharded this batch is gone: keep it as long as its batches"
        )
    return found


def _started(work: dist.Work | None) -> list[dist.Work]:
    assert work is not None  # this rank is in the group
    return [work]


library = torch.library.Library("meshtrain", "DEF")
implementations: dict[str, Callable] = {}  # operator -> its implementation for tensors with values


def operator(name: str, run: Callable, shapes: Callable, schema: str = "") -> None:
    """Defines the operator `meshtrain::NAME`: `run` for any device, `shapes` for tensors without
    values.

    `schema`: a torch schema such as `(Tensor x) -> Tensor`; inferred from the annotations of `run`
    by default.
    """
    library.define(name + (schema or torch.library.infer_schema(run, mutates_args=())))
    library.impl(name, run, "CompositeExplicitAutograd")
    implementations[f"meshtrain::{name}"] = run
    torch.library.register_fake(f"meshtrain::{name}", shapes, lib=library)


def differentiable(name: str, backward: Callable, setup_context: Callable) -> None:
    """Gives `meshtrain::NAME` a gradient, by the two functions of
    `torch.library.register_autograd`."""
    torch.library.register_autograd(
        f"meshtrain::{name}", backward, setup_context=setup_context, lib=library
    )


def _all_gather(x: Tensor, group: str) -> Tensor:
    return axis_group_by_name(group).start_all_gather(x.contiguous()).wait()


def _all_gather_shape(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[0] * axis_group_by_name(group).size, *x.shape[1:])


def _reduce_scatter(x: Tensor, group: str) -> Tensor:
    return axis_group_by_name(group).start_reduce_scatter(x.contiguous()).wait()


def _reduce_scatter_shape(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // axis_group_by_name(group).size, *x.shape[1:])


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return axis_group_by_name(group).start_all_reduce(x.contiguous()).wait()


def _all_reduce_shape(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


operator("all_gather", _all_gather, _all_gather_shape)
operator("reduce_scatter", _reduce_scatter, _reduce_scatter_shape)
operator("all_reduce", _all_reduce, _all_reduce_shape)
ops = torch.ops.meshtrain

# The same with gradients. A collective and that of its backward are a pair: all-gather and
# reduce-scatter, sum and identity (f and g in Shoeybi et al., https://arxiv.org/abs/1909.08053).


class ReduceScatter(torch.autograd.Function):
    """(t·m, ...) -> (m, ...): this rank's part of the sum over ranks; backward all-gathers the
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return ops.reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ops.all_gather(grad, ctx.group), None


class AllGather(torch.autograd.Function):
    """(m, ...) -> (t·m, ...): the parts of all ranks; backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return ops.all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ops.reduce_scatter(grad, ctx.group), None


class GatherFeatures(torch.autograd.Function):
    """(..., w) -> (..., t·w): the features of all ranks. The gradient, the same on each rank, is
    that of all of them: backward takes this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        ctx.width = x.shape[-1]
        return ops.all_gather(x.movedim(-1, 0), group).movedim(0, -1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        index = axis_group_by_name(ctx.group).index
        return grad.narrow(-1, index * ctx.width, ctx.width), None


class OwnFeatures(torch.autograd.Function):
    """(..., t·w) -> (..., w): of a tensor that all ranks have the features of this rank; backward
    gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        axis = axis_group_by_name(group)
        width = x.shape[-1] // axis.size
        return x.narrow(-1, axis.index * width, width).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ops.all_gather(grad.movedim(-1, 0), ctx.group).movedim(0, -1), None


def gather_features(part: Tensor, width: int, axis: AxisGroup) -> Tensor:
    """All `width` features (..., f) on each rank, from parts as by `torch.chunk`."""
    chunk = -(-width // axis.size)
    part = F.pad(part, (0, chunk - part.shape[-1]))
    return GatherFeatures.apply(part, axis.name)[..., :width]


def own_features(x: Tensor, axis: AxisGroup) -> Tensor:
    """This rank's part of the features of x, which all ranks have, as by `torch.chunk`."""
    width = x.shape[-1]
    chunk = -(-width // axis.size)
    own = OwnFeatures.apply(F.pad(x, (0, chunk * axis.size - width)), axis.name)
    first = axis.index * chunk
    return own[..., : max(0, min(chunk, width - first))]


class SumGradient(torch.autograd.Function):
    """The identity, for a tensor that all ranks have and each uses for its own heads; sums the
    gradient over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)  # a tensor of its own, to which autograd attaches this backward

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ops.all_reduce(grad, ctx.group), None


class AllReduce(torch.autograd.Function):
    """The sum over ranks, on each rank. The gradient, the same on each rank, passes through
    unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return ops.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # All ranks compute the same with the sum, so each has the whole gradient of it.
        return grad, None
