"""How the processes of other ranks of this host ended. Their launcher is told, and takes the end
off the kernel's table soon after; until then every process of the user can read it there (proc(5),
pidfd_open(2))."""

import os
import select
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress

from meshtrain.job.threads import start_thread

MOST_WATCHED = 128  # each takes a descriptor
EXIT_CODE = 52  # the number of this field of /proc/PID/stat
SEEN_S = 0.5  # by which the end of a process is seen after its connections are closed


class Deaths:
    """A thread that sleeps until a process ends, and notes how."""

    def __init__(self, processes: Mapping[int, int]) -> None:
        """`processes`: process id of each other rank of this host."""
        self._ends: dict[int, str | None] = {}
        self._noted = threading.Condition()
        self._watched: dict[int, tuple[int, int]] = {}  # descriptor -> rank and process id
        for rank, pid in list(processes.items())[:MOST_WATCHED]:
            # It has ended, there is no descriptor left, or no Linux here.
            with suppress(OSError, AttributeError):
                self._watched[os.pidfd_open(pid)] = (rank, pid)
        self._ranks = {rank for rank, _ in self._watched.values()}
        self._wake, self._closing = os.pipe()
        self._thread = start_thread(self._run, name="deaths")

    def end_of(self, rank: int) -> str | None:
        """`SIGSEGV` or `status 3`; None: it could not be seen. Waits a little for it to end."""
        with self._noted:
            self._noted.wait_for(lambda: rank in self._ends or rank not in self._ranks, SEEN_S)
            return self._ends.get(rank)

    def close(self) -> None:
        if self._closing >= 0:
            # To close it wakes nobody while a child, a data worker, has it open, too.
            os.write(self._closing, b"\0")
            self._thread.join()
            os.close(self._closing)
            self._closing = -1

    def _run(self) -> None:
        ends = select.poll()
        for descriptor in (self._wake, *self._watched):
            ends.register(descriptor, select.POLLIN)
        closing = False
        while not closing:
            for descriptor, _ in ends.poll():
                if descriptor == self._wake:
                    closing = True
                    continue
                ends.unregister(descriptor)
                rank, pid = self._watched.pop(descriptor)
                os.close(descriptor)
                with self._noted:
                    self._ends[rank] = end_of_process(pid)
                    self._noted.notify_all()
        for descriptor in (self._wake, *self._watched):
            os.close(descriptor)


def end_of_process(pid: int) -> str | None:
    """How a process ended that its parent has not yet asked for; None: it is not there any more, or
    did not end."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # from the third field on
        state = fields[0]
        code = int(fields[EXIT_CODE - 3])
    except (OSError, IndexError, ValueError):
        return None
    if state not in ("Z", "X"):
        return None
    if os.WIFSIGNALED(code):
        number = os.WTERMSIG(code)
        if number in signal.valid_signals():
            return signal.Signals(number).name
        return f"signal {number}"
    status = os.WEXITSTATUS(code)
    return f"status {status}" if status else None  # 0 is also what is shown to whom may not see it
