"""Profiling: a trace of a few steps, and on a GPU the history of its memory up to their end."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from meshtrain.job.storage import optional

if TYPE_CHECKING:
    from meshtrain.config.schema import MetricsSection

MOST_EVENTS = 100_000  # of the memory's history, which is kept in host memory


class Profiler:
    """Traces the steps of `metrics.profile` on this rank.

    On a GPU the history of its memory begins with the job's first step, since memory mostly runs
    out before the steps that one would choose for a trace.
    """

    def __init__(
        self, metrics: "MetricsSection", folder: Path, rank: int, device: torch.device
    ) -> None:
        self._first, self._last = metrics.profile or (0, -1)
        self._trace = folder / "profile" / f"rank_{rank:05d}.json"
        self._history = folder / "memory" / f"rank_{rank:05d}.pickle"
        self._cuda = device.type == "cuda"
        self._running: profile | None = None
        self._remembering = False

    def about(self, done: int, steps: int) -> Iterator[str]:
        """Lines for the start of a job that does the steps after `done` up to `steps`."""
        own = range(max(self._first, done + 1), min(self._last, steps) + 1)
        if own:
            yield f"profiling steps {own[0]} to {own[-1]} of every rank into {self._trace.parent}"
            if self._cuda:
                yield f"recording the memory history of every rank into {self._history.parent}"
        elif self._last > 0:
            yield (
                f"metrics.profile names steps {self._first} to {self._last}, and this job does "
                f"steps {done + 1} to {steps}: nothing is profiled"
            )

    def step(self, step: int) -> None:
        """Called before each step."""
        if step > self._last:
            self.close()
            return
        if self._cuda and not self._remembering:
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
            self._remembering = True
        if step >= self._first and self._running is None:
            activities = [ProfilerActivity.CPU]
            if self._cuda:
                activities.append(ProfilerActivity.CUDA)
            self._running = profile(activities=activities)
            self._running.start()

    def close(self) -> None:
        """Writes what is not written yet, even after an error: a history is most useful when memory
        ran out."""
        if self._running is not None:
            self._write_trace()
        if self._remembering:
            self._write_history()

    def _write_trace(self) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        running.stop()
        with optional("there is no profile"):
            _make_room(self._trace)
            running.export_chrome_trace(str(self._trace))

    def _write_history(self) -> None:
        self._remembering = False
        with optional("there is no memory history"):
            _make_room(self._history)
            torch.cuda.memory._dump_snapshot(str(self._history))
        torch.cuda.memory._record_memory_history(enabled=None)


def _make_room(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # torch would write to where a link of this name leads
    file.unlink(missing_ok=True)
