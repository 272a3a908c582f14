"""Signals to whole processes: none is lost while modules are imported; and no process outlives its
launcher."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshtrain.metrics.logger import read
from tests.launching import (
    MARK,
    ROOT,
    TORCHRUN,
    environment,
    kill_marked,
    marked,
    wait_for,
    wait_until_gone,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel ends orphans on Linux alone"
)
LONG = ("train.steps=1000000", "optimizer.warmup_steps=0", "data.workers=1", "checkpoint.every=0")
TWO = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
TRAIN = ("-m", "meshtrain.train")
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.node.name
    kill_marked(request.node.name)


@pytest.fixture
def start(mark: str) -> Start:
    """Starts a command whose processes do not outlive the test."""

    def start(*command: str) -> subprocess.Popen:
        pipes: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        return subprocess.Popen(command, cwd=ROOT, env=environment(**{MARK: mark}), **pipes)

    return start


def rows(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def exit_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "exit.json").read_text())


def hears(process: int, number: int) -> bool:
    """Whether a process has a handler of this signal."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


# Signals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGUSR1, 75), (signal.SIGTERM, 128 + signal.SIGTERM)],
    ids=["SIGUSR1", "SIGTERM"],
)
def test_a_signal_while_torch_is_imported_is_obeyed_afterwards(
    number: int, status: int, small: str, start: Start, tmp_path: Path
) -> None:
    """Nothing is thrown into the middle of an import, where it might be swallowed or break a
    library."""
    output = tmp_path / "run"
    job = start(sys.executable, "-v", *TRAIN, small, *LONG, f"train.output={output}")
    assert any("import 'torch._C'" in line for line in job.stdout)
    assert hears(job.pid, number)
    job.send_signal(number)
    rest = job.stdout.read()
    assert job.wait(60) == status
    assert "import 'meshtrain.train'" in rest or "import 'meshtrain.metrics.step_timer'" in rest, (
        "all was imported"
    )
    assert "Traceback" not in rest
    assert output.exists() == (status == 75)
    if output.exists():
        assert (exit_of(output)["reason"], exit_of(output)["step"]) == (
            "asked to stop by SIGUSR1",
            1,
        )


SLOW = """
import sys, time
from meshtrain import trainer
from meshtrain.train import main

update = trainer.Trainer.optimizer_step

def slow(self, number, stop_asked=False):
    if number == 3:
        time.sleep(1000)
    return update(self, number, stop_asked)

trainer.Trainer.optimizer_step = slow
sys.exit(main())
"""


def test_a_second_signal_stops_at_once(small: str, start: Start, mark: str, tmp_path: Path) -> None:
    """The update of step 3 takes long. The first signal asks; the second, later, does not wait for
    it."""
    script, output = tmp_path / "slow.py", tmp_path / "run"
    script.write_text(SLOW)
    job = start(sys.executable, str(script), small, *LONG, f"train.output={output}")
    wait_for(lambda: rows(output) == 2)
    job.send_signal(signal.SIGTERM)
    # a signal that comes now belongs to the first one
    wait_for(lambda: not hears(job.pid, signal.SIGTERM))
    wait_for(lambda: hears(job.pid, signal.SIGTERM))
    assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    ended = exit_of(output)
    assert (ended["status"], ended["reason"], ended["kind"]) == (
        "failed",
        "ended by SIGTERM",
        "ended",
    )
    assert ended["hosts"] == [socket.gethostname()]
    assert not wait_until_gone(mark, 60)


@pytest.mark.slow
def test_under_torchrun_a_stop_ends_with_0(
    small: str, start: Start, mark: str, tmp_path: Path
) -> None:
    """By the file; then torchrun itself is signalled, as SLURM or a person does, and passes it
    on."""
    output = tmp_path / "run"
    steps = [0]
    for how in ("STOP", "SIGTERM"):
        job = start(*TWO, *TRAIN, small, *LONG, f"train.output={output}")
        wait_for(lambda: rows(output) > steps[-1])
        if how == "STOP":
            (output / "STOP").touch()
        else:
            job.terminate()
        out, _ = job.communicate(timeout=120)
        assert (exit_of(output)["status"], exit_of(output)["code"]) == ("stopped", 75), out
        assert "to go on, start the same command again" in out
        assert (job.returncode == 0) == (how == "STOP"), "torchrun says that it was signalled"
        assert not wait_until_gone(mark, 60)
        steps.append(exit_of(output)["step"])
    assert steps[1] < steps[2], "the second job went on from where the first one stopped"
    assert [row["step"] for row in read(output / "metrics.jsonl")] == list(range(1, steps[2] + 1))


# Orphans ------------------------------------------------------------------------------------------


def test_workers_and_their_readers_die_with_torchrun(
    small: str, start: Start, mark: str, tmp_path: Path
) -> None:
    """Though they are stopped, and cannot react."""
    output = tmp_path / "run"
    job = start(*TWO, *TRAIN, small, *LONG, f"train.output={output}")
    wait_for(lambda: rows(output) > 3)
    others = [pid for pid in marked(mark) if pid != job.pid]
    assert len(others) >= 4, "two ranks, and a reader of each"
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    job.kill()
    job.communicate()
    assert not wait_until_gone(mark, 60)


def test_a_run_in_the_background_of_a_shell_outlives_the_shell(
    small: str, start: Start, mark: str, tmp_path: Path
) -> None:
    """As `nohup python -m meshtrain.train ... &` over ssh: only launchers take their workers
    along."""
    output = tmp_path / "run"
    run = " ".join([sys.executable, *TRAIN, small, *LONG, f"train.output={output}"])
    start("sh", "-c", f"{run} > {tmp_path}/log 2>&1 &").wait(60)
    wait_for(lambda: rows(output) > 3)
    assert marked(mark)
