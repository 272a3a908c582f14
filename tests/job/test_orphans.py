"""No process of a job outlives its launcher, and no signal is lost while modules are imported."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshtrain.job.watchdog.status_server import process_state
from tests.checkpoint.going_on import small_run
from tests.launching import MARK, ROOT, TORCHRUN, environment, kill_marked, marked, wait_until_gone
from tests.slurm import cluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux alone")


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.node.name
    kill_marked(request.node.name)


def wait_for(there: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def start(command: list[str], mark: str, **extra: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment(**{MARK: mark}, **extra), **pipes)


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.cluster), True], ids=["running", "stopped"])
def test_workers_and_their_readers_die_with_torchrun(tmp_path: Path, mark: str, stopped: bool) -> None:
    """Also those that could not react."""
    overrides = ("train.steps=1000000", "optimizer.warmup_steps=0", "data.workers=1", "checkpoint.every=0")
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "meshtrain.train", str(small_run(tmp_path))]
    job = start([*command, *overrides, f"train.output={tmp_path}/run"], mark)
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 3)
    others = [pid for pid in marked(mark) if pid != job.pid]
    assert len(others) >= 4, "two ranks, and a reader of each"
    if stopped:
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
    job.kill()
    job.communicate()
    assert not wait_until_gone(mark, 5)


def test_a_run_in_the_background_of_a_shell_outlives_the_shell(tmp_path: Path, mark: str) -> None:
    """As `nohup python -m meshtrain.train ... &` over ssh: only launchers take their workers along."""
    overrides = "train.steps=1000000 optimizer.warmup_steps=0 data.workers=0 checkpoint.every=0"
    run = f"{sys.executable} -m meshtrain.train {small_run(tmp_path)} {overrides} train.output={tmp_path}/run"
    start(["sh", "-c", f"{run} > {tmp_path}/log 2>&1 &"], mark).wait(60)
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 3)
    assert marked(mark)


def hears(process: int, number: int) -> bool:
    """Whether a process has a handler of this signal."""
    caught = next(
        line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("SigCgt")
    )
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_signal_while_torch_is_imported_ends_the_run_afterwards(tmp_path: Path, mark: str) -> None:
    """Nothing is thrown into the middle of an import, where it might be swallowed or break a library."""
    job = start(
        [sys.executable, "-v", "-m", "meshtrain.train", str(small_run(tmp_path)), f"train.output={tmp_path}/r"], mark
    )
    lines: list[str] = []
    assert job.stdout is not None
    for line in job.stdout:
        lines.append(line)
        if "import 'torch._C'" in line:
            break
    assert hears(job.pid, signal.SIGTERM)
    job.send_signal(signal.SIGTERM)
    rest = job.stdout.read()
    assert job.wait(60) == 128 + signal.SIGTERM
    assert "import 'meshtrain.train'" in rest or "import 'meshtrain.metrics.step_timer'" in rest, (
        "all imports were made"
    )
    assert "Traceback" not in rest
    assert not (tmp_path / "r").exists()


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.skipif(cluster.why_not() is not None, reason=f"no SLURM here: {cluster.why_not()}")
def test_a_task_of_srun_dies_with_the_process_that_watches_over_it(tmp_path: Path) -> None:
    """And with nothing else: the first job ends by itself."""
    script = tmp_path / "task.py"
    script.write_text(
        "import os, sys, time\nfrom meshtrain.job.signals import end_with_launcher\nend_with_launcher(os.environ)\n"
        "print('began', flush=True)\ntime.sleep(float(sys.argv[1]))\nprint('ended', flush=True)\n"
    )
    with cluster.Cluster(tmp_path) as slurm:
        task = ["srun", "--nodes=1", sys.executable, str(script)]
        assert slurm.ask(*task, "5").split() == ["began", "ended"]
        job = subprocess.Popen(slurm.on(*task, "12345"), env=slurm.variables(), stdout=subprocess.PIPE, text=True)
        assert job.stdout is not None
        assert job.stdout.readline() == "began\n"
        found = [
            int(folder.name)
            for folder in Path("/proc").glob("[0-9]*")
            if (folder / "comm").read_text().startswith("python") and b"12345" in (folder / "cmdline").read_bytes()
        ]
        assert len(found) == 1
        parent = int(Path(f"/proc/{found[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        wait_for(lambda: process_state(found[0]) in ("", "Z"), 10)
        job.kill()
        job.wait()
