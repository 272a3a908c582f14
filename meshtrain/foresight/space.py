"""The candidates of a search: layouts on the config's hosts, and values of keys that do not change
what is computed. They obey the config's own rules."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshtrain.config import Config, spec_of
from meshtrain.config.layout_advice import factorizations
from meshtrain.config.layout_checks import (
    OF_LAYOUT,
    check_context,
    check_copies,
    check_experts,
    check_float8,
    check_split,
    check_stages,
)
from meshtrain.config.schema import SECTIONS
from meshtrain.errors import InputError, yaml_text
from meshtrain.foresight.prediction import SAVINGS, leaner_values, usable_savings
from meshtrain.foresight.rules import RememberedRules, Rule
from meshtrain.foresight.schedules import CHOICES, MORE_STAGES, short_schedule
from meshtrain.layout import AXES, DATA_AXES, Layout, written
from meshtrain.pipeline.partition import blocks_of
from meshtrain.pipeline.schedule import NAMES

MICRO, SCHEDULE, STAGES = "batch.micro_size", "pipeline.schedule", "pipeline.stages_per_rank"
CONTEXT, HEADS, EXPERTS = "parallel.context", "parallel.context_heads", "parallel.expert_parallel"
SEQUENCE, COMPILE = "parallel.sequence_parallel", "parallel.compile"
RECOMPUTE, REGATHER = "parallel.recompute", "parallel.regather"
RESHARD, ZERO = "parallel.reshard_after_forward", "parallel.shard_optimizer"
OFFLOAD = "parallel.offload"
# may vary
KEYS = ("layout", MICRO, CONTEXT, HEADS, EXPERTS, SEQUENCE, COMPILE, *SAVINGS, SCHEDULE, STAGES)
# vary by default
USUAL = tuple(key for key in KEYS if key not in (CONTEXT, HEADS, SEQUENCE, COMPILE))
FEWEST_TOKENS = 256  # of a sequence on each rank, if cp spans hosts and is not asked for
SUBJECTS: dict[Rule, str] = {  # of the config's rules, for people
    check_split: "tp",
    check_context: "cp",
    check_experts: "expert_parallel",
    check_float8: "tp",
    check_copies: "shard_optimizer",
}


@dataclass
class Candidate:
    """A layout on its hosts and the values of the other KEYS; of a result also why it does not rank
    first."""

    layout: Layout
    settings: dict[str, Any]
    estimate: Any = None
    prediction: Any = None
    near: bool = False  # as fast as the fastest within the error of predictions
    reason: str = ""

    def apply(self, config: Config) -> Config:
        """The config with this candidate's values, unchecked."""
        by_section: dict[str, dict[str, Any]] = {}
        for key, value in self.settings.items():
            section, _, name = key.partition(".")
            by_section.setdefault(section, {})[name] = value
        changed: dict[str, Any] = {
            section: replace(getattr(config, section), **values)
            for section, values in by_section.items()
        }
        return replace(config, layout=self.layout.sizes, resolved=self.layout, **changed)

    def overrides(self, config: Config) -> list[str]:
        """Command-line overrides that turn the config into this candidate."""
        sizes = {axis: size for axis, size in self.layout.sizes.items() if size > 1}
        words = [f"layout={written(sizes or {'dp_shard': 1})}"]
        for key, value in self.settings.items():
            if value != value_of(config, key):
                words.append(f"{key}={yaml_text(value)}")
        return words

    @property
    def parts(self) -> tuple[int, int]:
        """Number of stages and of axes: the fewer, the simpler."""
        stages = ranks = self.layout.size("pp")
        if ranks > 1:
            stages = short_schedule(self.settings[SCHEDULE], ranks, self.settings[STAGES]).stages
        axes = sum(size > 1 for size in self.layout.sizes.values())
        return stages, axes

    @property
    def least_parts(self) -> tuple[int, int]:
        """`parts` with the simplest schedule."""
        return self.layout.size("pp"), sum(size > 1 for size in self.layout.sizes.values())

    def key(self, *without: str) -> tuple[Any, ...]:
        """What tells it from others, but for these keys."""
        values = [value for key, value in self.settings.items() if key not in without]
        return self.layout.shape, *values

    def changed(self, settings: Mapping[str, Any]) -> "Candidate":
        return Candidate(self.layout, {**self.settings, **settings})


class Space:
    """The candidates of a config that was loaded for its hosts: layouts and values of the keys that
    vary, but for schedules and SAVINGS. `vary`: the KEYS that change. `fixed`: axis -> size.
    `count`: how many there are; `rejected`: reason -> how many, and an example."""

    def __init__(
        self, config: Config, vary: Iterable[str] = KEYS, fixed: Mapping[str, int] | None = None
    ) -> None:
        assert config.resolved is not None
        spec = spec_of(config)
        # Each candidate's config holds the model, which is then not looked up by its name.
        self.config = replace(config, spec=spec)
        self.placed = config.resolved
        self.vary = set(vary)
        self.fixed = fixed or {}
        # Ranks that share a host wherever a group of so many begins.
        begins = [span.start for span in self.placed.host_spans]
        self.unit = math.gcd(self.placed.world_size, *begins)
        self.blocks = len(blocks_of(spec.meta))
        self.has_experts = spec.plan("ep_plan") is not None
        self.rules = RememberedRules(_values_of(config))
        self.count = 0
        self.rejected: dict[str, tuple[int, str]] = {}

    def reject(self, reason: str, example: str, count: int = 1) -> None:
        before, first = self.rejected.get(reason, (0, example))
        self.rejected[reason] = (before + count, first)

    # Layouts and their settings -------------------------------------------------------------------

    def candidates(self) -> Iterator[Candidate]:
        """Yields the candidates that the rules accept, without a schedule, each of SAVINGS at its
        first value."""
        for layout in self._layouts():
            problem = self._unlikely(layout)
            if problem is not None:
                self.count += 1
                self.reject(problem, str(layout))
                continue
            options = self._options(layout)
            sizes = options.pop(MICRO)
            for values in itertools.product(*options.values()):
                settings = dict(zip(options, values, strict=True))
                self.count += len(sizes)
                accepted = list(self._accepted(layout, settings, sizes))
                if accepted:
                    placed = self._placed(layout, settings)
                for size in accepted:
                    yield Candidate(placed, {MICRO: size, **settings})

    def _placed(self, layout: Layout, settings: Mapping[str, Any]) -> Layout:
        """The layout with its heads over `cp` and its experts."""
        heads = settings[HEADS] if layout.size("cp") > 1 else 1
        experts = 1
        if self.has_experts:
            experts = settings[EXPERTS] or layout.size("tp")
        return layout.with_context_heads(heads).with_experts(experts)

    def _layouts(self) -> Iterator[Layout]:
        """All layouts of the hosts."""
        world = self.placed.world_size
        rest, remainder = divmod(world, math.prod(self.fixed.values()))
        if remainder:
            raise InputError(
                f"--keep: {written(self.fixed)} does not divide the {world:,} processes of the "
                "hosts"
            )
        if "layout" not in self.vary:
            yield self.placed
            return
        free = [axis for axis in AXES if axis not in self.fixed]
        for factors in sorted(factorizations(rest, len(free)), key=lambda sizes: sizes[::-1]):
            sizes = {**self.fixed, **dict(zip(free, factors, strict=True))}
            yield self.placed.with_axes({axis: sizes[axis] for axis in AXES})

    def _unlikely(self, layout: Layout) -> str | None:
        """Why a layout is not worth trying; None if it is."""
        cp, tp = layout.size("cp"), layout.size("tp")
        if layout.size("pp") > self.blocks:
            return "more ranks of pp than blocks"
        if self.unit % tp and "tp" not in self.fixed:
            return "tp over more than a host (--keep layout.tp=N tries it)"
        most_parts = self.config.data.seq_len // FEWEST_TOKENS
        if cp > max(self.unit, most_parts) and "cp" not in self.fixed:
            return (
                f"cp with fewer than {FEWEST_TOKENS} tokens of a sequence each "
                "(--keep layout.cp=N tries it)"
            )
        return None

    def _options(self, layout: Layout) -> dict[str, list[Any]]:
        """Key -> the values to try with a layout."""
        batch, parallel = self.config.batch, self.config.parallel
        cp, tp = layout.size("cp"), layout.size("tp")
        samples_of_rank = math.ceil(batch.sizes.largest / layout.size(*DATA_AXES))
        powers = [1 << i for i in range(samples_of_rank.bit_length())]
        options: dict[str, list[Any]] = {
            MICRO: sorted({*powers, min(batch.micro_size, samples_of_rank)}),
            CONTEXT: ["gather", "ring"] if cp > 1 else [parallel.context],
            HEADS: [n for n in range(1, cp + 1) if cp % n == 0],
            EXPERTS: [None],
            SEQUENCE: [parallel.sequence_parallel],
            COMPILE: _unique(parallel.compile, "auto"),
        }
        if self.has_experts:
            options[EXPERTS] = layout.expert_sizes()
        if tp > 1:
            options[SEQUENCE] = _unique(parallel.sequence_parallel, None)
        # ZeRO-1 also where FSDP refuses it: there it has to be false.
        for key in {*usable_savings(layout), ZERO}:
            options[key] = [SAVINGS[key][0]]

        chosen = {}
        for key in KEYS:
            if key in options and key in self.vary:
                chosen[key] = options[key]
            elif key != "layout":
                chosen[key] = [self._own_value(key)]
        return chosen

    def _own_value(self, key: str) -> Any:
        return value_of(self.config, key)

    def _accepted(
        self, layout: Layout, settings: Mapping[str, Any], sizes: Sequence[int]
    ) -> Iterator[int]:
        """Yields the microbatch sizes with which a layout keeps the rules; rejects the others."""
        heads = settings[HEADS]
        neighbours = layout.size("tp") * heads
        if layout.size("cp") > 1 and heads > 1 and self.unit % neighbours:
            example = f"{layout}, context_heads {heads}"
            self.reject("context_heads over more than a host", example, len(sizes))
            return
        # Few rules ask for the microbatch; the others are asked once for all sizes.
        first = {MICRO: sizes[0], **settings}
        of_each = []
        for rule in OF_LAYOUT:
            if rule is check_stages:  # of each schedule
                continue
            problem = self.rules.problem(rule, layout.sizes, first)
            if MICRO in self.rules.reads(rule):
                of_each.append(rule)
            elif problem is not None:
                self.reject(_what(rule), problem, len(sizes))
                return
        for size in sizes:
            if not self._refuses(of_each, layout, {MICRO: size, **settings}):
                yield size

    def _refuses(self, rules: Iterable[Rule], layout: Layout, settings: Mapping[str, Any]) -> bool:
        for rule in rules:
            problem = self.rules.problem(rule, layout.sizes, settings)
            if problem is not None:
                self.reject(_what(rule), problem)
                return True
        return False

    # Schedules and savings ------------------------------------------------------------------------

    def schedules(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yields a candidate with each schedule that the rules accept."""
        ranks = candidate.layout.size("pp")
        if ranks == 1:
            yield candidate
            return
        problems = []
        for name, per_rank in self._schedules_of(ranks):
            other = candidate.changed({SCHEDULE: name, STAGES: per_rank})
            problem = self._problem_of_schedule(other)
            problems.append(problem)
            if problem is None:
                yield other
        if None not in problems:
            self.reject("pp without a schedule that works", f"{candidate.layout}: {problems[0]}")

    def _schedules_of(self, ranks: int) -> Iterator[tuple[str, int | None]]:
        """Yields the schedules to try, and their stages per rank."""
        for name in NAMES if SCHEDULE in self.vary else [self._own_value(SCHEDULE)]:
            if STAGES not in self.vary:
                yield name, self._own_value(STAGES)
            elif name not in MORE_STAGES:
                yield name, None
            else:
                for per_rank in CHOICES:
                    if per_rank * ranks <= self.blocks:
                        yield name, per_rank

    def _problem_of_schedule(self, candidate: Candidate) -> str | None:
        sizes, settings = candidate.layout.sizes, candidate.settings
        if not settings[SCHEDULE].endswith(".csv"):
            # Any number of microbatches works, so it need not be asked for each.
            sizes = {"pp": candidate.layout.size("pp")}
            settings = {**settings, MICRO: 1, "batch.global_size": 1}
        return self.rules.problem(check_stages, sizes, settings)

    def savings(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yields a candidate with all values of SAVINGS that its layout can use, from its own on;
        those that save less come first."""
        values: dict[str, Sequence[Any]] = {}
        for key in usable_savings(candidate.layout):
            if key in self.vary:
                own = candidate.settings[key]
                values[key] = own, *leaner_values(key, own)
        for chosen in itertools.product(*values.values()):
            yield candidate.changed(dict(zip(values, chosen, strict=True)))


def saves_as_much(candidate: Candidate, other: Candidate) -> bool:
    """Whether a candidate has the other's values of SAVINGS, or such that save more."""
    for key in SAVINGS:
        own, others = candidate.settings[key], other.settings[key]
        if own != others and own not in leaner_values(key, others):
            return False
    return True


def _what(rule: Rule) -> str:
    """What a rule refuses, for people."""
    return f"{SUBJECTS.get(rule, 'what')} that the model does not take"


def value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _values_of(config: Config) -> dict[str, Any]:
    """All values of a config by their keys, as its rules read them."""
    values = {"model.name": config.model.name}
    for key, value in config.model.keys.items():
        values[f"model.{key}"] = value
    for section in SECTIONS:
        for key, value in vars(getattr(config, section)).items():
            values[f"{section}.{key}"] = value
    return values


def _unique(*values: Any) -> list[Any]:
    return list(dict.fromkeys(values))
