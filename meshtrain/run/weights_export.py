"""Distributed export: a model on any mesh becomes a Hugging Face directory, tensor by tensor.

The files are shared out among the ranks that see the folder. In each turn every one of these writers receives the parts
of one tensor from the ranks that hold them and writes it: no rank ever holds more than one whole tensor.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.checkpoint.placement import Placement, is_empty, part_of_rank, shape_of
from meshtrain.checkpoint.state import gather_placements
from meshtrain.huggingface.export import ExportFolder, WeightFiles, as_input_errors, config_text, plan_export
from meshtrain.huggingface.load import DTYPES, named_tensors
from meshtrain.huggingface.safetensors import FILE_BYTES, Entry
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parallel.sharding import Part, local_part, tensor_spec

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
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes the model's weights; all ranks call it.

    Args:
        model: parallelized over `mesh`, or plain in a world of one.
        folder: is made, or takes the place of an earlier export.
        dtype: of the floating tensors in the files.
        config: what config.json holds, but for the type; None writes none.
        tokenizer: a tokenizer.json to be copied beside the weights.
        file_bytes: of one file at most, unless a tensor is larger.

    Raises:
        AgreedError: on every rank: a rank could not write, for instance because its disk is full.
    """
    place = ExportFolder(folder)
    tensors = {names[0]: tensor for names, tensor in named_tensors(model).items()}
    placements = gather_placements([tensor_spec(*pair) for pair in tensors.items()], job, mesh.layout)
    entries = [Entry(name, tensor.dtype, tensor.shape) for name, tensor in placements.items()]
    files = plan_export(entries, dtype, file_bytes)
    writers = _begin(place, job)
    try:
        problem: OSError | None = None  # raised after the last turn: others wait for this rank's parts
        with WeightFiles(place.making, files) as out, torch.no_grad():
            for turn in turns(files, writers):
                for file, entry, whole in _exchange(turn, tensors, placements, job, mesh.layout):
                    try:
                        if problem is None:
                            out.write(file, entry, [whole.view(-1).view(torch.uint8).numpy().data])
                    except OSError as error:
                        problem = error
        with job.collective_check("writing the export"), as_input_errors(place.making):
            if problem is not None:
                raise problem
        with job.collective_check("finishing the export"), as_input_errors(place.target):
            if job.rank == 0:
                text = None if tokenizer is None else Path(tokenizer).expanduser().read_bytes().decode()
                place.finish(files, config_text(config, dtype), text)
    finally:
        if job.rank == 0:
            place.drop()


def turns(files: Mapping[str, Sequence[Entry]], writers: Sequence[int]) -> Iterator[list[Turn]]:
    """Which tensors are written at the same time, one by each writer; files go round among the writers."""
    queues: list[list[Turn]] = [[] for _ in writers]
    for n, (file, entries) in enumerate(files.items()):
        queues[n % len(writers)] += [(writers[n % len(writers)], file, entry) for entry in entries]
    for turn in zip_longest(*queues):
        yield [item for item in turn if item is not None]


def _begin(place: ExportFolder, job: Job) -> list[int]:
    """Makes the folder to write in; returns the ranks that see it, rank 0 the first of them."""
    token = f".{uuid.uuid4().hex}"
    with job.collective_check("making the export's folder"), as_input_errors(place.target):
        if job.rank == 0:
            place.make()
            (place.making / token).touch()
    token = job.gather("making the export's folder", token)[0]
    visible = job.gather("looking for the export's folder", (place.making / token).exists())
    if job.rank == 0:
        (place.making / token).unlink()
    return [rank for rank, sees in enumerate(visible) if sees]


def _holders(tensor: Placement, writer: int, layout: Layout) -> list[tuple[int, Part]]:
    """Which rank sends which part to a writer, itself included. Together the parts are the whole. Where several groups
    have the tensor, it is the writer's own, or the one that differs from it in `pp` only."""
    index, copy = layout.index(writer, "pp"), layout.copy(writer, *tensor.axes)
    stage = index if index in tensor.stages else tensor.stages[0]
    holders = []
    for indices in product(*(range(layout.size(axis)) for axis, _ in tensor.cuts)):
        place = {axis: i for (axis, _), i in zip(tensor.cuts, indices, strict=True)}
        rank = layout.rank_of_copy(copy, pp=stage, **place)
        piece = part_of_rank(tensor, layout, rank)
        if piece is not None and not is_empty(piece):
            holders.append((rank, piece))
    return holders


def _exchange(
    turn: Sequence[Turn], tensors: Mapping[str, Tensor], placements: Mapping[str, Placement], job: Job, layout: Layout
) -> Iterator[tuple[str, Entry, Tensor]]:
    """Sends this rank's parts of the turn's tensors to their writers; yields the whole tensor that is its to write."""
    operations, outputs = [], []
    for writer, file, entry in turn:
        kind, holders = DTYPES[entry.dtype], _holders(placements[entry.name], writer, layout)
        if writer == job.rank:
            parts = []
            for rank, piece in holders:
                if rank == writer:
                    parts.append((piece, local_part(tensors[entry.name])[0]))
                    continue
                buffer = torch.empty(shape_of(piece), dtype=kind, device=job.device)
                operations.append(dist.P2POp(dist.irecv, buffer.view(-1).view(torch.uint8), rank))
                parts.append((piece, buffer))
            outputs.append((file, entry, kind, parts))
        elif job.rank in [rank for rank, _ in holders]:
            wire = local_part(tensors[entry.name])[0].to(kind).contiguous().view(-1).view(torch.uint8)
            operations.append(dist.P2POp(dist.isend, wire, writer))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for file, entry, kind, parts in outputs:
        whole = torch.empty(entry.shape or (1,), dtype=kind)
        for piece, values in parts:
            whole[piece] = values.to("cpu", kind)
        yield file, entry, whole
