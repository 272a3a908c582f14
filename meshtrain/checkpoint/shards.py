"""One rank's file of a checkpoint: a safetensors file whose header also tells the CRC-32 of each block of a tensor.

So a reader of some rows reads and proves the blocks in which they lie and no others. The manifest has the CRC-32 of
the whole file. It follows from that of the header and those of the blocks (crc.py), which means that a writer reads
no byte twice, and that whoever opens a file knows at once whether header and checksums are the ones that were written.
"""

import errno
import math
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from types import TracebackType
from typing import Any

from meshtrain.checkpoint import strict
from meshtrain.checkpoint.crc import combine
from meshtrain.checkpoint.manifest import File
from meshtrain.errors import DamagedError, MissingError, UnreadableError
from meshtrain.weights import SIZES, Entry

FORMAT = "meshtrain checkpoint 1"
BLOCK = 4 * 2**20  # bytes of a tensor under one checksum
PAGE = 4096  # data begins at a multiple of it: reading at an odd place took a fifth longer
MAX_HEADER = 2**25  # bytes; the checksums of 8 TiB take 28 million


def write_shard(path: Path, tensors: Sequence[tuple[Entry, memoryview]]) -> File:
    """Writes a new file with these tensors, one after the other, and waits until it is on disk.

    The bytes are summed up by a helper thread while they are written. The header holds the sums and has the same
    length whatever they are, so it comes last.

    Args:
        path: of a file that does not exist.
        tensors: what each is, and its bytes in C order.

    Raises:
        OSError: it cannot be written; what there is of it stays.
    """
    entries = [entry for entry, _ in tensors]
    blocks = [block for entry, view in tensors for block in _blocks(entry, view)]
    room = len(_header(entries, [0] * len(blocks)))
    with path.open("xb", buffering=0) as file:
        file.seek(room)
        helper = ThreadPoolExecutor(1, thread_name_prefix="crc32")
        try:
            try:
                sums = [helper.submit(zlib.crc32, block) for block in blocks]
            except RuntimeError as error:  # no thread can be started: the machine's trouble, as a full disk is
                raise OSError(errno.EAGAIN, str(error), str(path)) from error
            for block in blocks:
                _write(file.fileno(), block)
            crcs = [each.result() for each in sums]
        finally:
            helper.shutdown(cancel_futures=True)
        header = _header(entries, crcs)
        file.seek(0)
        _write(file.fileno(), memoryview(header))
        os.fsync(file.fileno())
    sizes = [len(block) for block in blocks]
    whole = combine([(zlib.crc32(header), room), *zip(crcs, sizes, strict=True)])
    return File(room + sum(sizes), f"{whole:08x}")


def open_plain(path: Path) -> tuple[int, int]:
    """Opens a file for reading: descriptor and size. A link is not followed, and nothing waits for a pipe.

    Raises:
        DamagedError: it is missing, or is something else than a file. UnreadableError: it cannot be read now.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        about = os.fstat(descriptor)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingError(path) from error
    except OSError as error:
        what = {
            errno.ELOOP: "is a link, which nobody follows here",
            errno.ENXIO: "is no file",
            errno.ENODEV: "is no file",
        }
        if error.errno in what:
            raise DamagedError(path, what[error.errno]) from error
        raise UnreadableError(path, error.strerror) from error
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        raise DamagedError(path, "is no file")
    return descriptor, about.st_size


class Shard:
    """One rank's file, for reading; several threads may read at once.

    Attributes:
        path: of the file.
        entries: name -> what the file holds under it.
    """

    def __init__(self, path: Path, expected: File | None) -> None:
        """Opens a file and checks all but the tensors' bytes; `expected`: what the manifest says of it.

        Raises:
            DamagedError: it is not what was written.
        """
        self.path = path
        self._file, size = open_plain(path)
        try:
            if expected is not None and size != expected.size:
                raise DamagedError(path, f"has {size:,} bytes; {expected.size:,} were written")
            header = self._read_header(size)
            self.entries, self._starts, self._crcs = _understood(path, header, size)
            if expected is not None and self._whole(header) != expected.crc32:
                raise DamagedError(path, "its header or its checksums are not those that were written")
        except BaseException:
            self.close()
            raise

    def read(self, name: str, rows: slice | None = None) -> memoryview:
        """The bytes of an entry, or of some of its rows (`slice(0, 1)` of a scalar), as memory of its own.

        Raises:
            DamagedError: the file has no such entry, or a block is not what was written. UnreadableError: it cannot be
                read now.
        """
        begin, end = self._range(name, rows)
        found = _memory(end - begin)
        self.read_into(name, found, rows)
        return found

    def read_into(self, name: str, into: memoryview, rows: slice | None = None) -> None:
        """As `read`, into memory that the caller has: as many bytes as the rows have."""
        begin, end = self._range(name, rows)
        self.read_bytes(name, begin, into.cast("B") if end > begin else into[:0], end)

    def read_bytes(self, name: str, begin: int, into: memoryview, end: int) -> None:
        """The bytes from `begin` to `end` of an entry. Every block that they touch is read and proved as a whole."""
        if len(into) != end - begin:
            raise ValueError(f"{name}: room for {len(into)} bytes, and {end - begin} are to be read")
        for index in range(begin // BLOCK, -(-end // BLOCK)):
            low, high = self._block(name, index)
            first, last = max(begin, low), min(end, high)
            if (first, last) == (low, high):
                self._prove(name, index, into[low - begin : high - begin])
            else:
                block = memoryview(bytearray(high - low))
                self._prove(name, index, block)
                into[first - begin : last - begin] = block[first - low : last - low]

    def verify(self) -> list[DamagedError]:
        """Reads every block; one problem for each tensor that is not what was written."""
        return [error for name in self.entries if (error := self._damage(name)) is not None]

    def close(self) -> None:
        """May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "Shard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _damage(self, name: str) -> DamagedError | None:
        block = memoryview(bytearray(min(BLOCK, self.entries[name].nbytes)))
        try:
            for index in range(len(self._crcs[name])):
                low, high = self._block(name, index)
                self._prove(name, index, block[: high - low])
        except DamagedError as error:
            return error
        return None

    def _range(self, name: str, rows: slice | None) -> tuple[int, int]:
        """Where rows of an entry lie in its bytes."""
        entry = self._entry(name)
        if rows is None:
            return 0, entry.nbytes
        height = entry.shape[0] if entry.shape else 1
        if not 0 <= rows.start <= rows.stop <= height:
            raise DamagedError(self.path, f"has {height} rows; {rows.start} to {rows.stop} were to be read", name)
        row = math.prod(entry.shape[1:]) * SIZES[entry.dtype]
        return rows.start * row, rows.stop * row

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise DamagedError(self.path, "is not in the file", name)
        return self.entries[name]

    def _block(self, name: str, index: int) -> tuple[int, int]:
        """Where a block begins and ends in the bytes of its entry."""
        return index * BLOCK, min((index + 1) * BLOCK, self.entries[name].nbytes)

    def _prove(self, name: str, index: int, into: memoryview) -> None:
        """Reads a whole block and compares its checksum."""
        self._read(self._starts[name] + index * BLOCK, into, name)
        if zlib.crc32(into) != self._crcs[name][index]:
            low, high = self._block(name, index)
            raise DamagedError(self.path, f"its bytes {low:,} to {high:,} are not those that were written", name)

    def _read(self, at: int, into: memoryview, tensor: str | None = None) -> None:
        done = 0
        while done < len(into):
            try:
                n = os.preadv(self._file, [into[done:]], at + done)
            except OSError as error:
                raise UnreadableError(self.path, error.strerror, tensor) from error
            if n == 0:
                raise DamagedError(self.path, f"ends after {at + done:,} bytes", tensor)
            done += n

    def _read_header(self, size: int) -> bytes:
        """The length of the header and the header."""
        length = memoryview(bytearray(8))
        self._read(0, length)
        found = struct.unpack("<Q", length)[0]
        if not 2 <= found <= min(MAX_HEADER, size - 8):
            raise DamagedError(self.path, f"its header would have {found:,} bytes, and the file has {size:,}")
        header = memoryview(bytearray(8 + found))
        self._read(0, header)
        return bytes(header)

    def _whole(self, header: bytes) -> str:
        """The CRC-32 of the file, if its blocks are what the header says."""
        blocks = (
            (crc, min(BLOCK, entry.nbytes - index * BLOCK))
            for name, entry in self.entries.items()
            for index, crc in enumerate(self._crcs[name])
        )
        return f"{combine([(zlib.crc32(header), len(header)), *blocks]):08x}"


def _understood(path: Path, header: bytes, size: int) -> tuple[dict[str, Entry], dict[str, int], dict[str, list[int]]]:
    """What a header says of the tensors: entries, where each begins in the file, the checksums of its blocks."""
    found = strict.parse(header[8:], path)
    about = found.pop("__metadata__", None) if isinstance(found, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT or about.get("block") != str(BLOCK):
        raise DamagedError(path, f"is no file of a checkpoint: its header does not say {FORMAT!r}")
    sums = strict.parse(about["crc32"], path) if isinstance(about.get("crc32"), str) else None
    if not isinstance(sums, dict) or sums.keys() != found.keys():
        raise DamagedError(path, "its header has not the checksums of just its tensors")
    entries, starts, crcs = {}, {}, {}
    at = 0
    for name, told in found.items():
        entry = _entry(name, told, at)
        blocks = None if entry is None else _crcs(sums[name], -(-entry.nbytes // BLOCK))
        if entry is None or blocks is None:
            raise DamagedError(path, f"what its header says of {name[:80]!a} cannot be")
        entries[name], starts[name], crcs[name] = entry, len(header) + at, blocks
        at += entry.nbytes
    if len(header) + at != size:
        raise DamagedError(path, f"has {size:,} bytes, and its header tells of {len(header) + at:,}")
    return entries, starts, crcs


def _entry(name: str, told: Any, at: int) -> Entry | None:
    """The entry that begins at a place of the data; None if the header cannot mean one."""
    if not isinstance(told, dict) or told.keys() != {"dtype", "shape", "data_offsets"}:
        return None
    dtype, shape = told["dtype"], told["shape"]
    if not isinstance(dtype, str) or dtype not in SIZES or not isinstance(shape, list) or len(shape) > 64:
        return None
    if not all(map(strict.is_count, shape)):
        return None
    entry = Entry(name, dtype, tuple(shape))
    return entry if told["data_offsets"] == [at, at + entry.nbytes] else None


def _crcs(told: Any, blocks: int) -> list[int] | None:
    if not isinstance(told, list) or len(told) != blocks:
        return None
    if not all(isinstance(each, str) and len(each) == 8 and set(each) <= set("0123456789abcdef") for each in told):
        return None
    return [int(each, 16) for each in told]


def _header(entries: Sequence[Entry], crcs: Sequence[int]) -> bytes:
    """What a file with these tensors begins with; `crcs` of all their blocks in order."""
    about: dict[str, Any] = {}
    sums: Mapping[str, list[str]] = {entry.name: [] for entry in entries}
    if len(sums) < len(entries):
        raise ValueError("two tensors of a file have one name")
    at, left = 0, iter(crcs)
    for entry in entries:
        about[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        sums[entry.name].extend(f"{next(left):08x}" for _ in range(-(-entry.nbytes // BLOCK)))
        at += entry.nbytes
    metadata = {"format": FORMAT, "block": str(BLOCK), "crc32": strict.dumps(sums)}
    text = strict.dumps({"__metadata__": metadata, **about}).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    if len(text) > MAX_HEADER:
        raise ValueError(f"the header of a file would have {len(text):,} bytes, more than any reader takes")
    return struct.pack("<Q", len(text)) + text


def _blocks(entry: Entry, view: memoryview) -> Iterator[memoryview]:
    if view.nbytes != entry.nbytes:
        raise ValueError(f"{entry.name} has {entry.nbytes} bytes, and {view.nbytes} were given")
    if view.nbytes == 0:
        return
    view = view.cast("B")
    yield from (view[at : at + BLOCK] for at in range(0, len(view), BLOCK))


def _write(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]


def _memory(size: int) -> memoryview:
    """Room for bytes; much of it is not filled with zeros first, as a bytearray is."""
    if size < 2**20:
        return memoryview(bytearray(size))
    return memoryview(mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS))
