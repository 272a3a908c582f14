"""Writes a model as a Hugging Face directory, tensor by tensor, whatever the mesh that it is spread over.

Of each stage of a pipeline one rank tells all others which tensors the stage has and which axes cut them; from that and
the layout every rank knows who holds which part of what. All shapes are known, so a file's header is written first and
its tensors follow. The files are shared out among the ranks that see the folder. In each turn every one of these
writers receives the parts of one tensor from the ranks that hold them and writes it: no rank ever holds more than one
whole tensor.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain import weights
from meshtrain.checkpoint.placement import Placement, held_part, is_empty
from meshtrain.checkpoint.state import spread
from meshtrain.cuts import Part
from meshtrain.export_folder import ExportFolder, WeightFiles, described, told
from meshtrain.huggingface import DTYPES, KINDS, named_tensors
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parts import local_part
from meshtrain.runtime import Job

Turn = tuple[int, str, weights.Entry]  # the rank that writes, its file, and the tensor


def export(
    model: nn.Module,
    folder: str | Path,
    job: Job,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    file_bytes: int = weights.FILE_BYTES,
) -> None:
    """Writes the model's weights; all ranks call it.

    Args:
        model: parallelized, or plain in a world of one.
        folder: is made, or takes the place of an earlier export.
        job: the running job.
        mesh: over its ranks, by which the model is spread.
        dtype: of the floating tensors in the files.
        config: what config.json holds, but for the type; None writes none.
        tokenizer: a tokenizer.json to be copied beside the weights.
        file_bytes: of one file at most, unless a tensor is larger.

    Raises:
        AgreedError: on every rank: a rank could not write, for instance because its disk is full.
    """
    place = ExportFolder(folder)
    tensors = {names[0]: tensor for names, tensor in named_tensors(model).items()}
    placements = spread(tensors, job, mesh.layout)
    files = weights.planned_files([_entry(name, one, dtype) for name, one in placements.items()], file_bytes)
    writers = _begin(place, job)
    try:
        with WeightFiles(place.making, files) as out, torch.no_grad():
            writing = _Writing(out)
            for turn in turns(files, writers):
                for file, entry, whole in _exchange(turn, tensors, placements, job, mesh.layout):
                    writing.write(file, entry, whole)
        with job.together("writing the export"), told(place.making):
            writing.raise_problem()
        with job.together("finishing the export"), told(place.target):
            if job.rank == 0:
                text = None if tokenizer is None else Path(tokenizer).expanduser().read_bytes().decode()
                place.finish(files, described(config, str(dtype).removeprefix("torch.")), text)
    finally:
        if job.rank == 0:
            place.drop()


def turns(files: Mapping[str, Sequence[weights.Entry]], writers: Sequence[int]) -> Iterator[list[Turn]]:
    """Which tensors are written at the same time, one by each writer; files go round among the writers."""
    queues: list[list[Turn]] = [[] for _ in writers]
    for n, (file, entries) in enumerate(files.items()):
        queues[n % len(writers)] += [(writers[n % len(writers)], file, entry) for entry in entries]
    for turn in zip_longest(*queues):
        yield [one for one in turn if one is not None]


def _begin(place: ExportFolder, job: Job) -> list[int]:
    """Makes the folder to write in; returns the ranks that see it, rank 0 the first of them."""
    token = f".{uuid.uuid4().hex}"
    with job.together("making the export's folder"), told(place.target):
        if job.rank == 0:
            place.make()
            (place.making / token).touch()
    token = job.gather("making the export's folder", token)[0]
    seen = job.gather("looking for the export's folder", (place.making / token).exists())
    if job.rank == 0:
        (place.making / token).unlink()
    return [rank for rank, sees in enumerate(seen) if sees]


def _entry(name: str, tensor: Placement, dtype: torch.dtype) -> weights.Entry:
    kind = KINDS[dtype] if tensor.dtype in weights.FLOATS else tensor.dtype
    return weights.Entry(name, kind, tensor.shape)


def _holders(tensor: Placement, writer: int, layout: Layout) -> list[tuple[int, Part]]:
    """Which rank sends which part to a writer, itself included if it has one. Together the parts are the whole.

    Where several groups have the tensor, it is the writer's own, or the one that differs from it in `pp` only.
    """
    near = layout.coordinate(writer)
    if "pp" in near and near["pp"] not in tensor.stages:
        near["pp"] = tensor.stages[0]
    found = []
    for indices in product(*(range(layout.size(axis)) for axis, _ in tensor.cuts)):
        rank = layout.rank(**near | {axis: i for (axis, _), i in zip(tensor.cuts, indices, strict=True)})
        piece = held_part(tensor, layout, rank)
        if piece is not None and not is_empty(piece):
            found.append((rank, piece))
    return found


def _exchange(
    turn: Sequence[Turn], tensors: Mapping[str, Tensor], placements: Mapping[str, Placement], job: Job, layout: Layout
) -> Iterator[tuple[str, weights.Entry, Tensor]]:
    """Sends this rank's parts of the turn's tensors to their writers; yields the whole tensor that is its to write."""
    operations, kept = [], []
    for writer, file, entry in turn:
        kind, holders = DTYPES[entry.dtype], _holders(placements[entry.name], writer, layout)
        if writer == job.rank:
            parts = []
            for rank, piece in holders:
                if rank == writer:
                    parts.append((piece, local_part(tensors[entry.name])[0]))
                    continue
                buffer = torch.empty([each.stop - each.start for each in piece], dtype=kind, device=job.device)
                operations.append(dist.P2POp(dist.irecv, buffer.view(-1).view(torch.uint8), rank))
                parts.append((piece, buffer))
            kept.append((file, entry, kind, parts))
        elif job.rank in [rank for rank, _ in holders]:
            wire = local_part(tensors[entry.name])[0].to(kind).contiguous().view(-1).view(torch.uint8)
            operations.append(dist.P2POp(dist.isend, wire, writer))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for file, entry, kind, parts in kept:
        whole = torch.empty(entry.shape or (1,), dtype=kind)
        for piece, values in parts:
            whole[piece] = values.to("cpu", kind)
        yield file, entry, whole


class _Writing:
    """The files that this rank writes. A problem is kept until the ranks meet: nobody may wait for a rank that left."""

    def __init__(self, files: WeightFiles) -> None:
        self.files = files
        self.problem: OSError | None = None

    def write(self, name: str, entry: weights.Entry, whole: Tensor) -> None:
        if self.problem is not None:
            return
        try:
            self.files.write(name, entry, [whole.view(-1).view(torch.uint8).numpy().data])
        except OSError as error:
            self.problem = error

    def raise_problem(self) -> None:
        if self.problem is not None:
            raise self.problem
