"""The cost of starting a large job, measured by fake ranks that meet at a real store, over the
world size.

    python tools/bench/start.py [--ranks 64 256 1024 4096] [--picture start.png] [--json]

Each fake rank has its own connection to a TCPStore, which is a separate process. The ranks of the
first two hosts are threads that do what `meshtrain.train` does up to its first step, except for
what needs a whole process: the data are opened once, the watchdog does not listen, nothing is
computed. One thread plays all other ranks: for each, it sends the store what the last rank of the
first two hosts sends, under the rank's own name, and fetches each answer. Groups are made in a
world of torch's fake backend as with NCCL, by splitting the world. Calls, bytes and groups are
exact.
"""

import argparse
import json
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshtrain
from meshtrain import mesh, train
from meshtrain.checkpoint.state import gather_placements
from meshtrain.config import Config
from meshtrain.job.consistency import require_equal, run_fingerprints
from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from meshtrain.job.rendezvous import agree_on_start
from meshtrain.job.watchdog import status_server
from meshtrain.layout import Layout
from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.run import setup
from meshtrain.run.rank_table import layout_text

ROOT = Path(meshtrain.__file__).parents[1]
GPUS = 8  # per host
CPU = torch.device("cpu")
LAYOUT = {"pp": 2, "dp_replicate": 2, "dp_shard": -1, "tp": 2}
IMPORTS = """
import sys, time
begun = time.process_time()
import torch
of_torch = time.process_time() - begun
import meshtrain.train
print(of_torch, time.process_time() - begun - of_torch, len(sys.modules))
"""
SERVER = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
begun = time.process_time()
print(store.port, flush=True)
sys.stdin.read()
print(time.process_time() - begun)
"""
PLACEHOLDERS: dict[
    str, Callable
] = {  # for what needs a process of its own, or does not depend on the world size
    "run.setup.prepare_data": lambda *_, **__: None,
    "run.setup.build.check_start": lambda *_: None,
    "train.set_numerics": lambda *_: None,
    "job.process.dist.init_process_group": lambda *_, **__: None,
    "job.process.dist.PrefixStore": lambda *_: None,
}


def place(rank: int, ranks: int) -> Environment:
    return Environment(
        "srun", rank, ranks, rank % GPUS, f"host{rank // GPUS:04}", ("127.0.0.1", 29500)
    )


class CountingStore:
    """A rank's store. Counts calls, each a round trip to the store's only thread, and the bytes of
    its answers."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.calls, self.polls, self.answers = store, 0, 0, Counter[str]()
        # name and text of its rounds
        self.given: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()

    def __getattr__(self, name: str) -> Callable:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            answer = method(*arguments)
            if name == "check" or (name == "add" and arguments[1] == 0):
                self.polls += 1  # their number depends on how long the other ranks take
            else:
                self.calls += 1
            if name == "append":
                self.given.put((arguments[0].removesuffix("/given"), arguments[1]))
            if name in ("get", "multi_get"):
                self.answers[str(arguments[0])] += sum(
                    map(len, [answer] if name == "get" else answer)
                )
            return answer

        return call


@dataclass
class Start:
    """The load of a start on the store, and the groups it makes. `calls` do not include polls."""

    ranks: int
    rounds: int  # number of rounds in which all ranks meet
    calls: int  # the most calls of any rank but rank 0
    calls_of_rank_0: int
    polls: int  # the most polls of any rank but rank 0
    bytes: int  # the most bytes answered to any rank but rank 0
    largest: int  # the largest of these answers: the addresses of all ranks
    wall_s: float
    groups: int = 0  # calls that make groups, on one rank
    groups_s: float = 0.0  # CPU time of these calls
    store_s: float = 0.0  # CPU time of the store


def read_config(ranks: int, folder: str) -> Config:
    layout = ", ".join(f"{axis}: {size}" for axis, size in LAYOUT.items())
    overrides = [f"train.output={folder}/run", f"layout={{{layout}}}", f"batch.global_size={ranks}"]
    return Config.load(
        str(ROOT / "configs" / "quickstart.yaml"),
        overrides,
        for_training=True,
        world_size=ranks,
        device="cpu",
    )


def meet(ranks: int, connect: Callable[[], Any], real: int | None = None) -> Start:
    """Starts a run of `ranks` ranks, each with the store that `connect` returns. `real`: the number
    of ranks that are threads, a multiple of a host's; the others are played."""
    real = real or ranks
    problems: list[BaseException] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = read_config(ranks, folder)
        setup.prepare_data(config.data, say=print)
        data = setup.open_data(
            config.data, n_outputs=setup.build.outputs(config), seed=0, say=lambda _: None
        )
        for name, value in {
            "run.setup.open_data": lambda *_, **__: data,
            "train.train": _rest,
            **PLACEHOLDERS,
        }.items():
            stack.enter_context(mock.patch(f"meshtrain.{name}", value))
        topics = list(run_fingerprints(config, os.environ))
        with ThreadPoolExecutor(
            64
        ) as pool:  # in parallel, since a slow name server may delay some of them by seconds
            stores = [CountingStore(store) for store in pool.map(lambda _: connect(), range(ranks))]
        rounds = [0] * real

        def rank(number: int) -> None:
            store: Any = stores[number]
            try:
                job = Job(place(number, ranks), CPU, store)
                agree_on_start(job.environment, store)
                job.again = job.reduce("meeting", job.environment.again, any)
                server: Any = SimpleNamespace(token=f"{number:032}", port=40_000 + number % GPUS)
                status_server.exchange_addresses(job, server)
                with job.collective_check("reading the config"):
                    pass
                require_equal(job, *topics)
                train.run(config, job)
                rounds[number] = job._rounds
            except BaseException as error:
                problems.append(error)
                raise
            finally:
                store.given.put(None)

        threads = [
            threading.Thread(target=rank, args=(number,), daemon=True) for number in range(real)
        ]
        threads.append(threading.Thread(target=play, args=(stores, real), daemon=True))
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not problems:
            time.sleep(0.05)
        wall_s = time.monotonic() - begun
    if problems:
        raise problems[0]
    others = stores[1:real]
    return Start(
        ranks,
        max(rounds),
        max(of.calls for of in others),
        stores[0].calls,
        max(of.polls for of in others),
        max(of.answers.total() for of in others),
        max(max(of.answers.values()) for of in others),
        wall_s,
    )


def play(stores: Sequence[CountingStore], real: int) -> None:
    """Repeats, for all ranks from `real` on, what rank `real - 1` does at the store."""
    played = range(real, len(stores))
    for rank in played:
        stores[rank].set(f"hello/{rank}", f"token{rank}")
    for rank in played:
        while not stores[rank].check([f"welcome/{rank}"]):
            time.sleep(0.01)
        stores[rank].add(f"{stores[rank].get(f'welcome/{rank}').decode().split()[1]}/met", 1)
    model = f"host{(real - 1) // GPUS:04}"
    while (given := stores[real - 1].given.get()) is not None:
        name, text = given
        for rank in played:
            own = text.replace(f", {real - 1}, ", f", {rank}, ").replace(
                model, f"host{rank // GPUS:04}"
            )
            stores[rank].append(f"{name}/given", f"[{rank},{own.partition(',')[2]}")
            stores[rank].add(f"{name}/count", 1)
        for rank in played:
            while not stores[rank].check([f"{name}/all"]):
                time.sleep(0.01)
            stores[rank].get(f"{name}/all")


def _rest(context: train.RunContext) -> None:
    """The meetings at the store in `train.train` before the first step."""
    job = context.job
    assert job.layout is not None
    nothing: Any = None
    context.resume.restore(nothing)
    gather_placements([], job, job.layout)
    table = layout_text(job.layout) if job.rank == 0 else ""
    context.status.begin(context.spec.config, table, GoodputTracker(None, 0, 0.0))
    with job.collective_check("opening metrics.jsonl"):
        pass
    context.status._goodput = None  # nothing was trained


@contextmanager
def served() -> Iterator[tuple[int, list[float]]]:
    """A store in a process of its own: yields its port, and a list that gets its CPU time
    afterwards."""
    used: list[float] = []
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield int(server.stdout.readline()), used
        server.stdin.close()
        used.append(float(server.stdout.readline()))


def make_groups(ranks: int) -> tuple[int, float]:
    """The number of calls that make the groups of a rank in the middle of the world, and their CPU
    seconds."""
    own, calls, new_group = ranks // 2, [0], dist.new_group

    def split_group(*_: Any, split_ranks: Sequence[Sequence[int]], **__: Any) -> object:
        calls[0] += 1
        return new_group(next(list(group) for group in split_ranks if own in group))

    def make_one(*arguments: Any, **options: Any) -> object:
        calls[0] += 1
        return new_group(*arguments, **options)

    dist.init_process_group("fake", store=FakeStore(), rank=own, world_size=ranks)
    try:
        world: Any = dist.group.WORLD
        world.bound_device_id = torch.device("cuda", 0)
        with ExitStack() as stack:
            for owner, name, value in (
                (mesh, "_splits", lambda group: group is world),
                (mesh, "_options", lambda _: None),
                (dist, "split_group", split_group),
                (dist, "new_group", make_one),
                (device_mesh, "new_group", make_one),
                (device_mesh, "split_group", split_group),
                (torch.accelerator, "is_available", lambda: True),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            begun = time.process_time()
            mesh.build_mesh(Layout.resolve(LAYOUT, ranks), "cuda")
            return calls[0], time.process_time() - begun
    finally:
        dist.destroy_process_group()


def measure(ranks: int) -> Start:
    def connect() -> dist.Store:
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(minutes=10))

    with served() as (port, store_s), redirect_stdout(sys.stderr):
        start = meet(ranks, connect, 2 * GPUS)
    start.store_s = store_s[0]
    start.groups, start.groups_s = make_groups(ranks)
    return start


def draw(starts: Sequence[Start], path: Path) -> None:
    from matplotlib import pyplot

    panels: tuple[tuple[str, dict[str, list[float]]], ...] = (
        (
            "calls of one rank",
            {
                "store": [start.calls for start in starts],
                "store, polls": [start.polls for start in starts],
                "groups made": [start.groups for start in starts],
            },
        ),
        (
            "bytes that the store answers one rank",
            {
                "all": [start.bytes for start in starts],
                "addresses of all ranks": [start.largest for start in starts],
            },
        ),
        (
            "seconds of CPU time",
            {
                "store, for all ranks": [start.store_s for start in starts],
                "groups, one rank": [start.groups_s for start in starts],
            },
        ),
    )
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
    ranks = [start.ranks for start in starts]
    for axis, (title, curves) in zip(axes, panels, strict=True):
        for label, values in curves.items():
            axis.loglog(ranks, values, marker="o", label=label)
        axis.set(title=title, xlabel="ranks", xticks=ranks, xticklabels=map(str, ranks))
        axis.minorticks_off()
        axis.legend()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="What the start of a large job takes, over the size of its world."
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[64, 256, 1024, 4096],
        help="multiples of 8, from 16 on",
    )
    parser.add_argument("--picture", type=Path, help="a file for the curves")
    parser.add_argument("--json", action="store_true", help="rows for programs")
    options = parser.parse_args(arguments)
    if any(ranks < 16 or ranks % 8 for ranks in options.ranks):
        parser.error("--ranks: multiples of 8, from 16 on")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if not options.json:
        imports = subprocess.run(
            [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, cwd=ROOT
        )
        of_torch, own, modules = imports.stdout.split()
        print(
            f"imports: {float(of_torch):.1f} s of CPU time for torch, {float(own):.1f} s for "
            f"others, {modules} modules"
        )
        print(
            " ranks  rounds  calls  of rank 0  polls      bytes  of them addresses  store CPU  "
            "wall  groups  CPU"
        )
    starts = []
    for ranks in options.ranks:
        starts.append(s := measure(ranks))
        if not options.json:
            print(
                f"{s.ranks:6}  {s.rounds:6}  {s.calls:5}  {s.calls_of_rank_0:9}  {s.polls:5}  "
                f"{s.bytes:9,}  "
                f"{s.largest:17,}  {s.store_s:7.1f} s  {s.wall_s:3.0f} s  {s.groups:6}  "
                f"{1000 * s.groups_s:.0f} ms",
                flush=True,
            )
    if options.json:
        print(json.dumps([asdict(start) for start in starts]))
    if options.picture is not None:
        draw(starts, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
