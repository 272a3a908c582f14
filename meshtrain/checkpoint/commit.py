"""The commit protocol of one checkpoint, run by a thread of each rank while training continues.

The ranks communicate through the job's store, so that no collective interferes with training's. Up
to six rounds:

1. prepare: ranks compare digests of the tensors that must be equal on several ranks;
2. divergence, only if something was not equal: the ranks concerned report their sums, and the save
has failed; 3. local, only with local disks: each rank has written its file to its local disk, and
all rename theirs into place; 4. folder: rank 0 has made the folder to write into, or could not; 5.
room, only with `make_room`: ranks whose disk was full write again if an older checkpoint could be
deleted; 6. commit: each rank has written its file, or could not; if all have, rank 0 renames the
checkpoint into place.
"""

import errno
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
from typing import Any, TypeVar

from meshtrain.checkpoint import directory
from meshtrain.checkpoint.local import LocalDisk
from meshtrain.checkpoint.manifest import File, Manifest, file_of
from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.replica_check import Sums, describe_divergence, find_divergence
from meshtrain.checkpoint.shard_file import BLOCK, write_shard
from meshtrain.checkpoint.staging import Snapshot
from meshtrain.checkpoint.state import State
from meshtrain.errors import DamagedError, bytes_text, join_some
from meshtrain.huggingface.safetensors import Entry
from meshtrain.job.process import Job
from meshtrain.job.storage import warn
from meshtrain.job.store import Round

T = TypeVar("T")

DIVERGED = "what must be equal on several ranks is not"
# bytes of a header besides names; the unit file systems round up to
PER_ENTRY, PER_BLOCK, PER_FILE = (
    120,
    11,
    4096,
)

# Failures of the machine: the save has failed, and the run may continue.
FAILURES = (OSError, DamagedError, MemoryError, directory.TakenError)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class CheckpointWrite:
    """One save of this rank: its inputs and its outcome. A thread calls `run`; the main thread all
    other methods."""

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
    # on rank 0: deletes an older checkpoint and names it, or None
    make_room: Callable[[], str | None] | None = None
    limit_s: float = math.inf  # seconds after which the save is given up
    given_up: bool = False  # the save was given up; its thread may still wait for the disk
    done: threading.Event = field(default_factory=threading.Event)
    problem: str | None = None  # why there is no checkpoint, in the same words on every rank
    # ranks that must hold the same values do not: the run has gone wrong before
    diverged: bool = False
    taken: bool = False  # another job has taken the folder
    error: BaseException | None = None  # the error that ended the thread; the job cannot continue
    written_s: float = 0.0  # from the snapshot until everything was on disk
    waited_s: float = 0.0  # time that training waited for the snapshot
    nbytes: int = 0
    notes: list[str] = field(default_factory=list)  # lines for rank 0 to print

    def __post_init__(self) -> None:
        self.rounds = [self.job.round() for _ in range(6)]
        self._prepare_round, self._divergence_round, self._local_round = self.rounds[:3]
        self._folder_round, self._room_round, self._commit_round = self.rounds[3:]
        self._written = datetime.now(UTC).isoformat(timespec="seconds")
        self._start = time.perf_counter()
        # on rank 0: acquired once, by the thread that decides the outcome
        self._outcome = threading.Lock()
        self._gathering: Round | None = None  # on rank 0: the round whose reports it waits for
        self._file_ended = False  # whether this rank has written its file, or failed to

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    def poll(self) -> bool:
        """Whether the outcome is known. After `limit_s` rank 0 gives the save up for all ranks."""
        if self.done.is_set() or self.given_up:
            return True
        if self.elapsed_s < self.limit_s:
            return False
        if self.job.rank == 0:
            if not self._outcome.acquire(blocking=False):
                return False  # the thread is just broadcasting the outcome
            self.problem = (
                f"it took longer than {self.limit_s:g} s (checkpoint.timeout_s): "
                f"{self._describe_delay()}"
            )
            # Set before any rank hears of it, since the thread then acts on it.
            self.given_up = True
            self._commit_round.broadcast([self.problem, False, self.diverged, True])
        elif self._file_ended or not self._commit_round.has_answer:
            return False  # the thread receives the outcome
        else:
            self._receive_outcome()
        self.cancel()
        return True

    def _describe_delay(self) -> str:
        gathering = self._gathering  # the thread may set it to None meanwhile
        late = [] if gathering is None else gathering.missing()
        missing = "has not begun to write"
        if gathering in (self._local_round, self._room_round, self._commit_round):
            missing = "has not written its file"
        elif self.diverged:
            missing = "has not said what it holds"
        delay = f"{self._rank_name()} has not finished it"
        if late:
            delay = f"rank {join_some([str(rank) for rank in late])} {missing}"
        return f"{delay}; {DIVERGED}" if self.diverged else delay

    def cancel(self) -> None:
        for meeting in self.rounds:
            meeting.cancel()

    def forget(self) -> None:
        """On rank 0: deletes this save's entries in the store; all ranks have read them, and begun
        another save."""
        for meeting in self.rounds:
            meeting.delete()

    def run(self, before: "CheckpointWrite | None") -> None:
        """Runs the whole protocol; sets `done` at its end, whatever happens."""
        try:
            self.waited_s += self.snapshot.wait()
            problem = self._prepare(before)
            if problem is None and self.local is not None and self.step != self.local.went_on_from:
                self._write_local(self.local)  # first, since it needs nothing of the shared folder
            problem = problem or self._open_folder() or self._write()
            if not self.given_up:
                self.problem, self.written_s = problem, self.elapsed_s
        except BaseException as error:  # the main thread raises it
            self.error = error
        finally:
            if self.given_up and self.local is not None:
                self.local.abandon(self.step)
            if self.given_up and self.job.rank == 0:
                with suppress(OSError):
                    directory.abandon(self.folder, self.step)
            self.done.set()

    def _prepare(self, before: "CheckpointWrite | None") -> str | None:
        """The first round, and the second if it is needed; returns why nothing is to be written, or
        None."""
        bad = self.sums.not_finite()
        named = f"{self._rank_name()}: {join_some(bad)}" if bad else None
        self._prepare_round.put([self.sums.digests(), self.sums.inconsistent_ties(), named])
        if self.job.rank == 0:
            reports = self._gather(self._prepare_round)
            if before is not None:
                before.forget()
            divergences = find_divergence(
                self.state.placements, self.state.layout, [digests for digests, *_ in reports]
            )
            requests = [[divergence.kind, divergence.reporters] for divergence in divergences]
            apart = [[rank, names] for rank, (_, names, _) in enumerate(reports) if names]
            self.diverged = bool(requests or apart)
            if not_finite := [named for *_, named in reports if named is not None]:
                self.notes.append(
                    f"warning: the weights of step {self.step} are not all finite, though their "
                    "loss was: "
                    f"{join_some(not_finite)}. No batch has used them so far. An earlier "
                    "checkpoint may be whole; "
                    "this one, and an export, hold them as they are"
                )
            self._prepare_round.broadcast({"requests": requests, "apart": apart})
        answer = self._prepare_round.receive()
        if not answer["requests"] and not answer["apart"]:
            return None
        self.diverged = True
        kinds = [kind for kind, ranks in answer["requests"] if self.job.rank in ranks]
        self._divergence_round.put(
            [self._rank_name(), {kind: self.sums.of_kind(kind) for kind in kinds}]
        )
        if self.job.rank == 0:
            names, sums = zip(*self._gather(self._divergence_round), strict=True)
            lines = [
                f"{names[rank]} holds two different copies of {join_some(tied)}"
                for rank, tied in apart
            ]
            for divergence in divergences:
                of_kind = {
                    rank: sums[rank].get(str(divergence.kind), {}) for rank in divergence.reporters
                }
                lines.append(describe_divergence(divergence, of_kind, names))
            self._claim_outcome()
            self._divergence_round.broadcast(f"{DIVERGED}: " + "; ".join(lines))
        return self._divergence_round.receive()

    def _open_folder(self) -> str | None:
        if self.job.rank == 0:
            problem = self._make_folder()
            if problem:
                self._claim_outcome()
            self._folder_round.broadcast([problem, self.taken])
        problem, self.taken = self._folder_round.receive()
        return problem

    def _make_folder(self) -> str | None:
        try:
            path = self._with_room(lambda: directory.begin(self.folder, self.step))
            needed = checkpoint_bytes(self.state.placements, self.state.layout.world_size)
            while needed > (free := disk_usage(path).free) and self._has_made_room():
                pass
            if needed > free:
                directory.abandon(self.folder, self.step)
                return (
                    f"it needs {bytes_text(needed)}, and the file system of "
                    f"{self.folder.absolute()} "
                    f"has {bytes_text(free)} free: make room there, or name another folder with "
                    "checkpoint.path"
                )
        except FAILURES as error:
            return self._describe_error(error, self.folder)
        return None

    def _with_room(self, write: Callable[[], T]) -> T:
        """On rank 0: the result of `write`, which is called once more if the disk was full and room
        could be made."""
        try:
            return write()
        except OSError as error:
            if error.errno not in NO_ROOM or not self._has_made_room():
                raise
        return write()

    def _has_made_room(self) -> bool:
        if self.make_room is None or self.given_up:
            return False
        try:
            note = self.make_room()
        except FAILURES as error:
            self.notes.append(
                "warning: no older checkpoint could be deleted: "
                f"{self._describe_error(error, self.folder)}"
            )
            return False
        self.notes += [] if note is None else [note]
        return note is not None

    def _write_local(self, local: LocalDisk) -> None:
        """The local round. It is separate, since the shared folder remains if a rank cannot write
        to its local disk."""
        self._require_wanted()
        self._local_round.put(
            self._report_of(lambda: local.write(self.step, self.snapshot), local.own)
        )
        if self.job.rank == 0:
            reports = self._gather(self._local_round)
            # else a rank may have trained on, and written values of a later step
            self._require_wanted()
            problems = [report["problem"] for report in reports if "problem" in report]
            self._local_round.broadcast(
                [problems, None if problems else self._manifest(reports).to_json()]
            )
        problems, text = self._local_round.receive()
        try:
            if problems:
                local.abandon(self.step)
            else:
                local.finish(self.step, text)
                local.prune()
        except FAILURES as error:
            warn(
                f"the local checkpoint of step {self.step}: "
                f"{self._describe_error(error, local.own)}"
            )
        done = (
            f"is not on the local disks: {join_some(problems)}"
            if problems
            else f"in {self.elapsed_s:.1f} s"
        )
        self.notes.append(
            f"{'warning: ' if problems else 'local '}checkpoint {directory.name_of(self.step)}: "
            f"{done}"
        )

    def _manifest(self, reports: Sequence[Mapping[str, Any]]) -> Manifest:
        files, state = (
            {file_of(rank): File(**report) for rank, report in enumerate(reports)},
            self.state,
        )
        return Manifest(
            self.step, state.layout, state.placements, files, self._written, **self.about
        )

    def _write(self) -> str | None:
        """The last rounds: each rank writes its file, and when all have, rank 0 makes a checkpoint
        of them."""
        self._require_wanted()
        path = directory.unfinished_path(self.folder, self.step) / file_of(self.job.rank)
        report = self._report_of(lambda: self._write_file(path), path)
        if self.make_room is not None:
            self._room_round.put(report)
            if self.job.rank == 0:
                full = [
                    report["full"]
                    for report in self._gather(self._room_round)
                    if "problem" in report
                ]
                self._room_round.broadcast(bool(full) and all(full) and self._has_made_room())
            if self._room_round.receive() and "problem" in report:
                report = self._report_of(lambda: self._write_file(path, again=True), path)
        report.pop("full", None)
        self._commit_round.put(report)
        self._file_ended = True
        if self.job.rank == 0:
            problem = self._commit(self._gather(self._commit_round))
            # if the save was given up just now, the checkpoint exists all the same
            self._claim_outcome()
            self._commit_round.broadcast([problem, self.taken, False, False])
        return self._receive_outcome()

    def _write_file(self, path: Path, again: bool = False) -> File:
        if again:
            path.unlink(missing_ok=True)
        elif self.writing is not None:
            self.writing(self.step, path)
        return write_shard(path, self.snapshot.tensors())

    def _report_of(self, write: Callable[[], File], path: Path) -> dict[str, Any]:
        """This rank's report on its file: size and checksum, or why there is none, and whether a
        disk was full."""
        try:
            return asdict(write())
        except FAILURES as error:
            full = isinstance(error, OSError) and error.errno in NO_ROOM
            return {"problem": self._describe_error(error, path), "full": full}

    def _commit(self, reports: Sequence[Mapping[str, Any]]) -> str | None:
        """On rank 0: writes the manifest and renames the folder, or removes what could not be
        finished."""
        problems = [report["problem"] for report in reports if "problem" in report]
        try:
            if not problems and not self.given_up:
                manifest = self._manifest(reports)
                self.nbytes = manifest.total_bytes
                text = manifest.to_json()
                self._with_room(
                    lambda: directory.finish(self.folder, self.step, text, self.notes.append)
                )
                return None
            directory.abandon(self.folder, self.step)
        except FAILURES as error:
            problems.append(self._describe_error(error, self.folder))
        return join_some(problems)

    def _gather(self, meeting: Round) -> list:
        self._gathering = meeting
        reports = meeting.gather()
        self._gathering = None
        return reports

    def _require_wanted(self) -> None:
        if self.given_up:
            raise CancelledError("the save was given up")

    def _claim_outcome(self) -> None:
        """On rank 0, in the thread, before the broadcast that ends the save: only one such
        broadcast may be made."""
        if not self._outcome.acquire(blocking=False):
            raise CancelledError("the save was given up")

    def _receive_outcome(self) -> str | None:
        self.problem, self.taken, self.diverged, given_up = self._commit_round.receive()
        self.given_up = given_up  # set after the problem: the main thread reads `given_up` first
        return self.problem

    def _describe_error(self, error: Exception, path: Path) -> str:
        self.taken = isinstance(error, directory.TakenError)
        if isinstance(error, OSError) and error.strerror:
            return f"{self._rank_name()}: {error.filename or path.absolute()}: {error.strerror}"
        return f"{self._rank_name()}: {str(error) or type(error).__name__}"

    def _rank_name(self) -> str:
        return str(replace(self.job, layout=self.state.layout))


def checkpoint_bytes(placements: Mapping[str, Placement], ranks: int) -> int:
    """Bytes that a checkpoint of these tensors takes, headers included, slightly overestimated."""
    tensors = sum(
        Entry(name, tensor.dtype, tensor.shape).nbytes for name, tensor in placements.items()
    )
    header = PER_FILE + sum(2 * len(name) + PER_ENTRY for name in placements)
    return tensors + tensors // BLOCK * PER_BLOCK + ranks * header
