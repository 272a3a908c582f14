"""A first look at the candidates of a search: seconds and memory by closed forms, in microseconds.

The blocks are as a sketch has them (`sketch.py`), a pipeline is its busiest rank and the
microbatches for which that waits (`pipelines.py`). Whatever is worth a second look is predicted in
full.

A search asks for tens of thousands of estimates, so each thing is computed once for all candidates
that have it in common: what is said of a layout, of its blocks, and of one pass through them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from meshtrain.config import Config, spec_of
from meshtrain.data.order import microbatches
from meshtrain.foresight.blocks import SENT_OVER
from meshtrain.foresight.collective import Group, seconds
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.offload import seconds_beside_block
from meshtrain.foresight.parameters import compute_size, master_size
from meshtrain.foresight.pipelines import Pipelines, Shape
from meshtrain.foresight.prediction import compiles
from meshtrain.foresight.sketch import (
    BACKWARD,
    BLOCKS,
    FORWARD,
    OFFLOADED,
    OFFLOADING_PEAK,
    PEAK,
    SAVED,
    Sketch,
    Sketches,
    of_blocks,
)
from meshtrain.foresight.space import (
    COMPILE,
    MICRO,
    OFFLOAD,
    RESHARD,
    SCHEDULE,
    STAGES,
    ZERO,
    Candidate,
)
from meshtrain.layout import DATA_AXES, Layout

# Of estimated activations what is there, at least and at most; at least of compiled blocks.
LEAST, MOST = 0.6, 1.25
COMPILED = 0.5
# Values of parallel.offload, by what they move.
OF_STATES, OF_ACTIVATIONS = ("optimizer", "both"), ("activations", "both")
BUCKETS = 10  # parts in which copies sum their gradients, beside the backward
ONE_STAGE = Shape()


class Estimate(NamedTuple):
    """A first look at a candidate: seconds of a step, and bytes between which its memory is."""

    seconds: float
    least_memory: float
    most_memory: float


def least_of(estimates: Sequence[Estimate]) -> Estimate:
    """The least of each number."""
    return Estimate(*map(min, zip(*estimates, strict=True)))


class Passes(NamedTuple):
    """Seconds of a forward and a backward of a microbatch."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Placed:
    """A layout as all estimates of it read it.

    Attributes:
        pp, cp, tp, experts, fsdp: sizes of axes.
        copies: size of `dp_replicate`.
        readers: ranks that share a batch.
        groups: axis -> its group, of those over which blocks or data ranks send.
        shards: axis by which parameters are sharded -> over how many ranks.
        key: tells apart what differs in any group over which blocks send.
    """

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
        groups = {axis: Group.of(layout, axis) for axis in (*SENT_OVER, "fsdp", "dp_replicate")}
        sent_over = [groups[axis] for axis in SENT_OVER]
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
            key=tuple((group.ranks, group.on_host, group.ranks_of_host) for group in sent_over),
        )


class Estimates:
    """Estimates for the candidates of a config. They raise InputError: the model refuses to be
    split."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        config = replace(config, spec=spec_of(config))
        self.hardware = hardware
        self.sketches = Sketches(config, hardware)
        self.pipelines = Pipelines(config)

        precision = config.train.precision
        self.samples = config.batch.sizes.largest
        # Bytes of an element: as blocks compute with it, of the optimizer's weight, and of the
        # gradient that is sent.
        self.element, self.master = compute_size(precision), master_size(precision)
        in_bfloat16 = config.parallel.reduce_precision == "bfloat16"
        self.message = 2 if in_bfloat16 else self.master

        self._placed: dict[tuple[Any, ...], Placed] = {}
        self._compiled: dict[tuple[Any, ...], bool] = {}
        self._sketches: dict[tuple[Any, ...], Sketch] = {}
        self._passes: dict[tuple[Any, ...], Passes] = {}

    def of(self, candidate: Candidate, scheduled: bool) -> Estimate:
        """Not `scheduled`: the least that it takes with any schedule."""
        layout, settings = candidate.layout, candidate.settings
        name = layout.shape, layout.experts, layout.context_heads
        if name not in self._placed:
            self._placed[name] = Placed.of(layout)
        placed = self._placed[name]
        count = microbatches(self.samples, settings[MICRO], placed.readers)
        if placed.pp == 1:
            return self._in_shape(candidate, placed, ONE_STAGE, count)
        if scheduled:
            stages = settings[STAGES]
            shape = self.pipelines.of(settings[SCHEDULE], placed.pp, stages, count)
            return self._in_shape(candidate, placed, shape, count)
        shapes = self.pipelines.least(placed.pp, count)
        return least_of([self._in_shape(candidate, placed, shape, count) for shape in shapes])

    def _in_shape(self, candidate: Candidate, placed: Placed, shape: Shape, count: int) -> Estimate:
        settings = candidate.settings
        compiled = self._compiles(settings[COMPILE], shape.deferred)
        # Candidates that differ in data ranks and stages have these in common.
        sizes = placed.tp, placed.cp, placed.experts, settings[MICRO]
        kind = *sizes, of_blocks(candidate), compiled
        if kind not in self._sketches:
            self._sketches[kind] = self.sketches.of(candidate, compiled)
        sketch = self._sketches[kind]
        key = kind, placed.key, shape.deferred
        if key not in self._passes:
            self._passes[key] = self._passes_of(sketch, placed.groups, shape.deferred)

        passes = self._own_passes(self._passes[key], candidate, sketch, shape)
        total = (count + shape.idle) * (passes.forward + passes.backward)
        if placed.fsdp > 1:
            total += self._sharding_adds(candidate, placed, sketch, shape, count, passes)
        if placed.copies > 1:
            total += self._copies_add(candidate, placed, sketch, shape, passes)
        if settings[OFFLOAD] in OF_STATES:
            states = shape.parameters * _states(candidate, placed, sketch)
            total += self.hardware.host_seconds(states)  # and as much back, at the same time

        kept = shape.parameters * self._kept(candidate, placed, sketch, count)
        activations = _activations(candidate, sketch, shape)
        least = COMPILED if compiled else LEAST
        return Estimate(total, kept + least * activations, kept + MOST * activations)

    def _compiles(self, setting: Any, deferred: bool) -> bool:
        """Whether blocks are compiled that can be, with this value of `parallel.compile`."""
        choice = setting, deferred
        if choice not in self._compiled:
            self._compiled[choice] = compiles(setting, self.hardware, deferred)
        return self._compiled[choice]

    # Seconds --------------------------------------------------------------------------------------

    def _passes_of(self, sketch: Sketch, groups: Mapping[str, Group], deferred: bool) -> Passes:
        """Of all blocks, with their messages. `deferred`: see `block_costs`."""
        hardware = self.hardware
        took = {"forward": sketch[FORWARD], "backward": sketch[BACKWARD]}
        for message in sketch.messages():
            name, axis, kind = message
            nbytes = sketch[*message, "bytes"]
            times = round(sketch[*message, "times"])
            added = seconds(kind, nbytes, groups[axis], hardware, times)
            if not deferred:
                # Products run beside it; both share the device, and slow each other down.
                overlapped = min(added, sketch[*message, "beside"])
                added -= (1 - hardware.compute.contention) * overlapped
            took[name] += added
        return Passes(took["forward"], took["backward"])

    def _own_passes(
        self, whole: Passes, candidate: Candidate, sketch: Sketch, shape: Shape
    ) -> Passes:
        """Of the busiest rank's share of the blocks, with what copies to the host add."""
        own = Passes(whole.forward * shape.time, whole.backward * shape.time)
        if candidate.settings[OFFLOAD] not in OF_ACTIVATIONS:
            return own
        away = shape.saved * sketch[OFFLOADED]
        return Passes(
            own.forward + seconds_beside_block(away, own.forward, self.hardware),
            own.backward + seconds_beside_block(away, own.backward, self.hardware),
        )

    def _sharding_adds(
        self,
        candidate: Candidate,
        placed: Placed,
        sketch: Sketch,
        shape: Shape,
        count: int,
        passes: Passes,
    ) -> float:
        """Seconds that FSDP's messages add to a step, in as many as the rank has blocks."""
        group = placed.groups["fsdp"]
        units = max(1, round(sketch[BLOCKS] / placed.pp))
        elements = shape.parameters * (sketch["fsdp", "elements"] + sketch["efsdp", "elements"])
        sent = (placed.fsdp - 1) / placed.fsdp * elements
        gather = seconds("all_gather", self.element * sent, group, self.hardware, units)
        reduce = seconds("reduce_scatter", self.message * sent, group, self.hardware, units)

        gathers_again = candidate.settings[RESHARD] and placed.pp == 1
        times = count if gathers_again else 1
        added = times * self._beside(gather, passes.forward, units)
        added += times * self._beside(reduce, passes.backward, units)
        if gathers_again:
            added += times * self._beside(gather, passes.backward, units)
        return added

    def _copies_add(
        self, candidate: Candidate, placed: Placed, sketch: Sketch, shape: Shape, passes: Passes
    ) -> float:
        """Seconds that the sums of gradients over copies add to a step."""
        group = placed.groups["dp_replicate"]
        trained = sum(sketch[axis, "trained"] / n for axis, n in placed.shards.items())
        share = 2 * (placed.copies - 1) / placed.copies
        sent = share * self.message * shape.parameters * trained
        took = seconds("all_reduce", sent, group, self.hardware)
        if candidate.settings[ZERO]:
            # Half of it is the gather of updated weights, after the backward.
            return took / 2 + self._beside(took / 2, passes.backward, BUCKETS)
        return self._beside(took, passes.backward, BUCKETS)

    def _beside(self, took: float, computing: float, parts: int) -> float:
        """What messages in so many parts, which travel beside computing, add to it."""
        exposed = max(took / parts, took - computing)
        return exposed + self.hardware.compute.contention * (took - exposed)

    # Memory ---------------------------------------------------------------------------------------

    def _kept(self, candidate: Candidate, placed: Placed, sketch: Sketch, count: int) -> float:
        """Bytes that a rank with all blocks keeps of parameters, gathered ones included."""
        settings, element, master = candidate.settings, self.element, self.master
        kept = 0.0
        for axis, ranks in placed.shards.items():
            kept += sketch[axis, "kept"] / ranks
        if settings[OFFLOAD] not in OF_STATES:
            kept += _states(candidate, placed, sketch)

        elements = sketch["fsdp", "elements"] + sketch["efsdp", "elements"]
        if placed.fsdp == 1:
            copies = element * elements if element < master else 0.0
            return kept + copies
        if placed.pp > 1 or not settings[RESHARD]:
            kept += element * elements
            if count > 1:  # whole gradients are summed up
                kept += master * (1 - 1 / placed.fsdp) * elements
            return kept
        # The messages with three units of parameters and with one of gradients.
        return kept + (3 * element + master) * elements / sketch[BLOCKS]


def _activations(candidate: Candidate, sketch: Sketch, shape: Shape) -> float:
    """Bytes of activations on the fullest rank."""
    in_flight = shape.held - 1  # besides the microbatch that computes
    if candidate.settings[OFFLOAD] in OF_ACTIVATIONS:
        # Of what blocks save, copies under way are on the device, and what stays.
        stays = shape.saved * (sketch[SAVED] - sketch[OFFLOADED])
        return in_flight * stays + sketch[OFFLOADING_PEAK]
    # Microbatches in flight have what they saved, and one of them all that is alive.
    one = max(sketch[PEAK] - sketch[SAVED] * (1 - shape.saved), 0.0)
    return in_flight * shape.saved * sketch[SAVED] + one


def _states(candidate: Candidate, placed: Placed, sketch: Sketch) -> float:
    """Bytes of the optimizer's states of all blocks, on a rank."""
    states = sum(sketch[axis, "states"] / ranks for axis, ranks in placed.shards.items())
    return states / placed.copies if candidate.settings[ZERO] else states
