"""Deadlines: how long a rank may take to make progress before somebody looks into it, and how long it takes. Pure."""

import time
from dataclasses import dataclass, field

LEAST_S = 300.0  # the shortest deadline that is derived from measured steps: a file system's fail-over takes minutes
TIMES = 20  # so many of the slowest steps measured make a deadline
MEASURED = 3  # steps, before their times count
PATIENT = ("start", "saving", "end")  # where a rank may be busy for long: files are read, prepared and written
MISSES = 3  # so many deadlines missed in a row are too much even there


@dataclass
class Deadlines:
    """Seconds for each phase: `start`, `step`, `evaluation`, `saving`, `end`, or a loop of the user's own."""

    start_s: float = 600.0  # the start, and whatever has not been measured
    given_s: float | None = None  # a step, as the user has given it
    step_s: float | None = None  # a step, as measured; None: not yet
    save_s: float | None = None  # the last save; None: there was none
    save_limit_s: float = 1800.0  # a save, before it is given up by those who wait for it
    warm_phases: set[str] = field(default_factory=set)  # others that were once at their end: the first time may compile
    compiles: bool = False  # whether it does, for as long as the caches of each host let it

    def of(self, phase: str) -> float:
        if phase == "saving":
            return self.start_s if self.save_s is None else max(self.given_s or LEAST_S, TIMES * self.save_s)
        if phase in PATIENT or self.step_s is None or (phase != "step" and phase not in self.warm_phases):
            return self.start_s
        return self.step_s

    def compiling(self, phase: str) -> bool:
        """Whether a rank may be busy with that in this phase."""
        return self.compiles and (self.step_s is None or phase not in ("step", *self.warm_phases))

    def patient(self, phase: str) -> bool:
        """Whether a rank may be busy for longer than a deadline in this phase."""
        return phase in PATIENT or self.compiling(phase)

    def longest(self, phase: str) -> float:
        """Seconds that others may wait in a collective for a rank that is in this phase."""
        return self.of(phase) * (MISSES if self.compiling(phase) else 1)

    def hangs(self, phase: str, missed: int) -> bool:
        """Whether a rank that has missed so many deadlines in a row, with this one, is not only busy."""
        if phase == "start":  # a corpus may take hours to prepare: it is printed whom all wait for, and no more
            return False
        return not self.patient(phase) or missed >= MISSES or (phase == "saving" and self.save_s is not None)

    def adapt(self, slowest_s: float) -> float | None:
        """Takes the time of the slowest step so far; returns the deadline of a step if it has changed by much."""
        deadline_s = self.given_s or max(LEAST_S, TIMES * slowest_s)
        if self.step_s is not None and deadline_s <= 1.25 * self.step_s:
            return None
        self.step_s = deadline_s
        return deadline_s


def process_group_timeout(deadline_s: float) -> float:
    """The time limit in seconds of a process group whose watchdog has this deadline: the watchdog comes first."""
    return 1.5 * deadline_s + 60


class DeadlineClock:
    """What this rank does, and since when. The main thread writes it; the watchdog's reads it."""

    def __init__(self) -> None:
        self.deadlines = Deadlines()  # may be changed while it runs
        self.step = 0  # that it is in, or was in last
        self.enter_phase("start")

    def enter_phase(self, phase: str, step: int | None = None) -> None:
        """It has made progress: it is in this phase now, and in this step."""
        self.step = self.step if step is None else step
        self.phase, self.since = phase, time.monotonic()
        self.misses = 0  # deadlines that have passed since then
        self._counted_from = self.since  # when the time began that the next deadline is compared with

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def late(self, *, for_device: bool = False) -> bool:
        """Whether it has missed the deadline of its phase; a save that does not wait `for_device` has more time."""
        deadline_s = self.deadlines.of(self.phase)
        if self.phase == "saving" and not for_device:  # and in the save before; who is lost ends the job sooner
            deadline_s = max(deadline_s, 2 * self.deadlines.save_limit_s + LEAST_S)
        return self.seconds > deadline_s

    def missed(self) -> bool:
        """Whether a deadline has passed: counts it, and the next one begins now."""
        now = time.monotonic()
        if now - self._counted_from <= self.deadlines.of(self.phase):
            return False
        self.misses, self._counted_from = self.misses + 1, now
        return True

    def ignore_suspend(self) -> None:
        """This process was stopped: the time so far does not count for the next deadline."""
        self._counted_from = time.monotonic()
