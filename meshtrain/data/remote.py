"""Token files in object storage, `data.path: s3://bucket/folder`: read in place, by blocks.

All files of a prepared folder but its tokens are brought to `data.cache`, once for each host and
version of the folder. Tokens are read by blocks of 256 KiB, those of a microbatch all at once, and
kept in `data.cache` up to `data.cache_gib`. The order of samples knows nothing of it.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from meshtrain.data.block_cache import BlockCache
from meshtrain.data.cache import Say, prepare_once
from meshtrain.data.tokens import HEADER, Corpus, Header, open_tokens, read_header, temporary_folder
from meshtrain.errors import InputError, UnreadableError, shorten
from meshtrain.job.object_storage import ObjectStorage
from meshtrain.job.storage import SIDE_FILE_BYTES, fsync_folder, with_retries

BLOCK = 1 << 18
TOKENS = "tokens.bin"
T = TypeVar("T")


def is_remote(path: str) -> bool:
    """Whether a path is a URL of object storage."""
    return "://" in path


def open_remote(url: str, cache: Path, cache_gib: float, say: Say) -> Corpus:
    """The corpus of a prepared folder in object storage; brings its small files to the cache, if no
    process of this host has.

    Raises InputError: there is no such folder, this user may not read it, or it is damaged;
    UnreadableError: storage does not answer, after several tries; OSError: the disk failed.
    """
    storage = RemoteFolder(url)
    text = storage.read_header()
    key = hashlib.sha256(url.encode() + text).hexdigest()[:16]
    folder = cache / f"remote-{key}"
    prepare_once(folder, partial(_bring, storage, text, folder, say), say)
    header = read_header(folder, cached=True)
    return open_tokens(folder, cached=True, tokens=storage.tokens(header, folder, cache_gib))


def _bring(storage: "RemoteFolder", header_text: bytes, folder: Path, say: Say) -> None:
    """Makes a folder of the small files, whole or not at all."""
    temporary = temporary_folder(folder)
    temporary.mkdir()
    try:
        (temporary / HEADER).write_bytes(header_text)
        header = read_header(temporary, cached=True)
        storage.check_size(TOKENS, header.tokens * np.dtype(header.dtype).itemsize)
        names = ["documents.bin"]
        if header.text_bytes is not None:
            names.append("bytes.bin")
        if header.loss_mask:
            names.append("loss.bin")
        say(f"bringing {', '.join(names)} of {storage.url} into {folder}")
        storage.bring([(name, temporary / name) for name in names])
        fsync_folder(temporary)
        temporary.rename(folder)
    except BaseException:
        for file in temporary.iterdir():
            file.unlink()
        temporary.rmdir()
        raise


class RemoteFolder:
    """A prepared folder in object storage, whose errors say what to do."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client: ObjectStorage | None = None
        self._process = 0  # that has made the client

    @property
    def client(self) -> ObjectStorage:
        """A client of this process: it has connections and a thread, which no fork takes along."""
        if self._client is None or self._process != os.getpid():
            self._client = ObjectStorage(self.url, key="data.path")
            self._process = os.getpid()
        return self._client

    def read_header(self) -> bytes:
        return self._tried(HEADER, lambda: self.client.read(HEADER, SIDE_FILE_BYTES))

    def check_size(self, name: str, expected: int) -> None:
        size = self._tried(name, lambda: self.client.size(name))
        if size != expected:
            raise InputError(
                f"{self.url}/{name} has {size:,} bytes, and by its header {expected:,}: upload the "
                "folder anew"
            )

    def bring(self, pairs: list[tuple[str, Path]]) -> None:
        self._tried("its small files", lambda: self.client.get_files(pairs))

    def ranges(self, name: str, spans: list[tuple[int, int]]) -> list[bytes]:
        """The bytes [begin, end) of a file, for several such spans at once."""
        parts = self._tried(name, lambda: self.client.read_ranges(name, spans))
        for part, (begin, end) in zip(parts, spans, strict=True):
            if len(part) != end - begin:
                raise InputError(
                    f"{self.url}/{name} gives {len(part):,} bytes from {begin:,} on, and expected "
                    f"are {end - begin:,}: upload the folder anew"
                )
        return parts

    def tokens(self, header: Header, folder: Path, cache_gib: float) -> "RemoteArray":
        size = header.tokens * np.dtype(header.dtype).itemsize
        blocks = -(-size // BLOCK)
        slots = max(1, min(blocks, int(cache_gib * 2**30) // BLOCK))
        cache = BlockCache(folder, BLOCK, slots)
        return RemoteArray(self, TOKENS, header.dtype, header.tokens, cache)

    def _tried(self, what: str, call: Callable[[], T]) -> T:
        """The result of a call of a client, whose errors are of types of its own."""

        def tried() -> T:
            try:
                return call()
            except (InputError, UnreadableError):
                raise
            except FileNotFoundError:
                raise InputError(
                    f"there is no {self.url}/{what}: data.path is the URL of a folder of token "
                    "files, such as s3://bucket/folder; `meshtrain prepare` makes one, and it is "
                    "uploaded as it is"
                ) from None
            except Exception as error:
                reason = f"{type(error).__name__}: {shorten(str(error))}"
                if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
                    raise InputError(
                        f"{self.url}/{what} may not be read ({reason}): export the credentials of "
                        "an account that may (AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS)"
                    ) from None
                raise UnreadableError(f"{self.url}/{what}", reason) from error

        return with_retries(tried)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}


class RemoteArray:
    """A one-dimensional array in a file in object storage, in the place of a `MappedArray`; slices
    of it are read."""

    def __init__(
        self, folder: RemoteFolder, name: str, dtype: str, count: int, cache: BlockCache
    ) -> None:
        self.path = Path(name)  # for messages
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.count = count  # of values
        self._folder = folder
        self._name = name
        self._bytes = count * self.dtype.itemsize
        self._cache = cache
        self._held: dict[int, bytes] = {}  # blocks that were brought for the next reads

    @property
    def array(self) -> "RemoteArray":
        return self

    def bring(self, spans: Iterable[tuple[int, int]]) -> None:
        """Brings the values [begin, end) of several spans, all at once: the next slices are of
        these."""
        self._held = {}
        needed: dict[int, None] = {}
        for begin, end in spans:
            needed.update(dict.fromkeys(self._blocks(begin, end)))
        missing = []
        for block in needed:
            content = self._cache.get(block, self._size(block))
            if content is None:
                missing.append(block)
            else:
                self._held[block] = content
        self._fetch(missing)

    def __getitem__(self, part: slice) -> np.ndarray:
        begin, end, _ = part.indices(self.count)
        if begin >= end:
            return np.empty(0, self.dtype)
        blocks = self._blocks(begin, end)
        if any(block not in self._held for block in blocks):
            self.bring([(begin, end)])
        content = b"".join(self._held[block] for block in blocks)
        first = begin * self.dtype.itemsize - blocks.start * BLOCK
        return np.frombuffer(content, self.dtype, end - begin, first)

    def _fetch(self, blocks: list[int]) -> None:
        if not blocks:
            return
        spans = [(block * BLOCK, block * BLOCK + self._size(block)) for block in blocks]
        contents = self._folder.ranges(self._name, spans)
        for block, content in zip(blocks, contents, strict=True):
            self._held[block] = content
            self._cache.put(block, content)

    def _blocks(self, begin: int, end: int) -> range:
        """The blocks that the values [begin, end) touch."""
        size = self.dtype.itemsize
        return range(begin * size // BLOCK, (end * size - 1) // BLOCK + 1)

    def _size(self, block: int) -> int:
        return min(BLOCK, self._bytes - block * BLOCK)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": {}}
