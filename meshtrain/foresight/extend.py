"""Memory of the ranks of a config by traced steps; of a large one by steps of fewer of its blocks, microbatches and
pipeline ranks, extended.

What is alive at a moment of a step is affine in the blocks of a stage that are alike, and in the forwards that wait for
backwards. So four traces say what any number takes. Moments are told apart by what is computed and by the place in the
stage, each is extended by itself, and the largest is the peak: which one it is may change on the way.
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

WHOLE = 32  # passes of a microbatch through a block in a step that is traced as it is
FEW_RANKS = (3, 4)  # of a pipeline with more, where each has a first, a last, and ranks between them
FEW_BLOCKS = (3, 4)  # that a stage keeps of those alike: a first, a last, and one or two between


@dataclass(frozen=True)
class Case:
    """A config of which a rank is traced without some blocks, and what is affine in it: the blocks skipped of each
    stage, forwards that wait."""

    config: Config
    layout: Layout
    rank: int
    skipped: tuple[int, ...] = ()
    less: int = 0
    waiting: float = 0


def rank_memory(config: Config, layout: Layout, pp: int, whole: int = WHOLE) -> RankMemory:
    """Of the rank at an index of `pp` that has most: the first on all other axes. `whole`: passes of a microbatch
    through a block up to which its step is traced as it is. Raises UntracedError."""
    if layout.size("pp") > 1:
        schedule, split = stages_of(config, layout)
        bounds = [split.bounds[stage] for stage in schedule.stages_of(pp)]
    else:
        bounds = [(0, len(blocks_of(spec_of(config).meta)))]
    count = microbatches(config.batch.sizes.largest, config.batch.micro_size, layout.size(*DATA_AXES))
    passes = count * sum(end - first for first, end in bounds)
    cases = [] if passes <= whole else _smaller(config, layout, pp, bounds, count)
    if not cases:
        trace = trace_rank(config, layout, layout.group(0, "pp")[pp])
        return RankMemory({**trace.resident}, {**trace.parts}, trace.moment, pp, trace.compiled)
    weights = [
        _weight(case.less, [other.less for other in cases], 0)
        * _weight(case.waiting, [other.waiting for other in cases], held_of(config, layout, pp, count))
        for case in cases
    ]
    with shared_graphs():
        traces = [trace_rank(case.config, case.layout, case.rank, case.skipped) for case in cases]
    shared = set.intersection(*(set(trace.moments) for trace in traces))
    moments = {moment: _combined([trace.moments[moment] for trace in traces], weights) for moment in shared}
    peak = max(moments, key=lambda moment: sum(moments[moment].values()))
    words = next((trace.moment for trace in traces if trace.parts == trace.moments[peak]), peak.strip())
    resident = _combined([trace.resident for trace in traces], weights)
    return RankMemory(resident, moments[peak], words, pp, traces[0].compiled, "extended")


def held_of(config: Config, layout: Layout, pp: int, count: int) -> float:
    """Forwards that wait for their backward at most."""
    ranks, section = layout.size("pp"), config.pipeline
    if ranks == 1:
        return 1
    return held_forwards(schedule_of(section.schedule, ranks, count, section.stages_per_rank))[pp]


def _weight(value: float, values: Sequence[float], target: float) -> float:
    """Of what is known at `value` in a straight line through both `values`, at `target`."""
    others = set(values) - {value}
    return (target - min(others)) / (value - min(others)) if others else 1.0


def _combined(parts: Sequence[dict[str, int]], weights: Sequence[float]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for sizes, weight in zip(parts, weights, strict=True):
        for part, size in sizes.items():
            total[part] += weight * size  # type: ignore[assignment]
    return {part: round(size) for part, size in total.items() if round(size)}


def _smaller(config: Config, layout: Layout, pp: int, bounds: Sequence[tuple[int, int]], count: int) -> list[Case]:
    """Cases that can be extended to a rank; none where nothing is smaller, or a file has its schedule."""
    ranks, section, data = layout.size("pp"), config.pipeline, layout.size(*DATA_AXES)
    if ranks > 1 and section.schedule.endswith(".csv"):
        return []
    first, blocks = alike(config), blocks_of(spec_of(config).meta)
    common = Counter(first[slice(*bounds[0])]).most_common(1)[0][0]
    rows = [[i for i in range(*stage) if first[i] == common] for stage in bounds]
    fewest = min(map(len, rows))
    taken = [fewest - keep for keep in FEW_BLOCKS] if fewest > FEW_BLOCKS[-1] else [0]
    elements = sum(parameter.numel() for parameter in blocks[common].parameters()) / layout.size("tp")
    if layout.size("fsdp") > 1 and elements < MIN_UNIT_SIZE:
        taken = [0]  # units of FSDP have several blocks each
    if ranks == 1:
        worlds = [(1, 0, min(count, 3))]  # a first, a last, and one between
    elif ranks <= FEW_RANKS[-1]:
        worlds = [(ranks, pp, min(count, n * ranks)) for n in (2, 3)]
    else:
        at = [pp if pp == 0 else few - 1 if pp == ranks - 1 else 1 for few in FEW_RANKS]
        worlds = [(few, index, 2 * few) for few, index in zip(FEW_RANKS, at, strict=True)]
    cases, target = [], held_of(config, layout, pp, count)
    for few, index, many in worlds:
        small = Layout({**layout.sizes, "pp": few})
        small = small.with_context_heads(layout.context_heads).with_experts(layout.experts)
        batch = replace(config.batch, global_size=many * config.batch.micro_size * data)
        of_case = replace(config, batch=batch, layout=small.sizes, resolved=small)
        if ranks > 1:
            placement = short_schedule(section.schedule, few, section.stages_per_rank).placement
            own = [stage for stage, rank in enumerate(placement) if rank == index]
            split = _split(dict(zip(own, bounds, strict=True)), len(placement), len(blocks))
            if min(split) < 1:
                return []
            of_case = replace(of_case, pipeline=replace(section, split=split))
        waiting, rank = held_of(of_case, small, index, many), small.group(0, "pp")[index]
        for less in taken:
            skipped = tuple(i for row in rows for i in row[1 : 1 + less])
            cases.append(Case(of_case, small, rank, skipped, less, waiting))
    waitings = {case.waiting for case in cases}
    if target in waitings:
        return [case for case in cases if case.waiting == target][: len(taken)]
    return cases if len(waitings) == 2 else []


def _split(own: dict[int, tuple[int, int]], stages: int, blocks: int) -> tuple[int, ...]:
    """How many blocks each stage has where some have blocks of their own, and the others share those between."""
    edges = {0: 0, stages: blocks}
    for stage, (first, end) in own.items():
        edges |= {stage: first, stage + 1: end}
    known = sorted(edges)
    ends = np.interp(range(stages + 1), known, [edges[stage] for stage in known]).astype(int)
    return tuple(int(end - first) for first, end in pairwise(ends))
