"""Stragglers: which ranks keep the others waiting, found from each rank's measurements of its own
time.

A rank is slow only if even its good steps are longer than the others' bad ones (quartiles, which
single outliers do not move), if that costs a sizeable part of the step, and if it persists. Time in
which a thread was runnable and no core was free counts between hosts only: ranks that share cores
share that time, too, and not evenly.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from meshtrain.errors import group_values
from meshtrain.job.process import Job
from meshtrain.job.storage import optional, write_whole
from meshtrain.layout import DATA_AXES
from meshtrain.metrics.gpu_probe import GpuProbe
from meshtrain.metrics.nvidia_smi import UNKNOWN, GpuCondition, gpu_condition
from meshtrain.metrics.step_timer import memory_gib

LOOKS = 3  # in a row, before a rank is named as a straggler, or as recovered
SHARE = 0.1  # of a step: what a slow rank must cost the others
LEAST_S = 0.01  # shorter excesses are the noise of steps that are too short to be worth a warning

# by which a slow GPU's matrix product is longer: GPUs of one model differ by up to a tenth
PROBE_SHARE = 0.2
THROTTLED = (
    "see to the cooling and the power of that host (nvidia-smi -q -d PERFORMANCE), or leave it out"
)
NODE_CHECK = (
    "run `meshtrain doctor --local` on that host when the job is over; leave the host out if it "
    "stays slow"
)

# steps per look: their quartiles are steady, and a straggler is named within three looks
EVERY = 20
# rank 0 reads a report of every rank in a look, so looks are rarer in a large world
RANKS_PER_STEP = 32
FEWEST = 8  # measured steps that a look needs
WARM_UP = 3  # first steps of a job, excluded from looks: caches fill, kernels are chosen


@dataclass(frozen=True)
class RankPace:
    """Times of one rank in the steps of one look, in seconds per step: quartiles of its own time,
    without the time in which no core was free for it and (`_all`) with it; medians of the whole
    step and of its wait for data."""

    low: float
    middle: float
    high: float
    low_all: float
    middle_all: float
    high_all: float
    step: float
    data: float
    host: str
    load: float  # the 1-minute average of its host
    cores: int  # of its host
    gpu: str = ""  # its condition, if it was queried
    throttled: bool = False

    @classmethod
    def of(
        cls,
        steps: Sequence[Mapping[str, float]],
        host: str,
        load: float,
        cores: int,
        gpu: GpuCondition = UNKNOWN,
    ) -> "RankPace":
        """From the times of at least two steps, as returned by StepTimer.pop."""
        everything = [times["time_own_s"] for times in steps]
        own = [max(0.0, times["time_own_s"] - times["time_queued_s"]) for times in steps]
        low, middle, high = quantiles(own, method="inclusive")
        low_all, middle_all, high_all = quantiles(everything, method="inclusive")
        step, data = (
            median(times[name] for times in steps) for name in ("step_time_s", "time_data_s")
        )
        return cls(
            low, middle, high, low_all, middle_all, high_all, step, data, host, load, cores, *gpu
        )

    def of_probe(self, times: Sequence[float]) -> "RankPace":
        """This pace with probe times of its GPU, relative to the typical one: PROBE_SHARE more of
        it is slow."""
        return self._timed(min(times), median(times), max(times), PROBE_SHARE / SHARE)

    def _timed(self, low: float, middle: float, high: float, step: float) -> "RankPace":
        """This pace with these quartiles of its own time, without waits for a core."""
        return replace(
            self,
            low=low,
            middle=middle,
            high=high,
            low_all=low,
            middle_all=middle,
            high_all=high,
            step=step,
        )

    def scaled(self, factor: float) -> "RankPace":
        return self._timed(factor * self.low, factor * self.middle, factor * self.high, self.step)

    @property
    def queued(self) -> float:
        return self.middle_all - self.middle


@dataclass(frozen=True)
class Straggler:
    """A rank that has been slow for `LOOKS` looks; times are seconds per step of the last one."""

    rank: int
    pace: RankPace
    peers: int  # how many other ranks do the same work; 0 if it is compared with itself
    own: float
    others: float  # its peers' time; without peers, its own in the first look
    load: float  # of its peers' hosts

    @property
    def excess(self) -> float:
        """Seconds of each step for which the other ranks wait."""
        return self.own - self.others


def is_slow(rank: RankPace, others: Sequence[RankPace]) -> bool:
    """Whether a rank is clearly slower than the others with the same work. Which rank waits for a
    core on a shared host is chance, so waits count only against ranks of other hosts: a host whose
    cores are never free is slow."""
    elsewhere = [other for other in others if other.host != rank.host]
    beyond = [rank.low - median(other.high for other in others)] if others else []
    beyond += [rank.low_all - median(other.high_all for other in elsewhere)] if elsewhere else []
    return any(seconds > max(LEAST_S, SHARE * rank.step) for seconds in beyond)


def slow(paces: Sequence[RankPace], peers: Sequence[Sequence[int]]) -> set[int]:
    """The slow ranks of one look, from every rank's pace and the groups of ranks that do the same
    work."""
    return {
        rank
        for group in peers
        for rank in group
        if is_slow(paces[rank], [paces[other] for other in group if other != rank])
    }


@dataclass
class StragglerTest:
    """Finds, look after look, which ranks have become stragglers and which have recovered. Ranks
    alone in their group (stages of a pipeline without data parallelism) are compared by the change
    of their times since the first look."""

    peers: Sequence[Sequence[int]]  # groups of ranks that do the same work; each rank is in one
    suspects: set[int] = field(default_factory=set)  # slow in the last look
    named: set[int] = field(default_factory=set)  # the stragglers
    _first: Sequence[RankPace] = ()
    # rank -> looks in a row in which it was slow
    _slow: dict[int, int] = field(default_factory=dict)
    # named rank -> looks in a row in which it was not
    _fine: dict[int, int] = field(default_factory=dict)

    def update(self, paces: Sequence[RankPace]) -> tuple[list[Straggler], list[int]]:
        """Takes the paces of one look; returns the new stragglers, and the ranks that have just
        recovered."""
        self._first = self._first or paces
        together = [group for group in self.peers if len(group) > 1]
        alone = [rank for group in self.peers if len(group) == 1 for rank in group]
        self.suspects = slow(paces, together) | slow(self._scaled(paces, alone), [alone])
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in self.suspects}
        self._fine = {rank: self._fine.get(rank, 0) + 1 for rank in self.named - self.suspects}
        new = sorted(
            rank for rank, looks in self._slow.items() if looks >= LOOKS and rank not in self.named
        )
        recovered = sorted(rank for rank, looks in self._fine.items() if looks >= LOOKS)
        self.named = (self.named | set(new)) - set(recovered)
        return [self._straggler(rank, paces) for rank in new], recovered

    def _scaled(self, paces: Sequence[RankPace], alone: Sequence[int]) -> list[RankPace]:
        """The paces, scaled as if all ranks that are alone had taken the same time in the first
        look."""
        common = median(self._first[rank].middle for rank in alone) if alone else 0.0
        scaled = list(paces)
        for rank in alone:
            scaled[rank] = paces[rank].scaled(common / max(self._first[rank].middle, 1e-9))
        return scaled

    def _straggler(self, rank: int, paces: Sequence[RankPace]) -> Straggler:
        group = next(group for group in self.peers if rank in group)
        own, first = paces[rank], self._first[rank]
        if len(group) == 1:
            return Straggler(rank, own, 0, own.middle, first.middle, first.load)
        others = [paces[other] for other in group if other != rank and other not in self.suspects]
        others = others or [paces[other] for other in group if other != rank]
        load = median(other.load for other in others)
        # without waiting for a core
        slow_itself = is_slow(own, [replace(other, host=own.host) for other in others])
        time, *times = (pace.middle if slow_itself else pace.middle_all for pace in (own, *others))
        return Straggler(rank, own, len(group) - 1, time, median(times), load)


class StragglerDetector:
    """One rank's part in the comparison; all ranks call `finish_step` after the same steps."""

    def __init__(
        self,
        job: Job,
        first: int,
        say: Callable[[str], None],
        probe_every: int,
        folder: Path | None = None,
    ) -> None:
        """`folder`: where rank 0 writes `ranks.json`, with each rank's time and memory at the last
        look."""
        assert job.layout is not None  # it was placed
        self._job, self._layout, self._say, self._folder = job, job.layout, say, folder
        self.probe = GpuProbe(probe_every if job.world_size > 1 else 0, job.device)
        self._probes: list[float] = []  # seconds since the last look
        # on rank 0, once it knows which ranks have the same GPU model
        self._probe_test: StragglerTest | None = None
        self._every = max(EVERY, job.world_size // RANKS_PER_STEP)
        self._begins = first + WARM_UP
        self._steps: list[Mapping[str, float]] = []
        self._test = StragglerTest(job.layout.groups(*DATA_AXES)) if job.rank == 0 else None
        self._posted: int | None = None  # the step of the look that rank 0 has not read yet
        self._writer = threading.Thread()
        self._suspects: set[int] = set()  # as posted to the ranks
        self._gpu = UNKNOWN
        self._uuid = (
            f"GPU-{torch.cuda.get_device_properties(job.device).uuid}"
            if job.device.type == "cuda"
            else ""
        )

    def finish_step(self, step: int, times: Mapping[str, float]) -> dict[str, float]:
        """Takes a step's times (StepTimer.pop) before the next update; on rank 0 sometimes returns
        fields for a row."""
        if self._job.store is None:
            return {}
        self._probes += self.probe.pop()
        comparison = self._read() if self._posted is not None else {}
        if step >= self._begins:
            self._steps.append(times)
        if step % self._every == 0:
            self._post(step)
        return comparison

    def _post(self, step: int) -> None:
        steps, self._steps = self._steps, []
        if len(steps) < FEWEST:  # the same on all ranks
            return
        assert self._job.store is not None
        pace = RankPace.of(
            steps, self._job.host, os.getloadavg()[0], os.cpu_count() or 1, self._gpu
        )
        probes, self._probes = self._probes, []
        report = {
            "who": str(self._job),
            "step": step,
            "pace": asdict(pace),
            "memory_gib": memory_gib(self._job.device),
        }
        report |= {"probe": [self.probe.model, *probes]}
        self._job.store.set(f"pace/{self._job.rank}", json.dumps(report))
        if self._job.rank == 0:
            self._posted = step
        asks = self._uuid and self._job.store.check(["pace/suspects"])
        if asks and self._job.rank in json.loads(self._job.store.get("pace/suspects")):
            # In a thread: nvidia-smi may take seconds.
            threading.Thread(target=self._ask_gpu, name="nvidia-smi", daemon=True).start()

    def _ask_gpu(self) -> None:
        self._gpu = gpu_condition(self._uuid)

    def _read(self) -> dict[str, float]:
        """Called on rank 0 one step after its post: this step ended with a sum over all ranks, so
        all have posted."""
        step, self._posted = self._posted, None
        assert self._job.store is not None
        assert self._test is not None
        texts = self._job.store.multi_get([f"pace/{rank}" for rank in range(self._job.world_size)])
        ranks = [json.loads(text) for text in texts]
        assert all(rank["step"] == step for rank in ranks), "all ranks look after the same steps"
        paces = [RankPace(**rank["pace"]) for rank in ranks]
        new, recovered = self._test.update(paces)
        for straggler in new:
            self._say(describe(straggler, ranks[straggler.rank]["who"], LOOKS * self._every))
        for rank in recovered:
            self._say(f"{ranks[rank]['who']} is as fast as its peers again")
        probed = self._compare_probes(ranks, paces)
        suspects = self._test.suspects | (
            set() if self._probe_test is None else self._probe_test.suspects
        )
        if self._suspects != suspects:
            self._suspects = suspects
            self._job.store.set("pace/suspects", json.dumps(sorted(suspects)))
        # a slow disk must not delay the step
        if self._folder is not None and not self._writer.is_alive():
            self._writer = threading.Thread(
                target=self._write, args=(self._folder, step, ranks), daemon=True
            )
            self._writer.start()
        slowest = max(range(len(paces)), key=lambda rank: paces[rank].middle)
        fullest = max(range(len(ranks)), key=lambda rank: ranks[rank]["memory_gib"])
        return {
            "own_time_median_s": median(pace.middle for pace in paces),
            "own_time_max_s": paces[slowest].middle,
            "own_time_max_rank": slowest,
            "memory_max_gib": ranks[fullest]["memory_gib"],
            "memory_max_rank": fullest,
        } | probed

    def _write(self, folder: Path, step: int, ranks: Sequence[Mapping[str, Any]]) -> None:
        table = {
            "step": step,
            "axes": {axis: size for axis, size in self._layout.sizes.items() if size > 1},
            "hosts": [rank["pace"]["host"] for rank in ranks],
            "own_time_s": [rank["pace"]["middle"] for rank in ranks],
            "memory_gib": [rank["memory_gib"] for rank in ranks],
        }
        with optional("ranks.json could not be written"):
            write_whole(folder / "ranks.json", json.dumps(table) + "\n")

    def _compare_probes(
        self, ranks: Sequence[Mapping[str, Any]], paces: Sequence[RankPace]
    ) -> dict[str, float]:
        """The same test for the GPUs alone, if each was probed since the last look."""
        seconds = [rank["probe"][1:] for rank in ranks]
        if not all(seconds):  # some rank has no probe
            return {}
        if self._probe_test is None:
            by_model = group_values((rank["probe"][0], number) for number, rank in enumerate(ranks))
            self._probe_test = StragglerTest(list(by_model.values()))
        middles = [median(times) for times in seconds]
        typical = median(middles)
        scaled = [
            pace.of_probe([second / typical for second in times])
            for pace, times in zip(paces, seconds, strict=True)
        ]
        new, recovered = self._probe_test.update(scaled)
        for straggler in new:
            self._say(describe_probe(straggler, ranks[straggler.rank]["who"], typical))
        for rank in recovered:
            self._say(f"{ranks[rank]['who']}: its GPU is as fast as the others again")
        slowest = max(range(len(middles)), key=middles.__getitem__)
        return {
            "gpu_probe_median_s": typical,
            "gpu_probe_max_s": middles[slowest],
            "gpu_probe_max_rank": slowest,
        }


def describe(straggler: Straggler, rank: str, steps: int) -> str:
    pace = straggler.pace
    peers = {0: "at first it took", 1: "the other rank with the same work takes"}
    others = peers.get(
        straggler.peers, f"the other {straggler.peers} ranks with the same work take"
    )
    known = [f"{_ms(pace.data)} waiting for data", f"{_ms(pace.queued)} waiting for a core"]
    known += [f"load of its host {pace.load:.1f} on {pace.cores} cores"] + (
        [pace.gpu] if pace.gpu else []
    )
    return (
        f"warning: {rank} is slow: for {steps} steps now it has taken {_ms(straggler.own)} of its "
        "own for each, "
        f"{others} {_ms(straggler.others)}. All ranks wait for it\n"
        f"  known of it: {', '.join(known)}\n"
        f"  what to do: {advice(straggler)}"
    )


def describe_probe(straggler: Straggler, rank: str, typical_s: float) -> str:
    """As `describe`, for a straggler among GPU probes, whose times are multiples of `typical_s`."""
    others = "the others' take" if straggler.peers else "at first it took"
    return (
        f"warning: the GPU of {rank} is slow: a product of matrices takes "
        f"{_ms(typical_s * straggler.own)} on it in "
        f"{LOOKS} looks in a row, {others} {_ms(typical_s * straggler.others)}. All ranks wait for "
        "it\n"
        f"  known of it: {straggler.pace.gpu or 'nvidia-smi tells nothing'}\n"
        f"  what to do: {THROTTLED if straggler.pace.throttled else NODE_CHECK}"
    )


def advice(straggler: Straggler) -> str:
    pace = straggler.pace
    if pace.data > straggler.excess / 2:
        return (
            "give data.workers a larger number, and compare how fast the hosts read the corpus "
            "with `meshtrain doctor`"
        )
    if pace.throttled:
        return THROTTLED
    if pace.load > max(pace.cores, 1.5 * straggler.load):
        return (
            "look with top for what else runs there, and give data.workers a smaller number if "
            "those are it"
        )
    return NODE_CHECK


def _ms(seconds: float) -> str:
    if seconds < LEAST_S:
        return f"{1000 * seconds:.1f} ms"
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
