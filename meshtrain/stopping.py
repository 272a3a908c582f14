"""What asks a run to stop before its last step: signals, a file in its folder, and the time that it has.

A rank only says that it was asked. The answer comes through a sum over all ranks that every step takes anyway, so that
all of them stop after the same step; a run then saves its state and can be gone on with. This room imports nothing that
takes long: it is there before torch is, because a signal that meets nobody ends a process.
"""

import atexit
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

FILE = "STOP"
LOOK_EVERY_S = 1.0  # at the STOP file; a look is cheap, but not on every file system
ANSWERS_S = 0.1  # within which a file system answers that does; a step waits for no look longer than that
# Signals within so long are one request: torchrun passes Ctrl-C on as SIGINT and SIGTERM, and SLURM signals it and us.
ONE_REQUEST_S = 2.0
STEPS_TO_STOP = 3  # the one that is under way, the one that carries the request, the one in which it is read
SPARE_S = 5.0  # that are left over when everything goes as planned

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Signals:
    """This process's signals.

    Before training and after it a signal ends the process at once, by unwinding the stack, so that the run's folder
    learns of it. In training the first one is a request to stop, and a later one ends the process all the same.
    SIGUSR1 says that the end is near (SLURM's `--signal`); it is a request whenever it comes first. While modules are
    imported a signal is only remembered: an exception in the middle of that may be swallowed, or break a library.

    Python runs a handler when the main thread is back from the call that it is in, which may be many seconds after the
    signal. So what belongs to a request is ignored by the kernel, until an alarm: the handler could not tell when it
    came, and would take the second signal of one request for another one.

    Attributes:
        since: when this process began, on the monotonic clock.
        request: the name of the signal that asked for a stop, if one did.
        training: whether there is somebody who obeys a request.
    """

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.request: str | None = None
        self.training = False
        self._asked_at = 0.0
        self._importing = False
        self._remembered: tuple[int, float] | None = None  # a signal of that time, and when it came
        self._deaf_to: tuple[signal.Signals, ...] = ()  # until the alarm
        self._alarm: tuple[Any, float] = signal.SIG_DFL, 0.0  # the program's own: its handler, and seconds until then

    @classmethod
    def heard(cls, *, importing: bool = False) -> "Signals":
        """From now on this process hears its signals.

        Args:
            importing: modules are still being imported, until `imported`.
        """
        signals = cls()
        signals._importing = importing
        for number in SIGNALS:
            signal.signal(number, signals._heard)
        atexit.register(signals.listen)  # an alarm after Python's end would be the end of the process, too
        return signals

    def imported(self) -> None:
        """All modules are there: a signal that came meanwhile counts from now on."""
        self._importing = False
        if self._remembered is not None:
            self._heard(self._remembered[0], None)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._importing:
            if self._remembered is None:
                self._remembered = number, now
                return
            if number == signal.SIGUSR1 or now - self._remembered[1] < ONE_REQUEST_S:
                return
        if self.training or number == signal.SIGUSR1:
            if self.request is None:
                self.request, self._asked_at = signal.Signals(number).name, now
                self._ignore(SIGNALS if self.training else (signal.SIGUSR1,))
                return
            if now - self._asked_at < ONE_REQUEST_S:
                return
        self.listen()
        for other in SIGNALS:  # what happens on the way out is not disturbed
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    def _ignore(self, some: tuple[signal.Signals, ...]) -> None:
        """For ONE_REQUEST_S these signals are nothing."""
        self._deaf_to = some
        for number in some:
            signal.signal(number, signal.SIG_IGN)
        before = signal.signal(signal.SIGALRM, lambda *_: self.listen())
        if before is None:  # a handler that is not Python's, and that Python cannot put back
            before = signal.SIG_DFL
        self._alarm = before, signal.setitimer(signal.ITIMER_REAL, ONE_REQUEST_S)[0]

    def listen(self) -> None:
        """What is ignored for a while counts again. For the main thread."""
        if not self._deaf_to:
            return
        for number in self._deaf_to:
            signal.signal(number, self._heard)
        self._deaf_to = ()
        handler, left = self._alarm
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, max(left - ONE_REQUEST_S, 0.001) if left else 0)


@dataclass(frozen=True)
class Limit:
    """A time by which a job has to be over.

    Attributes:
        name: who says so, for people.
        left: how many seconds there are until then.
    """

    name: str
    left: Callable[[], float]


def limits(time_limit_s: float | None, since: float, variables: Mapping[str, str]) -> list[Limit]:
    """The limits of a job: the YAML's, counted from `since` on the monotonic clock, and the end of a SLURM job."""
    found = []
    if time_limit_s is not None:
        end = since + time_limit_s
        found.append(Limit("train.time_limit", lambda: end - time.monotonic()))
    at = variables.get("SLURM_JOB_END_TIME", "")
    if at.isdecimal() and int(at) > time.time():  # a time that is over is an old one that was exported
        found.append(Limit(f"the end of SLURM job {variables.get('SLURM_JOB_ID', '')}", lambda: int(at) - time.time()))
    return found


class Requests:
    """Whether this rank was asked to stop: by a signal, and on rank 0 also by the file or because time runs out."""

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.said: str | None = None  # what has asked for a stop, in words
        self._stops = False  # all ranks have agreed to
        self._file: Path | None = None
        self._limits: list[Limit] = []
        self._taken: Callable[[], str | None] = lambda: None
        self._looked_at = 0.0
        self._look: threading.Thread | None = None  # the last one
        self._found: str | None = None

    def watch(
        self,
        folder: Path,
        time_limit_s: float | None,
        variables: Mapping[str, str],
        taken: Callable[[], str | None] = lambda: None,
    ) -> None:
        """From now on a file STOP in the run's folder counts, and the time that is left. For one rank of a job.

        Args:
            taken: looked at as often as the file: why another job has this run's folder; None: it has not.
        """
        self._taken = taken
        self._file = folder / FILE
        self._limits = limits(time_limit_s, self.signals.since, variables)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """While the body runs the first signal is a request and no end; after it too where the run stops or has failed.

        A launcher signals those that are left when a rank was lost: they are on their way out, and say why.
        """
        self.signals.training = True
        yield
        self.signals.training = self._stops
        if not self._stops:
            self.signals.listen()

    def agreed(self) -> None:
        """All ranks stop now. Launchers do not tell them all at once: a signal that is late asks for what is done."""
        self._stops = True

    def wait_for_signal(self, seconds: float) -> bool:
        """Until this process has had a signal too, as others have; whether it has.

        torchrun's agents end their workers one after the other when a node joins, to start them again with it. An
        agent whose workers were done before it got there would take the job for done, and leave.
        """
        deadline = time.monotonic() + seconds
        while self.signals.request is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.signals.request is not None

    def reason(self, step_s: float, save_s: float) -> str | None:
        """What asks for a stop, in words; None if nothing does. Once it did, it stays.

        Args:
            step_s: how long a step takes at most.
            save_s: how long a save takes.
        """
        if self.said is None:
            self.said = self.signals.request or self._by_file() or self._by_time(step_s, save_s)
        return self.said

    def _by_file(self) -> str | None:
        """What a thread has found: a folder that does not answer must not hold up the steps of all ranks."""
        now = time.monotonic()
        at_it = self._look is not None and self._look.is_alive()
        if self._file is None or at_it or now - self._looked_at < LOOK_EVERY_S:
            return self._found
        self._looked_at = now
        self._look = threading.Thread(target=self._look_at, args=[self._file], name="requests", daemon=True)
        try:
            self._look.start()
        except RuntimeError:  # the system gives no thread now: the next look is a second later
            self._look = None
        else:
            self._look.join(ANSWERS_S)
        return self._found

    def _look_at(self, file: Path) -> None:
        with suppress(OSError):  # it cannot be looked at now: then nobody has asked
            if file.is_file():
                self._found = f"the file {file}"
                return
        self._found = self._taken()

    def _by_time(self, step_s: float, save_s: float) -> str | None:
        need = STEPS_TO_STOP * step_s + 1.2 * save_s + SPARE_S
        return next((limit.name for limit in self._limits if limit.left() < need), None)

    def obeyed(self) -> None:
        """The run has stopped, with everything saved: the file has done its work."""
        if self._file is not None:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                print(f"warning: remove {self._file}, or the next job stops at once: {error}", flush=True)
