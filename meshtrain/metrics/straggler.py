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
from collections.abc import Callable, Collection, Mapping, Sequence
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
from meshtrain.metrics.nvml import UNKNOWN, GpuCondition, gpu_condition
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
SUSPECTS = "pace/suspects"  # a key of the store: the ranks whose GPUs are to be looked at


# One look -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quartiles:
    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        return cls(*quantiles(values, method="inclusive"))

    def scaled(self, factor: float) -> "Quartiles":
        return Quartiles(factor * self.low, factor * self.middle, factor * self.high)


@dataclass(frozen=True)
class RankPace:
    """Times of one rank in the steps of one look, in seconds per step."""

    own: Quartiles  # its own time, without the time in which no core was free for it
    total: Quartiles  # its own time with that
    limit: float  # what it may exceed the others' times by
    data: float  # the median of its wait for data
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
        step = median(times["step_time_s"] for times in steps)
        # Two counters of the kernel do not agree to the last bit.
        own = [max(0.0, times["time_own_s"] - times["time_queued_s"]) for times in steps]
        return cls(
            own=Quartiles.of(own),
            total=Quartiles.of([times["time_own_s"] for times in steps]),
            limit=max(LEAST_S, SHARE * step),
            data=median(times["time_data_s"] for times in steps),
            host=host,
            load=load,
            cores=cores,
            gpu=gpu.text,
            throttled=gpu.throttled,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RankPace":
        quartiles = {name: Quartiles(**values[name]) for name in ("own", "total")}
        return cls(**{**values, **quartiles})

    def of_probe(self, seconds: Sequence[float]) -> "RankPace":
        """This pace with times of its GPU's probe. The limit is such that a GPU is slow if it takes
        1 + PROBE_SHARE times as long as the others."""
        times = Quartiles(min(seconds), median(seconds), max(seconds))
        limit = times.low * (1 - 1 / (1 + PROBE_SHARE))
        return replace(self, own=times, total=times, limit=limit)

    def relative_to(self, first: "RankPace") -> "RankPace":
        """This pace in units of an earlier one, without waits for a core."""
        factor = 1 / max(first.own.middle, 1e-9)
        times = self.own.scaled(factor)
        return replace(self, own=times, total=times, limit=factor * self.limit)

    @property
    def queued(self) -> float:
        return self.total.middle - self.own.middle


def is_slow(rank: RankPace, others: Sequence[RankPace]) -> bool:
    """Whether a rank is clearly slower than the others with the same work."""
    return computes_slowly(rank, others) or lacks_cores(rank, others)


def computes_slowly(rank: RankPace, others: Sequence[RankPace]) -> bool:
    if not others:
        return False
    return rank.own.low - median(other.own.high for other in others) > rank.limit


def lacks_cores(rank: RankPace, others: Sequence[RankPace]) -> bool:
    """Whether it is slow only with its waits for a core. Which rank waits on a shared host is
    chance, so these count only against ranks of other hosts: a host whose cores are never free is
    slow."""
    elsewhere = [other for other in others if other.host != rank.host]
    if not elsewhere:
        return False
    return rank.total.low - median(other.total.high for other in elsewhere) > rank.limit


def slow(paces: Sequence[RankPace], peers: Sequence[Sequence[int]]) -> set[int]:
    """The slow ranks of one look, from every rank's pace and the groups of ranks that do the same
    work."""
    found = set()
    for group in peers:
        for rank in group:
            others = [paces[other] for other in group if other != rank]
            if is_slow(paces[rank], others):
                found.add(rank)
    return found


# Look after look ----------------------------------------------------------------------------------


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


@dataclass
class StragglerTest:
    """Finds, look after look, which ranks have become stragglers and which have recovered. Ranks
    alone in their group (stages of a pipeline without data parallelism) are compared by the change
    of their times since the first look."""

    peers: Sequence[Sequence[int]]  # groups of ranks that do the same work; each rank is in one
    suspects: set[int] = field(default_factory=set)  # slow in the last look
    named: set[int] = field(default_factory=set)  # the stragglers
    _first: Sequence[RankPace] = ()
    # suspect -> looks in a row in which it was slow
    _slow: dict[int, int] = field(default_factory=dict)
    # named rank -> looks in a row in which it was not
    _fine: dict[int, int] = field(default_factory=dict)

    def update(self, paces: Sequence[RankPace]) -> tuple[list[Straggler], list[int]]:
        """Takes the paces of one look; returns the new stragglers, and the ranks that have just
        recovered."""
        if not self._first:
            self._first = paces
        self.suspects = self._slow_ranks(paces)

        self._slow = _count_on(self._slow, self.suspects)
        self._fine = _count_on(self._fine, self.named - self.suspects)
        new = _lasting(self._slow) - self.named
        recovered = _lasting(self._fine)
        self.named = (self.named | new) - recovered
        return [self._straggler(rank, paces) for rank in sorted(new)], sorted(recovered)

    def _slow_ranks(self, paces: Sequence[RankPace]) -> set[int]:
        together = [group for group in self.peers if len(group) > 1]
        alone = [rank for group in self.peers if len(group) == 1 for rank in group]
        # All may become slower, with longer sequences: those alone are compared by their changes.
        changes = list(paces)
        for rank in alone:
            changes[rank] = paces[rank].relative_to(self._first[rank])
        return slow(paces, together) | slow(changes, [alone])

    def _straggler(self, rank: int, paces: Sequence[RankPace]) -> Straggler:
        (group,) = (group for group in self.peers if rank in group)
        pace = paces[rank]
        if len(group) == 1:
            first = self._first[rank]
            return Straggler(
                rank, pace, peers=0, own=pace.own.middle, others=first.own.middle, load=first.load
            )
        others = [other for other in group if other != rank]
        # Another slow rank would hide by how much this one is slow.
        fast = [other for other in others if other not in self.suspects] or others
        peers = [paces[other] for other in fast]
        if computes_slowly(pace, peers):
            own = pace.own.middle
            usual = median(peer.own.middle for peer in peers)
        else:
            own = pace.total.middle
            usual = median(peer.total.middle for peer in peers)
        load = median(peer.load for peer in peers)
        return Straggler(rank, pace, peers=len(others), own=own, others=usual, load=load)


def _count_on(looks: Mapping[int, int], ranks: Collection[int]) -> dict[int, int]:
    """One look more for these ranks; for all others the count begins again."""
    return {rank: looks.get(rank, 0) + 1 for rank in ranks}


def _lasting(looks: Mapping[int, int]) -> set[int]:
    return {rank for rank, count in looks.items() if count >= LOOKS}


# The ranks of a job -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a rank tells rank 0 in a look."""

    who: str
    step: int
    pace: RankPace
    memory_gib: float
    gpu_model: str
    probe: Sequence[float]  # seconds of the GPU's probes since the last look

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "Report":
        values = json.loads(text)
        return cls(**{**values, "pace": RankPace.from_json(values["pace"])})


class StragglerDetector:
    """One rank's part in the comparison; all ranks call `finish_step` after the same steps."""

    def __init__(
        self, job: Job, first: int, say: Callable[[str], None], folder: Path | None = None
    ) -> None:
        """`folder`: where rank 0 writes `ranks.json`, with each rank's time and memory at the last
        look."""
        assert job.layout is not None  # it was placed
        self._job, self._layout, self._say, self._folder = job, job.layout, say, folder
        self._every = max(EVERY, job.world_size // RANKS_PER_STEP)
        self._begins = first + WARM_UP
        self._steps: list[Mapping[str, float]] = []  # since the last look
        self.probe = GpuProbe(job.device, active=job.world_size > 1)
        self._probes: list[float] = []  # seconds since the last look
        self._gpu = UNKNOWN
        self._gpu_thread = threading.Thread()
        self._uuid = ""
        if job.device.type == "cuda":
            self._uuid = f"GPU-{torch.cuda.get_device_properties(job.device).uuid}"

        # The rest is rank 0's.
        self._test = StragglerTest(job.layout.groups(*DATA_AXES)) if job.rank == 0 else None
        self._probe_test: StragglerTest | None = None  # once it knows who has the same GPU model
        self._posted: int | None = None  # the step of the look that rank 0 has not read yet
        self._suspects: set[int] = set()  # as posted to the ranks
        self._writer = threading.Thread()

    def finish_step(self, step: int, times: Mapping[str, float]) -> dict[str, float]:
        """Takes a step's times (StepTimer.pop) before the next update; on rank 0 sometimes returns
        fields for a row."""
        if self._job.store is None:
            return {}
        self._probes += self.probe.pop()
        fields = {}
        if self._posted is not None:
            fields = self._compare(self._read_reports())
        if step >= self._begins:
            self._steps.append(times)
        if step % self._every == 0:
            self._post(step)
        return fields

    def _post(self, step: int) -> None:
        steps, self._steps = self._steps, []
        if len(steps) < FEWEST:  # the same on all ranks
            return
        probe, self._probes = self._probes, []
        cores = os.cpu_count() or 1
        report = Report(
            who=str(self._job),
            step=step,
            pace=RankPace.of(steps, self._job.host, os.getloadavg()[0], cores, self._gpu),
            memory_gib=memory_gib(self._job.device),
            gpu_model=self.probe.model,
            probe=probe,
        )
        assert self._job.store is not None
        self._job.store.set(f"pace/{self._job.rank}", report.to_json())
        if self._job.rank == 0:
            self._posted = step
        if self._uuid and self._is_suspect() and not self._gpu_thread.is_alive():
            # In a thread: a driver in trouble may take seconds.
            self._gpu_thread = threading.Thread(target=self._ask_gpu, name="nvml", daemon=True)
            self._gpu_thread.start()

    def _is_suspect(self) -> bool:
        store = self._job.store
        assert store is not None
        return store.check([SUSPECTS]) and self._job.rank in json.loads(store.get(SUSPECTS))

    def _ask_gpu(self) -> None:
        self._gpu = gpu_condition(self._uuid)

    def _read_reports(self) -> list[Report]:
        """Called on rank 0 one step after its post: this step ended with a sum over all ranks, so
        all have posted, and nobody waits."""
        step, self._posted = self._posted, None
        assert self._job.store is not None
        texts = self._job.store.multi_get([f"pace/{rank}" for rank in range(self._job.world_size)])
        reports = list(map(Report.from_json, texts))
        assert all(report.step == step for report in reports), "all ranks look after the same steps"
        return reports

    def _compare(self, reports: Sequence[Report]) -> dict[str, float]:
        assert self._test is not None
        paces = [report.pace for report in reports]
        new, recovered = self._test.update(paces)
        for straggler in new:
            self._say(describe(straggler, reports[straggler.rank].who, LOOKS * self._every))
        for rank in recovered:
            self._say(f"{reports[rank].who} is as fast as its peers again")
        probe_fields = self._compare_probes(reports)
        self._post_suspects()
        self._write_table(reports)

        slowest = max(range(len(reports)), key=lambda rank: paces[rank].own.middle)
        fullest = max(range(len(reports)), key=lambda rank: reports[rank].memory_gib)
        return {
            "own_time_median_s": median(pace.own.middle for pace in paces),
            "own_time_max_s": paces[slowest].own.middle,
            "own_time_max_rank": slowest,
            "memory_max_gib": reports[fullest].memory_gib,
            "memory_max_rank": fullest,
            **probe_fields,
        }

    def _compare_probes(self, reports: Sequence[Report]) -> dict[str, float]:
        """The same test for the GPUs alone, if each was probed since the last look."""
        if not all(report.probe for report in reports):
            return {}
        if self._probe_test is None:
            by_model = group_values((report.gpu_model, i) for i, report in enumerate(reports))
            self._probe_test = StragglerTest(list(by_model.values()))
        new, recovered = self._probe_test.update(
            [report.pace.of_probe(report.probe) for report in reports]
        )
        for straggler in new:
            self._say(describe_probe(straggler, reports[straggler.rank].who))
        for rank in recovered:
            self._say(f"{reports[rank].who}: its GPU is as fast as the others again")

        seconds = [median(report.probe) for report in reports]
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        return {
            "gpu_probe_median_s": median(seconds),
            "gpu_probe_max_s": seconds[slowest],
            "gpu_probe_max_rank": slowest,
        }

    def _post_suspects(self) -> None:
        """Tells the ranks whose GPUs are to be looked at, if they are others than before."""
        assert self._test is not None
        assert self._job.store is not None
        suspects = set(self._test.suspects)
        if self._probe_test is not None:
            suspects |= self._probe_test.suspects
        if suspects != self._suspects:
            self._suspects = suspects
            self._job.store.set(SUSPECTS, json.dumps(sorted(suspects)))

    def _write_table(self, reports: Sequence[Report]) -> None:
        # In a thread: a slow disk must not delay the step.
        if self._folder is not None and not self._writer.is_alive():
            file = self._folder / "ranks.json"
            self._writer = threading.Thread(target=self._write, args=(file, reports), daemon=True)
            self._writer.start()

    def _write(self, file: Path, reports: Sequence[Report]) -> None:
        table = {
            "step": reports[0].step,
            "axes": {axis: size for axis, size in self._layout.sizes.items() if size > 1},
            "hosts": [report.pace.host for report in reports],
            "own_time_s": [report.pace.own.middle for report in reports],
            "memory_gib": [report.memory_gib for report in reports],
        }
        with optional("ranks.json could not be written"):
            write_whole(file, json.dumps(table) + "\n")


# What is said -------------------------------------------------------------------------------------


def describe(straggler: Straggler, rank: str, steps: int) -> str:
    pace = straggler.pace
    if straggler.peers == 0:
        others = "at first it took"
    elif straggler.peers == 1:
        others = "the other rank with the same work takes"
    else:
        others = f"the other {straggler.peers} ranks with the same work take"
    known = [
        f"{_ms(pace.data)} waiting for data",
        f"{_ms(pace.queued)} waiting for a core",
        f"load of its host {pace.load:.1f} on {pace.cores} cores",
    ]
    if pace.gpu:
        known.append(pace.gpu)
    return (
        f"warning: {rank} is slow: for {steps} steps now it has taken {_ms(straggler.own)} of its "
        f"own for each, {others} {_ms(straggler.others)}. All ranks wait for it\n"
        f"  known of it: {', '.join(known)}\n"
        f"  what to do: {advice(straggler)}"
    )


def describe_probe(straggler: Straggler, rank: str) -> str:
    """As `describe`, for a GPU that is slow in its probes."""
    others = "the others' take" if straggler.peers else "at first it took"
    return (
        f"warning: the GPU of {rank} is slow: a product of matrices takes {_ms(straggler.own)} on "
        f"it in {LOOKS} looks in a row, {others} {_ms(straggler.others)}. All ranks wait for it\n"
        f"  known of it: {straggler.pace.gpu or 'the driver tells nothing'}\n"
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
