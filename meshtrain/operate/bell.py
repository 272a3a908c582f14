"""Wakes a thread when a signal has come, also while the main thread is stuck in a call that never returns.

Python runs the handler of a signal in the main thread, between two of its instructions. What is done at once, whatever
the main thread does, is a byte written into a pipe (signal.set_wakeup_fd).
"""

import os
import select
import signal
import threading
from contextlib import suppress

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Bell:
    """Rings for signals, and for whoever rings it."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        for end in (self._out, self._in):
            os.set_blocking(end, False)
        self._hangs = False

    def hang(self) -> None:
        """From now on it rings for signals, unless the program has a bell of its own. For the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        self._hangs = before == -1
        if not self._hangs:
            signal.set_wakeup_fd(before)

    def take_down(self) -> None:
        """It does not ring for signals any more."""
        if self._hangs and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            self._hangs = False

    def ring(self) -> None:
        """Wakes who waits."""
        with suppress(BlockingIOError):  # it rings already
            os.write(self._in, b"\0")

    def wait(self, seconds: float) -> bool:
        """Until it rings, or for so long; whether it was for a signal that asks a process to end."""
        ready, _, _ = select.select([self._out], [], [], seconds)
        rung = os.read(self._out, 4096) if ready else b""
        return any(number in rung for number in SIGNALS)
