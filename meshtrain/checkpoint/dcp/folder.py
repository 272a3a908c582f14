"""A DCP folder, read in slices: what `torch.distributed.checkpoint.save` has written, of any
processes."""

import math
import os
from collections import OrderedDict
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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


class _OpenFile(NamedTuple):
    descriptor: int
    size: int  # bytes


class DcpFolder(AbstractContextManager["DcpFolder"]):
    """An opened folder. `tensors`: by name; `values`: where what is no tensor lies, by name."""

    def __init__(self, path: str | Path) -> None:
        """Reads `.metadata`. Raises as `read_metadata`."""
        self.path = Path(path).expanduser()
        contents = read_metadata(self.path)
        self.tensors = contents.tensors
        self.values = contents.values
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()  # used last: at the end
        self._elements: dict[Bytes, Elements] = {}  # of the chunks that were read

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            os.close(file.descriptor)
        self._open.clear()

    def read(self, name: str, part: Part) -> Tensor:
        """A part of a tensor in its stored dtype; a scalar has one dim of size 1. Raises
        DamagedError: its file is not what torch has written; UnreadableError."""
        tensor = self.tensors[name]
        result = torch.empty(shape_of(part), dtype=DTYPES[tensor.dtype])
        filled = 0  # elements
        for chunk in tensor.chunks:
            common = overlap(chunk.part, part)
            if is_empty(common):
                continue
            into = result[within(common, part)]
            self._read_chunk(tensor, chunk, common, into)
            filled += into.numel()
        if filled != result.numel():
            raise DamagedError(self.path / METADATA, "its chunks do not make up the tensor", name)
        return result

    def value(self, name: str) -> Any:
        """A number, text or container; of a tensor of one element, its number. Raises as `read`,
        and DamagedError: it is nothing plain."""
        if name not in self.tensors:
            entry = self._entry(self.values[name], name)
            return entry.value()
        tensor = self.tensors[name]
        has_one_element = math.prod(tensor.shape) == 1
        if tensor.dtype not in SIZES or not has_one_element:
            raise DamagedError(self.path / METADATA, "is no single number", name)
        dims = max(1, len(tensor.shape))  # a scalar has one, too
        whole = (slice(0, 1),) * dims
        return self.read(name, whole).item()

    def _read_chunk(self, tensor: DcpTensor, chunk: Chunk, part: Part, into: Tensor) -> None:
        """Reads `part`, which lies within a chunk, into a tensor of its shape."""
        shape = shape_of(chunk.part)
        if not tensor.shape:
            shape = ()  # a scalar: it has one dim in a part, and none where it is stored
        elements = self._elements_of(tensor, chunk, shape)
        file = chunk.where.file
        storage_begin = chunk.where.offset + elements.begin  # in the file

        if elements.strides == contiguous_strides(shape):
            # Rows lie one behind the other: those of the part are read alone.
            first_row = storage_begin + elements.first * SIZES[tensor.dtype]
            source = _FileFrom(self, file, first_row)
            read_piece(source, tensor.name, chunk.part, part, into, part)
            return

        # A view of a storage, such as a transposed matrix: all of the storage is read.
        storage = torch.empty(elements.stored, dtype=into.dtype)
        buffer = storage.view(torch.uint8).numpy().data
        self.read_bytes(file, storage_begin, buffer, tensor.name)
        whole_chunk = storage.as_strided(shape, elements.strides, elements.first)
        into.copy_(whole_chunk[within(part, chunk.part)])

    def _elements_of(self, tensor: DcpTensor, chunk: Chunk, shape: tuple[int, ...]) -> Elements:
        """Where the elements of a chunk are, which its entry is asked for once."""
        where = chunk.where
        if where not in self._elements:
            entry = self._entry(where, tensor.name)
            self._elements[where] = entry.elements(tensor.dtype, shape)
        return self._elements[where]

    def _entry(self, where: Bytes, name: str) -> Entry:
        path = self.path / where.file
        size = self._file(where.file).size
        end = where.offset + where.length
        if end > size:
            problem = f"has {size:,} bytes, and by {METADATA} there are {end:,}"
            raise DamagedError(path, problem, name)
        source = _FileFrom(self, where.file, where.offset)
        return Entry(partial(source.read_bytes, name), where.length, path, name)

    def read_bytes(self, file: str, begin: int, into: memoryview, name: str) -> None:
        """Fills `into` with the bytes of a file from `begin` on, which are of tensor `name`. Raises
        DamagedError: it has not as many; UnreadableError."""
        path = self.path / file
        descriptor = self._file(file).descriptor
        done = 0
        while done < len(into):
            advance()
            rest = into[done:]
            try:
                count = os.preadv(descriptor, [rest], begin + done)
            except OSError as error:
                raise UnreadableError(path, error.strerror, name) from error
            if count == 0:
                raise DamagedError(path, f"ends after {begin + done:,} bytes", name)
            done += count

    def _file(self, file: str) -> _OpenFile:
        """A file, opened. Those that were used last stay open."""
        if file not in self._open:
            if len(self._open) >= MOST_OPEN:
                _, oldest = self._open.popitem(last=False)
                os.close(oldest.descriptor)
            descriptor, size = open_plain(self.path / file)
            self._open[file] = _OpenFile(descriptor, size)
        self._open.move_to_end(file)
        return self._open[file]


class _FileFrom:
    """A file of a folder from byte `first` on."""

    def __init__(self, folder: DcpFolder, file: str, first: int) -> None:
        self._folder = folder
        self._file = file
        self._first = first

    def read_bytes(self, name: str, begin: int, into: memoryview) -> None:
        self._folder.read_bytes(self._file, self._first + begin, into, name)
