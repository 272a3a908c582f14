"""Deadlines: how long a rank may take to make progress before it is examined, and how long it
takes. No I/O."""

import time
from dataclasses import dataclass, field

# the shortest deadline derived from measured steps: a file system's fail-over takes minutes
LEAST_S = 300.0
TIMES = 20  # a deadline is this multiple of the slowest measured step
MEASURED = 3  # steps before a deadline is derived from their times
# phases where a rank may be busy for long: files are read, prepared and written
PATIENT = (
    "start",
    "saving",
    "end",
)
MISSES = 3  # this many deadlines missed in a row are too many even there


@dataclass
class Deadlines:
    """Seconds for each phase: `start`, `step`, `evaluation`, `saving`, `end`, or the user's own
    loop."""

    start_s: float = 600.0  # the start, and every phase not measured yet
    given_s: float | None = None  # a step, as the user has configured it
    # whether a step's deadline follows from measured ones; not if what a step does is unknown
    adapts: bool = True
    step_s: float | None = None  # a step, as measured; None: not yet
    save_s: float | None = None  # the last save; None: there was none
    save_limit_s: float = 1800.0  # a save, before the ranks that wait for it give it up
    # others completed at least once: the first time may compile
    warm_phases: set[str] = field(default_factory=set)
    # whether the model is compiled: how long that takes depends on each host's caches
    compiles: bool = False

    def of(self, phase: str) -> float:
        if phase == "saving":
            return (
                self.start_s
                if self.save_s is None
                else max(self.given_s or LEAST_S, TIMES * self.save_s)
            )
        if (
            phase in PATIENT
            or self.step_s is None
            or (phase != "step" and phase not in self.warm_phases)
        ):
            return self.start_s
        return self.step_s

    def compiling(self, phase: str) -> bool:
        """Whether a rank may be compiling in this phase."""
        return self.compiles and (self.step_s is None or phase not in ("step", *self.warm_phases))

    def patient(self, phase: str) -> bool:
        """Whether a rank may be busy for longer than a deadline in this phase."""
        return phase in PATIENT or self.compiling(phase)

    def longest(self, phase: str) -> float:
        """Seconds that other ranks may wait in a collective for a rank that is in this phase."""
        return self.of(phase) * (MISSES if self.compiling(phase) else 1)

    def hangs(self, phase: str, missed: int) -> bool:
        """Whether a rank that has missed so many deadlines in a row, this one included, hangs and
        is not only busy."""
        return (
            not self.patient(phase)
            or missed >= MISSES
            or (phase == "saving" and self.save_s is not None)
        )

    def adapt(self, slowest_s: float) -> float | None:
        """Adapts to the slowest step so far; returns the deadline of a step if it is new or more
        than 25 % longer."""
        if not self.adapts:
            return None
        deadline_s = self.given_s or max(LEAST_S, TIMES * slowest_s)
        if self.step_s is not None and deadline_s <= 1.25 * self.step_s:
            return None
        self.step_s = deadline_s
        return deadline_s


def process_group_timeout(deadline_s: float) -> float:
    """The time limit in seconds of a process group whose watchdog has this deadline: the watchdog
    acts first."""
    return 1.5 * deadline_s + 60


class DeadlineClock:
    """This rank's phase, and when it began. The main thread writes it; the watchdog's thread reads
    it."""

    def __init__(self) -> None:
        self.deadlines = Deadlines()  # may be changed while it runs
        self.step = 0  # the current or last one
        self._advances = 0
        self.enter_phase("start")

    def enter_phase(self, phase: str, step: int | None = None) -> None:
        """Records progress: this rank is now in this phase and in this step."""
        if step is not None:
            self.step = step
        self.phase = phase
        self.since = time.monotonic()
        self.misses = 0  # deadlines that have passed since then
        # the start of the time that the next deadline is compared with
        self._counted_from = self.since

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def advanced(self, advances: int) -> None:
        """`advances`: of this process so far (job/pending.py). While it starts, each of them is
        progress: a corpus may take hours to prepare, and weights hours to read."""
        if advances != self._advances:
            self._advances = advances
            if self.phase == "start":
                self.enter_phase(self.phase)

    def late(self, *, for_device: bool = False) -> bool:
        """Whether this rank has missed the deadline of its phase; a save that does not wait
        `for_device` has longer."""
        deadline_s = self.deadlines.of(self.phase)
        # for this and the last save; a lost rank ends the job sooner
        if self.phase == "saving" and not for_device:
            deadline_s = max(deadline_s, 2 * self.deadlines.save_limit_s + LEAST_S)
        return self.seconds > deadline_s

    def missed(self) -> bool:
        """Whether a deadline has passed; if so, counts it and begins the next one."""
        now = time.monotonic()
        if now - self._counted_from <= self.deadlines.of(self.phase):
            return False
        self.misses += 1
        self._counted_from = now
        return True

    def ignore_suspend(self) -> None:
        """This process was suspended: the time so far does not count towards the next deadline."""
        self._counted_from = time.monotonic()
