"""One try to write a checkpoint, as the thread of a rank makes it while training goes on.

The ranks talk through the job's store, in rounds: no collective is in the way of those of the training, and a rank
that computes need not be waited for. First all compare what should be equal and rank 0 makes the folder; then each
writes its file; then all know whether each could, and only then the checkpoint gets its name.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from shutil import disk_usage
from typing import Any

from meshtrain.checkpoint import folder
from meshtrain.checkpoint.manifest import File, Manifest, file_of
from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.replicas import Sums, suspicions, verdict
from meshtrain.checkpoint.shards import BLOCK, write_shard
from meshtrain.checkpoint.snapshot import Snapshot
from meshtrain.checkpoint.state import State
from meshtrain.errors import DamagedError
from meshtrain.rounds import Round
from meshtrain.runtime import Job
from meshtrain.weights import Entry, some

DIVERGED = "what must be equal on several ranks is not"
PER_ENTRY, PER_BLOCK, PER_FILE = 120, 11, 4096  # bytes: of a header besides names; what file systems round up to

# What the machine is to blame for: the save has failed, and the run may go on.
FAILS = (OSError, DamagedError, MemoryError, folder.TakenError)


@dataclass
class Attempt:
    """What a save needs to know, and what came of it.

    Attributes:
        about: the manifest's fields that only the run knows.
        writing: called before this rank writes its file; an OSError is a write that failed.
        problem: why there is no checkpoint, in the same words on every rank.
        limit_s: seconds after which it is given up.
        given_up: whether it was; its thread may still wait for the disk.
        diverged: whether ranks that must hold the same do not: the run has gone wrong before.
        taken: whether another job has taken the folder.
        error: what a thread died of; the job cannot go on.
        written_s: seconds from the snapshot until all was on disk.
        waited_s: seconds for which training waited for the snapshot.
        notes: lines for rank 0 to say.
    """

    state: State
    folder: Path
    job: Job
    step: int
    about: Mapping[str, Any]
    snapshot: Snapshot
    sums: Sums
    writing: Callable[[int, Path], None] | None = None
    limit_s: float = math.inf
    given_up: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    problem: str | None = None
    diverged: bool = False
    taken: bool = False
    error: BaseException | None = None
    written_s: float = 0.0
    waited_s: float = 0.0
    nbytes: int = 0
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._opening, self._telling, self._closing = (self.job.round() for _ in range(3))
        self._begun = time.perf_counter()
        self._word = threading.Lock()  # on rank 0, of whichever thread says what has come of it
        self._collecting: Round | None = None  # on rank 0
        self._wrote = False  # this rank its file, or it has failed to

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._begun

    def look(self) -> bool:
        """For the main thread: whether it is known what came of this. After `limit_s` rank 0 gives it up for all."""
        if self.done.is_set() or self.given_up:
            return True
        if self.elapsed_s < self.limit_s:
            return False
        if self.job.rank == 0:
            if not self._word.acquire(blocking=False):
                return False  # the thread is just saying it
            self.problem = f"it took longer than {self.limit_s:g} s (checkpoint.timeout_s): {self._held_up()}"
            self.given_up = True  # before anybody hears of it: what the thread does then hangs on it
            self._closing.answer([self.problem, False, self.diverged, True])
        elif self._wrote or not self._closing.is_answered:
            return False  # the thread hears it
        else:
            self._hear()
        self.cancel()
        return True

    def _held_up(self) -> str:
        """On rank 0: who is waited for."""
        meeting = self._collecting  # which the thread may set to None meanwhile
        late = [] if meeting is None else meeting.missing()
        what = "has not begun to write"
        if meeting is self._closing:
            what = "has not written its file"
        elif self.diverged:
            what = "has not said what it holds"
        who = f"rank {some([str(rank) for rank in late])} {what}" if late else f"{self._who()} has not finished it"
        return f"{who}; {DIVERGED}" if self.diverged else who

    def _decide(self) -> None:
        """On rank 0, in the thread, before the word that ends this: there is one word only."""
        if not self._word.acquire(blocking=False):
            raise CancelledError("the save was given up")

    def _collect(self, meeting: Round) -> list:
        self._collecting = meeting
        found = meeting.collect()
        self._collecting = None
        return found

    @property
    def _rounds(self) -> list[Round]:
        return [self._opening, self._telling, self._closing]

    def look_while_waiting(self) -> None:
        """There is no thread but the main one: it looks while it waits for other ranks."""
        for meeting in self._rounds:
            meeting.meanwhile = self.look

    def cancel(self) -> None:
        """The thread stops waiting for others."""
        for meeting in self._rounds:
            meeting.cancel()

    def forget(self) -> None:
        """Rank 0 clears the store of what all ranks have read: they have begun another attempt since."""
        for meeting in self._rounds:
            meeting.forget()

    def run(self, before: "Attempt | None") -> None:
        """The whole of it, in a thread; `done` is set at its end, whatever happens."""
        try:
            self.waited_s += self.snapshot.wait()
            problem = self._open(before) or self._write()
            if not self.given_up:
                self.problem, self.written_s = problem, self.elapsed_s
        except BaseException as error:  # the main thread raises it
            self.error = error
        finally:
            if self.given_up and self.job.rank == 0:
                with suppress(OSError):
                    folder.abandon(self.folder, self.step)
            self.done.set()

    def _open(self, before: "Attempt | None") -> str | None:
        """All hear whether they hold the same and whether there is a folder to write into."""
        self._opening.give([self.sums.digests(), self.sums.apart()])
        if self.job.rank == 0:
            told = self._collect(self._opening)
            if before is not None:
                before.forget()
            suspects = suspicions(self.state.placements, self.state.layout, [digests for digests, _ in told])
            asked = [[one.kind, one.asked] for one in suspects]
            apart = [[rank, names] for rank, (_, names) in enumerate(told) if names]
            problem = None if asked or apart else self._make_folder()
            self.diverged = bool(asked or apart)
            if problem:
                self._decide()
            self._opening.answer({"asked": asked, "apart": apart, "problem": problem, "taken": self.taken})
        answer = self._opening.answered()
        self.taken = answer["taken"]
        if not answer["asked"] and not answer["apart"]:
            return answer["problem"]
        self.diverged = True
        self._telling.give(
            [self._who(), {kind: self.sums.of(kind) for kind, ranks in answer["asked"] if self.job.rank in ranks}]
        )
        if self.job.rank == 0:
            who, sums = zip(*self._collect(self._telling), strict=True)
            lines = [f"{who[rank]} holds two different copies of {some(names)}" for rank, names in apart]
            lines += [
                verdict(one, {rank: sums[rank].get(str(one.kind), {}) for rank in one.asked}, who) for one in suspects
            ]
            self._decide()
            self._telling.answer(f"{DIVERGED}: " + "; ".join(lines))
        return self._telling.answered()

    def _make_folder(self) -> str | None:
        """Rank 0 makes the folder to write into, if there is room for what will be in it."""
        try:
            path = folder.begin(self.folder, self.step)
            needed, free = self.needed, disk_usage(path).free
            if needed > free:
                folder.abandon(self.folder, self.step)
                return (
                    f"it needs {size(needed)}, and the file system of {self.folder.absolute()} has {size(free)} free: "
                    "make room there, or name another folder with checkpoint.path"
                )
        except FAILS as error:
            return self._told(error, self.folder)
        return None

    @property
    def needed(self) -> int:
        """Bytes of a checkpoint, headers included."""
        return needed(self.state.placements, self.state.layout.world_size)

    def _write(self) -> str | None:
        """Each rank writes its file; when all have, rank 0 makes a checkpoint of them."""
        path = self.folder / f".{folder.name_of(self.step)}.tmp" / file_of(self.job.rank)
        told: dict[str, Any]
        if self.given_up:
            raise CancelledError("the save was given up")
        try:
            if self.writing is not None:
                self.writing(self.step, path)
            file = write_shard(path, self.snapshot.tensors())
            told = {"size": file.size, "crc32": file.crc32}
        except FAILS as error:
            told = {"problem": self._told(error, path)}
        self._closing.give(told)
        self._wrote = True
        if self.job.rank == 0:
            problem = self._finish(self._collect(self._closing))
            self._decide()  # if it was given up just now, there is a checkpoint all the same
            self._closing.answer([problem, self.taken, False, False])
        return self._hear()

    def _hear(self) -> str | None:
        """Rank 0's word on all of it: the problem, if there is one."""
        self.problem, self.taken, self.diverged, given_up = self._closing.answered()
        self.given_up = given_up  # after the problem: the main thread looks at this first
        return self.problem

    def _finish(self, told: Sequence[Mapping[str, Any]]) -> str | None:
        """Rank 0: the manifest and the name, or the end of what could not be written."""
        problems = [each["problem"] for each in told if "problem" in each]
        try:
            if not problems and not self.given_up:
                files = {file_of(rank): File(**each) for rank, each in enumerate(told)}
                self.nbytes = sum(file.size for file in files.values())
                text = self._manifest(files).to_json()
                folder.finish(self.folder, self.step, text, self.notes.append)
                return None
            folder.abandon(self.folder, self.step)
        except FAILS as error:
            problems.append(self._told(error, self.folder))
        return some(problems)

    def _manifest(self, files: Mapping[str, File]) -> Manifest:
        written = datetime.now(UTC).isoformat(timespec="seconds")
        return Manifest(
            step=self.step,
            layout=self.state.layout,
            tensors=self.state.placements,
            files=files,
            written=written,
            **self.about,
        )

    def _told(self, error: Exception, path: Path) -> str:
        self.taken = isinstance(error, folder.TakenError)
        if isinstance(error, OSError) and error.strerror:
            return f"{self._who()}: {error.filename or path.absolute()}: {error.strerror}"
        return f"{self._who()}: {str(error) or type(error).__name__}"

    def _who(self) -> str:
        return str(replace(self.job, layout=self.state.layout))


def needed(placements: Mapping[str, Placement], ranks: int) -> int:
    """How many bytes a checkpoint of these tensors takes, headers included, and a little more rather than less."""
    tensors = sum(Entry(name, one.dtype, one.shape).nbytes for name, one in placements.items())
    header = PER_FILE + sum(2 * len(name) + PER_ENTRY for name in placements)
    return tensors + tensors // BLOCK * PER_BLOCK + ranks * header


def size(nbytes: float) -> str:
    """`1.2 GiB`, for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
