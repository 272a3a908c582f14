"""Shard file: one rank's safetensors file of a checkpoint, whose header also has the CRC-32 of each
block of a tensor.

A reader of some rows reads and checks only the blocks that contain them. The manifest has the
CRC-32 of the whole file, which is computed from those of header and blocks: neither writing nor
opening a file has to read its tensors.
"""

import errno
import os
import re
import resource
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from meshtrain.checkpoint.json_text import dumps, parse_json
from meshtrain.checkpoint.manifest import File, Manifest, file_of
from meshtrain.checkpoint.placement import Placement
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
_CRC32 = re.compile("[0-9a-f]{8}")

# An upper estimate of what a file takes besides its tensors, in bytes.
PER_ENTRY = 120  # of a header, for each tensor, besides its name
PER_BLOCK = 11  # of a header, for the checksum of each block
PER_FILE = 4096  # the unit that file systems round up to


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
    entries: list[Entry] = []
    lengths: list[int] = []  # of all blocks
    for entry, data in tensors:
        if isinstance(data, memoryview) and data.nbytes != entry.nbytes:
            raise ValueError(f"{entry.name} has {entry.nbytes} bytes, and {data.nbytes} were given")
        entries.append(entry)
        lengths += _block_lengths(entry)
    room = len(_header(entries, [0] * len(lengths)))
    blocks = chain.from_iterable(_blocks(entry, data) for entry, data in tensors)
    with path.open("xb", buffering=0) as file:
        file.seek(room)
        crcs = _write_blocks(file, blocks, path)
        header = _header(entries, crcs)
        file.seek(0)
        write_all(file, header)
        fsync_file(file)
    whole = combine([(zlib.crc32(header), room), *zip(crcs, lengths, strict=True)])
    return File(room + sum(lengths), f"{whole:08x}")


def _write_blocks(file: BinaryIO, blocks: Iterable[memoryview], path: Path) -> list[int]:
    """Writes the blocks one behind the other; returns their checksums."""
    crcs: list[int] = []
    helper = ThreadPoolExecutor(1, thread_name_prefix="crc32")
    try:
        summing: deque[Future[int]] = deque()
        for block in blocks:
            try:
                summing.append(helper.submit(zlib.crc32, block))
            except RuntimeError as error:
                # No thread can be started: a fault of the machine, like a full disk.
                raise OSError(errno.EAGAIN, str(error), str(path)) from error
            write_all(file, block)
            if len(summing) > 1:  # a block's memory is reused for the block after the next
                crcs.append(summing.popleft().result())
        crcs += [future.result() for future in summing]
    finally:
        helper.shutdown(cancel_futures=True)
    return crcs


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
            # This proves the checksums in the header, without reading the blocks.
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
        end = begin + len(into)
        entry = self.entries.get(name)
        if entry is None:
            raise DamagedError(self.path, "is not in the file", name)
        if not 0 <= begin <= end <= entry.nbytes:
            raise DamagedError(
                self.path, f"has {entry.nbytes:,} bytes; {begin:,} to {end:,} were to be read", name
            )
        for index in range(begin // BLOCK, _number_of_blocks(end)):
            advance()
            low, high = self._block(name, index)
            if begin <= low and high <= end:
                self._read_block(name, index, into[low - begin : high - begin])
            else:
                # Only a part of the block is wanted, and the checksum is one of all of it.
                block = memoryview(bytearray(high - low))
                self._read_block(name, index, block)
                first, last = max(begin, low), min(end, high)
                into[first - begin : last - begin] = block[first - low : last - low]

    def verify(self) -> list[DamagedError]:
        """Reads every block; returns one error for each tensor that is not what was written."""
        problems = []
        for name, entry in self.entries.items():
            block = memoryview(bytearray(min(BLOCK, entry.nbytes)))
            try:
                for index in range(len(self._crcs[name])):
                    low, high = self._block(name, index)
                    self._read_block(name, index, block[: high - low])
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

    def _read_block(self, name: str, index: int, into: memoryview) -> None:
        """Reads a whole block, and verifies its checksum."""
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
        pieces = [(zlib.crc32(header), len(header))]
        for name, entry in self.entries.items():
            pieces += zip(self._crcs[name], _block_lengths(entry), strict=True)
        return f"{combine(pieces):08x}"


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
        entry = shard.entries.get(name)
        dtype, shape = self.manifest.tensors[name].dtype, shape_of(piece)
        if entry is not None and (entry.dtype, entry.shape) == (dtype, shape):
            return shard
        stored = "is not in the file"
        if entry is not None:
            stored = f"is {entry.dtype} {list(entry.shape)}"
        raise DamagedError(
            shard.path, f"{stored}, and by the manifest it is {dtype} {list(shape)}", name
        )

    def _shard(self, rank: int) -> Shard:
        if rank not in self._open:
            if len(self._open) >= _most_open():
                _, oldest = self._open.popitem(last=False)
                oldest.close()
            name = file_of(rank)
            folder = self._local.get(rank, self.checkpoint)
            self._open[rank] = Shard(folder / name, self.manifest.files[name])
        self._open.move_to_end(rank)
        return self._open[rank]

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()


def _most_open() -> int:
    """How many files stay open: asked each time, since a job raises the limit at its start."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_OPEN
    return min(MOST_OPEN, limit // 2)


def _parse_header(
    path: Path, header: bytes, size: int
) -> tuple[dict[str, Entry], dict[str, int], dict[str, list[int]]]:
    """Parses a header into entries, the offset of each in the file, and the checksums of its
    blocks."""
    tensors = parse_json(header[8:], path)
    sums = _parse_metadata(path, tensors)
    entries: dict[str, Entry] = {}
    starts: dict[str, int] = {}
    crcs: dict[str, list[int]] = {}
    start = len(header)
    for name, about in tensors.items():
        entry = _parse_entry(name, about, start - len(header))
        crcs_of_entry = None if entry is None else _parse_crcs(sums[name], entry)
        if entry is None or crcs_of_entry is None:
            raise DamagedError(path, f"what its header says of {name[:80]!a} cannot be")
        entries[name] = entry
        starts[name] = start
        crcs[name] = crcs_of_entry
        start += entry.nbytes
    if start != size:
        raise DamagedError(path, f"has {size:,} bytes, and its header tells of {start:,}")
    return entries, starts, crcs


def _parse_metadata(path: Path, tensors: Any) -> dict[str, Any]:
    """Takes the metadata out of a header; returns the checksums of all tensors in it."""
    metadata = tensors.pop(METADATA, None) if isinstance(tensors, dict) else None
    says: dict[str, Any] = metadata if isinstance(metadata, dict) else {}
    if says.get("format") != FORMAT or says.get("block") != str(BLOCK):
        raise DamagedError(path, f"is no file of a checkpoint: its header does not say {FORMAT!r}")
    text = says.get("crc32")
    sums = parse_json(text, path) if isinstance(text, str) else None
    if not isinstance(sums, dict) or sums.keys() != tensors.keys():
        raise DamagedError(path, "its header has not the checksums of just its tensors")
    return sums


def _parse_entry(name: str, about: Any, offset: int) -> Entry | None:
    """The entry of a tensor whose data begin at `offset`; None if it is not a valid one. Stricter
    than the format: tensors are contiguous and in order, without other keys or dtypes."""
    parsed = parse_entry(name, about)
    if parsed is None:
        return None
    entry, begin, _ = parsed
    if begin != offset or entry.dtype not in SIZES or len(about) != 3:
        return None
    return entry


def _parse_crcs(texts: Any, entry: Entry) -> list[int] | None:
    """The checksums of an entry's blocks; None if they are something else."""
    if not isinstance(texts, list) or len(texts) != _number_of_blocks(entry.nbytes):
        return None
    crcs = []
    for text in texts:
        if not isinstance(text, str) or _CRC32.fullmatch(text) is None:
            return None
        crcs.append(int(text, 16))
    return crcs


def _header(entries: Sequence[Entry], crcs: Sequence[int]) -> bytes:
    """The header of a file with these tensors; `crcs`: checksums of all their blocks, in order."""
    sums = {}
    first = 0
    for entry in entries:
        last = first + _number_of_blocks(entry.nbytes)
        sums[entry.name] = [f"{crc:08x}" for crc in crcs[first:last]]
        first = last
    metadata = {"format": FORMAT, "block": str(BLOCK), "crc32": dumps(sums)}
    header = pack_header(entries, metadata, PAGE)
    if len(header) - 8 > MAX_HEADER:
        raise ValueError(
            f"the header of a file would have {len(header) - 8:,} bytes, more than any reader takes"
        )
    return header


def _blocks(entry: Entry, data: memoryview | Iterable[memoryview]) -> Iterator[memoryview]:
    """The bytes of a tensor, block by block."""
    if isinstance(data, memoryview):
        if data.nbytes == 0:
            return  # such a view cannot be cast
        view = data.cast("B")
        for begin in range(0, len(view), BLOCK):
            yield view[begin : begin + BLOCK]
        return
    for length, block in zip(_block_lengths(entry), data, strict=True):
        if block.nbytes != length:
            raise ValueError(
                f"a block of {entry.name} has {block.nbytes} bytes, and {length} are expected"
            )
        yield block


def _number_of_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK)


def _block_lengths(entry: Entry) -> list[int]:
    return [min(BLOCK, entry.nbytes - begin) for begin in range(0, entry.nbytes, BLOCK)]


def checkpoint_bytes(placements: Mapping[str, Placement], ranks: int) -> int:
    """Bytes that a checkpoint of these tensors takes, headers included, slightly overestimated."""
    tensors = 0
    header = PER_FILE
    for name, tensor in placements.items():
        tensors += Entry(name, tensor.dtype, tensor.shape).nbytes
        # a header names each tensor twice: with its place in the file, and with its checksums
        header += 2 * len(name) + PER_ENTRY
    checksums = tensors // BLOCK * PER_BLOCK
    return tensors + checksums + ranks * header


# A CRC is a polynomial remainder over GF(2), so appending n bytes multiplies the CRC before them by
# x^(8n), and the CRC of a file follows from those of its blocks. Bits are in zlib's order: bit 31
# is the coefficient of x^0. (M. Adler's `crc32_combine` in zlib, which Python does not expose.)

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X = 1 << 30


def combine(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of concatenated pieces, each given as (CRC-32, bytes)."""
    whole = 0
    for crc, size in pieces:
        whole = _times(_power(size), whole) ^ crc
    return whole


@lru_cache(maxsize=4096)  # a checkpoint has few distinct block lengths
def _power(size: int) -> int:
    """x^(8 * size)."""
    power = _ONE
    square = _X  # x, x^2, x^4, ...
    exponent = 8 * size
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square = _times(square, square)
        exponent >>= 1
    return power


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of the CRC."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        carry = b & 1
        b >>= 1  # b * x
        if carry:
            b ^= _POLYNOMIAL
    return product
