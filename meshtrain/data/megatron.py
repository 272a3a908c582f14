"""Megatron-LM's indexed data sets: PREFIX.bin and PREFIX.idx, read in place.

The .bin holds tokens only. The .idx, little-endian: the nine bytes MMIDIDX\\0\\0, the version
(uint64, 1), the code of the token type (uint8), the numbers of sequences S and of document bounds D
(uint64 each), the lengths of the sequences (int32 x S), their offsets in the .bin in bytes (int64 x
S), and the sequence at which each document begins, closed by S (int64 x D); multimodal files add
modes (int8 x S). Source: megatron/core/datasets/indexed_dataset.py.
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from meshtrain.data.fingerprint import Files
from meshtrain.data.tokens import PIECE, Corpus, MappedArray, Piece, check_size, read_blocks
from meshtrain.errors import InputError, plural
from meshtrain.job import locate

_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
_HEADER = struct.Struct("<9sQBQQ")
_REMEDY = "copy the pair again, or write it anew with Megatron's preprocess_data.py"
_HASHED_BYTES = 1 << 20  # hashed at either end of the .bin; the .idx is hashed whole


@dataclass(frozen=True, kw_only=True)
class MegatronCorpus(Corpus):
    """Documents of several sequences each, anywhere in the file; `offsets` are those of sequences,
    in bytes."""

    lengths: MappedArray  # (S,) lengths of the sequences, in tokens
    # (D + 1,) document d is sequences bounds[d] to bounds[d + 1]; the last bound is S
    bounds: MappedArray

    def piece(self, first: int, stop: int) -> Piece:
        bounds = self.bounds.array[first : stop + 1]
        sequences = slice(int(bounds[0]), int(bounds[-1]))
        starts = self.offsets.array[sequences] // self.tokens.dtype.itemsize
        lengths = self.lengths.array[sequences].astype(np.int64)
        return Piece(slice(first, stop), starts, lengths, np.diff(bounds))

    def begins(self, documents: np.ndarray) -> np.ndarray:
        if self._sorted is None:
            return self._begins(documents)
        return self._sorted[documents]

    def first_from(self, places: np.ndarray) -> np.ndarray:
        # A binary search for each place, all of them at once: the answer is in [low, high].
        low = np.zeros(len(places), np.int64)
        high = np.full(len(places), self.documents)
        while True:
            is_open = low < high
            if not is_open.any():
                return low
            middle = (low + high) // 2
            begins = self.begins(np.minimum(middle, self.documents - 1))
            above = is_open & (begins < places)
            below = is_open & ~above
            low = np.where(above, middle + 1, low)
            high = np.where(below, middle, high)

    def _begins(self, documents: np.ndarray) -> np.ndarray:
        sequences = self.bounds.array[documents]  # for an empty document, the sequence after it
        last = self.offsets.count - 1
        starts = self.offsets.array[np.minimum(sequences, last)] // self.tokens.dtype.itemsize
        return np.where(sequences <= last, starts, self.tokens.count)

    @cached_property
    def _sorted(self) -> np.ndarray | None:
        """Where documents begin, sorted; None: documents are stored in the order of their numbers
        and no sequence is empty, as Megatron writes them."""
        last = np.array([-1])
        in_order = True
        for piece in self.pieces():
            begins = self._begins(np.arange(piece.documents.start, piece.documents.stop))
            rises = (np.diff(begins, prepend=last) >= 0).all()
            in_order &= bool(rises and (piece.lengths > 0).all())
            last = begins[-1:]
        if in_order:
            return None
        # A document begins where its first sequence that has tokens does, or else at the end.
        filled = np.flatnonzero(self.lengths.array)
        starts = self.offsets.array[filled] // self.tokens.dtype.itemsize
        starts = np.append(starts, self.tokens.count)
        first_filled = np.searchsorted(filled, self.bounds.array[: self.documents])
        return np.sort(starts[first_filled])


def open_megatron(prefix: str) -> Corpus:
    """Opens PREFIX.bin and PREFIX.idx; tokens stay in the file. Raises InputError: no such pair, or
    a damaged one."""
    data, index = (Path(file).expanduser() for file in locate.data_files("megatron", prefix))
    dtype, sequences, bounds, start = _read_header(index)
    # Three arrays, one after the other.
    lengths = MappedArray(index, "int32", sequences, start)
    offsets = MappedArray(index, "int64", sequences, start + 4 * sequences)
    documents = MappedArray(index, "int64", bounds, start + 12 * sequences)

    size = np.dtype(dtype).itemsize
    end = _end_of_sequences(index, lengths, offsets, size)
    check_size(data, end, _REMEDY)
    if end == 0:
        raise InputError(f"{data} holds no tokens: there is nothing to train on")
    if not _rises(documents, sequences):
        raise InputError(
            f"{index} is damaged: expected document bounds that rise from 0 to {sequences}; "
            f"{_REMEDY}"
        )
    # Megatron-LM asserts the same: old versions merged files without the bounds of the second one.
    left_over = sequences - int(documents.array[-1])
    if left_over:
        raise InputError(
            f"{index}: its documents leave out the last {plural(left_over, 'sequence')} of "
            f"{sequences:,}, as old tools that merge data sets write it, or a writer without "
            "end_document; Megatron-LM refuses such a file, too: merge or write it anew"
        )
    return MegatronCorpus(
        name=str(data),
        tokens=MappedArray(data, dtype, end // size),
        documents=bounds - 1,
        offsets=offsets,
        lengths=lengths,
        bounds=documents,
        fingerprint=_fingerprint(index, data, end),
        files=(Files.of(data, end),),
    )


def _end_of_sequences(index: Path, lengths: MappedArray, offsets: MappedArray, size: int) -> int:
    """Where the last sequence of the .bin ends, in bytes; a token has `size` of them."""
    end = 0
    for first in range(0, lengths.count, PIECE):
        piece = slice(first, first + PIECE)
        # In int64, because the bytes of a long sequence are more than an int32 can count.
        tokens = lengths.array[piece].astype(np.int64)
        begins = offsets.array[piece].astype(np.int64)
        has_negative = (tokens < 0).any() or (begins < 0).any()
        cuts_tokens = (begins % size).any()
        if has_negative or cuts_tokens:
            raise InputError(f"{index} is damaged: it holds negative lengths or places; {_REMEDY}")
        ends = begins + tokens * size
        end = max(end, int(ends.max()))
    return end


def _rises(bounds: MappedArray, sequences: int) -> bool:
    """Whether the bounds of documents rise from 0 to at most the number of sequences."""
    if bounds.count == 0 or bounds.array[0] != 0 or bounds.array[-1] > sequences:
        return False
    for first in range(0, bounds.count, PIECE):
        if (np.diff(bounds.array[first : first + PIECE + 1]) < 0).any():
            return False
    return True


def _read_header(index: Path) -> tuple[str, int, int, int]:
    """The token type, the numbers of sequences and of document bounds, and where the lengths
    begin."""
    try:
        with open(index, "rb") as file:
            raw = file.read(_HEADER.size)
    except OSError as error:
        raise InputError(
            f"{index} cannot be read ({error.strerror}): with data.source megatron, data.path is "
            "the prefix of a .bin and an .idx file"
        ) from error
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise InputError(
            f"{index} is not a Megatron index: expected it to begin with {_MAGIC!r}, found "
            f"{raw[:9]!r}"
        )
    _, version, code, sequences, bounds = _HEADER.unpack(raw)
    if version != 1:
        raise InputError(
            f"{index} has version {version}: this reads version 1, Megatron-LM's only one so far"
        )
    if code not in _DTYPES or _DTYPES[code].startswith("float"):
        raise InputError(
            f"{index} holds tokens of type {_DTYPES.get(code, 'unknown')} (code {code}): expected "
            "a whole number, code 1, 2, 3, 4, 5 or 8"
        )
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    if index.stat().st_size != expected + sequences:  # with modes
        check_size(index, expected, _REMEDY)
    return _DTYPES[code], sequences, bounds, _HEADER.size


def _fingerprint(index: Path, data: Path, size: int) -> str:
    """SHA-256 of the whole .idx and both ends of the .bin, so that a corpus of terabytes need not
    be read in full."""
    digest = hashlib.sha256(f"megatron {size}".encode())
    for block in read_blocks(index):
        digest.update(block)
    with open(data, "rb") as file:
        digest.update(file.read(_HASHED_BYTES))
        file.seek(max(0, size - _HASHED_BYTES))
        digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()
