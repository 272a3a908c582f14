"""Best-first search for the fastest layout that fits, by lower bounds of step time.

A candidate enters a heap with a lower bound from the work of its blocks; then once per schedule
with a bound that counts filling and draining the pipeline; then it is predicted in full. The search
ends when every bound left is above what it has found.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from meshtrain.config import Config, ConfigErrors
from meshtrain.errors import InputError, bytes_text
from meshtrain.foresight.blocks import count_works
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.prediction import SAVINGS, Prediction
from meshtrain.foresight.space import MICRO, Candidate, Space

NEAR = 0.05  # predictions that differ by less are no reason to prefer one


@dataclass(frozen=True)
class Forecast:
    """The functions by which a search judges candidates; tests pass their own.

    Attributes:
        begin: called with all configs before the first `bound`.
        bound: lower bound of the seconds of all configs that differ in schedule and SAVINGS only.
            Raises InputError.
        predict: a prediction with `bound` (lower bound of its seconds), `memory.total` (bytes of
            the fullest rank) and `step` (`seconds`; `parts`: name -> seconds), each computed when
            it is read.
        trace: begins a trace of a prediction's step; the returned function waits for its memory,
            which has to fit.
        memory: bytes available to a rank.
    """

    begin: Callable[[Sequence[Config]], None]
    bound: Callable[[Config], float]
    predict: Callable[[Config], Any]
    trace: Callable[[Any], Callable[[], Any]]
    memory: float


def forecast(
    hardware: Hardware, memory_gib: float | None = None, pool: Executor | None = None
) -> Forecast:
    """A Forecast by `Prediction` for this hardware. `pool`: processes that trace blocks beside each
    other."""

    def bound(config: Config) -> float:
        prediction = Prediction(config, hardware)
        of_blocks = sum(sum(cost.passes) for cost in prediction.block_costs)
        return prediction.microbatches * of_blocks / prediction.layout.size("pp")

    return Forecast(
        begin=partial(count_works, pool=pool),
        bound=bound,
        predict=partial(Prediction, hardware=hardware, pool=pool),
        trace=Prediction.trace,
        memory=hardware.device.room if memory_gib is None else memory_gib * 2**30,
    )


class Search:
    """Finds the fast candidates of a space that fit: of those that differ only in SAVINGS the
    fastest, or with the goal `memory` all of them."""

    def __init__(
        self, space: Space, forecast: Forecast, goal: Literal["time", "memory"] = "time"
    ) -> None:
        self.space = space
        self.config = space.config
        self.forecast = forecast
        self.goal = goal
        # bound, counter, whether it has a schedule
        self.heap: list[tuple[float, int, bool, Candidate]] = []
        self.pushed: set[tuple[Any, ...]] = set()
        # What was found. A group are the candidates that differ in SAVINGS only.
        self.fitting: dict[tuple[Any, ...], Candidate] = {}  # group -> its fastest that fits
        self.fastest: dict[tuple[int, ...], float] = {}  # layout -> seconds
        self.fastest_of: dict[int, float] = {}  # number of stages -> seconds
        self.times: list[float] = []  # of the fastest layouts, as many as are shown
        # What fits.
        self.can_fit: set[tuple[Any, ...]] = set()  # groups
        # group without MICRO -> smallest MICRO that cannot fit
        self.unfit: dict[tuple[Any, ...], int] = {}
        self.least = math.inf  # least memory of what does not fit
        self.predicted = 0

    def run(
        self, load: Callable[[list[str]], Config], show: int = 5, error: float = NEAR
    ) -> list[Candidate]:
        """The best candidate of each layout, best layouts first, at most `show`.

        Args:
            load: overrides -> the config as training reads it. Raises ConfigErrors.
            error: relative error of predicted seconds. Candidates within it of the fastest count as
                equal and are ordered by simplicity: fewest stages, then fewest axes, then least
                memory; with the goal `memory` memory comes first.
        """
        self._find(show, error)
        fastest = min(self.fastest.values(), default=0.0)

        def place(candidate: Candidate) -> tuple[float, ...]:
            seconds = candidate.prediction.step.seconds
            memory = candidate.prediction.memory.total
            candidate.near = seconds <= fastest * (1 + error)
            if not candidate.near:
                return 1, seconds
            if self.goal == "time":
                return (0, *candidate.parts, memory)
            return (0, memory, *candidate.parts)

        order = sorted(self.fitting.values(), key=place)
        # Traces of what will probably be shown begin together: of each layout the best candidate.
        likely: dict[tuple[int, ...], Candidate] = {}
        for candidate in order:
            likely.setdefault(candidate.layout.shape, candidate)
        traces = {
            id(candidate): self.forecast.trace(candidate.prediction)
            for candidate in list(likely.values())[:show]
        }

        best: dict[tuple[int, ...], Candidate] = {}
        for candidate in order:
            if candidate.layout.shape in best or len(best) == show:
                continue
            trace = traces.get(id(candidate)) or self.forecast.trace(candidate.prediction)
            if self._holds(candidate, load, trace):
                best[candidate.layout.shape] = candidate
                first = next(iter(best.values()))
                candidate.reason = _reason(first, candidate)
        return list(best.values())

    def _holds(
        self, candidate: Candidate, load: Callable[[list[str]], Config], trace: Callable[[], Any]
    ) -> bool:
        """Whether training accepts the candidate, and the traced memory of its step fits."""
        try:
            load(candidate.overrides(self.config))
        except ConfigErrors as problem:
            self.space.reject("refused when it is read as a whole", problem.errors[0].message)
            return False
        with self._refusals():
            candidate.memory = trace()
        if candidate.memory is None:
            return False
        if candidate.memory.total > self.forecast.memory:
            takes = f"{bytes_text(candidate.memory.total)} of {bytes_text(self.forecast.memory)}"
            self.space.reject(
                "do not fit when they are traced", f"{candidate.layout} takes {takes}"
            )
            return False
        return True

    # Best first -----------------------------------------------------------------------------------

    def _find(self, show: int, error: float) -> None:
        # Blocks of all candidates are counted before the first bound, in processes side by side.
        candidates = list(self.space.candidates())
        configs = [candidate.apply(self.config) for candidate in candidates]
        self.forecast.begin(configs)
        for candidate, config in zip(candidates, configs, strict=True):
            with self._refusals():
                self._push(candidate, self.forecast.bound(config), has_schedule=False)
        # The candidate with the lowest bound may be the best: it gets a tighter bound, with each
        # schedule, or is predicted.
        while self.heap:
            bound, _, has_schedule, candidate = heapq.heappop(self.heap)
            if self._is_enough(bound, show, error):
                example = f"{candidate.layout} takes {bound:.3g} s or more"
                self.space.reject("slower than these, by a bound", example, len(self.heap) + 1)
                break
            if hopeless := self._hopeless(candidate, bound, show, error):
                self.space.reject(hopeless, str(candidate.layout))
            elif has_schedule:
                self._predict(candidate, bound, show)
            else:
                self._push_all(self.space.schedules(candidate), bound)
        if self.unfit:
            takes = bytes_text(self.least)
            example = f"the least takes {takes} of {bytes_text(self.forecast.memory)}"
            count, _ = self.space.rejected["do not fit"]
            self.space.rejected["do not fit"] = count, example

    @property
    def _best(self) -> float:
        """Seconds of the fastest layout so far."""
        return self.times[0] if self.times else math.inf

    def _is_enough(self, bound: float, show: int, error: float) -> bool:
        """Whether no candidate left can be shown: neither as one of the fastest layouts, nor as
        simpler than the fastest and as fast within the error."""
        if len(self.times) < show:
            return False
        return bound > max(self.times[-1], self._best * (1 + error))

    def _hopeless(self, candidate: Candidate, bound: float, show: int, error: float) -> str | None:
        """Why a candidate that is not faster than this bound cannot be shown; None if it can."""
        as_fast = self._best * (1 + error)
        near = [stages for stages, seconds in self.fastest_of.items() if seconds <= as_fast]
        simplest = min(near, default=0)
        is_full = len(self.times) == show
        has_more_stages = candidate.layout.size("pp") > simplest
        if self.goal == "time" and is_full and bound > self._best and has_more_stages:
            return "not simpler than these, nor faster by a bound"
        if bound > max(as_fast, self.fastest.get(candidate.layout.shape, math.inf)):
            return "slower than the same layout is otherwise"
        return None

    def _push(self, candidate: Candidate, bound: float, has_schedule: bool) -> None:
        heapq.heappush(self.heap, (bound, len(self.pushed), has_schedule, candidate))
        self.pushed.add((has_schedule, candidate.key()))

    def _push_all(self, candidates: Iterable[Candidate], bound: float) -> None:
        """Pushes candidates with a schedule, which are not faster than `bound`."""
        for candidate in candidates:
            if (True, candidate.key()) not in self.pushed:
                with self._refusals():
                    candidate.prediction = self.forecast.predict(candidate.apply(self.config))
                    own_bound = max(bound, candidate.prediction.bound)
                    self._push(candidate, own_bound, has_schedule=True)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Context in which the model may refuse a candidate, as its layers do when they cannot be
        split."""
        try:
            yield
        except InputError as error:
            self.space.reject("refused when the model is built", str(error))

    # Predictions ----------------------------------------------------------------------------------

    def _predict(self, candidate: Candidate, bound: float, show: int) -> None:
        """Predicts a candidate in full. One that does not fit makes way for those that save
        memory."""
        group = candidate.key(*SAVINGS)
        of_any_size = candidate.key(*SAVINGS, MICRO)
        size = candidate.settings[MICRO]
        if size >= self.unfit.get(of_any_size, math.inf):
            self.space.reject("do not fit", "")
        elif self._fits(candidate):
            self._keep(candidate, group if self.goal == "time" else candidate.key(), show)
            # For the least memory, candidates that fit make way for leaner ones, too.
            if self.goal == "memory":
                self._push_all(self.space.savings(candidate), bound)
        # Only if the leanest candidate of the group fits is it worth to go there step by step.
        elif group in self.can_fit or self._fits(self.space.savings(candidate, most=True)[0]):
            self.can_fit.add(group)
            self._push_all(self.space.savings(candidate), bound)
        else:
            self.unfit[of_any_size] = size
            self.space.reject("do not fit", "")

    def _keep(self, candidate: Candidate, key: tuple[Any, ...], show: int) -> None:
        seconds = candidate.prediction.step.seconds
        known = self.fitting.get(key)
        if known is None or seconds < known.prediction.step.seconds:
            self.fitting[key] = candidate

        stages, _ = candidate.parts
        fastest_of = self.fastest_of.get(stages, math.inf)
        self.fastest_of[stages] = min(seconds, fastest_of)

        shape = candidate.layout.shape
        if seconds < self.fastest.get(shape, math.inf):
            self.fastest[shape] = seconds
            self.times = heapq.nsmallest(show, self.fastest.values())

    def _fits(self, candidate: Candidate) -> bool:
        if candidate.prediction is None:
            candidate.prediction = self.forecast.predict(candidate.apply(self.config))
        self.predicted += 1
        total = candidate.prediction.memory.total
        if total <= self.forecast.memory:
            return True
        self.least = min(self.least, total)
        return False


def _reason(first: Candidate, other: Candidate) -> str:
    """Why a candidate does not rank first."""
    if other is first:
        return ""
    if other.near:
        worse = []
        for name, own, best in zip(("stages", "axes"), other.parts, first.parts, strict=True):
            if own > best:
                worse.append(f"{own} {name} for {best}")
        more = other.memory.total - first.memory.total
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
