"""Whether a checkpoint is just what was written: every byte of it is read, and torch is not needed."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from meshtrain.checkpoint.folder import read_manifest
from meshtrain.checkpoint.manifest import Manifest, file_of
from meshtrain.checkpoint.shards import Shard
from meshtrain.errors import DamagedError, UnreadableError

MOST_THREADS = 8


@dataclass(frozen=True)
class Problem:
    """What is damaged: a file of the checkpoint, the tensor in it where that is known, and what is wrong with it."""

    file: str
    tensor: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}" if self.tensor is None else f"{self.file}: {self.tensor}: {self.what}"


def verify(checkpoint: Path) -> list[Problem]:
    """All that is wrong with a checkpoint; nothing if it is intact. Files are read side by side.

    Raises:
        InputError: there is no such folder, or a newer meshtrain has written it.
    """
    try:
        manifest, _ = read_manifest(checkpoint)
    except (DamagedError, UnreadableError) as error:
        return [_problem(error)]
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as readers:
        found = readers.map(lambda rank: _told(checkpoint, manifest, rank), range(len(manifest.files)))
        return [problem for problems in found for problem in problems]


def _told(checkpoint: Path, manifest: Manifest, rank: int) -> list[Problem]:
    try:
        return list(problems_of(checkpoint, manifest, rank))
    except UnreadableError as error:
        return [_problem(error)]


def problems_of(checkpoint: Path, manifest: Manifest, rank: int) -> Iterator[Problem]:
    """What is wrong with a rank's file.

    Raises:
        UnreadableError: it cannot be read now.
    """
    path = checkpoint / file_of(rank)
    try:
        shard = Shard(path, manifest.files[path.name])
    except DamagedError as error:
        yield _problem(error)
        return
    with shard:
        yield from map(_problem, shard.verify())
        yield from _strangers(path, shard, manifest, rank)


def _strangers(path: Path, shard: Shard, manifest: Manifest, rank: int) -> Iterator[Problem]:
    """Where a file that is intact does not hold what the manifest says: whoever wrote it was wrong."""
    expected = manifest.entries(rank)
    for name in sorted(expected.keys() | shard.entries.keys()):
        if name not in shard.entries:
            yield Problem(path.name, name, "is not in the file, and by the manifest it should be")
        elif name not in expected:
            yield Problem(path.name, name, "is in the file, and by the manifest it should not be")
        elif expected[name] != shard.entries[name]:
            here, there = shard.entries[name], expected[name]
            what = f"is {here.dtype} {list(here.shape)}, and by the manifest {there.dtype} {list(there.shape)}"
            yield Problem(path.name, name, what)


def _problem(error: DamagedError | UnreadableError) -> Problem:
    what = error.what if isinstance(error, DamagedError) else f"cannot be read ({error.what})"
    return Problem(error.file.name, error.tensor, what)
