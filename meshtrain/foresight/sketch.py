"""What the blocks of a model take together, from traces of a few small layouts.

What a block computes, sends and keeps is affine in 1 / cp and in 1 / ep, so a few layouts say it of
all. What recomputation and gathering again change is taken from one layout for all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from meshtrain.config import Config, spec_of
from meshtrain.errors import InputError
from meshtrain.foresight.blocks import works_of
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.parameters import held_bytes, master_size
from meshtrain.foresight.space import CONTEXT, MICRO, RECOMPUTE, REGATHER, SEQUENCE, Candidate
from meshtrain.foresight.steptime import NAMES, cost
from meshtrain.foresight.work import Work
from meshtrain.layout import Layout
from meshtrain.parallel.activation_offload import LEAST
from meshtrain.parallel.host_link import LIMIT
from meshtrain.parallel.parallelize import is_single_layer
from meshtrain.pipeline.partition import blocks_of

# Of a candidate, what changes the work of its blocks besides sizes.
OF_BLOCKS = (RECOMPUTE, REGATHER, CONTEXT, SEQUENCE)
PASSES = ("forward", "backward", "backward")  # of the two backwards the sum

Key = tuple[str, ...]
FORWARD, BACKWARD = ("forward",), ("backward",)  # seconds of computing
SAVED, PEAK = ("saved",), ("peak",)  # bytes of activations: saved for the backward, most at once
BLOCKS = ("blocks",)  # their number
# Bytes of activations with parallel.offload: that leave the device, and most at once of a block.
OFFLOADED, OFFLOADING_PEAK = ("offloaded",), ("offloading peak",)
SEVERAL = 16  # tensors that a block saves: small ones stay on the device


class Sketch(dict[Key, float]):
    """Numbers of all blocks together, for one microbatch; 0 where there is none.

    | key | value |
    | --- | --- |
    | the names above | see there |
    | pass, axis, kind, "bytes" | what messages send |
    | pass, axis, kind, "times" | how many messages |
    | pass, axis, kind, "beside" | seconds of the products beside which they travel |
    | axis, "kept" | bytes of weights and gradients that this axis shards |
    | axis, "states" | bytes of the optimizer's states |
    | axis, "elements" | number of weights |
    | axis, "trained" | ... that have a gradient |
    """

    def __missing__(self, key: Key) -> float:
        return 0.0

    def add(self, other: "Sketch", times: int) -> None:
        for key, value in other.items():
            self[key] += times * value

    def messages(self) -> Iterator[tuple[str, str, str]]:
        """Yields pass, axis and kind of the messages that send anything."""
        for key, value in self.items():
            if key[-1] == "bytes" and value > 0:
                during, axis, kind, _ = key
                yield during, axis, kind

    def toward(self, other: "Sketch", way: float) -> "Sketch":
        """What is `way` of the way from this one to another: between them, or beyond."""
        numbers = Sketch(self)
        for key in self | other:
            numbers[key] += way * (other[key] - self[key])
        return numbers

    def changed_like(self, before: "Sketch", after: "Sketch") -> "Sketch":
        """This one, if it changes like `before` to `after`: by the same factors. What `before` does
        not have, it gets in proportion to its computing."""
        size = self[FORWARD] / before[FORWARD]
        numbers = Sketch(self)
        for key, value in after.items():
            if before[key]:
                numbers[key] *= value / before[key]
            else:
                numbers[key] += size * value
        return numbers


def of_blocks(candidate: Candidate) -> tuple[Any, ...]:
    """Its values of OF_BLOCKS."""
    return tuple(candidate.settings[key] for key in OF_BLOCKS)


class Sketches:
    """Sketches of a config's model for candidates. They raise InputError: the model refuses to be
    split."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        self.config = config
        self.hardware = hardware
        self.has_experts = spec_of(config).plan("ep_plan") is not None
        self._traces: dict[tuple[Any, ...], Sketch | InputError] = {}

    def of(self, candidate: Candidate, compiled: bool) -> Sketch:
        """`compiled`: whether blocks are compiled that can be."""
        layout, settings = candidate.layout, candidate.settings
        plain = candidate.changed({RECOMPUTE: "none", REGATHER: False})
        sketch = self._with_experts(plain, layout.size("tp"), layout.experts, compiled)

        # What changes by cp and by settings is traced with as few ranks as show it.
        traced = partial(
            self._traced,
            tp=min(layout.size("tp"), 2),
            ep=2 if self.has_experts else 1,
            compiled=compiled,
        )
        cp = layout.size("cp")
        if cp > 1:
            one, two = traced(plain, cp=1), traced(plain, cp=2)
            # 1 / cp is 1 for the first, and 1 / 2 for the second.
            sketch = sketch.changed_like(one, one.toward(two, 2 * (1 - 1 / cp)))
        for key in (RECOMPUTE, REGATHER):
            if settings[key] != plain.settings[key]:
                changed = plain.changed({key: settings[key]})
                sketch = sketch.changed_like(traced(plain, cp=1), traced(changed, cp=1))
        return sketch

    def _with_experts(self, candidate: Candidate, tp: int, ep: int, compiled: bool) -> Sketch:
        """For `ep` ranks of experts: from two, and as many as the model takes of 16."""
        if ep <= 2:
            return self._traced(candidate, tp=tp, cp=1, ep=ep, compiled=compiled)
        two = self._traced(candidate, tp=tp, cp=1, ep=2, compiled=compiled)
        for many in (16, 8, 4):
            try:
                more = self._traced(candidate, tp=tp, cp=1, ep=many, compiled=compiled)
            except InputError:
                continue
            return two.toward(more, (1 / 2 - 1 / ep) / (1 / 2 - 1 / many))
        return two

    def _traced(self, candidate: Candidate, *, tp: int, cp: int, ep: int, compiled: bool) -> Sketch:
        key = tp, cp, ep, candidate.settings[MICRO], of_blocks(candidate), compiled
        if key not in self._traces:
            ranks_of_data = max(1, ep // (cp * tp))
            layout = Layout({"dp_shard": ranks_of_data, "cp": cp, "tp": tp}).with_experts(ep)
            try:
                works = works_of(candidate.apply(self.config), layout)
                self._traces[key] = self._sum(works, layout, compiled)
            except InputError as error:
                self._traces[key] = error
        traced = self._traces[key]
        if isinstance(traced, InputError):
            raise traced
        return traced

    def _sum(self, works: Sequence[Work], layout: Layout, compiled: bool) -> Sketch:
        """Over all blocks, of which those of a kind share one Work."""
        total = Sketch()
        kinds = {id(work): work for work in works}
        for work in kinds.values():
            of_kind = self._passes(work, layout, compiled)
            of_kind.update(self._parameters(work, layout))
            total.add(of_kind, times=sum(other is work for other in works))

        # When a block runs, what those before it have saved is there, too.
        saved_before = [0.0, *accumulate(work.memory.saved for work in works)]
        lives = []
        alone = []  # of a block by itself, of whose saved tensors copies under way are there
        for before, work in zip(saved_before, works, strict=False):
            backward = max(live.activations for live in work.memory.backward)
            alive = max(work.memory.forward, backward)
            lives.append(before + alive)
            alone.append(alive - max(work.memory.saved - 2 * LIMIT, 0.0))
        total[SAVED], total[PEAK] = saved_before[-1], max(lives)
        total[OFFLOADED], total[OFFLOADING_PEAK] = self._offloaded(works), max(alone)
        total[BLOCKS] = len(works)
        return total

    def _offloaded(self, works: Sequence[Work]) -> float:
        """Bytes of activations that blocks can offload."""
        offloaded = 0.0
        for block, work in zip(blocks_of(spec_of(self.config).meta), works, strict=True):
            saved = work.memory.saved
            if saved > SEVERAL * LEAST and not is_single_layer(block):
                offloaded += saved
        return offloaded

    def _passes(self, work: Work, layout: Layout, compiled: bool) -> Sketch:
        """Seconds and messages of a block's passes."""
        hardware, precision = self.hardware, self.config.train.precision
        numbers = Sketch()
        for during, one in zip(PASSES, work.passes, strict=True):
            computing = cost(replace(one, sends=()), layout, hardware, precision, compiled)
            numbers[during,] += sum(computing[resource] for resource in NAMES)
            for send in one.sends:
                products = replace(one, sends=(), products=send.beside)
                beside = cost(products, layout, hardware, precision)
                numbers[during, send.axis, send.kind, "bytes"] += send.nbytes
                numbers[during, send.axis, send.kind, "times"] += send.times
                numbers[during, send.axis, send.kind, "beside"] += beside["products"]
        return numbers

    def _parameters(self, work: Work, layout: Layout) -> Sketch:
        """Of a block: by the axis that shards them, as if they were not sharded."""
        precision, optimizer = self.config.train.precision, self.config.optimizer
        size = master_size(precision)
        numbers = Sketch()
        for parameter in work.parameters:
            held = held_bytes(parameter.over(1), layout, precision, optimizer)
            numbers[parameter.axis, "kept"] += held.weights + held.gradients
            numbers[parameter.axis, "states"] += held.states
            numbers[parameter.axis, "elements"] += held.weights / size
            numbers[parameter.axis, "trained"] += held.gradients / size
        return numbers
