"""The files that a config names, as this host sees them."""

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from meshtrain.config import Config
from meshtrain.data.fingerprint import Files, sampled_digest
from meshtrain.doctor.records import PathFacts
from meshtrain.job import locate
from meshtrain.job.hub import hub_name
from meshtrain.job.sockets import call_with_timeout

PROBE_S = 8.0  # for all checks of one path
READ_S = 0.5  # of reading, to measure its speed
CHUNK = 4 * 2**20
MOST_NAMES = 1000  # of files in a folder, for its digest
TOKEN = ".meshtrain-doctor-"

# Keys whose value may be a name on the Hugging Face hub.
MAY_BE_ON_HUB = ("data.tokenizer", "model.weights", "train.reference.weights")


def named_paths(config: Config) -> list[PathFacts]:
    """The paths that a job of this config reads and writes, absolute, with their config keys."""
    data, model, train = config.data, config.model, config.train
    paths: list[tuple[str, str | None, bool]] = []  # key, path, whether it is written to
    keys = [f"data.sources, {source.name}" for source in data.sources] or ["data.path"]
    for key, source in zip(keys, data.each_source(), strict=True):
        if source.source == "hub":
            continue
        for name, path in ((key, source.path), ("data.validation", source.validation)):
            if path and isinstance(path, str):
                files = locate.data_files(source.source, path)
                paths += [(name, file, False) for file in files]

    schedule = config.pipeline.schedule
    reference = None if train.reference is None else train.reference.weights
    paths += [
        # Their other values are names of what meshtrain has built in.
        ("data.source", data.source if data.source.endswith(".py") else None, False),
        ("data.tokenizer", data.tokenizer if data.tokenizer != "bytes" else None, False),
        ("model.name", model.name if model.name.endswith(".py") else None, False),
        ("model.weights", model.weights, False),
        ("train.reference.weights", reference, False),
        ("pipeline.schedule", schedule if schedule.endswith(".csv") else None, False),
        ("train.output", train.output, True),
        ("checkpoint.path", config.checkpoint.path, True),
        ("train.export", train.export, True),
    ]
    facts = []
    for key, path, writes in paths:
        is_on_hub = key in MAY_BE_ON_HUB and path is not None and hub_name(path) is not None
        if path and not is_on_hub:
            facts.append(PathFacts(key, str(Path(path).expanduser().absolute()), writes))
    return facts


def probe(facts: PathFacts) -> PathFacts:
    """Checks a path on this host; where the job writes, leaves a small file for the other hosts to
    see."""
    try:
        return call_with_timeout(PROBE_S, _probe_writing if facts.writes else _probe_reading, facts)
    except TimeoutError:
        problem = f"does not answer within {PROBE_S:.0f} s: its file server is away or overloaded"
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
    return replace(facts, problem=problem)


def _probe_reading(facts: PathFacts) -> PathFacts:
    path = Path(facts.path)
    if not path.exists():
        above = str(next(parent for parent in path.parents if parent.is_dir()))
        return replace(facts, seen=above, problem="is not there", filesystem=filesystem(above))
    if path.is_dir():
        size, digest, largest = _folder_contents(path)
    else:
        size = path.stat().st_size
        digest = sampled_digest(Files.of(path, size))
        largest = path
    return replace(
        facts,
        seen=facts.path,
        size=size,
        digest=digest,
        mib_per_s=_speed(largest) if largest.is_file() else None,
        filesystem=filesystem(facts.path),
    )


def _folder_contents(folder: Path) -> tuple[int, str, Path]:
    """The size of the files in a folder, a digest of their names and sizes, and the largest one, or
    the folder if there is none. Of a folder with very many files it is that of the first ones."""
    files = [(file.name, file.stat().st_size) for file in os.scandir(folder) if file.is_file()]
    files = sorted(files)[:MOST_NAMES]
    digest = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
    largest, _ = max(files, key=lambda file: file[1], default=("", 0))
    return sum(size for _, size in files), digest, folder / largest


def _speed(path: Path) -> float | None:
    """Read speed in MiB/s from the disk or server, not from the page cache; None for a file too
    small to tell."""
    if path.stat().st_size < CHUNK:
        return None
    read = 0
    start = time.monotonic()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while (data := file.read(CHUNK)) and time.monotonic() - start < READ_S:
            read += len(data)
    return read / 2**20 / max(time.monotonic() - start, 1e-6)


def _probe_writing(facts: PathFacts) -> PathFacts:
    """Writes where the job's folder would be created: into it, or into its nearest existing
    parent."""
    path = Path(facts.path)
    folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
    file = folder / (TOKEN + uuid.uuid4().hex)
    try:
        with file.open("wb", buffering=0) as scratch:
            # some file systems compress or deduplicate uniform data
            scratch.write(os.urandom(CHUNK))
            os.fsync(scratch.fileno())
        speed = _speed(file)  # of reading back what was written, as a restart reads its checkpoint
    except OSError:
        file.unlink(missing_ok=True)  # `tidy` does not know of this file
        raise
    file.write_text("meshtrain doctor was here, and removes this when it is done\n")
    return replace(
        facts,
        seen=str(folder),
        mib_per_s=speed,
        token=file.name,
        filesystem=filesystem(str(folder)),
        free_gib=free_gib(str(folder)),
    )


def visible(
    own: Sequence[PathFacts], others: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The other hosts' small files that this host sees in its own folders, and the keys where it
    could not look."""
    # The names come from the network: only valid names of such files are looked up.
    names = [name for name in others if name.startswith(TOKEN) and "/" not in name]

    def present(folder: Path) -> set[str]:
        os.listdir(folder)
        # One by one, which asks the server: a client may cache the folder's contents for a while.
        return {name for name in names if (folder / name).exists()}

    visible_names: set[str] = set()
    blind = []
    for path in own:
        if path.token:
            try:
                visible_names |= call_with_timeout(PROBE_S, present, Path(path.seen))
            except OSError:  # TimeoutError is one
                blind.append(path.key)
    return tuple(sorted(visible_names)), tuple(blind)


def tidy(own: Sequence[PathFacts]) -> None:
    for path in own:
        if path.token:
            with suppress(OSError):  # its server is gone: the file stays
                call_with_timeout(PROBE_S, Path(path.seen, path.token).unlink, True)


def free_gib(path: str) -> float:
    return shutil.disk_usage(path).free / 2**30


def filesystem(path: str) -> str:
    """The type of a path's file system: ext4, nfs4, lustre."""
    innermost, kind = "", ""
    for mount in psutil.disk_partitions(all=True):
        above = Path(path).is_relative_to(mount.mountpoint)
        # Of two file systems that are mounted at one place, the later one hides the other.
        if above and len(mount.mountpoint) >= len(innermost):
            innermost, kind = mount.mountpoint, mount.fstype
    return kind
