"""Saves the state of a run: a snapshot that the step waits for, and a thread that writes it while training goes on."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

from meshtrain.checkpoint import folder as folders
from meshtrain.checkpoint import retention
from meshtrain.checkpoint.attempt import Attempt, needed, size
from meshtrain.checkpoint.replicas import Sums
from meshtrain.checkpoint.snapshot import Snapshot
from meshtrain.checkpoint.state import State
from meshtrain.errors import InputError
from meshtrain.runtime import Job
from meshtrain.weights import some

CLOSING_S = 5.0  # how long the end of a failing run waits for a thread
LOOK_EVERY_S = 0.25  # at a save that training waits for
SLOW, SLOW_LEAST_S = 3.0, 30.0  # a save in the background is slow if it takes so many times the last one, and so long


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay; see retention.which."""

    keep_last: int | None = 3
    keep_every: int | None = None
    keep_best: bool = False


class Saver:
    """Writes checkpoints into a folder, one at a time. All ranks call the same methods after the same steps.

    Attributes:
        saved: the step of the last checkpoint that was written to its end; None if there is none of this job.
        problem: why the last save failed; None if it did not. The same on all ranks.
        wants_stop: why the run should not go on: ranks have diverged, another job has taken the folder, or a save
            failed and `on_failure` is "stop".
        diverged: whether that is the reason.
        last_save_s: seconds from the beginning of the last save until all was on disk.
        last_wait_s: seconds for which training waited for it: for an earlier save and for the snapshot.
    """

    def __init__(
        self,
        state: State,
        folder: Path,
        job: Job,
        *,
        in_background: bool = True,
        keep: Retention = Retention(),
        on_failure: str = "continue",
        limit_s: float = math.inf,
        say: Callable[[str], None] | None = None,
        writing: Callable[[int, Path], None] | None = None,
    ) -> None:
        """
        Args:
            folder: that all ranks see; rank 0 holds its lock.
            in_background: training goes on while a checkpoint is written.
            on_failure: "continue", or "stop": whether a save that failed sets `wants_stop`.
            limit_s: seconds after which a save is given up, and training goes on.
            say: prints a line, on rank 0; by default the job's own.
            writing: called with the step and the file that this rank is about to write, in the thread that does. What
                it raises, writing has raised.
        """
        self.saved: int | None = None
        self.problem: str | None = None
        self.wants_stop: str | None = None
        self.diverged = False
        self.last_save_s = self.last_wait_s = 0.0
        self._state, self._folder, self._job = state, folder, job
        self._in_background, self._keep, self._on_failure = in_background, keep, on_failure
        self._limit_s, self._slow = limit_s, False
        self._say, self._writing = say or job.say, writing
        self._snapshot = Snapshot(state, job.rank, job.device)
        self._attempt: Attempt | None = None  # under way
        self._before: Attempt | None = None  # the last one
        self._thread: threading.Thread | None = None
        self._keeper = _Keeper(folder, keep, needed(state.placements, job.world_size))

    def save(self, step: int, about: Mapping[str, Any], *, wait: bool = False) -> None:
        """Saves the state after this step.

        Args:
            about: the fields of Manifest that the run knows: samples, tokens, config, data, versions, rng, books,
                evaluation. Rank 0's are written.
            wait: until it is written, or has failed (`problem`).
        """
        begun = time.perf_counter()
        if self._attempt is not None and not self._attempt.done.is_set():
            self._settle()
            self._tell(
                f"step {step} waited {time.perf_counter() - begun:.1f} s, because the checkpoint of step "
                f"{self._attempt.step} was still being written: at most one is under way"
            )
        self.poll()
        if self._is_stuck(step):
            return
        sums = Sums(self._state)
        self._snapshot.take()
        attempt = Attempt(
            self._state, self._folder, self._job, step, about, self._snapshot, sums, self._writing, self._limit_s
        )
        attempt.waited_s = time.perf_counter() - begun - self._snapshot.host_s
        self._attempt, self._slow = attempt, False
        work = attempt, self._before, self._thread
        self._thread = threading.Thread(target=self._run, args=work, name="checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives no more threads
            self._thread = None
            attempt.notes.append(f"warning: training waited for the checkpoint of step {step}: {error}")
            attempt.look_while_waiting()
            self._run(*work)
        if wait or not self._in_background:
            self.wait()

    def wait(self) -> None:
        """Until the save that is under way has ended, or is given up; then as `poll`."""
        self._settle()
        self.poll()

    def poll(self) -> None:
        """Says what has ended meanwhile. To be called after each step; it does not wait.

        Raises:
            RuntimeError: another rank has failed, and with it the save. Whatever else the thread died of.
        """
        attempt = self._attempt
        if attempt is not None and attempt.look():
            self._attempt, self._before = None, attempt
            self._conclude(attempt)
        elif attempt is not None:
            self._notice(attempt)
        while self._keeper.notes:
            self._tell(self._keeper.notes.pop(0))

    def close(self) -> None:
        """Lets the thread end. What is still being written is given up: `wait` before, unless the run has failed."""
        if self._attempt is not None and not self._attempt.done.is_set():
            self._attempt.cancel()
            if self._thread is not None:
                self._thread.join(CLOSING_S)  # a write of many bytes is not waited for
        elif self._thread is not None:
            stuck = self._before is not None and self._before.given_up
            self._thread.join(CLOSING_S if stuck else None)  # old checkpoints are being deleted
            self.poll()
        if self._thread is None or not self._thread.is_alive():
            self._snapshot.close()

    def _run(self, attempt: Attempt, before: Attempt | None, earlier: threading.Thread | None) -> None:
        """In the thread: the save, and then, while nobody waits, what it means for older checkpoints."""
        if earlier is not None:
            earlier.join()
        attempt.run(before)
        if attempt.given_up:
            return
        if self._job.rank == 0 and attempt.error is None and attempt.problem is None:
            self._keeper.tidy(attempt.step, attempt.about["evaluation"])

    def _settle(self) -> None:
        attempt = self._attempt
        while attempt is not None and not attempt.done.wait(LOOK_EVERY_S) and not attempt.look():
            self._notice(attempt)

    def _is_stuck(self, step: int) -> bool:
        """Whether a rank still waits for the disk in a save that was given up: then there is none after this step."""
        if self._before is None or not self._before.given_up:
            return False
        here = self._thread is not None and self._thread.is_alive()
        told = self._job.gather("looking at the save that was given up", here)
        ranks = [str(rank) for rank, there in enumerate(told) if there]
        if ranks:
            writes = (
                f"rank {some(ranks)} still waits for the disk with that of step {self._before.step}, which was given up"
            )
            self._fail(step, writes)
        return bool(ranks)

    def _notice(self, attempt: Attempt) -> None:
        """Says once that a save takes much longer than the one before."""
        if self._slow or not self.last_save_s or attempt.elapsed_s < max(SLOW * self.last_save_s, SLOW_LEAST_S):
            return
        self._slow = True
        self._tell(
            f"warning: the checkpoint of step {attempt.step} has been written for {attempt.elapsed_s:.0f} s now, and "
            f"the last one took {self.last_save_s:.0f} s: the file system is slow, or hangs"
        )

    def _fail(self, step: int, problem: str, *, must_stop: bool = False) -> None:
        self.problem = problem
        failed = f"there is no checkpoint of step {step}: {problem}"
        if must_stop or self._on_failure == "stop":
            self.wants_stop = failed
        self._tell(
            failed if self.wants_stop else f"{failed}; training goes on, and the checkpoints before it are there"
        )

    def _conclude(self, attempt: Attempt) -> None:
        if attempt.given_up:
            self.diverged = attempt.diverged
            self._fail(attempt.step, str(attempt.problem), must_stop=attempt.diverged)
            return
        if attempt.error is not None:
            raise attempt.error
        self.problem, self.diverged = attempt.problem, attempt.diverged
        self.last_save_s, self.last_wait_s = attempt.written_s, attempt.waited_s
        for note in attempt.notes:
            self._tell(note)
        if attempt.problem is None:
            self.saved = attempt.step
            speed = f"{size(attempt.nbytes)} in {attempt.written_s:.1f} s"
            waited = f"training waited {1000 * attempt.waited_s:.0f} ms"
            self._tell(f"checkpoint {folders.name_of(attempt.step)}: {speed}, {waited}")
            return
        self._fail(attempt.step, attempt.problem, must_stop=attempt.diverged or attempt.taken)

    def _tell(self, line: str) -> None:
        if self._job.rank == 0:
            self._say(line)


class _Keeper:
    """Rank 0 deletes what no rule keeps, and warns before the disk is full."""

    def __init__(self, folder: Path, keep: Retention, needed: int) -> None:
        self.notes: list[str] = []
        self._folder, self._keep, self._needed = folder, keep, needed
        self._values: dict[int, dict[str, float]] = {}  # step -> its evaluation, empty if there was none
        self._warned = False

    def tidy(self, step: int, evaluation: Mapping[str, float] | None) -> None:
        """After a checkpoint is complete."""
        self._values[step] = dict(evaluation or {})
        try:
            for old in self._superfluous(step):
                folders.remove(self._folder / folders.name_of(old))
            free = disk_usage(self._folder).free
        except (OSError, folders.TakenError) as error:
            self.notes.append(f"warning: an old checkpoint could not be deleted: {error}")
            return
        short = free < 2 * self._needed
        if short and not self._warned:
            self.notes.append(
                f"warning: the file system of {self._folder.absolute()} has {size(free)} free, which is not enough for "
                f"two more checkpoints of {size(self._needed)} each"
            )
        self._warned = short

    def _superfluous(self, step: int) -> set[int]:
        steps = folders.complete_steps(self._folder)
        if self._keep.keep_best:  # those that an earlier job has written are read
            self._values |= {each: self._evaluation(each) for each in steps if each not in self._values}
        return set(steps) - retention.which(steps, self._values, **vars(self._keep)) - {step}

    def _evaluation(self, step: int) -> dict[str, float]:
        try:
            manifest, _ = folders.read_manifest(self._folder / folders.name_of(step))
        except InputError:  # it is damaged, and so it is not the best one
            return {}
        return dict(manifest.evaluation or {})
