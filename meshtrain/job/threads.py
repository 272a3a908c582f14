"""Threads beside the main one, on a machine that may have no more of them."""

import threading
from collections.abc import Callable
from typing import Any


class NoThreadError(OSError):
    """The system has no more threads: a fault of the machine that may pass, like a full disk."""


def start_thread(target: Callable[..., object], *arguments: Any, name: str) -> threading.Thread:
    """Starts a thread that does not keep the process alive. Raises NoThreadError."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError(str(error)) from error
    return thread
