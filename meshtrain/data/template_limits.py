"""Limits of a rendered conversation: a chat template is a program of somebody else's, and may never
end.

The sandbox of `chat.py` decides what a template can reach; this, how long it may compute and how
much it may take.
"""

import resource
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# of this process's own computing, so that a busy machine is no reason; usual are milliseconds
MOST_SECONDS = 30.0
MOST_CHARACTERS = 1 << 26  # of a rendered conversation
MOST_MEMORY = 2 << 30  # bytes of address space beyond what the process has when it begins
MOST_BITS = 1 << 16  # of a power of whole numbers, which nothing interrupts while it is computed


class TemplateLimitError(ValueError):
    """A template computes too long, writes too much or takes too much memory."""


class _StopError(BaseException):
    """The time is over. No Exception: Jinja passes over those of expressions that it tries to
    compute beforehand."""


def joined(pieces: Iterable[str]) -> str:
    """The text that a template writes piece by piece. Raises TemplateLimitError: it is longer than
    allowed."""
    texts = []
    size = 0
    for piece in pieces:
        texts.append(piece)
        size += len(piece)
        if size > MOST_CHARACTERS:
            raise TemplateLimitError(
                f"it writes more than {MOST_CHARACTERS:,} characters for one conversation"
            )
    return "".join(texts)


@contextmanager
def limits() -> Iterator[None]:
    """Encloses what a template computes for one conversation. Raises TemplateLimitError inside at a
    limit.

    Data is prepared in the main thread, which alone can be interrupted; in another thread there are
    no limits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _StopError

    limits_memory = sys.platform == "linux"  # other systems do not keep to such a limit
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        if limits_memory:
            most = _least(soft, _address_space() + MOST_MEMORY)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        yield
    except _StopError:
        raise TemplateLimitError(
            f"it computes for more than {MOST_SECONDS:g} s for one conversation"
        ) from None
    except MemoryError:
        raise TemplateLimitError(
            f"it takes more than {MOST_MEMORY >> 20:,} MiB for one conversation"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        if limits_memory:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def limit_powers(environment: Any) -> None:
    """Makes a Jinja sandbox refuse whole powers that would compute for hours in one step."""

    def power(base: Any, exponent: Any) -> Any:
        if (
            isinstance(base, int)
            and isinstance(exponent, int)
            and base.bit_length() * exponent > MOST_BITS
        ):
            raise TemplateLimitError("it computes a power of thousands of digits")
        return base**exponent

    environment.intercepted_binops = frozenset({"**"})
    environment.binop_table["**"] = power


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _least(soft: int, limit: int) -> int:
    return limit if soft == resource.RLIM_INFINITY else min(soft, limit)
