"""A call that may hang (a name's look-up, a dead file server) gets a time limit."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[..., T], *arguments: Any) -> T:
    """What the call returns, or raises.

    A call that does not come back is left behind in a thread that ends with the process.

    Raises:
        TimeoutError: it took longer than `seconds`.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call(*arguments))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return done[0]
