"""Stand-ins for what a watchdog meets: a clock that a test sets, reports of ranks, and the other
ranks of its job."""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch

from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from meshtrain.job.watchdog.diagnose import Coordinator
from meshtrain.job.watchdog.records import PendingCollective, RankReport, RankStatus, Reach
from meshtrain.job.watchdog.watchdog import Watchdog

WORLD = (0, 1, 2, 3)
START = 1_700_000_000


def on_ranks(world: int, do: Callable[[int], Any]) -> list[Any]:
    """What it returns for each rank, each in a thread of its own that is named by the rank."""

    def named(rank: int) -> Any:
        threading.current_thread().name = str(rank)
        return do(rank)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(named, range(world)))


def place(rank: int, world: int) -> Environment:
    return Environment("none", rank, world, 0, "a", ("a", 1))


class FakeTime:
    """In place of the module `time`: it passes when a test sets it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return START + self.now


def job_of(rank: int = 0, world_size: int = 1, host: str = "a") -> Job:
    return Job(Environment("none", rank, world_size, rank, host, None), torch.device("cpu"), None)


def rank(number: int, host: str = "a", reach: str = "answers", **status: Any) -> RankReport:
    """A rank that trains, step 5, unless it says something else."""
    name = f"rank {number} on host {host} (dp_shard {number})"
    fields = {"phase": "step", "step": 5, "seconds": 20.0} | status
    answer = RankStatus(**fields) if reach == "answers" else None
    return RankReport(number, host, name, 1000 + number, Reach(reach), answer)


def waits(
    label: str = "all_reduce 7", over: str = "dp_shard", ranks: tuple[int, ...] = WORLD, **more: Any
) -> PendingCollective:
    return PendingCollective(label, over, ranks, **more)


def peers_of(looks: tuple[list[RankReport], ...]) -> Mock:
    """In place of `Peers` of three ranks: their reports are given, one look after another. The last
    look repeats."""
    peers = Mock()
    peers.alive_from_rank_0.return_value = [SimpleNamespace(rank=0)]
    peers.examine.side_effect = itertools.chain(looks, itertools.repeat(looks[-1] if looks else []))
    peers.survivors.side_effect = lambda diagnosis: {0, 1, 2} - set(diagnosis.ranks)
    return peers


def watchdog_of(number: int, *looks: list[RankReport]) -> Watchdog:
    """The watchdog of this rank of three."""
    watch = Watchdog(job_of(number, 3))
    watch._server, watch._peers = object(), peers_of(looks)
    watch._coordinator = Coordinator(watch.peers, watch._clock, watch._closed)
    return watch


def raised(error: Exception) -> Exception:
    """The error with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


def send(number: int) -> None:
    """A signal to this process."""
    os.kill(os.getpid(), number)
