"""The registry of pending waits: what each thread of this process waits for, filled by the waits themselves.

The watchdog's thread reads it. Collectives that torch starts by itself (FSDP, autograd) are in its flight recorder.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_stacks: dict[int, list["PendingWait"]] = {}  # thread -> its waits, the innermost last; only it changes its list


class Resource(StrEnum):
    """What a thread waits for."""

    RANKS = "ranks"
    DEVICE = "device"
    DATA = "data"
    DISK = "disk"


@dataclass(eq=False, slots=True)
class PendingWait:
    """A context manager around a wait. An error that ends a wait for other ranks carries it: `wait_that_failed`."""

    label: str  # for people
    group: "ProcessGroup | None" = None  # who is waited for, or `ranks` where there is none
    _: KW_ONLY
    ranks: Sequence[int] = ()
    missing: Callable[[], Sequence[int]] | None = None  # who has not come, if that is known; another thread calls it
    resource: Resource = Resource.RANKS

    def __enter__(self) -> None:
        _stacks.setdefault(threading.get_ident(), []).append(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _stacks[threading.get_ident()].pop()
        if error is not None and self.resource is Resource.RANKS and wait_that_failed(error) is None:
            error._meshtrain_wait = self  # type: ignore[attr-defined]


waiting = PendingWait  # as it reads after `with`


def pending_waits() -> dict[int, tuple[PendingWait, ...]]:
    """The waits of each thread that waits, by its identifier; the innermost is the last one."""
    return {thread: waits for thread, stack in _stacks.copy().items() if (waits := tuple(stack))}


def wait_that_failed(error: BaseException) -> PendingWait | None:
    """The wait for other ranks out of which an error came; None: it came from elsewhere."""
    return getattr(error, "_meshtrain_wait", None)
