"""Pipelines as the estimate sees them: a rank has shares of the whole model, waits for some
microbatches, and holds some.

What any schedule waits and holds follows from that of small pipelines.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from meshtrain.config import Config, spec_of
from meshtrain.foresight.blocks import works_of
from meshtrain.foresight.prediction import split_of
from meshtrain.foresight.schedules import (
    CHOICES,
    MORE_STAGES,
    built,
    held_by_ranks,
    short_schedule,
)
from meshtrain.foresight.steptime import makespan
from meshtrain.layout import Layout
from meshtrain.pipeline.actions import ScheduleError
from meshtrain.pipeline.partition import StageSplitError
from meshtrain.pipeline.schedule import NAMES


@dataclass(frozen=True)
class Shape:
    """A pipeline by shares of the whole model: of its time on the busiest rank, of its parameters
    and of its activations on the fullest one. The busiest waits as long as `idle` microbatches
    take, and a rank holds `held` microbatches in flight. `deferred`: weight gradients are computed
    later."""

    time: float = 1.0
    parameters: float = 1.0
    saved: float = 1.0
    idle: float = 0.0
    held: float = 1.0
    deferred: bool = False


@dataclass(frozen=True)
class _Shares:
    """The largest share that a rank has of the model's time, parameters and activations."""

    time: float
    parameters: float
    saved: float
    deferred: bool


class Pipelines:
    """The shapes of a model's pipelines. They raise InputError: the model cannot be traced."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._shares: dict[tuple[str, int, int], _Shares] = {}
        self._least: dict[tuple[int, int], tuple[Shape, ...]] = {}

    def of(self, name: str, ranks: int, stages_per_rank: int | None, count: int) -> Shape:
        """The shape with a schedule, for `count` microbatches. Raises ScheduleError,
        StageSplitError: it does not work."""
        per_rank = short_schedule(name, ranks, stages_per_rank).stages_per_rank
        key = name, ranks, per_rank
        if key not in self._shares:
            self._shares[key] = self._shares_of(*key)
        shares = self._shares[key]
        idle, held = waits(name, ranks, per_rank, count)
        return Shape(
            time=shares.time,
            parameters=shares.parameters,
            saved=shares.saved,
            idle=idle,
            held=held,
            deferred=shares.deferred,
        )

    def least(self, ranks: int, count: int) -> tuple[Shape, ...]:
        """Shapes that take no more than any schedule: of those that defer weight gradients and of
        those that do not, the time of the fastest, and the least of everything that is held."""
        key = ranks, count
        if key not in self._least:
            shapes = []
            for name, stages in self._schedules():
                # As many do not fit every model, and not every number of ranks.
                with suppress(ScheduleError, StageSplitError):
                    shapes.append(self.of(name, ranks, stages, count))
            # The search finds out that no schedule works.
            shapes = shapes or [Shape(1 / ranks, 1 / ranks, 1 / ranks)]
            kinds = [[shape for shape in shapes if shape.deferred is way] for way in (False, True)]
            self._least[key] = tuple(_least_of(kind, count) for kind in kinds if kind)
        return self._least[key]

    def _schedules(self) -> list[tuple[str, int | None]]:
        """Schedules that a search may try, and their stages per rank."""
        own = self.config.pipeline
        schedules: list[tuple[str, int | None]] = [(own.schedule, own.stages_per_rank)]
        for name in NAMES:
            stages = [None, own.stages_per_rank]
            if name in MORE_STAGES:
                stages += CHOICES
            schedules += [(name, per_rank) for per_rank in stages]
        return schedules

    def _shares_of(self, name: str, ranks: int, per_rank: int) -> _Shares:
        config = self.config
        split = split_of(
            spec_of(config), config.data.seq_len, ranks, per_rank, config.pipeline.split
        )
        # Shares of stages are about the same in every layout.
        one_sample = replace(
            config,
            batch=replace(config.batch, micro_size=1),
            parallel=replace(config.parallel, recompute="none", regather=False),
        )
        works = works_of(one_sample, Layout({"dp_shard": 1}))
        elements = [float(work.elements) for work in works]
        saved = [work.memory.saved for work in works]
        schedule = short_schedule(name, ranks, per_rank)

        def largest(values: Sequence[float]) -> float:
            stages = [sum(values[first:end]) for first, end in split.bounds]
            return _largest(stages, schedule.placement) / sum(values)

        return _Shares(
            time=_largest(split.costs, schedule.placement) / sum(split.costs),
            parameters=largest(elements),
            saved=largest(saved),
            deferred=schedule.splits_backward,
        )


def _least_of(shapes: Sequence[Shape], count: int) -> Shape:
    fastest = min(shapes, key=lambda shape: shape.time * (count + shape.idle))
    return replace(
        fastest,
        parameters=min(shape.parameters for shape in shapes),
        saved=min(shape.saved for shape in shapes),
        held=min(shape.held for shape in shapes),
    )


def _largest(of_stages: Sequence[float], placement: Sequence[int]) -> float:
    """The largest sum over the stages of a rank."""
    of_ranks: dict[int, float] = defaultdict(float)
    for value, rank in zip(of_stages, placement, strict=True):
        of_ranks[rank] += value
    return max(of_ranks.values())


def waits(name: str, ranks: int, per_rank: int, count: int) -> tuple[float, float]:
    """Microbatches for which a rank waits in a step, and most that it holds, if all stages and
    passes take as long. Both are affine in the number of ranks, and what it holds in that of
    microbatches: they follow from small pipelines."""
    if name not in NAMES:
        return ranks - 1, count
    few = min(count, 12)
    idle_of_2, held_of_2 = _small(name, 2, per_rank, few)
    idle_of_6, held_of_6 = _small(name, 6, per_rank, few)
    way = (ranks - 2) / 4
    idle = idle_of_2 + way * (idle_of_6 - idle_of_2)
    held = held_of_2 + way * (held_of_6 - held_of_2)
    if count > few:
        _, held_of_more = _small(name, 6, per_rank, 2 * few)
        held += (count - few) / few * (held_of_more - held_of_6)
    return max(idle, 0.0), min(max(held, 1.0), count)


@lru_cache(maxsize=1024)
def _small(name: str, ranks: int, per_rank: int, count: int) -> tuple[float, float]:
    """`waits` of a pipeline that is simulated."""
    schedule = built(name, ranks, count, per_rank)
    third = 1 / (3 * per_rank)
    costs = ((third, third, third),) * schedule.stages
    most = max(
        sum(stage.forwards + stage.backwards for stage in held)
        for of_rank in held_by_ranks(schedule)
        for held in of_rank
    )
    return makespan(schedule, costs) - count, most / per_rank
