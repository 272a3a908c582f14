"""The commit protocol of one checkpoint, run by a thread of each rank while training continues.

The ranks communicate through the job's store, so that no collective interferes with training's. Up
to five rounds:

1. prepare: ranks compare digests of the tensors that must be equal on several ranks;
2. divergence, only if something was not equal: the ranks concerned report their sums, and the save
   has failed;
3. local, only with local disks: each rank has written its file to its local disk, and all rename
   theirs into place;
4. folder: rank 0 has made the folder to write into, or could not;
5. commit: each rank has written its file, or could not; if all have, rank 0 renames the checkpoint
   into place.

A save ends with one `Outcome`, which rank 0 decides and broadcasts once: its thread at the end of
round 2, 4 or 5, or its main thread when the time is over.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from shutil import disk_usage
from typing import Any

from meshtrain.checkpoint import directory
from meshtrain.checkpoint.folder_lock import TakenError
from meshtrain.checkpoint.local import LocalDisk
from meshtrain.checkpoint.manifest import File, Manifest, file_of
from meshtrain.checkpoint.replica_check import (
    Divergence,
    Sums,
    describe_divergence,
    find_divergence,
)
from meshtrain.checkpoint.shard_file import checkpoint_bytes, write_shard
from meshtrain.checkpoint.staging import Snapshot
from meshtrain.checkpoint.state import State
from meshtrain.errors import DamagedError, bytes_text, join_some
from meshtrain.job.process import Job
from meshtrain.job.storage import warn
from meshtrain.job.store import Round

DIVERGED = "what must be equal on several ranks is not"

# Failures of the machine: the save has failed, and the run may continue.
FAILURES = (OSError, DamagedError, MemoryError, TakenError)


@dataclass(frozen=True)
class Outcome:
    """How a save has ended, in the same words on every rank."""

    problem: str | None = None  # why there is no checkpoint; None: there is one
    # ranks that must hold the same values do not: the run has gone wrong before
    diverged: bool = False
    taken: bool = False  # another job has taken the folder
    given_up: bool = False  # it took too long; threads may still wait for the disk

    @property
    def must_stop(self) -> bool:
        """Whether it makes no sense to train on."""
        return self.diverged or self.taken


@dataclass(eq=False)
class CheckpointWrite:
    """One save of this rank. A thread calls `run`; the main thread all other methods."""

    state: State
    folder: Path
    job: Job
    step: int
    about: Mapping[str, Any]  # fields of the manifest that only the run knows
    snapshot: Snapshot
    sums: Sums
    # called before this rank writes its file; may raise OSError
    writing: Callable[[int, Path], None] | None = None
    local: LocalDisk | None = None  # the local disk, which is written first
    limit_s: float = math.inf  # seconds after which the save is given up

    # What has become of it:
    outcome: Outcome | None = field(default=None, init=False)  # None: not known yet
    error: BaseException | None = field(default=None, init=False)  # the job cannot continue
    done: threading.Event = field(default_factory=threading.Event, init=False)  # `run` has ended
    written_s: float = field(default=0.0, init=False)  # from the snapshot until all was on disk
    waited_s: float = field(default=0.0, init=False)  # that training waited for the snapshot
    nbytes: int = field(default=0, init=False)
    notes: list[str] = field(default_factory=list, init=False)  # lines for rank 0 to print

    def __post_init__(self) -> None:
        # All ranks begin rounds in the same order, so each save takes all of its rounds at once.
        self._prepare_round = self.job.round()
        self._divergence_round = self.job.round()
        self._local_round = self.job.round()
        self._folder_round = self.job.round()
        self._commit_round = self.job.round()
        self.rounds = [
            self._prepare_round,
            self._divergence_round,
            self._local_round,
            self._folder_round,
            self._commit_round,
        ]
        self._written = datetime.now(UTC).isoformat(timespec="seconds")
        self._start = time.perf_counter()
        # on rank 0: acquired once, by the thread that decides the outcome
        self._decides = threading.Lock()
        self._gathering: Round | None = None  # on rank 0: the round whose reports it waits for
        self._diverged = False  # known after the first round, before there is an outcome
        self._file_ended = False  # whether this rank has written its file, or failed to

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    @property
    def given_up(self) -> bool:
        return self.outcome is not None and self.outcome.given_up

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint."""
        return self.outcome is not None and self.outcome.problem is None

    # Called by the main thread ------------------------------------------------------------------

    def poll(self) -> bool:
        """Whether the outcome is known. After `limit_s` rank 0 gives the save up for all ranks."""
        if self.done.is_set() or self.given_up:
            return True
        if self.elapsed_s < self.limit_s:
            return False
        if self.job.rank == 0:
            if not self._decides.acquire(blocking=False):
                return False  # the thread is just broadcasting the outcome
            problem = (
                f"it took longer than {self.limit_s:g} s (checkpoint.timeout_s): "
                f"{self._describe_delay()}"
            )
            # Set before any rank hears of it: this rank's thread looks at it, too.
            self.outcome = Outcome(problem, diverged=self._diverged, given_up=True)
            self._commit_round.broadcast(asdict(self.outcome))
        elif self._file_ended or not self._commit_round.has_answer:
            return False  # the thread receives the outcome
        else:
            # This rank's thread still waits for its disk, so the answer can only be rank 0's.
            self.outcome = Outcome(**self._commit_round.receive())
        self.cancel()
        return True

    def cancel(self) -> None:
        for meeting in self.rounds:
            meeting.cancel()

    def _describe_delay(self) -> str:
        gathering = self._gathering  # the thread may set it to None meanwhile
        late = [] if gathering is None else gathering.missing()
        if not late:
            delay = f"{self._rank_name()} has not finished it"
        else:
            if gathering in (self._local_round, self._commit_round):
                missing = "has not written its file"
            elif self._diverged:
                missing = "has not said what it holds"
            else:
                missing = "has not begun to write"
            delay = f"rank {join_some([str(rank) for rank in late])} {missing}"
        return f"{delay}; {DIVERGED}" if self._diverged else delay

    # Called by the thread -----------------------------------------------------------------------

    def run(self, before: "CheckpointWrite | None") -> None:
        """Runs the whole protocol; sets `done` at its end, whatever happens. `before`: the previous
        save, whose entries in the store nobody needs any more."""
        try:
            self.waited_s += self.snapshot.wait()
            outcome = self._run_rounds(before)
            if not self.given_up:
                self.outcome, self.written_s = outcome, self.elapsed_s
        except BaseException as error:  # the main thread raises it
            self.error = error
        finally:
            if self.given_up:
                self._remove_unfinished()
            self.done.set()

    def _run_rounds(self, before: "CheckpointWrite | None") -> Outcome:
        outcome = self._compare_replicas(before)
        if outcome is not None:
            return outcome
        # The local disks come first, since they need nothing of the shared folder.
        if self.local is not None and self.step != self.local.went_on_from:
            self._write_local(self.local)
        outcome = self._open_folder()
        if outcome is not None:
            return outcome
        return self._write()

    def _remove_unfinished(self) -> None:
        if self.local is not None:
            self.local.abandon(self.step)
        if self.job.rank == 0:
            with suppress(OSError):
                directory.abandon(self.folder, self.step)

    # Rounds 1 and 2: replicas -------------------------------------------------------------------

    def _compare_replicas(self, before: "CheckpointWrite | None") -> Outcome | None:
        """The first round, and the second if it is needed; an outcome if nothing is to be
        written."""
        not_finite = self.sums.not_finite()
        named = f"{self._rank_name()}: {join_some(not_finite)}" if not_finite else None
        self._prepare_round.put([self.sums.digests(), self.sums.inconsistent_ties(), named])
        divergences: list[Divergence] = []
        if self.job.rank == 0:
            reports = self._gather(self._prepare_round)
            # Whoever takes part in this save has received all answers of the one before.
            if before is not None:
                for meeting in before.rounds:
                    meeting.delete()
            digests = [digests_of_rank for digests_of_rank, _, _ in reports]
            divergences = find_divergence(self.state.placements, self.state.layout, digests)
            requests = [[divergence.kind, divergence.reporters] for divergence in divergences]
            apart = [[rank, names] for rank, (_, names, _) in enumerate(reports) if names]
            self._diverged = bool(requests or apart)
            self._note_not_finite([named for _, _, named in reports if named is not None])
            self._prepare_round.broadcast({"requests": requests, "apart": apart})
        answer = self._prepare_round.receive()
        if not answer["requests"] and not answer["apart"]:
            return None
        self._diverged = True
        return self._report_divergence(answer, divergences)

    def _note_not_finite(self, named: Sequence[str]) -> None:
        if named:
            self.notes.append(
                f"warning: the weights of step {self.step} are not all finite, though their loss "
                f"was: {join_some(named)}. No batch has used them so far. An earlier checkpoint "
                "may be whole; this one, and an export, hold them as they are"
            )

    def _report_divergence(
        self, answer: Mapping[str, Any], divergences: Sequence[Divergence]
    ) -> Outcome:
        """The second round: which ranks differ, and in which tensors. `divergences`: on rank 0."""
        kinds = [kind for kind, ranks in answer["requests"] if self.job.rank in ranks]
        sums_of_kinds = {kind: self.sums.of_kind(kind) for kind in kinds}
        self._divergence_round.put([self._rank_name(), sums_of_kinds])
        if self.job.rank == 0:
            reports = self._gather(self._divergence_round)
            names = [name for name, _ in reports]
            lines = [
                f"{names[rank]} holds two different copies of {join_some(tied)}"
                for rank, tied in answer["apart"]
            ]
            for divergence in divergences:
                kind = str(divergence.kind)  # a key of JSON
                sums = {rank: reports[rank][1].get(kind, {}) for rank in divergence.reporters}
                lines.append(describe_divergence(divergence, sums, names))
            self._decide()
            outcome = Outcome(f"{DIVERGED}: {'; '.join(lines)}", diverged=True)
            self._divergence_round.broadcast(asdict(outcome))
        return Outcome(**self._divergence_round.receive())

    # Round 3: local disks -----------------------------------------------------------------------

    def _write_local(self, local: LocalDisk) -> None:
        """Writes to the local disks. If one of them cannot be written, the shared folder
        remains."""
        self._require_wanted()
        report = self._report_of(lambda: local.write(self.step, self.snapshot), local.own)
        self._local_round.put(report)
        if self.job.rank == 0:
            reports = self._gather(self._local_round)
            # If it was given up, a rank may have trained on, and written values of a later step.
            self._require_wanted()
            problems = _problems_in(reports)
            text = None
            if not problems:
                try:
                    text = self._manifest(reports).to_json()
                except FAILURES as error:
                    problems = [self._describe_error(error, local.own)]
            self._local_round.broadcast([problems, text])
        problems, text = self._local_round.receive()
        try:
            if problems:
                local.abandon(self.step)
            else:
                local.finish(self.step, text)
                local.prune()
        except FAILURES as error:
            problem = self._describe_error(error, local.own)
            warn(f"the local checkpoint of step {self.step}: {problem}")
        name = directory.name_of(self.step)
        if problems:
            not_there = f"is not on the local disks: {join_some(problems)}"
            self.notes.append(f"warning: checkpoint {name}: {not_there}")
        else:
            self.notes.append(f"local checkpoint {name}: in {self.elapsed_s:.1f} s")

    # Round 4: the shared folder -----------------------------------------------------------------

    def _open_folder(self) -> Outcome | None:
        """Rank 0 makes the folder to write into; an outcome if it could not."""
        if self.job.rank == 0:
            failed = self._make_folder()
            if failed is not None:
                self._decide()
            self._folder_round.broadcast(None if failed is None else asdict(failed))
        failed_fields = self._folder_round.receive()
        return None if failed_fields is None else Outcome(**failed_fields)

    def _make_folder(self) -> Outcome | None:
        try:
            path = directory.begin(self.folder, self.step)
            needed = checkpoint_bytes(self.state.placements, self.state.layout.world_size)
            free = disk_usage(path).free
            if needed <= free:
                return None
            directory.abandon(self.folder, self.step)
        except TakenError as error:
            return self._failed(error)  # what is there now may be the other job's
        except FAILURES as error:
            with suppress(OSError):
                directory.abandon(self.folder, self.step)
            return self._failed(error)
        return Outcome(
            f"it needs {bytes_text(needed)}, and the file system of {self.folder.absolute()} "
            f"has {bytes_text(free)} free: make room there, or name another folder with "
            "checkpoint.path"
        )

    # Round 5: the files -------------------------------------------------------------------------

    def _write(self) -> Outcome:
        """Each rank writes its file, and when all have, rank 0 makes a checkpoint of them."""
        self._require_wanted()
        path = directory.unfinished_path(self.folder, self.step) / file_of(self.job.rank)
        self._commit_round.put(self._report_of(lambda: self._write_file(path), path))
        self._file_ended = True
        if self.job.rank == 0:
            outcome = self._commit(self._gather(self._commit_round))
            # If the save was given up just now, the checkpoint exists all the same.
            self._decide()
            self._commit_round.broadcast(asdict(outcome))
        return Outcome(**self._commit_round.receive())

    def _write_file(self, path: Path) -> File:
        if self.writing is not None:
            self.writing(self.step, path)
        return write_shard(path, self.snapshot.tensors())

    def _commit(self, reports: Sequence[Mapping[str, Any]]) -> Outcome:
        """On rank 0: writes the manifest and renames the folder, or removes what could not be
        finished."""
        problems = _problems_in(reports)
        failed = Outcome(join_some(problems))
        try:
            if not problems and not self.given_up:
                manifest = self._manifest(reports)
                self.nbytes = manifest.total_bytes
                directory.finish(self.folder, self.step, manifest.to_json(), self.notes.append)
                return Outcome()
        except TakenError as error:
            return self._failed(error)  # what is there now may be the other job's
        except FAILURES as error:
            failed = self._failed(error)
        try:
            directory.abandon(self.folder, self.step)
        except OSError as error:
            also = self._describe_error(error, self.folder)
            return replace(failed, problem=f"{failed.problem}, {also}")
        return failed

    # Steps of several rounds --------------------------------------------------------------------

    def _manifest(self, reports: Sequence[Mapping[str, Any]]) -> Manifest:
        files = {file_of(rank): File(**report) for rank, report in enumerate(reports)}
        return Manifest(
            step=self.step,
            layout=self.state.layout,
            tensors=self.state.placements,
            files=files,
            written=self._written,
            **self.about,
        )

    def _report_of(self, write: Callable[[], File], path: Path) -> dict[str, Any]:
        """This rank's report on its file: size and checksum, or why there is none."""
        try:
            return asdict(write())
        except FAILURES as error:
            return {"problem": self._describe_error(error, path)}

    def _gather(self, meeting: Round) -> list:
        self._gathering = meeting
        reports = meeting.gather()
        self._gathering = None
        return reports

    def _require_wanted(self) -> None:
        if self.given_up:
            raise CancelledError("the save was given up")

    def _decide(self) -> None:
        """On rank 0, before the broadcast that ends the save: only one such broadcast may be made,
        by this thread or by the main thread."""
        if not self._decides.acquire(blocking=False):
            raise CancelledError("the save was given up")

    def _failed(self, error: Exception) -> Outcome:
        """The outcome of an error in the shared folder."""
        problem = self._describe_error(error, self.folder)
        return Outcome(problem, taken=isinstance(error, TakenError))

    def _describe_error(self, error: Exception, path: Path) -> str:
        if isinstance(error, OSError) and error.strerror:
            return f"{self._rank_name()}: {error.filename or path.absolute()}: {error.strerror}"
        return f"{self._rank_name()}: {str(error) or type(error).__name__}"

    def _rank_name(self) -> str:
        return str(replace(self.job, layout=self.state.layout))


def _problems_in(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the ranks that could not write their files say."""
    return [report["problem"] for report in reports if "problem" in report]
