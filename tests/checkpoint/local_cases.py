"""A job of 2 ranks on two hosts, each with a disk of its own, that fails again and again; prints what each start found.

python tests/forked.py 2 tests/checkpoint/local_cases.py CONFIG FOLDER
"""

import errno
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshtrain.train
from meshtrain.checkpoint import commit
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
# Steps that the shared folder does not take from rank 1, whether its own disk is full, the step in which the job fails,
# and what happens to the disk of rank 1 then.
STARTS = [
    ({6}, False, 7, ""),
    ({10}, False, 11, "lost"),
    (set(), False, 13, "changed 12"),
    (set(), True, 17, ""),
    ({18}, False, 19, "cut 18"),
    (set(), False, 0, ""),
]


class Recording(Resume):
    found: list[Any]

    def restore(self, state: State) -> None:
        super().restore(state)
        Recording.found = [self.step, self._local_only, list(self._candidates.notes)]


def full(steps: set[int]) -> Any:
    def write(path: Path, tensors: Any) -> Any:
        if any(f"step_{step:07d}" in str(path) for step in steps):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_shard(path, tensors)

    return write


def harm(disk: Path, what: str) -> None:
    kind, _, step = what.partition(" ")
    if kind == "lost":
        shutil.rmtree(disk)
    elif kind:
        (file,) = disk.glob(f"*/rank_00001/step_{int(step):07d}/{file_of(1)}")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data[:-9] if kind == "cut" else data)


def main(config: str, folder: str) -> None:
    faster()
    job = join(read_environment(os.environ))
    job.environment = replace(job.environment, host=f"n{job.rank}", local_rank=0)
    disk = Path(folder, f"disk_{job.rank}")
    meshtrain.train.LocalDisk = lambda root, *rest: LocalDisk(disk, *rest)  # type: ignore[misc, assignment]
    meshtrain.train.Resume = Recording  # type: ignore[misc]
    options = (f"train.steps={STEPS}", "data.workers=0", "checkpoint.every=2", "layout={dp_replicate: 2}")
    results = []
    with job_exit(job):
        assert run_case(Case(config, (*options, f"train.output={folder}/whole")), job) == {"status": 0}
        for steps, own_full, at, what in STARTS:
            case = Case(
                config,
                (*options, f"train.output={folder}/run", "checkpoint.local=anywhere"),
                interrupt="end" if at else None,
                at=at,
                rank=job.rank,
            )
            commit.write_shard = full(steps if job.rank == 1 else set())
            disks.write_shard = full(set(range(STEPS)) if own_full and job.rank == 1 else set())
            result = run_case(case, job)
            if job.rank == 1:
                harm(disk, what)
            results.append([result, *Recording.found])
            job.gather("going on", None)
        if job.rank == 0:
            Path(folder, "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
