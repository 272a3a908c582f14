"""A job of 2 ranks on two hosts with local disks that fails again and again; prints what each start found.

python tests/forked.py 2 tests/checkpoint/local_cases.py CONFIG FOLDER
"""

import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import meshtrain.train
from meshtrain.checkpoint import commit, directory
from meshtrain.checkpoint import local as disks
from meshtrain.checkpoint.local import LocalDisk
from meshtrain.checkpoint.manifest import file_of
from meshtrain.checkpoint.resume import Resume
from meshtrain.checkpoint.shard_file import write_shard
from meshtrain.checkpoint.state import State
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from tests.checkpoint.going_on import Case, faster, run_case

STEPS = 20


@dataclass(frozen=True)
class Start:
    """A start of a run.

    Attributes:
        at: the step in which it fails; 0: it does not fail.
        harm: damage done afterwards, as comma-separated `what step`.
        refused: steps for which rank 1 cannot write to the shared folder.
        full: steps for which the shared folder has no room at all.
        own_full: whether the local disk of rank 1 is full.
    """

    run: str
    at: int
    harm: str = ""
    refused: tuple[int, ...] = ()
    full: tuple[int, ...] = ()
    own_full: bool = False


STARTS = [
    Start("run", 7, refused=(6,)),
    Start("run", 11, "lost 0", refused=(10,)),
    Start("run", 13, "changed 12"),
    Start("run", 17, own_full=True),
    Start("run", 19, "cut 18", refused=(18,)),
    Start("run", 0),
    # Three copies of each checkpoint: on the local disks, in the shared folder, in object storage.
    Start("stored", 7, "manifest 6"),
    Start("stored", 11, "lost 0, shared 10"),
    Start("stored", 15, "file 14, storage 14"),
    Start("stored", 17, "lost 0, folder 16, storage 16"),
    Start("stored", 0),
    # Starts from a checkpoint of another run; the shared folder has none of its own.
    Start("branch", 19, full=(18, 20)),
    Start("branch", 0),
]


class Recording(Resume):
    found: list[Any]

    def restore(self, state: State) -> None:
        super().restore(state)
        Recording.found = [self.step, self._local_only, list(self._candidates.notes)]


def full(steps: Iterable[int]) -> Any:
    def write(path: Path, tensors: Any) -> Any:
        if any(f"step_{step:07d}" in str(path) for step in steps):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_shard(path, tensors)

    return write


def harm(what: str, disk: Path, run: Path, store: Path, rank: int) -> None:
    """Rank 1 damages its local disk, rank 0 everything else."""
    kind, _, number = what.partition(" ")
    step = f"step_{int(number):07d}"
    if rank == 1 and kind == "lost":
        shutil.rmtree(disk)
    elif rank == 1 and kind in ("changed", "cut"):
        (file,) = disk.glob(f"*/rank_00001/{step}/{file_of(1)}")
        spoil(file, -9 if kind == "cut" else None)
    elif rank == 0 and kind == "manifest":
        spoil(run / "checkpoints" / step / "manifest.json")
    elif rank == 0 and kind == "shared":
        spoil(run / "checkpoints" / step / file_of(1))
    elif rank == 0 and kind == "file":
        (run / "checkpoints" / step / file_of(1)).unlink()
    elif rank == 0 and kind == "folder":
        shutil.rmtree(run / "checkpoints" / step)
    elif rank == 0 and kind == "storage":
        spoil(store / step / file_of(0))


def spoil(file: Path, end: int | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data[:end])


def no_room(steps: tuple[int, ...]) -> Any:
    def begin(folder: Path, step: int) -> Path:
        if step in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        return directory.begin_local(folder, step)

    return begin


def main(config: str, folder: str) -> None:
    faster()
    job = join(read_environment(os.environ))
    job.environment = replace(job.environment, host=f"n{job.rank}", local_rank=0)
    disk = Path(folder, f"disk_{job.rank}")
    meshtrain.train.LocalDisk = lambda root, *rest: LocalDisk(disk, *rest)  # type: ignore[misc, assignment]
    meshtrain.train.Resume = Recording  # type: ignore[misc]
    options = (f"train.steps={STEPS}", "data.workers=0", "checkpoint.every=2", "layout={dp_replicate: 2}")
    results = []
    store = Path(folder, "store")
    more = {
        "run": (),
        "stored": (f"checkpoint.upload=file://{store}",),
        "branch": (f"checkpoint.resume={folder}/whole/checkpoints/step_0000016",),
    }
    with job_exit(job):
        assert run_case(Case(config, (*options, f"train.output={folder}/whole")), job) == {"status": 0}
        for start in STARTS:
            run = Path(folder, start.run)
            case = Case(
                config,
                (*options, f"train.output={run}", "checkpoint.local=anywhere", *more[start.run]),
                interrupt="end" if start.at else None,
                at=start.at,
                rank=job.rank,
            )
            commit.write_shard = full(start.refused if job.rank == 1 else ())
            disks.write_shard = full(range(STEPS) if start.own_full and job.rank == 1 else ())
            directory.begin = no_room(start.full)
            result = run_case(case, job)
            for thread in threading.enumerate():
                if thread.name == "upload":
                    thread.join()
            job.gather("all have ended", None)
            for one in filter(None, start.harm.split(", ")):
                harm(one, disk, run, store, job.rank)
            results.append([result, *Recording.found])
            job.gather("going on", None)
        if job.rank == 0:
            Path(folder, "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
