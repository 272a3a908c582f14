"""Signals and preemption: what asks a run to stop before its last step, by a signal, a file in its folder, or the time.

A rank only records that it was asked; a sum over all ranks in every step makes all stop after the same one. This module
imports nothing that takes long: it is there before torch is, because a signal without a handler ends a process.
"""

import atexit
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

from meshtrain.job.storage import optional

FILE = "STOP"
LOOK_EVERY_S = 1.0  # at the STOP file; a look is cheap, but not on every file system
ANSWERS_S = 0.1  # within which a file system answers that does; a step waits for no look longer than that
# Signals within so long are one request: torchrun passes Ctrl-C on as SIGINT and SIGTERM, and SLURM signals it and us.
ONE_REQUEST_S = 2.0
STEPS_TO_STOP = 3  # the one that is under way, the one that carries the request, the one in which it is read
SPARE_S = 5.0  # that remain when everything goes as planned
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
Handler = Any  # what signal.signal takes


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def install_handlers(handlers: Mapping[signal.Signals, Handler]) -> dict[signal.Signals, Handler]:
    """Installs these handlers; returns those that were there, with SIG_DFL for what Python cannot install again."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    return {number: signal.SIG_DFL if handler is None else handler for number, handler in before.items()}


def ignore_signals(numbers: tuple[signal.Signals, ...] = SIGNALS) -> None:
    install_handlers(dict.fromkeys(numbers, signal.SIG_IGN))


class Signals:
    """The handlers of this process's signals.

    Before training and after it a signal ends the process at once, by unwinding the stack, so that the run's folder
    learns of it. In training the first one is a request to stop, and a later one ends the process all the same. SIGUSR1
    announces the end (SLURM's `--signal`); it is a request whenever it comes first. While modules are imported a signal
    is only remembered: an exception in the middle of that may be swallowed, or break a library.

    One request may come as several signals within ONE_REQUEST_S. Python runs a handler only when the main thread is
    back from its call, perhaps many seconds later, so the clock does not tell which belong together: after a request
    they are set to SIG_IGN until an alarm (SIGALRM, after ONE_REQUEST_S).
    """

    def __init__(self) -> None:
        self.since = time.monotonic()  # when this process began
        self.request: StopKind | None = None  # the signal that asked for a stop
        self.training = False  # whether there is a loop that obeys a request
        self._asked_at = 0.0
        self._importing = False
        self._remembered: tuple[int, float] | None = None  # a signal of that time, and when it came
        self._ignored: tuple[signal.Signals, ...] = ()  # until the alarm
        self._alarm: tuple[Handler, float] = signal.SIG_DFL, 0.0  # the program's own: handler, and seconds until then

    @classmethod
    def install(cls, *, importing: bool = False) -> "Signals":
        """From now on this process handles its signals; `importing`: after `modules_imported`."""
        signals = cls()
        signals._importing = importing
        install_handlers(dict.fromkeys(SIGNALS, signals._handle))
        atexit.register(signals.restore)  # an alarm after Python's end would end the process, too
        return signals

    def modules_imported(self) -> None:
        """A signal that came while modules were imported counts from now on."""
        self._importing = False
        if self._remembered is not None:
            self._handle(self._remembered[0], None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._importing:
            if self._remembered is None:
                self._remembered = number, now
                return
            if number == signal.SIGUSR1 or now - self._remembered[1] < ONE_REQUEST_S:
                return
        if self.training or number == signal.SIGUSR1:
            if self.request is None:
                self.request, self._asked_at = StopKind(signal.Signals(number).name), now
                self._ignore_until_alarm(SIGNALS if self.training else (signal.SIGUSR1,))
                return
            if now - self._asked_at < ONE_REQUEST_S:
                return
        self.restore()
        ignore_signals()  # what happens while the stack unwinds is not disturbed
        raise SystemExit(128 + number)

    def _ignore_until_alarm(self, numbers: tuple[signal.Signals, ...]) -> None:
        self._ignored = numbers
        ignore_signals(numbers)
        before = install_handlers({signal.SIGALRM: lambda *_: self.restore()})
        self._alarm = before[signal.SIGALRM], signal.setitimer(signal.ITIMER_REAL, ONE_REQUEST_S)[0]

    def restore(self) -> None:
        """The ignored signals are handled again, and the program's alarm is its own. For the main thread."""
        if not self._ignored:
            return
        install_handlers(dict.fromkeys(self._ignored, self._handle))
        self._ignored = ()
        handler, seconds = self._alarm
        install_handlers({signal.SIGALRM: handler})
        signal.setitimer(signal.ITIMER_REAL, max(seconds - ONE_REQUEST_S, 0.001) if seconds else 0)


class SignalWakeup:
    """A pipe that wakes a thread in `wait`, by a signal or `wake`, also while the main thread is stuck in a call that
    never returns. Python runs a handler in the main thread, later; at once it only writes to a pipe (set_wakeup_fd)."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        for end in (self._out, self._in):
            os.set_blocking(end, False)
        self._installed = False
        self._handler = lambda number, _: self._write(number)  # one object, to be known again

    def install(self) -> None:
        """From now on signals wake it, unless the program has set a wakeup descriptor itself. For the main thread."""
        if not in_main_thread():
            return
        before = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        self._installed = before == -1
        if not self._installed:
            signal.set_wakeup_fd(before)
        _uninstall_in_children(self)

    def handle_sigterm(self) -> bool:
        """SIGTERM only wakes it from now on, unless the program has its own handler; whether it is so."""
        if in_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            install_handlers({signal.SIGTERM: self._handler})
        return self.handles_sigterm

    @property
    def handles_sigterm(self) -> bool:
        """Whether it is so still: the program may have installed a handler meanwhile."""
        return signal.getsignal(signal.SIGTERM) is self._handler

    def uninstall(self) -> None:
        """Signals do not wake it any more. What the program has put in its place stays."""
        if not in_main_thread():
            return
        if self._installed:
            now = signal.set_wakeup_fd(-1)
            if now not in (-1, self._in):
                signal.set_wakeup_fd(now)
            self._installed = False
        if self.handles_sigterm:
            install_handlers({signal.SIGTERM: signal.SIG_DFL})

    def wake(self) -> None:
        self._write(0)

    def _write(self, number: int) -> None:
        with suppress(BlockingIOError):  # the pipe is full: it wakes anyway
            os.write(self._in, bytes([number]))

    def wait(self, seconds: float) -> set[int]:
        """Until it is woken, or for so long; which of SIGNALS have come."""
        ready, _, _ = select.select([self._out], [], [], seconds)
        received = os.read(self._out, 4096) if ready else b""
        return {number for number in SIGNALS if number in received}


def _uninstall_in_children(wakeup: SignalWakeup) -> None:
    """A signal to a process that this one forks (a reader of data) is not for this one; nor is one that comes while it
    is being forked: it is blocked until the child has uninstalled."""
    weak, before = ref(wakeup), threading.local()

    def block() -> None:
        if weak() is not None:
            before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def unblock() -> None:
        mask = before.__dict__.pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def uninstall() -> None:
        inherited = weak()
        if inherited is not None:
            inherited.uninstall()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=uninstall)


class StopKind(StrEnum):
    SIGTERM = "SIGTERM"
    SIGINT = "SIGINT"
    SIGUSR1 = "SIGUSR1"
    FILE = "file"
    TIME_LIMIT = "time_limit"  # train.time_limit
    SLURM_END = "slurm_end"  # of the job's time
    TAKEN = "taken"  # another job has the run's folder


@dataclass(frozen=True)
class StopReason:
    kind: StopKind
    text: str  # for people


Limit = tuple[StopReason, Callable[[], float]]  # why a job has to be over, and how many seconds are left until then


def limits(time_limit_s: float | None, since: float, variables: Mapping[str, str]) -> list[Limit]:
    """The limits of a job: the YAML's, counted from `since` on the monotonic clock, and the end of a SLURM job."""
    limits: list[Limit] = []
    if time_limit_s is not None:
        end = since + time_limit_s
        limits.append((StopReason(StopKind.TIME_LIMIT, "train.time_limit"), lambda: end - time.monotonic()))
    at = variables.get("SLURM_JOB_END_TIME", "")
    if at.isdecimal() and int(at) > time.time():  # a time that is over is an old one that was exported
        text = f"the end of SLURM job {variables.get('SLURM_JOB_ID', '')}"
        begun = variables.get("SLURM_JOB_START_TIME", "")
        whole = int(at) - int(begun) if begun.isdecimal() else float("inf")  # of the job: this host's clock may be slow
        limits.append(
            (StopReason(StopKind.SLURM_END, text), lambda: min(int(at) - time.time(), whole - time.monotonic() + since))
        )
    return limits


class StopRequest:
    """Whether this rank was asked to stop: by a signal, and on rank 0 also by the file or because time runs out."""

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.reason_given: StopReason | None = None  # what has asked
        self._agreed = False  # all ranks stop
        self._file: Path | None = None
        self._limits: list[Limit] = []
        self._taken: Callable[[], str | None] = lambda: None
        self._looked_at = 0.0
        self._look: threading.Thread | None = None  # the last one
        self._by_folder: StopReason | None = None  # what it has found

    def watch(
        self,
        folder: Path,
        time_limit_s: float | None,
        variables: Mapping[str, str],
        taken: Callable[[], str | None] = lambda: None,
    ) -> None:
        """On one rank of a job: the file STOP in the run's folder and the remaining time count from now on, and
        `taken`, which tells why another job has this folder (None: it has not)."""
        self._taken = taken
        self._file = folder / FILE
        self._limits = limits(time_limit_s, self.signals.since, variables)

    @contextmanager
    def active(self) -> Iterator[None]:
        """While the body runs the first signal is a request; after it too where the run stops or has failed: a launcher
        signals those that are left when a rank was lost, and they are on their way out."""
        self.signals.training = True
        yield
        self.signals.training = self._agreed
        if not self._agreed:
            self.signals.restore()

    def mark_agreed(self) -> None:
        """All ranks stop now. Launchers do not signal all at once: a late signal asks for what is done already."""
        self._agreed = True

    def wait_for_signal(self, seconds: float) -> bool:
        """Waits for a signal of this process; whether one has come.

        torchrun's agents end their workers one after the other when a node joins, to start them again with it. An agent
        whose workers were done before that would take the job for done, and leave.
        """
        deadline = time.monotonic() + seconds
        while self.signals.request is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.signals.request is not None

    def reason(self, step_s: float, save_s: float) -> StopReason | None:
        """What asks for a stop; once set it stays. A step takes `step_s` at most, a save `save_s`."""
        if self.reason_given is None:
            number = self.signals.request
            by_signal = None if number is None else StopReason(number, str(number))
            needed_s = STEPS_TO_STOP * step_s + 1.2 * save_s + SPARE_S
            by_time = (reason for reason, seconds_left in self._limits if seconds_left() < needed_s)
            self.reason_given = by_signal or self._look_at_folder() or next(by_time, None)
        return self.reason_given

    def _look_at_folder(self) -> StopReason | None:
        """By a thread: a folder that does not answer must not hold up the steps of all ranks."""
        now = time.monotonic()
        looking = self._look is not None and self._look.is_alive()
        if self._file is None or looking or now - self._looked_at < LOOK_EVERY_S:
            return self._by_folder
        self._looked_at = now
        self._look = threading.Thread(target=self._look_for, args=[self._file], name="requests", daemon=True)
        try:
            self._look.start()
        except RuntimeError:  # the system gives no thread now: the next look is a second later
            self._look = None
        else:
            self._look.join(ANSWERS_S)
        return self._by_folder

    def _look_for(self, file: Path) -> None:
        with suppress(OSError):  # it cannot be looked at now: then nobody has asked
            if file.is_file():
                self._by_folder = StopReason(StopKind.FILE, f"the file {file}")
                return
        taken = self._taken()
        self._by_folder = None if taken is None else StopReason(StopKind.TAKEN, taken)

    def clear(self) -> None:
        """The run has stopped, with everything saved: the file is removed."""
        if self._file is not None:
            with optional(f"remove {self._file}, or the next job stops at once"):
                self._file.unlink(missing_ok=True)


def end_with_parent(parent: int | None = None) -> None:
    """The kernel kills this process when the thread that started it ends, or if its `parent` has ended already.

    A launcher that is killed with SIGKILL cannot end its workers. On Linux the kernel does, also for a worker that is
    stopped, or stuck in a call (prctl(2), PR_SET_PDEATHSIG). Elsewhere nothing happens here.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_launcher(variables: Mapping[str, str]) -> None:
    """The same for a worker of torchrun or a task of srun, and for no other: a shell may end before its children."""
    launcher = ""
    with suppress(OSError):  # it has ended
        launcher = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    if "TORCHELASTIC_RUN_ID" in variables or ("SLURM_STEP_ID" in variables and launcher == "slurmstepd"):
        end_with_parent()
