"""Loading a checkpoint onto any layout, whatever layout wrote it: each byte is read and checked
once, then exchanged.

Each of the ranks that hold the same part reads a share of its rows, and they exchange these over
the mesh. On the layout that wrote the checkpoint, the share is exactly what the rank wrote: it
reads only its own file.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.placement import (
    Placement,
    copies,
    copy_number,
    part_of_rank,
    pieces,
    replica_axes,
    share_of,
)
from meshtrain.checkpoint.shard_file import ShardReader
from meshtrain.checkpoint.state import LOSS_SCALE, State
from meshtrain.checkpoint.weights import read_piece
from meshtrain.errors import InputError, join_some
from meshtrain.huggingface.load import DTYPES
from meshtrain.huggingface.safetensors import SIZES
from meshtrain.layout import Layout
from meshtrain.parallel.sharding import Part, is_empty, overlap, shape_of, within

THREADS = 4  # reading threads: neither disk reads nor checksums hold the GIL
AHEAD = 4 * THREADS  # reads in flight; fewer than the files that stay open
CHUNK = 32 * 2**20  # bytes per read


# Reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """What a rank reads of one file of a checkpoint."""

    writer: int  # the rank that wrote the file
    name: str  # of the tensor
    share: Part  # of the whole tensor: what this rank reads of it
    piece: Part  # of the whole tensor: what the file has of it


def read_shares(
    checkpoint: Path, manifest: Manifest, state: State, local: Mapping[int, Path] | None = None
) -> None:
    """Fills this rank's shares of the state from a checkpoint, bit for bit as saved. The other rows
    of its tensors come by `exchange`, once all ranks have read. `local`: folders of files on this
    host, by the rank that wrote them.

    Raises:
        InputError: the checkpoint is not of this model; names the tensors. On all ranks, before any
            is read.
        DamagedError: a file is not what was written; names file and tensor. Part of the state may
            be filled by then.
    """
    problems = differences(manifest.tensors, state.placements)
    if problems:
        raise InputError(f"{checkpoint} does not fit the model: {'; '.join(problems)}")
    # a tied weight may occur twice: the first counts
    shards = {shard.name: shard for shard in reversed(state.shards)}
    parts = [(shard.name, shard.placement, shard.part) for shard in shards.values()]
    reads = reads_of_rank(manifest, state.layout, state.mesh.rank, parts)
    with (
        ShardReader(checkpoint, manifest, local) as files,
        ThreadPoolExecutor(THREADS, "checkpoint") as pool,
    ):
        pending: deque[Future[None]] = deque()
        try:
            # file by file, since few stay open
            for read in sorted(reads, key=attrgetter("writer")):
                file = files.shard_with(read.name, read.writer, read.piece)
                shard = shards[read.name]
                for part in _chunks(shard.placement, read):
                    pending.append(
                        pool.submit(
                            read_piece, file, read.name, read.piece, part, shard.local, shard.part
                        )
                    )
                while len(pending) > AHEAD:
                    pending.popleft().result()
            while pending:
                pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)  # before the files are closed


def files_needed(
    manifest: Manifest, placements: Mapping[str, Placement], layout: Layout, rank: int
) -> set[int]:
    """The writing ranks whose files a rank of this layout reads."""
    parts = [
        (name, tensor, part_of_rank(tensor, layout, rank)) for name, tensor in placements.items()
    ]
    return {read.writer for read in reads_of_rank(manifest, layout, rank, parts)}


def reads_of_rank(
    manifest: Manifest,
    layout: Layout,
    rank: int,
    parts: Iterable[tuple[str, Placement, Part | None]],
) -> Iterator[Read]:
    """What a rank reads for its parts of tensors: (name, placement, part)."""
    for name, tensor, part in parts:
        if part is None or name not in manifest.tensors:
            continue
        share = part
        # Without axes of replicas no group can exchange the tensor: each rank reads all of its
        # part.
        if replica_axes(tensor, layout) is not None:
            share = share_of(part, tensor, layout, copy_number(tensor, layout, rank))
        if is_empty(share):
            continue
        for writer, piece in pieces(manifest.tensors[name], manifest.layout, share):
            yield Read(writer, name, share, piece)


def _chunks(tensor: Placement, read: Read) -> Iterator[Part]:
    """The overlap of a piece with a share, as parts of the whole tensor of at most `CHUNK` bytes,
    or one row."""
    rows, *rest = overlap(read.piece, read.share)
    row_bytes = math.prod(shape_of(read.piece)[1:]) * SIZES[tensor.dtype]
    step = max(1, CHUNK // max(1, row_bytes))
    for first in range(rows.start, rows.stop, step):
        yield slice(first, min(first + step, rows.stop)), *rest


# The exchange -------------------------------------------------------------------------------------


@torch.no_grad()
def exchange(state: State) -> None:
    """Sends every rank the rows that other ranks have read for it. All ranks call it, after
    `read_shares`."""
    locals_of: dict[str, list[Tensor]] = {}
    for shard in state.shards:
        locals_of.setdefault(shard.name, []).append(shard.local)
    # In the order of the placements, which is the same on all ranks, as collectives need it.
    for name, tensor in state.placements.items():
        own = locals_of.get(name, [])
        _exchange(state, tensor, own[0] if own else None)
        for twin in own[1:]:  # a weight tied between two stages of this rank
            twin.copy_(own[0])
    state.loaded()


def _exchange(state: State, tensor: Placement, own: Tensor | None) -> None:
    """Completes one tensor. `own`: this rank's part; None: it has none."""
    layout, rank = state.layout, state.mesh.rank
    axes = replica_axes(tensor, layout)
    if axes is None or copies(tensor, layout) == 1:
        return  # this rank has read all of its part
    holder = rank
    if own is None:
        # A stage between two that hold a tied weight takes part in the broadcast over the
        # pipeline's group, with memory for what passes by.
        if len(tensor.stages) > 1:
            holder = layout.group(rank, "pp")[tensor.stages[0]]
        axes = []
    part = part_of_rank(tensor, layout, holder)
    if part is None or is_empty(part):
        return
    target = own
    if target is None:
        target = torch.empty(
            shape_of(part), dtype=DTYPES[tensor.dtype], device=state.mesh.device_type
        )
    if len(tensor.stages) > 1:
        axes = [*axes, "pp"]
    _spread(state, tensor, part, target, axes)


def _spread(state: State, tensor: Placement, part: Part, target: Tensor, axes: list[str]) -> None:
    """Axis by axis, the innermost first, each rank broadcasts the rows that it has so far.

    Copies are numbered with the innermost axis fastest, and copy c has read share c of the rows.
    After the axes so far, each rank has the shares of `known` copies, from a multiple of it on.
    """
    layout, rank = state.layout, state.mesh.rank
    known = 1
    for axis in axes:
        if axis == "pp":  # outside of a stage's own copies
            known = copies(tensor, layout) // len(tensor.stages)
        group = state.mesh.group(axis)
        for source in layout.group(rank, axis):
            if layout.index(source, "pp") not in tensor.stages:
                continue
            first = copy_number(tensor, layout, source) // known * known
            rows = target[within(share_of(part, tensor, layout, first, known), part)]
            if rows.numel() == 0:
                continue
            # Usually no copy. Counters of torch's optimizers are on the CPU also beside a GPU.
            sent = rows.to(state.mesh.device_type).contiguous()
            # As bytes: not every backend knows every dtype.
            dist.broadcast(sent.view(-1).view(torch.uint8), source, group)
            if sent.data_ptr() != rows.data_ptr():
                rows.copy_(sent)
        known *= layout.size(axis)


# What does not fit --------------------------------------------------------------------------------


def differences(stored: Mapping[str, Placement], model: Mapping[str, Placement]) -> list[str]:
    """Why a checkpoint's tensors do not fit a state's. Only one of them may have a loss scale
    (another precision)."""
    missing = [name for name in model if name not in stored and name not in LOSS_SCALE]
    unknown = [name for name in stored if name not in model and name not in LOSS_SCALE]
    shapes = []
    types = []
    other_types = []  # their names
    for name, own in model.items():
        if name not in stored:
            continue
        there = stored[name]
        if there.shape != own.shape:
            shapes.append(f"{name} (there {list(there.shape)}, the model's {list(own.shape)})")
        if there.dtype != own.dtype:
            types.append(f"{name} (there {there.dtype}, the model's {own.dtype})")
            other_types.append(name)

    lines = []
    if missing:
        lines.append(f"missing {join_some(missing)}")
    if unknown:
        lines.append(f"the model has no {join_some(unknown)}")
    if shapes:
        lines.append(f"other shapes: {join_some(shapes)}")
    if types:
        lines.append(f"other types: {join_some(types)}")

    names = [*missing, *unknown, *other_types]
    if missing and all(name.endswith(".ema") for name in missing):
        lines.append(
            "it was written without optimizer.ema_decay, which begins with a run: model.weights "
            "begins one"
        )
    elif names and not shapes and all(name.startswith("optimizer.") for name in names):
        lines.append(
            "it was written with another optimizer (optimizer.name, state_precision or groups): "
            "take those of its config.yaml, or begin another run from its weights with "
            "model.weights=CHECKPOINT train.output=FOLDER"
        )
    return lines
