"""Best-first search for the fastest layout that fits, by lower bounds of step time.

A candidate changes only keys that do not change what is computed, and obeys the config's own rules.
It enters a heap with a lower bound from the work of its blocks; then once per schedule with a bound
that counts filling and draining the pipeline; then it is predicted in full. The search ends when
every bound left is above what it has found.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from meshtrain.config import Config, ConfigErrors
from meshtrain.config.checks import ConfigDraft
from meshtrain.config.errors import Place, yaml_text
from meshtrain.config.layout_advice import factorizations
from meshtrain.config.model_spec import spec_of
from meshtrain.config.schema import SECTIONS
from meshtrain.config.tensor import (
    check_context,
    check_copies,
    check_experts,
    check_split,
    check_stages,
)
from meshtrain.config.yaml_reader import Node
from meshtrain.errors import InputError, bytes_text
from meshtrain.foresight.blocks import count_works
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.memory import short_schedule
from meshtrain.foresight.prediction import SAVINGS, Prediction, usable_savings
from meshtrain.layout import AXES, DATA_AXES, Layout, written
from meshtrain.pipeline.partition import blocks_of
from meshtrain.pipeline.schedule import NAMES

MICRO, SCHEDULE, STAGES = "batch.micro_size", "pipeline.schedule", "pipeline.stages_per_rank"
CONTEXT, HEADS, EXPERTS = "parallel.context", "parallel.context_heads", "parallel.expert_parallel"
SEQUENCE, COMPILE = "parallel.sequence_parallel", "parallel.compile"
ZERO = "parallel.shard_optimizer"
# may vary
KEYS = (
    "layout",
    MICRO,
    CONTEXT,
    HEADS,
    EXPERTS,
    SEQUENCE,
    COMPILE,
    *SAVINGS,
    SCHEDULE,
    STAGES,
)
# vary by default
USUAL = tuple(key for key in KEYS if key not in (CONTEXT, HEADS, SEQUENCE, COMPILE))
# schedules with a choice of stages per rank
MORE_STAGES = (
    "interleaved-1f1b",
    "looped-bfs",
    "interleaved-zb",
)
FEWEST_TOKENS = 256  # of a sequence on each rank, if cp spans hosts and is not asked for
NEAR = 0.05  # predictions that differ by less are no reason to prefer one
RULES: dict[
    Callable[..., None], tuple[str, ...]
] = {  # of the config: what it is about, and what it looks at
    check_split: ("tp", "cp", SEQUENCE),
    check_context: ("cp", "tp", HEADS),
    check_experts: ("expert_parallel", *AXES, EXPERTS, SEQUENCE),
    check_copies: ("shard_optimizer", "dp_shard", "cp", ZERO),
    check_stages: ("pp", SCHEDULE, STAGES, COMPILE),
}


@dataclass
class Candidate:
    """A layout on its hosts and the values of the other KEYS; of a result also why it does not rank
    first."""

    layout: Layout
    settings: dict[str, Any]
    prediction: Any = None
    memory: Any = None  # of results, traced
    near: bool = False  # as fast as the fastest within the error of predictions
    reason: str = ""

    def apply(self, config: Config) -> Config:
        """The config with this candidate's values, unchecked."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in self.settings.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        changed: dict[str, Any] = {
            name: replace(getattr(config, name), **keys) for name, keys in sections.items()
        }
        return replace(config, layout=self.layout.sizes, resolved=self.layout, **changed)

    def overrides(self, config: Config) -> list[str]:
        """Command-line overrides that turn the config into this candidate."""
        sizes = {axis: size for axis, size in self.layout.sizes.items() if size > 1} or {
            "dp_shard": 1
        }
        changed = {
            key: value for key, value in self.settings.items() if value != _value(config, key)
        }
        return [
            f"layout={written(sizes)}",
            *(f"{key}={yaml_text(value)}" for key, value in changed.items()),
        ]

    @property
    def parts(self) -> tuple[int, int]:
        """Number of stages and of axes: the fewer, the simpler."""
        stages, axes = self.layout.size("pp"), sum(size > 1 for size in self.layout.sizes.values())
        if stages > 1:
            stages = short_schedule(self.settings[SCHEDULE], stages, self.settings[STAGES]).stages
        return stages, axes

    def key(self, *without: str) -> tuple[Any, ...]:
        return self.layout.shape, *(
            value for key, value in self.settings.items() if key not in without
        )

    def changed(self, settings: Mapping[str, Any]) -> "Candidate":
        return Candidate(self.layout, {**self.settings, **settings})


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
        seconds = prediction.microbatches * sum(sum(cost.passes) for cost in prediction.block_costs)
        return seconds / prediction.layout.size("pp")

    room = hardware.device.room if memory_gib is None else memory_gib * 2**30
    begin, predict = (
        partial(count_works, pool=pool),
        partial(Prediction, hardware=hardware, pool=pool),
    )
    return Forecast(begin, bound, predict, Prediction.trace, room)


class Space:
    """The candidates of a config that was loaded for its hosts. `vary`: the KEYS that change.
    `fixed`: axis -> size. `rejected`: reason -> number of candidates, and an example."""

    def __init__(
        self, config: Config, vary: Iterable[str] = KEYS, fixed: Mapping[str, int] | None = None
    ) -> None:
        assert config.resolved is not None
        self.config, self.placed, self.vary, self.fixed = (
            config,
            config.resolved,
            set(vary),
            fixed or {},
        )
        # divides every host
        self.unit = math.gcd(
            self.placed.world_size, *(span.start for span in self.placed.host_spans)
        )
        spec = spec_of(config)
        self.blocks = len(blocks_of(spec.meta))
        self.experts = hasattr(spec.module, "ep_plan")
        sections = {
            "model": config.model.keys,
            **{name: vars(getattr(config, name)) for name in SECTIONS},
        }
        self.values = {
            f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()
        }
        self.values["model.name"] = config.model.name
        self.answers: dict[tuple[Any, ...], str | None] = {}
        self.count, self.rejected = 0, dict[str, tuple[int, str]]()

    def reject(self, reason: str, example: str, count: int = 1) -> None:
        before, first = self.rejected.get(reason, (0, example))
        self.rejected[reason] = (before + count, first)

    def candidates(self) -> Iterator[Candidate]:
        """Yields the candidates that the rules accept, without a schedule, each of SAVINGS at its
        first value."""
        for layout in self._layouts():
            options = self._options(layout)
            for values in itertools.product(*options.values()) if options else ():
                candidate = Candidate(layout, dict(zip(options, values, strict=True)))
                self.count += 1
                if problem := self._problem(candidate):
                    self.reject(*problem)
                    continue
                experts = candidate.settings[EXPERTS] or (layout.size("tp") if self.experts else 1)
                heads = candidate.settings[HEADS] if layout.size("cp") > 1 else 1
                candidate.layout = layout.with_context_heads(heads).with_experts(experts)
                yield candidate

    def schedules(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yields a candidate with each schedule that the rules accept."""
        ranks, problems = candidate.layout.size("pp"), []
        many = [count for count in (2, 3, 4, 6, 8) if count * ranks <= self.blocks]
        for name in self._choose(SCHEDULE, NAMES) if ranks > 1 else ():
            for per_rank in self._choose(STAGES, many if name in MORE_STAGES else [None]):
                other = candidate.changed({SCHEDULE: name, STAGES: per_rank})
                problems.append(self._answer(check_stages, other))
                if problems[-1] is None:
                    yield other
        if ranks == 1:
            yield candidate
        elif None not in problems:
            self.reject("pp without a schedule that works", f"{candidate.layout}: {problems[0]}")

    def savings(self, candidate: Candidate, most: bool = False) -> list[Candidate]:
        """A candidate with the next value of one of SAVINGS, for each that its layout can use; with
        `most` a single one with the last values of all."""
        usable = {
            key: values
            for key, values in usable_savings(candidate.layout).items()
            if key in self.vary
        }
        if most:
            return [candidate.changed({key: values[-1] for key, values in usable.items()})]
        after = {
            key: values[values.index(candidate.settings[key]) + 1 :]
            for key, values in usable.items()
        }
        return [candidate.changed({key: values[0]}) for key, values in after.items() if values]

    def _choose(self, key: str, options: Iterable[Any]) -> list[Any]:
        return list(options) if key in self.vary else [_value(self.config, key)]

    def _layouts(self) -> Iterator[Layout]:
        world, free = self.placed.world_size, [axis for axis in AXES if axis not in self.fixed]
        rest, remainder = divmod(world, math.prod(self.fixed.values()))
        if remainder:
            raise InputError(
                f"--keep: {written(self.fixed)} does not divide the {world:,} processes of the "
                "hosts"
            )
        if "layout" not in self.vary:
            yield self.placed
            return
        for factors in sorted(factorizations(rest, len(free)), key=lambda sizes: sizes[::-1]):
            sizes = {**self.fixed, **dict(zip(free, factors, strict=True))}
            yield self.placed.with_axes({axis: sizes[axis] for axis in AXES})

    def _options(self, layout: Layout) -> dict[str, list[Any]]:
        """Key -> the values to try with a layout; empty if the layout is rejected."""
        cp, tp, batch, parallel = (
            layout.size("cp"),
            layout.size("tp"),
            self.config.batch,
            self.config.parallel,
        )
        crumbs = (
            cp > max(self.unit, self.config.data.seq_len // FEWEST_TOKENS)
            and "cp" not in self.fixed
        )
        problems = {
            "more ranks of pp than blocks": layout.size("pp") > self.blocks,
            "tp over more than a host (--keep layout.tp=N tries it)": self.unit % tp
            and "tp" not in self.fixed,
            f"cp with fewer than {FEWEST_TOKENS} tokens of a sequence each "
            "(--keep layout.cp=N tries it)": crumbs,
        }
        if problem := next((problem for problem, is_so in problems.items() if is_so), None):
            self.count += 1
            self.reject(problem, str(layout))
            return {}
        share = -(-batch.sizes.largest // layout.size(*DATA_AXES))
        ranks = [n for n in range(1, 4097) if layout.folds(n)] if self.experts else [None]
        options = {
            MICRO: sorted(
                {1 << i for i in range(share.bit_length())} | {min(batch.micro_size, share)}
            ),
            CONTEXT: ["gather", "ring"] if cp > 1 else [parallel.context],
            HEADS: [n for n in range(1, cp + 1) if cp % n == 0],
            EXPERTS: ranks,
            SEQUENCE: list(dict.fromkeys((parallel.sequence_parallel, None)))[:tp],
            COMPILE: list(dict.fromkeys((parallel.compile, "auto"))),
        }
        chosen = {key: self._choose(key, values) for key, values in options.items()}
        saves = {
            *usable_savings(layout),
            ZERO,
        } & self.vary  # ZERO also where FSDP refuses it: set it to false there
        saved = {key: [SAVINGS[key][0]] for key in saves}
        return {key: (chosen | saved).get(key) or [_value(self.config, key)] for key in KEYS[1:]}

    def _problem(self, candidate: Candidate) -> tuple[str, str] | None:
        """Why a candidate is rejected: the reason, and its own details; None if it is not."""
        cp, heads = candidate.layout.size("cp"), candidate.settings[HEADS]
        if cp > 1 and heads > 1 and self.unit % (candidate.layout.size("tp") * heads):
            return (
                "context_heads over more than a host",
                f"{candidate.layout}, context_heads {heads}",
            )
        for rule in (check_split, check_context, check_experts, check_copies):
            if problem := self._answer(rule, candidate):
                return f"{RULES[rule][0]} that the model does not take", problem
        return None

    def _answer(self, rule: Callable[..., None], candidate: Candidate) -> str | None:
        """The problem that a rule of the config finds with a candidate; cached by the values that
        the rule reads."""
        sizes, changed = candidate.layout.sizes, candidate.settings
        # any number of microbatches works
        if rule is check_stages and not changed[SCHEDULE].endswith(".csv"):
            changed = {**changed, "batch.global_size": 1, MICRO: 1}
        if rule is check_split:  # it depends on whether cp is above 1
            sizes = {**sizes, "cp": min(sizes.get("cp", 1), 2)}
        about = (rule, *(sizes.get(key, changed.get(key)) for key in RULES[rule]))
        # made for one number of microbatches
        if rule is check_stages and changed[SCHEDULE].endswith(".csv"):
            about += (changed[MICRO], *(sizes.get(axis) for axis in DATA_AXES))
        if about not in self.answers:
            top = Place.in_file(self.config.file, 1)
            draft = ConfigDraft(Node({}, top, top), [], {}, {**self.values, **changed})
            rule(draft, sizes)
            self.answers[about] = draft.errors[0].message if draft.errors else None
        return self.answers[about]


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


class Search:
    """Finds the fast candidates of a space that fit: of those that differ only in SAVINGS the
    fastest, or with the goal `memory` all of them."""

    def __init__(
        self, space: Space, forecast: Forecast, goal: Literal["time", "memory"] = "time"
    ) -> None:
        self.space, self.config, self.forecast, self.goal = space, space.config, forecast, goal
        self.heap: list[
            tuple[float, int, bool, Candidate]
        ] = []  # bound, counter, whether it has a schedule
        self.pushed: set[tuple[Any, ...]] = set()
        self.fitting: dict[tuple[Any, ...], Candidate] = {}
        self.fastest: dict[tuple[int, ...], float] = {}  # layout -> seconds
        self.fastest_of: dict[int, float] = {}  # number of stages -> seconds
        self.times: list[float] = []  # of the fastest layouts, as many as are shown
        self.can_fit: set[tuple[Any, ...]] = set()  # keys without SAVINGS
        self.unfit: dict[
            tuple[Any, ...], int
        ] = {}  # key without SAVINGS and MICRO -> smallest MICRO that cannot fit
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
        least = min(self.fastest.values(), default=0.0)

        def place(candidate: Candidate) -> tuple[float, ...]:
            seconds, memory = candidate.prediction.step.seconds, candidate.prediction.memory.total
            candidate.near = seconds <= least * (1 + error)
            if not candidate.near:
                return 1, seconds
            return (
                (0, *candidate.parts, memory)
                if self.goal == "time"
                else (0, memory, *candidate.parts)
            )

        order, best = sorted(self.fitting.values(), key=place), dict[tuple[int, ...], Candidate]()
        likely = {candidate.layout.shape: candidate for candidate in reversed(order)}.values()
        traces = {
            id(other): self.forecast.trace(other.prediction)
            for other in sorted(likely, key=place)[:show]
        }
        for candidate in order:
            if candidate.layout.shape in best or len(best) == show:
                continue
            trace = traces.get(id(candidate)) or self.forecast.trace(candidate.prediction)
            if self._holds(candidate, load, trace):
                best[candidate.layout.shape] = candidate
                candidate.reason = _reason(next(iter(best.values())), candidate)
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

    def _find(self, show: int, error: float) -> None:
        candidates = list(self.space.candidates())
        configs = [candidate.apply(self.config) for candidate in candidates]
        self.forecast.begin(configs)
        for candidate, config in zip(candidates, configs, strict=True):
            with self._refusals():
                self._push(candidate, self.forecast.bound(config), False)
        while self.heap:
            bound, _, is_scheduled, candidate = heapq.heappop(self.heap)
            enough = len(self.times) == show
            best = self.times[0] if self.times else math.inf
            if enough and bound > max(self.times[-1], best * (1 + error)):
                example = f"{candidate.layout} takes {bound:.3g} s or more"
                self.space.reject("slower than these, by a bound", example, len(self.heap) + 1)
                break
            simplest = min(
                (n for n, seconds in self.fastest_of.items() if seconds <= best * (1 + error)),
                default=0,
            )
            if (
                self.goal == "time"
                and enough
                and bound > best
                and candidate.layout.size("pp") > simplest
            ):
                self.space.reject(
                    "not simpler than these, nor faster by a bound", str(candidate.layout)
                )
            elif bound > max(
                best * (1 + error), self.fastest.get(candidate.layout.shape, math.inf)
            ):
                self.space.reject("slower than the same layout is otherwise", str(candidate.layout))
            elif is_scheduled:
                self._predict(candidate, bound, show)
            else:
                self._push_all(self.space.schedules(candidate), bound)
        if self.unfit:
            least = (
                f"the least takes {bytes_text(self.least)} of {bytes_text(self.forecast.memory)}"
            )
            self.space.rejected["do not fit"] = self.space.rejected["do not fit"][0], least

    def _push(self, candidate: Candidate, bound: float, is_scheduled: bool) -> None:
        heapq.heappush(self.heap, (bound, len(self.pushed), is_scheduled, candidate))
        self.pushed.add((is_scheduled, candidate.key()))

    def _push_all(self, candidates: Iterable[Candidate], bound: float) -> None:
        for candidate in candidates:
            if (True, candidate.key()) not in self.pushed:
                with self._refusals():
                    candidate.prediction = self.forecast.predict(candidate.apply(self.config))
                    self._push(candidate, max(bound, candidate.prediction.bound), True)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Context in which the model may refuse a candidate, as its layers do when they cannot be
        split."""
        try:
            yield
        except InputError as error:
            self.space.reject("refused when the model is built", str(error))

    def _predict(self, candidate: Candidate, bound: float, show: int) -> None:
        group, alike = candidate.key(*SAVINGS), candidate.key(*SAVINGS, MICRO)
        if candidate.settings[MICRO] >= self.unfit.get(alike, math.inf):
            self.space.reject("do not fit", "")
        elif self._fits(candidate):
            self._keep(candidate, group if self.goal == "time" else candidate.key(), show)
            if self.goal == "memory":
                self._push_all(self.space.savings(candidate), bound)
        elif group in self.can_fit or all(
            map(self._fits, self.space.savings(candidate, most=True))
        ):
            self.can_fit.add(group)
            self._push_all(self.space.savings(candidate), bound)
        else:
            self.unfit[alike] = candidate.settings[MICRO]
            self.space.reject("do not fit", "")

    def _keep(self, candidate: Candidate, key: tuple[Any, ...], show: int) -> None:
        seconds, shape, stages = (
            candidate.prediction.step.seconds,
            candidate.layout.shape,
            candidate.parts[0],
        )
        if key not in self.fitting or seconds < self.fitting[key].prediction.step.seconds:
            self.fitting[key] = candidate
        self.fastest_of[stages] = min(seconds, self.fastest_of.get(stages, math.inf))
        if seconds < self.fastest.get(shape, math.inf):
            self.fastest[shape] = seconds
            self.times = heapq.nsmallest(show, self.fastest.values())

    def _fits(self, candidate: Candidate) -> bool:
        candidate.prediction = candidate.prediction or self.forecast.predict(
            candidate.apply(self.config)
        )
        self.predicted += 1
        fits = candidate.prediction.memory.total <= self.forecast.memory
        self.least = self.least if fits else min(self.least, candidate.prediction.memory.total)
        return bool(fits)


def _reason(first: Candidate, other: Candidate) -> str:
    """Why a candidate does not rank first."""
    step, best = other.prediction.step, first.prediction.step
    more = other.memory.total - first.memory.total
    if other is first:
        return ""
    if other.near:
        of_both = zip(other.parts, first.parts, ("stages", "axes"), strict=True)
        worse = [f"{n} {name} for {few}" for n, few, name in of_both if n > few]
        worse += [f"{bytes_text(more)} more memory"] * (more > 0)
        return "as fast, as far as this can tell" + (f", with {', '.join(worse)}" if worse else "")
    parts = {
        name: step.parts.get(name, 0) - best.parts.get(name, 0)
        for name in [*step.parts, *best.parts]
    }
    largest = sorted(parts.items(), key=lambda part: -abs(part[1]))[:2]
    return f"{step.seconds - best.seconds:+.3g} s: " + ", ".join(
        f"{name} {n:+.3g}" for name, n in largest if n
    )
