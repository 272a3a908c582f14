"""The registry of pending waits: what each thread of this process waits for, entered by the waits
themselves.

The watchdog's thread reads it, and how often this process has got on with long work of its start.
Collectives that torch starts by itself (FSDP, autograd) are in its flight recorder.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# thread -> its waits, innermost last; only that thread changes its list
_stacks: dict[int, list["PendingWait"]] = {}


class _Work:
    advances = 0


def advance() -> None:
    """Long work of the start has got on: a document was prepared, a block of weights was read. The
    start has a time limit for what does not."""
    _Work.advances += 1


def advances() -> int:
    """How often this process has got on so far."""
    return _Work.advances


class Resource(StrEnum):
    """What a thread waits for."""

    RANKS = "ranks"
    DEVICE = "device"
    DATA = "data"
    DISK = "disk"


@dataclass(eq=False, slots=True)
class PendingWait:
    """A context manager around a wait. An error that ends a wait for other ranks refers to it:
    `wait_that_failed`."""

    label: str  # for people
    group: "ProcessGroup | None" = None  # whose ranks are waited for; None: `ranks` are
    _: KW_ONLY
    ranks: Sequence[int] = ()
    # the ranks not arrived yet, if known; another thread calls it
    missing: Callable[[], Sequence[int]] | None = None
    resource: Resource = Resource.RANKS

    def __enter__(self) -> None:
        _stacks.setdefault(threading.get_ident(), []).append(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _stacks[threading.get_ident()].pop()
        if error is None or self.resource is not Resource.RANKS:
            return
        if wait_that_failed(error) is None:  # the innermost wait counts
            error._meshtrain_wait = self  # type: ignore[attr-defined]


waiting = PendingWait  # reads well after `with`


def pending_waits() -> dict[int, tuple[PendingWait, ...]]:
    """The waits of each waiting thread, by thread identifier; innermost last."""
    waits = {thread: tuple(stack) for thread, stack in _stacks.copy().items()}
    return {thread: of_thread for thread, of_thread in waits.items() if of_thread}


def wait_that_failed(error: BaseException) -> PendingWait | None:
    """The wait for other ranks that ended with this error; None: the error came from elsewhere."""
    return getattr(error, "_meshtrain_wait", None)
