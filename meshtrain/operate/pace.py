"""PURE: which ranks keep the others waiting, from what each tells of its own time.

A step takes all ranks as long as the slowest of them, so the step's time tells nothing about who it is. What tells is
the time that a rank spends by itself, waiting for nobody: ranks that do the same work should take the same.

Machines are noisy, and a warning that is wrong is worse than none. So a rank is slow only if even its good steps are
longer than the bad ones of the others (quartiles, which single hiccups do not move), if that costs a part of the step
that somebody would want back, and if it stays so in look after look. Time in which a thread could have run and no core
was free counts between hosts only: ranks that share cores share that too, and not evenly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles

LOOKS = 3  # in a row, before somebody is named, or is taken for recovered
SHARE = 0.1  # of a step: what a slow rank must cost the others
LEAST_S = 0.01  # shorter excesses are the noise of steps that are too short to be worth a warning


@dataclass(frozen=True)
class Pace:
    """What one rank took in the steps of one look; seconds are per step.

    Attributes:
        low, middle, high: the quartiles of its own time, without the time in which no core was free for it.
        low_all, middle_all, high_all: with that time.
        step: of the whole step, the median.
        data: of it, waiting for data.
        host: by name.
        load: the 1-minute load average of its host.
        cores: of its host.
        gpu: how its GPU does, where somebody has asked; else empty.
    """

    low: float
    middle: float
    high: float
    low_all: float
    middle_all: float
    high_all: float
    step: float
    data: float
    host: str
    load: float
    cores: int
    gpu: str = ""

    @classmethod
    def of(cls, steps: Sequence[Mapping[str, float]], host: str, load: float, cores: int, gpu: str = "") -> "Pace":
        """From the times of at least two steps, as StepClock.pop gives them."""
        everything = [times["time_own_s"] for times in steps]
        own = [max(0.0, times["time_own_s"] - times["time_queued_s"]) for times in steps]
        low, middle, high = quantiles(own, method="inclusive")
        low_all, middle_all, high_all = quantiles(everything, method="inclusive")
        step, data = (median(times[name] for times in steps) for name in ("step_time_s", "time_data_s"))
        return cls(low, middle, high, low_all, middle_all, high_all, step, data, host, load, cores, gpu)

    @property
    def queued(self) -> float:
        """Seconds in which no core was free for it."""
        return self.middle_all - self.middle


@dataclass(frozen=True)
class Straggler:
    """A rank that has been slow for `LOOKS` looks; times are seconds per step of the last one.

    Attributes:
        pace: its own.
        peers: how many other ranks do the same work; 0 if it is compared with itself.
        own: what it takes by itself.
        others: what its peers take; without them, what it took in the first look.
        load: of its peers' hosts.
    """

    rank: int
    pace: Pace
    peers: int
    own: float
    others: float
    load: float

    @property
    def excess(self) -> float:
        """Seconds of each step for which the others wait."""
        return self.own - self.others


def is_slow(one: Pace, others: Sequence[Pace]) -> bool:
    """Whether a rank is slower than its peers beyond doubt.

    Who shares a host shares its cores, and whom the kernel lets wait for one is chance. Another host whose cores are
    never free is slow, though.

    Args:
        others: those who do the same work, without the rank itself.
    """
    elsewhere = [other for other in others if other.host != one.host]
    beyond = [one.low - median(other.high for other in others)] if others else []
    beyond += [one.low_all - median(other.high_all for other in elsewhere)] if elsewhere else []
    return any(seconds > max(LEAST_S, SHARE * one.step) for seconds in beyond)


def slow(paces: Sequence[Pace], peers: Sequence[Sequence[int]]) -> set[int]:
    """The ranks that are slow in one look.

    Args:
        paces: of every rank.
        peers: groups of ranks that do the same work; each rank is in one of them. Nothing is known of one that is alone
            in its group.
    """
    return {
        rank
        for group in peers
        for rank in group
        if is_slow(paces[rank], [paces[other] for other in group if other != rank])
    }


@dataclass
class Looks:
    """Look after look: who has become a straggler, and who is none any more.

    Attributes:
        peers: groups of ranks that do the same work; each rank is in one. Ranks that are alone in theirs (stages of a
            pipeline without data parallelism) are compared with what they took in the first look, and that with how
            the others of them have changed.
        suspects: the ranks that were slow in the last look.
        named: the stragglers.
    """

    peers: Sequence[Sequence[int]]
    suspects: set[int] = field(default_factory=set)
    named: set[int] = field(default_factory=set)
    _first: Sequence[Pace] = ()
    _slow: dict[int, int] = field(default_factory=dict)  # rank -> looks in a row in which it was slow
    _fine: dict[int, int] = field(default_factory=dict)  # named rank -> looks in a row in which it was not

    def see(self, paces: Sequence[Pace]) -> tuple[list[Straggler], list[int]]:
        """Takes one look; returns those who have just become stragglers, and the ranks that have just recovered."""
        self._first = self._first or paces
        together = [group for group in self.peers if len(group) > 1]
        alone = [rank for group in self.peers if len(group) == 1 for rank in group]
        self.suspects = slow(paces, together) | slow(self._scaled(paces, alone), [alone])
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in self.suspects}
        self._fine = {rank: self._fine.get(rank, 0) + 1 for rank in self.named - self.suspects}
        new = sorted(rank for rank, looks in self._slow.items() if looks >= LOOKS and rank not in self.named)
        recovered = sorted(rank for rank, looks in self._fine.items() if looks >= LOOKS)
        self.named = (self.named | set(new)) - set(recovered)
        return [self._straggler(rank, paces) for rank in new], recovered

    def _scaled(self, paces: Sequence[Pace], alone: Sequence[int]) -> list[Pace]:
        """As if all that are alone had taken the same in the first look."""
        common = median(self._first[rank].middle for rank in alone) if alone else 0.0
        scaled = list(paces)
        for rank in alone:
            one, factor = paces[rank], common / max(self._first[rank].middle, 1e-9)
            low, middle, high = factor * one.low, factor * one.middle, factor * one.high
            scaled[rank] = replace(
                one, low=low, middle=middle, high=high, low_all=low, middle_all=middle, high_all=high
            )
        return scaled

    def _straggler(self, rank: int, paces: Sequence[Pace]) -> Straggler:
        group = next(group for group in self.peers if rank in group)
        one, first = paces[rank], self._first[rank]
        if len(group) == 1:
            return Straggler(rank, one, 0, one.middle, first.middle, first.load)
        others = [paces[other] for other in group if other != rank and other not in self.suspects]
        others = others or [paces[other] for other in group if other != rank]
        load = median(other.load for other in others)
        if is_slow(one, [replace(other, host=one.host) for other in others]):  # without what it waits for a core, too
            return Straggler(rank, one, len(group) - 1, one.middle, median(other.middle for other in others), load)
        typical = median(other.middle_all for other in others)
        return Straggler(rank, one, len(group) - 1, one.middle_all, typical, load)
