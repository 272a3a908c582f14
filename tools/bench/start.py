"""What the start of a large job takes, by fake ranks that meet at a real store, and the curve over the size of the world.

    python tools/bench/start.py [--ranks 64 256 1024 4096] [--picture start.png]

Each rank is a thread of one process and does what `meshtrain.train` does until its first step, but for what needs a
process of its own: data are opened once, the watchdog listens nowhere, and nothing is computed. The store is a TCPStore
in a process of its own, to which each rank has its own connection. Calls and bytes are counted where they are made.
Groups are made in a world of torch's fake backend, as NCCL makes them: split off the world.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import meshtrain
from meshtrain import train
from meshtrain.checkpoint.state import gather_placements
from meshtrain.config import Config
from meshtrain.job import process
from meshtrain.job.consistency import require_equal, run_fingerprints
from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from meshtrain.job.watchdog import status_server
from meshtrain.layout import Layout
from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.run import setup
from meshtrain.run.rank_table import layout_text

ROOT = Path(meshtrain.__file__).parents[1]
GPUS = 8  # of a host
POLLS = ("check",)  # of which there are as many as a rank waits for others
GROUPS = """
import sys, time
begun = time.process_time()
import meshtrain.train
imported = time.process_time() - begun
import json, sys
sys.path.insert(0, {folder!r})
import start
print(json.dumps({{"import_s": imported, **start.groups({ranks})}}))
"""
SERVER = """
import sys, resource
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
begun = cpu()
print(store.port, flush=True)
sys.stdin.read()
print(cpu() - begun, flush=True)
"""


class CountingStore:
    """A rank's store; counts what it asks for, by method, and the bytes that come back."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.calls, self.received = store, Counter[str](), Counter[str]()

    def __getattr__(self, name: str) -> Callable:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            polls = name in POLLS or (name == "add" and arguments[1] == 0)
            self.calls["polls" if polls else name] += 1
            answer = method(*arguments)
            if name in ("get", "multi_get"):
                self.received[str(arguments[0])] += len(answer) if name == "get" else sum(map(len, answer))
            return answer

        return call

    @property
    def made(self) -> int:
        """Calls but polls."""
        return self.calls.total() - self.calls["polls"]


@dataclass
class Start:
    """What the ranks of one world have asked the store for."""

    ranks: int
    rounds: int  # in which all ranks meet
    calls: list[int]  # but polls, by rank
    polls: list[int]  # by rank
    received: list[int]  # bytes, by rank
    table: int  # of them, the addresses of all ranks
    wall_s: float
    server_s: float = 0.0  # CPU time of the store
    groups: dict[str, float] = field(default_factory=dict)


def environment(rank: int, ranks: int, port: int) -> Environment:
    return Environment("srun", rank, ranks, rank % GPUS, f"host{rank // GPUS:04}", ("127.0.0.1", port))


def meet(ranks: int, config: Config, connect: Callable[[int], dist.Store], port: int, folder: Path) -> Start:
    """Has so many threads start a run of this config; `connect`: a rank's own connection to the store."""
    stores = [CountingStore(connect(rank)) for rank in range(ranks)]
    jobs: list[Job] = []
    problems: list[BaseException] = []
    fingerprints = list(run_fingerprints(config, os.environ))
    setup.prepare_data(config.data, say=print)
    data = setup.open_data(config.data, n_outputs=setup.build.outputs(config), seed=0, say=lambda _: None)
    lock = threading.Lock()

    def rank(number: int) -> None:
        try:
            place = environment(number, ranks, port)
            process._agree_on_start(place, stores[number])  # type: ignore[arg-type]
            job = Job(place, torch.device("cpu"), stores[number])  # type: ignore[arg-type]
            with lock:
                jobs.append(job)
            job.again = job.reduce("meeting", place.again, any)
            server = SimpleNamespace(token=f"{number:032}", port=40000 + number % 1000)
            status_server.exchange_addresses(job, server)  # type: ignore[arg-type]
            with job.collective_check("reading the config"):
                pass
            require_equal(job, *fingerprints)
            train.run(config, job)
        except BaseException as error:
            problems.append(error)

    def rest(spec: Any, job: Job, data: Any, status: Any, checkpoint: Any, *_: Any) -> None:
        """What of the loop's page meets at the store before the first step."""
        checkpoint.restore(None)
        assert job.layout is not None
        gather_placements([], job, job.layout)
        status.begin(config, layout_text(job.layout) if job.rank == 0 else "", GoodputTracker(None, 0, 0.0))
        with job.collective_check("opening metrics.jsonl"):
            pass

    with ExitStack() as stack:
        for name, value in {
            "train.train": rest, "run.setup.open_data": lambda *_, **__: data, "run.setup.prepare_data": lambda *_, **__: None,
            "run.setup.build.check_start": lambda *_: None, "train.set_numerics": lambda *_: None,
            "job.process.dist.init_process_group": lambda *_, **__: None, "job.process.dist.PrefixStore": lambda *_: None,
        }.items():  # fmt: skip
            stack.enter_context(mock.patch(f"meshtrain.{name}", value))
        threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(ranks)]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if problems:
        raise problems[0]
    table = max(max((n for key, n in store.received.items()), default=0) for store in stores)
    return Start(
        ranks, max(job._rounds for job in jobs), [store.made for store in stores],
        [store.calls["polls"] for store in stores], [store.received.total() for store in stores], table,
        time.monotonic() - begun,
    )  # fmt: skip
def groups(ranks: int) -> dict[str, float]:
    return {}
