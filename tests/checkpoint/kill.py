"""Kills a run again and again, at any moment, and checks that it ends as if nothing had happened.

    python tests/checkpoint/kill.py [--kills 50] [--seed 0] [--forked]

A job of a small model saves its state in the background every few steps. One rank or all processes,
launcher included, are ended with SIGKILL, and the job is started again: while it starts or loads,
in the middle of training, when a snapshot is taken, while files are written, and when the folder is
renamed. Checked are:

- after each kill: no process is left, and the newest complete checkpoint is at most two intervals
  old (one may be in progress); the next start resumes from exactly that one
- at the end: losses and norms of all steps, and the last checkpoint, are bit-equal to those of a
  run never killed

The second half of the kills is for a run that writes its checkpoints to local disks first.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from meshtrain.checkpoint.directory import complete_steps, name_of, read_manifest  # noqa: E402
from meshtrain.errors import InputError  # noqa: E402
from meshtrain.metrics import logger as metrics  # noqa: E402
from tests.checkpoint.by_hand import differing_tensors  # noqa: E402
from tests.checkpoint.going_on import small_run  # noqa: E402
from tests.launching import MARK, TORCHRUN, environment, kill_marked, wait_until_gone  # noqa: E402

RANKS = 3
EVERY = 4  # steps between checkpoints
AHEAD = 16  # the most steps beyond those of the previous job after which a job is killed
STEPS = 30  # steps of the run per kill; those after the last kill run undisturbed
LIMIT_S = 400.0  # for each wait, on a busy machine
SHORT_S = 0.0003  # polling interval for files that exist for a moment
MOMENTS = ("starting", "training", "snapshot", "writing", "rename")


@dataclass(frozen=True)
class Killed:
    """The state in which a kill left the run.

    Attributes:
        moment: the moment at which the kill was aimed.
        whom: "all", or the rank.
        step: step of the last row of metrics.jsonl; 0: there is none.
        newest: the step of the newest complete checkpoint afterwards; 0: there is none.
        left: the remains of unfinished checkpoints.
        local: whether checkpoints are written to local disks first.
    """

    moment: str
    whom: str
    step: int
    newest: int
    left: tuple[str, ...]
    local: bool


class Job:
    """A running job."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.mark, self.log = uuid.uuid4().hex, log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment() | {MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until(self, there: Callable[[], bool], every_s: float) -> None:
        """Polls until `there()` is true."""
        deadline = time.monotonic() + LIMIT_S
        while not there():
            assert self.process.poll() is None, (
                f"the job ended before it was killed:\n{self.log.read_text()}"
            )
            assert time.monotonic() < deadline, (
                f"nothing to aim at in {LIMIT_S:.0f} s:\n{self.log.read_text()}"
            )
            time.sleep(every_s)

    def workers(self) -> list[int]:
        """The pids of the ranks that have started, in rank order, since the launcher starts one
        after the other."""
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return sorted(int(pid) for children in lists for pid in children.read_text().split())

    def kill(self, rank: int | None) -> str:
        """Kills a rank, or everything; returns which."""
        workers = self.workers()
        if rank is not None and rank < len(workers):
            os.kill(workers[rank], signal.SIGKILL)
            return f"rank {rank}"
        os.killpg(self.process.pid, signal.SIGKILL)
        kill_marked(self.mark)
        return "all"

    def ended(self) -> int:
        """The exit status; asserts that no process of the job is left."""
        try:
            status = self.process.wait(LIMIT_S)
            left = wait_until_gone(self.mark)
            assert not left, f"processes left behind: {left}\n{self.log.read_text()}"
        finally:
            kill_marked(self.mark)
        return status


class Run:
    """A run of a model in a folder, job after job."""

    def __init__(
        self, folder: Path, config: Path, steps: int, forked: bool, local: bool = False
    ) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.local = folder.with_name(f"{folder.name}_local")
        self._jobs, self._forked, self._has_local = 0, forked, local
        launcher = [*TORCHRUN, "--standalone", f"--nproc-per-node={RANKS}"]
        if forked:
            launcher = [sys.executable, str(ROOT / "tests" / "forked.py"), str(RANKS)]
        options = (
            f"train.steps={steps}",
            f"checkpoint.every={EVERY}",
            "data.workers=0",
            f"train.output={folder}",
        )
        options += (f"checkpoint.local={self.local}",) * local
        self._command = [
            *launcher,
            "-m",
            "meshtrain.train",
            str(config),
            *options,
            f"layout={{dp_shard: {RANKS}}}",
        ]

    def start(self) -> Job:
        self._jobs += 1
        return Job(self._command, self.folder.with_name(f"{self.folder.name}_{self._jobs}.log"))

    def step(self) -> int:
        """The step of the last complete row of metrics.jsonl."""
        try:
            with (self.folder / metrics.FILE).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        return json.loads(lines[-1])["step"] if lines else 0

    def newest(self) -> int:
        """The step of the newest complete checkpoint, including local ones that all ranks have; 0:
        there is none."""
        found = set(complete_steps(self.checkpoints)) if self.checkpoints.is_dir() else set()
        by_rank: list[set[tuple[int, str]]] = []
        for rank in self.local.glob("*/rank_*"):
            by_rank.append(set())
            for step in complete_steps(rank):
                with suppress(InputError):  # it was just deleted
                    by_rank[-1].add((step, read_manifest(rank / name_of(step))[1]))
        whole = set.intersection(*by_rank) if len(by_rank) == RANKS else set()
        return max(found | {step for step, _ in whole}, default=0)

    def unfinished(self) -> list[Path]:
        return sorted(self.checkpoints.glob(".step_*.tmp"))

    def killed(self, moment: str, rng: random.Random) -> Killed:
        """Starts a job, kills it, and checks what is left."""
        before, newest = self.step(), self.newest()
        job = self.start()
        try:
            self._aim(job, moment, before + rng.randint(1, AHEAD), rng)
            whom = job.kill(rng.choice([None, *range(RANKS)]))
        finally:
            if sys.exc_info()[0] is not None:
                kill_marked(job.mark)
        assert job.ended() != 0, job.log.read_text()
        left = tuple(
            f"{path.name}: {len(list(path.iterdir()))} files" for path in self.unfinished()
        )
        found = Killed(moment, whom, self.step(), self.newest(), left, self._has_local)
        self._check(job, newest, found)
        return found

    def _aim(self, job: Job, moment: str, target: int, rng: random.Random) -> None:
        """Waits for the moment."""
        if moment == "starting":
            job.until(lambda: len(job.workers()) == RANKS, 0.02)
            time.sleep(rng.uniform(0.0, 0.5 if self._forked else 3.0))
            return
        if moment == "snapshot":  # it follows the row of its step
            target += -target % EVERY
        job.until(lambda: self.step() >= target, 0.005)
        if moment == "writing":
            job.until(lambda: bool(self.unfinished()), SHORT_S)
        if moment == "rename":  # after the last two files are written, the folder is renamed
            newest = self.newest()
            last = rng.choice(("manifest.json", "COMPLETE", "none: when it has its name"))

            def there() -> bool:
                return self.newest() > newest or any(
                    (path / last).exists() for path in self.unfinished()
                )

            job.until(there, SHORT_S)
        else:
            time.sleep(rng.uniform(0.0, 0.01))

    def _check(self, job: Job, newest: int, found: Killed) -> None:
        """Checks what the job started from, and what it has lost."""
        self.began_with(job, newest)
        assert found.newest >= newest, "a complete checkpoint is lost"
        assert found.step - found.newest <= 2 * EVERY, f"too many steps are lost: {found}"

    def began_with(self, job: Job, newest: int) -> None:
        """Asserts that the job, if it got so far as to say so, resumed from this step."""
        said = re.findall(r"goes on from \S+/step_(\d+): step (\d+)", job.log.read_text())
        assert all(int(step) == newest for pair in said for step in pair), f"{said}, not {newest}"


def rows(folder: Path) -> list[tuple]:
    """The values of each step that must be bit-equal."""
    found = metrics.read(folder / metrics.FILE)
    return [
        (row["step"], row["loss"], row["grad_norm"], row["samples_digest"], row["tokens"])
        for row in found
    ]


def state_of(checkpoint: Path) -> dict[str, object]:
    """What a run goes on from besides tensors."""
    manifest, _ = read_manifest(checkpoint)
    return {name: getattr(manifest, name) for name in ("step", "samples", "tokens", "data", "rng")}


def compare(run: Run, whole: Run, steps: int) -> None:
    """Compares the run that was killed with the one that was not."""
    assert [row[0] for row in rows(whole.folder)] == list(range(1, steps + 1))
    for row, expected in zip(rows(run.folder), rows(whole.folder), strict=True):
        assert row == expected, f"{row} where the run that was not killed has {expected}"
    assert run.unfinished() == []
    last, expected_last = (each.checkpoints / name_of(steps) for each in (run, whole))
    assert differing_tensors(last, expected_last) == []
    assert state_of(last) == state_of(expected_last)


def go(folder: Path, *, kills: int, seed: int, forked: bool = False) -> list[Killed]:
    """Kills two runs in `folder`, each half of the times, and returns the outcome of each kill."""
    rng, config = random.Random(seed), small_run(folder)
    moments = [MOMENTS[i % len(MOMENTS)] for i in range(kills)]
    rng.shuffle(moments)
    half = -(-kills // 2)
    steps = STEPS * half
    whole = Run(folder / "whole", config, steps, forked)
    job = whole.start()
    assert job.ended() == 0, job.log.read_text()
    found = []
    for local, some in ((False, moments[:half]), (True, moments[half:])):
        run = Run(folder / f"run_{local}", config, steps, forked, local)
        for moment in some:
            found.append(run.killed(moment, rng))
            print(found[-1], flush=True)
        newest = run.newest()
        job = run.start()
        assert job.ended() == 0, job.log.read_text()
        run.began_with(job, newest)
        compare(run, whole, steps)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Kills a run again and again, and compares it with one never killed."
    )
    parser.add_argument("--kills", type=int, default=50, help="how often (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the moments and the ranks (%(default)s)"
    )
    parser.add_argument(
        "--forked", action="store_true", help="start jobs without torchrun, which is faster"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshtrain-kill-") as folder:
        begun = time.monotonic()
        kills = go(Path(folder), kills=options.kills, seed=options.seed, forked=options.forked)
    whole_jobs = sum(kill.whom == "all" for kill in kills)
    lost = sum(kill.step - kill.newest for kill in kills)
    print(
        f"{len(kills)} kills in {time.monotonic() - begun:.0f} s ({whole_jobs} of all; "
        f"{sum(bool(kill.left) for kill in kills)} left an unfinished checkpoint; "
        f"{sum(kill.local for kill in kills)} with local disks): {lost} steps were made again, "
        "none lost, and the end is bit-equal to that of a run never killed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
