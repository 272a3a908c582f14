"""Signals and preemption: requests to stop before the last step, by a signal, a file in the run's
folder, or time.

A rank only records a request; a sum over all ranks in every step makes all stop after the same one.
This module imports nothing slow: handlers are installed before torch is imported, because a signal
without a handler ends a process.
"""

import atexit
import ctypes
import math
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
from meshtrain.job.threads import NoThreadError, start_thread

FILE = "STOP"
LOOK_EVERY_S = 1.0  # for the STOP file; a look is cheap, but not on every file system
# within which a healthy file system answers; a step waits for a look no longer than that
ANSWERS_S = 0.1
# Signals this close together are one request: torchrun forwards Ctrl-C as SIGINT and SIGTERM; SLURM
# signals it and us.
ONE_REQUEST_S = 2.0
STEPS_TO_STOP = 3  # the current step, the one that carries the request, the one in which it is read
SPARE_S = 5.0  # left over when everything goes as planned
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
Handler = Any  # what signal.signal takes


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def install_handlers(handlers: Mapping[signal.Signals, Handler]) -> dict[signal.Signals, Handler]:
    """Installs these handlers; returns the previous ones, with SIG_DFL for those that Python cannot
    install again."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    return {
        number: signal.SIG_DFL if handler is None else handler for number, handler in before.items()
    }


def ignore_signals(numbers: tuple[signal.Signals, ...] = SIGNALS) -> None:
    install_handlers(dict.fromkeys(numbers, signal.SIG_IGN))


class Signals:
    """The signal handlers of this process.

    Before and after training a signal ends the process at once, by unwinding the stack, so that the
    exit is recorded in the run's folder. During training the first signal is a request to stop, and
    a later one ends the process. SIGUSR1 announces the end (SLURM's `--signal`): if it comes first,
    it is a request at any time. SIGHUP comes when a terminal or an ssh session is closed; where it
    is ignored from the start (nohup), it stays so. During imports a signal is only remembered: an
    exception in the middle of an import may be swallowed, or break a library.

    One request may come as several signals within ONE_REQUEST_S. Python runs a handler only when
    the main thread returns from its call, perhaps many seconds later, so the clock does not tell
    which signals belong together: after a request they are set to SIG_IGN until an alarm (SIGALRM,
    after ONE_REQUEST_S).
    """

    def __init__(self) -> None:
        self.since = time.monotonic()  # when this process began
        self.request: StopKind | None = None  # the signal that requested a stop
        self.training = False  # whether a loop is running that obeys a request
        self._asked_at = 0.0
        self._importing = False
        # the first signal during imports, and when it came
        self._remembered: tuple[int, float] | None = None
        self._numbers: tuple[signal.Signals, ...] = SIGNALS  # those with a handler of ours
        self._ignored: tuple[signal.Signals, ...] = ()  # signals ignored until the alarm
        # the program's own alarm: its handler, and seconds left
        self._alarm: tuple[Handler, float] = (signal.SIG_DFL, 0.0)

    @classmethod
    def install(cls, *, importing: bool = False) -> "Signals":
        """Installs the handlers. `importing`: signals are only remembered until `modules_imported`
        is called."""
        signals = cls()
        signals._importing = importing
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            signals._numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        install_handlers(dict.fromkeys(signals._numbers, signals._handle))
        atexit.register(signals.restore)  # an alarm after Python's end would kill the process
        return signals

    def modules_imported(self) -> None:
        """Ends the imports: a signal that came during them is handled now."""
        self._importing = False
        if self._remembered is not None:
            self._handle(self._remembered[0], None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            mute_closed_outputs()

        if self._importing:
            if self._remembered is None:
                self._remembered = (number, now)
                return
            _, remembered_at = self._remembered
            if number == signal.SIGUSR1 or now - remembered_at < ONE_REQUEST_S:
                return

        if self.training or number == signal.SIGUSR1:
            if self.request is None:
                self.request = StopKind(signal.Signals(number).name)
                self._asked_at = now
                self._ignore_until_alarm(self._numbers if self.training else (signal.SIGUSR1,))
                return
            if now - self._asked_at < ONE_REQUEST_S:
                return

        self.restore()
        ignore_signals()  # nothing may interrupt what runs while the stack unwinds
        raise SystemExit(128 + number)

    def _ignore_until_alarm(self, numbers: tuple[signal.Signals, ...]) -> None:
        self._ignored = numbers
        ignore_signals(numbers)
        before = install_handlers({signal.SIGALRM: lambda *_: self.restore()})
        seconds_left, _ = signal.setitimer(signal.ITIMER_REAL, ONE_REQUEST_S)
        self._alarm = (before[signal.SIGALRM], seconds_left)

    def restore(self) -> None:
        """Handles the ignored signals again and restores the program's own alarm. For the main
        thread."""
        if not self._ignored:
            return
        install_handlers(dict.fromkeys(self._ignored, self._handle))
        self._ignored = ()
        handler, seconds_left = self._alarm
        install_handlers({signal.SIGALRM: handler})
        if seconds_left:
            seconds_left = max(seconds_left - ONE_REQUEST_S, 0.001)
        signal.setitimer(signal.ITIMER_REAL, seconds_left)


def mute_closed_outputs() -> None:
    """Sends stdout and stderr to /dev/null where their terminal is gone: a line printed there would
    be an error, and would end the run before it has saved."""
    is_gone = select.POLLHUP | select.POLLERR | select.POLLNVAL
    for stream in (1, 2):
        poll = select.poll()
        poll.register(stream, 0)
        if any(events & is_gone for _, events in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class SignalWakeup:
    """A pipe that wakes a thread in `wait` on a signal or on `wake`, even while the main thread is
    stuck in a call that never returns: Python runs handlers later, in the main thread, but writes
    to a pipe at once (set_wakeup_fd)."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        for end in (self._out, self._in):
            os.set_blocking(end, False)
        self._installed = False
        # one object, so that it is recognized later
        self._handler = lambda number, _: self._write(number)

    def install(self) -> None:
        """Lets signals wake the thread, unless the program has set a wakeup descriptor itself. For
        the main thread."""
        if not in_main_thread():
            return
        before = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        self._installed = before == -1
        if not self._installed:
            signal.set_wakeup_fd(before)
        _uninstall_in_children(self)

    def handle_sigterm(self) -> bool:
        """From now on SIGTERM only wakes the thread; returns False if the program has its own
        handler instead."""
        if in_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            install_handlers({signal.SIGTERM: self._handler})
        return self.handles_sigterm

    @property
    def handles_sigterm(self) -> bool:
        """Whether SIGTERM still only wakes the thread: the program may have installed a handler
        meanwhile."""
        return signal.getsignal(signal.SIGTERM) is self._handler

    def uninstall(self) -> None:
        """Signals no longer wake the thread. What the program has installed instead stays."""
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
        """Waits until it is woken, `seconds` at most; returns which of SIGNALS have come."""
        # Not select(2), which takes no descriptor above 1023: the rank that serves the store of a
        # large job has more.
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        is_woken = bool(poll.poll(1000 * seconds))
        received = os.read(self._out, 4096) if is_woken else b""
        return {number for number in SIGNALS if number in received}


def _uninstall_in_children(wakeup: SignalWakeup) -> None:
    """A signal to a forked child (a data reader) must not wake this process; neither must one that
    comes during the fork, so signals are blocked until the child has uninstalled the pipe."""
    weak = ref(wakeup)  # hooks of forks stay for the life of the process
    before = threading.local()

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
    SIGHUP = "SIGHUP"
    FILE = "file"
    TIME_LIMIT = "time_limit"  # train.time_limit
    SLURM_END = "slurm_end"  # the end of the SLURM job's time
    TAKEN = "taken"  # another job has taken the run's folder


@dataclass(frozen=True)
class StopReason:
    kind: StopKind
    text: str  # for people


Limit = tuple[StopReason, Callable[[], float]]  # why a job must end, and how many seconds are left


def limits(time_limit_s: float | None, since: float, variables: Mapping[str, str]) -> list[Limit]:
    """The time limits of a job: the config's, counted from `since` on the monotonic clock, and its
    SLURM job's end."""
    limits: list[Limit] = []
    if time_limit_s is not None:
        end = since + time_limit_s
        reason = StopReason(StopKind.TIME_LIMIT, "train.time_limit")
        limits.append((reason, lambda: end - time.monotonic()))

    slurm_end = variables.get("SLURM_JOB_END_TIME", "")
    # A time in the past was exported by an older job.
    if slurm_end.isdecimal() and int(slurm_end) > time.time():
        begun = variables.get("SLURM_JOB_START_TIME", "")
        # This host's clock may be slow: no more is left than the whole time less what has passed.
        whole = int(slurm_end) - int(begun) if begun.isdecimal() else math.inf

        def left_of_slurm() -> float:
            return min(int(slurm_end) - time.time(), whole - (time.monotonic() - since))

        text = f"the end of SLURM job {variables.get('SLURM_JOB_ID', '')}"
        limits.append((StopReason(StopKind.SLURM_END, text), left_of_slurm))
    return limits


class StopRequest:
    """Whether this rank was asked to stop: by a signal, and on rank 0 also through the run's folder
    or a time limit."""

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.reason_given: StopReason | None = None  # why to stop, once asked
        self._agreed = False  # whether all ranks stop
        self._file: Path | None = None
        self._limits: list[Limit] = []
        self._taken: Callable[[], str | None] = lambda: None
        self._looked_at = 0.0
        self._look: threading.Thread | None = None  # the last one
        self._by_folder: StopReason | None = None  # what the last look has found

    def watch(
        self,
        folder: Path,
        time_limit_s: float | None,
        variables: Mapping[str, str],
        taken: Callable[[], str | None] = lambda: None,
    ) -> None:
        """On one rank of a job: from now on also checks the file STOP in the run's folder, the
        remaining time, and `taken`, which returns why another job has this folder (None: no other
        job has it)."""
        self._taken = taken
        self._file = folder / FILE
        self._limits = limits(time_limit_s, self.signals.since, variables)

    @contextmanager
    def active(self) -> Iterator[None]:
        """While the body runs, the first signal is a request to stop. It stays one after the body
        if the run stops or has failed: when a rank was lost, a launcher signals the remaining ones,
        which are on their way out."""
        self.signals.training = True
        yield
        self.signals.training = self._agreed
        if not self._agreed:
            self.signals.restore()

    def mark_agreed(self) -> None:
        """All ranks stop now. Launchers do not signal all at once: a late signal asks for what is
        already under way."""
        self._agreed = True

    def wait_for_signal(self, seconds: float) -> bool:
        """Waits for a signal to this process; returns whether one has come.

        When a node joins, torchrun's agents end their workers one after the other, to restart them
        together with it. An agent whose workers have exited before that would consider the job
        finished, and leave.
        """
        deadline = time.monotonic() + seconds
        while self.signals.request is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.signals.request is not None

    def reason(self, step_s: float, save_s: float) -> StopReason | None:
        """Why this rank should stop; once set it stays. A step takes `step_s` at most, a save
        `save_s`."""
        if self.reason_given is None:
            needed_s = STEPS_TO_STOP * step_s + 1.2 * save_s + SPARE_S
            self.reason_given = (
                self._by_signal() or self._look_at_folder() or self._by_time(needed_s)
            )
        return self.reason_given

    def _by_signal(self) -> StopReason | None:
        kind = self.signals.request
        return None if kind is None else StopReason(kind, str(kind))

    def _by_time(self, needed_s: float) -> StopReason | None:
        for reason, seconds_left in self._limits:
            if seconds_left() < needed_s:
                return reason
        return None

    def _look_at_folder(self) -> StopReason | None:
        """Looks in a thread: a file system that does not answer must not delay the steps of all
        ranks."""
        now = time.monotonic()
        looking = self._look is not None and self._look.is_alive()
        if self._file is None or looking or now - self._looked_at < LOOK_EVERY_S:
            return self._by_folder
        self._looked_at = now
        try:
            self._look = start_thread(self._look_for, self._file, name="requests")
            self._look.join(ANSWERS_S)
        except NoThreadError:  # the next look is a second later
            self._look = None
        return self._by_folder

    def _look_for(self, file: Path) -> None:
        with suppress(OSError):  # the folder cannot be read now: no request
            if file.is_file():
                self._by_folder = StopReason(StopKind.FILE, f"the file {file}")
                return
        taken = self._taken()
        self._by_folder = None if taken is None else StopReason(StopKind.TAKEN, taken)

    def clear(self) -> None:
        """Removes the STOP file, once the run has stopped and everything is saved."""
        if self._file is not None:
            with optional(f"remove {self._file}, or the next job stops at once"):
                self._file.unlink(missing_ok=True)


def end_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process when the thread that started it ends; kills it now if
    `parent` has ended.

    A launcher killed with SIGKILL cannot end its workers. On Linux the kernel does, even if a
    worker is stopped or stuck in a call (prctl(2), PR_SET_PDEATHSIG). On other systems this
    function does nothing.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_launcher(variables: Mapping[str, str]) -> None:
    """`end_with_parent` for a worker of torchrun or a task of srun only: a shell may end before its
    children."""
    launcher = ""
    with suppress(OSError):  # it has ended
        launcher = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    of_torchrun = "TORCHELASTIC_RUN_ID" in variables
    of_srun = "SLURM_STEP_ID" in variables and launcher == "slurmstepd"
    if of_torchrun or of_srun:
        end_with_parent()
