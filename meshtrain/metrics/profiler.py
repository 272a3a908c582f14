"""Profiling: a trace of a few steps, and a history of the GPU's memory."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from meshtrain.config.schema import Metrics
from meshtrain.job.storage import optional


class Profiler:
    """Traces steps (`metrics.profile`) and memory (`metrics.memory_snapshot`)."""

    def __init__(self, metrics: Metrics, folder: Path, rank: int, device: torch.device) -> None:
        self._first, self._last = metrics.profile or (0, -1)
        self._trace = folder / "profile" / f"rank_{rank:05d}.json"
        self._history = folder / "memory" / f"rank_{rank:05d}.pickle"
        self._device = device
        self._running: profile | None = None
        self._remembering = metrics.memory_snapshot and device.type == "cuda"
        if self._remembering:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        self._needs_cuda = metrics.memory_snapshot and not self._remembering

    def about(self, done: int, steps: int) -> Iterator[str]:
        """Lines for the start of a job that does the steps after `done` up to `steps`."""
        own = range(max(self._first, done + 1), min(self._last, steps) + 1)
        if own:
            yield f"profiling steps {own[0]} to {own[-1]} of every rank into {self._trace.parent}"
        elif self._last > 0:
            yield (
                f"metrics.profile names steps {self._first} to {self._last}, and this job does "
                f"steps {done + 1} to "
                f"{steps}: nothing is profiled"
            )
        if self._remembering:
            yield f"recording the memory history of every rank into {self._history.parent}"
        if self._needs_cuda:
            yield (
                f"metrics.memory_snapshot needs CUDA: this run is on {self._device.type}, no "
                "snapshot is written"
            )

    def step(self, step: int) -> None:
        if self._running is not None and step > self._last:
            self._export()
        elif self._running is None and self._first <= step <= self._last:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._running = profile(activities=activities)
            self._running.start()

    def close(self) -> None:
        """Writes what is not written yet, even after an error: a history is most useful when memory
        ran out."""
        if self._running is not None:
            self._export()
        if self._remembering:
            self._remembering = False
            with optional("there is no memory history"):
                self._history.parent.mkdir(parents=True, exist_ok=True)
                # torch would write to where a link of this name leads
                self._history.unlink(missing_ok=True)
                torch.cuda.memory._dump_snapshot(str(self._history))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _export(self) -> None:
        assert self._running is not None
        self._running.stop()
        running, self._running = self._running, None
        with optional("there is no profile"):
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            # torch would write to where a link of this name leads
            self._trace.unlink(missing_ok=True)
            running.export_chrome_trace(str(self._trace))
