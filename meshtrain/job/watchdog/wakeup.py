"""Wakes a thread when a signal has come, also while the main thread is stuck in a call that never returns.

Python runs a handler in the main thread, later; at once it only writes to a pipe (signal.set_wakeup_fd).
"""

import os
import select
import signal
import threading
from contextlib import suppress
from weakref import ref

from meshtrain.job.signals import SIGNALS, in_main_thread, install_handlers


class SignalWakeup:
    """A pipe that wakes `wait`, by a signal or by `wake`."""

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
