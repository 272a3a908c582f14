"""Where the time of a step goes, measured without slowing the step down.

A clock that waits for the GPU at every phase measures a program that nobody runs. So on CUDA a phase leaves an event on
the current stream and goes on, and the events are read a step later, when they have long happened. On a CPU a phase
reads a counter. Both cost a few microseconds per phase.
"""

import resource
import sys
import time
from collections import deque
from itertools import pairwise
from types import TracebackType
from typing import Any, Protocol

import torch

PHASES = ("data", "forward", "backward", "communication", "optimizer")
GIB = 2**30


class Marks(Protocol):
    """Points in time that can be set now and compared later. What a mark is, is the implementation's own affair."""

    def now(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...

    def wait(self, mark: Any) -> None:
        """Returns when `mark` has happened."""

    def give_back(self, marks: list[Any]) -> None:
        """These marks are not needed any more."""


class HostMarks:
    """Marks that are readings of the host's own counter."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait(self, mark: float) -> None:
        pass

    def give_back(self, marks: list[float]) -> None:
        pass


class CudaMarks:
    """Marks that are events on the current CUDA stream; used events go round."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000  # milliseconds

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def give_back(self, marks: list[torch.cuda.Event]) -> None:
        self._free.extend(marks)


class Phase:
    """What `StepClock.phase` returns: `with` it, the time belongs to this phase."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: "StepClock", name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._clock._open(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock._close()


class StepClock:
    """Measures how many seconds of each step went into which of `PHASES`.

    A phase may be entered inside another, also from inside a backward (which runs in a thread of its own on CUDA, while
    the caller waits): the inner time counts for the inner phase only. So `communication`, entered where a forward or a
    backward waits for other ranks, is the communication that computing did not hide.

        clock = StepClock(device)
        for ...:
            with clock.phase("data"): ...
            with clock.phase("forward"): ...
            clock.end_step()
            times = clock.pop()

    On CUDA every phase is measured on the current stream, `data` too: data that is late while the GPU still has work to
    do costs nothing and is not counted. What a step spends outside of every phase is in `step_time_s` only.
    """

    def __init__(self, device: torch.device, marks: Marks | None = None) -> None:
        """`marks` replaces the device's own way to tell the time (in tests)."""
        own: Marks = CudaMarks() if device.type == "cuda" else HostMarks()
        self._marks = own if marks is None else marks
        self._phases = {name: Phase(self, name) for name in PHASES}
        self._running: list[str] = []
        self._log: list[tuple[Any, str | None]] = []  # from this mark on, time belongs to this phase
        self._ended = time.perf_counter()
        # Ranks that never ask for their measurements must not collect them either.
        self._finished: deque[tuple[float, list[tuple[Any, str | None]]]] = deque(maxlen=4)

    def phase(self, name: str) -> Phase:
        """A context manager whose time belongs to phase `name`. Raises KeyError for a name not in `PHASES`."""
        return self._phases[name]

    def _open(self, name: str) -> None:
        self._running.append(name)
        self._log.append((self._marks.now(), name))

    def _close(self) -> None:
        self._running.pop()
        self._log.append((self._marks.now(), self._running[-1] if self._running else None))

    def end_step(self) -> None:
        """Closes the step and queues its measurement for `pop`; does not wait for the device.

        Raises:
            RuntimeError: inside of a phase.
        """
        self._outside_phases()
        now = time.perf_counter()
        if len(self._finished) == self._finished.maxlen:
            self._forget(self._finished.popleft()[1])
        self._finished.append((now - self._ended, self._log))
        self._ended, self._log = now, []

    def restart(self) -> None:
        """What happened since the last `end_step` (an evaluation, a save) belongs to no step.

        Raises:
            RuntimeError: inside of a phase.
        """
        self._outside_phases()
        self._forget(self._log)
        self._ended, self._log = time.perf_counter(), []

    def pop(self) -> dict[str, float] | None:
        """The oldest finished step that was not popped yet, in seconds; None if there is none.

        Returns `step_time_s`, wall clock between the ends of two consecutive steps (of the first: since the clock was
        made), and `time_data_s`, ... for each of `PHASES`. On CUDA it waits until the device has done that step, so
        call it for step n when step n + 1 is under way. More than 4 steps are not kept.
        """
        if not self._finished:
            return None
        step_time, log = self._finished.popleft()
        times = dict.fromkeys(PHASES, 0.0)
        if log:
            self._marks.wait(log[-1][0])
        for (start, name), (end, _) in pairwise(log):
            if name is not None:
                times[name] += self._marks.seconds(start, end)
        self._forget(log)
        return {"step_time_s": step_time} | {f"time_{name}_s": seconds for name, seconds in times.items()}

    def _outside_phases(self) -> None:
        if self._running:
            raise RuntimeError(
                f"a step ends or starts inside of the phase {self._running[-1]!r}; close the phase first"
            )

    def _forget(self, log: list[tuple[Any, str | None]]) -> None:
        self._marks.give_back([mark for mark, _ in log])


def memory_gib(device: torch.device) -> float:
    """The most memory this process has used so far, in GiB.

    On CUDA what torch's allocator held in tensors at the peak (without its cache and without NCCL's buffers); on a CPU
    the peak of the process's resident memory, Python and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB  # macOS counts bytes, Linux KiB
