"""A cache of blocks of one file that lies elsewhere, of a fixed size, on the disk of a host.

    blocks.bin      slots of one block each: block b is in slot b mod slots, or not in the cache
    slots.bin       16 bytes per slot, little-endian: b + 1 as uint64, and the CRC-32 of the block

All processes of a host read and write both without a lock. A reader takes a block only if number
and checksum are right: one that another process overwrites meanwhile, or that a crash has left half
written, counts as missing. With as many slots as blocks each block has a slot of its own; with
fewer, and samples in random order, so large a share of the blocks is found as the cache has.
"""

import os
import struct
import zlib
from pathlib import Path
from typing import Any

from meshtrain.job.storage import open_guarded, warn

_ENTRY = struct.Struct("<QQ")


class BlockCache:
    """Blocks in a folder, of which the last may be shorter than the others."""

    def __init__(self, folder: Path, block_bytes: int, slots: int) -> None:
        self.folder = folder
        self.block_bytes = block_bytes
        self.slots = slots
        self._files: tuple[int, int] | None = None  # descriptors, opened at the first use
        self._is_full = False  # whether this process has said that the disk takes no more

    def get(self, block: int, size: int) -> bytes | None:
        """A block of `size` bytes; None: it is not in the cache."""
        blocks, entries = self._opened()
        slot = block % self.slots
        entry = os.pread(entries, _ENTRY.size, slot * _ENTRY.size)
        if len(entry) < _ENTRY.size:
            return None
        number, checksum = _ENTRY.unpack(entry)
        if number != block + 1:
            return None
        content = os.pread(blocks, size, slot * self.block_bytes)
        if len(content) != size or zlib.crc32(content) != checksum:
            return None
        return content

    def put(self, block: int, content: bytes) -> None:
        """Takes a block in, in the place of the one in its slot. On a disk error it stays out."""
        blocks, entries = self._opened()
        slot = block % self.slots
        try:
            os.pwrite(blocks, content, slot * self.block_bytes)
            entry = _ENTRY.pack(block + 1, zlib.crc32(content))
            os.pwrite(entries, entry, slot * _ENTRY.size)
        except OSError as error:
            if not self._is_full:
                self._is_full = True
                warn(
                    f"{self.folder} takes no more blocks ({error.strerror}): they are read anew "
                    "from where they come (data.cache_gib limits the cache)"
                )

    def _opened(self) -> tuple[int, int]:
        if self._files is None:
            flags = os.O_RDWR | os.O_CREAT
            blocks = open_guarded(self.folder / "blocks.bin", flags)
            entries = open_guarded(self.folder / "slots.bin", flags)
            if os.fstat(blocks).st_size > self.slots * self.block_bytes:  # it was larger before
                os.ftruncate(blocks, self.slots * self.block_bytes)
            self._files = blocks, entries
        return self._files

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": None}

    def __del__(self) -> None:
        for file in getattr(self, "_files", None) or ():
            os.close(file)
