"""Writing a Hugging Face directory: written under a temporary name, and renamed when it is complete
and on disk."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

import torch

from meshtrain.errors import InputError
from meshtrain.huggingface import safetensors as weights
from meshtrain.huggingface.load import KINDS
from meshtrain.huggingface.safetensors import Entry
from meshtrain.huggingface.stored_names import (
    StoredTensor,
    Table,
    stored_copies,
    stored_tensors,
)
from meshtrain.job.storage import DISK_ERRORS, fsync_file, fsync_folder, write_all, write_whole

# Exported in float32, as transformers does: a bias moves in steps smaller than 16 bits can resolve.
FLOAT32 = ("*.e_score_correction_bias",)


@contextmanager
def as_input_errors(path: Path) -> Iterator[None]:
    """Turns an OSError into an InputError, if another path or other rights would help. A disk or a
    server that fails, or is full, is no wrong input: the same command may finish the export later.
    Its error names the export."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_ERRORS:
            error.filename = error.filename or str(path)  # a failed write does not name its file
            raise
        raise InputError(
            f"the export to {error.filename or path} failed: {error.strerror or error}"
        ) from error


def plan_export(
    tensors: Iterable[Entry],
    dtype: torch.dtype,
    file_bytes: int = weights.FILE_BYTES,
    stored_as: Table | None = None,
    stored_again: Table | None = None,
) -> tuple[dict[str, list[Entry]], dict[str, tuple[str, StoredTensor]]]:
    """The files of an export of a model's tensors, and for each entry the model's tensor of which
    it is a part.

    Floating-point tensors become `dtype`. `stored_as`, `stored_again`: see `stored_names`.

    Raises ValueError: the table does not fit, or maps two tensors to one name.
    """
    entries: list[Entry] = []
    parts: dict[str, tuple[str, StoredTensor]] = {}
    for tensor in tensors:
        pieces = stored_tensors(tensor.name, tensor.shape, stored_as or {})
        pieces += stored_copies(tensor.name, tensor.shape, stored_again or {})
        for piece in pieces:
            if piece.name in parts:
                raise ValueError(f"stored_as: two tensors of the model are stored as {piece.name}")
            entries.append(Entry(piece.name, _exported_dtype(tensor, dtype), piece.shape))
            parts[piece.name] = tensor.name, piece
    return weights.planned_files(entries, file_bytes), parts


def _exported_dtype(tensor: Entry, dtype: torch.dtype) -> str:
    """The name of the dtype that a tensor has in the files."""
    if tensor.dtype not in weights.FLOATS:
        return tensor.dtype
    if dtype.itemsize < 4 and any(fnmatchcase(tensor.name, pattern) for pattern in FLOAT32):
        return "F32"
    return KINDS[dtype]


class ExportFolder:
    """The target folder of an export. One process calls its methods; several may write files in
    `making`."""

    def __init__(self, folder: str | Path) -> None:
        self.target = Path(folder).expanduser().absolute()
        self.making = self.target.with_name(f".{self.target.name}.tmp")

    def make(self) -> None:
        """Makes the folder to write in. Raises InputError: the target holds something that no
        export has written."""
        self._refuse()
        self.drop()  # left by a job that was ended while it wrote
        self.making.mkdir(parents=True)

    def drop(self) -> None:
        """Removes what is not finished."""
        _remove_folder(self.making)

    def finish(
        self,
        files: Mapping[str, Sequence[Entry]],
        texts: Mapping[str, str],
    ) -> None:
        """Writes small files of these texts by name, and the index; then renames the folder into
        place. An earlier export is deleted last. Surrogates in a text are bytes that are no
        characters (PEP 383)."""
        texts = dict(texts)
        if len(files) > 1:
            texts[weights.INDEX] = weights.index(files)
        for name, text in texts.items():
            write_whole(self.making / name, text.encode(errors="surrogateescape"))
        fsync_folder(self.making)
        # the target may have been changed meanwhile: do not delete what is not an export
        self._refuse()
        # A folder cannot be replaced in one step: the earlier export makes way first, and is there
        # until the new one has its name.
        before = self.target.with_name(f".{self.target.name}.old")
        _remove_folder(before)
        if self.target.exists():
            self.target.rename(before)
        self.making.rename(self.target)
        fsync_folder(self.target.parent)
        _remove_folder(before)

    def _refuse(self) -> None:
        problem = weights.export_problem(self.target)
        if problem:
            raise InputError(f"the export cannot be written: {problem}")


def _remove_folder(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


class WeightFiles(AbstractContextManager["WeightFiles"]):
    """Writes weight files tensor by tensor, in the order of a plan (`plan_export`)."""

    def __init__(self, folder: Path, plan: Mapping[str, Sequence[Entry]]) -> None:
        self.folder = folder
        self.plan = plan
        self._remaining = {name: list(entries) for name, entries in plan.items()}
        self._files: dict[str, BinaryIO] = {}

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def write(self, name: str, entry: Entry, data: Iterable[memoryview]) -> None:
        """Appends a tensor, in any number of pieces, to its file, which is synced after its last.
        Raises OSError."""
        try:
            if name not in self._files:
                self._files[name] = (self.folder / name).open("xb", buffering=0)
                metadata = {"format": "pt", "writer": weights.WRITER}
                write_all(self._files[name], weights.pack_header(self.plan[name], metadata))
            file = self._files[name]
            remaining = self._remaining[name]
            assert remaining.pop(0) == entry  # the header has promised this order
            for piece in data:
                write_all(file, piece)
            if not remaining:
                fsync_file(file)
                file.close()
        except OSError as error:
            error.filename = error.filename or str(self.folder / name)
            raise
