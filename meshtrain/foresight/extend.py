"""Memory of a rank by tracing its step; for large configs extrapolated from traces with fewer
blocks, microbatches and pipeline ranks.

At each moment of a step, live bytes are affine in the number of alike blocks of a stage and in the
number of forwards in flight, which wait for their backward. So two traces, plus one for each
further kind of blocks, at each of two numbers of forwards in flight, determine the bytes for any
number. Moments are identified by the phase of the step and the place in the stage. Each is
extrapolated by itself and the largest is the peak, which need not be the peak of the small traces.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshtrain.config import Config, spec_of
from meshtrain.data.order import microbatches
from meshtrain.foresight.compiled import shared_graphs
from meshtrain.foresight.memory import RankMemory, held_forwards, schedule_of, short_schedule
from meshtrain.foresight.model import alike
from meshtrain.foresight.trace import RankTrace, trace_rank
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.modeling.build import stages_of
from meshtrain.parallel.fsdp import MIN_UNIT_SIZE
from meshtrain.pipeline.stage import blocks_of

WHOLE = 32  # up to so many (microbatch, block) pairs a step is traced whole
# pipeline ranks in the place of more: a first, a last, and one or two in the middle
FEW_RANKS = (3, 4)
FEW_BLOCKS = 3  # alike blocks that a stage keeps: a first, a last, and one in the middle

Bounds = Sequence[tuple[int, int]]  # of each stage of a rank, the range of its blocks [first, end)


def rank_memory(config: Config, layout: Layout, pp: int, whole: int = WHOLE) -> RankMemory:
    """Memory of the fullest rank at an index of `pp`, which is the first one on all other axes.
    `whole`: number of (microbatch, block) pairs up to which its step is traced whole. Raises
    UntracedError."""
    config, layout = _with_few_copies(config, layout)
    bounds = _bounds_of(config, layout, pp)
    count = _microbatches(config, layout)
    blocks = sum(end - first for first, end in bounds)
    cases = []
    if count * blocks > whole:
        cases = _small_cases(config, layout, pp, bounds, count)
    if not cases:
        rank = layout.group(0, "pp")[pp]
        trace = trace_rank(config, layout, rank)
        return RankMemory(
            resident={**trace.resident},
            parts={**trace.parts},
            moment=trace.moment,
            pp=pp,
            compiled=trace.compiled,
        )
    with shared_graphs():
        traces = [trace_rank(case.config, case.layout, case.rank, case.skipped) for case in cases]
    weights = _weights(cases, target=held_of(config, layout, pp, count))
    return replace(_extrapolated(traces, weights), pp=pp)


def held_of(config: Config, layout: Layout, pp: int, count: int) -> float:
    """Largest number of forwards in flight on a pipeline rank, with `count` microbatches."""
    ranks = layout.size("pp")
    if ranks == 1:
        return 1
    section = config.pipeline
    return held_forwards(schedule_of(section.schedule, ranks, count, section.stages_per_rank))[pp]


def _microbatches(config: Config, layout: Layout) -> int:
    batch = config.batch
    return microbatches(batch.sizes.largest, batch.micro_size, layout.size(*DATA_AXES))


def _bounds_of(config: Config, layout: Layout, pp: int) -> Bounds:
    if layout.size("pp") == 1:
        return [(0, len(blocks_of(spec_of(config).meta)))]
    schedule, split = stages_of(config, layout)
    return [split.bounds[stage] for stage in schedule.stages_of(pp)]


def _with_few_copies(config: Config, layout: Layout) -> tuple[Config, Layout]:
    """The config and layout with two copies over dp_replicate in the place of many: each rank holds
    as much, and small groups are made faster."""
    if layout.size("dp_replicate") < 3 or config.parallel.shard_optimizer:
        return config, layout
    # As many microbatches as before, on fewer ranks.
    few = layout.resized({**layout.sizes, "dp_replicate": 2})
    global_size = _microbatches(config, layout) * config.batch.micro_size * few.size(*DATA_AXES)
    return _resized(config, few, global_size), few


def _resized(config: Config, layout: Layout, global_size: int) -> Config:
    batch = replace(config.batch, global_size=global_size)
    return replace(config, batch=batch, layout=layout.sizes, resolved=layout)


# Extrapolation ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A small config of which one rank is traced."""

    config: Config
    layout: Layout
    rank: int
    skipped: tuple[int, ...]  # blocks
    in_flight: float  # largest number of forwards in flight
    weight: float  # of the trace among those with as many forwards in flight


def _weights(cases: Sequence[Case], target: float) -> list[float]:
    """The weight of each trace in the extrapolation to `target` forwards in flight: a line through
    the two numbers that the cases have."""
    few, *more = sorted({case.in_flight for case in cases})
    if not more:
        return [case.weight for case in cases]
    [many] = more
    along_line = {
        few: (target - many) / (few - many),
        many: (target - few) / (many - few),
    }
    return [case.weight * along_line[case.in_flight] for case in cases]


def _extrapolated(traces: Sequence[RankTrace], weights: Sequence[float]) -> RankMemory:
    # A moment that not all traces have, has no line.
    shared = set(traces[0].moments).intersection(*(trace.moments for trace in traces))
    moments = {}
    for moment in shared:
        parts = [trace.moments[moment] for trace in traces]
        moments[moment] = _weighed(parts, weights)
    peak = max(moments, key=lambda moment: sum(moments[moment].values()))
    words = peak.strip()
    for trace in traces:
        if trace.parts == trace.moments[peak]:  # it is this trace's peak, too
            words = trace.moment
            break
    return RankMemory(
        resident=_weighed([trace.resident for trace in traces], weights),
        parts=moments[peak],
        moment=words,
        compiled=traces[0].compiled,
        source="extended",
    )


def _weighed(parts: Sequence[dict[str, int]], weights: Sequence[float]) -> dict[str, float]:
    """The weighted sum of the parts of several traces."""
    total: dict[str, float] = defaultdict(float)
    for sizes, weight in zip(parts, weights, strict=True):
        for part, size in sizes.items():
            total[part] += weight * size
    return {part: round(size) for part, size in total.items() if round(size)}


# Small cases --------------------------------------------------------------------------------------


class _World(NamedTuple):
    """A small pipeline with a rank like the one in question."""

    ranks: int
    pp: int  # index of that rank
    microbatches: int


def _small_cases(config: Config, layout: Layout, pp: int, bounds: Bounds, count: int) -> list[Case]:
    """Small cases from which a rank's memory can be extrapolated; none if no case is smaller, or if
    a file gives the schedule."""
    if layout.size("pp") > 1 and config.pipeline.schedule.endswith(".csv"):
        return []
    without_blocks = _without_some_blocks(config, layout, bounds)
    cases = []
    for world in _small_worlds(layout.size("pp"), pp, count):
        small = layout.resized({**layout.sizes, "pp": world.ranks})
        samples_at_once = config.batch.micro_size * small.size(*DATA_AXES)
        small_config = _resized(config, small, world.microbatches * samples_at_once)
        if layout.size("pp") > 1:
            split = _split_like(config, world, bounds)
            if min(split) < 1:
                return []
            small_config = replace(small_config, pipeline=replace(config.pipeline, split=split))
        in_flight = held_of(small_config, small, world.pp, world.microbatches)
        rank = small.group(0, "pp")[world.pp]
        for skipped, weight in without_blocks.items():
            cases.append(Case(small_config, small, rank, skipped, in_flight, weight))

    target = held_of(config, layout, pp, count)
    numbers = {case.in_flight for case in cases}
    if target in numbers:
        # No line along the forwards in flight is needed.
        return [case for case in cases if case.in_flight == target][: len(without_blocks)]
    return cases if len(numbers) == 2 else []


def _small_worlds(ranks: int, pp: int, count: int) -> list[_World]:
    if ranks == 1:
        # A first microbatch, a last, and one between.
        return [_World(1, 0, min(count, 3))]
    if ranks <= FEW_RANKS[-1]:
        return [_World(ranks, pp, min(count, n * ranks)) for n in (2, 3)]
    worlds = []
    for few in FEW_RANKS:
        if pp == 0:
            pp_of_few = 0
        elif pp == ranks - 1:
            pp_of_few = few - 1
        else:
            pp_of_few = 1
        worlds.append(_World(few, pp_of_few, 2 * few))
    return worlds


def _split_like(config: Config, world: _World, bounds: Bounds) -> tuple[int, ...]:
    """Number of blocks of each stage of a small pipeline whose rank has the same blocks."""
    section = config.pipeline
    placement = short_schedule(section.schedule, world.ranks, section.stages_per_rank).placement
    own_stages = [stage for stage, rank in enumerate(placement) if rank == world.pp]
    own = dict(zip(own_stages, bounds, strict=True))
    return _split(own, len(placement), len(alike(config)))


def _split(own: dict[int, tuple[int, int]], stages: int, blocks: int) -> tuple[int, ...]:
    """Number of blocks of each stage: stages in `own` have the ranges given there, the others share
    those between."""
    begins = {0: 0, stages: blocks}  # stage -> its first block
    for stage, (first, end) in own.items():
        begins[stage] = first
        begins[stage + 1] = end
    known = sorted(begins)
    first_blocks = [begins[stage] for stage in known]
    between = np.interp(range(stages + 1), known, first_blocks)
    return tuple(int(end - first) for first, end in pairwise(between.astype(int)))


def _without_some_blocks(
    config: Config, layout: Layout, bounds: Bounds
) -> dict[tuple[int, ...], float]:
    """Blocks to skip -> weight of the trace without them: one in which each stage has few blocks of
    each kind, and for each kind one in which each stage has one block more.

    With n_k blocks of kind k left out of each stage, the bytes are those of the first trace, plus
    n_k times what one more block of kind k takes, for each k.
    """
    kinds = alike(config)
    blocks_of_kind: dict[int, list[list[int]]] = {}  # kind -> its blocks in each stage
    left_out: dict[int, int] = {}  # kind -> how many blocks of it each stage does without
    for kind in set(kinds):
        in_stages = []
        for first, end in bounds:
            in_stages.append([i for i in range(first, end) if kinds[i] == kind])
        blocks_of_kind[kind] = in_stages
        many = min(len(blocks) for blocks in in_stages)
        if many > FEW_BLOCKS + 1 and not _shares_unit(config, layout, kind):
            left_out[kind] = many - FEW_BLOCKS

    def skipped(counts: dict[int, int]) -> tuple[int, ...]:
        blocks: list[int] = []
        for kind, count in counts.items():
            for in_stage in blocks_of_kind[kind]:
                blocks += in_stage[1 : 1 + count]
        return tuple(sorted(blocks))

    traces: dict[tuple[int, ...], float] = {skipped(left_out): 1 - sum(left_out.values())}
    for kind, count in left_out.items():
        traces[skipped({**left_out, kind: count - 1})] = count
    return traces


def _shares_unit(config: Config, layout: Layout, block: int) -> bool:
    """Whether FSDP gathers several blocks like this one as one unit, so that bytes are no line."""
    parameters = blocks_of(spec_of(config).meta)[block].parameters()
    elements = sum(parameter.numel() for parameter in parameters) / layout.size("tp")
    return layout.size("fsdp") > 1 and elements < MIN_UNIT_SIZE
