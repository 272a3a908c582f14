"""The step timer: where the time of a step goes, measured without slowing the step down.

On CUDA a phase records an event on the current stream and does not wait; events are read a step
later, when they have long happened. On a CPU a phase reads a counter. Both cost a few microseconds
per phase.
"""

import os
import resource
import sys
import time
import weakref
from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from meshtrain.job.pending import Resource, waiting

PHASES = ("data", "forward", "backward", "communication", "optimizer")
GIB = 2**30


class TimeSource:
    """Source of time marks, here readings of the host's counter. Its methods are for the thread
    that created it."""

    def __init__(self) -> None:
        # Linux counts the nanoseconds that a thread waits on a run queue
        # (Documentation/scheduler/sched-stats.rst).
        self._schedstat: int | None = None
        with suppress(OSError):
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._schedstat)

    def queued(self) -> float:
        """Seconds so far in which this thread was runnable and no core was free for it."""
        if self._schedstat is None:
            return 0.0
        _, nanoseconds, _ = os.pread(self._schedstat, 80, 0).split()
        return int(nanoseconds) / 1e9

    def now(self) -> Any:
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        return end - start

    def wait(self, mark: Any) -> None:
        """Returns when `mark` has happened."""

    def give_back(self, marks: list[Any]) -> None:
        """Takes back marks that are no longer needed."""


class CudaTimeSource(TimeSource):
    """Time marks that are events on the current CUDA stream; events are reused."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000  # milliseconds

    def wait(self, mark: torch.cuda.Event) -> None:
        with waiting("the device", resource=Resource.DEVICE):
            mark.synchronize()

    def give_back(self, marks: list[torch.cuda.Event]) -> None:
        self._free.extend(marks)

    def queued(self) -> float:
        # a GPU with queued work is not delayed by it; one without shows the delay in its own time
        return 0.0


class _Step(NamedTuple):
    """A step that has ended: its wall time, its marks, and the seconds of the rank's own time
    without a free core."""

    seconds: float
    log: list[tuple[Any, str | None]]
    queued: float


class _Phase:
    """A context manager around the code that belongs to a phase; it may be entered again inside."""

    def __init__(self, timer: "StepTimer", name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        self._timer.running.append(self._name)
        self._timer.enter(self._name)

    def __exit__(self, *error: object) -> None:
        running = self._timer.running
        running.pop()
        self._timer.enter(running[-1] if running else None)


class StepTimer:
    """Measures how many seconds of each step went into each of `PHASES`.

    A phase may be entered inside another, even inside a backward (which runs in its own thread on
    CUDA): the inner time counts for the inner phase only. So `communication` is the part of it that
    compute did not hide.

    On CUDA, phases are measured on the current stream: late data does not count while the GPU is
    still busy.
    """

    def __init__(
        self, device: torch.device, marks: TimeSource | None = None, *, hiding: Collection[str] = ()
    ) -> None:
        """`marks`: replaces the device's clock. `hiding`: phases that contain waits, so are not the
        rank's own time."""
        self._marks = marks or (CudaTimeSource() if device.type == "cuda" else TimeSource())
        self._not_own = {"communication", *hiding}
        # Every wait for other ranks is in a phase: some hundred in a step.
        self._phases = {name: _Phase(self, name) for name in PHASES}
        self.running: list[str] = []  # phases that were entered, the innermost last
        # marks, each with the phase to which time belongs from there on
        self._log: list[tuple[Any, str | None]] = []
        # Bounded: ranks that never pop their measurements must not accumulate them.
        self._finished: deque[_Step] = deque(maxlen=4)
        self._begin()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """The time of the body belongs to phase `name`. Raises KeyError for a name not in
        `PHASES`."""
        return self._phases[name]

    def _begin(self) -> None:
        self._ended = time.perf_counter()
        self._log = [(self._marks.now(), None)]
        self._own = True
        self._queued = 0.0
        self._queued_before = self._marks.queued()

    def enter(self, name: str | None) -> None:
        """From now on time belongs to this phase; None: to none."""
        self._log.append((self._marks.now(), name))
        own = name not in self._not_own
        # The wait for a core is read only where the rank's own time begins or ends.
        if own == self._own:
            return
        if own:
            self._queued_before = self._marks.queued()
        else:
            self._queued += self._marks.queued() - self._queued_before
        self._own = own

    def end_step(self) -> None:
        """Queues the measurement of the step for `pop`, without waiting. Raises RuntimeError inside
        a phase."""
        self._outside_phases()
        seconds = time.perf_counter() - self._ended
        queued = self._queued + self._marks.queued() - self._queued_before
        self._log.append((self._marks.now(), None))
        if len(self._finished) == self._finished.maxlen:
            self._forget(self._finished.popleft().log)
        self._finished.append(_Step(seconds, self._log, queued))
        self._begin()

    def restart(self) -> None:
        """Discards the time since the last `end_step`, which belongs to no step. Raises
        RuntimeError inside a phase."""
        self._outside_phases()
        self._forget(self._log)
        self._begin()

    def pop(self) -> dict[str, float] | None:
        """The times of the oldest finished step not popped yet (4 are kept), in seconds; None if
        there is none. Waits for the device, so call it for step n while step n + 1 is under way.

        `step_time_s` is the wall time between the ends of two steps, `time_own_s` all time except
        waiting for other ranks, `time_queued_s` the part of that without a free core.
        """
        if not self._finished:
            return None
        step = self._finished.popleft()
        times = dict.fromkeys((*PHASES, "own"), 0.0)
        self._marks.wait(step.log[-1][0])
        for (start, name), (end, _) in pairwise(step.log):
            seconds = self._marks.seconds(start, end)
            if name is not None:
                times[name] += seconds
            if name not in self._not_own:
                times["own"] += seconds
        self._forget(step.log)
        times["queued"] = step.queued
        named = {f"time_{name}_s": seconds for name, seconds in times.items()}
        return {"step_time_s": step.seconds, **named}

    def _outside_phases(self) -> None:
        if self.running:
            raise RuntimeError(
                f"a step ends or starts inside of the phase {self.running[-1]!r}; close the phase "
                "first"
            )

    def _forget(self, log: list[tuple[Any, str | None]]) -> None:
        self._marks.give_back([mark for mark, _ in log])


def memory_gib(device: torch.device) -> float:
    """Peak memory so far, in GiB: on CUDA that of tensors (no cache or NCCL buffers), on a CPU
    resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB


def memory_reserved_gib(device: torch.device) -> float | None:
    """Peak memory so far, in GiB, that torch's allocator has reserved on CUDA, gaps included; None
    on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_reserved(device) / GIB
