"""An entry of a DCP folder: what `torch.save` writes of one tensor or value, a zip archive.

The archive has a small pickle and the bytes of a tensor's storage, not compressed. The pickle is
read as plain data (plain_pickle.py), and says where in the file the elements are.
"""

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.checkpoint.dcp.metadata import DTYPES
from meshtrain.checkpoint.dcp.plain_pickle import PlainPickleError, read_pickle
from meshtrain.checkpoint.json_text import is_count
from meshtrain.errors import DamagedError, InputError
from meshtrain.huggingface.safetensors import SIZES

MAX_PICKLE = 2**20  # bytes of the small pickle
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # before the bytes of a record: signature, lengths
# Fills a buffer with the bytes of an entry from an offset on.
ReadBytes = Callable[[int, memoryview], None]


class Elements(NamedTuple):
    """Where the elements of a tensor are."""

    begin: int  # of its storage, in the entry, in bytes
    stored: int  # elements of the storage
    first: int  # the tensor's first element in the storage
    strides: tuple[int, ...]


class Entry:
    """An entry, opened: `read` gives its `length` bytes, which lie in `file`; `name` is for
    people."""

    def __init__(self, read: ReadBytes, length: int, file: Path, name: str) -> None:
        self._read = read
        self._length = length
        self._file = file
        self._name = name
        self._records: dict[str, zipfile.ZipInfo] = {}
        with self._damage():
            with zipfile.ZipFile(_Window(read, length)) as archive:
                for info in archive.infolist():
                    # All lie in one folder of the archive, whose name says nothing.
                    _, _, record = info.filename.partition("/")
                    self._records[record] = info
            self._pickle = self._small_record("data.pkl")
            self._require_byte_order()

    def value(self) -> Any:
        """A number, a text, or a container of such. Raises DamagedError: it is something else."""
        with self._damage():
            return read_pickle(self._pickle, _PLAIN)

    def elements(self, dtype: str, shape: tuple[int, ...]) -> Elements:
        """Where the elements of a tensor are. `dtype`, `shape`: what it has to be. Raises
        DamagedError: it is another one."""
        with self._damage():
            tensor = read_pickle(self._pickle, _OF_TENSOR, _storage_of)
            if type(tensor) is not _Tensor or type(tensor.storage) is not _Storage:
                raise _WrongError("is no tensor")
            storage = tensor.storage
            if storage.dtype != dtype or tensor.shape != shape:
                raise _WrongError(
                    f"is {storage.dtype} {tensor.shape!a:.80}, and {dtype} {shape} is expected"
                )
            # A file may say anything: no element is read that is not among the bytes.
            _require_within(tensor, shape, storage.elements)
            begin, nbytes = self._record(storage.record)
            if nbytes != storage.elements * SIZES[dtype]:
                raise _WrongError(f"has {nbytes:,} bytes for {storage.elements:,} {dtype}")
            return Elements(
                begin=begin,
                stored=storage.elements,
                first=tensor.first,
                strides=tensor.strides,
            )

    def _require_byte_order(self) -> None:
        # Older versions of torch do not say it.
        is_said = "byteorder" in self._records
        if is_said and self._small_record("byteorder") != b"little":
            raise _WrongError("has the byte order of another kind of machine")

    def _small_record(self, name: str) -> bytes:
        begin, nbytes = self._record(name)
        if nbytes > MAX_PICKLE:
            raise _WrongError(f"has {nbytes:,} bytes in its record {name}")
        # Not by the zip library, which compares checksums: torch may be told to write none.
        data = bytearray(nbytes)
        self._read(begin, memoryview(data))
        return bytes(data)

    def _record(self, name: str) -> tuple[int, int]:
        """Where a record begins in the entry, and how many bytes it has."""
        info = self._records.get(name)
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise _WrongError(f"has no record {name!a:.80} that is not compressed")
        header = memoryview(bytearray(_LOCAL_HEADER.size))
        if not 0 <= info.header_offset <= self._length - len(header):
            raise _WrongError("has a record outside of it")
        self._read(info.header_offset, header)
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        begin = info.header_offset + len(header) + name_length + extra_length
        if signature != b"PK\x03\x04" or begin + info.file_size > self._length:
            raise _WrongError("has a record outside of it")
        return begin, info.file_size

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Turns what is wrong inside of the entry into a DamagedError that names it."""
        try:
            yield
        except (PlainPickleError, _WrongError) as error:
            raise DamagedError(self._file, str(error), self._name) from None
        except InputError:
            raise
        except (
            zipfile.BadZipFile,
            struct.error,
            ValueError,
            KeyError,
            NotImplementedError,
        ) as error:
            problem = f"is not what torch.save writes ({error})"
            raise DamagedError(self._file, problem, self._name) from None


class _WrongError(ValueError):
    """What is wrong with an entry."""


class _Window(io.RawIOBase):
    """An entry as a file of its own, for the zip library."""

    def __init__(self, read: ReadBytes, length: int) -> None:
        self._read, self._length = read, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}
        at = bases[whence] + offset
        if at < 0:
            raise ValueError("it is too short")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        count = max(0, min(len(into), self._length - self._at))
        self._read(self._at, into[:count])
        self._at += count
        return count


# What the pickle says -----------------------------------------------------------------------------


class _Storage(NamedTuple):
    """The bytes of a tensor."""

    dtype: str
    record: str  # the record of the archive that has them
    elements: int


class _Tensor(NamedTuple):
    """The arguments of the function by which torch makes a tensor of its storage."""

    storage: Any
    first: Any
    shape: Any
    strides: Any


def _tensor(storage: Any, first: Any, shape: Any, strides: Any, *others: Any) -> _Tensor:
    # others: whether it has a gradient, hooks of its backward, and bits such as a conjugation
    if any(others):
        raise PlainPickleError("is more than its elements")
    return _Tensor(storage, first, shape, strides)


def _require_within(tensor: _Tensor, shape: tuple[int, ...], stored: int) -> None:
    """Raises _WrongError: an element lies outside of a storage of so many."""
    numbers = []
    if type(tensor.strides) is tuple:
        numbers = [tensor.first, *tensor.strides]
    if len(numbers) != 1 + len(shape) or not all(map(is_count, numbers)):
        raise _WrongError("does not say where its elements are")
    is_empty = math.prod(shape) == 0
    last = tensor.first
    for size, stride in zip(shape, tensor.strides, strict=True):
        last += (size - 1) * stride
    if not is_empty and last >= stored:
        raise _WrongError("has elements outside of its bytes")


def _storage_of(reference: Any) -> _Storage:
    """What stands for ("storage", its class, its record, its device, its number of elements)."""
    if type(reference) is not tuple or len(reference) != 5:
        raise PlainPickleError("has no storage of torch")
    _, dtype, record, _, elements = reference
    if type(dtype) is not str or dtype not in SIZES or type(record) is not str:
        raise PlainPickleError("has no storage of torch")
    if not is_count(elements):
        raise PlainPickleError("has no storage of torch")
    return _Storage(dtype, f"data/{record}", elements)


_CLASSES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_PLAIN: Mapping[str, Any] = {"collections.OrderedDict": dict}
_OF_TENSOR: Mapping[str, Any] = {
    **_PLAIN,
    "torch._utils._rebuild_tensor_v2": _tensor,
    **{f"torch.{name}": DTYPES[dtype] for name, dtype in _CLASSES.items()},
}
