"""A DCP folder, read in slices: what `torch.distributed.checkpoint.save` has written, of any
processes."""

import math
import os
from collections import OrderedDict
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshtrain.checkpoint.dcp.entry import Elements, Entry
from meshtrain.checkpoint.dcp.metadata import METADATA, Bytes, Chunk, DcpTensor, read_metadata
from meshtrain.checkpoint.plain_file import open_plain
from meshtrain.checkpoint.weights import read_piece
from meshtrain.errors import DamagedError, UnreadableError
from meshtrain.huggingface.load import DTYPES
from meshtrain.huggingface.safetensors import SIZES
from meshtrain.job.pending import advance
from meshtrain.parallel.sharding import (
    Part,
    contiguous_strides,
    is_empty,
    overlap,
    shape_of,
    within,
)

MOST_OPEN = 64  # files


class DcpFolder(AbstractContextManager["DcpFolder"]):
    """An opened folder. `tensors`: by name; `values`: where what is no tensor lies, by name."""

    def __init__(self, path: str | Path) -> None:
        """Reads `.metadata`. Raises as `read_metadata`."""
        self.path = Path(path).expanduser()
        contents = read_metadata(self.path)
        self.tensors = contents.tensors
        self.values = contents.values
        self._open: OrderedDict[str, tuple[int, int]] = OrderedDict()  # descriptor and size
        self._elements: dict[Bytes, Elements] = {}  # of the chunks that were read

    def __exit__(self, *_: object) -> None:
        for descriptor, _size in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, name: str, part: Part) -> Tensor:
        """A part of a tensor in its stored dtype; a scalar has one dim of size 1. Raises
        DamagedError: its file is not what torch has written; UnreadableError."""
        tensor = self.tensors[name]
        result = torch.empty(shape_of(part), dtype=DTYPES[tensor.dtype])
        filled = 0
        for chunk in tensor.chunks:
            common = overlap(chunk.part, part)
            if not is_empty(common):
                self._read_chunk(tensor, chunk, common, result, part)
                filled += math.prod(shape_of(common))
        if filled != result.numel():
            raise DamagedError(self.path / METADATA, "its chunks do not make up the tensor", name)
        return result

    def value(self, name: str) -> Any:
        """A number, text or container; of a tensor of one element, its number. Raises as `read`,
        and DamagedError: it is nothing plain."""
        if name not in self.tensors:
            return self._entry(self.values[name], name).value()
        tensor = self.tensors[name]
        if tensor.dtype not in SIZES or math.prod(tensor.shape) != 1:
            raise DamagedError(self.path / METADATA, "is no single number", name)
        whole = tuple(slice(0, size) for size in tensor.shape or (1,))
        return self.read(name, whole).item()

    def _read_chunk(
        self, tensor: DcpTensor, chunk: Chunk, part: Part, target: Tensor, target_part: Part
    ) -> None:
        """Reads `part`, which lies within a chunk, into `target`, which holds `target_part`."""
        shape = shape_of(chunk.part) if tensor.shape else ()
        elements = self._elements_of(tensor, chunk, shape)
        file = chunk.where.file
        begin = chunk.where.offset + elements.begin  # of the storage, in the file
        if elements.strides == contiguous_strides(shape):
            # Rows lie one behind the other: those of the part are read alone.
            first = begin + elements.first * SIZES[tensor.dtype]
            source = _Region(self, file, first)
            read_piece(source, tensor.name, chunk.part, part, target, target_part)
            return
        # A view of a storage, such as a transposed matrix: all of the storage is read.
        storage = torch.empty(elements.stored, dtype=DTYPES[tensor.dtype])
        buffer = storage.view(torch.uint8).numpy().data
        self.read_bytes(file, begin, buffer, tensor.name)
        view = storage.as_strided(shape, elements.strides, elements.first)
        target[within(part, target_part)] = view[within(part, chunk.part)]

    def _elements_of(self, tensor: DcpTensor, chunk: Chunk, shape: tuple[int, ...]) -> Elements:
        """Where the elements of a chunk are, which its entry is asked for once."""
        where = chunk.where
        if where not in self._elements:
            entry = self._entry(where, tensor.name)
            self._elements[where] = entry.elements(tensor.dtype, shape)
        return self._elements[where]

    def _entry(self, where: Bytes, name: str) -> Entry:
        _, size = self._file(where.file)
        end = where.offset + where.length
        if end > size:
            problem = f"has {size:,} bytes, and by {METADATA} there are {end:,}"
            raise DamagedError(self.path / where.file, problem, name)
        read = partial(_read_entry, self, where, name)
        return Entry(read, where.length, self.path / where.file, name)

    def read_bytes(self, file: str, begin: int, into: memoryview, name: str) -> None:
        """Fills `into` with the bytes of a file from `begin` on, which are of tensor `name`. Raises
        DamagedError: it has not as many; UnreadableError."""
        descriptor, _ = self._file(file)
        done = 0
        while done < len(into):
            advance()
            try:
                n = os.preadv(descriptor, [into[done:]], begin + done)
            except OSError as error:
                raise UnreadableError(self.path / file, error.strerror, name) from error
            if n == 0:
                raise DamagedError(self.path / file, f"ends after {begin + done:,} bytes", name)
            done += n

    def _file(self, file: str) -> tuple[int, int]:
        """The descriptor and the size of a file. Those that were used last stay open."""
        if file not in self._open:
            if len(self._open) >= MOST_OPEN:
                _, (oldest, _) = self._open.popitem(last=False)
                os.close(oldest)
            self._open[file] = open_plain(self.path / file)
        self._open.move_to_end(file)
        return self._open[file]


def _read_entry(folder: DcpFolder, where: Bytes, name: str, begin: int, into: memoryview) -> None:
    folder.read_bytes(where.file, where.offset + begin, into, name)


class _Region:
    """The elements of a chunk that lie one behind the other from `first` on."""

    def __init__(self, folder: DcpFolder, file: str, first: int) -> None:
        self._folder = folder
        self._file = file
        self._first = first  # byte

    def read_bytes(self, name: str, begin: int, into: memoryview) -> None:
        self._folder.read_bytes(self._file, self._first + begin, into, name)
