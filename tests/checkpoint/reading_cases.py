"""A job of 2 ranks on two simulated hosts, one of which misreads a checkpoint; prints what each start reported.

python tests/forked.py 2 tests/checkpoint/reading_cases.py CONFIG FOLDER
"""

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshtrain.checkpoint import shard_file as shards
from meshtrain.checkpoint.manifest import file_of
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from tests.checkpoint.going_on import Case, faster, run_case

NEWEST = "step_0000004"


@contextmanager
def badly(rank: int, how: str, times: int) -> Iterator[None]:
    """This process fails `times` times to open its file of the newest checkpoint, or reads wrong bytes of it."""
    plain_open, plain_read, left = os.open, os.preadv, [times]

    def opened(path: Any, *rest: Any) -> int:
        wanted = "manifest.json" if how == "manifest" else file_of(rank)
        if left[0] > 0 and str(path).endswith(f"{NEWEST}/{wanted}"):
            left[0] -= 1
            number = {"stale": errno.ESTALE, "manifest": errno.EIO, "missing": errno.ENOENT}.get(how)
            if number is not None:
                raise OSError(number, os.strerror(number), str(path))
        return plain_open(path, *rest)

    def read(descriptor: int, buffers: list[memoryview], at: int) -> int:
        n = plain_read(descriptor, buffers, at)
        if how == "bits" and NEWEST in os.readlink(f"/proc/self/fd/{descriptor}") and at > 4096:
            buffers[0][0] ^= 1
        return n

    shards.os.open, shards.os.preadv = opened, read  # type: ignore[assignment]
    try:
        yield
    finally:
        shards.os.open, shards.os.preadv = plain_open, plain_read


def main(config: str, folder: str) -> None:
    faster()
    job = join(read_environment(os.environ))
    job.environment = replace(job.environment, host=f"n{job.rank}", local_rank=0)
    options = (f"train.output={folder}/run", "data.workers=0", "checkpoint.every=2", "layout={dp_shard: 2}")
    results = []
    with job_exit(job):
        results.append(run_case(Case(config, (*options, "train.steps=4")), job))
        for rank, how, times in CASES:
            case = Case(config, (*options, "train.steps=5"))
            with badly(rank, how if job.rank == rank else "", times):
                result = run_case(case, job)
            names = sorted(path.name for path in Path(folder, "run/checkpoints").glob("step_*"))
            results.append([rank, how, times, result, names])
            job.gather("looking", None)
            if job.rank == 0 and result == {"status": 0}:  # back to 4 steps
                shutil.rmtree(Path(folder, "run/checkpoints/step_0000005"))
                Path(folder, "run/exit.json").unlink()
            job.gather("going back", None)
        if job.rank == 0:
            Path(folder, "results.json").write_text(json.dumps(results))


# (rank on whose host it happens, what happens, how often)
CASES = [
    (1, "stale", 1),
    (1, "stale", 99),
    (1, "missing", 99),
    (1, "manifest", 99),
    (1, "bits", 99),
    (0, "missing", 99),
]
CASES += [(0, "stale", 99), (0, "bits", 99), (1, "missing", 1)]

if __name__ == "__main__":
    main(*sys.argv[1:])
