"""Goodput: how much of the wall time of a run went into steps that count, over all of its jobs.

Every second since the run's first start belongs to exactly one of `PARTS`, so that they add up. Rank 0 keeps a ledger
in the run's folder, a line of JSON now and then with what its job has spent so far. A job that was killed wrote no last
line: what it did after its latest one counts as time between jobs. And steps in the ledger that the next job has to do
again are lost from then on.

Rank 0 speaks for all: ranks go through a step together. Times within a job are those of its monotonic clock; between
jobs they are differences of the clocks of the hosts on which rank 0 was.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from meshtrain.disk import write_whole
from meshtrain.progress import duration
from meshtrain.side_file import SideFile

FILE = "goodput.jsonl"
# What a job spends its time with: `startup` until the first step begins, `training` in steps without the wait for
# data, which is `data`; `saving` as far as training waits for it; an `evaluation` is every look at the model.
SPENT = ("startup", "training", "data", "evaluation", "saving")
# And what only a later job can know: steps that were done again, and the time in which there was no job.
PARTS = (*SPENT, "repeated", "between")
EVERY_S, EVERY_SHARE = 10.0, 0.001  # of a job until its next line: so much of a killed one counts as between jobs
LONGEST_LINE = 4096
MOST_LINES = 1_000_000
MOST_SECONDS = 1e11  # three thousand years; the clock counts from 1970


@dataclass(frozen=True)
class Mark:
    """What a job had spent when it had done so many steps of the run.

    Attributes:
        seconds: of each of `SPENT`.
        saved: whether a checkpoint of that step was taken just then, so that a later job may begin here.
        end: how the job ended, if it has: "done", "stopped" or "failed".
    """

    step: int
    seconds: Mapping[str, float]
    saved: bool = False
    end: str | None = None

    @property
    def elapsed(self) -> float:
        return sum(self.seconds.values())


@dataclass
class JobRecord:
    """A job of the run.

    Attributes:
        started: when its process began, in seconds since 1970.
        first: the step that it went on from.
    """

    started: float
    first: int
    marks: list[Mark] = field(default_factory=list)

    @property
    def ended(self) -> float:
        """When its last mark was made."""
        return self.started + (self.marks[-1].elapsed if self.marks else 0.0)


@dataclass(frozen=True)
class Account:
    """How a run has spent its wall time: seconds for each of `PARTS`, over so many jobs."""

    seconds: Mapping[str, float]
    jobs: int

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of training that counts; a fraction."""
        return self.seconds["training"] / self.wall_s if self.wall_s > 0 else 0.0

    def row(self) -> dict[str, float]:
        """For `metrics.jsonl`: `goodput`, `wall_s` and each part."""
        return {"goodput": self.goodput, "wall_s": self.wall_s} | {
            f"wall_{part}_s": seconds for part, seconds in self.seconds.items()
        }

    def plain(self) -> dict[str, float]:
        """For `exit.json`."""
        return self.row() | {"jobs": self.jobs}

    def __str__(self) -> str:
        """`wall time 2h10m in 3 jobs: training 88.1 % (goodput), start-up 3.0 %, ...`."""

        def share(part: str) -> str:
            return f"{100 * self.seconds[part] / self.wall_s if self.wall_s > 0 else 0.0:.1f} %"

        lost = ""
        if self.jobs > 1:
            lost = f", lost to restarts: steps done again {share('repeated')}, between jobs {share('between')}"
        return (
            f"wall time {duration(self.wall_s)} in {self.jobs} job{'s' * (self.jobs > 1)}: "
            f"training {share('training')} (goodput), start-up {share('startup')}, waiting for data {share('data')}, "
            f"evaluation {share('evaluation')}, saving {share('saving')}{lost}"
        )


def account(jobs: Sequence[JobRecord]) -> Account:
    """PURE: the sum over the jobs of a run, in their order; of the last one as far as it is.

    Of each job only that counts which no later one has to do again: what it spent until it had done the steps that the
    later ones went on from. Its start-up was spent in any case.
    """
    total = dict.fromkeys(PARTS, 0.0)
    again_from = math.inf  # the lowest step that a later job went on from
    for i, job in reversed(list(enumerate(jobs))):
        last = job.marks[-1].seconds if job.marks else dict.fromkeys(SPENT, 0.0)
        kept = _until(job, again_from) | {"startup": last["startup"]}
        for part in SPENT:
            total[part] += kept.get(part, 0.0)
            total["repeated"] += last[part] - kept.get(part, 0.0)
        if i > 0 and not _done(jobs[i - 1]):
            total["between"] += max(0.0, job.started - jobs[i - 1].ended)  # hosts' clocks may differ
        again_from = min(again_from, job.first)
    return Account(total, len(jobs))


def _until(job: JobRecord, step: float) -> dict[str, float]:
    """What a job had spent when it had done this step; what it spent on failing came after that."""
    marks = (mark for mark in reversed(job.marks) if mark.step <= step and mark.end != "failed")
    return next((dict(mark.seconds) for mark in marks), {})


def _done(job: JobRecord) -> bool:
    """Whether the run was finished with it: then nobody waited for the next one, which takes it further."""
    return bool(job.marks) and job.marks[-1].end == "done"


# The ledger ---------------------------------------------------------------------------------------------------------


class Ledger:
    """Keeps account of a run while a job of it goes on. All ranks do, those other than 0 for themselves, on no disk."""

    def __init__(
        self,
        folder: Path | None,
        first: int,
        since: float,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            folder: of the run; None writes and reads nothing.
            first: the step that the job goes on from.
            since: when its process began, on the monotonic clock.
        """
        self.note: str | None = None  # what is wrong with the ledger of earlier jobs, for people
        self._monotonic = monotonic
        self._seconds = dict.fromkeys(SPENT, 0.0)
        self._part, self._changed_at = "startup", since
        self._written_at = 0.0  # seconds of this job that are in the ledger
        self._step = first
        self._file: SideFile | None = None
        job = JobRecord(now() - (monotonic() - since), first)
        past: list[JobRecord] = []
        if folder is not None:
            try:
                past, self.note = read(folder / FILE)
                self._file = SideFile(folder / FILE, end=_rewrite(folder / FILE, [*past, job]))
            except OSError as error:
                past = []
                self.note = f"goodput counts this job alone: {FILE} of the run's folder cannot be used ({error})"
        self._before = account([*past, job])

    def about(self) -> Iterator[str]:
        """What rank 0 says at the start."""
        if self.note is not None:
            yield self.note
        if self._before.jobs > 1:
            yield f"until now: {self.account()}"

    def account(self) -> Account:
        """Until now."""
        self._go_on_with(self._part)
        seconds = {part: spent + self._seconds.get(part, 0.0) for part, spent in self._before.seconds.items()}
        return Account(seconds, self._before.jobs)

    def begin(self) -> None:
        """The start-up is over: from now on time is training, but for what `spent` and `step` say."""
        self._go_on_with("training")
        self._write()

    @contextmanager
    def spent(self, part: str) -> Iterator[None]:
        """The time of the body belongs to `part`."""
        before = self._part
        self._go_on_with(part)
        try:
            yield
        finally:
            self._go_on_with(before)

    def step(self, step: int, data_s: float) -> None:
        """Step `step` of the run is done; so many seconds of it were waiting for data."""
        self._go_on_with(self._part)
        data_s = min(data_s, self._seconds["training"])  # a GPU's own clock may round differently
        self._seconds["training"] -= data_s
        self._seconds["data"] += data_s
        self._step = step
        if self._elapsed - self._written_at >= max(EVERY_S, EVERY_SHARE * self._elapsed):
            self._write()

    def saved(self) -> None:
        """A checkpoint of the last step was taken. In the midst of no other step."""
        self._go_on_with(self._part)
        self._write(saved=True)

    def end(self, status: str) -> None:
        """The job ends: "done", "stopped" or "failed"."""
        self._go_on_with(self._part)
        self._write(end=status)

    @property
    def _elapsed(self) -> float:
        return sum(self._seconds.values())

    def _go_on_with(self, part: str) -> None:
        now = self._monotonic()
        self._seconds[self._part] += now - self._changed_at
        self._part, self._changed_at = part, now

    def _write(self, *, saved: bool = False, end: str | None = None) -> None:
        if self._file is None:
            return
        mark = Mark(self._step, dict(self._seconds), saved, end)
        self._written_at = mark.elapsed
        self._file.append(_mark_line(mark).encode())
        if end is not None:
            self._file.close()
            self._file = None  # what comes after the end counts for nothing


def read(path: Path) -> tuple[list[JobRecord], str | None]:
    """The jobs that a ledger tells of, and what is wrong with it, in words.

    It was perhaps cut off in the midst of a line, or somebody has edited it. Nothing that stands in it stops a
    training: lines that are none are left out.

    Raises:
        OSError: it cannot be read.
    """
    if not path.exists():
        return [], None
    if not path.is_file():
        raise OSError("it is no file")
    with path.open("rb") as file:
        # None takes more memory than a line of a ledger, and there are no more of them than of a long run.
        lines = islice(iter(lambda: file.readline(LONGEST_LINE), b""), MOST_LINES)
        jobs, bad = _parse(lines)
    return jobs, f"goodput: {path} has {bad} lines that are none of a ledger; they are left out" if bad else None


def _parse(lines: Iterable[bytes]) -> tuple[list[JobRecord], int]:
    """PURE: the jobs, and the number of lines that are none."""
    jobs: list[JobRecord] = []
    bad = 0
    for line in lines:
        if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            break  # the last one: its writer was killed
        found = _job_or_mark(line)
        if isinstance(found, JobRecord):
            jobs.append(found)
        elif found is not None and jobs and _follows(jobs[-1], found):
            jobs[-1].marks.append(found)
        else:
            bad += 1
    return jobs, bad


def _job_or_mark(line: bytes) -> JobRecord | Mark | None:
    """What a line says, if it is one of a ledger."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    step = found.get("step")
    if type(step) is not int or not 0 <= step < 2**63:
        return None
    if "started" in found:
        return JobRecord(float(found["started"]), step) if _is_time(found["started"]) else None
    seconds = {part: found.get(f"{part}_s") for part in SPENT}
    saved, end = found.get("saved", False), found.get("end")
    if not all(map(_is_time, seconds.values())) or type(saved) is not bool or not isinstance(end, str | None):
        return None
    return Mark(step, {part: float(spent) for part, spent in seconds.items()}, saved, end)  # type: ignore[arg-type]


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < MOST_SECONDS


def _follows(job: JobRecord, mark: Mark) -> bool:
    """Whether a job can have come from its last mark to this one: it has not gone back, and no time was given back."""
    before = job.marks[-1] if job.marks else Mark(job.first, dict.fromkeys(SPENT, 0.0))
    return mark.step >= before.step and mark.elapsed >= before.elapsed and before.end is None


def _rewrite(path: Path, jobs: Sequence[JobRecord]) -> int:
    """Writes the ledger anew with what later jobs may need of it: the marks of checkpoints, and each job's last.

    Returns:
        its bytes.
    """
    lines = []
    for job in jobs:
        lines.append(json.dumps({"started": job.started, "step": job.first}) + "\n")
        lines += [_mark_line(mark) for mark in job.marks if mark.saved or mark is job.marks[-1]]
    return write_whole(path, "".join(lines))


def _mark_line(mark: Mark) -> str:
    values: dict[str, Any] = {"step": mark.step} | {f"{part}_s": spent for part, spent in mark.seconds.items()}
    if mark.saved:
        values["saved"] = True
    if mark.end is not None:
        values["end"] = mark.end
    return json.dumps(values) + "\n"
