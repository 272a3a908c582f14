"""Writes a model as a Hugging Face directory, tensor by tensor, whatever the mesh that it is spread over.

All shapes are known, so a file's header is written first and its tensors follow. The files are shared out among the
ranks that see the folder. In each turn every one of these writers receives the parts of one tensor from the ranks that
hold them and writes it: no rank ever holds more than one whole tensor. Everything goes into a folder beside the right
one, which takes its place when it is complete and on disk.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain import weights
from meshtrain.cuts import Part
from meshtrain.errors import InputError
from meshtrain.huggingface import KINDS, named_tensors
from meshtrain.parts import holders, local_part, part_of
from meshtrain.runtime import Job

Turn = tuple[int, str, weights.Entry]  # the rank that writes, its file, and the tensor


def export(
    model: nn.Module,
    folder: str | Path,
    job: Job,
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
        job: the running job, whose ranks hold the model.
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
    kinds = {name: dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in tensors.items()}
    entries = [weights.Entry(name, KINDS[kinds[name]], tuple(tensors[name].shape)) for name in tensors]
    files = weights.planned_files(entries, file_bytes)
    writers = _begin(target, making, job)
    try:
        with _Files(making, files) as out, torch.no_grad():
            for turn in turns(files, writers):
                for file, entry, whole in _exchange(turn, tensors, kinds, job):
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


def _exchange(
    turn: Sequence[Turn], tensors: Mapping[str, Tensor], kinds: Mapping[str, torch.dtype], job: Job
) -> Iterator[tuple[str, weights.Entry, Tensor]]:
    """Sends this rank's parts of the turn's tensors to their writers; yields the whole tensor that is its to write."""
    operations, kept = [], []
    for writer, file, entry in turn:
        tensor, kind = tensors[entry.name], kinds[entry.name]
        local, own = local_part(tensor.detach())
        sends, receives = _moves(tensor, writer, job.rank)
        if sends:
            wire = local.to(kind).contiguous().view(-1).view(torch.uint8)
            operations.append(dist.P2POp(dist.isend, wire, writer))
        if writer == job.rank:
            parts = [(own, local)]
            for rank, part in receives:
                buffer = torch.empty([each.stop - each.start for each in part], dtype=kind, device=local.device)
                operations.append(dist.P2POp(dist.irecv, buffer.view(-1).view(torch.uint8), rank))
                parts.append((part, buffer))
            kept.append((file, entry, kind, parts))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for file, entry, kind, parts in kept:
        whole = torch.empty(entry.shape or (1,), dtype=kind)
        for part, values in parts:
            whole[part] = values.to("cpu", kind)
        yield file, entry, whole


def _moves(tensor: Tensor, writer: int, rank: int) -> tuple[bool, list[tuple[int, Part]]]:
    """Whether this rank sends its part to the writer, and, if it is the writer, from whom which parts come.

    Where groups hold copies of a tensor, each group's mesh names its own ranks: only the writer's group sends.
    """
    if not isinstance(tensor, DTensor) or writer not in tensor.device_mesh.mesh:
        return False, []
    has = part_of(tensor, writer)
    others = [(holder, part) for holder, part in holders(tensor) if holder != writer and part != has]
    return rank in [holder for holder, _ in others], others if rank == writer else []


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
