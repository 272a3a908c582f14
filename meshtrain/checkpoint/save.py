"""Saving: the step waits for a snapshot of the state only, and a thread writes the files while
training continues.

run/checkpointing.py decides when a run saves; commit.py is how the ranks agree on a checkpoint.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.commit import CheckpointWrite
from meshtrain.checkpoint.directory import name_of
from meshtrain.checkpoint.local import LocalDisk
from meshtrain.checkpoint.replica_check import Sums
from meshtrain.checkpoint.retention import Pruner, Retention
from meshtrain.checkpoint.shard_file import checkpoint_bytes
from meshtrain.checkpoint.staging import Snapshot
from meshtrain.checkpoint.state import State
from meshtrain.checkpoint.upload import LAST_S, Uploads
from meshtrain.errors import bytes_text, join_some, ranges
from meshtrain.job.pending import Resource, waiting
from meshtrain.job.process import Job
from meshtrain.job.threads import NoThreadError, start_thread

CLOSING_S = 5.0  # how long the end of a failing run waits for the thread
KEEP_LAST_3 = Retention()
POLL_S = 0.25  # polling interval while training waits for a save

# A background save is slow above this multiple of the last one, and this duration.
SLOW = 3.0
SLOW_LEAST_S = 30.0


class Saver:
    """Writes checkpoints into a folder that all ranks share, one at a time. All ranks call the same
    methods in turn."""

    def __init__(
        self,
        state: State,
        folder: Path,
        job: Job,
        *,
        in_background: bool = True,
        keep: Retention = KEEP_LAST_3,
        limit_s: float = math.inf,
        local: LocalDisk | None = None,
        uploads: Uploads | None = None,
        say: Callable[[str], None] | None = None,
        writing: Callable[[int, Path], None] | None = None,
    ) -> None:
        """All ranks construct it together.

        Args:
            in_background: write from a copy in host memory while training continues.
            limit_s: seconds after which a save is given up, and training continues.
            local: local disk, to which checkpoints are written first.
            uploads: object storage, to which rank 0 uploads them afterwards.
            say: prints a line, on rank 0; by default the job's `say`.
            writing: called in the thread before it writes this rank's file.
        """
        self.saved: int | None = None  # step of the last checkpoint that this job completed
        # why the last save failed, the same on all ranks; None if it did not
        self.problem: str | None = None
        self.wants_stop: str | None = None  # why the run should stop: diverged, or folder taken
        self.diverged = False  # whether ranks that must hold the same values do not
        self.last_save_s = 0.0  # of the last save: time until it was on disk
        self.last_wait_s = 0.0  # of the last save: time that training waited

        self._state = state
        self._folder = folder
        self._job = job
        self._say = say or job.say
        self._in_background = in_background
        self._limit_s = limit_s
        self._local = local
        self._uploads = uploads
        self._writing = writing
        self._snapshot = Snapshot(state, job.rank, job.device, streams=not in_background)

        self._current: CheckpointWrite | None = None  # the save in progress
        self._before: CheckpointWrite | None = None  # the previous save
        self._thread: threading.Thread | None = None
        self._said_slow = False  # whether the save in progress was called slow
        self._pruner = Pruner(
            folder,
            keep,
            checkpoint_bytes(state.placements, job.world_size),
            in_use=lambda: None if uploads is None else uploads.under_way,
        )

    def save(self, step: int, about: Mapping[str, Any], *, wait: bool = False) -> None:
        """Saves the state after this step; with `wait`, returns when it is written or has failed
        (`problem`).

        `about`: rank 0's fields of Manifest: samples, tokens, config, data, versions, rng,
        counters, evaluation.
        """
        start = time.perf_counter()
        if self._current is not None and not self._current.done.is_set():
            self._wait_for_outcome()
            waited_s = time.perf_counter() - start
            self._tell(
                f"step {step} waited {waited_s:.1f} s, because the checkpoint of step "
                f"{self._current.step} was still being written: at most one is under way"
            )
        self.poll()
        if self._is_stuck(step):
            return
        with waiting("the device, which sums and copies the state", resource=Resource.DEVICE):
            sums = Sums(self._state)
            self._snapshot.take()
        write = CheckpointWrite(
            state=self._state,
            folder=self._folder,
            job=self._job,
            step=step,
            about=about,
            snapshot=self._snapshot,
            sums=sums,
            writing=self._writing,
            local=self._local,
            limit_s=self._limit_s,
        )
        # The thread adds the time that the copies really took: on a GPU they are only queued here.
        write.waited_s = time.perf_counter() - start - self._snapshot.host_s
        self._current = write
        self._said_slow = False
        self._start(write)
        if wait or not self._in_background:
            self.wait()

    def wait(self) -> None:
        """Waits until the save in progress has ended or is given up; then as `poll`."""
        self._wait_for_outcome()
        self.poll()

    def poll(self) -> None:
        """Reports what has ended meanwhile, without waiting; call it after each step. Raises an
        error of the thread."""
        write = self._current
        if write is not None and write.poll():
            self._current, self._before = None, write
            self._conclude(write)
        elif write is not None:
            self._warn_if_slow(write)
        self._tell_notes(self._pruner.notes)
        if self._uploads is not None:
            self._tell_notes(self._uploads.notes)

    def wait_for_upload(self) -> None:
        """Called on all ranks at the end of a successful run: waits for the last upload, but at
        most `LAST_S`."""
        uploads = self._uploads
        if uploads is None:
            return
        if self._thread is not None:
            self._thread.join()  # old checkpoints are being deleted
        if uploads.wait(0.0) and uploads.problem is not None:
            uploads.offer(self._folder)  # one last attempt
        if not uploads.wait(0.0):
            self._tell(f"waits up to {LAST_S:.0f} s for the upload to {uploads.url}")
            if not uploads.wait():
                self._tell(f"warning: the upload to {uploads.url} is not done, and is given up")
        self.poll()
        if uploads.problem is not None:
            self._tell(f"warning: {uploads.url} lacks checkpoints of this run: {uploads.problem}")

    def close(self) -> None:
        """Ends the thread. A save in progress is given up: call `wait` before, unless the run has
        failed."""
        if self._current is not None and not self._current.done.is_set():
            self._current.cancel()
            if self._thread is not None:
                self._thread.join(CLOSING_S)  # do not wait for a long write
        elif self._thread is not None:
            # It may still delete old checkpoints, or be stuck in a save that was given up.
            may_be_stuck = self._before is not None and self._before.given_up
            self._thread.join(CLOSING_S if may_be_stuck else None)
            self.poll()
        if self._thread is None or not self._thread.is_alive():
            self._snapshot.close()

    # The thread ---------------------------------------------------------------------------------

    def _start(self, write: CheckpointWrite) -> None:
        arguments = write, self._before, self._thread
        try:
            self._thread = start_thread(self._run, *arguments, name="checkpoint")
        except NoThreadError as error:
            self._thread = None
            write.notes.append(
                f"warning: training waited for the checkpoint of step {write.step}: {error}"
            )
            # Nobody else can give the save up while this thread runs it.
            for meeting in write.rounds:
                meeting.meanwhile = write.poll
            self._run(*arguments)

    def _run(
        self,
        write: CheckpointWrite,
        before: CheckpointWrite | None,
        earlier: threading.Thread | None,
    ) -> None:
        """In the thread: the save, and afterwards, when no rank waits for it, the deletion of older
        checkpoints."""
        with waiting(f"the checkpoint of step {write.step}", resource=Resource.DISK):
            if earlier is not None:
                earlier.join()
            write.run(before)
        if self._job.rank == 0 and write.is_saved:
            self._pruner.prune(write.step, write.about["evaluation"])
            if self._uploads is not None:
                self._uploads.offer(self._folder)

    # The main thread ----------------------------------------------------------------------------

    def _wait_for_outcome(self) -> None:
        """Waits in short intervals, so that the main thread shows that it is alive, and can give up
        a save."""
        write = self._current
        while write is not None and not write.done.wait(POLL_S) and not write.poll():
            self._warn_if_slow(write)

    def _is_stuck(self, step: int) -> bool:
        """Whether a rank still waits for the disk in a save that was given up: then this step is
        not saved."""
        if self._before is None or not self._before.given_up:
            return False
        is_alive = self._thread is not None and self._thread.is_alive()
        stuck = self._job.reduce("looking at the save that was given up", is_alive, _ranks_of_true)
        if stuck:
            self._fail(
                step,
                f"rank {join_some(ranges(stuck))} still waits for the disk with that of step "
                f"{self._before.step}, which was given up",
            )
        return bool(stuck)

    def _warn_if_slow(self, write: CheckpointWrite) -> None:
        if self._said_slow or not self.last_save_s:
            return
        if write.elapsed_s < max(SLOW * self.last_save_s, SLOW_LEAST_S):
            return
        self._said_slow = True
        self._tell(
            f"warning: the checkpoint of step {write.step} has been written for "
            f"{write.elapsed_s:.0f} s now, and the last one took {self.last_save_s:.0f} s: the "
            "file system is slow, or hangs"
        )

    def _conclude(self, write: CheckpointWrite) -> None:
        # The thread of a save that was given up may end with an error, which means nothing.
        if write.error is not None and not write.given_up:
            raise write.error
        outcome = write.outcome
        assert outcome is not None  # the thread ends with an outcome or an error
        self.problem, self.diverged = outcome.problem, outcome.diverged
        if not outcome.given_up:
            self.last_save_s = write.written_s
            self.last_wait_s = write.waited_s
            if not self._in_background:
                self.last_wait_s += write.written_s
            self._tell_notes(write.notes)
        if outcome.problem is None:
            self.saved = write.step
            self._tell(
                f"checkpoint {name_of(write.step)}: {bytes_text(write.nbytes)} in "
                f"{write.written_s:.1f} s, training waited {1000 * self.last_wait_s:.0f} ms"
            )
        else:
            self._fail(write.step, outcome.problem, must_stop=outcome.must_stop)

    def _fail(self, step: int, problem: str, *, must_stop: bool = False) -> None:
        self.problem = problem
        text = f"there is no checkpoint of step {step}: {problem}"
        if must_stop:
            self.wants_stop = text
        if self.wants_stop is None:
            text += "; training goes on, and the checkpoints before it are there"
        self._tell(text)

    def _tell(self, line: str) -> None:
        if self._job.rank == 0:
            self._say(line)

    def _tell_notes(self, notes: list[str]) -> None:
        """Prints the lines, and removes them: a thread may add others meanwhile."""
        while notes:
            self._tell(notes.pop(0))


def _ranks_of_true(values: list[bool]) -> list[int]:
    return [rank for rank, value in enumerate(values) if value]
