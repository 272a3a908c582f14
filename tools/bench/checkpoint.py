"""The cost of checkpoints: saving compared with plain writes of the same bytes, loading compared
with plain reads, and the time that training loses to a save in the background.

    python tools/bench/checkpoint.py [--size 768] [--ranks 1] [--pairs 10] [--folder FOLDER]
    [--json]

The plain sides move the bytes in the most direct way: each rank writes one file from memory and
waits until it is on disk (fsync), or reads one file block by block and computes its checksum
(crc32). All sides take turns on the same disk.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import meshtrain
from harness import median_interval
from meshtrain.checkpoint import directory as folders
from meshtrain.checkpoint.load import THREADS, exchange, read_shares
from meshtrain.checkpoint.manifest import Manifest, file_of
from meshtrain.checkpoint.save import Retention, Saver
from meshtrain.checkpoint.shard_file import BLOCK
from meshtrain.checkpoint.state import State
from meshtrain.config.schema import OptimizerSection
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.optim.optimizer import Optimizer
from pipeline_idle import start

WIDTH = 1024  # width of the model: layers of 4 MiB, and as much for each of AdamW's averages
SAMPLES = 64  # samples per step
AT_LEAST = 0.8  # the goal: share of the plain throughput
ABOUT: dict[str, Any] = {
    **{"samples": 0, "tokens": 0, "evaluation": None},
    **{name: {} for name in ("config", "data", "versions", "rng", "counters")},
}


@dataclass(frozen=True)
class Ratio:
    """Two sides that moved the same bytes: seconds of each, and the ratio of the first's throughput
    to the second's."""

    side: str
    to: str
    seconds: float
    plain_seconds: float
    ratio: float
    low: float
    high: float
    at_least: float | None = None


@dataclass(frozen=True)
class Lost:
    """The cost of one background save for training: seconds, over all steps that ran during it."""

    step_s: float
    save_s: float
    waited_s: float
    wall_s: float
    wall_low: float
    wall_high: float
    cpu_s: float


class Bench:
    """A stack of linear layers on all ranks, and the folder that its checkpoints go to."""

    def __init__(self, job: Job, options: argparse.Namespace, place: Path) -> None:
        self.job, self.options, self.place = job, options, place
        mesh = meshtrain.build_mesh(Layout({"dp_shard": job.world_size}))
        layers = max(1, options.size * 2**20 // (3 * 4 * WIDTH**2))
        torch.manual_seed(0)
        self.model = meshtrain.parallelize(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, False) for _ in range(layers))), mesh
        )
        self.optimizer = Optimizer(self.model, OptimizerSection(), mesh, 1)
        self.state = State(self.model, self.optimizer, mesh, job)
        self.saver = Saver(
            self.state, place, job, keep=Retention(keep_last=None), say=lambda line: None
        )
        self.inputs = torch.randn(SAMPLES, WIDTH)
        self.saves = 0
        self.save()  # touches the memory, and makes a checkpoint to load
        self.checkpoint = place / folders.name_of(1)
        self.manifest: Manifest = folders.open_manifest(self.checkpoint)[0]
        self.own = self.checkpoint / file_of(job.rank)
        self.memory = np.ones(self.own.stat().st_size, dtype=np.uint8)

    # What is measured

    def save(self, *, wait: bool = True) -> None:
        self.saves += 1
        self.saver.save(self.saves, ABOUT, wait=wait)
        assert self.saver.problem is None, self.saver.problem

    def write(self) -> None:
        with (self.place / f"plain_{self.job.rank}").open("xb", buffering=0) as file:
            view = self.memory.data
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())

    def load(self) -> None:
        read_shares(self.checkpoint, self.manifest, self.state)
        exchange(self.state)

    def read(self) -> None:
        self._sum(0, self.own.stat().st_size)

    def read_by_threads(self) -> None:
        """As `read`, with as many threads as loading uses."""
        size = self.own.stat().st_size
        each = math.ceil(size / BLOCK / THREADS) * BLOCK
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda at: self._sum(at, min(at + each, size)), range(0, size, each)))

    def _sum(self, begin: int, end: int) -> int:
        """The checksum of a range of the file, read into its place in memory."""
        view, crc = self.memory.data, 0
        with self.own.open("rb", buffering=0) as file:
            file.seek(begin)
            for at in range(begin, end, BLOCK):
                block = view[at : min(at + BLOCK, end)]
                file.readinto(block)
                crc = zlib.crc32(block, crc)
        return crc

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.squared_norm()
            self.optimizer.update(1, None, torch.tensor(0.0))

    # How it is measured

    def tidy(self) -> None:
        """Removes the files that a turn has written."""
        self._meet()
        (self.place / f"plain_{self.job.rank}").unlink(missing_ok=True)
        if self.job.rank == 0:
            for step in folders.complete_steps(self.place):
                if step > 1:
                    folders.remove(self.place / folders.name_of(step))
        self._meet()

    def forget(self) -> None:
        """Drops the file from the page cache, so that the next read comes from the disk."""
        with self.own.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def timed(self, act: Callable[[], object]) -> tuple[float, float]:
        """Seconds until the last rank is done, and CPU seconds of all ranks."""
        self._meet()
        begun, cpu = time.perf_counter(), time.process_time()
        act()
        self._meet()
        taken = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
        if self.job.world_size > 1:
            dist.all_reduce(taken)
        return time.perf_counter() - begun, taken.item()

    def _meet(self) -> None:
        if self.job.world_size > 1:
            dist.barrier()


def compare(bench: Bench) -> Iterator[Ratio]:
    """All sides in turns, in an order that is reversed each time."""
    files: tuple[tuple[str, Callable[[], None], Callable[[], None]], ...] = (
        ("save", bench.save, bench.tidy),
        ("plain write", bench.write, bench.tidy),
        ("load from disk", bench.load, bench.forget),
        ("plain read from disk", bench.read, bench.forget),
        ("load from memory", bench.load, bench.read),
        ("plain read from memory", bench.read, bench.read),
        ("the same by threads", bench.read_by_threads, bench.read),
    )
    times: dict[str, list[float]] = {name: [] for name, _, _ in files}
    for pair in range(bench.options.pairs):
        for name, act, before in files if pair % 2 else files[::-1]:
            before()
            times[name].append(bench.timed(act)[0])
        bench.tidy()
        told = ", ".join(f"{name} {taken[-1]:.2f}" for name, taken in times.items())
        print(f"pair {pair + 1}/{bench.options.pairs}: {told} s", file=sys.stderr, flush=True)
    for side, to, at_least in (
        ("save", "plain write", AT_LEAST),
        ("load from disk", "plain read from disk", AT_LEAST),
        ("load from memory", "plain read from memory", AT_LEAST),
        ("load from memory", "the same by threads", None),
    ):
        ratios = [plain / ours for ours, plain in zip(times[side], times[to], strict=True)]
        low, high, _ = median_interval(ratios)
        yield Ratio(
            side, to, median(times[side]), median(times[to]), median(ratios), low, high, at_least
        )


def lost(bench: Bench) -> Lost:
    """Steps during a save and as many without one, in turns."""
    bench.steps(2)
    step_s = bench.timed(lambda: bench.steps(3))[0] / 3
    save_s = bench.timed(bench.save)[0]
    # Enough steps to outlast the save; the same number on every rank, whose clocks differ.
    count = bench.job.gather("counting steps", math.ceil(3 * save_s / step_s) + 1)[0]

    def beside() -> None:
        bench.save(wait=False)
        bench.steps(count)
        bench.saver.wait()

    wall, cpu, waited, saving = [], [], [], []
    for pair in range(bench.options.pairs):
        bench.tidy()
        turns = {
            act: bench.timed(act)
            for act in ((beside, lambda: bench.steps(count))[:: 1 if pair % 2 else -1])
        }
        with_save, without = turns.pop(beside), turns.popitem()[1]
        wall.append(with_save[0] - without[0])
        cpu.append(with_save[1] - without[1])
        waited.append(bench.saver.last_wait_s)
        saving.append(bench.saver.last_save_s)
    low, high, _ = median_interval(wall)
    return Lost(step_s, median(saving), median(waited), median(wall), low, high, median(cpu))


def table(
    ratios: Sequence[Ratio], taken: Lost, nbytes: int, options: argparse.Namespace, load: float
) -> str:
    """The results as text."""
    lines = [
        f"{os.cpu_count()} cores, torch {torch.__version__}; load {load:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after; "
        f"{nbytes / 2**20:.0f} MiB of {options.ranks} rank{'s' * (options.ranks > 1)}, "
        f"{options.pairs} pairs",
        "",
        f"{'throughput':<42} {'MB/s':>7} {'plain':>7} {'ratio':>7}  {'interval':<15} {'goal':>6}",
        *(
            f"{f'{one.side} / {one.to}':<42} {nbytes / one.seconds / 1e6:7.0f} "
            f"{nbytes / one.plain_seconds / 1e6:7.0f} "
            f"{one.ratio:7.3f}  {f'{one.low:.3f} - {one.high:.3f}':<15} "
            f"{f'{one.at_least:.2f}' if one.at_least else '-':>6}"
            for one in ratios
        ),
        "",
        f"a save in the background beside steps of {taken.step_s:.2f} s: it took "
        f"{taken.save_s:.2f} s, of which "
        f"training waited {1000 * taken.waited_s:.0f} ms for the snapshot;",
        f"training lost {taken.wall_s:.2f} s ({taken.wall_low:.2f} - {taken.wall_high:.2f}) to it, "
        "and it cost "
        f"{taken.cpu_s:.2f} CPU s",
    ]
    return "\n".join(lines)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What checkpoints cost, beside plain writes and reads."
    )
    parser.add_argument(
        "--size",
        type=int,
        default=768,
        help="MiB of model and optimizer, of all ranks (%(default)s)",
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--pairs", type=int, default=10, help="turns of each side (%(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="on the disk that is measured (default: a temporary one)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def main() -> int:
    options = read_arguments()
    if "RANK" not in os.environ:
        return start(options.ranks)
    load = os.getloadavg()[0]
    with meshtrain.start() as job:
        made = (
            tempfile.mkdtemp(prefix="meshtrain-bench-", dir=options.folder)
            if job.rank == 0
            else None
        )
        place = Path(job.gather("making a folder", made)[0])
        try:
            torch.set_num_threads(1)
            bench = Bench(job, options, place)
            ratios, taken = list(compare(bench)), lost(bench)
            bench.saver.close()
        finally:
            if job.rank == 0:
                shutil.rmtree(place)
        nbytes = bench.manifest.total_bytes
        found = {"bytes": nbytes, "ratios": [asdict(one) for one in ratios], "lost": asdict(taken)}
        job.say(
            json.dumps(found, indent=1)
            if options.json
            else table(ratios, taken, nbytes, options, load)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
