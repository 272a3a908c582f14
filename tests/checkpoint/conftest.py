"""For all checkpoint tests: runs that begin quickly, of which one has done 4 steps of 8."""

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshtrain.job import storage
from meshtrain.job.process import Job
from tests.checkpoint.faults import Run, train_alone
from tests.checkpoint.going_on import faster, small_run

MEMORY = "memory://bucket/prefix"
Train = Callable[..., str]


@pytest.fixture(scope="package", autouse=True)
def _quickly() -> Iterator[None]:
    """Without what takes long once per run, and without pauses between attempts to read a missing
    file."""
    with pytest.MonkeyPatch.context() as patch:
        faster(patch.setattr)
        patch.setattr(storage, "PAUSES_S", (0.0, 0.0))
        yield


@pytest.fixture(scope="package")
def prepared(tmp_path_factory: pytest.TempPathFactory, _quickly: None) -> Path:
    """A config that saves after every second step, a run of it with 4 steps, and one of 8 that
    nothing happened to."""
    config = small_run(tmp_path_factory.mktemp("prepared"))
    text = config.read_text().replace("warmup_steps: 2", "warmup_steps: 2, schedule: constant")
    config.write_text(
        text.replace("every: 4", "every: 2").replace("seq_len: 32", "seq_len: 32, workers: 0")
    )
    for steps in (4, 8):
        options = (f"train.steps={steps}", f"train.output={config.parent / f'{steps} steps'}")
        assert train_alone(config, options)[0] == 0
    return config


@pytest.fixture
def fresh(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """A run that has not begun."""
    run = Run(prepared, tmp_path, capsys)
    with run.mounted:
        yield run


@pytest.fixture
def run(fresh: Run) -> Run:
    """A run that has done 4 steps, and saved after 2 of them and at the end."""
    shutil.copytree(fresh.config.parent / "4 steps", fresh.folder)
    return fresh


@pytest.fixture
def train(fresh: Run) -> Train:
    """Trains a run in a folder, and waits until its checkpoints are uploaded."""

    def train(folder: str, *more: str, steps: int = 8, url: str = MEMORY, **how: Any) -> str:
        printed = fresh.train(
            f"train.steps={steps}", f"checkpoint.upload={url}", *more, output=folder, **how
        )
        for thread in threading.enumerate():  # of a run that was interrupted
            if thread.name == "upload":
                thread.join()
        return printed

    return train


@pytest.fixture
def hosts(job: Job, shared_path: Path) -> Job:
    """A job of this job's ranks, each on a host of its own."""
    environment = replace(job.environment, host=f"n{job.rank}", local_rank=0)
    assert job.store is not None
    return Job(environment, job.device, dist.PrefixStore(str(shared_path), job.store))


@pytest.fixture
def small(hosts: Job, shared_path: Path) -> Path:
    """The config of a small run of all ranks."""
    if hosts.rank == 0:
        small_run(shared_path)
    hosts.gather("writing the config", None)
    return shared_path / "small.yaml"
