"""The files that a config names, as this host sees them: readable, writable, how fast, and the same as the others'."""

import hashlib
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshtrain.config import Config
from meshtrain.data.files import Files, sampled_digest
from meshtrain.operate.doctor.limited import within
from meshtrain.operate.doctor.machine import filesystem, free_gib
from meshtrain.operate.doctor.record import PathFacts

PROBE_S = 8.0  # for all that is asked of one path
READ_S = 0.5  # of reading, to measure its speed
CHUNK = 4 * 2**20
MOST_NAMES = 1000  # of a folder, for its digest
TOKEN = ".meshtrain-doctor-"


@dataclass(frozen=True)
class Named:
    """A path that a config names."""

    key: str
    path: str
    writes: bool


def named_paths(config: Config) -> list[Named]:
    """What a job of this config reads and writes, absolute."""
    reads: dict[str, str | None] = {
        "data.source": config.data.source if config.data.source.endswith(".py") else None,
        "data.path": config.data.path,
        "data.validation": config.data.validation if isinstance(config.data.validation, str) else None,
        "data.tokenizer": None if config.data.tokenizer == "bytes" else config.data.tokenizer,
        "model.name": config.model.name if config.model.name.endswith(".py") else None,
        "model.weights": config.model.weights,
        "pipeline.schedule": config.pipeline.schedule if config.pipeline.schedule.endswith(".csv") else None,
    }
    found = [Named(key, path, False) for key, path in reads.items() if path]
    if config.data.source == "megatron" and config.data.path:
        prefix = config.data.path.removesuffix(".bin").removesuffix(".idx")
        found = [one for one in found if one.key != "data.path"]
        found += [Named("data.path", prefix + ending, False) for ending in (".bin", ".idx")]
    writes = {
        "train.output": config.train.output,
        "checkpoint.path": config.checkpoint.path,
        "train.export": config.train.export,
    }
    found += [Named(key, path, True) for key, path in writes.items() if path]
    return [Named(one.key, str(Path(one.path).expanduser().absolute()), one.writes) for one in found]


def probe(named: Named) -> PathFacts:
    """What this host finds at a path; where the job writes, a small file is left for the others to see."""
    try:
        return within(PROBE_S, _written if named.writes else _read, named)
    except TimeoutError:
        return _facts(named, problem=f"does not answer within {PROBE_S:.0f} s: its file server is away or overloaded")
    except OSError as error:
        return _facts(named, problem=(error.strerror or str(error)).lower())


def _facts(named: Named, problem: str) -> PathFacts:
    return PathFacts(named.key, named.path, named.writes, problem=problem)


def _read(named: Named) -> PathFacts:
    path = Path(named.path)
    if not path.exists():
        above = next(parent for parent in path.parents if parent.is_dir())
        return PathFacts(named.key, named.path, False, str(above), "is not there", filesystem=filesystem(str(above)))
    if path.is_dir():
        entries = sorted((one.name, one.stat().st_size) for one in os.scandir(path) if one.is_file())[:MOST_NAMES]
        size, digest = sum(size for _, size in entries), hashlib.sha256(repr(entries).encode()).hexdigest()[:16]
        first = max(entries, key=lambda one: one[1], default=None)
        speed = _speed(path / first[0]) if first else None
    else:
        size, digest, speed = path.stat().st_size, sampled_digest(Files.of(path, path.stat().st_size)), _speed(path)
    return PathFacts(named.key, named.path, False, named.path, "", size, digest, speed, "", filesystem(named.path))


def _speed(path: Path) -> float | None:
    """MiB per second of reading from the disk or server, not from memory; None for a file too small to tell."""
    if path.stat().st_size < CHUNK:
        return None
    read, start = 0, time.monotonic()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while (data := file.read(CHUNK)) and time.monotonic() - start < READ_S:
            read += len(data)
    return read / 2**20 / max(time.monotonic() - start, 1e-6)


def _written(named: Named) -> PathFacts:
    """Writes where the folder would be made: into it, or into the nearest one above that is there."""
    path = Path(named.path)
    seen = next(one for one in (path, *path.parents) if one.is_dir())
    token = TOKEN + uuid.uuid4().hex
    speed = _scratch(seen / token)
    (seen / token).write_text("meshtrain doctor was here, and removes this when it is done\n")
    return PathFacts(
        named.key, named.path, True, str(seen), "", None, "", speed, token, filesystem(str(seen)), free_gib(str(seen))
    )


def _scratch(path: Path) -> float | None:
    """MiB per second at which what was written there is read, as a restart reads its checkpoint."""
    try:
        with path.open("wb", buffering=0) as file:
            file.write(os.urandom(CHUNK))  # some file systems pack or merge what is all alike
            os.fsync(file.fileno())
        return _speed(path)
    except OSError:
        path.unlink(missing_ok=True)  # nobody tidies up what was not told
        raise


def visible(own: Sequence[PathFacts], others: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which of the other hosts' small files this host sees in its own folders, and the keys where it could not look.

    A client of a network file system may remember for a while what a folder held: names are looked up one by one,
    which asks the server.
    """
    seen: set[str] = set()
    blind = []
    for one in own:
        if not one.token:
            continue
        try:
            seen |= within(PROBE_S, _look, Path(one.seen), others)
        except (OSError, TimeoutError):
            blind.append(one.key)
    return tuple(sorted(seen)), tuple(blind)


def _look(folder: Path, names: Sequence[str]) -> set[str]:
    os.listdir(folder)
    # The names come over the network: they are looked at only if they can be such a file's.
    return {name for name in names if name.startswith(TOKEN) and "/" not in name and (folder / name).exists()}


def tidy(own: Sequence[PathFacts]) -> None:
    """Removes this host's small files."""
    for one in own:
        if one.token:
            with suppress(OSError):  # its server has gone meanwhile: the file cannot be helped
                within(PROBE_S, Path(one.seen, one.token).unlink, True)
