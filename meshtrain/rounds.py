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
        self._cancelled = threading.Event()
        self._alone: dict[str, str] = {}  # in place of a store, in a world of one

    def give(self, value: object) -> None:
        """This rank's value; does not wait."""
        self._set(str(self._rank), json.dumps(value))

    def collect(self, what: str | None = None) -> list:
        """Every rank's value in rank order, for rank 0, once all have given one.

        Args:
            what: what the ranks are doing, for the line that says whom rank 0 waits for; None says nothing.

        Raises:
            RuntimeError: another rank has failed. CancelledError: this rank does not wait any longer.
        """
        ranks = [str(rank) for rank in range(self._world_size)]
        self._wait(ranks, what)
        found = [json.loads(text) for text in self._get(ranks)]
        if self._store is not None:
            for rank in ranks:  # a long run has many rounds
                self._store.delete_key(f"{self.name}/{rank}")
        return found

    def answer(self, value: object) -> None:
        """Rank 0's word to all; does not wait."""
        self._set("all", json.dumps(value))

    def answered(self, what: str | None = None) -> Any:
        """Rank 0's word, once it is there; raises as `collect` does."""
        self._wait(["all"], what)
        return json.loads(self._get(["all"])[0])

    def forget(self) -> None:
        """Rank 0 takes its answer away, when all ranks must have had it."""
        if self._store is not None:
            self._store.delete_key(f"{self.name}/all")

    def cancel(self) -> None:
        """Whoever waits on this rank, in another thread, gives up."""
        self._cancelled.set()

    def _set(self, key: str, text: str) -> None:
        if self._store is None:
            self._alone[key] = text
        else:
            self._store.set(f"{self.name}/{key}", text)

    def _get(self, keys: list[str]) -> list[str]:
        if self._store is None:
            return [self._alone[key] for key in keys]
        return [text.decode() for text in self._store.multi_get([f"{self.name}/{key}" for key in keys])]

    def _wait(self, keys: list[str], what: str | None) -> None:
        """Until all keys are in the store. It polls, because a blocking wait has a time limit."""
        store = self._store
        if store is None:
            return
        start = said = time.monotonic()
        pause, missing = 0.001, keys
        while missing := [key for key in missing if not store.check([f"{self.name}/{key}"])]:
            if self._over():
                raise RuntimeError("another rank has failed")
            if self._cancelled.wait(pause):
                raise CancelledError(f"rank {self._rank} waits no longer for ranks {', '.join(missing[:8])}")
            pause = min(pause * 1.5, max(0.25, self._world_size / 2000))  # the store serves all of them
            if what is not None and self._rank == 0 and time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                ranks = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
                seconds = f"{said - start:.0f} s now"
                print(f"{what}: waiting for {len(missing)} of {len(keys)} ranks ({ranks}), {seconds}", flush=True)
