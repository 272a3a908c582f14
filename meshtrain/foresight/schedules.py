"""Pipeline schedules as foresight looks at them: where their stages are, and what each rank holds
when it holds most."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshtrain.pipeline.actions import Kind, Schedule
from meshtrain.pipeline.schedule import NAMES, build, load, read_csv

# Schedules with a choice of stages per rank, and those that a search tries.
MORE_STAGES = ("interleaved-1f1b", "looped-bfs", "interleaved-zb")
CHOICES = (2, 3, 4, 6, 8)


@lru_cache(maxsize=1024)
def short_schedule(name: str, ranks: int, stages_per_rank: int | None) -> Schedule:
    """A schedule with as few microbatches as possible, to look up its placement of stages."""
    if name.endswith(".csv"):
        return read_csv(name, ranks=ranks)
    return build(name, ranks=ranks, microbatches=1, stages_per_rank=stages_per_rank)


@lru_cache(maxsize=16)
def built(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """A named schedule with all its actions. To find those of a V shape takes long, and several
    readers look at the same one."""
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


def schedule_of(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> Schedule:
    """A schedule. A named one, which may be long, has only the actions of one microbatch; one from
    a file has them all, and the file's path as its name."""
    if name.endswith(".csv"):
        loaded = load(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        return replace(loaded, name=name)
    return replace(short_schedule(name, ranks, stages_per_rank), microbatches=microbatches)


class Held(NamedTuple):
    """What a stage holds of microbatches: forwards that wait for their backward, and backwards that
    wait for their weight gradients."""

    forwards: float
    backwards: float = 0


HeldOfRank = tuple[Held, ...]  # for each stage of a rank, in the order of the model


def held_by_ranks(schedule: Schedule) -> tuple[tuple[HeldOfRank, ...], ...]:
    """What each rank holds when it holds most: most forwards, or most microbatches. For many
    microbatches extrapolated from two schedules with fewer."""
    if schedule.name not in NAMES:
        return _most_held(schedule)
    name, ranks, per_rank = schedule.name, schedule.ranks, schedule.stages_per_rank
    few = 3 * ranks
    if schedule.microbatches <= 2 * few:
        return _most_held_of(name, ranks, per_rank, schedule.microbatches)
    with_few = _most_held_of(name, ranks, per_rank, few)
    with_twice = _most_held_of(name, ranks, per_rank, 2 * few)
    more = (schedule.microbatches - 2 * few) / few

    def further(once: HeldOfRank, twice: HeldOfRank) -> HeldOfRank:
        pairs = zip(once, twice, strict=True)
        return tuple(
            Held(
                b.forwards + more * (b.forwards - a.forwards),
                b.backwards + more * (b.backwards - a.backwards),
            )
            for a, b in pairs
        )

    return tuple(
        tuple(further(a, b) for a, b in zip(once, twice, strict=True))
        for once, twice in zip(with_few, with_twice, strict=True)
    )


@lru_cache(maxsize=4096)
def _most_held_of(
    name: str, ranks: int, per_rank: int, microbatches: int
) -> tuple[tuple[HeldOfRank, ...], ...]:
    return _most_held(built(name, ranks, microbatches, per_rank))


def _most_held(schedule: Schedule) -> tuple[tuple[HeldOfRank, ...], ...]:
    """`held_by_ranks` of a schedule with all its actions. In which order a rank runs them is fixed,
    and so is what it holds."""
    return tuple(_most_held_by(schedule, rank) for rank in range(schedule.ranks))


def _most_held_by(schedule: Schedule, rank: int) -> tuple[HeldOfRank, ...]:
    stages = schedule.stages_of(rank)
    forwards = dict.fromkeys(stages, 0)
    backwards = dict.fromkeys(stages, 0)
    most_forwards = most = 0
    when_most_forwards = when_most = tuple(Held(0) for _ in stages)
    for action in schedule.actions_of(rank):
        stage, kind = action.stage, action.kind
        if kind is Kind.FORWARD:
            forwards[stage] += 1
        if kind.gives_input_grad:
            forwards[stage] -= 1
        if kind is Kind.INPUT_GRAD:
            backwards[stage] += 1
        if kind is Kind.WEIGHT_GRAD:
            backwards[stage] -= 1
        waiting = sum(forwards.values())
        count = waiting + sum(backwards.values())
        if waiting > most_forwards or count > most:
            now = tuple(Held(forwards[i], backwards[i]) for i in stages)
            if waiting > most_forwards:
                most_forwards, when_most_forwards = waiting, now
            if count > most:
                most, when_most = count, now
    return when_most_forwards, when_most
