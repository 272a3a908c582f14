"""The folder of exported weights: made beside the right one, whose place it takes when it is complete and on disk."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meshtrain import weights
from meshtrain.disk import fsync_folder
from meshtrain.errors import InputError


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What the system says of a file is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise InputError(f"the export to {error.filename or path} failed: {error.strerror or error}") from error


class ExportFolder:
    """Where an export goes. One process makes and finishes it; several may write files in `making`."""

    def __init__(self, folder: str | Path) -> None:
        self.target = Path(folder).expanduser().absolute()
        self.making = self.target.with_name(f".{self.target.name}.tmp")

    def make(self) -> None:
        """Makes the folder to write in.

        Raises:
            InputError: something that no export has written is where it will go.
        """
        self._refuse()
        self.drop()  # of a job that was ended while it wrote
        self.making.mkdir(parents=True)

    def drop(self) -> None:
        """Takes away what was not finished."""
        if self.making.exists():
            shutil.rmtree(self.making)

    def finish(self, files: Mapping[str, Sequence[weights.Entry]], config: str | None, tokenizer: str | None) -> None:
        """Writes the small files, whose texts are given; the folder gets its name. What stood there goes last."""
        index = weights.index(files) if len(files) > 1 else None
        texts = {weights.CONFIG: config, weights.INDEX: index, weights.TOKENIZER: tokenizer}
        for name, text in texts.items():
            if text is not None:
                with (self.making / name).open("x", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
        fsync_folder(self.making)
        self._refuse()  # whoever has put something there meanwhile keeps it
        before = self.target.with_name(f".{self.target.name}.old")
        if before.exists():
            shutil.rmtree(before)
        if self.target.exists():
            self.target.rename(before)
        self.making.rename(self.target)
        fsync_folder(self.target.parent)
        if before.exists():
            shutil.rmtree(before)

    def _refuse(self) -> None:
        problem = weights.export_problem(self.target)
        if problem:
            raise InputError(f"the export cannot be written: {problem}")


def described(config: Mapping[str, Any] | None, dtype: str) -> str | None:
    """The text of config.json; dtype in torch's words. transformers 5 reads `dtype`, and older ones `torch_dtype`."""
    return None if config is None else json.dumps({**config, "dtype": dtype, "torch_dtype": dtype}, indent=2) + "\n"


@dataclass
class _Open:
    file: BinaryIO
    left: list[weights.Entry]  # in the order in which they are written


class WeightFiles:
    """Files of weights that are written tensor by tensor, in the order of a plan (`weights.planned_files`)."""

    def __init__(self, folder: Path, plan: Mapping[str, Sequence[weights.Entry]]) -> None:
        self.folder = folder
        self.plan = plan
        self._open: dict[str, _Open] = {}

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._open.values():
            one.file.close()

    def write(self, name: str, entry: weights.Entry, data: Iterable[memoryview]) -> None:
        """Appends a tensor, given in any number of pieces, to its file, which is on disk after its last one.

        Raises:
            OSError: with the name of the file.
        """
        try:
            if name not in self._open:
                self._open[name] = _Open((self.folder / name).open("xb", buffering=0), list(self.plan[name]))
                write_all(self._open[name].file, weights.header(self.plan[name]))
            one = self._open[name]
            assert one.left.pop(0) == entry
            for piece in data:
                write_all(one.file, piece)
            if not one.left:
                os.fsync(one.file.fileno())
                one.file.close()
        except OSError as error:
            error.filename = error.filename or str(self.folder / name)
            raise


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
