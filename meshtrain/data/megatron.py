"""Megatron-LM's indexed data sets: PREFIX.bin and PREFIX.idx, read as they are.

The .bin holds nothing but tokens. The .idx, little-endian: the nine bytes MMIDIDX\\0\\0, the version (uint64, 1), the
code of the token type (uint8), the numbers of sequences S and of document bounds D (uint64 each), the lengths of the
sequences (int32 x S), their places in the .bin in bytes (int64 x S), and the sequence at which each document begins,
closed by S (int64 x D); multimodal files add modes (int8 x S). Source: megatron/core/datasets/indexed_dataset.py.
"""

import hashlib
import struct
from pathlib import Path

import numpy as np

from meshtrain.data.fingerprint import Files
from meshtrain.data.tokens import Corpus, MappedArray, check_size
from meshtrain.errors import InputError

_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_HEADER = struct.Struct("<9sQBQQ")
_REMEDY = "copy the pair again, or write it anew with Megatron's preprocess_data.py"
_HASHED_BYTES = 1 << 20  # of either end of the .bin; the .idx is hashed whole


def open_megatron(prefix: str) -> Corpus:
    """Opens PREFIX.bin and PREFIX.idx; the tokens stay in the file. InputError: no such pair, or damaged."""
    if prefix.endswith((".bin", ".idx")):
        prefix = prefix[:-4]
    index, data = Path(f"{prefix}.idx").expanduser(), Path(f"{prefix}.bin").expanduser()
    dtype, sequences, bounds, start = _read_header(index)
    lengths = MappedArray(index, "int32", sequences, start).array.astype(np.int64)
    offsets = MappedArray(index, "int64", sequences, start + 4 * sequences).array
    documents = MappedArray(index, "int64", bounds, start + 12 * sequences).array
    size = np.dtype(dtype).itemsize
    if (lengths < 0).any() or (offsets < 0).any() or (offsets % size).any():
        raise InputError(f"{index} is damaged: it holds negative lengths or places; {_REMEDY}")
    end = int((offsets + lengths * size).max()) if sequences else 0
    check_size(data, end, _REMEDY)
    if end == 0:
        raise InputError(f"{data} holds no tokens: there is nothing to train on")
    if bounds == 0 or documents[0] != 0 or (np.diff(documents) < 0).any() or documents[-1] > sequences:
        raise InputError(f"{index} is damaged: expected document bounds that rise from 0 to {sequences}; {_REMEDY}")
    if documents[-1] < sequences:  # the writer was never told that its last document ends
        documents = np.append(documents, sequences)
    return Corpus(
        name=str(data),
        tokens=MappedArray(data, dtype, end // size),
        loss=None,
        starts=offsets // size,
        lengths=lengths,
        bounds=np.asarray(documents, np.int64),
        text_bytes=None,
        largest_id=None,
        tokenizer=None,
        fingerprint=_fingerprint(index, data, end),
        files=(Files.of(data, end),),
    )


def _read_header(index: Path) -> tuple[str, int, int, int]:
    """The token type, the numbers of sequences and of document bounds, and where the lengths begin."""
    try:
        with open(index, "rb") as file:
            raw = file.read(_HEADER.size)
    except OSError as error:
        raise InputError(
            f"{index} cannot be read ({error.strerror}): with data.source megatron, data.path is the prefix of a .bin "
            "and an .idx file"
        ) from error
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise InputError(f"{index} is not a Megatron index: expected it to begin with {_MAGIC!r}, found {raw[:9]!r}")
    _, version, code, sequences, bounds = _HEADER.unpack(raw)
    if version != 1:
        raise InputError(f"{index} has version {version}: this reads version 1, Megatron-LM's only one so far")
    if code not in _DTYPES or _DTYPES[code].startswith("float"):
        raise InputError(
            f"{index} holds tokens of type {_DTYPES.get(code, 'unknown')} (code {code}): expected a whole number, "
            "code 1, 2, 3, 4, 5 or 8"
        )
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    if index.stat().st_size != expected + sequences:  # with modes
        check_size(index, expected, _REMEDY)
    return _DTYPES[code], sequences, bounds, _HEADER.size


def _fingerprint(index: Path, data: Path, size: int) -> str:
    """SHA-256 over the whole .idx and both ends of the .bin: a corpus of terabytes is not read to be named."""
    digest = hashlib.sha256(f"megatron {size}".encode())
    with open(index, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    with open(data, "rb") as file:
        digest.update(file.read(_HASHED_BYTES))
        file.seek(max(0, size - _HASHED_BYTES))
        digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()
