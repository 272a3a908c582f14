"""Staging: the part of the state that this rank writes is copied to host memory, and written while
training continues.

Each of the ranks that hold the same part copies its share of the rows. The memory is allocated once
for all saves. If a host has too little memory, the state is streamed instead: training waits until
it is written, block by block.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshtrain.checkpoint.placement import part_to_write
from meshtrain.checkpoint.shard_file import BLOCK
from meshtrain.checkpoint.state import LocalShard, State
from meshtrain.huggingface.safetensors import Entry
from meshtrain.job.pending import Resource, waiting
from meshtrain.parallel.sharding import Part, shape_of, within
from meshtrain.parallel.torch_private import pin_in_place, unpin_in_place

ALIGNED = 64  # each tensor begins at a multiple of this many bytes


@dataclass(frozen=True)
class _Staged:
    """A tensor of this rank's file."""

    entry: Entry
    shard: LocalShard  # where its values are
    part: Part  # of the local shard: the rows that this rank writes
    copy: Tensor | None  # in host memory; None: the state is streamed

    @property
    def values(self) -> Tensor:
        """The values as they are now, where training has them."""
        return self.shard.local[self.part]


class Snapshot:
    """Host memory for this rank's share of a checkpoint. On CUDA it is pinned, so that copies are
    asynchronous."""

    def __init__(
        self, state: State, rank: int, device: torch.device, *, streams: bool = False
    ) -> None:
        """`streams`: copy nothing; training must not continue before `tensors` are written."""
        self.host_s = 0.0  # that the last `take` took on the host
        self._device = device
        # around the copies of the last `take`; none on the CPU
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

        nbytes = 0 if streams else snapshot_bytes(state, rank)
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._pinned = device.type == "cuda" and self._memory.nbytes > 0
        if self._pinned:
            pin_in_place(self._memory)
        # the system allocates pages on first touch: now rather than in the first save
        self._memory.zero_()

        # a weight tied on two stages is copied once
        shards = {shard.name: shard for shard in state.shards}
        self._staged: list[_Staged] = []
        offset = 0
        for entry, part in _entries(state, rank):
            shard = shards[entry.name]
            copy = None
            if not streams:
                memory = self._memory[offset : offset + entry.nbytes]
                copy = memory.view(shard.local.dtype).view(entry.shape)
            self._staged.append(_Staged(entry, shard, within(part, shard.part), copy))
            offset += _aligned(entry)

    def take(self) -> None:
        """Copies the state as it is now. On CUDA the copies are queued before the next
        computation."""
        start = time.perf_counter()
        if self._device.type == "cuda":
            # Blocking: a thread that waits for the event sleeps, and takes no core from training.
            before = torch.cuda.Event(enable_timing=True, blocking=True)
            after = torch.cuda.Event(enable_timing=True, blocking=True)
            self._events = before, after
        if self._events is not None:
            self._events[0].record()
        for staged in self._staged:
            if staged.copy is not None:
                staged.copy.copy_(staged.values, non_blocking=True)
        if self._events is not None:
            self._events[1].record()
        self.host_s = time.perf_counter() - start

    def wait(self) -> float:
        """Waits until the copies are complete; returns the seconds that training had to wait for
        them."""
        if self._events is None:
            return self.host_s
        before, after = self._events
        with waiting("the copies of the state", resource=Resource.DEVICE):
            after.synchronize()
        return max(self.host_s, before.elapsed_time(after) / 1000)

    def tensors(self) -> Sequence[tuple[Entry, memoryview | Iterable[memoryview]]]:
        """The copies, or with `streams` the state itself, block by block; in the order of a
        file."""
        tensors: list[tuple[Entry, memoryview | Iterable[memoryview]]] = []
        for staged in self._staged:
            if staged.copy is None:
                tensors.append((staged.entry, _stream(staged.values)))
            else:
                tensors.append((staged.entry, _bytes_of(staged.copy)))
        return tensors

    def close(self) -> None:
        """Unpins the memory; `take` must not be called any more."""
        if self._pinned:
            unpin_in_place(self._memory)
            self._pinned = False


def snapshot_bytes(state: State, rank: int) -> int:
    """Bytes of host memory that the snapshot of a rank takes."""
    return sum(_aligned(entry) for entry, _ in _entries(state, rank))


def _entries(state: State, rank: int) -> Iterator[tuple[Entry, Part]]:
    """The entries that this rank writes and their parts, in the order of a file."""
    names = {shard.name for shard in state.shards}
    for name, tensor in state.placements.items():
        if name not in names:
            continue
        part = part_to_write(tensor, state.layout, rank)
        if part is not None:
            yield Entry(name, tensor.dtype, shape_of(part)), part


def _stream(values: Tensor) -> Iterator[memoryview]:
    """The bytes in blocks; the two most recent blocks stay valid."""
    data = values.contiguous().view(-1).view(torch.uint8)  # usually no copy
    if data.numel() == 0:
        return
    blocks = data.split(BLOCK)
    if data.is_cpu:
        for block in blocks:
            yield _bytes_of(block)
        return
    buffers = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    for number, block in enumerate(blocks):
        buffer = buffers[number % 2][: len(block)]
        yield _bytes_of(buffer.copy_(block))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _aligned(entry: Entry) -> int:
    """The bytes of an entry in the memory of a snapshot."""
    return -(-entry.nbytes // ALIGNED) * ALIGNED
