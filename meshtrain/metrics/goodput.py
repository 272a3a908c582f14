"""Goodput: how much of a run's wall time, over all of its jobs, went into steps that count.

Every second since the run's first start belongs to exactly one of `PARTS`. Rank 0 keeps a ledger in
the run's folder. Time of a killed job after its last line counts as between jobs, and time in steps
that are repeated later is lost.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from meshtrain.errors import plural
from meshtrain.job.parsing import parse_json
from meshtrain.job.storage import SideFile, open_guarded, write_whole
from meshtrain.metrics.progress import duration

FILE = "goodput.jsonl"
# `startup`: until the first step begins; `compile`: torch.compile on rank 0; `training`: steps
# minus that and `data`.
SPENT = ("startup", "compile", "training", "data", "evaluation", "saving")
# Known only to a later job: repeated steps, and time without a job.
PARTS = (*SPENT, "repeated", "between")
# Time of a job between two lines, at least: what a killed job loses of it counts as `between`.
EVERY_S = 10.0
EVERY_SHARE = 0.001  # of the job's time until then
LONGEST_LINE = 4096
MOST_LINES = 1_000_000
MOST_SECONDS = 1e11  # three thousand years; the clock counts from 1970


@dataclass(frozen=True)
class GoodputRecord:
    """The time that a job had spent when step `step` of the run was done."""

    step: int
    seconds: Mapping[str, float]  # of each of `SPENT`
    # whether a checkpoint of that step was just taken, from which a later job may resume
    saved: bool = False
    end: str | None = None  # how the job ended, if it has: "done", "stopped" or "failed"

    @property
    def elapsed(self) -> float:
        return sum(self.seconds.values())


@dataclass
class JobRecord:
    """A job of the run, which `started` (in seconds since 1970) from the step `first`."""

    started: float
    first: int
    marks: list[GoodputRecord] = field(default_factory=list)

    @property
    def last(self) -> GoodputRecord:
        if self.marks:
            return self.marks[-1]
        return GoodputRecord(self.first, dict.fromkeys(SPENT, 0.0))


@dataclass(frozen=True)
class GoodputSummary:
    """How a run has spent its wall time: seconds for each of `PARTS`, over `jobs` jobs."""

    seconds: Mapping[str, float]
    jobs: int

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The fraction of the wall time spent in training that counts."""
        return self.seconds["training"] / self.wall_s if self.wall_s > 0 else 0.0

    def row(self) -> dict[str, float]:
        """For `metrics.jsonl`: `goodput`, `wall_s` and each part."""
        return {"goodput": self.goodput, "wall_s": self.wall_s} | {
            f"wall_{part}_s": seconds for part, seconds in self.seconds.items()
        }

    def __str__(self) -> str:
        """`wall time 2h10m in 3 jobs: training 88.1 % (goodput), start-up 3.0 %, ...`."""

        def share(part: str) -> str:
            fraction = self.seconds[part] / self.wall_s if self.wall_s > 0 else 0.0
            return f"{100 * fraction:.1f} %"

        parts = [f"training {share('training')} (goodput)", f"start-up {share('startup')}"]
        if self.seconds["compile"] > 0:
            parts.append(f"compiling {share('compile')}")
        parts += [
            f"waiting for data {share('data')}",
            f"evaluation {share('evaluation')}",
            f"saving {share('saving')}",
        ]
        if self.jobs > 1:
            parts.append(f"lost to restarts: steps done again {share('repeated')}")
            parts.append(f"between jobs {share('between')}")
        return (
            f"wall time {duration(self.wall_s)} in {plural(self.jobs, 'job')}: {', '.join(parts)}"
        )


def summarize(jobs: Sequence[JobRecord]) -> GoodputSummary:
    """The sum over the jobs of a run, in order; the last one may still run. A job's time counts up
    to the step from which a later job resumed, as do its start-up and compiling; the rest is
    `repeated`. A pure function."""
    total = dict.fromkeys(PARTS, 0.0)
    # Backwards: what a job has done is kept up to the step from which any later one resumed.
    again_from = math.inf  # the lowest step from which a later job resumed
    for i in reversed(range(len(jobs))):
        job = jobs[i]
        spent = job.last.seconds
        kept = _until(job, again_from)
        for part in ("startup", "compile"):  # these were needed, whatever came of the steps
            kept[part] = spent[part]
        for part in SPENT:
            total[part] += kept[part]
            total["repeated"] += spent[part] - kept[part]
        if i > 0 and jobs[i - 1].last.end != "done":  # a finished run may be extended later
            before = jobs[i - 1]
            gap = job.started - before.started - before.last.elapsed
            total["between"] += max(0.0, gap)  # hosts' clocks may differ
        again_from = min(again_from, job.first)
    return GoodputSummary(total, len(jobs))


def _until(job: JobRecord, step: float) -> dict[str, float]:
    """The time that a job had spent when this step was done, without the time that it spent on
    failing."""
    for mark in reversed(job.marks):
        if mark.step <= step and mark.end != "failed":
            return dict(mark.seconds)
    return dict.fromkeys(SPENT, 0.0)


class GoodputTracker:
    """Accounts for a run's time in each of its jobs; ranks other than 0 do so for themselves,
    without a ledger."""

    def __init__(self, folder: Path | None, first: int, since: float, clock: Any = time) -> None:
        """`folder`: None: no ledger. `first`: the step that the job resumes from. `since`: its
        start, monotonic."""
        self.note: str | None = None  # what is wrong with the ledger of earlier jobs
        self._clock = clock
        self._seconds = dict.fromkeys(SPENT, 0.0)
        self._part = "startup"
        self._changed_at = since
        self._written_at = 0.0  # seconds of this job that are in the ledger
        self.finished_step = first  # the last one whose result is known
        self._file: SideFile | None = None
        job = JobRecord(clock.time() - (clock.monotonic() - since), first)
        past: list[JobRecord] = []
        if folder is not None:
            try:
                past, self.note = read(folder / FILE)
                self._file = SideFile(folder / FILE, end=_rewrite(folder / FILE, [*past, job]))
            except OSError as error:
                past = []
                self.note = (
                    f"goodput counts this job alone: {FILE} of the run's folder cannot be used "
                    f"({error})"
                )
        self._before = summarize([*past, job])

    def about(self) -> Iterator[str]:
        if self.note is not None:
            yield self.note
        if self._before.jobs > 1:
            yield f"until now: {self.summary()}"

    def summary(self) -> GoodputSummary:
        self._continue_with(self._part)
        seconds = {
            part: spent + self._seconds.get(part, 0.0)
            for part, spent in self._before.seconds.items()
        }
        return GoodputSummary(seconds, self._before.jobs)

    def begin(self) -> None:
        """The start-up is over: from now on time counts as training, except where `phase` and
        `finish_step` differ."""
        self._continue_with("training")
        self._write()

    @contextmanager
    def phase(self, part: str) -> Iterator[None]:
        before = self._part
        self._continue_with(part)
        try:
            yield
        finally:
            self._continue_with(before)

    def finish_step(self, step: int, data_s: float) -> None:
        """Step `step` of the run is done; `data_s` seconds of it were spent waiting for data."""
        self._continue_with(self._part)
        data_s = min(data_s, self._seconds["training"])  # a GPU's own clock may round differently
        self._seconds["training"] -= data_s
        self._seconds["data"] += data_s
        self.finished_step = step
        if self._elapsed - self._written_at >= max(EVERY_S, EVERY_SHARE * self._elapsed):
            self._write()

    def saved(self) -> None:
        """A checkpoint of the last step was taken. Not to be called during another step."""
        self._write(saved=True)

    def end(self, status: str) -> None:
        self._write(end=status)

    @property
    def _elapsed(self) -> float:
        return sum(self._seconds.values())

    def _continue_with(self, part: str) -> None:
        now = self._clock.monotonic()
        self._seconds[self._part] += now - self._changed_at
        self._part = part
        self._changed_at = now

    def _write(self, *, saved: bool = False, end: str | None = None) -> None:
        self._continue_with(self._part)
        if self._file is None:
            return
        mark = GoodputRecord(self.finished_step, dict(self._seconds), saved, end)
        self._written_at = mark.elapsed
        self._file.append(_mark_line(mark).encode())
        if end is not None:
            self._file.close()
            self._file = None  # time after the end does not count


def read(path: Path) -> tuple[list[JobRecord], str | None]:
    """The jobs of a ledger, and what is wrong with it, in words; bad lines are skipped. Raises
    OSError."""
    jobs: list[JobRecord] = []
    bad = 0
    if not os.path.lexists(path):
        return jobs, None
    with open(open_guarded(path), "rb") as file:
        # A damaged file takes no more memory than a ledger: length and number of lines are limited.
        for line in islice(iter(lambda: file.readline(LONGEST_LINE), b""), MOST_LINES):
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                break  # the last line: its writer was killed
            record = _job_or_mark(line)
            if isinstance(record, JobRecord):
                jobs.append(record)
            elif record is not None and jobs and _follows(jobs[-1], record):
                jobs[-1].marks.append(record)
            else:
                bad += 1
    if bad:
        return jobs, f"goodput: {path} has {bad} lines that are none of a ledger; they are left out"
    return jobs, None


def _job_or_mark(line: bytes) -> JobRecord | GoodputRecord | None:
    """What a line of a ledger says; None: it is none."""
    try:
        values = parse_json(line)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    step = values.get("step")
    if type(step) is not int or not 0 <= step < 2**63:
        return None
    if "started" in values:
        started = values["started"]
        return JobRecord(float(started), step) if _is_time(started) else None

    values.setdefault("compile_s", 0.0)  # ledgers of earlier versions do not have it
    seconds: dict[str, float] = {}
    for part in SPENT:
        spent = values.get(f"{part}_s")
        if not _is_time(spent):
            return None
        seconds[part] = float(spent)
    saved, end = values.get("saved", False), values.get("end")
    if type(saved) is not bool or not isinstance(end, str | None):
        return None
    return GoodputRecord(step, seconds, saved, end)


def _is_time(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 <= value < MOST_SECONDS


def _follows(job: JobRecord, mark: GoodputRecord) -> bool:
    """Whether this mark can follow the job's last one: neither step nor time decreases, and the job
    had not ended."""
    return mark.step >= job.last.step and mark.elapsed >= job.last.elapsed and job.last.end is None


def _rewrite(path: Path, jobs: Sequence[JobRecord]) -> int:
    """Rewrites the ledger with the marks of checkpoints and each job's last one; returns its size
    in bytes."""
    lines = []
    for job in jobs:
        lines.append(json.dumps({"started": job.started, "step": job.first}) + "\n")
        lines += [_mark_line(mark) for mark in job.marks if mark.saved or mark is job.marks[-1]]
    return write_whole(path, "".join(lines))


def _mark_line(mark: GoodputRecord) -> str:
    values: dict[str, Any] = {"step": mark.step}
    for part, spent in mark.seconds.items():
        values[f"{part}_s"] = spent
    if mark.saved:
        values["saved"] = True
    if mark.end is not None:
        values["end"] = mark.end
    return json.dumps(values) + "\n"
