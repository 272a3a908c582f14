"""Bandwidth: what is timed on the groups of a layout, and its workers (bandwidth_worker.py), one
per rank."""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

from meshtrain.doctor.records import Link, RecordError, Timing, Timings, from_json
from meshtrain.errors import INPUT_STATUS
from meshtrain.layout import Layout

WORLD = "world"
COLLECTIVES = ("all-reduce", "broadcast", "reduce-scatter", "all-gather")
SMALL = 2**18  # bytes; the time that they take determines the larger size
LARGER = {"gloo": (2**20, 2**22, 2**24), "nccl": (2**22, 2**24, 2**26, 2**28)}
REPETITIONS = 6
BUDGET_S = 0.3  # for one collective on the groups of one axis
START_S = 40.0  # for the workers to meet: importing torch takes seconds, many on a busy host
BEFORE = ("starting", "meeting")  # activities of a worker until all have met
MOST_PRINTED = 2**22
SHARE = 0.6  # of the time after that, in which measurements may begin; later ones are left out
PATIENCE_S = 3.0  # after a worker of this node has failed, for the others to notice it themselves
MOST_ROUNDS = 7  # of pairs of hosts: all pairs of up to eight hosts


@dataclass(frozen=True)
class Spec:
    """What all workers measure, and where they meet."""

    sizes: dict[str, int]  # of the layout's axes
    hosts: tuple[str, ...]  # of each rank
    port: int  # of the store, served by the first worker of the leading node
    seconds: float  # from the workers' meeting until they are given up

    @property
    def layout(self) -> Layout:
        return Layout(self.sizes).on_hosts([1] * len(self.hosts), list(self.hosts))


def axes_to_time(layout: Layout) -> list[str]:
    """The axes with groups of several ranks, and the world if it is not one of these groups."""
    large = [axis for axis in layout.axes if layout.size(axis) > 1]
    return large if len(large) == 1 else [*large, WORLD]


def pairs_in_rounds(count: int, most: int = MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """Rounds in which each has one partner (the circle method of a round-robin tournament); all
    pairs if few."""
    even = count + count % 2
    circle, rounds = list(range(even)), []
    for _ in range(min(max(even - 1, 0), most)):
        pairs = [(circle[i], circle[even - 1 - i]) for i in range(even // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def choose_size(seconds: float, sizes: Sequence[int]) -> int:
    """The largest size whose repetitions fit BUDGET_S, extrapolated from the `seconds` for `SMALL`
    bytes."""
    fitting = [size for size in sizes if seconds * size / SMALL * REPETITIONS <= BUDGET_S]
    return max(fitting, default=SMALL)


def wire_bytes(collective: str, ranks: int, size: int) -> float:
    """The least bytes that a rank sends, as nccl-tests counts ("bus bandwidth"); `size`: bytes of
    the whole tensor."""
    return size * {"all-reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(
        collective, (ranks - 1) / ranks
    )


def merge(layout: Layout, results: Mapping[int, Mapping[str, Any]]) -> Timings:
    """Merges all ranks' numbers: for each collective, the slowest rank's. Invalid or missing
    results count as stuck."""
    stuck = {
        str(rank): "nothing came of it" for rank in range(layout.world_size) if rank not in results
    }
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    links: list[Link] = []
    compute: dict[str, float] = {}
    left_out: tuple[str, ...] = ()
    backends, transport = set(), set()
    for rank, result in sorted(results.items()):
        if "stuck" in result:
            stuck[str(rank)] = str(result["stuck"])
            continue
        try:
            links += [from_json(Link, link) for link in result["links"]]
            compute[str(rank)] = float(result["compute"])
            backends.add(str(result["backend"]))
            transport |= set(map(str, result["transport"][:16]))
            left_out = tuple(map(str, result["left_out"]))  # the same on all ranks
            for timing in result["timings"]:
                row = {
                    name: float(timing[name]) for name in ("latency", "size", "seconds", "spread")
                }
                by_name.setdefault((str(timing["axes"]), str(timing["what"])), []).append(row)
        except (KeyError, TypeError, ValueError, RecordError) as error:
            stuck[str(rank)] = f"its numbers make no sense ({error!r})"
    timings = tuple(
        _slowest(layout, axes, collective, rows) for (axes, collective), rows in by_name.items()
    )
    backend, ways = " ".join(sorted(backends)), tuple(sorted(transport))
    return Timings(backend, timings, tuple(links), compute, stuck, "", left_out, ways)


def _slowest(
    layout: Layout, axes: str, collective: str, rows: Sequence[Mapping[str, float]]
) -> Timing:
    names = layout.axes if axes == WORLD else (axes,)
    ranks = layout.size(*names)
    slowest = max(rows, key=lambda row: row["seconds"] / row["size"])
    size = int(slowest["size"])
    crosses = any(layout.crosses_hosts(group) for group in layout.groups(*names))
    latency, spread = (
        max(row["latency"] for row in rows),
        statistics.median(row["spread"] for row in rows),
    )
    bandwidth = wire_bytes(collective, ranks, size) / max(slowest["seconds"], 1e-9)
    return Timing(
        axes, collective, ranks, crosses, latency, size, slowest["seconds"], spread, bandwidth
    )


class _Worker:
    def __init__(self, spec: Spec, rank: int, local_rank: int, address: str, serves: bool) -> None:
        self.rank = rank
        self._started = time.monotonic()
        self._connected: float | None = None  # when all had met
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        task = {
            "spec": asdict(spec),
            "rank": rank,
            "local_rank": local_rank,
            "address": address,
            "serves": serves,
        }
        task["parent"] = os.getpid()
        command = [sys.executable, "-m", "meshtrain.doctor.bandwidth_worker", json.dumps(task)]
        files: Any = {"stdin": subprocess.DEVNULL, "stdout": self._out, "stderr": self._err}
        self.process = subprocess.Popen(
            command, env={"OMP_NUM_THREADS": "1", **os.environ}, **files
        )

    def _messages(self) -> dict[str, Any]:
        """The last message of each kind: "at" is what the worker is doing, "result" what it has
        measured."""
        messages: dict[str, Any] = {"at": "starting"}
        for line in _lines(self._out):
            if line.startswith('{"'):
                messages |= json.loads(line)
        return messages

    def running(self, seconds: float) -> bool:
        if self.process.poll() is not None:
            return False
        if self._connected is None and self._messages()["at"] not in BEFORE:
            self._connected = time.monotonic()
        limit = START_S if self._connected is None else self._connected + seconds - self._started
        return time.monotonic() - self._started < limit

    def end(self) -> dict[str, Any]:
        late = self.process.poll() is None
        messages = self._messages()
        if "result" not in messages:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        if "result" in messages:
            return dict(messages["result"])
        if late:
            return {
                "stuck": (
                    f"not done with {messages['at']} after {time.monotonic() - self._started:.0f} s"
                )
            }
        lines = [line for line in _lines(self._err) if line and not line.startswith(" ")]
        if not lines:  # of several ranks that are refused one says why
            refused = self.process.returncode == INPUT_STATUS
            lines = ["another rank was refused"] if refused else ["it printed nothing"]
        errors = [line for line in lines if "Error" in line]  # notes may follow the error
        return {"stuck": f"failed at {messages['at']}: {(errors or lines)[-1][:300]}"}


def _lines(file: IO[bytes]) -> list[str]:
    text = os.pread(file.fileno(), MOST_PRINTED, 0).decode(errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()


def run_workers(spec: Spec, ranks: Sequence[int], address: str, serves: bool) -> dict[int, Any]:
    """Runs this node's workers to their end, or up to the spec's time limit; rank -> its
    measurements, or "stuck". `address` is the leader's, as this node reaches it; if `serves`, the
    first worker serves the store there."""
    workers = [
        _Worker(spec, rank, local, address, serves and local == 0)
        for local, rank in enumerate(ranks)
    ]
    deadline = never = math.inf
    try:
        while (
            any(worker.running(spec.seconds) for worker in workers) and time.monotonic() < deadline
        ):
            if deadline == never and any(
                worker.process.poll() not in (None, 0) for worker in workers
            ):
                deadline = time.monotonic() + PATIENCE_S
            time.sleep(0.05)
    finally:
        results = {worker.rank: worker.end() for worker in workers}
    return results
