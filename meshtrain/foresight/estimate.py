"""A first look at the candidates of a search: seconds and memory by closed forms, in microseconds.

A few layouts are traced. What a block computes, sends and keeps is affine in 1 / cp and in 1 / ep,
so the others follow from these, and what a setting of SAVINGS changes is taken from one layout for
all. A pipeline is its busiest rank, and the microbatches for which that waits. Whatever is worth a
second look is predicted in full.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from meshtrain.config import Config, spec_of
from meshtrain.data.order import microbatches
from meshtrain.errors import InputError
from meshtrain.foresight.blocks import works_of
from meshtrain.foresight.collective import Group, seconds
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.parameters import compute_size, held_bytes, master_size
from meshtrain.foresight.prediction import Prediction, split_of
from meshtrain.foresight.schedules import held_by_ranks, short_schedule
from meshtrain.foresight.steptime import NAMES, cost, makespan
from meshtrain.foresight.work import Work
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.pipeline.actions import ScheduleError
from meshtrain.pipeline.schedule import NAMES as SCHEDULES
from meshtrain.pipeline.schedule import build

# Of estimated activations what is there, at least and at most; at least of compiled blocks.
LEAST, MOST = 0.6, 1.25
COMPILED = 0.5
MOST_STAGES = 8  # on a rank of an interleaved schedule, in a search

# A number of all blocks for one microbatch -> its value. Of messages: (pass, axis, kind, "bytes"),
# "times", and the seconds of the products "beside" which they travel.
Sketch = dict[tuple[str, ...], float]


class Estimate(NamedTuple):
    """A first look at a candidate: seconds of a step, and bytes between which its memory is."""

    seconds: float
    least_memory: float
    most_memory: float


@dataclass(frozen=True)
class Shape:
    """A pipeline by shares of the whole model: of its time on the busiest rank, of its parameters
    and of its activations on the fullest one. The busiest waits as long as `idle` microbatches
    take, and a rank holds `held` microbatches in flight."""

    time: float = 1.0
    parameters: float = 1.0
    saved: float = 1.0
    idle: float = 0.0
    held: float = 1.0


class Estimates:
    """Estimates for the candidates of a config. They raise InputError: the model refuses to be
    split."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        spec = spec_of(config)
        self.config = replace(config, spec=spec)
        self.hardware = hardware
        self.has_experts = spec.plan("ep_plan") is not None
        self._known: dict[tuple[Any, ...], Sketch | InputError] = {}
        self._sums: dict[tuple[Any, ...], Sketch] = {}
        self._passes_of: dict[tuple[Any, ...], tuple[float, float]] = {}
        self._prediction = Prediction(self.config, hardware)

    def of(self, config: Config, scheduled: bool) -> Estimate:
        """For a candidate's config. Not `scheduled`: the least that it takes with any schedule."""
        layout = config.resolved
        assert layout is not None
        parallel, precision = config.parallel, config.train.precision
        count = microbatches(
            config.batch.sizes.largest, config.batch.micro_size, layout.size(*DATA_AXES)
        )
        sketch = self._sketch(config, layout)
        pp, fsdp = layout.size("pp"), layout.size("fsdp")
        shape = Shape()
        deferred = False
        if pp > 1 and not scheduled:
            idle, held = _least_waits(pp, count)
            shape = Shape(1 / pp, 1 / pp, 1 / pp, idle, held)
        elif pp > 1:
            shape = self._shape(config, pp, count)
            section = config.pipeline
            deferred = short_schedule(section.schedule, pp, section.stages_per_rank).splits_backward

        placed = layout.shape, layout.experts, layout.context_heads
        key = *placed, config.batch.micro_size, _settings(config), deferred
        if key not in self._passes_of:
            self._passes_of[key] = self._passes(sketch, layout, deferred)
        forward, backward = self._passes_of[key]
        forward *= shape.time
        backward *= shape.time
        total = (count + shape.idle) * (forward + backward)

        # Messages over data ranks, with all parameters of the rank in as many as it has blocks.
        gathers_again = parallel.reshard_after_forward and pp == 1
        own = shape.parameters
        element = compute_size(precision)
        message = 2 if parallel.reduce_precision == "bfloat16" else master_size(precision)
        if fsdp > 1:
            gathered = own * (sketch["fsdp", "elements"] + sketch["efsdp", "elements"])
            units = max(1, round(sketch["blocks",] / pp))
            others = (fsdp - 1) / fsdp
            group = Group.of(layout, "fsdp")
            times = count if gathers_again else 1
            ahead = seconds("all_gather", others * element * gathered, group, self.hardware, units)
            after = seconds(
                "reduce_scatter", others * message * gathered, group, self.hardware, units
            )
            total += times * self._beside(ahead, forward, units)
            total += times * self._beside(after, backward, units)
            if gathers_again:
                total += times * self._beside(ahead, backward, units)
        copies = layout.size("dp_replicate")
        shards = {"fsdp": fsdp, "efsdp": layout.size("efsdp"), "": 1}
        if copies > 1:
            summed = own * sum(sketch[axis, "trained"] / n for axis, n in shards.items())
            sent = 2 * (copies - 1) / copies * message * summed
            took = seconds("all_reduce", sent, Group.of(layout, "dp_replicate"), self.hardware)
            if parallel.shard_optimizer:
                total += took / 2 + self._beside(took / 2, backward, 10)
            else:
                total += self._beside(took, backward, 10)

        memory, moving = self._memory(config, layout, sketch, shape, shards, count)
        is_compiled = self._prediction.compiled and not deferred
        least = COMPILED if is_compiled else LEAST
        return Estimate(total, memory + least * moving, memory + MOST * moving)

    def _beside(self, took: float, computing: float, parts: int) -> float:
        """What messages in so many parts, which travel beside computing, add to it."""
        exposed = max(took / parts, took - computing)
        return exposed + self.hardware.compute.contention * (took - exposed)

    def _passes(self, sketch: Sketch, layout: Layout, deferred: bool) -> tuple[float, float]:
        """Seconds of the forward and the backward of all blocks, for one microbatch."""
        took = {"forward": sketch["forward",], "backward": sketch["backward",]}
        for key, nbytes in sketch.items():
            if key[-1] != "bytes" or nbytes <= 0:
                continue
            name, axis, kind, _ = key
            times = round(sketch[name, axis, kind, "times"])
            sending = seconds(kind, nbytes, Group.of(layout, axis), self.hardware, times)
            if not deferred:
                overlapped = min(sending, sketch[name, axis, kind, "beside"])
                sending -= (1 - self.hardware.compute.contention) * overlapped
            took[name] += sending
        return took["forward"], took["backward"]

    def _memory(
        self,
        config: Config,
        layout: Layout,
        sketch: Sketch,
        shape: Shape,
        shards: Mapping[str, int],
        count: int,
    ) -> tuple[float, float]:
        """Bytes that a rank keeps of its parameters, gathered ones included, and of activations."""
        parallel = config.parallel
        element, master = compute_size(config.train.precision), master_size(config.train.precision)
        pp, fsdp = layout.size("pp"), layout.size("fsdp")
        kept = 0.0
        for axis, ranks in shards.items():
            states = sketch[axis, "states"] / ranks
            if parallel.shard_optimizer:
                states /= layout.size("dp_replicate")
            kept += sketch[axis, "kept"] / ranks + states
        elements = sketch["fsdp", "elements"] + sketch["efsdp", "elements"]
        if fsdp == 1:
            kept += element * elements if element < master else 0.0
        elif pp > 1 or not parallel.reshard_after_forward:
            kept += element * elements
            if count > 1:  # whole gradients are summed up
                kept += master * (1 - 1 / fsdp) * elements
        else:
            # The messages with three units of parameters and with one of gradients.
            kept += (3 * element + master) * elements / sketch["blocks",]
        moving = (shape.held - 1) * shape.saved * sketch["saved",]
        peak = sketch["peak",] - sketch["saved",] * (1 - shape.saved)
        return shape.parameters * kept, moving + max(peak, 0.0)

    # What is traced -------------------------------------------------------------------------------

    def _sketch(self, config: Config, layout: Layout) -> Sketch:
        parallel = config.parallel
        tp, cp, ep = layout.size("tp"), layout.size("cp"), layout.experts
        key = tp, cp, ep, config.batch.micro_size, _settings(config)
        if key not in self._sums:
            first = replace(config, parallel=replace(parallel, recompute="none", regather=False))
            sketch = self._over_ep(first, tp, ep)
            few, usual = min(tp, 2), 2 if self.has_experts else 1
            if cp > 1:
                # affine in 1 / cp, from one rank and two
                one, two = self._traced(first, few, 1, usual), self._traced(first, few, 2, usual)
                sketch = _changed(sketch, one, _affine(one, two, 2 * (1 - 1 / cp)))
            for name in ("recompute", "regather"):
                value = getattr(parallel, name)
                if value != getattr(first.parallel, name):
                    other = replace(first, parallel=replace(first.parallel, **{name: value}))
                    before = self._traced(first, few, 1, usual)
                    sketch = _changed(sketch, before, self._traced(other, few, 1, usual))
            self._sums[key] = sketch
        return self._sums[key]

    def _over_ep(self, config: Config, tp: int, ep: int) -> Sketch:
        """Affine in 1 / ep, from two ranks and as many as the model takes of 16."""
        if ep <= 2:
            return self._traced(config, tp, 1, ep)
        few = self._traced(config, tp, 1, 2)
        for many in (16, 8, 4):
            try:
                more = self._traced(config, tp, 1, many)
            except InputError:
                continue
            return _affine(few, more, (1 / 2 - 1 / ep) / (1 / 2 - 1 / many))
        return few

    def _traced(self, config: Config, tp: int, cp: int, ep: int) -> Sketch:
        key = tp, cp, ep, config.batch.micro_size, _settings(config)
        if key not in self._known:
            ranks = max(1, ep // (cp * tp))
            layout = Layout({"dp_shard": ranks, "cp": cp, "tp": tp}).with_experts(ep)
            try:
                self._known[key] = self._sum(works_of(config, layout), layout)
            except InputError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, InputError):
            raise known
        return known

    def _sum(self, works: Sequence[Work], layout: Layout) -> Sketch:
        """Over all blocks."""
        train = self.config.train
        compiled = self._prediction.compiled
        sums: Sketch = defaultdict(float)
        counts: dict[int, int] = defaultdict(int)
        kinds = {}
        for work in works:
            counts[id(work)] += 1
            kinds[id(work)] = work
        for key, work in kinds.items():
            of_kind = _of_block(work, self.hardware, train.precision, compiled, layout)
            for parameter in work.parameters:
                spec = parameter.over(1)
                held = held_bytes(spec, layout, train.precision, self.config.optimizer)
                of_kind[parameter.axis, "kept"] += held.weights + held.gradients
                of_kind[parameter.axis, "states"] += held.states
                of_kind[parameter.axis, "elements"] += held.weights / master_size(train.precision)
                of_kind[parameter.axis, "trained"] += held.gradients / master_size(train.precision)
            for name, value in of_kind.items():
                sums[name] += counts[key] * value
        saved = [0.0, *accumulate(work.memory.saved for work in works)]
        lives = [
            before + max(work.memory.forward, *(live.activations for live in work.memory.backward))
            for before, work in zip(saved, works, strict=False)
        ]
        sums["saved",], sums["peak",] = saved[-1], max(lives)
        sums["blocks",] = len(works)
        return sums

    # Pipelines ------------------------------------------------------------------------------------

    def _shape(self, config: Config, ranks: int, count: int) -> Shape:
        section = config.pipeline
        schedule = short_schedule(section.schedule, ranks, section.stages_per_rank)
        key = section.schedule, ranks, section.stages_per_rank
        if key not in self._sums:
            split = split_of(
                spec_of(self.config),
                self.config.data.seq_len,
                ranks,
                schedule.stages_per_rank,
                section.split,
            )
            first = replace(config, parallel=replace(config.parallel, recompute="none"))
            # Any layout shows these shares.
            one_sample = replace(first, batch=replace(first.batch, micro_size=1))
            works = works_of(one_sample, Layout({"dp_shard": 1}))
            elements = [float(work.elements) for work in works]
            saved = [work.memory.saved for work in works]
            shares: Sketch = {}
            for name, values in (("parameters", elements), ("saved", saved)):
                stages = [sum(values[first:end]) for first, end in split.bounds]
                shares[name,] = _largest(stages, schedule.placement) / sum(values)
            shares["time",] = _largest(split.costs, schedule.placement) / sum(split.costs)
            self._sums[key] = shares
        shares = self._sums[key]
        idle, held = _waits(section.schedule, ranks, schedule.stages_per_rank, count)
        return Shape(shares["time",], shares["parameters",], shares["saved",], idle, held)


def _settings(config: Config) -> tuple[Any, ...]:
    """Of a candidate, what changes the work of its blocks besides sizes."""
    parallel = config.parallel
    return parallel.recompute, parallel.regather, parallel.context, parallel.sequence_parallel


def _of_block(
    work: Work, hardware: Hardware, precision: str, compiled: bool, layout: Layout
) -> Sketch:
    numbers: Sketch = defaultdict(float)
    for name, one in zip(("forward", "backward", "backward"), work.passes, strict=True):
        spent = cost(replace(one, sends=()), layout, hardware, precision, compiled)
        numbers[name,] += sum(spent[resource] for resource in NAMES)
        for send in one.sends:
            key = name, send.axis, send.kind
            beside = cost(replace(one, sends=(), products=send.beside), layout, hardware, precision)
            numbers[*key, "bytes"] += send.nbytes
            numbers[*key, "times"] += send.times
            numbers[*key, "beside"] += beside["products"]
    return numbers


def _affine(one: Sketch, two: Sketch, way: float) -> Sketch:
    """What is `way` of the way from one to two."""
    numbers: Sketch = defaultdict(float, one)
    for key in {*one, *two}:
        numbers[key] += way * (two.get(key, 0.0) - one.get(key, 0.0))
    return numbers


def _changed(sketch: Sketch, before: Sketch, after: Sketch) -> Sketch:
    """A sketch that changes like another one."""
    scale = sketch["forward",] / before["forward",]
    numbers: Sketch = defaultdict(float, sketch)
    for key, value in after.items():
        if before.get(key):
            numbers[key] *= value / before[key]
        else:
            numbers[key] += scale * value
    return numbers


def _largest(of_stages: Sequence[float], placement: Sequence[int]) -> float:
    """The largest sum over the stages of a rank."""
    of_ranks: dict[int, float] = defaultdict(float)
    for value, rank in zip(of_stages, placement, strict=True):
        of_ranks[rank] += value
    return max(of_ranks.values())


def _waits(name: str, ranks: int, per_rank: int, count: int) -> tuple[float, float]:
    """Microbatches for which a rank waits in a step, and most that it holds, if all stages and
    passes take as long. Both are affine in the number of ranks, and what it holds in that of
    microbatches: they follow from small pipelines."""
    if name not in SCHEDULES:
        return ranks - 1, count
    few = min(count, 12)
    idle_of_2, held_of_2 = _small(name, 2, per_rank, few)
    idle_of_6, held_of_6 = _small(name, 6, per_rank, few)
    idle = idle_of_2 + (ranks - 2) / 4 * (idle_of_6 - idle_of_2)
    held = held_of_2 + (ranks - 2) / 4 * (held_of_6 - held_of_2)
    if count > few:
        _, held_of_more = _small(name, 6, per_rank, 2 * few)
        held += (count - few) / few * (held_of_more - held_of_6)
    return max(idle, 0.0), min(max(held, 1.0), count)


@lru_cache(maxsize=1024)
def _least_waits(ranks: int, count: int) -> tuple[float, float]:
    """The least of each with any schedule."""
    waits = [_waits(name, ranks, stages, count) for name, stages in _kinds_of_schedules()]
    return min(idle for idle, _ in waits), min(held for _, held in waits)


@lru_cache(maxsize=1)
def _kinds_of_schedules() -> tuple[tuple[str, int], ...]:
    kinds = []
    for name in SCHEDULES:
        usual = short_schedule(name, 2, None).stages_per_rank
        kinds += [(name, stages) for stages in (usual, MOST_STAGES) if _takes(name, stages)]
    return tuple(kinds)


def _takes(name: str, stages: int) -> bool:
    """Whether a schedule can have so many stages on a rank."""
    with suppress(ScheduleError):
        build(name, ranks=2, microbatches=4, stages_per_rank=stages)
        return True
    return False


@lru_cache(maxsize=1024)
def _small(name: str, ranks: int, per_rank: int, count: int) -> tuple[float, float]:
    schedule = build(name, ranks=ranks, microbatches=count, stages_per_rank=per_rank)
    third = 1 / (3 * per_rank)
    costs = ((third, third, third),) * schedule.stages
    most = max(
        sum(stage.forwards + stage.backwards for stage in held)
        for of_rank in held_by_ranks(schedule)
        for held in of_rank
    )
    return makespan(schedule, costs) - count, most / per_rank
