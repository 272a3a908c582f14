"""The file `.metadata` of a DCP folder: each tensor's shape and type, and where its chunks lie.

It is a pickle of torch's class `Metadata`, which is read as plain data (plain_pickle.py).
torch.distributed.checkpoint itself unpickles it, whatever it names.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.checkpoint.dcp.plain_pickle import (
    PlainPickleError,
    Record,
    TupleRecord,
    read_pickle,
)
from meshtrain.checkpoint.json_text import is_count
from meshtrain.checkpoint.plain_file import file_exists, read_plain
from meshtrain.errors import DamagedError, InputError, join_some
from meshtrain.huggingface.safetensors import MAX_DIMS
from meshtrain.parallel.sharding import Part

METADATA = ".metadata"
MAX_BYTES = 2**31  # of the file; a chunk takes 100 to 200


class Bytes(NamedTuple):
    """Where an entry of the folder lies."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A part of a tensor, as one of the processes that saved it held it."""

    part: Part  # of the whole tensor; a scalar counts as one dim of size 1
    where: Bytes


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of the folder."""

    name: str
    dtype: str  # safetensors' name; of a type that meshtrain does not have, torch's
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """What is in a folder, by name."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Bytes]  # what is no tensor: a pickle each


def read_metadata(folder: Path) -> Contents:
    """The contents of a DCP folder. Raises InputError: it is none; DamagedError: its `.metadata` is
    damaged, or not plain; UnreadableError."""
    path = folder / METADATA
    if not file_exists(path):
        raise InputError(_not_found(folder))
    data = read_plain(path, MAX_BYTES)
    try:
        return _contents(read_pickle(data, _NAMES))
    except (PlainPickleError, _WrongError) as error:
        raise DamagedError(path, str(error)) from None


def _not_found(folder: Path) -> str:
    """Why a folder without `.metadata` cannot be read, and what would work."""
    if not folder.is_dir():
        return f"there is no folder {folder}: name one that torch.distributed.checkpoint has saved"
    steps = sorted(path.parent.name for path in folder.glob(f"*/{METADATA}"))
    if steps:
        return f"{folder} holds several checkpoints: name one of them, {join_some(steps)}"
    missing = f"{folder} has no {METADATA}"
    if any(folder.glob(f"__*{METADATA}")):
        return (
            f"{missing}, but one of each process: it was saved without collectives "
            "(use_collectives=False): save it with them"
        )
    if any(folder.glob("*.distcp")):
        return (
            f"{missing}, which is written last: the save has not ended, or the file was not "
            "copied: take an earlier checkpoint, or copy the folder anew"
        )
    if any(folder.glob("*.safetensors")):
        return (
            f"{missing}, but safetensors files, which hold weights alone: model.weights starts "
            "from them, if they are a Hugging Face directory"
        )
    return f"{missing}: name a folder that torch.distributed.checkpoint has saved"


# What stands for the classes that the file names --------------------------------------------------


class _Metadata(Record):
    state_dict_metadata: Any = None
    storage_data: Any = None


class _TensorMetadata(Record):
    properties: Any = None
    size: Any = None
    chunks: Any = None


class _BytesMetadata(Record):
    pass


class _ChunkMetadata(Record):
    offsets: Any = None
    sizes: Any = None


class _Index(Record):
    fqn: Any = None
    offset: Any = None


class _StorageInfo(Record):
    relative_path: Any = None
    offset: Any = None
    length: Any = None
    transform_descriptors: Any = None


class _Properties(TupleRecord):
    """`state` begins with the type of the elements."""


class _StorageMeta(Record):
    pass


class _Dtype(NamedTuple):
    name: str


def _size(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


def _nothing(*_: Any) -> None:
    """What is not needed."""


# torch's types of elements -> their names in safetensors
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_OTHER_DTYPES = (
    "uint16 uint32 uint64 complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
)
_DCP = "torch.distributed.checkpoint"
_NAMES: Mapping[str, Any] = {
    f"{_DCP}.metadata.Metadata": _Metadata,
    f"{_DCP}.metadata.TensorStorageMetadata": _TensorMetadata,
    f"{_DCP}.metadata.BytesStorageMetadata": _BytesMetadata,
    f"{_DCP}.metadata.ChunkStorageMetadata": _ChunkMetadata,
    f"{_DCP}.metadata.MetadataIndex": _Index,
    f"{_DCP}.metadata.TensorProperties": _Properties,
    f"{_DCP}.metadata.StorageMeta": _StorageMeta,
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": _nothing,
    f"{_DCP}.filesystem._StorageInfo": _StorageInfo,
    "torch.Size": _size,
    "torch.serialization._get_layout": _nothing,
    "collections.OrderedDict": dict,
    "pathlib.PosixPath": _nothing,
    "pathlib._local.PosixPath": _nothing,
    "pathlib.WindowsPath": _nothing,
    **{f"torch.{torch_name}": _Dtype(name) for torch_name, name in DTYPES.items()},
    **{f"torch.{name}": _Dtype(f"torch.{name}") for name in _OTHER_DTYPES.split()},
}


# From these to `Contents` -------------------------------------------------------------------------


class _WrongError(ValueError):
    """What is wrong with the file."""


def _contents(metadata: Any) -> Contents:
    entries = getattr(metadata, "state_dict_metadata", None)
    places = getattr(metadata, "storage_data", None)
    if type(metadata) is not _Metadata or type(entries) is not dict or type(places) is not dict:
        raise _WrongError("is no Metadata of torch.distributed.checkpoint")
    where = {_key(index): info for index, info in places.items()}
    tensors = {}
    values = {}
    for name, entry in entries.items():
        if type(name) is not str or not name.isprintable():
            raise _WrongError(f"has a name that cannot be printed: {name!a:.80}")
        if type(entry) is _BytesMetadata:
            values[name] = _place(name, where.get((name, None)))
        elif type(entry) is _TensorMetadata:
            tensors[name] = _tensor(name, entry, where)
        else:
            raise _WrongError(f"{name} is neither a tensor nor a value")
    return Contents(tensors, values)


def _key(index: Any) -> tuple[Any, Any]:
    if type(index) is not _Index or type(index.fqn) is not str:
        raise _WrongError("says of no entry where it lies")
    offset = index.offset
    if offset is not None and not _are_counts(offset):
        raise _WrongError(f"{index.fqn:.80} has a chunk without a place in the tensor")
    return index.fqn, offset


def _place(name: str, info: Any) -> Bytes:
    if type(info) is not _StorageInfo:
        raise _WrongError(f"does not say where {name} lies: the save has not ended")
    file, offset, length = info.relative_path, info.offset, info.length
    if info.transform_descriptors:
        raise _WrongError(
            f"{name} was transformed ({info.transform_descriptors!a:.80}), by an extension that is "
            "not read here: save it without"
        )
    # One that names no file outside of the folder.
    is_name = type(file) is str and file.isprintable() and Path(file).name == file
    if not is_name or not is_count(offset) or not is_count(length):
        raise _WrongError(f"{name} lies in {file!a:.80}, which is no file of the folder")
    return Bytes(file, offset, length)


def _tensor(name: str, entry: _TensorMetadata, where: Mapping[Any, Any]) -> DcpTensor:
    state = getattr(entry.properties, "state", ())
    dtype = state[0] if state else None
    shape = entry.size
    if type(dtype) is not _Dtype or not _are_counts(shape) or type(entry.chunks) is not list:
        raise _WrongError(f"{name} has no type, no shape or no chunks")
    chunks = tuple(_chunks(name, shape, entry.chunks, where))
    elements = sum(math.prod(_shape(chunk.part)) for chunk in chunks)
    if elements != math.prod(shape):
        raise _WrongError(
            f"{name} has {math.prod(shape):,} elements, and its chunks {elements:,}: they do not "
            "make up the tensor"
        )
    return DcpTensor(name, dtype.name, shape, chunks)


def _chunks(
    name: str, shape: tuple[int, ...], chunks: list[Any], where: Mapping[Any, Any]
) -> Iterator[Chunk]:
    for chunk in chunks:
        is_chunk = type(chunk) is _ChunkMetadata
        if not is_chunk or not _are_counts(chunk.offsets) or not _are_counts(chunk.sizes):
            raise _WrongError(f"{name} has a chunk without a place in the tensor")
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            raise _WrongError(f"{name} has a chunk of another number of dims")
        part = [
            slice(start, start + size)
            for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
        ]
        if any(span.stop > size for span, size in zip(part, shape, strict=True)):
            raise _WrongError(f"{name} has a chunk outside of its shape {list(shape)}")
        if math.prod(chunk.sizes) == 0:
            continue
        place = _place(name, where.get((name, chunk.offsets)))
        yield Chunk(tuple(part) or (slice(0, 1),), place)


def _shape(part: Part) -> list[int]:
    return [span.stop - span.start for span in part]


def _are_counts(values: Any) -> bool:
    is_shape = type(values) is tuple and len(values) <= MAX_DIMS
    return is_shape and all(is_count(value) for value in values)
