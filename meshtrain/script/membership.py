"""Membership of a script in its job: it joins in one line, and leaves at its end without a `with`
block around its loop.

A script ends in one of two ways that Python tells of: its last line (`atexit`), or an exception
that nobody catches (`sys.excepthook`). The first leaves the job together with all other ranks, the
second names this rank to them.
"""

import atexit
import sys
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TypeVar

from meshtrain.job.watchdog.watchdog import joined

T = TypeVar("T")


class Membership:
    """The job that this process has joined, and what has to be closed before it leaves."""

    def __init__(self, timeout_s: float) -> None:
        """Joins, as `meshtrain.start` does."""
        self._open = ExitStack()
        self.job, self.watchdog = self._open.enter_context(joined(timeout_s))
        self._hook_before = sys.excepthook

    def leave_with_script(self) -> None:
        """From now on the end of the script leaves the job. Called once there is a process group:
        torch then prints what ends a script by a hook of its own, which has to come last."""
        self._hook_before = sys.excepthook
        sys.excepthook = self._crashed
        atexit.register(self.leave)
        _members.append(self)

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Enters a context that ends, with the script's error if it has one, before the job is
        left."""
        return self._open.enter_context(context)

    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the job, once. `error`: that ends the script on this rank.

        Raises SystemExit: the process has to end with another status than Python would give it, and
        why has been printed.
        """
        atexit.unregister(self.leave)
        if sys.excepthook == self._crashed:  # else somebody has put another one on top
            sys.excepthook = self._hook_before
        trace = None if error is None else error.__traceback__
        still_open, self._open = self._open, ExitStack()
        try:
            still_open.__exit__(None if error is None else type(error), error, trace)
        except BaseException as after:
            if after is not error:
                raise

    def _crashed(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """In the place of `sys.excepthook`: Python obeys a SystemExit that it raises."""
        self.leave(error)
        self._hook_before(kind, error, trace)


_members: list[Membership] = []  # that leave with their script


def leave_all(error: BaseException | None) -> None:
    """Leaves as at the end of a script, in a process that runs one and does not end as Python
    does. Raises SystemExit, as `leave`."""
    while _members:
        _members.pop().leave(error)
