"""A first look at the candidates of a search: seconds and memory by closed forms, in microseconds.

A few layouts are traced. What a block computes, sends and keeps is affine in 1 / cp and in 1 / ep,
so the others follow from these, and what a setting of SAVINGS changes is taken from one layout for
all. A pipeline is its busiest rank, and the microbatches for which that waits. Whatever is worth a
second look is predicted in full.

A search asks for tens of thousands of estimates, so each thing is computed once for all candidates
that have it in common: what is said of a layout, of its blocks, and of one pass through them.
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
from meshtrain.foresight.blocks import SENT_OVER, works_of
from meshtrain.foresight.collective import Group, seconds
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.offload import seconds_beside_block
from meshtrain.foresight.parameters import compute_size, held_bytes, master_size
from meshtrain.foresight.prediction import Prediction, split_of
from meshtrain.foresight.schedules import held_by_ranks, short_schedule
from meshtrain.foresight.space import (
    CONTEXT,
    MICRO,
    OFFLOAD,
    RECOMPUTE,
    REGATHER,
    RESHARD,
    SCHEDULE,
    SEQUENCE,
    STAGES,
    ZERO,
    Candidate,
)
from meshtrain.foresight.steptime import NAMES, cost, makespan
from meshtrain.foresight.work import Work
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.parallel.activation_offload import LEAST as LEAST_BYTES
from meshtrain.parallel.host_link import LIMIT
from meshtrain.parallel.parallelize import is_single_layer
from meshtrain.pipeline.actions import ScheduleError
from meshtrain.pipeline.partition import blocks_of
from meshtrain.pipeline.schedule import NAMES as SCHEDULES
from meshtrain.pipeline.schedule import build

# Of estimated activations what is there, at least and at most; at least of compiled blocks.
LEAST, MOST = 0.6, 1.25
COMPILED = 0.5
# Values of parallel.offload, by what they move.
OF_STATES, OF_ACTIVATIONS = ("optimizer", "both"), ("activations", "both")
SEVERAL = 16  # tensors that a block saves: small ones stay on the device
MOST_STAGES = 8  # on a rank of an interleaved schedule, in a search
# Of a candidate, what changes the work of its blocks besides sizes.
OF_BLOCKS = (RECOMPUTE, REGATHER, CONTEXT, SEQUENCE)

# A number of all blocks for one microbatch -> its value. Of messages: (pass, axis, kind, "bytes"),
# "times", and the seconds of the products "beside" which they travel.
Sketch = dict[tuple[str, ...], float]


class Estimate(NamedTuple):
    """A first look at a candidate: seconds of a step, and bytes between which its memory is."""

    seconds: float
    least_memory: float
    most_memory: float


@dataclass(frozen=True)
class Placed:
    """A layout as all estimates of it read it: sizes of axes, the ranks that share a batch
    (`readers`), the group of each axis over which blocks send, and the number of ranks over which
    parameters are sharded, by the axis that shards them. `key` tells apart what differs in any of
    the groups."""

    pp: int
    cp: int
    tp: int
    experts: int
    fsdp: int
    copies: int
    readers: int
    groups: Mapping[str, Group]
    shards: Mapping[str, int]
    key: tuple[Any, ...]

    @classmethod
    def of(cls, layout: Layout) -> "Placed":
        groups = {axis: Group.of(layout, axis) for axis in SENT_OVER}
        return cls(
            pp=layout.size("pp"),
            cp=layout.size("cp"),
            tp=layout.size("tp"),
            experts=layout.experts,
            fsdp=layout.size("fsdp"),
            copies=layout.size("dp_replicate"),
            readers=layout.size(*DATA_AXES),
            groups=groups,
            shards={"fsdp": layout.size("fsdp"), "efsdp": layout.size("efsdp"), "": 1},
            key=tuple(
                (group.ranks, group.on_host, group.ranks_of_host) for group in groups.values()
            ),
        )


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
        self._prediction = Prediction(self.config, hardware)
        blocks = enumerate(blocks_of(spec.meta))
        self.offloading = [i for i, block in blocks if not is_single_layer(block)]

        precision = config.train.precision
        self.samples = config.batch.sizes.largest
        self.element, self.master = compute_size(precision), master_size(precision)
        in_bfloat16 = config.parallel.reduce_precision == "bfloat16"
        self.message = 2 if in_bfloat16 else self.master

        self._placed: dict[tuple[Any, ...], Placed] = {}
        self._sketches: dict[tuple[Any, ...], Sketch] = {}
        self._traces: dict[tuple[Any, ...], Sketch | InputError] = {}
        self._passes_of: dict[tuple[Any, ...], tuple[float, float]] = {}
        self._shares: dict[tuple[Any, ...], Sketch] = {}  # of pipelines

    def of(self, candidate: Candidate, scheduled: bool) -> Estimate:
        """Not `scheduled`: the least that it takes with any schedule."""
        layout, settings = candidate.layout, candidate.settings
        name = layout.shape, layout.experts, layout.context_heads
        if name not in self._placed:
            self._placed[name] = Placed.of(layout)
        placed = self._placed[name]
        count = microbatches(self.samples, settings[MICRO], placed.readers)

        shape = Shape()
        deferred = False
        if placed.pp > 1 and not scheduled:
            part = 1 / placed.pp
            idle, held = _least_waits(placed.pp, count)
            shape = Shape(part, part, part, idle, held)
        elif placed.pp > 1:
            schedule = short_schedule(settings[SCHEDULE], placed.pp, settings[STAGES])
            shape = self._shape(candidate, schedule.stages_per_rank, count)
            deferred = schedule.splits_backward

        # Candidates that differ in data ranks and stages have these in common.
        kind = placed.tp, placed.cp, placed.experts, settings[MICRO], _of_blocks(candidate)
        if kind not in self._sketches:
            self._sketches[kind] = self._sketch(candidate)
        sketch = self._sketches[kind]
        key = kind, placed.key, deferred
        if key not in self._passes_of:
            self._passes_of[key] = self._passes(sketch, placed.groups, deferred)
        forward, backward = self._passes_of[key]
        forward *= shape.time
        backward *= shape.time
        if settings[OFFLOAD] in OF_ACTIVATIONS:
            away = shape.saved * sketch["offloaded",]
            forward += seconds_beside_block(away, forward, self.hardware)
            backward += seconds_beside_block(away, backward, self.hardware)
        passes = forward, backward
        total = (count + shape.idle) * sum(passes)
        total += self._between_data_ranks(candidate, placed, sketch, shape, count, passes)
        if settings[OFFLOAD] in OF_STATES:
            states = shape.parameters * _states(candidate, placed, sketch)
            total += self.hardware.host_seconds(states)  # and as much back, at the same time

        memory, moving = self._memory(candidate, placed, sketch, shape, count)
        is_compiled = self._prediction.compiled and not deferred
        least = COMPILED if is_compiled else LEAST
        return Estimate(total, memory + least * moving, memory + MOST * moving)

    def _between_data_ranks(
        self,
        candidate: Candidate,
        placed: Placed,
        sketch: Sketch,
        shape: Shape,
        count: int,
        passes: tuple[float, float],
    ) -> float:
        """Seconds that messages over data ranks add to a step, with all parameters of the rank in
        as many as it has blocks."""
        layout, settings = candidate.layout, candidate.settings
        forward, backward = passes
        added = 0.0
        if placed.fsdp > 1:
            gathered = shape.parameters * (sketch["fsdp", "elements"] + sketch["efsdp", "elements"])
            units = max(1, round(sketch["blocks",] / placed.pp))
            sent = (placed.fsdp - 1) / placed.fsdp * gathered
            group = Group.of(layout, "fsdp")
            gathers_again = settings[RESHARD] and placed.pp == 1
            times = count if gathers_again else 1
            ahead = seconds("all_gather", self.element * sent, group, self.hardware, units)
            after = seconds("reduce_scatter", self.message * sent, group, self.hardware, units)
            added += times * self._beside(ahead, forward, units)
            added += times * self._beside(after, backward, units)
            if gathers_again:
                added += times * self._beside(ahead, backward, units)
        if placed.copies > 1:
            trained = sum(sketch[axis, "trained"] / n for axis, n in placed.shards.items())
            share = 2 * (placed.copies - 1) / placed.copies
            sent = share * self.message * shape.parameters * trained
            took = seconds("all_reduce", sent, Group.of(layout, "dp_replicate"), self.hardware)
            if settings[ZERO]:
                added += took / 2 + self._beside(took / 2, backward, 10)
            else:
                added += self._beside(took, backward, 10)
        return added

    def _beside(self, took: float, computing: float, parts: int) -> float:
        """What messages in so many parts, which travel beside computing, add to it."""
        exposed = max(took / parts, took - computing)
        return exposed + self.hardware.compute.contention * (took - exposed)

    def _passes(
        self, sketch: Sketch, groups: Mapping[str, Group], deferred: bool
    ) -> tuple[float, float]:
        """Seconds of the forward and the backward of all blocks, for one microbatch."""
        took = {"forward": sketch["forward",], "backward": sketch["backward",]}
        for key, nbytes in sketch.items():
            if key[-1] != "bytes" or nbytes <= 0:
                continue
            name, axis, kind, _ = key
            times = round(sketch[name, axis, kind, "times"])
            sending = seconds(kind, nbytes, groups[axis], self.hardware, times)
            if not deferred:
                overlapped = min(sending, sketch[name, axis, kind, "beside"])
                sending -= (1 - self.hardware.compute.contention) * overlapped
            took[name] += sending
        return took["forward"], took["backward"]

    def _memory(
        self, candidate: Candidate, placed: Placed, sketch: Sketch, shape: Shape, count: int
    ) -> tuple[float, float]:
        """Bytes that a rank keeps of its parameters, gathered ones included, and of activations."""
        settings, element, master = candidate.settings, self.element, self.master
        kept = 0.0
        for axis, ranks in placed.shards.items():
            kept += sketch[axis, "kept"] / ranks
        if settings[OFFLOAD] not in OF_STATES:
            kept += _states(candidate, placed, sketch)
        elements = sketch["fsdp", "elements"] + sketch["efsdp", "elements"]
        if placed.fsdp == 1:
            kept += element * elements if element < master else 0.0
        elif placed.pp > 1 or not settings[RESHARD]:
            kept += element * elements
            if count > 1:  # whole gradients are summed up
                kept += master * (1 - 1 / placed.fsdp) * elements
        else:
            # The messages with three units of parameters and with one of gradients.
            kept += (3 * element + master) * elements / sketch["blocks",]
        moving = (shape.held - 1) * shape.saved * sketch["saved",]
        peak = sketch["peak",] - sketch["saved",] * (1 - shape.saved)
        if settings[OFFLOAD] in OF_ACTIVATIONS:
            # Of what blocks save, copies under way are on the device, and what stays.
            moving = (shape.held - 1) * shape.saved * (sketch["saved",] - sketch["offloaded",])
            peak = sketch["block",]
        return shape.parameters * kept, moving + max(peak, 0.0)

    # What is traced -------------------------------------------------------------------------------

    def _sketch(self, candidate: Candidate) -> Sketch:
        layout = candidate.layout
        tp, cp, ep = layout.size("tp"), layout.size("cp"), layout.experts
        first = candidate.changed({RECOMPUTE: "none", REGATHER: False})
        sketch = self._over_ep(first, tp, ep)
        few, usual = min(tp, 2), 2 if self.has_experts else 1
        if cp > 1:
            # affine in 1 / cp, from one rank and two
            one, two = self._traced(first, few, 1, usual), self._traced(first, few, 2, usual)
            sketch = _changed(sketch, one, _affine(one, two, 2 * (1 - 1 / cp)))
        for key in (RECOMPUTE, REGATHER):
            value = candidate.settings[key]
            if value != first.settings[key]:
                before = self._traced(first, few, 1, usual)
                after = self._traced(first.changed({key: value}), few, 1, usual)
                sketch = _changed(sketch, before, after)
        return sketch

    def _over_ep(self, candidate: Candidate, tp: int, ep: int) -> Sketch:
        """Affine in 1 / ep, from two ranks and as many as the model takes of 16."""
        if ep <= 2:
            return self._traced(candidate, tp, 1, ep)
        few = self._traced(candidate, tp, 1, 2)
        for many in (16, 8, 4):
            try:
                more = self._traced(candidate, tp, 1, many)
            except InputError:
                continue
            return _affine(few, more, (1 / 2 - 1 / ep) / (1 / 2 - 1 / many))
        return few

    def _traced(self, candidate: Candidate, tp: int, cp: int, ep: int) -> Sketch:
        key = tp, cp, ep, candidate.settings[MICRO], _of_blocks(candidate)
        if key not in self._traces:
            ranks = max(1, ep // (cp * tp))
            layout = Layout({"dp_shard": ranks, "cp": cp, "tp": tp}).with_experts(ep)
            try:
                works = works_of(candidate.apply(self.config), layout)
                self._traces[key] = self._sum(works, layout)
            except InputError as error:
                self._traces[key] = error
        traced = self._traces[key]
        if isinstance(traced, InputError):
            raise traced
        return traced

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
        saved_by = [works[i].memory.saved for i in self.offloading]
        sums["offloaded",] = sum(nbytes for nbytes in saved_by if nbytes > SEVERAL * LEAST_BYTES)
        sums["block",] = max(
            live - before - max(work.memory.saved - 2 * LIMIT, 0.0)
            for live, before, work in zip(lives, saved, works, strict=False)
        )
        sums["blocks",] = len(works)
        return sums

    # Pipelines ------------------------------------------------------------------------------------

    def _shape(self, candidate: Candidate, per_rank: int, count: int) -> Shape:
        name, ranks = candidate.settings[SCHEDULE], candidate.layout.size("pp")
        key = name, ranks, per_rank
        if key not in self._shares:
            self._shares[key] = self._shares_of(candidate, per_rank)
        shares = self._shares[key]
        idle, held = _waits(name, ranks, per_rank, count)
        return Shape(shares["time",], shares["parameters",], shares["saved",], idle, held)

    def _shares_of(self, candidate: Candidate, per_rank: int) -> Sketch:
        """The largest share that a rank has of the model's time, parameters and activations."""
        config, ranks = self.config, candidate.layout.size("pp")
        spec = spec_of(config)
        split = split_of(spec, config.data.seq_len, ranks, per_rank, config.pipeline.split)
        schedule = short_schedule(candidate.settings[SCHEDULE], ranks, candidate.settings[STAGES])
        # Any layout shows these shares.
        one_sample = candidate.changed({RECOMPUTE: "none", MICRO: 1})
        works = works_of(one_sample.apply(config), Layout({"dp_shard": 1}))
        elements = [float(work.elements) for work in works]
        saved = [work.memory.saved for work in works]
        shares: Sketch = {}
        for name, values in (("parameters", elements), ("saved", saved)):
            stages = [sum(values[first:end]) for first, end in split.bounds]
            shares[name,] = _largest(stages, schedule.placement) / sum(values)
        shares["time",] = _largest(split.costs, schedule.placement) / sum(split.costs)
        return shares


def _states(candidate: Candidate, placed: Placed, sketch: Sketch) -> float:
    """Bytes of the optimizer's states of all blocks, on a rank."""
    states = sum(sketch[axis, "states"] / ranks for axis, ranks in placed.shards.items())
    return states / placed.copies if candidate.settings[ZERO] else states


def _of_blocks(candidate: Candidate) -> tuple[Any, ...]:
    return tuple(candidate.settings[key] for key in OF_BLOCKS)


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
