"""Memory of a rank by tracing its step; for large configs extrapolated from traces with fewer
blocks, microbatches and pipeline ranks.

At each moment of a step, live bytes are affine in the number of alike blocks of a stage and in the
number of forwards that wait for their backward. So two traces, plus one for each further kind of
blocks, at each of two numbers of waiting forwards, determine the bytes for any number. Moments are
identified by the phase of the step and the place in the stage. Each is extrapolated by itself and
the largest is the peak, which need not be the peak of the small traces.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from meshtrain.config import Config
from meshtrain.data.order import microbatches
from meshtrain.foresight.compiled import shared_graphs
from meshtrain.foresight.memory import RankMemory, held_forwards, schedule_of, short_schedule
from meshtrain.foresight.model import alike
from meshtrain.foresight.trace import trace_rank
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.modeling.build import spec_of, stages_of
from meshtrain.parallel.fsdp import MIN_UNIT_SIZE
from meshtrain.pipeline.stage import blocks_of

WHOLE = 32  # up to so many (microbatch, block) pairs a step is traced whole
# pipeline ranks in the place of more: a first, a last, and one or two in the middle
FEW_RANKS = (
    3,
    4,
)
FEW_BLOCKS = 3  # alike blocks that a stage keeps: a first, a last, and one in the middle


@dataclass(frozen=True)
class Case:
    """A small config of which one rank is traced without the `skipped` blocks; the number of
    forwards that wait there at most; and the weight of the trace among those with the same
    number."""

    config: Config
    layout: Layout
    rank: int
    skipped: tuple[int, ...]
    waiting: float
    weight: float


def rank_memory(config: Config, layout: Layout, pp: int, whole: int = WHOLE) -> RankMemory:
    """Memory of the fullest rank at an index of `pp`, which is the first one on all other axes.
    `whole`: number of (microbatch, block) pairs up to which its step is traced whole. Raises
    UntracedError."""
    config, layout = _with_few_copies(config, layout)
    if layout.size("pp") > 1:
        schedule, split = stages_of(config, layout)
        bounds = [split.bounds[stage] for stage in schedule.stages_of(pp)]
    else:
        bounds = [(0, len(blocks_of(spec_of(config).meta)))]
    count = microbatches(
        config.batch.sizes.largest, config.batch.micro_size, layout.size(*DATA_AXES)
    )
    passes = count * sum(end - first for first, end in bounds)
    cases = [] if passes <= whole else _smaller(config, layout, pp, bounds, count)
    if not cases:
        trace = trace_rank(config, layout, layout.group(0, "pp")[pp])
        return RankMemory({**trace.resident}, {**trace.parts}, trace.moment, pp, trace.compiled)
    waitings, target = [case.waiting for case in cases], held_of(config, layout, pp, count)
    weights = [case.weight * _weight(case.waiting, waitings, target) for case in cases]
    with shared_graphs():
        traces = [trace_rank(case.config, case.layout, case.rank, case.skipped) for case in cases]
    shared = set.intersection(*(set(trace.moments) for trace in traces))
    moments = {
        moment: _combined([trace.moments[moment] for trace in traces], weights) for moment in shared
    }
    peak = max(moments, key=lambda moment: sum(moments[moment].values()))
    words = next(
        (trace.moment for trace in traces if trace.parts == trace.moments[peak]), peak.strip()
    )
    resident = _combined([trace.resident for trace in traces], weights)
    return RankMemory(resident, moments[peak], words, pp, traces[0].compiled, "extended")


def _with_few_copies(config: Config, layout: Layout) -> tuple[Config, Layout]:
    """The config and layout with two copies over dp_replicate in the place of many: each rank holds
    as much, and small groups are made faster."""
    if layout.size("dp_replicate") < 3 or config.parallel.shard_optimizer:
        return config, layout
    few = layout.resized({**layout.sizes, "dp_replicate": 2})
    size = config.batch.micro_size
    count = microbatches(config.batch.sizes.largest, size, layout.size(*DATA_AXES))
    batch = replace(config.batch, global_size=count * size * few.size(*DATA_AXES))
    return replace(config, batch=batch, layout=few.sizes, resolved=few), few


def held_of(config: Config, layout: Layout, pp: int, count: int) -> float:
    """Largest number of forwards on a pipeline rank whose backward is still to come."""
    ranks, section = layout.size("pp"), config.pipeline
    if ranks == 1:
        return 1
    return held_forwards(schedule_of(section.schedule, ranks, count, section.stages_per_rank))[pp]


def _weight(value: float, values: Sequence[float], target: float) -> float:
    """Weight of the point at `value`, one of two `values`, in linear interpolation at `target`."""
    others = set(values) - {value}
    return (target - min(others)) / (value - min(others)) if others else 1.0


def _combined(parts: Sequence[dict[str, int]], weights: Sequence[float]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for sizes, weight in zip(parts, weights, strict=True):
        for part, size in sizes.items():
            total[part] += weight * size  # type: ignore[assignment]
    return {part: round(size) for part, size in total.items() if round(size)}


def _smaller(
    config: Config, layout: Layout, pp: int, bounds: Sequence[tuple[int, int]], count: int
) -> list[Case]:
    """Small cases from which a rank's memory can be extrapolated; none if no case is smaller, or if
    a file gives the schedule."""
    ranks, section, data = layout.size("pp"), config.pipeline, layout.size(*DATA_AXES)
    if ranks > 1 and section.schedule.endswith(".csv"):
        return []
    blocks, parts = len(alike(config)), _without_some(config, layout, bounds)
    if ranks == 1:
        worlds = [(1, 0, min(count, 3))]  # a first microbatch, a last, and one between
    elif ranks <= FEW_RANKS[-1]:
        worlds = [(ranks, pp, min(count, n * ranks)) for n in (2, 3)]
    else:
        at = [pp if pp == 0 else few - 1 if pp == ranks - 1 else 1 for few in FEW_RANKS]
        worlds = [(few, index, 2 * few) for few, index in zip(FEW_RANKS, at, strict=True)]
    cases, target = [], held_of(config, layout, pp, count)
    for few, index, many in worlds:
        small = layout.resized({**layout.sizes, "pp": few})
        batch = replace(config.batch, global_size=many * config.batch.micro_size * data)
        of_case = replace(config, batch=batch, layout=small.sizes, resolved=small)
        if ranks > 1:
            placement = short_schedule(section.schedule, few, section.stages_per_rank).placement
            own = [stage for stage, rank in enumerate(placement) if rank == index]
            split = _split(dict(zip(own, bounds, strict=True)), len(placement), blocks)
            if min(split) < 1:
                return []
            of_case = replace(of_case, pipeline=replace(section, split=split))
        waiting, rank = held_of(of_case, small, index, many), small.group(0, "pp")[index]
        cases += [
            Case(of_case, small, rank, skipped, waiting, weight)
            for skipped, weight in parts.items()
        ]
    waitings = {case.waiting for case in cases}
    if target in waitings:
        return [case for case in cases if case.waiting == target][: len(parts)]
    return cases if len(waitings) == 2 else []


def _without_some(
    config: Config, layout: Layout, bounds: Sequence[tuple[int, int]]
) -> dict[tuple[int, ...], float]:
    """Blocks to skip -> weight of the trace without them: one in which each stage has few blocks of
    each kind, and for each kind one in which each stage has one block more."""
    first, blocks = alike(config), blocks_of(spec_of(config).meta)
    rows: dict[int, list[list[int]]] = {}  # kind -> its blocks in each stage
    more: dict[int, int] = {}  # kind -> how many blocks every stage has beyond FEW_BLOCKS
    for kind in set(first):
        rows[kind] = [[i for i in range(*stage) if first[i] == kind] for stage in bounds]
        elements = sum(parameter.numel() for parameter in blocks[kind].parameters()) / layout.size(
            "tp"
        )
        # FSDP gathers several blocks as one unit
        in_units = layout.size("fsdp") > 1 and elements < MIN_UNIT_SIZE
        if (many := min(map(len, rows[kind]))) > FEW_BLOCKS + 1 and not in_units:
            more[kind] = many - FEW_BLOCKS
    parts: dict[tuple[int, ...], float] = {}
    for other in (None, *more):
        less = {kind: n - (kind == other) for kind, n in more.items()}
        skipped = tuple(
            sorted(i for kind, n in less.items() for row in rows[kind] for i in row[1 : 1 + n])
        )
        parts[skipped] = 1 - sum(more.values()) if other is None else more[other]
    return parts


def _split(own: dict[int, tuple[int, int]], stages: int, blocks: int) -> tuple[int, ...]:
    """Number of blocks of each stage: stages in `own` have the ranges given there, the others share
    those between."""
    edges = {0: 0, stages: blocks}
    for stage, (first, end) in own.items():
        edges |= {stage: first, stage + 1: end}
    known = sorted(edges)
    ends = np.interp(range(stages + 1), known, [edges[stage] for stage in known]).astype(int)
    return tuple(int(end - first) for first, end in pairwise(ends))
