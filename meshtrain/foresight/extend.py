"""Memory of the ranks of a config by traced steps; of a large one by steps of its blocks in fewer layers, microbatches
and pipeline ranks, extended.

What is alive at a moment of a step is affine in the layers of a stage, and in the forwards that wait for backwards. So
four traces say what any number takes. Moments are told apart by what is computed and by the place in the stage, each is
extended by itself, and the largest is the peak: which one it is may change on the way.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshtrain.config import Config
from meshtrain.data.order import microbatches
from meshtrain.foresight.compiled import shared_graphs
from meshtrain.foresight.memory import RankMemory, held_forwards, schedule_of, short_schedule
from meshtrain.foresight.trace import UntracedError, trace_rank
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.modeling.build import spec_of, stages_of
from meshtrain.modeling.few_layers import LAYERS, kind_of
from meshtrain.parallel.fsdp import MIN_UNIT_SIZE
from meshtrain.pipeline.stage import blocks_of

WHOLE = 32  # passes of a microbatch through a block in a step that is traced as it is
FEW_RANKS = (3, 4)  # of a pipeline with more, where each has a first, a last, and ranks between them
FEW_LAYERS = (3, 4)  # that a stage keeps of those alike: a first, a last, and one or two between


@dataclass(frozen=True)
class Case:
    """A config of which a rank is traced, and what is affine in it: layers out of each stage, forwards that wait."""

    config: Config
    layout: Layout
    rank: int
    layers: float = 0
    waiting: float = 0


def rank_memory(config: Config, layout: Layout, pp: int, whole: int = WHOLE) -> RankMemory:
    """Of the rank at an index of `pp` that has most: the first on all other axes. `whole`: passes of a microbatch
    through a block up to which its step is traced as it is."""
    config, layout = _with_few_copies(config, layout)
    rank, schedule = layout.group(0, "pp")[pp], None
    if layout.size("pp") > 1:
        schedule, split = stages_of(config, layout)
        bounds = [split.bounds[stage] for stage in schedule.stages_of(pp)]
    else:
        bounds = [(0, len(blocks_of(spec_of(config).meta)))]
    count = microbatches(config.batch.sizes.largest, config.batch.micro_size, layout.size(*DATA_AXES))
    passes = count * sum(end - first for first, end in bounds)
    cases = [] if passes <= whole else _smaller(config, layout, pp, bounds, count)
    if not cases:
        trace = trace_rank(config, layout, rank)
        return RankMemory({**trace.resident}, {**trace.parts}, trace.moment, pp, trace.compiled)
    weights = [
        _weight(case.layers, [other.layers for other in cases], 0)
        * _weight(case.waiting, [other.waiting for other in cases], held_of(config, layout, pp, count))
        for case in cases
    ]
    try:
        with shared_graphs():
            traces = [trace_rank(case.config, case.layout, case.rank) for case in cases]
    except UntracedError:  # perhaps of fewer layers alone
        return rank_memory(config, layout, pp, passes)
    shared = set.intersection(*(set(trace.moments) for trace in traces))
    moments = {moment: _combined([trace.moments[moment] for trace in traces], weights) for moment in shared}
    peak = max(moments, key=lambda moment: sum(moments[moment].values()))
    words = next((trace.moment for trace in traces if trace.parts == trace.moments[peak]), peak.strip())
    resident = _combined([trace.resident for trace in traces], weights)
    return RankMemory(resident, moments[peak], words, pp, traces[0].compiled, "extended")


def _with_few_copies(config: Config, layout: Layout) -> tuple[Config, Layout]:
    """A config and layout with two copies in the place of many, whose ranks hold as much."""
    if layout.size("dp_replicate") < 3 or config.parallel.shard_optimizer:
        return config, layout
    few = Layout({**layout.sizes, "dp_replicate": 2})
    few = few.with_context_heads(layout.context_heads).with_experts(layout.experts)
    size = config.batch.micro_size
    count = microbatches(config.batch.sizes.largest, size, layout.size(*DATA_AXES))
    batch = replace(config.batch, global_size=count * size * few.size(*DATA_AXES))
    return replace(config, batch=batch, layout=few.sizes, resolved=few), few


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
    """Cases that can be extended to a rank; none where its blocks are not alike, or a file has its schedule."""
    ranks, data = layout.size("pp"), layout.size(*DATA_AXES)
    if ranks > 1 and config.pipeline.schedule.endswith(".csv"):
        return []
    kinds = [kind_of(block) for block in blocks_of(spec_of(config).meta)]
    own = [Counter(kinds[first:end]) for first, end in bounds]
    common = max(own[0], key=own[0].__getitem__)
    fewest = min(stage[common] for stage in own)
    taken = [fewest - keep for keep in FEW_LAYERS] if fewest > FEW_LAYERS[-1] else [0]
    elements = sum(math.prod(shape) for *shape, _ in common[-1]) / layout.size("tp")
    if LAYERS not in config.model.keys or (layout.size("fsdp") > 1 and elements < MIN_UNIT_SIZE):
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
        batch = replace(config.batch, global_size=many * config.batch.micro_size * data)
        small = (
            Layout({**layout.sizes, "pp": few}).with_context_heads(layout.context_heads).with_experts(layout.experts)
        )
        for less in taken:
            case = _with_fewer(replace(config, batch=batch), small, index, bounds, less)
            if case is None:
                return []
            cases.append(replace(case, waiting=held_of(case.config, small, index, many)))
    waiting = {case.waiting for case in cases}
    if target in waiting:
        return [case for case in cases if case.waiting == target][: len(taken)]
    return cases if len(waiting) == 2 else []


def _with_fewer(
    config: Config, layout: Layout, index: int, bounds: Sequence[tuple[int, int]], less: int
) -> Case | None:
    """A config whose rank at an index of `pp` has the blocks of `bounds` but for so many layers in each stage."""
    whole, section = [kind_of(block) for block in blocks_of(spec_of(config).meta)], config.pipeline
    common = Counter(whole).most_common(1)[0][0]
    counts = [end - first - less for first, end in bounds]
    if layout.size("pp") > 1:
        placement = short_schedule(section.schedule, layout.size("pp"), section.stages_per_rank).placement
        others = whole.index(common), whole[::-1].index(common)  # at the ends; of others a stage needs none
        sizes = [max(others[0], 1), *[1] * (len(placement) - 2), max(others[1], 1)]
        own = [stage for stage, rank in enumerate(placement) if rank == index]
        for stage, size in zip(own, counts, strict=True):
            sizes[stage] = size
        for end, beside in ((0, 1), (-1, -2)):  # what the end has not, its neighbour has
            sizes[beside] += max(0, others[end] - sizes[end]) if len(sizes) > 2 else 0
        counts, section = sizes, replace(section, split=tuple(sizes))
    keys = dict(config.model.keys)
    if len(whole) != sum(counts):
        keys[LAYERS] = keys.get(LAYERS, 0) - len(whole) + sum(counts)
    if keys.get(LAYERS, 1) < 1:
        return None
    few = replace(config, model=replace(config.model, keys=keys), pipeline=section)
    few = replace(few, layout=layout.sizes, resolved=layout)
    try:
        made = [kind_of(block) for block in blocks_of(spec_of(few).meta)]
    except Exception:  # the model's own, which has to have more
        return None
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    stages = [slice(start, start + size) for start, size in zip(starts, counts, strict=True)]
    stages = stages if layout.size("pp") == 1 else [stages[stage] for stage in own]
    for (first, end), blocks in zip(bounds, stages, strict=True):
        removed = Counter(whole[first:end]) - Counter(made[blocks])
        if Counter(made[blocks]) - Counter(whole[first:end]) or len(removed) > 1:
            return None
    return Case(few, layout, layout.group(0, "pp")[index], less)
