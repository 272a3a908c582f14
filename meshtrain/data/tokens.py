"""Token files: the prepared form of a corpus, a folder of flat files that are memory-mapped and
read in place.

    tokens.bin      every token of every document, one after the other
                    (uint8, uint16 or uint32, little-endian)
    documents.bin   int64, number of documents + 1:
                    document d is tokens documents[d] to documents[d + 1]
    bytes.bin       int64 per document: bytes of the text behind its predicted tokens
                    (absent where that is unknown)
    loss.bin        uint8 per token: 0 where the token, as a target, carries no loss
                    (absent if all tokens carry one)
    checksums.json  the CRC-32 of every 4 MiB of each file above
                    (older versions of meshtrain wrote none)
    header.json     describes the other files; written last

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
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from meshtrain.data.fingerprint import Files
from meshtrain.errors import InputError
from meshtrain.job.parsing import parse_json, read_limited
from meshtrain.job.storage import SIDE_FILE_BYTES, fsync_folder, read_guarded, write_whole

if TYPE_CHECKING:
    from meshtrain.data.remote import RemoteArray

FORMAT = 1
BLOCK = 4 << 20  # bytes under one checksum
HEADER = "header.json"
CHECKSUMS = "checksums.json"
_CHECKSUM_BYTES = 1 << 30  # the most that are read of it
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
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.count = count  # of values
        self.offset = offset  # in bytes, of the first value
        self._array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        if self._array is None:
            if self.count == 0:  # an empty file cannot be mapped
                self._array = np.empty(0, self.dtype)
            else:
                mapped = np.memmap(self.path, self.dtype, "r", self.offset, (self.count,))
                self._array = np.asarray(mapped)  # a plain array: slicing a np.memmap costs more
        return self._array

    def bring(self, spans: Iterable[tuple[int, int]]) -> None:
        """The values [begin, end) of several spans are read next: nothing is to be done for a file
        of this host."""

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
    tokens: "MappedArray | RemoteArray"
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
        one_each = np.ones(stop - first, np.int64)
        return Piece(slice(first, stop), offsets[:-1], np.diff(offsets), one_each)

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
        count = _FIRST_LOOK_BYTES // self.tokens.dtype.itemsize
        beginning = self.tokens.array[:count]
        for token in (int(beginning.max()), int(beginning.min())):
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
            "largest: the file is damaged; copy or prepare it anew"
        )
    if token < 0:
        return InputError(
            f"{source} holds the token id {token}: expected ids from 0 on; is the file what it "
            "should be?"
        )
    return InputError(
        f"{source} holds the token id {token}, but model.vocab_size is {n_outputs}: set it to at "
        f"least {token + 1}, or use the tokenizer that the model was made for"
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
    temporary = temporary_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        with ExitStack() as stack:
            writer = _Writer(temporary, vocab_size, tokenizer, source, stack)
            for document in documents:
                writer.add(document)
            writer.sync()
        header = writer.finish()
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


def temporary_folder(folder: Path) -> Path:
    """The temporary folder in which this process makes `folder`."""
    name = f"{temporary_prefix(folder)}{socket.gethostname()}.{os.getpid()}.tmp"
    return folder.parent / name


class _BlockFile:
    """A file written sequentially, with the CRC-32 of each of its blocks."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.crc32: list[int] = []
        self._file = stack.enter_context(open(path, "wb"))  # noqa: SIM115
        self._size = 0

    def write(self, data: memoryview | bytes) -> memoryview | bytes:
        """Adds bytes; returns them."""
        self._file.write(data)
        rest = data
        while len(rest):
            filled = self._size % BLOCK
            part = rest[: BLOCK - filled]
            if filled == 0:
                self.crc32.append(zlib.crc32(part))
            else:
                self.crc32[-1] = zlib.crc32(part, self.crc32[-1])
            self._size += len(part)
            rest = rest[len(part) :]
        return data

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


class _Writer:
    """Writes documents into the files of a folder, part by part."""

    def __init__(
        self, folder: Path, vocab_size: int, tokenizer: str, source: str, stack: ExitStack
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._source = source
        self._dtype = np.dtype(smallest_dtype(vocab_size)).newbyteorder("<")
        self._tokens = _BlockFile(folder / "tokens.bin", stack)
        self._losses = _BlockFile(folder / "loss.bin", stack)
        self._offsets = _BlockFile(folder / "documents.bin", stack)
        self._sizes = _BlockFile(folder / "bytes.bin", stack)
        self._digest = hashlib.sha256(self._dtype.name.encode())

        self._number = 0  # of the current document, empty ones counted
        self._documents = 0  # written
        self._token_count = 0
        self._text_bytes = 0
        self._largest_id = -1
        self._any_masked = False  # whether a token carries no loss
        self._all_sized = True  # whether the bytes of each text are known
        # Of the current document: the losses of its parts, which are written at its end, and the
        # bytes of its text so far.
        self._pending_losses: list[np.ndarray] = []
        self._pending_bytes = 0

        self._offsets.write(_INT64.pack(0))

    def add(self, document: Document) -> None:
        if len(document.ids):
            self._add_part(document)
        if document.ends:
            if self._pending_losses:
                self._end_document()
            self._number += 1

    def _add_part(self, document: Document) -> None:
        ids = document.ids
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise InputError(
                f"document {self._number} of {self._source} holds the token id {wrong}; expected 0 "
                f"to {self._vocab_size - 1}, as {self._tokenizer} has {self._vocab_size} ids"
            )
        self._largest_id = max(self._largest_id, high)
        self._token_count += len(ids)
        self._digest.update(
            self._tokens.write(np.ascontiguousarray(ids, self._dtype).data.cast("B"))
        )

        if document.loss is None:
            losses = np.broadcast_to(_ONE, len(ids))
        else:
            losses = np.asarray(document.loss, np.uint8)
            self._any_masked |= not losses.all()
        self._pending_losses.append(losses)

        if document.text_bytes is None:
            self._all_sized = False
        else:
            self._pending_bytes += document.text_bytes

    def _end_document(self) -> None:
        for losses in self._pending_losses:
            for start in range(0, len(losses), _PART):
                part = np.ascontiguousarray(losses[start : start + _PART])
                self._digest.update(self._losses.write(part.data))
        self._offsets.write(_INT64.pack(self._token_count))
        self._sizes.write(_INT64.pack(self._pending_bytes))
        self._documents += 1
        self._text_bytes += self._pending_bytes
        self._pending_losses = []
        self._pending_bytes = 0

    def sync(self) -> None:
        """All documents are there: brings the files to disk. Raises ValueError: the last document
        is not ended."""
        if self._pending_losses:
            raise ValueError(f"the last document of {self._source} does not end")
        for file in (self._tokens, self._losses, self._offsets, self._sizes):
            file.sync()

    def finish(self) -> Header:
        """Removes the files that say nothing, and writes checksums and header."""
        for block in read_blocks(self._offsets.path):
            self._digest.update(block)

        files = [self._tokens, self._offsets]
        # Written as they came; whether they say anything is known only now.
        for file, is_kept in ((self._losses, self._any_masked), (self._sizes, self._all_sized)):
            if is_kept:
                files.append(file)
            else:
                file.path.unlink()
        crc32 = {file.path.name: [f"{crc:08x}" for crc in file.crc32] for file in files}
        checksums = {"block": BLOCK, "crc32": crc32}
        write_whole(self._folder / CHECKSUMS, json.dumps(checksums) + "\n")

        header = Header(
            format=FORMAT,
            dtype=self._dtype.name,
            tokens=self._token_count,
            documents=self._documents,
            largest_id=self._largest_id,
            text_bytes=self._text_bytes if self._all_sized else None,
            loss_mask=self._any_masked,
            fingerprint=self._digest.hexdigest(),
            tokenizer=self._tokenizer,
            source=self._source,
        )
        write_whole(self._folder / HEADER, json.dumps(asdict(header), indent=1) + "\n")
        return header


def read_blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from iter(partial(file.read, BLOCK), b"")


def read_documents(folder: Path) -> Iterator[Document]:
    """The documents of a folder in parts, as `write` takes them. Files are read, not mapped, since
    they may be larger than the process's memory. Raises InputError: not a prepared folder, or a
    damaged one."""
    header = read_header(folder, cached=True)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    with ExitStack() as stack:

        def opened(name: str) -> BinaryIO:
            return stack.enter_context(open(folder / name, "rb"))

        tokens = opened("tokens.bin")
        offsets = opened("documents.bin")
        losses = opened("loss.bin") if header.loss_mask else None
        sizes = opened("bytes.bin") if header.text_bytes is not None else None
        offsets.seek(_INT64.size)
        start = 0
        for _ in range(header.documents):
            (end,) = _INT64.unpack(offsets.read(_INT64.size))
            size = None
            if sizes is not None:
                (size,) = _INT64.unpack(sizes.read(_INT64.size))
            while start < end:
                count = min(end - start, _PART)
                start += count
                is_last = start == end
                ids = np.frombuffer(tokens.read(count * dtype.itemsize), dtype, count)
                loss = None if losses is None else np.frombuffer(losses.read(count), np.uint8)
                # The bytes of the text count once, with the last part.
                text_bytes = size if is_last or size is None else 0
                yield Document(ids, loss, text_bytes, is_last)


def verify(folder: Path, n_outputs: int | None = None) -> tuple[list[str], bool]:
    """Reads a whole prepared folder. Returns its problems and whether it has checksums; without
    them only sizes, offsets and the range of ids are checked. Raises InputError: it is not a
    prepared folder."""
    if not (folder / HEADER).is_file():
        read_header(folder)
    try:
        corpus = open_tokens(folder)
    except InputError as error:
        return [str(error)], True
    paths = [part.root / name for part in corpus.files for name in part.names]
    sums = folder / CHECKSUMS
    try:
        crc32 = None
        if sums.is_file():
            crc32 = parse_json(read_limited(sums, _CHECKSUM_BYTES), most=_CHECKSUM_BYTES)["crc32"]
        checksums = {path: None if crc32 is None else crc32[path.name] for path in paths}
    except (ValueError, KeyError, TypeError) as error:
        return [f"{sums} is damaged ({error!r})"], True

    problems = []
    for path, expected in checksums.items():
        # Block by block, as they were summed: the place of damage is known to 4 MiB.
        for index, block in enumerate(read_blocks(path)):
            place = f"{path}: bytes {index * BLOCK:,} to {index * BLOCK + len(block):,}"
            if expected and [f"{zlib.crc32(block):08x}"] != expected[index : index + 1]:
                problems.append(f"{place} are not those that were written")
            elif path == corpus.tokens.path:
                largest = int(np.frombuffer(block, corpus.tokens.dtype).max())
                if largest >= corpus.limit(n_outputs):
                    wrong = outside_vocabulary("it", largest, n_outputs, corpus.largest_id)
                    problems.append(f"{place}: {wrong}")
    return problems, crc32 is not None


def open_tokens(
    folder: Path, *, cached: bool = False, tokens: "MappedArray | RemoteArray | None" = None
) -> Corpus:
    """Opens a prepared folder; reads the header and offsets only.

    Args:
        cached: whether it lies in a cache, where others may be able to write, rather than being
            named by the user.
        tokens: the tokens, where they lie elsewhere.

    Raises:
        InputError: it is not one, too new, or damaged.
        OSError: its header cannot be read, or is a link or another user's in a cache.
    """
    header = read_header(folder, cached=cached)
    if header.tokens < 1:
        raise InputError(
            f"{folder} is damaged: by its header it holds no tokens; prepare the folder again"
        )
    if tokens is None:
        tokens = MappedArray(folder / "tokens.bin", header.dtype, header.tokens)
    offsets = MappedArray(folder / "documents.bin", "int64", header.documents + 1)
    sizes = loss = None
    if header.text_bytes is not None:
        sizes = MappedArray(folder / "bytes.bin", "int64", header.documents)
    if header.loss_mask:
        loss = MappedArray(folder / "loss.bin", "uint8", header.tokens)

    files = []
    for part in (tokens, offsets, sizes, loss):
        if isinstance(part, MappedArray):
            size = part.count * part.dtype.itemsize
            check_size(part.path, size, "prepare the folder again")
            files.append(Files.of(part.path, size))

    corpus = Corpus(
        name=str(folder),
        tokens=tokens,
        loss=loss,
        documents=header.documents,
        offsets=offsets,
        text_bytes=sizes,
        largest_id=header.largest_id,
        tokenizer=header.tokenizer,
        fingerprint=header.fingerprint,
        files=tuple(files),
    )
    first, last = offsets.array[[0, -1]]
    falls = any((piece.lengths < 0).any() for piece in corpus.pieces())
    if first != 0 or last != header.tokens or falls:
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


def read_header(folder: Path, *, cached: bool = False) -> Header:
    path = folder / HEADER
    try:
        text = read_guarded(path) if cached else read_limited(path, SIDE_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{folder} is not a folder of prepared tokens: there is no {path}"
        ) from None
    except InputError as error:
        raise InputError(f"{path} is not a header of prepared tokens: {error}") from None
    try:
        header = parse_json(text)
    except InputError as error:
        raise InputError(f"{path} is not JSON ({error}); prepare the folder again") from None

    version = header.get("format") if isinstance(header, dict) else None
    if not isinstance(version, int):
        raise InputError(f"{path} is not a header of prepared tokens: it has no `format`")
    if version > FORMAT:
        raise InputError(
            f"{path} has format {version}, and this meshtrain reads up to {FORMAT}: use a newer "
            "meshtrain, or prepare the folder again"
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
    """Whether a value of JSON is of the type of a field; true and false are no integers here."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind)
