"""Reading from a file system that has a bad moment: a server that fails over, a stale mount, no descriptor left."""

import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from meshtrain.errors import InputError, UnreadableError

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0)  # a minute and a half

T = TypeVar("T")


def retried(read: Callable[[], T], *more: type[InputError]) -> T:
    """What `read` returns. An OSError, or one of `more`, is tried again after each of the pauses.

    Raises:
        UnreadableError: for an OSError that has stayed. One of `more`: as it was raised last.
    """
    passing: tuple[type[Exception], ...] = (OSError, *more)
    for pause_s in PAUSES_S:
        try:
            return read()
        except passing as error:
            host = socket.gethostname()
            print(f"warning: on host {host}: {error}; tried again in {pause_s:g} s", file=sys.stderr, flush=True)
            time.sleep(pause_s)
    try:
        return read()
    except UnreadableError:
        raise
    except OSError as error:
        raise UnreadableError(error.filename or "a file", error.strerror or str(error)) from error
