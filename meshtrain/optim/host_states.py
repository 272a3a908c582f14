"""Optimizer states in the host's memory: each update brings them to the device, some parameters at
a time, and takes them back.

The update is the one of states that stay, by the same kernels on the device. So it has the same
bits, whatever the optimizer, the precision of states and averages of the weights. An update on the
host would need formulas with the bits of the device's kernels, and is not the faster one: per
parameter AdamW's states are 8 bytes each way, both ways at the same time, where the host would
receive a gradient and send a weight of 4 bytes, and read and write 28 in its own memory, whose rate
all GPUs of the host share.

    to the device   | states of bucket 1 | bucket 2 | bucket 3 | ...
    update                               | bucket 1 | bucket 2 | ...
    to the host                                     | bucket 1 | ...
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshtrain.optim.grad_norm import LocalParameter
from meshtrain.parallel.host_link import LIMIT, HostBuffer, HostLink

BUCKET = LIMIT // 4  # bytes of states that are copied at once
ALIGNED = 512  # where each tensor begins, as in memory of a GPU of its own


class Home(Protocol):
    """Where the states of some parameters are between updates."""

    def visit(self) -> Iterator[Sequence[LocalParameter]]:
        """Yields the parameters in their order, some at a time: their states are on the device, and
        may be changed there, until the next ones are asked for."""


class OnDevice:
    """States that stay on the device: one visit for all parameters."""

    def __init__(self, parameters: Sequence[LocalParameter]) -> None:
        self._parameters = parameters

    def visit(self) -> Iterator[Sequence[LocalParameter]]:
        yield self._parameters


@dataclass(frozen=True)
class _Place:
    """A state tensor in the memory of its bucket."""

    parameter: LocalParameter
    name: str
    like: Tensor  # on the meta device: its shape, strides and dtype
    begin: int  # byte

    def view(self, memory: Tensor) -> Tensor:
        flat = memory[self.begin : self.begin + _extent(self.like)].view(self.like.dtype)
        return flat.as_strided(self.like.shape, self.like.stride())


class _Bucket:
    """Some parameters, whose states are next to each other in one piece of the host's memory."""

    def __init__(
        self, parameters: Sequence[LocalParameter], places: Sequence[_Place], buffer: HostBuffer
    ) -> None:
        self.parameters = parameters
        self.buffer = buffer
        self.nbytes = buffer.memory.nbytes
        self._places = places
        self._homes = [place.view(buffer.memory) for place in places]
        self.put_home()

    def put_on(self, memory: Tensor) -> None:
        """Makes the states views of memory of the device."""
        for place in self._places:
            place.parameter.state[place.name] = place.view(memory)

    def put_home(self) -> None:
        for place, home in zip(self._places, self._homes, strict=True):
            place.parameter.state[place.name] = home


class OnHost:
    """States in the host's memory."""

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        names: Callable[[LocalParameter], Sequence[str]],
        link: HostLink,
        device: torch.device,
    ) -> None:
        """Puts the states with these names, whose tensors on the meta device say their shapes, into
        the host's memory, as zeros."""
        self._link = link
        self._device = device
        self._buckets: list[_Bucket] = []
        for members, places, nbytes in _placed(parameters, names):
            buffer = link.borrow(nbytes, device)
            buffer.memory.zero_()
            self._buckets.append(_Bucket(members, places, buffer))

    def visit(self) -> Iterator[Sequence[LocalParameter]]:
        upcoming = deque(self._buckets)
        ahead: deque[_Fetched] = deque()
        # What left in the step before: its memory is needed now.
        self._link.drain()
        try:
            while upcoming or ahead:
                while upcoming and self._has_room(ahead, upcoming[0]):
                    ahead.append(self._fetch(upcoming.popleft()))
                now = ahead.popleft()
                self._link.wait(now.copy)
                now.bucket.put_on(now.memory)
                try:
                    yield now.bucket.parameters
                finally:
                    now.bucket.put_home()
                    self._link.send(now.bucket.buffer, now.memory)
                del now
        finally:
            for fetched in ahead:
                self._link.wait(fetched.copy)
            self._link.drain()

    def finish(self) -> None:
        """The host waits for the states of the last update."""
        for bucket in self._buckets:
            self._link.finish(bucket.buffer)

    def _has_room(self, ahead: Sequence["_Fetched"], bucket: _Bucket) -> bool:
        on_the_way = sum(fetched.memory.nbytes for fetched in ahead)
        return not ahead or on_the_way + bucket.nbytes <= self._link.limit

    def _fetch(self, bucket: _Bucket) -> "_Fetched":
        memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
        return _Fetched(bucket, memory, self._link.fetch(bucket.buffer, memory))


@dataclass(frozen=True)
class _Fetched:
    bucket: _Bucket
    memory: Tensor  # of the device
    copy: Any


def _placed(
    parameters: Sequence[LocalParameter], names: Callable[[LocalParameter], Sequence[str]]
) -> Iterator[tuple[list[LocalParameter], list[_Place], int]]:
    """Neighbouring parameters that share a bucket, where their states lie, and the bytes of all."""
    sizes = []
    for parameter in parameters:
        states = [parameter.state[name] for name in names(parameter)]
        sizes.append(sum(aligned(_extent(state)) for state in states))
    for indices in in_buckets(sizes):
        members = [parameters[i] for i in indices]
        places = []
        end = 0
        for parameter in members:
            for name in names(parameter):
                like = parameter.state[name]
                places.append(_Place(parameter, name, like, begin=end))
                end += aligned(_extent(like))
        yield members, places, end


def aligned(nbytes: int) -> int:
    """Bytes that a state tensor of so many takes in a bucket."""
    return math.ceil(nbytes / ALIGNED) * ALIGNED


def in_buckets(sizes: Sequence[int]) -> Iterator[range]:
    """Indices of parameters whose states share a bucket: neighbours whose sizes add up to at most
    `BUCKET`, or one that is larger by itself."""
    begin = filled = 0
    for i, size in enumerate(sizes):
        if i > begin and filled + size > BUCKET:
            yield range(begin, i)
            begin, filled = i, 0
        filled += size
    if sizes:
        yield range(begin, len(sizes))


def most_on_device(buckets: Sequence[int], limit: int = LIMIT) -> int:
    """The most bytes of states that are on the device in a visit (`OnHost.visit`). `buckets`: the
    bytes of each; `limit`: on their way, in each direction."""
    upcoming = deque(buckets)
    ahead, leaving = deque[int](), deque[int]()
    most = 0
    while upcoming or ahead:
        while upcoming and (not ahead or sum(ahead) + upcoming[0] <= limit):
            ahead.append(upcoming.popleft())
            most = max(most, sum(ahead) + sum(leaving))
        # It is updated, and then leaves.
        leaving.append(ahead.popleft())
        while sum(leaving) > limit and len(leaving) > 1:
            leaving.popleft()
    return most


def _extent(tensor: Tensor) -> int:
    """Bytes of a dense tensor."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize
