"""The collectives that a model's forward and backward make over one axis of the mesh, counted as they are sent.

Nowhere else does a forward communicate. Each is an operator of torch's besides, because that is what torch.compile can
carry through a graph and what selective recomputation can name: a compiler passes no Python objects on, so an operator
finds its channel by the name of its group. All of them work on the first dim of contiguous tensors.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from meshtrain.errors import InputError
from meshtrain.mesh import Mesh
from meshtrain.parallel import exchange
from meshtrain.parallel.torch_private import enable_symmetric_memory
from meshtrain.parallel.waiting import Waiting

# Group name -> its channel, as torch itself finds a group by its name. A channel lives as long as its layers do.
_channels: WeakValueDictionary[str, "Channel"] = WeakValueDictionary()


class Pending:
    """A collective under way."""

    def __init__(self, channel: "Channel", works: Sequence[dist.Work], result: Callable[[], Tensor]) -> None:
        self.group, self._waiting = channel.group, channel.waiting  # whoever looks at a hang finds the group here
        self._works, self._result = works, result

    def wait(self) -> Tensor:
        """The result, once it is there (on CUDA: once the current stream waits for it)."""
        with self._waiting():
            exchange.wait(self._works)
            return self._result()


class Channel:
    """This rank's group over one axis, and the collectives over it.

    Attributes:
        size: the number t of its ranks. index: which of them this one is.
        name: by which operators find it.
        waiting: entered while this rank waits for the others.
        fused: products and collectives by the kernels of torch's symmetric memory that do both at once (CUDA only).
    """

    def __init__(self, mesh: Mesh, axis: str) -> None:
        """Raises ValueError if the axis has no other rank to talk to."""
        group = mesh.group(axis)
        if group is None:
            raise ValueError(f"the axis {axis} has size 1 in {mesh.layout}: there is nobody to talk to")
        self.group, self.axis, self.traffic = group, axis, mesh.traffic
        self.size, self.index = mesh.size(axis), mesh.index(axis)
        self.on_cpu = mesh.device_type == "cpu"
        self.waiting: Waiting = nullcontext
        self.fused = False
        self.name: str = group.group_name
        _channels[self.name] = self

    def fuse(self) -> None:
        """From now on products and collectives of sequence sharding run as one kernel, where torch has one.

        Raises:
            InputError: not on CUDA, where alone such kernels exist.
        """
        if self.on_cpu:
            raise InputError("parallel.symmetric_memory needs GPUs: leave it false on CPUs")
        enable_symmetric_memory(self.group)
        self.fused = True

    def start_all_gather(self, part: Tensor) -> Pending:
        """(m, ...) of every rank -> (t·m, ...)."""
        output = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        self._count("all_gather", output)
        if self.on_cpu:
            works = exchange.start_all_gather(output, part, self.group)
        else:
            works = _started(dist.all_gather_into_tensor(output, part, group=self.group, async_op=True))
        return Pending(self, works, lambda: output)

    def start_reduce_scatter(self, whole: Tensor) -> Pending:
        """(t·m, ...) of every rank -> the sum of this rank's part of them (m, ...)."""
        self._count("reduce_scatter", whole)
        output = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        if self.on_cpu:
            works, received = exchange.start_reduce_scatter(whole.chunk(self.size), self.group)
            return Pending(self, works, lambda: exchange.add_up(received, output))
        works = _started(dist.reduce_scatter_tensor(output, whole, group=self.group, async_op=True))
        return Pending(self, works, lambda: output)

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """The sum of a tensor over the ranks; `tensor` is left as it is."""
        self._count("all_reduce", tensor, times=2)
        if not self.on_cpu:
            output = tensor.clone()
            works = _started(dist.all_reduce(output, group=self.group, async_op=True))
            return Pending(self, works, lambda: output)
        parts = tensor.flatten().tensor_split(self.size)
        works, received = exchange.start_reduce_scatter(parts, self.group)
        return Pending(self, works, lambda: self._share_sums(received, tensor))

    def _share_sums(self, received: Sequence[Tensor], tensor: Tensor) -> Tensor:
        """The second half of an all-reduce: every rank has the sum of its part and sends it to all others."""
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        parts = output.view(-1).tensor_split(self.size)
        mine = exchange.add_up(received, parts[self.index])
        exchange.wait(exchange.start_exchange([mine] * self.size, parts, self.group))
        return output

    def _count(self, kind: str, whole: Tensor, times: int = 1) -> None:
        sent = times * whole.numel() * whole.element_size() * (self.size - 1) / self.size
        self.traffic.add(self.axis, kind, sent)


def channel(mesh: Mesh, axis: str) -> Channel:
    """This rank's channel over an axis of the mesh: the one there is, or a new one."""
    group = mesh.group(axis)
    known = None if group is None else _channels.get(group.group_name)
    return known if known is not None and known.traffic is mesh.traffic else Channel(mesh, axis)


def named(name: str) -> Channel:
    """The channel of this name, for an operator."""
    return _channels[name]


def _started(work: dist.Work | None) -> list[dist.Work]:
    assert work is not None  # this rank is in the group
    return [work]


# Operators: (name, arguments) -> what they return ------------------------------------------------------------------

library = torch.library.Library("meshtrain", "DEF")


def operator(schema: str, run: Callable, shapes: Callable) -> None:
    """Makes `meshtrain::NAME` of a schema: `run` on any device, `shapes` where tensors have no values."""
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"meshtrain::{name}", shapes, lib=library)


def _all_gather(x: Tensor, channel: str) -> Tensor:
    return named(channel).start_all_gather(x.contiguous()).wait()


def _reduce_scatter(x: Tensor, channel: str) -> Tensor:
    return named(channel).start_reduce_scatter(x.contiguous()).wait()


def _all_reduce(x: Tensor, channel: str) -> Tensor:
    return named(channel).start_all_reduce(x.contiguous()).wait()


operator(
    "all_gather(Tensor x, str channel) -> Tensor",
    _all_gather,
    lambda x, channel: x.new_empty(x.shape[0] * named(channel).size, *x.shape[1:]),
)
operator(
    "reduce_scatter(Tensor x, str channel) -> Tensor",
    _reduce_scatter,
    lambda x, channel: x.new_empty(x.shape[0] // named(channel).size, *x.shape[1:]),
)
operator(
    "all_reduce(Tensor x, str channel) -> Tensor",
    _all_reduce,
    lambda x, channel: torch.empty_like(x, memory_format=torch.contiguous_format),
)
ops = torch.ops.meshtrain


# With a backward ----------------------------------------------------------------------------------------------------


class ReduceScatter(torch.autograd.Function):
    """(t·m, ...) -> (m, ...): ranks' addends become parts of the sum; backward gathers the parts of the gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, channel: str) -> Tensor:
        ctx.channel = channel  # type: ignore[attr-defined]
        return ops.reduce_scatter(x, channel)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return ops.all_gather(grad, ctx.channel), None  # type: ignore[attr-defined]


class AllReduce(torch.autograd.Function):
    """Ranks' addends become the sum on each; its gradient, the same on each, is that of every addend."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, channel: str) -> Tensor:
        return ops.all_reduce(x, channel)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
