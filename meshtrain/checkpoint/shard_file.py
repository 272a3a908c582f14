"""Shard file: one rank's safetensors file of a checkpoint, whose header also has the CRC-32 of each
block of a tensor.

A reader of some rows reads and checks only the blocks that contain them. The manifest has the
CRC-32 of the whole file, which is computed from those of header and blocks: neither writing nor
opening a file has to read its tensors.
"""

import errno
import os
import resource
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.json_text import dumps, parse_json
from meshtrain.checkpoint.manifest import File, Manifest, file_of
from meshtrain.checkpoint.plain_file import open_plain
from meshtrain.errors import DamagedError, UnreadableError
from meshtrain.huggingface.safetensors import (
    METADATA,
    SIZES,
    Entry,
    header_length,
    pack_header,
    parse_entry,
)
from meshtrain.job.pending import advance
from meshtrain.job.storage import fsync_file, write_all
from meshtrain.parallel.sharding import Part, shape_of

FORMAT = "meshtrain checkpoint 1"
BLOCK = 4 * 2**20  # bytes of a tensor under one checksum
PAGE = 4096  # data begins at a multiple of this: unaligned reads took a fifth longer
MAX_HEADER = 2**25  # bytes; the checksums of 8 TiB take 28 million
# A tensor may be spread over hundreds of files, and opening one again takes 50 ms to combine its
# checksums.
MOST_OPEN = 1024


def write_shard(
    path: Path, tensors: Sequence[tuple[Entry, memoryview | Iterable[memoryview]]]
) -> File:
    """Writes a new file with these tensors, whose bytes are in C order, and waits until it is on
    disk.

    A tensor may be given as an iterable of its blocks, of which two are in use at a time, so
    streaming needs memory for two. A helper thread computes checksums during the writes. The header
    holds them and has the same length whatever they are, so it is written last. Raises OSError: it
    cannot be written; a partial file stays.
    """
    entries = [entry for entry, _ in tensors]
    for entry, data in tensors:
        if isinstance(data, memoryview) and data.nbytes != entry.nbytes:
            raise ValueError(f"{entry.name} has {entry.nbytes} bytes, and {data.nbytes} were given")
    lengths = [length for entry in entries for length in _block_lengths(entry)]
    room, crcs = len(_header(entries, [0] * len(lengths))), list[int]()
    blocks = (block for entry, data in tensors for block in _blocks(entry, data))
    with path.open("xb", buffering=0) as file:
        file.seek(room)
        helper = ThreadPoolExecutor(1, thread_name_prefix="crc32")
        try:
            summing: deque[Future[int]] = deque()
            for block in blocks:
                try:
                    summing.append(helper.submit(zlib.crc32, block))
                except (
                    RuntimeError
                ) as error:  # no thread can be started: a fault of the machine, like a full disk
                    raise OSError(errno.EAGAIN, str(error), str(path)) from error
                write_all(file, block)
                if len(summing) > 1:  # a block's memory is reused for the block after the next
                    crcs.append(summing.popleft().result())
            crcs += [future.result() for future in summing]
        finally:
            helper.shutdown(cancel_futures=True)
        header = _header(entries, crcs)
        file.seek(0)
        write_all(file, header)
        fsync_file(file)
    whole = combine([(zlib.crc32(header), room), *zip(crcs, lengths, strict=True)])
    return File(room + sum(lengths), f"{whole:08x}")


class Shard(AbstractContextManager["Shard"]):
    """One rank's file, opened for reading; several threads may read at once. `entries`: name ->
    Entry."""

    def __init__(self, path: Path, expected: File | None) -> None:
        """Opens a file; checks all but tensor bytes. `expected`: its entry in the manifest. Raises
        DamagedError."""
        self.path = path
        self._file, size = open_plain(path)
        try:
            if expected is not None and size != expected.size:
                raise DamagedError(path, f"has {size:,} bytes; {expected.size:,} were written")
            header = self._read_header(size)
            self.entries, self._starts, self._crcs = _parse_header(path, header, size)
            if expected is not None and self._whole(header) != expected.crc32:
                raise DamagedError(
                    path, "its header or its checksums are not those that were written"
                )
        except BaseException:
            self.close()
            raise

    def read_bytes(self, name: str, begin: int, into: memoryview) -> None:
        """Fills `into` with the bytes of an entry from `begin` on; the checksum of every block
        touched is verified.

        Raises DamagedError: no such bytes, or a block is not what was written; UnreadableError: not
        readable now.
        """
        entry, end = self.entries.get(name), begin + len(into)
        if entry is None:
            raise DamagedError(self.path, "is not in the file", name)
        if not 0 <= begin <= end <= entry.nbytes:
            raise DamagedError(
                self.path, f"has {entry.nbytes:,} bytes; {begin:,} to {end:,} were to be read", name
            )
        for index in range(begin // BLOCK, -(-end // BLOCK)):
            advance()
            low, high = self._block(name, index)
            first, last = max(begin, low), min(end, high)
            if (first, last) == (low, high):
                self._prove(name, index, into[low - begin : high - begin])
            else:
                block = memoryview(bytearray(high - low))
                self._prove(name, index, block)
                into[first - begin : last - begin] = block[first - low : last - low]

    def verify(self) -> list[DamagedError]:
        """Reads every block; returns one error for each tensor that is not what was written."""
        problems = []
        for name, entry in self.entries.items():
            block = memoryview(bytearray(min(BLOCK, entry.nbytes)))
            try:
                for index in range(len(self._crcs[name])):
                    low, high = self._block(name, index)
                    self._prove(name, index, block[: high - low])
            except DamagedError as error:
                problems.append(error)
        return problems

    def close(self) -> None:
        """May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __exit__(self, *_: object) -> None:
        self.close()

    def _block(self, name: str, index: int) -> tuple[int, int]:
        """Begin and end of a block within the bytes of its entry."""
        return index * BLOCK, min((index + 1) * BLOCK, self.entries[name].nbytes)

    def _prove(self, name: str, index: int, into: memoryview) -> None:
        self._read(self._starts[name] + index * BLOCK, into, name)
        if zlib.crc32(into) != self._crcs[name][index]:
            low, high = self._block(name, index)
            raise DamagedError(
                self.path, f"its bytes {low:,} to {high:,} are not those that were written", name
            )

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
        prefix = bytearray(8)
        self._read(0, memoryview(prefix))
        try:
            header = bytearray(8 + header_length(bytes(prefix), size, MAX_HEADER))
        except ValueError as error:
            raise DamagedError(self.path, str(error)) from None
        self._read(0, memoryview(header))
        return bytes(header)

    def _whole(self, header: bytes) -> str:
        """The CRC-32 of the whole file, assuming the blocks match the checksums in the header."""
        blocks = (
            (crc, min(BLOCK, entry.nbytes - index * BLOCK))
            for name, entry in self.entries.items()
            for index, crc in enumerate(self._crcs[name])
        )
        return f"{combine([(zlib.crc32(header), len(header)), *blocks]):08x}"


class ShardReader(AbstractContextManager["ShardReader"]):
    """The files of one checkpoint. The most recently used ones stay open, with their headers
    parsed."""

    def __init__(
        self, checkpoint: Path, manifest: Manifest, local: Mapping[int, Path] | None = None
    ) -> None:
        """`local`: rank -> another folder that holds its file of the same checkpoint."""
        self.checkpoint = checkpoint
        self.manifest = manifest
        self._local = local or {}
        self._open: OrderedDict[int, Shard] = OrderedDict()  # by rank, the most recently used last

    def shard_with(self, name: str, rank: int, piece: Part) -> Shard:
        """The file of a rank, which holds this piece of a tensor (see placement.pieces).
        DamagedError: it does not."""
        shard = self._shard(rank)
        entry, dtype, shape = (
            shard.entries.get(name),
            self.manifest.tensors[name].dtype,
            shape_of(piece),
        )
        if entry is None or (entry.dtype, entry.shape) != (dtype, shape):
            stored = (
                "is not in the file" if entry is None else f"is {entry.dtype} {list(entry.shape)}"
            )
            raise DamagedError(
                shard.path, f"{stored}, and by the manifest it is {dtype} {list(shape)}", name
            )
        return shard

    def _shard(self, rank: int) -> Shard:
        if rank not in self._open:
            # a job raises this limit at its start
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if len(self._open) >= (
                MOST_OPEN if limit == resource.RLIM_INFINITY else min(MOST_OPEN, limit // 2)
            ):
                self._open.popitem(last=False)[1].close()
            name = file_of(rank)
            self._open[rank] = Shard(
                self._local.get(rank, self.checkpoint) / name, self.manifest.files[name]
            )
        self._open.move_to_end(rank)
        return self._open[rank]

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()


def _parse_header(
    path: Path, header: bytes, size: int
) -> tuple[dict[str, Entry], dict[str, int], dict[str, list[int]]]:
    """Parses a header into entries, the offset of each in the file, and the checksums of its
    blocks."""
    tensors = parse_json(header[8:], path)
    metadata = tensors.pop(METADATA, None) if isinstance(tensors, dict) else None
    if (
        not isinstance(metadata, dict)
        or metadata.get("format") != FORMAT
        or metadata.get("block") != str(BLOCK)
    ):
        raise DamagedError(path, f"is no file of a checkpoint: its header does not say {FORMAT!r}")
    sums = parse_json(metadata["crc32"], path) if isinstance(metadata.get("crc32"), str) else None
    if not isinstance(sums, dict) or sums.keys() != tensors.keys():
        raise DamagedError(path, "its header has not the checksums of just its tensors")
    entries, starts, crcs = {}, {}, {}
    offset = 0
    for name, about in tensors.items():
        entry, begin, _ = parse_entry(name, about) or (None, 0, 0)
        # Stricter than the format: tensors are contiguous and in order, without other keys or
        # dtypes.
        plain = entry is not None and begin == offset and entry.dtype in SIZES and len(about) == 3
        blocks = (
            _parse_crcs(sums[name], -(-entry.nbytes // BLOCK))
            if entry is not None and plain
            else None
        )
        if entry is None or blocks is None:
            raise DamagedError(path, f"what its header says of {name[:80]!a} cannot be")
        entries[name], starts[name], crcs[name] = entry, len(header) + offset, blocks
        offset += entry.nbytes
    if len(header) + offset != size:
        raise DamagedError(
            path, f"has {size:,} bytes, and its header tells of {len(header) + offset:,}"
        )
    return entries, starts, crcs


def _parse_crcs(texts: Any, blocks: int) -> list[int] | None:
    if not isinstance(texts, list) or len(texts) != blocks:
        return None
    if not all(
        isinstance(text, str) and len(text) == 8 and set(text) <= set("0123456789abcdef")
        for text in texts
    ):
        return None
    return [int(text, 16) for text in texts]


def _header(entries: Sequence[Entry], crcs: Sequence[int]) -> bytes:
    """The header of a file with these tensors; `crcs`: checksums of all their blocks, in order."""
    remaining = iter(crcs)
    sums = {
        entry.name: [f"{next(remaining):08x}" for _ in range(-(-entry.nbytes // BLOCK))]
        for entry in entries
    }
    header = pack_header(
        entries, {"format": FORMAT, "block": str(BLOCK), "crc32": dumps(sums)}, PAGE
    )
    if len(header) - 8 > MAX_HEADER:
        raise ValueError(
            f"the header of a file would have {len(header) - 8:,} bytes, more than any reader takes"
        )
    return header


def _blocks(entry: Entry, data: memoryview | Iterable[memoryview]) -> Iterator[memoryview]:
    if not isinstance(data, memoryview):
        for length, block in zip(_block_lengths(entry), data, strict=True):
            if block.nbytes != length:
                raise ValueError(
                    f"a block of {entry.name} has {block.nbytes} bytes, and {length} are expected"
                )
            yield block
    elif data.nbytes:
        view = data.cast("B")
        yield from (view[at : at + BLOCK] for at in range(0, len(view), BLOCK))


def _block_lengths(entry: Entry) -> list[int]:
    return [min(BLOCK, entry.nbytes - at) for at in range(0, entry.nbytes, BLOCK)]


# A CRC is a polynomial remainder over GF(2), so appending n bytes multiplies the CRC before them by
# x^(8n), and the CRC of a file follows from those of its blocks. Bits are in zlib's order: bit 31
# is the coefficient of x^0. (M. Adler's `crc32_combine` in zlib, which Python does not expose.)

_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def combine(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of concatenated pieces, each given as (CRC-32, bytes)."""
    whole = 0
    for crc, size in pieces:
        whole = _times(_power(size), whole) ^ crc
    return whole


@lru_cache(maxsize=4096)  # a checkpoint has few distinct block lengths
def _power(size: int) -> int:
    """x^(8 * size)."""
    power, square = _ONE, _X
    exponent = 8 * size
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square = _times(square, square)
        exponent >>= 1
    return power


def _times(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
