"""What the blocks of a model take together, from traces of a few small layouts.

What a block computes, sends and keeps is affine in 1 / cp and in 1 / ep, so a few layouts say it of
all. What recomputation and gathering again change is taken from one layout for all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from meshtrain.config import Config, spec_of
from meshtrain.errors import InputError
from meshtrain.foresight.blocks import works_of
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.parameters import held_bytes, master_size
from meshtrain.foresight.space import CONTEXT, MICRO, RECOMPUTE, REGATHER, SEQUENCE, Candidate
from meshtrain.foresight.steptime import cost, product_seconds
from meshtrain.foresight.work import BlockMemory, Work
from meshtrain.layout import Layout
from meshtrain.parallel.activation_offload import LEAST
from meshtrain.parallel.host_link import LIMIT
from meshtrain.parallel.parallelize import is_single_layer
from meshtrain.pipeline.partition import blocks_of

# Of a candidate, what changes the work of its blocks besides sizes.
OF_BLOCKS = (RECOMPUTE, REGATHER, CONTEXT, SEQUENCE)
# The passes of a Work: a sketch has the sum of the two backwards.
PASSES = ("forward", "backward", "backward")

Key = tuple[str, ...]
# Seconds of computing.
FORWARD = ("forward",)
BACKWARD = ("backward",)
# Bytes of activations: saved for the backward, and most at once.
SAVED = ("saved",)
PEAK = ("peak",)
# The same with parallel.offload: what leaves the device, and most at once of a block.
OFFLOADED = ("offloaded",)
OFFLOADING_PEAK = ("offloading peak",)
BLOCKS = ("blocks",)  # their number
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
        layout = candidate.layout
        tp = layout.size("tp")
        cp = layout.size("cp")
        plain = candidate.changed({RECOMPUTE: "none", REGATHER: False})
        sketch = self._with_experts(plain, tp, layout.experts, compiled)

        # What changes by cp and by settings is traced with as few ranks as show it.
        few_experts = 2 if self.has_experts else 1
        traced = partial(self._traced, tp=min(tp, 2), ep=few_experts, compiled=compiled)
        if cp > 1:
            whole = traced(plain, cp=1)
            halved = traced(plain, cp=2)
            split = whole.toward(halved, _way_to(cp, 1, 2))
            sketch = sketch.changed_like(whole, split)
        for key in (RECOMPUTE, REGATHER):
            value = candidate.settings[key]
            if value != plain.settings[key]:
                before = traced(plain, cp=1)
                after = traced(plain.changed({key: value}), cp=1)
                sketch = sketch.changed_like(before, after)
        return sketch

    def _with_experts(self, candidate: Candidate, tp: int, ep: int, compiled: bool) -> Sketch:
        """For `ep` ranks of experts: from two, and as many as the model takes of 16."""
        traced = partial(self._traced, candidate, tp=tp, cp=1, compiled=compiled)
        if ep <= 2:
            return traced(ep=ep)
        two = traced(ep=2)
        for many in (16, 8, 4):
            try:
                more = traced(ep=many)
            except InputError:  # the model has no experts for so many
                continue
            return two.toward(more, _way_to(ep, 2, many))
        return two

    def _traced(self, candidate: Candidate, *, tp: int, cp: int, ep: int, compiled: bool) -> Sketch:
        """Traces a layout once, and remembers it, also if the model refuses it."""
        key = tp, cp, ep, candidate.settings[MICRO], of_blocks(candidate), compiled
        if key not in self._traces:
            # Experts lie on ranks of data beyond those of cp and tp.
            ranks_of_data = max(1, ep // (cp * tp))
            sizes = {"dp_shard": ranks_of_data, "cp": cp, "tp": tp}
            layout = Layout(sizes).with_experts(ep)
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
        blocks_of_kind = Counter(id(work) for work in works)
        for kind, work in kinds.items():
            of_block = self._passes(work, layout, compiled)
            of_block.update(self._parameters(work, layout))
            total.add(of_block, times=blocks_of_kind[kind])
        total.update(self._activations(works))
        total[BLOCKS] = len(works)
        return total

    def _activations(self, works: Sequence[Work]) -> Sketch:
        """Bytes of activations of all blocks."""
        numbers = Sketch()
        saved_before = 0.0
        blocks = blocks_of(spec_of(self.config).meta)
        for block, work in zip(blocks, works, strict=True):
            saved = work.memory.saved
            alive = _most_alive(work.memory)
            # When a block runs, what those before it have saved is there, too.
            numbers[PEAK] = max(numbers[PEAK], saved_before + alive)

            # With offloading all of that is away, but for copies under way to the host and back.
            away = max(saved - 2 * LIMIT, 0.0)
            numbers[OFFLOADING_PEAK] = max(numbers[OFFLOADING_PEAK], alive - away)
            if saved > SEVERAL * LEAST and not is_single_layer(block):
                numbers[OFFLOADED] += saved
            saved_before += saved
        numbers[SAVED] = saved_before
        return numbers

    def _passes(self, work: Work, layout: Layout, compiled: bool) -> Sketch:
        """Seconds and messages of a block's passes."""
        hardware = self.hardware
        precision = self.config.train.precision
        numbers = Sketch()
        for name, one in zip(PASSES, work.passes, strict=True):
            # Its computing alone: what messages take depends on the candidate's layout.
            without_sends = replace(one, sends=())
            computing = cost(without_sends, layout, hardware, precision, compiled)
            numbers[(name,)] += computing.total()

            for send in one.sends:
                beside = product_seconds(send.beside, hardware, precision)
                message = (name, send.axis, send.kind)
                numbers[*message, "bytes"] += send.nbytes
                numbers[*message, "times"] += send.times
                numbers[*message, "beside"] += beside
        return numbers

    def _parameters(self, work: Work, layout: Layout) -> Sketch:
        """Of a block: by the axis that shards them, as if they were not sharded."""
        precision = self.config.train.precision
        size = master_size(precision)
        numbers = Sketch()
        for parameter in work.parameters:
            axis = parameter.axis
            unsharded = parameter.over(1)
            held = held_bytes(unsharded, layout, precision, self.config.optimizer)
            numbers[axis, "kept"] += held.weights + held.gradients
            numbers[axis, "states"] += held.states
            numbers[axis, "elements"] += held.weights / size
            numbers[axis, "trained"] += held.gradients / size
        return numbers


def _way_to(ranks: int, first: int, second: int) -> float:
    """Where the value of what is affine in 1 / ranks lies between that for `first` ranks (0) and
    that for `second` (1), or beyond them."""
    return (1 / first - 1 / ranks) / (1 / first - 1 / second)


def _most_alive(memory: BlockMemory) -> float:
    """Most bytes of activations at once in a block's forward and backward."""
    backward = max(live.activations for live in memory.backward)
    return max(memory.forward, backward)
