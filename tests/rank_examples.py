"""Tests of ranks that pass, fail, crash and hang: test_ranks.py runs them and reads the report."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshtrain.job.process import Job


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("value", [1, 2])
def test_all_pass(job: Job, value: int, shared_path: Path, tmp_path: Path) -> None:
    total = torch.full((3,), value)
    dist.all_reduce(total)
    assert total.tolist() == [value * job.world_size] * 3
    (shared_path / str(job.rank)).touch()
    dist.barrier()
    assert len(list(shared_path.iterdir())) == job.world_size
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks(2)
def test_all_fail(job: Job) -> None:
    print("printed before")
    assert {"world": job.world_size} == {"world": 7}


@pytest.mark.ranks(2)
def test_one_fails_and_the_other_waits(job: Job) -> None:
    assert job.rank == 0, "only rank 1"
    dist.barrier()


@pytest.mark.ranks(2)
def test_crashes(job: Job) -> None:
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


@pytest.mark.ranks(2)
def test_crashes_after_another(job: Job) -> None:
    if job.rank == 1:
        crashed = Path(tempfile.gettempdir(), f"crashed_{os.getppid()}")
        if crashed.exists():
            crashed.unlink()
        else:
            crashed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks(2)
def test_passed_over(job: Job) -> None:
    pytest.skip("for this reason")


@pytest.mark.ranks(2)
@pytest.mark.timeout(5)
def test_hangs(job: Job) -> None:
    if job.rank == 1:
        dist.barrier()


@pytest.mark.ranks(2)
def test_goes_on(job: Job) -> None:
    dist.barrier()
