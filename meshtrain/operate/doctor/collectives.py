"""What is timed on the groups of a layout, and the processes that time it: one per rank, as in training.

The pure half says which pairs of hosts try each other when, how large a message may be, and what all ranks' numbers
come to; the rest starts the workers (worker.py) of this node and takes what they print.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshtrain.layout import Layout
from meshtrain.operate.doctor.record import Link, RecordError, Timing, Timings, from_json

WORLD = "world"
WHAT = ("all-reduce", "broadcast", "reduce-scatter", "all-gather")
SMALL = 2**18  # bytes; from the time that it takes the larger size is chosen
LARGER = {"gloo": (2**20, 2**22, 2**24), "nccl": (2**22, 2**24, 2**26, 2**28)}
REPETITIONS = 6
BUDGET_S = 0.3  # of one collective on the groups of one axis
START_S = 40.0  # for the workers to meet: importing torch takes seconds, on a busy host many
MET = "connecting"  # what a worker says that it does once all have met
SHARE = 0.6  # of the time after that in which parts are begun; what is not begun then is left out
PATIENCE_S = 3.0  # after a worker of this node has failed, for the others to notice it themselves
MOST_ROUNDS = 7  # of pairs of hosts: all pairs of up to eight hosts


@dataclass(frozen=True)
class Spec:
    """What all workers are to do, and where they meet. The node that leads chooses it.

    Attributes:
        sizes: of the layout's axes; hosts: the host of each rank.
        port: of the store, on the node that leads; its first worker serves it.
        seconds: from the workers' meeting until one is given up.
    """

    sizes: dict[str, int]
    hosts: tuple[str, ...]
    port: int
    seconds: float

    @property
    def layout(self) -> Layout:
        return Layout(self.sizes).on_hosts([1] * len(self.hosts), list(self.hosts))


def axes_to_time(layout: Layout) -> list[str]:
    """The axes with groups of several ranks, and the world where it is not one of them."""
    large = [axis for axis in layout.axes if layout.size(axis) > 1]
    return large if len(large) == 1 else [*large, WORLD]


def pairs_in_rounds(count: int, most: int = MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """Rounds in which everybody has one partner (the circle method of a round-robin tournament); all pairs if few."""
    even = count + count % 2
    circle, rounds = list(range(even)), []
    for _ in range(min(max(even - 1, 0), most)):
        pairs = [(circle[i], circle[even - 1 - i]) for i in range(even // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def choose_size(seconds: float, sizes: Sequence[int]) -> int:
    """The largest size whose repetitions fit the time, judging from a message of `SMALL` bytes."""
    fitting = [size for size in sizes if seconds * size / SMALL * REPETITIONS <= BUDGET_S]
    return max(fitting, default=SMALL)


def on_the_wire(what: str, ranks: int, size: int) -> float:
    """Bytes that a rank sends at least, as nccl-tests counts ("bus bandwidth"); `size` is that of the whole."""
    return size * {"all-reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(what, (ranks - 1) / ranks)


def merge(layout: Layout, results: Mapping[int, Mapping[str, Any]]) -> Timings:
    """What all ranks' numbers come to: of each collective the slowest rank's. Results that are none count as stuck."""
    stuck = {str(rank): "nothing came of it" for rank in range(layout.world_size) if rank not in results}
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    links: list[Link] = []
    compute: dict[str, float] = {}
    left_out: tuple[str, ...] = ()
    backends = set()
    for rank, result in sorted(results.items()):
        if "stuck" in result:
            stuck[str(rank)] = str(result["stuck"])
            continue
        try:
            links += [from_json(Link, link) for link in result["links"]]
            compute[str(rank)] = float(result["compute"])
            backends.add(str(result["backend"]))
            left_out = tuple(map(str, result["left_out"]))  # the same on all ranks
            for one in result["timings"]:
                row = {name: float(one[name]) for name in ("latency", "size", "seconds", "spread")}
                by_name.setdefault((str(one["axes"]), str(one["what"])), []).append(row)
        except (KeyError, TypeError, ValueError, RecordError) as error:
            stuck[str(rank)] = f"its numbers make no sense ({error!r})"
    rows = [_slowest(layout, axes, what, found) for (axes, what), found in by_name.items()]
    return Timings(" ".join(sorted(backends)), tuple(rows), tuple(links), compute, stuck, "", left_out)


def _slowest(layout: Layout, axes: str, what: str, found: Sequence[Mapping[str, float]]) -> Timing:
    names = layout.axes if axes == WORLD else (axes,)
    ranks = layout.size(*names)
    slowest = max(found, key=lambda one: one["seconds"] / one["size"])
    return Timing(
        axes,
        what,
        ranks,
        any(layout.crosses_hosts(group) for group in layout.groups(*names)),
        max(one["latency"] for one in found),
        int(slowest["size"]),
        slowest["seconds"],
        statistics.median(one["spread"] for one in found),
        on_the_wire(what, ranks, int(slowest["size"])) / max(slowest["seconds"], 1e-9),
    )


# The processes ------------------------------------------------------------------------------------------------------


class _Worker:
    """One worker of this node; what it prints is read as it comes."""

    def __init__(self, spec: Spec, rank: int, local_rank: int, address: str, serves: bool) -> None:
        self.rank = rank
        self.at = "starting"
        self.result: dict[str, Any] | None = None
        self._errors: list[str] = []
        self._started = time.monotonic()
        self._began: float | None = None
        task = {"spec": asdict(spec), "rank": rank, "local_rank": local_rank, "address": address, "serves": serves}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshtrain.operate.doctor.worker", json.dumps(task)],
            stdin=subprocess.PIPE,  # when this process dies its end closes, and the worker ends
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line) if line.startswith('{"') else {}
            if self.at == MET:
                self._began = time.monotonic()
            self.at = message.get("at", self.at)
            self.result = message.get("result", self.result)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors = [*self._errors, line.rstrip()][-20:]

    def running(self, seconds: float) -> bool:
        """Whether it has not ended and its time is not up: that of the meeting, or `seconds` from then on."""
        limit = START_S if self._began is None else self._began + seconds - self._started
        return self.process.poll() is None and time.monotonic() - self._started < limit

    def end(self) -> dict[str, Any]:
        """What came of it; whatever is left of the process is killed."""
        over = self.process.poll() is None and self.result is None
        if self.result is None:
            self.process.kill()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for thread in self._threads:
            thread.join(1)
        if self.result is not None:
            return self.result
        if over:
            return {"stuck": f"not done with {self.at} after {time.monotonic() - self._started:.0f} s"}
        said = [line for line in self._errors if line and not line.startswith(" ")] or ["it printed nothing"]
        errors = [line for line in said if "Error" in line]  # notes may follow it
        return {"stuck": f"failed at {self.at}: {(errors or said)[-1][:300]}"}


def run_workers(spec: Spec, places: Sequence[tuple[int, int]], address: str, serves: bool) -> dict[int, Any]:
    """Runs this node's workers to their end, or for as long as the spec says.

    Args:
        places: rank and local rank of each.
        address: of the node that leads, as this one reaches it.
        serves: whether the first of them is to serve the store.

    Returns:
        rank -> what it measured, or {"stuck": how far it came}.
    """
    workers = [_Worker(spec, rank, local, address, serves and i == 0) for i, (rank, local) in enumerate(places)]
    deadline = never = math.inf
    while any(one.running(spec.seconds) for one in workers) and time.monotonic() < deadline:
        if deadline == never and any(one.process.poll() not in (None, 0) for one in workers):
            deadline = time.monotonic() + PATIENCE_S
        time.sleep(0.05)
    return {one.rank: one.end() for one in workers}
