"""Token files: the prepared form of a corpus, a folder of flat files that are memory-mapped and
read in place.

    tokens.bin      every token of every document, one after the other (uint8, uint16 or uint32,
    little-endian) documents.bin   int64, number of documents + 1: document d is tokens documents[d]
    to documents[d + 1] bytes.bin       int64 per document: bytes of the text behind its predicted
    tokens (absent where that is unknown) loss.bin        uint8 per token: 0 where the token, as a
    target, carries no loss (absent if all tokens carry one) checksums.json  the CRC-32 of every 4
    MiB of each file above (older versions of meshtrain wrote none) header.json     describes the
    other files; written last

A folder appears whole or not at all: it is written under a temporary name, synced to disk, and
renamed.
"""

import hashlib
import json
import math
import os
import shutil
import socket
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain.data.fingerprint import Files
from meshtrain.errors import InputError
from meshtrain.job.parsing import parse_json
from meshtrain.job.storage import fsync_folder, write_whole

FORMAT = 1
BLOCK = 4 << 20  # bytes under one checksum
CHECKSUMS = "checksums.json"
_DTYPES = ("uint8", "uint16", "uint32")
# bytes of the token file in which `Corpus.check_ids` looks for wrong ids
_FIRST_LOOK_BYTES = 4 << 20
_PART = 1 << 20  # values read or written at once
PIECE = 1 << 16  # documents whose offsets are read at once
_ONE = np.uint8(1)
_INT64 = struct.Struct("<q")


class Document(NamedTuple):
    """One document, or a part of one, to be written to a token file."""

    ids: np.ndarray  # (n,) token ids, the end-of-document token included
    # (n,) 0 where the token, as a target, carries no loss; None: all tokens carry one
    loss: np.ndarray | None = None
    text_bytes: int | None = None  # bytes of the text behind the tokens with a loss
    ends: bool = True  # False: the next part continues this document


@dataclass(frozen=True)
class Header:
    """header.json."""

    format: int
    dtype: str
    tokens: int
    documents: int
    largest_id: int
    text_bytes: int | None
    loss_mask: bool
    # SHA-256 of tokens, losses and offsets: the same on every host for the same corpus and
    # tokenizer
    fingerprint: str
    tokenizer: str
    source: str


class MappedArray:
    """A one-dimensional array in a file, memory-mapped on first use in each process. Pickled
    without its data."""

    def __init__(self, path: Path, dtype: str, count: int, offset: int = 0) -> None:
        self.path, self.dtype, self.count, self.offset = (
            path,
            np.dtype(dtype).newbyteorder("<"),
            count,
            offset,
        )
        self._array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        if self._array is None:
            self._array = np.empty(0, self.dtype)  # an empty file cannot be mapped
            if self.count:  # a plain array: slicing a np.memmap costs more
                self._array = np.asarray(
                    np.memmap(self.path, self.dtype, "r", self.offset, (self.count,))
                )
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_array": None}


class Piece(NamedTuple):
    """Consecutive documents of a corpus."""

    documents: slice  # the document numbers
    starts: np.ndarray  # (S,) where each sequence of the documents begins in the file, in tokens
    lengths: np.ndarray  # (S,) length of each sequence, in tokens
    counts: np.ndarray  # number of sequences of each document


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A token file and the offsets of its D documents, which are read piece by piece from a mapped
    file that all ranks of a host share: memory does not grow with the number of documents."""

    name: str
    tokens: MappedArray
    loss: MappedArray | None = None  # 0 where a token, as a target, carries no loss
    documents: int
    offsets: MappedArray  # (D + 1,) document d is tokens offsets[d] to offsets[d + 1]
    # (D,) bytes of the text behind each document's tokens with a loss
    text_bytes: MappedArray | None = None
    largest_id: int | None = None  # None: the file does not say
    tokenizer: str | None = None  # identity of the tokenizer; None: the file does not say
    fingerprint: str
    files: tuple[Files, ...] = ()  # one entry per file

    def pieces(self) -> Iterator[Piece]:
        for first in range(0, self.documents, PIECE):
            yield self.piece(first, min(first + PIECE, self.documents))

    def piece(self, first: int, stop: int) -> Piece:
        """The documents [first, stop)."""
        offsets = self.offsets.array[first : stop + 1]
        return Piece(
            slice(first, stop), offsets[:-1], np.diff(offsets), np.ones(stop - first, np.int64)
        )

    def begins(self, documents: np.ndarray) -> np.ndarray:
        """Where documents begin in the file, in tokens; `documents` are numbers in file order."""
        return self.offsets.array[documents]

    def first_from(self, places: np.ndarray) -> np.ndarray:
        """The number, in file order, of the first document that begins at or after each of these
        tokens."""
        return np.searchsorted(self.offsets.array, places)

    def check_ids(self, n_outputs: int | None) -> None:
        """Raises InputError if the header or the beginning of the file shows an id outside the
        vocabulary."""
        if n_outputs is not None and self.largest_id is not None and self.largest_id >= n_outputs:
            raise outside_vocabulary(self.name, self.largest_id, n_outputs, None)
        first = self.tokens.array[: _FIRST_LOOK_BYTES // self.tokens.dtype.itemsize]
        for token in (int(first.max()), int(first.min())):
            if token < 0 or token >= self.limit(n_outputs):
                raise outside_vocabulary(self.name, token, n_outputs, self.largest_id)

    def limit(self, n_outputs: int | None) -> float:
        """Exclusive upper bound of the ids of an undamaged file: the vocabulary size, or less if
        the header says so."""
        limit = math.inf if self.largest_id is None else self.largest_id + 1
        return limit if n_outputs is None else min(limit, n_outputs)


def outside_vocabulary(
    source: str, token: int, n_outputs: int | None, largest_id: int | None
) -> InputError:
    if largest_id is not None and token > largest_id:
        return InputError(
            f"{source} holds the token id {token}, and its header says that {largest_id} is the "
            "largest: the file is "
            "damaged; copy or prepare it anew"
        )
    if token < 0:
        return InputError(
            f"{source} holds the token id {token}: expected ids from 0 on; is the file what it "
            "should be?"
        )
    return InputError(
        f"{source} holds the token id {token}, but model.vocab_size is {n_outputs}: set it to at "
        f"least {token + 1}, or "
        "use the tokenizer that the model was made for"
    )


def smallest_dtype(vocab_size: int) -> str:
    return next(name for name in _DTYPES if vocab_size - 1 <= np.iinfo(name).max)


def write(
    folder: Path,
    documents: Iterable[Document],
    *,
    vocab_size: int,
    tokenizer: str,
    source: str,
    empty: bool = False,
) -> Header:
    """Writes a folder of token files, whole or not at all. Holds no more in memory than one
    `Document` at a time.

    Args:
        vocab_size: ids lie in [0, vocab_size); determines how many bytes a token takes.
        tokenizer, source: the tokenizer's identity (`bytes`: the byte tokenizer), and the source's
            name for messages.
        empty: whether zero tokens are allowed.

    Raises:
        InputError: no tokens, or an id outside the vocabulary.
        ValueError: the last document is not ended.
        OSError: the folder exists, or the write failed. Nothing is left behind.
    """
    temporary = (
        folder.parent / f"{temporary_prefix(folder)}{socket.gethostname()}.{os.getpid()}.tmp"
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        header = _write_files(temporary, documents, vocab_size, tokenizer, source)
        if not empty and header.tokens == 0:
            raise InputError(f"{source} holds no text: there is nothing to train on")
        fsync_folder(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(folder.parent)
    return header


def temporary_prefix(folder: Path) -> str:
    """Prefix of the names of temporary folders that will be renamed to `folder`; host and pid
    follow."""
    return f".{folder.name}."


class _BlockFile:
    """A file written sequentially, with the CRC-32 of each of its blocks."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.crc32: list[int] = []
        self._file, self._size = stack.enter_context(open(path, "wb")), 0  # noqa: SIM115

    def write(self, data: memoryview | bytes) -> memoryview | bytes:
        self._file.write(data)
        # each block that overlaps the data
        for start in range(-(self._size % BLOCK), len(data), BLOCK):
            part = data[max(start, 0) : start + BLOCK]
            self.crc32[len(self.crc32) - (start < 0) :] = [
                zlib.crc32(part, self.crc32[-1] if start < 0 else 0)
            ]
        self._size += len(data)
        return data

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def _write_files(
    folder: Path, documents: Iterable[Document], vocab_size: int, tokenizer: str, source: str
) -> Header:
    dtype = np.dtype(smallest_dtype(vocab_size)).newbyteorder("<")
    number = written = tokens_seen = size_seen = all_bytes = 0
    largest, masked, sized = -1, False, True
    losses_so_far: list[np.ndarray] = []  # loss masks of the current document's parts
    digest = hashlib.sha256(dtype.name.encode())
    with ExitStack() as stack:
        names = ("tokens.bin", "loss.bin", "documents.bin", "bytes.bin")
        tokens, losses, offsets, sizes = files = [
            _BlockFile(folder / name, stack) for name in names
        ]
        offsets.write(_INT64.pack(0))
        for ids, loss, size, ends in documents:
            if len(ids):
                low, high = int(ids.min()), int(ids.max())
                if low < 0 or high >= vocab_size:
                    raise InputError(
                        f"document {number} of {source} holds the token id "
                        f"{high if low >= 0 else low}; "
                        f"expected 0 to {vocab_size - 1}, as {tokenizer} has {vocab_size} ids"
                    )
                losses_so_far.append(
                    np.broadcast_to(_ONE, len(ids)) if loss is None else np.asarray(loss, np.uint8)
                )
                masked |= loss is not None and not losses_so_far[-1].all()
                largest = max(largest, high)
                digest.update(tokens.write(np.ascontiguousarray(ids, dtype).data.cast("B")))
                tokens_seen += len(ids)
                size_seen += size or 0
                sized &= size is not None
            if ends and losses_so_far:
                for part in losses_so_far:
                    for start in range(0, len(part), _PART):
                        digest.update(
                            losses.write(np.ascontiguousarray(part[start : start + _PART]).data)
                        )
                offsets.write(_INT64.pack(tokens_seen))
                sizes.write(_INT64.pack(size_seen))
                written, all_bytes = written + 1, all_bytes + size_seen
                losses_so_far, size_seen = [], 0
            number += ends
        if losses_so_far:
            raise ValueError(f"the last document of {source} does not end")
        for file in files:
            file.sync()
    for block in read_blocks(offsets.path):
        digest.update(block)
    for file, is_kept in ((losses, masked), (sizes, sized)):
        if not is_kept:
            file.path.unlink()
            files.remove(file)
    crc32 = {file.path.name: [f"{crc:08x}" for crc in file.crc32] for file in files}
    write_whole(folder / CHECKSUMS, json.dumps({"block": BLOCK, "crc32": crc32}) + "\n")
    bytes_known = all_bytes if sized else None
    fields = (
        tokens_seen,
        written,
        largest,
        bytes_known,
        masked,
        digest.hexdigest(),
        tokenizer,
        source,
    )
    header = Header(FORMAT, dtype.name, *fields)
    write_whole(folder / "header.json", json.dumps(asdict(header), indent=1) + "\n")
    return header


def read_blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from iter(partial(file.read, BLOCK), b"")


def read_documents(folder: Path) -> Iterator[Document]:
    """The documents of a folder in parts, as `write` takes them. Files are read, not mapped, since
    they may be larger than the process's memory. Raises InputError: not a prepared folder, or a
    damaged one."""
    header = _read_header(folder)
    dtype, start = np.dtype(header.dtype).newbyteorder("<"), 0
    with ExitStack() as stack:
        tokens, offsets = (
            stack.enter_context(open(folder / name, "rb"))
            for name in ("tokens.bin", "documents.bin")
        )
        losses = stack.enter_context(open(folder / "loss.bin", "rb")) if header.loss_mask else None
        sizes = (
            stack.enter_context(open(folder / "bytes.bin", "rb"))
            if header.text_bytes is not None
            else None
        )
        offsets.seek(_INT64.size)
        for _ in range(header.documents):
            (end,) = _INT64.unpack(offsets.read(_INT64.size))
            (size,) = _INT64.unpack(sizes.read(_INT64.size)) if sizes else (None,)
            while start < end:
                n = min(end - start, _PART)
                start += n
                ids = np.frombuffer(tokens.read(n * dtype.itemsize), dtype, n)
                loss = np.frombuffer(losses.read(n), np.uint8, n) if losses else None
                yield Document(ids, loss, size if start == end else size and 0, start == end)


def verify(folder: Path, n_outputs: int | None = None) -> tuple[list[str], bool]:
    """Reads a whole prepared folder. Returns its problems and whether it has checksums; without
    them only sizes, offsets and the range of ids are checked. Raises InputError: it is not a
    prepared folder."""
    if not (folder / "header.json").is_file():
        _read_header(folder)
    sums = folder / CHECKSUMS
    try:
        corpus = open_tokens(folder)
    except InputError as error:
        return [str(error)], True
    try:
        crc32 = parse_json(sums.read_bytes(), most=1 << 30)["crc32"] if sums.is_file() else None
        blocks = {
            part.root / name: crc32 and crc32[name] for part in corpus.files for name in part.names
        }
    except (ValueError, KeyError, TypeError) as error:
        return [f"{sums} is damaged ({error!r})"], True
    problems = []
    for path, expected in blocks.items():
        for index, block in enumerate(read_blocks(path)):
            place = f"{path}: bytes {index * BLOCK:,} to {index * BLOCK + len(block):,}"
            if expected and [f"{zlib.crc32(block):08x}"] != expected[index : index + 1]:
                problems.append(f"{place} are not those that were written")
            elif path == corpus.tokens.path:
                largest = int(np.frombuffer(block, corpus.tokens.dtype).max())
                if largest >= corpus.limit(n_outputs):
                    problems.append(
                        f"{place}: "
                        f"{outside_vocabulary('it', largest, n_outputs, corpus.largest_id)}"
                    )
    return problems, crc32 is not None


def open_tokens(folder: Path) -> Corpus:
    """Opens a prepared folder; reads the header and offsets only. Raises InputError: not one, too
    new, or damaged."""
    header = _read_header(folder)
    if header.tokens < 1:
        raise InputError(
            f"{folder} is damaged: by its header it holds no tokens; prepare the folder again"
        )
    tokens = MappedArray(folder / "tokens.bin", header.dtype, header.tokens)
    offsets = MappedArray(folder / "documents.bin", "int64", header.documents + 1)
    sizes = (
        MappedArray(folder / "bytes.bin", "int64", header.documents)
        if header.text_bytes is not None
        else None
    )
    loss = MappedArray(folder / "loss.bin", "uint8", header.tokens) if header.loss_mask else None
    parts = [part for part in (tokens, offsets, sizes, loss) if part is not None]
    files = tuple(Files.of(part.path, part.count * part.dtype.itemsize) for part in parts)
    for part, (_, _, (size,)) in zip(parts, files, strict=True):
        check_size(part.path, size, "prepare the folder again")
    about = {
        name: getattr(header, name)
        for name in ("documents", "largest_id", "tokenizer", "fingerprint")
    }
    about |= {"name": str(folder), "files": files}
    corpus = Corpus(tokens=tokens, offsets=offsets, text_bytes=sizes, loss=loss, **about)
    first, last = offsets.array[[0, -1]]
    if (
        first != 0
        or last != header.tokens
        or any((piece.lengths < 0).any() for piece in corpus.pieces())
    ):
        raise InputError(
            f"{offsets.path} is damaged: expected offsets that rise from 0 to {header.tokens}; "
            "prepare the folder again"
        )
    return corpus


def check_size(path: Path, expected: int, remedy: str) -> None:
    """Raises InputError unless the file has the expected size in bytes."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise InputError(
            f"there is no file {path}: expected one of {expected:,} bytes; {remedy}"
        ) from None
    if size != expected:
        problem = "is truncated" if size < expected else "is too long"
        raise InputError(
            f"{path} {problem}: it has {size:,} bytes, expected {expected:,}; {remedy}"
        )


def _read_header(folder: Path) -> Header:
    path = folder / "header.json"
    try:
        header = parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{folder} is not a folder of prepared tokens: there is no {path}"
        ) from None
    except InputError as error:
        raise InputError(f"{path} is not JSON ({error}); prepare the folder again") from None
    version = header.get("format") if isinstance(header, dict) else None
    if not isinstance(version, int):
        raise InputError(f"{path} is not a header of prepared tokens: it has no `format`")
    if version > FORMAT:
        raise InputError(
            f"{path} has format {version}, and this meshtrain reads up to {FORMAT}: use a newer "
            "meshtrain, or prepare "
            "the folder again"
        )
    wrong = [
        field.name for field in fields(Header) if not _fits(field.type, header.get(field.name))
    ]
    if wrong or header["dtype"] not in _DTYPES or header["tokens"] < 0:
        raise InputError(
            f"{path} is damaged (wrong or missing: {', '.join(wrong) or 'dtype or tokens'})"
        )
    return Header(**{field.name: header[field.name] for field in fields(Header)})


def _fits(kind: Any, value: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
