"""`meshtrain launch` on a real SLURM: what sbatch reads of the scripts that it writes, and that they train."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, why_not

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

MESHTRAIN = (sys.executable, "-m", "meshtrain.cli")
SHORT = ("train.steps=3", "train.eval_every=0", "train.sample_tokens=0", "batch.global_size=8", "data.workers=0")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.mark.parametrize("options", [(), ("--srun", "--gres", "gpu", "--cpus-per-task", "2")], ids=["torchrun", "srun"])
def test_a_launched_job_trains(cluster: Cluster, tmp_path: Path, options: tuple[str, ...]) -> None:
    here = tmp_path / "a folder"
    here.mkdir()
    asked = ("--slurm", "--nodes", "2", "--gpus-per-node", "2", "--cpus-per-task", "4", "--time", "10", *options)
    printed = cluster.ask(*MESHTRAIN, "launch", "configs/quickstart.yaml", *asked, *SHORT,
                          "train.output=runs/a 50% run", "--env", "OMP_NUM_THREADS=1", cwd=here)  # fmt: skip
    number = re.search(r"as job (\d+)", printed)
    assert number is not None, printed
    job = cluster.wait(number[1])
    output = here / "runs" / "a 50% run"
    log = output / "logs" / f"slurm-{number[1]}.out"
    assert job["JobState"] == "COMPLETED", log.read_text()
    assert (job["NumNodes"], job["TimeLimit"], job["JobName"]) == ("2", "00:10:00", "quickstart")
    assert json.loads((output / "exit.json").read_text())["status"] == "done"
    assert "4 processes = 2 hosts x 2" in (output / "layout.txt").read_text()
    assert "done" in log.read_text() or options
