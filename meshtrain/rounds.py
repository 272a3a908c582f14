"""How ranks exchange words without a collective: by the launcher's key-value store, each when it gets there."""

import json
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

SAY_EVERY_S = 10.0  # how often a waiting rank 0 says whom it waits for


@dataclass(frozen=True)
class Lost:
    """What a job was lost by: another rank's failure. `said`: whether this rank has printed it already."""

    reason: str
    said: bool = False


class Failures(Protocol):
    """What the ranks of a job know of each other's failures."""

    def failed(self, who: str, error: BaseException) -> Lost | None:
        """What the job was lost by before this rank, `who`, failed with `error`; None if that is the story itself.

        A rank that fails takes its connections with it, and every other rank then fails for that reason. Theirs is not
        the story that anybody needs to read.
        """
        ...

    def over(self) -> bool:
        """Whether the job is lost: nobody needs to be waited for."""
        ...

    def leave(self) -> None:
        """All ranks are leaving: who is not there any more was not lost."""
        ...


class FirstFailure:
    """The failures of a job that nobody watches: the first rank to fail leaves a word in the store."""

    def __init__(self, store: dist.Store | None) -> None:
        self._store = store

    def failed(self, who: str, error: BaseException) -> Lost | None:
        if self._store is None or not isinstance(error, Exception):
            return None
        mine = f"{who} failed: {described(error)}"
        try:
            first = self._store.compare_set("failure", "", mine).decode()
        except RuntimeError:  # the store went with the process that served it: the story ends here
            return None
        return Lost(first) if first != mine else None

    def leave(self) -> None:
        pass

    def over(self) -> bool:
        return self._store is not None and self._store.check(["failure"])


def described(error: BaseException) -> str:
    """An error as the last lines of its traceback have it."""
    return "".join(traceback.format_exception_only(error)).strip()


class Round:
    """One meeting of all ranks at the job's store: each gives a value, rank 0 collects them and answers all.

    Nobody has to wait in it: a rank may go on when it has given its value, and any thread may ask for the answer
    later. The store is the meeting place and no collective, so it does not matter what the ranks compute meanwhile.
    Values are anything that JSON can carry.
    """

    def __init__(
        self, store: dist.Store | None, rank: int, world_size: int, name: str, over: Callable[[], bool] = lambda: False
    ) -> None:
        """
        Args:
            store: where they meet; None in a world of one.
            name: of its own, the same on every rank.
            over: whether another rank has failed, so that nobody needs to be waited for.
        """
        self._store, self._rank, self._world_size, self.name = store, rank, world_size, name
        self._over = over
        self.meanwhile: Callable[[], object] = lambda: None  # is called while this rank waits
        self._cancelled = threading.Event()
        self._count, self._values = 0, dict[int, Any]()  # what rank 0 has read
        self._alone: dict[str, str] = {}  # in place of a store, in a world of one

    def give(self, value: object) -> None:
        """This rank's value; does not wait."""
        text = json.dumps([self._rank, value])
        if self._store is None:
            self._alone["given"] = text
        else:
            # One key, so that rank 0 reads it in one go; torch's stubs lack the method.
            self._store.append(f"{self.name}/given", f"{text}\n")  # type: ignore[attr-defined]
            self._store.add(f"{self.name}/count", 1)

    def collect(self, what: str | None = None) -> list:
        """Every rank's value in rank order, for rank 0, once all have given one.

        Args:
            what: what the ranks are doing, for the line that says whom rank 0 waits for; None says nothing.

        Raises:
            RuntimeError: another rank has failed. CancelledError: this rank does not wait any longer.
        """
        if self._store is None:
            return [json.loads(self._alone["given"])[1]]
        self._wait(self._silent, what)
        for key in ("given", "count"):  # a long run has many rounds
            self._store.delete_key(f"{self.name}/{key}")
        return [self._values[rank] for rank in range(self._world_size)]

    def answer(self, value: object) -> None:
        """Rank 0's word to all; does not wait."""
        if self._store is None:
            self._alone["all"] = json.dumps(value)
        else:
            self._store.set(f"{self.name}/all", json.dumps(value))

    def answered(self, what: str | None = None) -> Any:
        """Rank 0's word, once it is there; raises as `collect` does."""
        if self._store is None:
            return json.loads(self._alone["all"])
        self._wait(lambda: [] if self.is_answered else [0], what)
        return json.loads(self._store.get(f"{self.name}/all"))

    def missing(self) -> list[int]:
        """The ranks whose values rank 0 had not read when it last looked; any thread may ask."""
        return [rank for rank in range(self._world_size) if rank not in self._values]

    @property
    def is_answered(self) -> bool:
        """Whether rank 0's word is there."""
        return "all" in self._alone if self._store is None else bool(self._store.check([f"{self.name}/all"]))

    def forget(self) -> None:
        """Rank 0 takes its answer away, when all ranks must have had it."""
        if self._store is not None:
            self._store.delete_key(f"{self.name}/all")

    def cancel(self) -> None:
        """Whoever waits on this rank, in another thread, gives up."""
        self._cancelled.set()

    def _silent(self) -> list[int]:
        """The ranks that have given nothing yet."""
        assert self._store is not None
        count = self._store.add(f"{self.name}/count", 0)
        if count != self._count:
            self._count = count
            self._values = dict(json.loads(line) for line in self._store.get(f"{self.name}/given").splitlines())
        return [rank for rank in range(self._world_size) if rank not in self._values]

    def _wait(self, for_whom: Callable[[], list[int]], what: str | None) -> None:
        """Until nobody is missing. It polls, because a blocking wait has a time limit."""
        start = said = time.monotonic()
        pause = max(0.001, self._world_size / 50_000)  # the store's one thread serves all of them
        while missing := for_whom():
            if self._over():
                raise RuntimeError("another rank has failed")
            self.meanwhile()
            if self._cancelled.wait(pause):
                waits_for = ", ".join(map(str, missing[:8]))
                raise CancelledError(f"rank {self._rank} waits no longer for ranks {waits_for}")
            pause = min(pause * 1.5, max(0.25, self._world_size / 2000))
            if what is not None and self._rank == 0 and time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                ranks = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
                seconds = f"{said - start:.0f} s now"
                print(
                    f"{what}: waiting for {len(missing)} of {self._world_size} ranks ({ranks}), {seconds}", flush=True
                )
