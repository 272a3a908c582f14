"""How long a rank may take to get on before somebody looks into it, and how long it has taken."""

import time
from dataclasses import dataclass, field

LEAST_S = 300.0  # the shortest deadline that is taken from measured steps: a file system's fail-over takes minutes
TIMES = 20  # so many of the slowest steps measured make a deadline
MEASURED = 3  # steps, before their times count
PATIENT = ("start", "saving", "end")  # where a rank may be busy for long: files are read, prepared and written
MISSES = 3  # so many deadlines missed in a row are too much even there


@dataclass
class Deadlines:
    """How long a rank may take to get on, by what it does.

    Attributes:
        start_s: the start, and whatever has not been measured.
        given_s: a step, where the user has said.
        step_s: a step, as measured; None: not yet.
        save_s: the last save; None: there was none.
        save_limit_s: a save, before it is given up by those who wait for it.
        seen: what else has been done once to its end: the first time may compile.
        compiles: whether it does, for as long as the caches of each host let it.
    """

    start_s: float = 600.0
    given_s: float | None = None
    step_s: float | None = None
    save_s: float | None = None
    save_limit_s: float = 1800.0
    seen: set[str] = field(default_factory=set)
    compiles: bool = False

    def of(self, phase: str) -> float:
        """Seconds for `start`, `step`, `evaluation`, `saving` or `end`."""
        if phase == "saving":
            return self.start_s if self.save_s is None else max(self.given_s or LEAST_S, TIMES * self.save_s)
        if phase in PATIENT or self.step_s is None or (phase != "step" and phase not in self.seen):
            return self.start_s
        return self.step_s

    def compiling(self, phase: str) -> bool:
        """Whether a rank may be busy with that in this phase."""
        return self.compiles and (self.step_s is None or phase not in ("step", *self.seen))

    def patient(self, phase: str) -> bool:
        """Whether a rank may be busy for longer than a deadline in this phase."""
        return phase in PATIENT or self.compiling(phase)

    def longest(self, phase: str) -> float:
        """Seconds that others may wait in a collective for a rank that is in this phase."""
        return self.of(phase) * (MISSES if self.compiling(phase) else 1)

    def hangs(self, phase: str, missed: int) -> bool:
        """Whether a rank that has missed so many deadlines in a row, with this one, is not only busy."""
        if phase == "start":  # a corpus may take hours to prepare: it is said whom all wait for, and no more
            return False
        return not self.patient(phase) or missed >= MISSES or (phase == "saving" and self.save_s is not None)

    def measured(self, slowest_s: float) -> float | None:
        """Takes the time of the slowest step so far; returns the deadline of a step if it has changed by much."""
        wanted = self.given_s or max(LEAST_S, TIMES * slowest_s)
        if self.step_s is not None and wanted <= 1.25 * self.step_s:
            return None
        self.step_s = wanted
        return wanted


def patience(deadline_s: float) -> float:
    """The time limit in seconds of a process group whose watchdog has this deadline: it speaks first."""
    return 1.5 * deadline_s + 60


class Clock:
    """What this rank does, and since when. The main thread says so; the watchdog's reads it.

    Attributes:
        deadlines: may be changed while it runs.
        phase: see `Deadlines.of`; or a loop of the user's own.
        step: the step that it is in, or was in last.
        since: when it last got on.
        misses: deadlines that have passed since then.
    """

    def __init__(self) -> None:
        self.deadlines = Deadlines()
        self.step = 0
        self.at("start")

    def at(self, phase: str, step: int | None = None) -> None:
        """It has got on: it is in this phase now, and in this step."""
        self.step = self.step if step is None else step
        self.phase, self.since = phase, time.monotonic()
        self._put_off_s, self.misses = 0.0, 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def late(self, *, for_device: bool = False) -> bool:
        """Whether it has taken longer than the deadline of what it does, or than it may wait for the disk in a save.

        Args:
            for_device: whether it waits for its device: it is given no time for a disk.
        """
        deadline_s = self.deadlines.of(self.phase)
        if self.phase == "saving" and not for_device:  # and in the save before; who is lost ends the job sooner
            deadline_s = max(deadline_s, 2 * self.deadlines.save_limit_s + LEAST_S)
        return self.seconds > deadline_s

    def missed(self) -> bool:
        """Whether a deadline has passed: counts it, and gives it as long again."""
        more_s = self.seconds - self._put_off_s - self.deadlines.of(self.phase)
        if more_s <= 0:
            return False
        self.misses += 1
        self._put_off_s += self.deadlines.of(self.phase) + more_s
        return True

    def slept(self) -> None:
        """The time so far does not count: this process was stopped."""
        self._put_off_s = self.seconds
