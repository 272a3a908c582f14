"""Verification of a checkpoint: every byte is read and checked against its checksum, without
torch."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from meshtrain.checkpoint.directory import read_manifest
from meshtrain.checkpoint.manifest import Manifest, file_of
from meshtrain.checkpoint.shard_file import Shard
from meshtrain.errors import DamagedError, UnreadableError

MOST_THREADS = 8


@dataclass(frozen=True)
class Problem:
    """Damage in a file of a checkpoint, and in which tensor, if that is known."""

    file: str
    tensor: str | None
    what: str

    def __str__(self) -> str:
        if self.tensor is None:
            return f"{self.file}: {self.what}"
        return f"{self.file}: {self.tensor}: {self.what}"


def verify(checkpoint: Path) -> list[Problem]:
    """All problems of a checkpoint; [] if it is intact. Raises InputError: no checkpoint, or of a
    newer meshtrain."""
    try:
        manifest, _ = read_manifest(checkpoint)
    except (DamagedError, UnreadableError) as error:
        return [_problem(error)]
    # Threads suffice: neither reading nor CRC-32 holds the GIL.
    ranks = range(len(manifest.files))
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as readers:
        problems_of_files = readers.map(
            lambda rank: _verify_file(checkpoint, manifest, rank), ranks
        )
        return list(chain.from_iterable(problems_of_files))


def _verify_file(checkpoint: Path, manifest: Manifest, rank: int) -> list[Problem]:
    try:
        return list(problems_of(checkpoint, manifest, rank))
    except UnreadableError as error:
        return [_problem(error)]


def problems_of(checkpoint: Path, manifest: Manifest, rank: int) -> Iterator[Problem]:
    """The problems of a rank's file. Raises UnreadableError: it cannot be read now."""
    path = checkpoint / file_of(rank)
    try:
        shard = Shard(path, manifest.files[path.name])
    except DamagedError as error:
        yield _problem(error)
        return
    with shard:
        yield from map(_problem, shard.verify())
        # A file can be intact and still not hold what the manifest says.
        yield from _contradictions(path, shard, manifest, rank)


def _contradictions(path: Path, shard: Shard, manifest: Manifest, rank: int) -> Iterator[Problem]:
    """Where an intact file contradicts the manifest, which is an error of the writer."""
    expected = manifest.entries(rank)
    for name in sorted(expected.keys() | shard.entries.keys()):
        if name not in shard.entries:
            yield Problem(path.name, name, "is not in the file, and by the manifest it should be")
        elif name not in expected:
            yield Problem(path.name, name, "is in the file, and by the manifest it should not be")
        elif expected[name] != shard.entries[name]:
            entry, other = shard.entries[name], expected[name]
            yield Problem(
                path.name,
                name,
                f"is {entry.dtype} {list(entry.shape)}, and by the manifest {other.dtype} "
                f"{list(other.shape)}",
            )


def _problem(error: DamagedError | UnreadableError) -> Problem:
    if isinstance(error, DamagedError):
        return Problem(error.file.name, error.tensor, error.problem)
    return Problem(error.file.name, error.tensor, f"cannot be read ({error.reason})")
