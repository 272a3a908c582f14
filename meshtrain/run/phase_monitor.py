"""The phases of a run: one object tells the step timer, the goodput tracker, the watchdog, the
timeouts of process groups, the straggler detector, the profiler, planted faults and Python's
garbage collector what the run is doing."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

from meshtrain.errors import plural
from meshtrain.job.watchdog.deadlines import process_group_timeout
from meshtrain.job.watchdog.watchdog import Watchdog
from meshtrain.mesh import Mesh
from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.metrics.profiler import Profiler
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.metrics.straggler import StragglerDetector
from meshtrain.parallel.torch_private import compile_callbacks, compiled_graphs
from meshtrain.run.fault_injection import FaultInjector

COLLECT_EVERY = 50  # steps between two runs of Python's garbage collector


class _Phase(NamedTuple):
    goodput: str  # the part of the wall time that it belongs to
    watchdog: str | None = None  # the phase of the deadlines; None: the current one stays
    # its collectives may take longer than a step's: the first time may compile
    own_timeout: bool = False
    saves: bool = False  # a later job may resume from here


PHASES = {
    "evaluation": _Phase("evaluation", own_timeout=True),  # `Watchdog.iterate` reports its batches
    "checkpoint": _Phase("saving", "saving", saves=True),
    "last checkpoint": _Phase("saving", "saving"),
    "results": _Phase("evaluation"),
    "export": _Phase("saving"),
}


class CompileTimer:
    """Books the time of this process's compiler as goodput's `compile`, and prints what it compiled
    and recompiled."""

    def __init__(self, goodput: GoodputTracker, say: Callable[[str], None]) -> None:
        self._goodput = goodput
        self._say = say
        self._again: set[str] = set()  # phases in which it has compiled

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Wraps a phase of the run: a `step`, by its number, or a phase between two steps."""
        seconds = 0.0
        before = compiled_graphs()
        work = ExitStack()  # open while the compiler works

        def begin(event: object) -> None:
            work.enter_context(self._goodput.phase("compile"))
            work.callback(add, time.monotonic())

        def add(begun: float) -> None:
            nonlocal seconds
            seconds += time.monotonic() - begun

        with compile_callbacks(begin, lambda event: work.close()):
            yield
        graphs = compiled_graphs() - before
        if graphs > 0:
            label = name if step is None else f"{name} {step}"
            what = f"{label}: compiled {plural(graphs, 'graph')}"
            if name in self._again:
                reason = "for other shapes or values (TORCH_LOGS=recompiles names them)"
                self._say(f"{what} again in {seconds:.1f} s, {reason}")
            else:
                self._say(f"{what} in {seconds:.1f} s")
            self._again.add(name)


class PhaseMonitor:
    """Tracks which step the run is in, or what it does between two steps; a context manager around
    the training loop.

    Inside, time counts as training, and Python collects garbage between steps only, on all ranks at
    once.

    Attributes:
        slowest_s: of the finished steps, except the first of this job, which starts readers and
            compiles.
        save_s: seconds that the last save took; None: there was none.
    """

    def __init__(
        self,
        mesh: Mesh,
        timer: StepTimer,
        goodput: GoodputTracker,
        watchdog: Watchdog,
        stragglers: StragglerDetector,
        profiler: Profiler,
        faults: FaultInjector,
        say: Callable[[str], None],
    ) -> None:
        self.mesh = mesh
        self.timer = timer
        self.goodput = goodput
        self.watchdog = watchdog
        self.stragglers = stragglers
        self.profiler = profiler
        self.faults = faults
        self._compiler = CompileTimer(goodput, say) if watchdog.deadlines.compiles else None
        self.first_step = goodput.finished_step
        self.slowest_s = 0.0
        self.save_s: float | None = None
        self._comparison: dict[str, float] = {}  # of the ranks' times, for the next row

    @property
    def finished_step(self) -> int:
        """The last step whose result is known."""
        return self.goodput.finished_step

    def __enter__(self) -> "PhaseMonitor":
        # A rank that collects garbage in the middle of a step lets all others wait for it.
        gc.collect()
        gc.freeze()
        gc.disable()
        self.timer.restart()
        self.goodput.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.profiler.close()
        gc.enable()
        gc.unfreeze()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Wraps a step of the loop, and afterwards adapts the deadlines to what was measured."""
        self.profiler.step(step)
        if step % COLLECT_EVERY == 0:
            gc.collect()  # all generations: nothing else collects what has survived a collection
        # A planted fault delays the rank in its own time, before it meets others.
        self.watchdog.enter_phase("step", step)
        self.stragglers.probe.begin_step(step)
        self.faults.at_step(step)
        with self._compiling("step", step):
            yield
        limit_s = self.watchdog.adapt_deadline(step - self.first_step, self.slowest_s, self.save_s)
        if limit_s is not None:
            self.mesh.set_timeout(limit_s)

    def finish_step(self, step: int) -> dict[str, float]:
        """Called when a step's result is known, during a later step. Returns the times of its row
        (docs/metrics.md)."""
        times = self.timer.pop()
        assert times is not None  # every update ends a step of the timer
        if step > self.first_step + 1:  # the first one compiles, and starts the readers
            self.slowest_s = max(self.slowest_s, times["step_time_s"])
        self.goodput.finish_step(step, times["time_data_s"])
        row = times | self.goodput.summary().row() | self._comparison
        self._comparison = self.stragglers.finish_step(step, times)
        return row

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Wraps one of `PHASES`, between two steps or after the last. Its time belongs to no
        step."""
        phase = PHASES[name]
        if phase.own_timeout:
            self._set_timeout(self.watchdog.deadlines.longest(name))
        if phase.watchdog is not None:
            self.watchdog.enter_phase(phase.watchdog)
        with self.goodput.phase(phase.goodput), self._compiling(name):
            yield
        if phase.own_timeout:
            self._set_timeout(self.watchdog.deadlines.longest("step"))
        if phase.saves:
            self.goodput.saved()
        self.timer.restart()

    def end(self) -> None:
        """All steps are done. What follows has no measured duration, and waits for disks."""
        self.watchdog.enter_phase("end")
        self._set_timeout(self.watchdog.deadlines.start_s)

    def _compiling(self, phase: str, step: int | None = None) -> AbstractContextManager[None]:
        if self._compiler is None:
            return nullcontext()
        return self._compiler.phase(phase, step)

    def _set_timeout(self, deadline_s: float) -> None:
        self.mesh.set_timeout(process_group_timeout(deadline_s))
