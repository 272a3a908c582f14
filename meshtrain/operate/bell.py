"""Wakes a thread when a signal has come, also while the main thread is stuck in a call that never returns.

Python runs the handler of a signal in the main thread, between two of its instructions. What is done at once, whatever
the main thread does, is a byte written into a pipe (signal.set_wakeup_fd).
"""

import os
import select
import signal
import threading
from contextlib import suppress
from weakref import ref

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Bell:
    """Rings for signals, and for whoever rings it."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        for end in (self._out, self._in):
            os.set_blocking(end, False)
        self._hangs = False
        self._handler = lambda number, _: self._ring(number)  # one object, to be known again

    def hang(self) -> None:
        """From now on it rings for signals, unless the program has a bell of its own. For the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        self._hangs = before == -1
        if not self._hangs:
            signal.set_wakeup_fd(before)
        _take_down_in_children(self)

    def catch(self) -> bool:
        """From now on SIGTERM rings it and does nothing else, unless the program has a way of its own.

        Returns:
            Whether it is so.
        """
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handler)
        return self.catches

    @property
    def catches(self) -> bool:
        """Whether SIGTERM is its own still: the program may have got a way of its own meanwhile."""
        return signal.getsignal(signal.SIGTERM) is self._handler

    def take_down(self) -> None:
        """It does not ring for signals any more. What the program has put in its place stays."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._hangs:
            now = signal.set_wakeup_fd(-1)
            if now not in (-1, self._in):
                signal.set_wakeup_fd(now)
            self._hangs = False
        if self.catches:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def ring(self) -> None:
        """Wakes who waits."""
        self._ring(0)

    def _ring(self, number: int) -> None:
        with suppress(BlockingIOError):  # it rings already
            os.write(self._in, bytes([number]))

    def wait(self, seconds: float) -> set[int]:
        """Until it rings, or for so long; the signals for which it was, of those that ask a process to end."""
        ready, _, _ = select.select([self._out], [], [], seconds)
        rung = os.read(self._out, 4096) if ready else b""
        return {number for number in SIGNALS if number in rung}


def _take_down_in_children(bell: Bell) -> None:
    """A signal to a process that this one forks (a reader of data) is not for this one, and does there what it does.

    Nor is one that comes while it is being forked: until the bell is down there it is held back.
    """
    weak, before = ref(bell), threading.local()

    def hold_back() -> None:
        if weak() is not None:
            before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def release() -> None:
        mask = before.__dict__.pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def take_down() -> None:
        inherited = weak()
        if inherited is not None:
            inherited.take_down()
        release()

    os.register_at_fork(before=hold_back, after_in_parent=release, after_in_child=take_down)
