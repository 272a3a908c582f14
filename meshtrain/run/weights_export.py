"""Distributed export: a model on any mesh becomes a Hugging Face directory, tensor by tensor.

The files are distributed over the ranks that see the folder. In each turn each writer receives the
parts of one stored tensor (of one expert) and writes it: no rank holds more than that besides its
own shards.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.checkpoint.directory import find_checkpoint, read_manifest
from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.state import gather_placements
from meshtrain.data.tokenizer import local_tokenizer
from meshtrain.errors import InputError, printable
from meshtrain.huggingface.export import (
    ExportFolder,
    WeightFiles,
    as_input_errors,
    plan_export,
)
from meshtrain.huggingface.export_texts import small_files, tokenizer_files
from meshtrain.huggingface.load import DTYPES, named_tensors
from meshtrain.huggingface.safetensors import (
    CONFIG,
    FILE_BYTES,
    GENERATION_CONFIG,
    SENTENCEPIECE,
    TOKENIZER_FILES,
    Entry,
)
from meshtrain.huggingface.stored_names import StoredTensor, copies_of, table_of
from meshtrain.job.hub import local_path
from meshtrain.job.parsing import read_limited
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parallel.sharding import (
    Part,
    local_part,
    overlap,
    overlapping,
    shape_of,
    tensor_spec,
    within,
)
from meshtrain.pipeline.engine import Pipeline

# bytes of a file beside weights; tokenizers of large vocabularies have a third of that
MAX_SMALL_FILE = 2**27
_MOST_STARTS = 100  # runs that may have started one from the other

Turn = tuple[int, str, Entry]  # the rank that writes, its file, and the tensor


def export(
    model: nn.Module,
    folder: str | Path,
    job: Job,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    data: Mapping[str, Any] | None = None,
    weights: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes the model's weights; all ranks call it.

    Args:
        model: parallelized over `mesh`, or plain in a world of one.
        folder: is created, or replaces an earlier export.
        dtype: of the floating tensors in the files.
        config: the contents of config.json, except for the dtype; None writes none.
        tokenizer: a tokenizer.json to be copied beside the weights, with the files that belong to
            it.
        data: the run's section `data`, which says how documents ended.
        weights: `model.weights`: what it says of the ends of texts, and its tokenizer, are kept.
        file_bytes: the maximum size of one file, unless a tensor is larger.

    Raises on every rank: AgreedError: a rank may not write there; TrainingError: its disk is full,
    or has failed.
    """
    place = ExportFolder(folder)
    tensors = {names[0]: tensor for names, tensor in named_tensors(model).items()}
    specs = [tensor_spec(name, tensor) for name, tensor in tensors.items()]
    placements = gather_placements(specs, job, mesh.layout)
    entries = [Entry(name, tensor.dtype, tensor.shape) for name, tensor in placements.items()]
    first_stage = model.stages()[0] if isinstance(model, Pipeline) else model
    files, parts = plan_export(
        entries, dtype, file_bytes, table_of(first_stage), copies_of(first_stage)
    )
    writers = _begin(place, job)
    try:
        # raised after the last turn: other ranks wait for this rank's parts
        problem: OSError | None = None
        with WeightFiles(place.making, files) as out, torch.no_grad():
            for turn in turns(files, writers):
                for received in _exchange(turn, parts, tensors, placements, job, mesh.layout):
                    if problem is None:
                        problem = received.write(out)
        with job.collective_check("writing the export"), as_input_errors(place.making):
            if problem is not None:
                raise problem
        with job.collective_check("finishing the export"), as_input_errors(place.target):
            if job.rank == 0:
                own_tokenizer: Mapping[str, str] = {}
                if tokenizer is not None:
                    own_tokenizer = tokenizer_files(local_tokenizer(str(tokenizer)))
                source = source_files(weights, job.say)
                texts = small_files(config, dtype, own_tokenizer, data or {}, source)
                place.finish(files, texts)
    finally:
        if job.rank == 0:
            place.drop()


def source_files(weights: Any, say: Callable[[str], None]) -> dict[str, str]:
    """What the Hugging Face directory that a run started from says beside its tensors: texts by the
    files' names. Bytes of a tokenizer.model that are no characters are surrogates in its text (PEP
    383).

    A run may have started from a checkpoint, whose run started from the directory. Says if it is
    not there any more. A checkpoint may come from a stranger, so no more is read than these files,
    if they are small and plain.

    Args:
        weights: the run's `model.weights`.
    """
    folder = _first_source(weights)
    if folder is None:
        return {}
    texts = {}
    for name in (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES):
        with suppress(InputError, OSError, RuntimeError, ValueError):
            content = read_limited(folder / name, MAX_SMALL_FILE)
            if name == SENTENCEPIECE:
                texts[name] = content.decode("utf-8", "surrogateescape")
            else:
                texts[name] = content.decode("utf-8-sig")
    if CONFIG not in texts:
        say(
            f"the export has no ends of texts and no tokenizer of {printable(str(folder))}, from "
            f"which the run started: no {CONFIG} can be read there"
        )
        return {}
    return texts


def _first_source(weights: Any) -> Path | None:
    """The folder with which a chain of runs began, each of which may have started from a checkpoint
    of the one before; None: the first of them started from nothing."""
    folder = Path()
    try:
        for _ in range(_MOST_STARTS):
            if not isinstance(weights, str):
                return None
            folder = local_path(weights)
            checkpoint = find_checkpoint(folder)
            if checkpoint is None:
                break
            manifest, _ = read_manifest(checkpoint)
            weights = manifest.section("model").get("weights")
    except (InputError, OSError, RuntimeError, ValueError):  # RuntimeError: no home folder
        return Path(str(weights))
    return folder


def turns(files: Mapping[str, Sequence[Entry]], writers: Sequence[int]) -> Iterator[list[Turn]]:
    """Which tensors are written at the same time, one by each writer; writers take the files in
    turn (round-robin)."""
    queues: list[list[Turn]] = [[] for _ in writers]  # what each writes, one after the other
    for number, (file, entries) in enumerate(files.items()):
        index = number % len(writers)
        writer = writers[index]
        queues[index] += [(writer, file, entry) for entry in entries]
    for at_once in zip_longest(*queues):
        yield [turn for turn in at_once if turn is not None]


def _begin(place: ExportFolder, job: Job) -> list[int]:
    """Creates the folder to write in; returns the ranks that see it, rank 0 first."""
    token = f".{uuid.uuid4().hex}"
    with job.collective_check("making the export's folder"), as_input_errors(place.target):
        if job.rank == 0:
            place.make()
            (place.making / token).touch()
    token = job.reduce("making the export's folder", token, itemgetter(0))
    seen = job.gather("looking for the export's folder", (place.making / token).exists())
    if job.rank == 0:
        (place.making / token).unlink()
    return [rank for rank, sees in enumerate(seen) if sees]


def _holders(tensor: Placement, part: Part, writer: int, layout: Layout) -> list[tuple[int, Part]]:
    """Which ranks, the writer included, send which pieces of a part to a writer; together the
    pieces are the part. If several groups hold the tensor, the writer's own sends it, or the one
    that differs from it in `pp` only."""
    own_stage = layout.index(writer, "pp")
    stage = own_stage if own_stage in tensor.stages else tensor.stages[0]
    copy = layout.copy(writer, *tensor.axes)
    axes = [axis for axis, _ in tensor.cuts]
    cuts = [(dim, layout.size(axis)) for axis, dim in tensor.cuts]
    whole = tuple(slice(0, size) for size in tensor.dims)
    holders = []
    for indices, piece in overlapping(cuts, whole, part):
        coordinate = dict(zip(axes, indices, strict=True))
        rank = layout.rank_of_copy(copy, pp=stage, **coordinate)
        holders.append((rank, overlap(piece, part)))
    return holders


@dataclass(frozen=True)
class _Received:
    """A tensor that this rank writes, and its pieces from all ranks that hold some."""

    file: str
    entry: Entry
    stored: StoredTensor
    pieces: list[tuple[Part, Tensor]] = field(default_factory=list)

    def write(self, out: WeightFiles) -> OSError | None:
        """Writes the tensor; returns an error of the disk."""
        whole = torch.empty(shape_of(self.stored.part), dtype=DTYPES[self.entry.dtype])
        for piece, values in self.pieces:
            whole[within(piece, self.stored.part)] = values.to("cpu", whole.dtype)
        as_bytes = whole.view(-1).view(torch.uint8).numpy()
        try:
            out.write(self.file, self.entry, [as_bytes.data])
        except OSError as error:
            return error
        return None


def _exchange(
    turn: Sequence[Turn],
    stored_parts: Mapping[str, tuple[str, StoredTensor]],
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    job: Job,
    layout: Layout,
) -> Iterator[_Received]:
    """Sends this rank's pieces of the turn's tensors to their writers; yields the tensor that it
    must write."""
    operations = []
    outputs = []
    for writer, file, entry in turn:
        name, stored = stored_parts[entry.name]
        dtype = DTYPES[entry.dtype]
        received = _Received(file, entry, stored)
        for rank, piece in _holders(placements[name], stored.part, writer, layout):
            if rank == job.rank:
                local, own = local_part(tensors[name])
                values = local.reshape(shape_of(own))[within(piece, own)]
                if rank == writer:
                    received.pieces.append((piece, values))
                else:
                    # As bytes of the stored dtype: no backend sends all dtypes.
                    wire = values.to(dtype).contiguous().view(-1).view(torch.uint8)
                    operations.append(dist.P2POp(dist.isend, wire, writer))
            elif writer == job.rank:
                buffer = torch.empty(shape_of(piece), dtype=dtype, device=job.device)
                operations.append(dist.P2POp(dist.irecv, buffer.view(-1).view(torch.uint8), rank))
                received.pieces.append((piece, buffer))
        if writer == job.rank:
            outputs.append(received)
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    yield from outputs
