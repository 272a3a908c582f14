"""Writes a model as a Hugging Face directory, tensor by tensor, whatever the mesh that it is spread over.

Of each stage of a pipeline one rank tells all others which tensors the stage has and which axes cut them; from that and
the layout every rank knows who holds which part of what. All shapes are known, so a file's header is written first and
its tensors follow. The files are shared out among the ranks that see the folder. In each turn every one of these
writers receives the parts of one tensor from the ranks that hold them and writes it: no rank ever holds more than one
whole tensor. Everything goes into a folder beside the right one, which takes its place when it is complete and on disk.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain import weights
from meshtrain.cuts import Part, part
from meshtrain.errors import InputError
from meshtrain.huggingface import KINDS, named_tensors
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parts import cut_axes, local_part
from meshtrain.runtime import Job

DTYPES = {word: dtype for dtype, word in KINDS.items()}
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
    target = Path(folder).expanduser().absolute()
    making = target.with_name(f".{target.name}.tmp")
    tensors = {names[0]: tensor for names, tensor in named_tensors(model).items()}
    spread = _spread(tensors, dtype, job, mesh.layout)
    files = weights.planned_files([one.entry for one in spread.values()], file_bytes)
    writers = _begin(target, making, job)
    try:
        with _Files(making, files) as out, torch.no_grad():
            for turn in turns(files, writers):
                for file, entry, whole in _exchange(turn, tensors, spread, job, mesh.layout):
                    out.write(file, entry, whole)
        with job.together("writing the export"), told(making):
            out.raise_problem()
        with job.together("finishing the export"), told(target):
            if job.rank == 0:
                _finish(target, making, files, _described(config, dtype), tokenizer)
    finally:
        if job.rank == 0 and making.exists():
            shutil.rmtree(making)


def turns(files: Mapping[str, Sequence[weights.Entry]], writers: Sequence[int]) -> Iterator[list[Turn]]:
    """Which tensors are written at the same time, one by each writer; files go round among the writers."""
    queues: list[list[Turn]] = [[] for _ in writers]
    for n, (file, entries) in enumerate(files.items()):
        queues[n % len(writers)] += [(writers[n % len(writers)], file, entry) for entry in entries]
    for turn in zip_longest(*queues):
        yield [one for one in turn if one is not None]


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What the system says of a file is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise InputError(f"the export to {error.filename or path} failed: {error.strerror or error}") from error


def _begin(target: Path, making: Path, job: Job) -> list[int]:
    """Makes the folder to write in; returns the ranks that see it, rank 0 the first of them."""
    token = f".{uuid.uuid4().hex}"
    with job.together("making the export's folder"), told(target):
        if job.rank == 0:
            _refuse(target)
            if making.exists():
                shutil.rmtree(making)  # of a job that was ended while it wrote
            making.mkdir(parents=True)
            (making / token).touch()
    token = job.gather("making the export's folder", token)[0]
    seen = job.gather("looking for the export's folder", (making / token).exists())
    if job.rank == 0:
        (making / token).unlink()
    return [rank for rank, sees in enumerate(seen) if sees]


def _refuse(target: Path) -> None:
    problem = weights.export_problem(target)
    if problem:
        raise InputError(f"the export cannot be written: {problem}")


@dataclass(frozen=True)
class _Spread:
    """A tensor of the whole model, and where it is.

    Attributes:
        stages: the indices on `pp` of the ranks that have it: one, or several if it is tied.
        cuts: which axes cut it, in the order of their cuts, each with the dim that it cuts.
    """

    entry: weights.Entry
    stages: tuple[int, ...]
    cuts: tuple[tuple[str, int], ...]

    def holders(self, writer: int, layout: Layout) -> list[tuple[int, Part]]:
        """Which rank sends which part to a writer, itself included if it has one. Together the parts are the whole.

        Where several groups have the tensor, it is the writer's own, or the one that differs from it in `pp` only.
        """
        near = layout.coordinate(writer)
        if "pp" in near and near["pp"] not in self.stages:
            near["pp"] = self.stages[0]
        sizes = [layout.size(axis) for axis, _ in self.cuts]
        found = []
        for indices in product(*map(range, sizes)):
            cuts = [(dim, size, i) for (_, dim), size, i in zip(self.cuts, sizes, indices, strict=True)]
            piece = part(self.entry.shape or (1,), cuts)
            if all(each.stop > each.start for each in piece):
                place = near | {axis: i for (axis, _), i in zip(self.cuts, indices, strict=True)}
                found.append((layout.rank(**place), piece))
        return found


def _spread(tensors: Mapping[str, Tensor], dtype: torch.dtype, job: Job, layout: Layout) -> dict[str, _Spread]:
    """All tensors of the model in the order of their names, also those that only other ranks hold; the same on all.

    Of the ranks with one index on `pp`, whose tensors are the same, the first tells.
    """
    coordinate = layout.coordinate(job.rank)
    told = None
    if not any(i for axis, i in coordinate.items() if axis != "pp"):
        kinds = {name: dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in tensors.items()}
        told = [[name, KINDS[kinds[name]], list(one.shape), cut_axes(one)] for name, one in tensors.items()]
    found: dict[str, _Spread] = {}
    for rank, there in enumerate(job.gather("listing the tensors to export", told)):
        index = layout.coordinate(rank).get("pp", 0)
        for name, kind, shape, cuts in there or ():
            before = found[name].stages if name in found else ()
            entry = weights.Entry(name, kind, tuple(shape))
            found[name] = _Spread(entry, (*before, index), tuple((axis, dim) for axis, dim in cuts))
    return {name: found[name] for name in sorted(found, key=_by_numbers)}


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Layer 2 comes before layer 10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in name.split(".")]


def _exchange(
    turn: Sequence[Turn], tensors: Mapping[str, Tensor], spread: Mapping[str, _Spread], job: Job, layout: Layout
) -> Iterator[tuple[str, weights.Entry, Tensor]]:
    """Sends this rank's parts of the turn's tensors to their writers; yields the whole tensor that is its to write."""
    operations, kept = [], []
    for writer, file, entry in turn:
        kind, holders = DTYPES[entry.dtype], spread[entry.name].holders(writer, layout)
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


@dataclass
class _Open:
    file: BinaryIO
    left: list[weights.Entry]  # in the order in which they are written


class _Files:
    """The files that this rank writes. A problem is kept until the ranks meet: nobody may wait for a rank that left."""

    def __init__(self, folder: Path, plan: Mapping[str, Sequence[weights.Entry]]) -> None:
        self.folder = folder
        self.plan = plan
        self.problem: OSError | None = None
        self._open: dict[str, _Open] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._open.values():
            one.file.close()

    def write(self, name: str, entry: weights.Entry, whole: Tensor) -> None:
        """Appends a tensor to its file, which is complete and on disk after its last one."""
        if self.problem is not None:
            return
        try:
            if name not in self._open:
                self._open[name] = _Open((self.folder / name).open("xb", buffering=0), list(self.plan[name]))
                _write_all(self._open[name].file, weights.header(self.plan[name]))
            one = self._open[name]
            assert one.left.pop(0) == entry
            _write_all(one.file, whole.view(-1).view(torch.uint8).numpy().data)
            if not one.left:
                os.fsync(one.file.fileno())
                one.file.close()
        except OSError as error:
            error.filename = error.filename or str(self.folder / name)
            self.problem = error

    def raise_problem(self) -> None:
        if self.problem is not None:
            raise self.problem


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _described(config: Mapping[str, Any] | None, dtype: torch.dtype) -> str | None:
    """The text of config.json. transformers 5 reads `dtype`, and older ones `torch_dtype`."""
    if config is None:
        return None
    name = str(dtype).removeprefix("torch.")
    return json.dumps({**config, "dtype": name, "torch_dtype": name}, indent=2) + "\n"


def _finish(
    target: Path,
    making: Path,
    files: Mapping[str, Sequence[weights.Entry]],
    config: str | None,
    tokenizer: str | Path | None,
) -> None:
    """The small files, and the folder gets its name. What stood there before is taken away last."""
    texts = {weights.CONFIG: config, weights.INDEX: weights.index(files) if len(files) > 1 else None}
    if tokenizer is not None:
        texts[weights.TOKENIZER] = Path(tokenizer).expanduser().read_text(encoding="utf-8")
    for name, text in texts.items():
        if text is not None:
            with (making / name).open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
    _sync(making)
    _refuse(target)  # whoever has put something there meanwhile keeps it
    before = target.with_name(f".{target.name}.old")
    if before.exists():
        shutil.rmtree(before)
    if target.exists():
        target.rename(before)
    making.rename(target)
    _sync(target.parent)
    if before.exists():
        shutil.rmtree(before)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
