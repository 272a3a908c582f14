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
from operator import itemgetter
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
    reads = _reads(manifest, state.layout, state.mesh.rank, parts)
    with (
        ShardReader(checkpoint, manifest, local) as files,
        ThreadPoolExecutor(THREADS, "checkpoint") as pool,
    ):
        pending: deque[Future[None]] = deque()
        try:
            for writer, name, share, piece in sorted(reads, key=itemgetter(0)):  # file by file
                file, shard = files.shard_with(name, writer, piece), shards[name]
                for part in _chunks(shard.placement, share, piece):
                    pending.append(
                        pool.submit(read_piece, file, name, piece, part, shard.local, shard.part)
                    )
                while len(pending) > AHEAD:
                    pending.popleft().result()
            while pending:
                pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)  # before the files are closed


@torch.no_grad()
def exchange(state: State) -> None:
    """Sends every rank the rows that other ranks have read for it. All ranks call it, after
    `read_shares`."""
    layout, rank = state.layout, state.mesh.rank
    locals_of: dict[str, list[Tensor]] = {}
    for shard in state.shards:
        locals_of.setdefault(shard.name, []).append(shard.local)
    for name, tensor in state.placements.items():
        axes = replica_axes(tensor, layout)
        if axes is not None and copies(tensor, layout) > 1:
            peer = layout.group(rank, "pp")[tensor.stages[0]] if len(tensor.stages) > 1 else rank
            part = part_of_rank(tensor, layout, rank if name in locals_of else peer)
            if part is not None and not is_empty(part):
                # A stage between two that hold a tied weight takes part in the broadcast over the
                # pipeline's group.
                target = locals_of[name][0] if name in locals_of else torch.empty(
                    shape_of(part), dtype=DTYPES[tensor.dtype], device=state.mesh.device_type
                )  # fmt: skip
                _spread(state, tensor, part, target, axes if name in locals_of else [])
        for twin in locals_of.get(name, [])[1:]:
            twin.copy_(locals_of[name][0])
    state.loaded()


def _spread(state: State, tensor: Placement, part: Part, target: Tensor, axes: list[str]) -> None:
    """Axis by axis, the innermost first, each rank broadcasts the rows that it has so far."""
    layout, rank, known = state.layout, state.mesh.rank, 1
    for axis in [*axes, *["pp"] * (len(tensor.stages) > 1)]:
        known = known if axis != "pp" else copies(tensor, layout) // len(tensor.stages)
        group = state.mesh.group(axis)
        for source in layout.group(rank, axis):
            if layout.index(source, "pp") not in tensor.stages:
                continue
            first = copy_number(tensor, layout, source) // known * known
            rows = target[within(share_of(part, tensor, layout, first, known), part)]
            if rows.numel():
                sent = rows.contiguous()  # usually no copy
                dist.broadcast(sent.view(-1).view(torch.uint8), source, group)
                if sent.data_ptr() != rows.data_ptr():
                    rows.copy_(sent)
        known *= layout.size(axis)


def differences(stored: Mapping[str, Placement], model: Mapping[str, Placement]) -> list[str]:
    """Why a checkpoint's tensors do not fit a state's. Only one of them may have a loss scale
    (another precision)."""
    missing = [name for name in model if name not in stored and name not in LOSS_SCALE]
    unknown = [name for name in stored if name not in model and name not in LOSS_SCALE]
    both = [(name, stored[name], model[name]) for name in model if name in stored]
    shapes = [
        f"{name} (there {list(x.shape)}, the model's {list(y.shape)})"
        for name, x, y in both
        if x.shape != y.shape
    ]
    other = {name: (x, y) for name, x, y in both if x.dtype != y.dtype}
    types = [f"{name} (there {x.dtype}, the model's {y.dtype})" for name, (x, y) in other.items()]
    lists = {
        "missing": missing,
        "the model has no": unknown,
        "other shapes": shapes,
        "other types": types,
    }
    lines = [
        f"{text}{':' * text.startswith('other')} {join_some(names)}"
        for text, names in lists.items()
        if names
    ]
    if missing and all(name.endswith(".ema") for name in missing):
        lines.append(
            "it was written without optimizer.ema_decay, which begins with a run: model.weights "
            "begins one"
        )
    elif (
        lines
        and not shapes
        and all(name.startswith("optimizer.") for name in (*missing, *unknown, *other))
    ):
        lines.append(
            "it was written with another optimizer (optimizer.name, state_precision or groups): "
            "take those of its "
            "config.yaml, or begin another run from its weights with model.weights=CHECKPOINT "
            "train.output=FOLDER"
        )
    return lines


def files_needed(
    manifest: Manifest, placements: Mapping[str, Placement], layout: Layout, rank: int
) -> set[int]:
    """The writing ranks whose files a rank of this layout reads."""
    parts = (
        (name, tensor, part_of_rank(tensor, layout, rank)) for name, tensor in placements.items()
    )
    return {writer for writer, *_ in _reads(manifest, layout, rank, parts)}


def _reads(
    manifest: Manifest,
    layout: Layout,
    rank: int,
    parts: Iterable[tuple[str, Placement, Part | None]],
) -> Iterator[tuple[int, str, Part, Part]]:
    """What a rank reads for its parts: (rank that wrote the file, tensor, this rank's share, piece
    in the file)."""
    for name, tensor, share in parts:
        # else no group can exchange it: read all
        if share is not None and replica_axes(tensor, layout) is not None:
            share = share_of(share, tensor, layout, copy_number(tensor, layout, rank))
        if name in manifest.tensors and share is not None and not is_empty(share):
            for writer, piece in pieces(manifest.tensors[name], manifest.layout, share):
                yield writer, name, share, piece


def _chunks(tensor: Placement, share: Part, piece: Part) -> Iterator[Part]:
    """The overlap of a piece with a share, as parts of the whole tensor of at most `CHUNK` bytes,
    or one row."""
    rows, *rest = overlap(piece, share)
    width = math.prod(shape_of(piece)[1:]) * SIZES[tensor.dtype]
    step = max(1, CHUNK // max(1, width))
    for first in range(rows.start, rows.stop, step):
        yield slice(first, min(first + step, rows.stop)), *rest
