"""The judge of stragglers: from the times of all ranks, look after look, which of them are slow.

A rank is slow only if even its good steps are longer than the others' bad ones (quartiles, which
single outliers do not move), if that costs a sizeable part of the step, and if it persists. Time in
which a thread was runnable and no core was free counts between hosts only: ranks that share cores
share that time, too, and not evenly. Pure: `straggler.py` brings the times together.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any

from meshtrain.metrics.nvml import UNKNOWN, GpuCondition

LOOKS = 3  # in a row, before a rank is named as a straggler, or as recovered
SHARE = 0.1  # of a step: what a slow rank must cost the others
LEAST_S = 0.01  # shorter excesses are the noise of steps that are too short to be worth a warning
# by which a slow GPU's matrix product is longer: GPUs of one model differ by up to a tenth
PROBE_SHARE = 0.2


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


def slow(paces: Sequence[RankPace], peers: Sequence[Sequence[int]]) -> set[int]:
    """The slow ranks of one look, from every rank's pace and the groups of ranks that do the same
    work. A rank is compared with the median of the others: by its own time, and with its waits for
    a core by that of ranks on other hosts, since it is chance which rank of a host waits. So a host
    whose cores are never free is slow."""
    found = set()
    for group in peers:
        # Sorted once: in a group of thousands to sort for each rank would take seconds.
        own = sorted(paces[rank].own.high for rank in group)
        elsewhere = _medians_elsewhere([paces[rank] for rank in group])
        for rank in group:
            pace = paces[rank]
            computes_slowly = waits_for_cores = False
            if len(group) > 1:
                usual = _median_without(own, pace.own.high)
                computes_slowly = pace.own.low - usual > pace.limit
            if pace.host in elsewhere:
                waits_for_cores = pace.total.low - elsewhere[pace.host] > pace.limit
            if computes_slowly or waits_for_cores:
                found.add(rank)
    return found


def _medians_elsewhere(paces: Sequence[RankPace]) -> dict[str, float]:
    """Host -> the median of what the ranks of all other hosts take in their bad steps; nothing for
    a host that has all ranks."""
    ordered = sorted((pace.total.high, pace.host) for pace in paces)
    medians = {}
    for host in {pace.host for pace in paces}:
        highs = [high for high, other in ordered if other != host]
        if highs:
            medians[host] = median(highs)
    return medians


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of a sorted sequence without one of its elements, which has this value."""
    position = bisect_left(ordered, value)

    def element(index: int) -> float:  # of the rest
        return ordered[index] if index < position else ordered[index + 1]

    rest = len(ordered) - 1
    return (element((rest - 1) // 2) + element(rest // 2)) / 2


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
        if pace.own.low - median(peer.own.high for peer in peers) > pace.limit:
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
