"""Saving: the step waits for a snapshot of the state only, and a thread writes the files while
training continues.

run/checkpointing.py decides when a run saves; commit.py is how the ranks agree on a checkpoint.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.commit import CheckpointWrite, checkpoint_bytes
from meshtrain.checkpoint.directory import name_of
from meshtrain.checkpoint.local import LocalDisk
from meshtrain.checkpoint.replica_check import Sums
from meshtrain.checkpoint.retention import Pruner, Retention
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
# a background save is slow above this multiple of the last one, and this duration
SLOW, SLOW_LEAST_S = (
    3.0,
    30.0,
)


class Saver:
    """Writes checkpoints into a folder that all ranks share, one at a time. All ranks call the same
    methods in turn."""

    def __init__(
        self,
        state: State,
        folder: Path,
        job: Job,
        *,
        in_background: bool = True,  # write from a copy in host memory while training continues
        keep: Retention = KEEP_LAST_3,
        on_failure: str = "continue",  # or "stop": a failed save sets `wants_stop`
        # if the disk is full, delete an old checkpoint before a save rather than after it
        make_room: bool = False,
        limit_s: float = math.inf,  # seconds after which a save is given up, and training continues
        local: LocalDisk | None = None,  # local disk, to which checkpoints are written first
        uploads: Uploads | None = None,  # object storage, to which rank 0 uploads them afterwards
        say: Callable[[str], None]
        | None = None,  # prints a line, on rank 0; by default the job's `say`
        writing: Callable[[int, Path], None]
        | None = None,  # called in the thread before it writes this rank's file
    ) -> None:
        self.saved: int | None = None  # step of the last checkpoint that this job completed
        # why the last save failed, the same on all ranks; None if it did not
        self.problem: str | None = None
        # why the run should stop: diverged, folder taken, or `on_failure`
        self.wants_stop: str | None = None
        self.diverged = False  # whether ranks that must hold the same values do not
        # last save: time until on disk; time training waited
        self.last_save_s = self.last_wait_s = 0.0
        self._state, self._folder, self._job, self._say = state, folder, job, say or job.say
        self._in_background, self._on_failure, self._makes_room = (
            in_background,
            on_failure,
            make_room,
        )
        self._snapshot, self._slow = (
            Snapshot(state, job.rank, job.device, streams=not in_background),
            False,
        )
        self._limit_s, self._local, self._writing = limit_s, local, writing
        self._current: CheckpointWrite | None = None  # the save in progress
        self._before: CheckpointWrite | None = None  # the previous save
        self._thread: threading.Thread | None = None
        self._uploads = uploads
        in_use = (lambda: None) if uploads is None else lambda: uploads.under_way
        self._pruner = Pruner(
            folder, keep, checkpoint_bytes(state.placements, job.world_size), in_use
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
            self._tell(
                f"step {step} waited {time.perf_counter() - start:.1f} s, because the checkpoint "
                "of step "
                f"{self._current.step} was still being written: at most one is under way"
            )
        self.poll()
        if self._is_stuck(step):
            return
        with waiting("the device, which sums and copies the state", resource=Resource.DEVICE):
            sums = Sums(self._state)
            self._snapshot.take()
        make_room = (
            partial(self._pruner.make_room, step, about["evaluation"]) if self._makes_room else None
        )
        contents = self._state, self._folder, self._job, step, about, self._snapshot, sums
        write = CheckpointWrite(*contents, self._writing, self._local, make_room, self._limit_s)
        write.waited_s = time.perf_counter() - start - self._snapshot.host_s
        self._current, self._slow = write, False
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
        for notes in (self._pruner.notes, self._uploads.notes if self._uploads is not None else []):
            while notes:
                self._tell(notes.pop(0))

    def wait_for_upload(self) -> None:
        """Called on all ranks at the end of a successful run: waits for the last upload, but at
        most `LAST_S`."""
        if self._uploads is not None:
            if self._thread is not None:
                self._thread.join()  # old checkpoints are being deleted
            if self._uploads.wait(0.0) and self._uploads.problem is not None:
                self._uploads.offer(self._folder)  # one last attempt
            if not self._uploads.wait(0.0):
                self._tell(f"waits up to {LAST_S:.0f} s for the upload to {self._uploads.url}")
                if not self._uploads.wait():
                    self._tell(
                        f"warning: the upload to {self._uploads.url} is not done, and is given up"
                    )
            self.poll()
            if self._uploads.problem is not None:
                self._tell(
                    f"warning: {self._uploads.url} lacks checkpoints of this run: "
                    f"{self._uploads.problem}"
                )

    def close(self) -> None:
        """Ends the thread. A save in progress is given up: call `wait` before, unless the run has
        failed."""
        if self._current is not None and not self._current.done.is_set():
            self._current.cancel()
            if self._thread is not None:
                self._thread.join(CLOSING_S)  # do not wait for a long write
        elif self._thread is not None:
            stuck = self._before is not None and self._before.given_up
            self._thread.join(CLOSING_S if stuck else None)  # old checkpoints are being deleted
            self.poll()
        if self._thread is None or not self._thread.is_alive():
            self._snapshot.close()

    def _start(self, write: CheckpointWrite) -> None:
        arguments = write, self._before, self._thread
        try:
            self._thread = start_thread(self._run, *arguments, name="checkpoint")
        except NoThreadError as error:
            self._thread = None
            write.notes.append(
                f"warning: training waited for the checkpoint of step {write.step}: {error}"
            )
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
        if (
            not write.given_up
            and self._job.rank == 0
            and write.error is None
            and write.problem is None
        ):
            self._pruner.prune(write.step, write.about["evaluation"])
            if self._uploads is not None:
                self._uploads.offer(self._folder)

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
        activity = "looking at the save that was given up"
        stuck = self._job.reduce(
            activity, is_alive, lambda alive: [rank for rank, waits in enumerate(alive) if waits]
        )
        if ranks := ranges(stuck):
            before = f"that of step {self._before.step}, which was given up"
            self._fail(step, f"rank {join_some(ranks)} still waits for the disk with {before}")
        return bool(stuck)

    def _warn_if_slow(self, write: CheckpointWrite) -> None:
        if (
            self._slow
            or not self.last_save_s
            or write.elapsed_s < max(SLOW * self.last_save_s, SLOW_LEAST_S)
        ):
            return
        self._slow = True
        self._tell(
            f"warning: the checkpoint of step {write.step} has been written for "
            f"{write.elapsed_s:.0f} s now, and "
            f"the last one took {self.last_save_s:.0f} s: the file system is slow, or hangs"
        )

    def _conclude(self, write: CheckpointWrite) -> None:
        if write.given_up:
            self.diverged = write.diverged
            self._fail(write.step, str(write.problem), must_stop=write.diverged)
            return
        if write.error is not None:
            raise write.error
        self.problem, self.diverged = write.problem, write.diverged
        waited_s = write.waited_s if self._in_background else write.waited_s + write.written_s
        self.last_save_s, self.last_wait_s = write.written_s, waited_s
        for note in write.notes:
            self._tell(note)
        if write.problem is None:
            self.saved = write.step
            speed = f"{bytes_text(write.nbytes)} in {write.written_s:.1f} s"
            self._tell(
                f"checkpoint {name_of(write.step)}: {speed}, training waited {1000 * waited_s:.0f} "
                "ms"
            )
            return
        self._fail(write.step, write.problem, must_stop=write.diverged or write.taken)

    def _fail(self, step: int, problem: str, *, must_stop: bool = False) -> None:
        self.problem = problem
        text = f"there is no checkpoint of step {step}: {problem}"
        if must_stop or self._on_failure == "stop":
            self.wants_stop = text
        self._tell(
            text
            if self.wants_stop
            else f"{text}; training goes on, and the checkpoints before it are there"
        )

    def _tell(self, line: str) -> None:
        if self._job.rank == 0:
            self._say(line)
