"""Loads a checkpoint onto any layout, whatever layout wrote it: each rank reads what it holds and proves what it reads.

What does not fit is known before a byte is read, because the manifest and the run's state both list the tensors of the
whole model.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.opened import Opened
from meshtrain.checkpoint.placement import Placement, overlap, pieces, shape_of, within
from meshtrain.checkpoint.shards import Shard
from meshtrain.checkpoint.state import LOSS_SCALE, Held, State
from meshtrain.cuts import Part
from meshtrain.errors import InputError
from meshtrain.huggingface import DTYPES
from meshtrain.weights import SIZES, some

THREADS = 4  # that read at once: neither the disk nor a checksum needs Python's lock
AHEAD = 4 * THREADS  # reads that are asked for before the first of them is done; fewer than files stay open
CHUNK = 32 * 2**20  # bytes of a read


def restore(checkpoint: Path, manifest: Manifest, state: State) -> None:
    """Fills the state from a checkpoint; the bits are those that were saved.

    Raises:
        InputError: the checkpoint is not that of this model; names the tensors. Nothing has been read then, and all
            ranks raise the same.
        DamagedError: a file is not what was written; names file and tensor. Some of the state has been filled.
    """
    problems = differences(manifest.tensors, state.placements)
    if problems:
        raise InputError(f"{checkpoint} does not fit the model: {'; '.join(problems)}")
    with Opened(checkpoint, manifest) as files, ThreadPoolExecutor(THREADS, "checkpoint") as threads:
        under_way: deque[Future[None]] = deque()
        try:
            for read in _in_order(manifest, [held for held in state.held if held.name in manifest.tensors]):
                shard = files.holding(read.held.name, read.rank, read.piece)
                under_way += [threads.submit(_fill, read, part, shard) for part in _chunks(read)]
                while len(under_way) > AHEAD:
                    under_way.popleft().result()
            while under_way:
                under_way.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)  # before the files are closed
    state.loaded()


def differences(there: Mapping[str, Placement], here: Mapping[str, Placement]) -> list[str]:
    """Why the tensors of a checkpoint are not those of a state, in a few lines.

    A loss scale may be on one side only: a run may go on in another precision.
    """
    missing = [name for name in here if name not in there and name not in LOSS_SCALE]
    strange = [name for name in there if name not in here and name not in LOSS_SCALE]
    both = [(name, there[name], here[name]) for name in here if name in there]
    shapes = [
        f"{name} (there {list(x.shape)}, the model's {list(y.shape)})" for name, x, y in both if x.shape != y.shape
    ]
    types = [f"{name} (there {x.dtype}, the model's {y.dtype})" for name, x, y in both if x.dtype != y.dtype]
    lists = {"missing": missing, "the model has no": strange, "other shapes": shapes, "other types": types}
    return [f"{what}{':' * what.startswith('other')} {some(names)}" for what, names in lists.items() if names]


@dataclass(frozen=True)
class _Read:
    """A piece that a rank has written, and a tensor of this rank that needs some of it."""

    rank: int
    held: Held
    piece: Part


def _in_order(manifest: Manifest, wanted: Sequence[Held]) -> Iterator[_Read]:
    """File by file."""
    by_rank: dict[int, list[_Read]] = {}
    for held in wanted:
        for rank, piece in pieces(manifest.tensors[held.name], manifest.layout, held.part):
            by_rank.setdefault(rank, []).append(_Read(rank, held, piece))
    for rank in sorted(by_rank):
        yield from by_rank[rank]


def _chunks(read: _Read) -> Iterator[Part]:
    """What is needed of a piece, as parts of the whole of at most `CHUNK` bytes, or of one row."""
    rows, *rest = overlap(read.piece, read.held.part)
    width = math.prod(shape_of(read.piece)[1:]) * SIZES[read.held.placement.dtype]
    each = max(1, CHUNK // max(1, width))
    for first in range(rows.start, rows.stop, each):
        yield slice(first, min(first + each, rows.stop)), *rest


@torch.no_grad()
def _fill(read: _Read, part: Part, shard: Shard) -> None:
    """Reads this part of the whole into the tensor that is trained."""
    rows, *columns = within(part, read.piece)
    target = read.held.local[within(part, read.held.part)]
    widths = shape_of(read.piece)[1:]
    if target.device.type == "cpu" and target.is_contiguous() and tuple(target.shape[1:]) == widths:
        shard.read_into(read.held.name, _bytes(target), rows)
        return
    values = torch.frombuffer(shard.read(read.held.name, rows), dtype=DTYPES[read.held.placement.dtype])
    target.copy_(values.view(-1, *widths)[(slice(None), *columns)])


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
