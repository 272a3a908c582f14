"""Token files: the prepared form of a corpus, a folder of flat files that are memory-mapped and read in place.

    tokens.bin      every token of every document, one after the other (uint8, uint16 or uint32, little-endian)
    documents.bin   int64, one more than there are documents: document d is tokens documents[d] to documents[d + 1]
    bytes.bin       int64 per document: the bytes of text its predicted tokens stand for (not where it is unknown)
    loss.bin        uint8 per token: 0 where the token, as a target, carries no loss (only where there is such a token)
    header.json     what the others hold; written last

A folder appears whole or not at all: it is written under another name, brought to the disk, and renamed.
"""

import hashlib
import json
import math
import os
import shutil
import socket
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from meshtrain.data.fingerprint import Files
from meshtrain.errors import InputError
from meshtrain.job.storage import fsync_folder, write_whole

FORMAT = 1
_DTYPES = ("uint8", "uint16", "uint32")
_ONE = np.uint8(1)
_FIRST_LOOK_BYTES = 4 << 20  # of a file that does not say its largest id
_PART = 1 << 20  # values that are written at once where they do not lie in memory


class Document(NamedTuple):
    """One document, or a part of one, on its way into a token file."""

    ids: np.ndarray  # (n,) token ids, the end-of-document token included
    loss: np.ndarray | None = None  # (n,) 0 where the token carries no loss as a target; None: all of them do
    text_bytes: int | None = None  # bytes of the text that the tokens with a loss stand for
    ends: bool = True  # False: what comes next goes on with this document


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
    fingerprint: str  # SHA-256 over the other files: the same corpus and tokenizer, the same fingerprint, anywhere
    tokenizer: str
    source: str


class MappedArray:
    """A one-dimensional array in a file: mapped when first used, in whichever process uses it. Pickled as its path."""

    def __init__(self, path: Path, dtype: str, count: int, offset: int = 0) -> None:
        self.path, self.dtype, self.count, self.offset = path, np.dtype(dtype).newbyteorder("<"), count, offset
        self._array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        if self._array is None:
            self._array = np.empty(0, self.dtype)  # nothing cannot be mapped
            if self.count:  # as a plain array: slices of a memmap cost more
                self._array = np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, (self.count,)))
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_array": None}


@dataclass(frozen=True)
class Corpus:
    """A token file and where its documents lie: D documents of S sequences, each of which is contiguous in the file."""

    name: str
    tokens: MappedArray
    loss: MappedArray | None  # 0 where a token, as a target, carries no loss
    starts: np.ndarray  # (S,) where each sequence begins in the file, in tokens
    lengths: np.ndarray  # (S,) in tokens
    bounds: np.ndarray  # (D + 1,) document d is sequences bounds[d] to bounds[d + 1]
    text_bytes: np.ndarray | None  # (D,) bytes of text that the tokens with a loss stand for
    largest_id: int | None  # None: the file does not say
    tokenizer: str | None  # its identity; None: the file does not say
    fingerprint: str
    files: tuple[Files, ...] = ()  # one each

    @property
    def documents(self) -> int:
        return len(self.bounds) - 1

    def check_ids(self, n_outputs: int | None) -> None:
        """Raises InputError if the file has an id outside the vocabulary, as far as its header or beginning shows."""
        if n_outputs is not None and self.largest_id is not None and self.largest_id >= n_outputs:
            raise outside_vocabulary(self.name, self.largest_id, n_outputs, None)
        first = self.tokens.array[: _FIRST_LOOK_BYTES // self.tokens.dtype.itemsize]
        for token in (int(first.max()), int(first.min())):
            if token < 0 or token >= self.limit(n_outputs):
                raise outside_vocabulary(self.name, token, n_outputs, self.largest_id)

    def limit(self, n_outputs: int | None) -> float:
        """Ids of whole files lie below it: the vocabulary's size, or less where the header knows better."""
        limit = math.inf if self.largest_id is None else self.largest_id + 1
        return limit if n_outputs is None else min(limit, n_outputs)


def outside_vocabulary(source: str, token: int, n_outputs: int | None, largest_id: int | None) -> InputError:
    if largest_id is not None and token > largest_id:
        return InputError(
            f"{source} holds the token id {token}, and its header says that {largest_id} is the largest: the file is "
            "damaged; copy or prepare it anew"
        )
    if token < 0:
        return InputError(
            f"{source} holds the token id {token}: expected ids from 0 on; is the file what it should be?"
        )
    return InputError(
        f"{source} holds the token id {token}, but model.vocab_size is {n_outputs}: set it to at least {token + 1}, or "
        "use the tokenizer that the model was made for"
    )


def smallest_dtype(vocab_size: int) -> str:
    return next(name for name in _DTYPES if vocab_size - 1 <= np.iinfo(name).max)


def write(folder: Path, documents: Iterable[Document], *, vocab_size: int, tokenizer: str, source: str) -> Header:
    """Writes a folder of token files, whole or not at all.

    Args:
        vocab_size: ids lie in [0, vocab_size); it decides how many bytes a token takes.
        tokenizer, source: names, for people; `bytes` is the byte tokenizer.

    Raises:
        InputError: no tokens, or an id outside the vocabulary.
        ValueError: the last document does not end.
        OSError: the folder exists, or the disk does not take it. Nothing is left behind.
    """
    temporary = folder.parent / f"{temporary_prefix(folder)}{socket.gethostname()}.{os.getpid()}.tmp"
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        header = _write_files(temporary, documents, vocab_size, tokenizer, source)
        fsync_folder(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(folder.parent)
    return header


def temporary_prefix(folder: Path) -> str:
    """How the names of the folders begin that are to become `folder`; the host and the pid follow."""
    return f".{folder.name}."


def _write_files(folder: Path, documents: Iterable[Document], vocab_size: int, tokenizer: str, source: str) -> Header:
    dtype = np.dtype(smallest_dtype(vocab_size)).newbyteorder("<")
    offsets, text_bytes, sized = array("q", [0]), array("q"), True
    number = tokens_seen = size_seen = 0
    largest, masked = -1, False
    losses_so_far: list[np.ndarray] = []  # of the document
    digest = hashlib.sha256(dtype.name.encode())
    with open(folder / "tokens.bin", "wb") as tokens, open(folder / "loss.bin", "wb") as losses:
        for ids, loss, size, ends in documents:
            if len(ids):
                low, high = int(ids.min()), int(ids.max())
                if low < 0 or high >= vocab_size:
                    raise InputError(
                        f"document {number} of {source} holds the token id {high if low >= 0 else low}; "
                        f"expected 0 to {vocab_size - 1}, as {tokenizer} has {vocab_size} ids"
                    )
                losses_so_far.append(np.broadcast_to(_ONE, len(ids)) if loss is None else np.asarray(loss, np.uint8))
                masked |= loss is not None and not losses_so_far[-1].all()
                largest = max(largest, high)
                digest.update(_put(tokens, np.ascontiguousarray(ids, dtype)))
                tokens_seen += len(ids)
                size_seen += size or 0
                sized &= size is not None
            if ends and losses_so_far:
                for part in losses_so_far:
                    for start in range(0, len(part), _PART):
                        digest.update(_put(losses, np.ascontiguousarray(part[start : start + _PART])))
                offsets.append(tokens_seen)
                text_bytes.append(size_seen)
                losses_so_far, size_seen = [], 0
            number += ends
        if losses_so_far:
            raise ValueError(f"the last document of {source} does not end")
        _flush(tokens)
        _flush(losses)
    if tokens_seen == 0:
        raise InputError(f"{source} holds no text: there is nothing to train on")
    digest.update(_save(folder / "documents.bin", offsets))
    if sized:
        _save(folder / "bytes.bin", text_bytes)
    if not masked:
        (folder / "loss.bin").unlink()
    header = Header(
        format=FORMAT,
        dtype=dtype.name,
        tokens=tokens_seen,
        documents=len(offsets) - 1,
        largest_id=largest,
        text_bytes=sum(text_bytes) if sized else None,
        loss_mask=masked,
        fingerprint=digest.hexdigest(),
        tokenizer=tokenizer,
        source=source,
    )
    write_whole(folder / "header.json", json.dumps(asdict(header), indent=1) + "\n")
    return header


def _put(file: BinaryIO, values: np.ndarray) -> memoryview:
    data = values.data.cast("B")
    file.write(data)
    return data


def _save(path: Path, values: "array[int]") -> memoryview:
    with open(path, "wb") as file:
        data = _put(file, np.array(values, "<i8"))
        _flush(file)
    return data


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def open_tokens(folder: Path) -> Corpus:
    """Opens a prepared folder; only the small files are read. Raises InputError: it is none, newer, or damaged."""
    header = _read_header(folder)
    tokens = MappedArray(folder / "tokens.bin", header.dtype, header.tokens)
    offsets = MappedArray(folder / "documents.bin", "int64", header.documents + 1)
    sizes = MappedArray(folder / "bytes.bin", "int64", header.documents) if header.text_bytes is not None else None
    loss = MappedArray(folder / "loss.bin", "uint8", header.tokens) if header.loss_mask else None
    parts = [part for part in (tokens, offsets, sizes, loss) if part is not None]
    files = tuple(Files.of(part.path, part.count * part.dtype.itemsize) for part in parts)
    for part, (_, _, (size,)) in zip(parts, files, strict=True):
        check_size(part.path, size, "prepare the folder again")
    documents = offsets.array
    if documents[0] != 0 or documents[-1] != header.tokens or bool((documents[1:] < documents[:-1]).any()):
        raise InputError(
            f"{offsets.path} is damaged: expected offsets that rise from 0 to {header.tokens}; prepare the folder again"
        )
    return Corpus(
        name=str(folder),
        tokens=tokens,
        loss=loss,
        starts=documents[:-1],
        lengths=np.diff(documents),
        bounds=np.arange(len(documents)),
        text_bytes=None if sizes is None else sizes.array,
        largest_id=header.largest_id,
        tokenizer=header.tokenizer,
        fingerprint=header.fingerprint,
        files=files,
    )


def check_size(path: Path, expected: int, remedy: str) -> None:
    """Raises InputError unless the file has the expected size in bytes."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise InputError(f"there is no file {path}: expected one of {expected:,} bytes; {remedy}") from None
    if size != expected:
        problem = "is truncated" if size < expected else "is too long"
        raise InputError(f"{path} {problem}: it has {size:,} bytes, expected {expected:,}; {remedy}")


def _read_header(folder: Path) -> Header:
    path = folder / "header.json"
    try:
        header = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{folder} is not a folder of prepared tokens: there is no {path}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}); prepare the folder again") from None
    version = header.get("format") if isinstance(header, dict) else None
    if not isinstance(version, int):
        raise InputError(f"{path} is not a header of prepared tokens: it has no `format`")
    if version > FORMAT:
        raise InputError(
            f"{path} has format {version}, and this meshtrain reads up to {FORMAT}: use a newer meshtrain, or prepare "
            "the folder again"
        )
    wrong = [field.name for field in fields(Header) if not _fits(field.type, header.get(field.name))]
    if wrong or header["dtype"] not in _DTYPES or header["tokens"] < 1:
        raise InputError(f"{path} is damaged (wrong or missing: {', '.join(wrong) or 'dtype or tokens'})")
    return Header(**{field.name: header[field.name] for field in fields(Header)})


def _fits(kind: Any, value: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
