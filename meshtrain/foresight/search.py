"""Search for the fastest layout that fits.

Each candidate is looked at twice: `estimate` ranks all of them by closed forms, and the best of
these are predicted in full, in that order, until no estimate is left that could be among the
results, or as many as wanted are predicted.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from meshtrain.config import Config, ConfigErrors
from meshtrain.errors import InputError, bytes_text
from meshtrain.foresight.estimate import Estimate, Estimates, least_of
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.prediction import SAVINGS, Prediction
from meshtrain.foresight.space import (
    OFFLOAD,
    RECOMPUTE,
    SCHEDULE,
    STAGES,
    Candidate,
    Space,
    saves_as_much,
)

NEAR = 0.05  # predictions that differ by less are no reason to prefer one
MARGIN = 0.05  # relative error of estimated seconds

FEWER = 0.9  # of its estimate a candidate may take so much less than others like it
UNFIT = 4  # candidates whose memory is predicted, for one that is predicted in full

Place = tuple[float, ...]  # in the order of results
NOWHERE: Place = (math.inf,)


@dataclass(frozen=True)
class Forecast:
    """The functions by which a search judges candidates; tests pass their own.

    Attributes:
        estimate: a first look at a candidate. Without a schedule (the second argument is false),
            the least that it takes with any. Raises InputError.
        predict: a prediction of a config, with `memory.total` (bytes of the fullest rank),
            `fits_hosts` (whether hosts have the memory for what it offloads) and `step`
            (`seconds`; `parts`: name -> seconds), each computed when it is read.
        memory: bytes available to a rank.
        margin: relative error of estimated seconds.
    """

    estimate: Callable[[Candidate, bool], Estimate]
    predict: Callable[[Config], Any]
    memory: float
    margin: float = MARGIN


def forecast(config: Config, hardware: Hardware, memory_gib: float | None = None) -> Forecast:
    """A Forecast by `Estimates` and `Prediction` for the candidates of a config."""
    return Forecast(
        estimate=Estimates(config, hardware).of,
        predict=partial(Prediction, hardware=hardware),
        memory=hardware.device.room if memory_gib is None else memory_gib * 2**30,
    )


@dataclass
class _First:
    """A candidate of the space, which has yet to get a schedule and values of SAVINGS, and what
    became of it."""

    candidate: Candidate
    refused: str = ""
    has_schedules: bool = False
    waiting: int = 0  # how many with a schedule have not been predicted
    fits: bool = False


@dataclass(order=True)
class _Entry:
    seconds: float  # that it takes at least
    number: int  # of equal ones the first is looked at first
    first: _First = field(compare=False)
    candidate: Candidate | None = field(compare=False, default=None)  # with a schedule


class Search:
    """Finds the fast candidates of a space that fit: of those that differ only in SAVINGS the
    fastest, or with the goal `memory` all of them.

    Attributes:
        looked: of the candidates, how many have been looked at with schedules.
        judged: of how many with a schedule the memory was predicted.
        predicted: of how many of these, which fit, the seconds were predicted, too.
    """

    def __init__(
        self, space: Space, forecast: Forecast, goal: Literal["time", "memory"] = "time"
    ) -> None:
        self.space = space
        self.config = space.config
        self.forecast = forecast
        self.goal = goal
        self.firsts: list[_First] = []
        self.heap: list[_Entry] = []
        self.known: set[tuple[Any, ...]] = set()  # keys of what was pushed with a schedule
        self.pushed = 0
        self.fitting: dict[tuple[Any, ...], tuple[Candidate, _First]] = {}
        self.best = math.inf  # seconds of the fastest that fits
        self.places: dict[tuple[int, ...], Place] = {}  # layout -> the best place of its candidates
        self.last_shown = NOWHERE
        self.least = math.inf  # least memory of what does not fit
        self.looked = 0
        # Schedule, stages and recomputation -> the least share of its estimated memory that such a
        # candidate takes.
        self.shares: dict[tuple[Any, ...], float] = {}
        self.judged = 0
        self.predicted = 0
        self.is_ranked = False  # whether all candidates have been estimated
        self.is_cut = False  # by the limit

    def run(
        self,
        load: Callable[[list[str]], Config],
        show: int = 5,
        error: float = NEAR,
        limit: float = math.inf,
        watch: Callable[["Search"], None] = lambda search: None,
    ) -> list[Candidate]:
        """The best candidate of each layout, best layouts first, at most `show`.

        Args:
            load: overrides -> the config as training reads it. Raises ConfigErrors.
            error: relative error of predicted seconds. Candidates within it of the fastest count as
                equal and are ordered by simplicity: fewest stages, then fewest axes, then least
                memory; with the goal `memory` memory comes first.
            limit: how many candidates that fit are predicted in full. Of UNFIT times as many the
                memory is looked at.
            watch: called again and again.
        """
        self.show, self.error = show, error
        self._rank(watch)
        self.is_ranked = True
        while self.heap:
            watch(self)
            if self.predicted >= limit or self.judged >= UNFIT * limit:
                self.is_cut = True
                break
            entry = heapq.heappop(self.heap)
            if self._is_enough(entry.seconds):
                heapq.heappush(self.heap, entry)
                break
            if not self._can_be_shown(entry):
                continue
            if entry.candidate is None:
                self._expand(entry.first)
            else:
                self._predict(entry.candidate, entry.first)
        results = self._results(load)
        self._count(results)
        return results

    def first_results(self) -> list[Candidate]:
        """The best by estimates alone, one of each layout, before anything is predicted."""
        best: dict[tuple[int, ...], Candidate] = {}
        for entry in heapq.nsmallest(20 * self.show, self.heap):
            best.setdefault(entry.first.candidate.layout.shape, entry.first.candidate)
        return list(best.values())[: self.show]

    # The first look -------------------------------------------------------------------------------

    def _rank(self, watch: Callable[["Search"], None]) -> None:
        for candidate in self.space.candidates():
            first = _First(candidate)
            self.firsts.append(first)
            with self._refusals(first):
                candidate.estimate = self._least(candidate)
                if candidate.estimate is not None:
                    self._push(first, candidate.estimate)
            watch(self)

    def _least(self, candidate: Candidate) -> Estimate | None:
        """The least that a candidate takes with any schedule and values of SAVINGS; None: it does
        not fit."""
        estimates = []
        fitting: list[Candidate] = []
        *others, leanest = self.space.savings(candidate)
        for leaner in (*others, leanest):
            # What saves more than one that fits is not faster, but takes the least memory.
            is_slower = any(saves_as_much(leaner, other) for other in fitting)
            if is_slower and leaner is not leanest:
                continue
            estimate = self.forecast.estimate(leaner, False)
            if estimate.least_memory > self.forecast.memory:
                self.least = min(self.least, estimate.least_memory)
                continue
            fitting.append(leaner)
            estimates.append(estimate)
            is_sure = candidate.layout.size("pp") == 1
            if is_sure and self.goal == "time" and estimate.most_memory <= self.forecast.memory:
                break
        return least_of(estimates) if estimates else None

    def _push(self, first: _First, estimate: Estimate, candidate: Candidate | None = None) -> None:
        self.pushed += 1
        seconds = estimate.seconds * (1 - self.forecast.margin)
        heapq.heappush(self.heap, _Entry(seconds, self.pushed, first, candidate))

    def _expand(self, first: _First) -> None:
        """Pushes a candidate with each schedule, and with the values of SAVINGS with which it may
        fit. What probably fits makes those needless that save more, and so are slower."""
        self.looked += 1
        first.has_schedules = True
        schedules = list(self.space.schedules(first.candidate))
        if not schedules:
            first.refused = "pp without a schedule that works"
        for scheduled in schedules:
            self._push_savings(scheduled, first)

    def _push_savings(self, scheduled: Candidate, first: _First) -> None:
        """Pushes a candidate with its own values of SAVINGS and those that save more, as far as
        they may fit and are not pushed yet."""
        enough: list[Candidate] = []
        for candidate in self.space.savings(scheduled):
            key = candidate.key()
            if key in self.known or any(saves_as_much(candidate, other) for other in enough):
                continue
            with self._refusals(first):
                estimate = self.forecast.estimate(candidate, True)
                candidate.estimate = estimate
                self.known.add(key)
                if estimate.least_memory > self.forecast.memory:
                    self.least = min(self.least, estimate.least_memory)
                    continue
                if self.goal == "time" and estimate.most_memory <= self.forecast.memory:
                    enough.append(candidate)
                first.waiting += 1
                self._push(first, estimate, candidate)

    @contextmanager
    def _refusals(self, first: _First) -> Iterator[None]:
        """Context in which the model may refuse a candidate, as its layers do when they cannot be
        split."""
        try:
            yield
        except InputError as error:
            first.refused = "refused when the model is built"
            self.space.reject(first.refused, str(error), 0)

    # The second look ------------------------------------------------------------------------------

    def _predict(self, candidate: Candidate, first: _First) -> None:
        first.waiting -= 1
        most = candidate.estimate.most_memory
        kind = tuple(candidate.settings[key] for key in (SCHEDULE, STAGES, RECOMPUTE))
        if FEWER * self.shares.get(kind, 0.0) * most > self.forecast.memory:
            self._push_savings(candidate, first)
            return
        self.judged += 1
        with self._refusals(first):
            candidate.prediction = self.forecast.predict(candidate.apply(self.config))
            total = candidate.prediction.memory.total
            self.shares[kind] = min(total / most, self.shares.get(kind, math.inf))
            if total > self.forecast.memory:
                self.least = min(self.least, total)
                self._push_savings(candidate, first)
                return
            if candidate.settings[OFFLOAD] != "none" and not candidate.prediction.fits_hosts:
                # What offloads more takes more of the host's memory.
                first.refused = "offload more than the memory of a host"
                return
            first.fits = True
            self.predicted += 1
            seconds = candidate.prediction.step.seconds
            key = candidate.key(*SAVINGS) if self.goal == "time" else candidate.key()
            known = self.fitting.get(key)
            if known is None or seconds < known[0].prediction.step.seconds:
                self.fitting[key] = candidate, first
            self.best = min(self.best, seconds)
            self._find_places()

    def _place(self, parts: tuple[int, int], seconds: float, memory: float) -> Place:
        """A place among results; the least comes first."""
        if seconds > self.best * (1 + self.error):
            return 1, seconds
        if self.goal == "time":
            return (0, *parts, memory)
        return (0, memory, *parts)

    def _place_of(self, candidate: Candidate) -> Place:
        prediction = candidate.prediction
        return self._place(candidate.parts, prediction.step.seconds, prediction.memory.total)

    def _find_places(self) -> None:
        self.places.clear()
        for candidate, _ in self.fitting.values():
            place = self._place_of(candidate)
            shape = candidate.layout.shape
            self.places[shape] = min(place, self.places.get(shape, place))
        ordered = sorted(self.places.values())
        if len(ordered) >= self.show:
            self.last_shown = ordered[self.show - 1]

    def _is_enough(self, seconds: float) -> bool:
        """Whether nothing that takes so long, or longer, can be shown."""
        return seconds > self.best * (1 + self.error) and self.last_shown <= (1, seconds)

    def _can_be_shown(self, entry: _Entry) -> bool:
        """Whether it may be faster than all that were found, or have a place among them."""
        if entry.seconds < self.best:
            return True
        if entry.candidate is None:
            candidate = entry.first.candidate
            parts = candidate.least_parts
        else:
            candidate = entry.candidate
            parts = candidate.parts
        could_be = self._place(parts, entry.seconds, candidate.estimate.least_memory)
        own = self.places.get(candidate.layout.shape, NOWHERE)
        return could_be < min(own, self.last_shown)

    # Results --------------------------------------------------------------------------------------

    def _results(self, load: Callable[[list[str]], Config]) -> list[Candidate]:
        """The best candidate of each layout that training accepts, best first."""
        results: dict[tuple[int, ...], Candidate] = {}
        ordered = sorted(self.fitting.values(), key=lambda pair: self._place_of(pair[0]))
        for candidate, first in ordered:
            if len(results) == self.show:
                break
            shape = candidate.layout.shape
            if shape in results:
                continue
            try:
                load(candidate.overrides(self.config))
            except ConfigErrors as problem:
                first.refused = "refused when it is read as a whole"
                self.space.reject(first.refused, problem.errors[0].message, 0)
                continue
            seconds = candidate.prediction.step.seconds
            candidate.near = seconds <= self.best * (1 + self.error)
            results[shape] = candidate

        shown = list(results.values())
        for candidate in shown:
            candidate.reason = _reason(shown[0], candidate)
        return shown

    def _count(self, results: Sequence[Candidate]) -> None:
        """Tells the space what became of each candidate that is not shown."""
        results_ids = {id(candidate) for candidate in results}
        shown = {
            id(first) for candidate, first in self.fitting.values() if id(candidate) in results_ids
        }
        takes = f"the least takes {bytes_text(self.least)} of {bytes_text(self.forecast.memory)}"
        for first in self.firsts:
            example = str(first.candidate.layout)
            if id(first) in shown:
                continue
            if first.fits:
                self.space.reject("slower than these, or less simple", example)
            elif first.refused:
                self.space.reject(first.refused, example)
            elif first.candidate.estimate is None or (first.has_schedules and not first.waiting):
                self.space.reject("do not fit", takes)
            elif self.is_cut:
                self.space.reject("not predicted: --limit", example)
            else:
                self.space.reject("slower than these, by an estimate", example)


def _reason(first: Candidate, other: Candidate) -> str:
    """Why a candidate does not rank first."""
    if other is first:
        return ""
    if other.near:
        worse = []
        for name, own, best in zip(("stages", "axes"), other.parts, first.parts, strict=True):
            if own > best:
                worse.append(f"{own} {name} for {best}")
        more = other.prediction.memory.total - first.prediction.memory.total
        if more > 0:
            worse.append(f"{bytes_text(more)} more memory")
        return "as fast, as far as this can tell" + (f", with {', '.join(worse)}" if worse else "")

    step, best_step = other.prediction.step, first.prediction.step
    longer = {
        name: step.parts.get(name, 0) - best_step.parts.get(name, 0)
        for name in [*step.parts, *best_step.parts]
    }
    largest = sorted(longer.items(), key=lambda part: -abs(part[1]))[:2]
    words = ", ".join(f"{name} {seconds:+.3g}" for name, seconds in largest if seconds)
    return f"{step.seconds - best_step.seconds:+.3g} s: {words}"
