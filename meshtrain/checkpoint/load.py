"""Loading a checkpoint onto any layout, whatever layout wrote it: each rank reads what it holds, and its checksums."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path

from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.placement import Placement, pieces
from meshtrain.checkpoint.shard_file import ShardReader
from meshtrain.checkpoint.state import LOSS_SCALE, LocalShard, State
from meshtrain.checkpoint.weights import read_piece
from meshtrain.errors import InputError, join_some
from meshtrain.huggingface.safetensors import SIZES
from meshtrain.parallel.sharding import Part, overlap, shape_of

THREADS = 4  # that read at once: neither the disk nor a checksum needs Python's lock
AHEAD = 4 * THREADS  # reads that are asked for before the first of them is done; fewer than files stay open
CHUNK = 32 * 2**20  # bytes of a read


def restore(checkpoint: Path, manifest: Manifest, state: State) -> None:
    """Fills the state from a checkpoint; the bits are those that were saved.

    Raises:
        InputError: the checkpoint is not that of this model; names the tensors. On all ranks, before any is read.
        DamagedError: a file is not what was written; names file and tensor. Some of the state has been filled.
    """
    problems = differences(manifest.tensors, state.placements)
    if problems:
        raise InputError(f"{checkpoint} does not fit the model: {'; '.join(problems)}")
    with ShardReader(checkpoint, manifest) as files, ThreadPoolExecutor(THREADS, "checkpoint") as pool:
        pending: deque[Future[None]] = deque()
        try:
            for rank, local, piece in _reads(manifest, state.shards):
                file = files.shard_with(local.name, rank, piece)
                for part in _chunks(local, piece):
                    pending.append(pool.submit(read_piece, file, local.name, piece, part, local.local, local.part))
                while len(pending) > AHEAD:
                    pending.popleft().result()
            while pending:
                pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)  # before the files are closed
    state.loaded()


def differences(stored: Mapping[str, Placement], model: Mapping[str, Placement]) -> list[str]:
    """Why the tensors of a checkpoint are not a state's; a loss scale may be on one side only (another precision)."""
    missing = [name for name in model if name not in stored and name not in LOSS_SCALE]
    unknown = [name for name in stored if name not in model and name not in LOSS_SCALE]
    both = [(name, stored[name], model[name]) for name in model if name in stored]
    shapes = [
        f"{name} (there {list(x.shape)}, the model's {list(y.shape)})" for name, x, y in both if x.shape != y.shape
    ]
    types = [f"{name} (there {x.dtype}, the model's {y.dtype})" for name, x, y in both if x.dtype != y.dtype]
    lists = {"missing": missing, "the model has no": unknown, "other shapes": shapes, "other types": types}
    return [f"{text}{':' * text.startswith('other')} {join_some(names)}" for text, names in lists.items() if names]


def _reads(manifest: Manifest, shards: Sequence[LocalShard]) -> list[tuple[int, LocalShard, Part]]:
    """File by file: the rank that has written it, what this rank holds of a tensor, and a piece of that in the file."""
    both = [(manifest.tensors[local.name], local) for local in shards if local.name in manifest.tensors]
    reads = [(rank, local, x) for tensor, local in both for rank, x in pieces(tensor, manifest.layout, local.part)]
    return sorted(reads, key=itemgetter(0))


def _chunks(local: LocalShard, piece: Part) -> Iterator[Part]:
    """What is needed of a piece, as parts of the whole of at most `CHUNK` bytes, or of one row."""
    rows, *rest = overlap(piece, local.part)
    width = math.prod(shape_of(piece)[1:]) * SIZES[local.placement.dtype]
    step = max(1, CHUNK // max(1, width))
    for first in range(rows.start, rows.stop, step):
        yield slice(first, min(first + step, rows.stop)), *rest
