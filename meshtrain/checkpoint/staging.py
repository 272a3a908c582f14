"""Staging: what this rank writes of the state is copied to host memory, and training goes on while that is written.

Of ranks that hold the same part each copies its share of the rows. The memory is made once and used for every save.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from meshtrain.checkpoint.placement import part_to_write
from meshtrain.checkpoint.state import LocalShard, State
from meshtrain.huggingface.safetensors import Entry
from meshtrain.job.pending import Resource, waiting
from meshtrain.parallel.sharding import Part, shape_of, within

ALIGNED = 64  # bytes; where each tensor begins


class Snapshot:
    """Host memory for this rank's share of a checkpoint. On CUDA it is pinned, so that the copies run beside Python."""

    def __init__(self, state: State, rank: int, device: torch.device) -> None:
        self._device = device
        shards = {shard.name: shard for shard in state.shards}  # of two stages with one tied weight, one is enough
        tensors = {name: tensor for name, tensor in state.placements.items() if name in shards}
        parts = [(name, tensor.dtype, part_to_write(tensor, state.layout, rank)) for name, tensor in tensors.items()]
        entries = [(Entry(name, dtype, shape_of(part)), part) for name, dtype, part in parts if part is not None]
        self._memory = torch.empty(sum(_aligned(entry) for entry, _ in entries), dtype=torch.uint8)
        self._pinned = device.type == "cuda" and self._memory.nbytes > 0
        if self._pinned:
            # As it is: `Tensor.pin_memory` would round its size up to a power of two.
            pin_memory(self._memory.data_ptr(), self._memory.nbytes)
        self._memory.zero_()  # the system gives memory when it is touched: now, and not in the first save
        self._tensors: list[tuple[Entry, Tensor]] = []
        self._copies: list[tuple[LocalShard, Part, Tensor]] = []  # of a part of the local shard
        offset = 0
        for entry, part in entries:
            shard = shards[entry.name]
            copy = self._memory[offset : offset + entry.nbytes].view(shard.local.dtype).view(entry.shape)
            self._tensors.append((entry, copy))
            self._copies.append((shard, within(part, shard.part), copy))
            offset += _aligned(entry)
        self._events: list[torch.cuda.Event] = []
        self.host_s = 0.0

    def take(self) -> None:
        """Copies the state as it is now. On CUDA the copies are queued before whatever is computed next."""
        start = time.perf_counter()
        if self._device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2)]
            self._events[0].record()
        for shard, part, copy in self._copies:
            copy.copy_(shard.local[part], non_blocking=True)
        if self._events:
            self._events[1].record()
        self.host_s = time.perf_counter() - start

    def wait(self) -> float:
        """Until the copies are there; seconds for which training had to wait for them."""
        if not self._events:
            return self.host_s
        with waiting("the copies of the state", resource=Resource.DEVICE):
            self._events[1].synchronize()
        return max(self.host_s, self._events[0].elapsed_time(self._events[1]) / 1000)

    def tensors(self) -> Sequence[tuple[Entry, memoryview]]:
        """The copies, in the order of a file."""
        return [(entry, copy.view(-1).view(torch.uint8).numpy().data) for entry, copy in self._tensors]

    def close(self) -> None:
        """The memory may go; nothing is taken any more."""
        if self._pinned:
            unpin_memory(self._memory.data_ptr())
            self._pinned = False


def _aligned(entry: Entry) -> int:
    return -(-entry.nbytes // ALIGNED) * ALIGNED
