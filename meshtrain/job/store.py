"""Gathers over the launcher's key-value store (TCPStore): ranks exchange small values without a
collective."""

import json
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from meshtrain.errors import InputError, StartError, join_some, ranges
from meshtrain.job.pending import PendingWait, waiting
from meshtrain.job.watchdog.records import Diagnosis, DiagnosisKind
from meshtrain.layout import LayoutError

SAY_EVERY_S = 10.0  # how often a waiting rank 0 prints which ranks it waits for
# by which rank 0 gives a wait up sooner than the others: it knows whom all of them wait for
LATER_S = 15.0


@dataclass(frozen=True)
class RemoteFailure:
    """Another rank's failure that ended the job. `printed`: whether this rank has already printed
    it."""

    diagnosis: Diagnosis
    printed: bool = False


class Failures:
    """How the ranks of a job learn of each other's failures. Here, without a watchdog, the first
    rank to fail writes its error to the store."""

    def __init__(self, store: dist.Store | None) -> None:
        self._store = store

    def first_failure(self, name: str, error: BaseException) -> RemoteFailure | None:
        """The failure that ended the job before rank `name` failed with `error`; None if `error`
        was the first. A rank that fails closes its connections: later errors of other ranks are
        consequences."""
        if self._store is None or not isinstance(error, Exception):
            return None
        if is_input(error):
            own = f"{DiagnosisKind.INPUT} {name}: {error}"
        else:
            own = f"{DiagnosisKind.FAILED} {name} failed: {describe(error)}"
        try:
            first = self._store.compare_set("failure", "", own).decode()
        except RuntimeError:  # the store ended with the process that served it
            return None
        if first == own:
            return None
        first_kind, _, headline = first.partition(" ")
        return RemoteFailure(Diagnosis(DiagnosisKind(first_kind), (), headline))

    def is_lost(self) -> bool:
        """Whether the job is lost, so that no rank needs to be waited for."""
        return self._store is not None and self._store.check(["failure"])

    def leave(self) -> None:
        """All ranks are leaving: from now on a rank that is gone counts as having left, not as
        lost."""

    def progress(self) -> tuple[str | None, int | None]:
        """The phase and the step that this rank is in, if known."""
        return None, None


def describe(error: BaseException) -> str:
    """An error as the last lines of its traceback show it."""
    return "".join(traceback.format_exception_only(error)).strip()


def is_input(error: BaseException) -> bool:
    """Whether the user's input is wrong: the ranks then end with status 2."""
    return isinstance(error, InputError | LayoutError)


@dataclass(eq=False)
class Round:
    """One gather and broadcast of JSON values through the store: each rank puts one, rank 0 gathers
    them and broadcasts an answer. A rank may continue once it has put its value, and any thread may
    receive the answer later."""

    store: dist.Store | None  # None in a world of one
    rank: int
    world_size: int
    name: str  # unique, and the same on every rank
    is_lost: Callable[[], bool] = lambda: False
    meanwhile: Callable[[], object] = lambda: None  # called while this rank waits
    limit_s: float = math.inf  # for a wait: then StartError
    hosts: Sequence[str] = ()  # the host of each rank, as far as known

    def __post_init__(self) -> None:
        self._store = dist.HashStore() if self.store is None else self.store
        self._cancelled = threading.Event()
        # What rank 0 has read: how many values, and those of which ranks.
        self._count = 0
        self._values: dict[int, Any] = {}

    def put(self, value: object) -> None:
        """Puts this rank's value; does not wait."""
        text = json.dumps([self.rank, value])
        with self._pending(None, [0]):
            # One key for all ranks, so that rank 0 reads it in one go; torch's stubs lack the
            # method.
            self._store.append(f"{self.name}/given", f"{text}\n")  # type: ignore[attr-defined]
            self._store.add(f"{self.name}/count", 1)

    def gather(self, activity: str | None = None) -> list:
        """Every rank's value in rank order, on rank 0, once all have put theirs. `activity`: named
        in the line that says which ranks rank 0 waits for; None prints nothing. Raises
        RuntimeError: another rank has failed; CancelledError: `cancel` was called; StartError:
        `limit_s` is over."""
        self._wait(self._read_values, activity)
        for key in ("given", "count"):  # a long run has many rounds
            self._store.delete_key(f"{self.name}/{key}")
        return [self._values[rank] for rank in range(self.world_size)]

    def broadcast(self, value: object) -> None:
        """Sends rank 0's answer to all; does not wait."""
        self._store.set(f"{self.name}/all", json.dumps(value))

    def receive(self, activity: str | None = None) -> Any:
        """Waits for rank 0's answer and returns it; raises as `gather` does."""
        self._wait(lambda: [] if self.has_answer else [0], activity)
        return json.loads(self._store.get(f"{self.name}/all"))

    def missing(self) -> list[int]:
        """The ranks whose values rank 0 had not read when it last looked; any thread may call
        this."""
        return [rank for rank in range(self.world_size) if rank not in self._values]

    @property
    def has_answer(self) -> bool:
        return bool(self._store.check([f"{self.name}/all"]))

    def delete(self) -> None:
        """Deletes rank 0's answer; call it on rank 0 once all ranks must have received it."""
        self._store.delete_key(f"{self.name}/all")

    def cancel(self) -> None:
        self._cancelled.set()

    def _read_values(self) -> list[int]:
        count = self._store.add(f"{self.name}/count", 0)
        if count != self._count:
            self._count = count
            lines = self._store.get(f"{self.name}/given").splitlines()
            # A value that is not counted yet waits: its rank would count it after `gather` has
            # deleted the count, and leave it in the store.
            self._values = dict(json.loads(line) for line in lines[:count])
        return self.missing()

    def _pending(self, activity: str | None, missing: list[int]) -> PendingWait:
        place = f"the meeting {activity or self.name!r} at the store"
        return waiting(place, ranks=range(self.world_size), missing=lambda: missing or [0])

    def _wait(self, look: Callable[[], list[int]], activity: str | None) -> None:
        """Waits until `look` returns no missing rank. It polls, because a blocking wait has a time
        limit."""
        start = printed_at = time.monotonic()
        pause = max(0.001, self.world_size / 50_000)  # the store's one thread serves all ranks
        missing: list[int] = []
        with self._pending(activity, missing):
            while True:
                missing[:] = look()
                if not missing:
                    return
                if self.is_lost():
                    raise RuntimeError("another rank has failed")
                self.meanwhile()
                if self._cancelled.wait(pause):
                    ranks = join_some(ranges(missing), 8)
                    raise CancelledError(f"rank {self.rank} waits no longer for ranks {ranks}")
                pause = min(pause * 1.5, max(0.25, self.world_size / 2000))
                now = time.monotonic()
                later_s = 0.0 if self.rank == 0 else LATER_S
                if now - start > self.limit_s + later_s:
                    waits = f"{activity or self.name}: {self._describe(missing)} did not come"
                    raise StartError(f"the job does not begin: {waits} within {self.limit_s:g} s")
                if activity is not None and self.rank == 0 and now - printed_at > SAY_EVERY_S:
                    printed_at = now
                    waits = f"{activity}: waiting for {self._describe(missing)}"
                    print(f"{waits}, {now - start:.0f} s now", flush=True)

    def _describe(self, missing: Sequence[int]) -> str:
        """`2 of 16 ranks (8-9 on host b)`."""
        ranks = join_some(ranges(missing), 8)
        if self.hosts:
            names = list(dict.fromkeys(self.hosts[rank] for rank in missing))
            hosts = "hosts" if len(names) > 1 else "host"
            ranks += f" on {hosts} {join_some(names, 8)}"
        return f"{len(missing)} of {self.world_size} ranks ({ranks})"
