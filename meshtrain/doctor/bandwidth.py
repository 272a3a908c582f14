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
OF_HOSTS = ("all-gather",)  # of groups of whole hosts, which no axis has
SMALL = 2**18  # bytes; the time that they take determines the larger size
SMALLER = 8  # times smaller than the larger size is a third one, to tell bytes from all else
LARGER = {"gloo": (2**20, 2**22, 2**24), "nccl": (2**22, 2**24, 2**26, 2**28)}
REPETITIONS = 6
BUDGET_S = 0.3  # for one collective on the groups of one axis
START_S = 40.0  # for the workers to meet: importing torch takes seconds, many on a busy host
BEFORE = ("starting", "meeting")  # activities of a worker until all have met
MOST_PRINTED = 2**22
SHARE = 0.6  # of the time after that, in which measurements may begin; later ones are left out
PATIENCE_S = 3.0  # after a worker of this node has failed, for the others to notice it themselves
MOST_WAYS = 16  # of data, from one rank's log
MOST_ROUNDS = 7  # of pairs of hosts: all pairs of up to eight hosts
MOST_SIZES = 4  # numbers of hosts of which groups are timed, beside all of them


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


@dataclass(frozen=True)
class WorkerTiming:
    """One collective, as one rank has timed it on its group. Seconds and bytes."""

    axes: str
    what: str
    latency: float
    size: int
    seconds: float
    fixed: float  # the part of `seconds` that a smaller size takes as well
    spread: float  # ratio of the slowest repetition to the median one


@dataclass(frozen=True)
class WorkerReport:
    """All that one rank has measured."""

    backend: str
    compute: float  # seconds of a computation of its own
    links: tuple[Link, ...]
    timings: tuple[WorkerTiming, ...]
    left_out: tuple[str, ...]  # collectives for which there was no time
    transport: tuple[str, ...]  # from NCCL's log


def timed_groups(layout: Layout) -> dict[str, tuple[Layout, str]]:
    """Name -> a layout and the axis of it whose groups are timed: the axes with groups of several
    ranks, the world if it is not one of these groups, and where all hosts have as many ranks,
    groups of 2, 4, ... whole hosts."""
    groups = {axis: (layout, axis) for axis in layout.axes if layout.size(axis) > 1}
    if len(groups) > 1:
        groups[WORLD] = layout, WORLD
    counts = set(layout.host_counts().values())
    if len(counts) == 1:
        hosts = [layout.host(rank) for rank in range(layout.world_size)]
        for number in numbers_of_hosts(len(layout.hosts)):
            sizes = {"dp_replicate": -1, "dp_shard": number * min(counts)}
            whole = Layout.resolve(sizes, layout.world_size).on_hosts([1] * len(hosts), hosts)
            groups[f"{number} hosts"] = whole, "dp_shard"
    return groups


def numbers_of_hosts(hosts: int) -> list[int]:
    """Numbers of hosts into which so many can be grouped, neither one nor all, each at least twice
    the one before."""
    numbers: list[int] = []
    for number in range(2, hosts // 2 + 1):
        if hosts % number == 0 and number >= 2 * (numbers or [1])[-1]:
            numbers.append(number)
    return numbers[:MOST_SIZES]


def pairs_in_rounds(count: int, most: int = MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """Rounds in which each has one partner (the circle method of a round-robin tournament); all
    pairs if few."""
    even = count + count % 2  # an odd one out meets a partner that is not there
    circle = list(range(even))
    rounds = []
    for _ in range(min(max(even - 1, 0), most)):
        pairs = []
        for left, right in zip(circle[: even // 2], reversed(circle), strict=False):
            if max(left, right) < count:
                pairs.append((min(left, right), max(left, right)))
        rounds.append(pairs)
        # The first one stays where it is, and all others move on by a place.
        first, *others, last = circle
        circle = [first, last, *others]
    return rounds


def choose_size(seconds: float, sizes: Sequence[int]) -> int:
    """The largest size whose repetitions fit BUDGET_S, extrapolated from the `seconds` for `SMALL`
    bytes."""
    fitting = [size for size in sizes if seconds * size / SMALL * REPETITIONS <= BUDGET_S]
    return max(fitting, default=SMALL)


def wire_bytes(collective: str, ranks: int, size: int) -> float:
    """The least bytes that a rank sends, as nccl-tests counts ("bus bandwidth"); `size`: bytes of
    the whole tensor."""
    if collective == "broadcast":
        return size
    part = size * (ranks - 1) / ranks
    # An all-reduce is a reduce-scatter and an all-gather.
    return 2 * part if collective == "all-reduce" else part


def merge(layout: Layout, results: Mapping[int, Mapping[str, Any]]) -> Timings:
    """Merges all ranks' numbers: for each collective, the slowest rank's. Invalid or missing
    results count as stuck."""
    reports: dict[int, WorkerReport] = {}
    stuck: dict[str, str] = {}
    for rank in range(layout.world_size):
        if rank not in results:
            stuck[str(rank)] = "nothing came of it"
    for rank, result in sorted(results.items()):
        if "stuck" in result:
            stuck[str(rank)] = str(result["stuck"])
            continue
        try:
            reports[rank] = from_json(WorkerReport, result)
        except RecordError as error:
            stuck[str(rank)] = f"its numbers make no sense ({error!r})"

    by_collective: dict[tuple[str, str], list[WorkerTiming]] = {}
    for report in reports.values():
        for row in report.timings:
            by_collective.setdefault((row.axes, row.what), []).append(row)
    links = [link for report in reports.values() for link in report.links]
    ways = {way for report in reports.values() for way in report.transport[:MOST_WAYS]}
    left_out: tuple[str, ...] = ()
    if reports:
        *_, last = reports.values()
        left_out = last.left_out  # the same on all ranks
    return Timings(
        backend=" ".join(sorted({report.backend for report in reports.values()})),
        timings=tuple(_slowest(layout, rows) for rows in by_collective.values()),
        links=tuple(links),
        compute={str(rank): report.compute for rank, report in reports.items()},
        stuck=stuck,
        left_out=left_out,
        transport=tuple(sorted(ways)),
    )


def _slowest(layout: Layout, rows: Sequence[WorkerTiming]) -> Timing:
    """The timing of a collective that all ranks have timed, each on its own group."""
    slowest = max(rows, key=lambda row: row.seconds / row.size)
    timed, axis = timed_groups(layout)[slowest.axes]
    axes = timed.axes if axis == WORLD else (axis,)
    ranks = timed.size(*axes)
    sent = wire_bytes(slowest.what, ranks, slowest.size)
    hosts = max(len(list(timed.hosts_of(group))) for group in timed.groups(*axes))
    return Timing(
        axes=slowest.axes,
        what=slowest.what,
        ranks=ranks,
        hosts=hosts,
        crosses=hosts > 1,
        latency=max(row.latency for row in rows),
        size=slowest.size,
        seconds=slowest.seconds,
        fixed=slowest.fixed,
        spread=statistics.median(row.spread for row in rows),
        bandwidth=sent / max(slowest.seconds, 1e-9),
    )


class _Worker:
    """The process of one rank."""

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
            "parent": os.getpid(),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshtrain.doctor.bandwidth_worker", json.dumps(task)],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
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
        """Whether it is at work, and has not been for longer than it may: `seconds` from the moment
        when all had met."""
        if self.process.poll() is not None:
            return False
        now = time.monotonic()
        if self._connected is None and self._messages()["at"] not in BEFORE:
            self._connected = now
        if self._connected is None:
            return now - self._started < START_S
        return now - self._connected < seconds

    def end(self) -> dict[str, Any]:
        """What it has measured, or why it has not: `stuck`."""
        late = self.process.poll() is None
        messages = self._messages()
        if "result" not in messages:
            self.process.kill()
        # One with a result may still be leaving its process groups, or hang there.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        if "result" in messages:
            return dict(messages["result"])
        if late:
            seconds = time.monotonic() - self._started
            return {"stuck": f"not done with {messages['at']} after {seconds:.0f} s"}
        return {"stuck": f"failed at {messages['at']}: {self._error()[:300]}"}

    def _error(self) -> str:
        lines = [line for line in _lines(self._err) if line and not line.startswith(" ")]
        if not lines:
            # Of several ranks that are refused one says why.
            refused = self.process.returncode == INPUT_STATUS
            return "another rank was refused" if refused else "it printed nothing"
        errors = [line for line in lines if "Error" in line]  # notes may follow the error
        return (errors or lines)[-1]


def _lines(file: IO[bytes]) -> list[str]:
    text = os.pread(file.fileno(), MOST_PRINTED, 0).decode(errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()


def run_workers(spec: Spec, ranks: Sequence[int], address: str, serves: bool) -> dict[int, Any]:
    """Runs this node's workers to their end, or up to the spec's time limit; rank -> its
    measurements, or "stuck". `address` is the leader's, as this node reaches it; if `serves`, the
    first worker serves the store there."""
    workers = []
    for local_rank, rank in enumerate(ranks):
        serves_store = serves and local_rank == 0
        workers.append(_Worker(spec, rank, local_rank, address, serves_store))

    deadline = math.inf
    try:
        while any(worker.running(spec.seconds) for worker in workers):
            now = time.monotonic()
            if now > deadline:
                break
            failed = any(worker.process.poll() not in (None, 0) for worker in workers)
            # The others then wait in vain. What they say when they notice it tells more than that
            # they were killed.
            if failed:
                deadline = min(deadline, now + PATIENCE_S)
            time.sleep(0.05)
    finally:
        results = {worker.rank: worker.end() for worker in workers}
    return results
