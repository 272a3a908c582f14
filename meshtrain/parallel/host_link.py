"""Host link: copies between a device and its host's memory, which run beside the computation.

`parallel.offload` keeps saved activations and optimizer states in host memory. A copy is started
when its source is complete, and the computation waits for it only where it needs the result: before
it uses what has come back, and before it frees or overwrites what is leaving. Waiting is an event
on the device; the host itself does not wait. `LIMIT` bounds the bytes on their way, so that copies
never hold more of the device's memory than that.

    computation   | forward of block 1 | forward of block 2 | waits for 1 to be out, forward of 3
    to the host                        | what 1 has saved   | what 2 has saved

Only a `Copier` knows what a device is: `Streams` for CUDA, and `AtOnce` for a CPU, which emulates
the host by other memory of its own.
"""

import mmap
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshtrain.parallel.torch_private import pin_in_place, without_dispatch_modes

# Bytes on their way, each way, and so of the device's memory that waits for copies. At 50 GB/s the
# link takes 5 ms for them: longer than a copy takes to start, shorter than most blocks.
LIMIT = 2**28


class Copier(Protocol):
    """Copies flat tensors of bytes between a device and its host."""

    def allocate(self, nbytes: int) -> Tensor:
        """Memory of the host, flat bytes, which is never given back to the system."""

    def copy(self, target: Tensor, source: Tensor, *, to_host: bool, after: Any) -> Any:
        """Starts a copy, once all that was computed so far is done, and the copy `after` (None:
        none). Returns what stands for it, which is not None."""

    def wait(self, copy: Any) -> None:
        """What is computed from here on waits for a copy."""

    def finish(self, copy: Any) -> None:
        """The host waits for a copy."""


class AtOnce:
    """Of a CPU, and of the meta device, which has neither values nor a host: a copy is done when it
    is started."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def copy(self, target: Tensor, source: Tensor, *, to_host: bool, after: Any) -> Any:
        target.copy_(source)
        return "done"

    def wait(self, copy: Any) -> None:
        pass

    def finish(self, copy: Any) -> None:
        pass


class Streams:
    """Of a GPU: a stream each way, and pinned memory. A link carries as much one way while it does
    the other way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)

    def allocate(self, nbytes: int) -> Tensor:
        # Whole pages of its own, as pinning in place takes them; torch's allocator of pinned memory
        # would round up to a power of two. The tensor holds the map.
        memory = torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
        if nbytes:
            pin_in_place(memory)
        return memory

    def copy(
        self, target: Tensor, source: Tensor, *, to_host: bool, after: Any
    ) -> torch.cuda.Event:
        stream = self._out if to_host else self._in
        # What was computed so far has written the source, or used the target's memory before.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, copy: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(copy)

    def finish(self, copy: torch.cuda.Event) -> None:
        copy.synchronize()


def copier_of(device: torch.device) -> Copier:
    return Streams(device) if device.type == "cuda" else AtOnce(device)


class HostBuffer:
    """Memory of the host for bytes of a device. `last`: the last copy from it or to it, after which
    the next one comes."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.last: Any = None


@dataclass(frozen=True)
class _Leaving:
    """What is on its way to the host, and is held on the device until the computation has waited
    for it."""

    source: Tensor
    copy: Any
    block: int
    is_needed: Callable[[], bool]  # whether somebody may still ask for it
    release: Callable[[], None]


class HostLink:
    """The copies of one rank.

    Attributes:
        limit: bytes on their way to the host; one tensor may be larger.
        host_bytes: memory of the host that was allocated.
        sent, fetched: bytes that were copied to the host, and back.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.host_bytes = 0
        self.sent = 0
        self.fetched = 0
        self._copier: Copier | None = None  # a rank has one device, known with the first tensor
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)  # by size
        self._leaving: deque[_Leaving] = deque()
        self._block = 0  # number of forwards of blocks so far

    # Memory of the host ---------------------------------------------------------------------------

    def borrow(self, nbytes: int, device: torch.device) -> HostBuffer:
        """Memory of the host. A step needs the same sizes as the one before, so that it is
        allocated once."""
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        if self._copier is None:
            self._copier = copier_of(device)
        self.host_bytes += nbytes
        with without_dispatch_modes():  # no memory of the device, and no operator of the model
            return HostBuffer(self._copier.allocate(nbytes))

    def give_back(self, buffer: HostBuffer) -> None:
        """Of what was borrowed. Copies of it may still be under way: the next ones come after."""
        self._free[buffer.memory.nbytes].append(buffer)

    # Copies ---------------------------------------------------------------------------------------

    def send(
        self,
        buffer: HostBuffer,
        source: Tensor,
        *,
        is_needed: Callable[[], bool] = lambda: True,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to copy bytes of the device to the host. They must not change until `release` is
        called: from then on the computation comes after the copy."""
        copy = self._copy(buffer, buffer.memory, source, to_host=True)
        self.sent += source.nbytes
        self._leaving.append(_Leaving(source, copy, self._block, is_needed, release))
        while self.leaving_bytes > self.limit and len(self._leaving) > 1:
            self._release_first()

    def fetch(self, buffer: HostBuffer, target: Tensor) -> Any:
        """Starts to copy bytes of the host to the device; `wait` takes what it returns."""
        self.fetched += target.nbytes
        return self._copy(buffer, target, buffer.memory, to_host=False)

    def wait(self, copy: Any) -> None:
        """What is computed from here on waits for a copy."""
        assert self._copier is not None  # it has started the copy
        self._copier.wait(copy)

    def finish(self, buffer: HostBuffer) -> None:
        """The host waits for the last copy of a buffer: it may read and write the memory then."""
        if self._copier is not None and buffer.last is not None:
            self._copier.finish(buffer.last)

    def _copy(self, buffer: HostBuffer, target: Tensor, source: Tensor, *, to_host: bool) -> Any:
        assert self._copier is not None  # it has allocated the buffer
        with without_dispatch_modes(), torch.no_grad():
            buffer.last = self._copier.copy(target, source, to_host=to_host, after=buffer.last)
        return buffer.last

    # What is leaving ------------------------------------------------------------------------------

    @property
    def leaving_bytes(self) -> int:
        """Bytes that are held on the device until their copies are waited for."""
        return sum(leaving.source.nbytes for leaving in self._leaving)

    def begin_block(self) -> None:
        """Called when the forward of a block begins. It waits for what the block before the
        previous one has sent: the memory that copies hold does not grow with the number of
        blocks."""
        self._block += 1
        while self._leaving and self._leaving[0].block < self._block - 1:
            self._release_first()

    def release_unneeded(self) -> None:
        """Waits for copies that nobody asks for any more, and frees what they hold."""
        needed: deque[_Leaving] = deque()
        for leaving in self._leaving:
            if leaving.is_needed():
                needed.append(leaving)
            else:
                self._release(leaving)
        self._leaving = needed

    def drain(self) -> None:
        """What is computed from here on waits for all that is leaving."""
        while self._leaving:
            self._release_first()

    def _release_first(self) -> None:
        self._release(self._leaving.popleft())

    def _release(self, leaving: _Leaving) -> None:
        self.wait(leaving.copy)
        leaving.release()


# The link of a model ------------------------------------------------------------------------------


def set_link(model: nn.Module, link: HostLink, *, of_states: bool) -> None:
    """Tells a model, or a stage, by which link it offloads. `of_states`: also the states of the
    optimizer that is made of it."""
    vars(model)["host_link"] = link
    vars(model)["states_on_host"] = of_states


def link_of(model: nn.Module) -> HostLink | None:
    """The link by which a model, or a stage, offloads; None: it does not."""
    return vars(model).get("host_link")


def states_link(model: nn.Module) -> HostLink | None:
    """The link by which optimizer states come to the device; None: they are there."""
    return link_of(model) if vars(model).get("states_on_host") else None
