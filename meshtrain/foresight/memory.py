"""Memory of a rank: a record of it by part, and the peak of a step by arithmetic over the work of
its blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from meshtrain.config import Config
from meshtrain.foresight.offload import state_visits
from meshtrain.foresight.parameters import HeldBytes, compute_size, held_bytes, master_size
from meshtrain.foresight.schedules import Held, HeldOfRank, held_by_ranks
from meshtrain.foresight.units import Units
from meshtrain.foresight.work import Live, Work, of_each, shard_counts
from meshtrain.layout import Layout
from meshtrain.optim.host_states import most_on_device
from meshtrain.parallel.host_link import LIMIT
from meshtrain.pipeline.actions import Schedule

TIGHT = 0.92  # share of a device's memory above which the verdict is "tight"

# Names of parts, here and in traces.
WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer state"
REFERENCE = "reference weights"  # of `train.reference`
COPIES = "16-bit copies"  # of the weights, on ranks whose weights FSDP does not gather
GATHERED = "gathered weights"
ACTIVATIONS = "activations"
UPDATE = "update"  # tensors of the optimizer's update: with `parallel.offload` also states


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank by part: `resident` between two steps, `parts` at the peak."""

    resident: dict[str, float]
    parts: dict[str, float]
    moment: str
    pp: int = 0  # index of the rank on that axis
    host: float = 0  # bytes of the host's memory, with `parallel.offload`
    compiled: bool = False  # whether the blocks are compiled
    # by blocks: arithmetic over what each takes; traced: every operator of the step was counted
    source: str = "by blocks"

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.parts.values())

    def verdict(self, room: float) -> str:
        """Whether the peak fits into `room` bytes."""
        if self.total > room:
            return "does not fit"
        if self.total > TIGHT * room:
            return "tight"
        return "fits"


def of_ranks(
    config: Config,
    layout: Layout,
    works: Sequence[Work],
    schedule: Schedule | None,
    bounds: Sequence[tuple[int, int]],
    microbatches: int,
    handed_on: float = 0,
    hands_on_first: bool = False,
) -> list[RankMemory]:
    """Memory of each rank of the pipeline. `bounds`: the range of blocks [first, end) of each
    stage; `handed_on`: bytes that it sends to the next one per microbatch; `hands_on_first`:
    whether the last backward of a stage computes weight gradients after it has sent its input's."""
    if schedule is None:
        return [_Rank(config, layout, [works]).memory((Held(1),), microbatches)]
    ranks = []
    for rank, most_held in enumerate(held_by_ranks(schedule)):
        numbers = schedule.stages_of(rank)
        stages = [works[slice(*bounds[number])] for number in numbers]
        ends = []
        for number, stage in zip(numbers, stages, strict=True):
            ends.append(handed_on * _kept_ends(number, schedule, stage))
        own = _Rank(config, layout, stages, ends, schedule.splits_backward)
        cases = [own.memory(held, microbatches) for held in dict.fromkeys(most_held)]
        if hands_on_first and any(own.offloaded):
            # What has come back from the host for weight gradients stays until these are computed.
            putting_off = _Rank(config, layout, stages, ends, defers=True)
            for number in numbers:
                if number > 0:
                    last = tuple(Held(float(other == number)) for other in numbers)
                    cases.append(putting_off.memory(last, microbatches))
        fullest = max(cases, key=lambda memory: memory.total)
        host = max(memory.host for memory in cases)
        ranks.append(replace(fullest, pp=rank, host=host))
    return ranks


def _kept_ends(number: int, schedule: Schedule, stage: Sequence[Work]) -> int:
    """How many of its ends a stage keeps for each forward in flight, beside what its blocks save:
    what it has handed on, from which its backward will start, and what it has received, if its
    first block's copy of that is on the host."""
    hands_on = number < schedule.stages - 1
    has_received = number > 0 and stage[0].offloaded > 0
    return hands_on + has_received


class _Rank:
    """A rank's memory at each moment of a step, by arithmetic over its blocks.

    Of activations, with S_i what block i saves, and f_i and b_i the most that is alive in its
    forward and in its backward, there are

        S_0 + ... + S_(i-1) + f_i     in its forward
        S_0 + ... + S_(i-1) + b_i     in its backward: the blocks behind it have freed theirs

    and all of S of its stage once more for each other forward in flight, which waits for its
    backward. Of a block that offloads, S is what stays on the device, and copies under way count in
    f and b. What is there of weights and gradients follows from the shapes of parameters, and from
    what FSDP does with them (parallel/fsdp.py).
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        stages: Sequence[Sequence[Work]],
        ends: Sequence[float] = (0,),
        defers: bool = False,
    ) -> None:
        """`ends`: bytes that each stage keeps beside what its blocks save; `defers`: weight
        gradients are computed later, for which a backward keeps what they need."""
        self.stages = stages
        self.works = [work for stage in stages for work in stage]
        self.units = Units.of(self.works, layout)
        self.compute = compute_size(config.train.precision)
        self.master = master_size(config.train.precision)
        self.keeps_gathered = layout.size("pp") > 1 or not config.parallel.reshard_after_forward
        # Buckets of gradients, in which DDP sums them, are there from the first step on.
        self.has_buckets = layout.size("dp_replicate") > 1 and not self.units.sharded
        held = _held(config, layout, self.works)
        self.resident: dict[str, float] = {
            WEIGHTS: held.weights,
            GRADIENTS: held.gradients,
            STATES: held.states,
        }
        # Optimizer states may lie on the host: an update brings some at a time.
        self.host = self.updating = 0
        if config.parallel.offloads_optimizer:
            visits = state_visits(
                self.works,
                layout,
                config.train.precision,
                config.optimizer,
                config.parallel.shard_optimizer,
            )
            self.resident[STATES] = 0
            self.host = sum(map(sum, visits))
            self.updating = max(map(most_on_device, visits), default=0)
        models = 1
        if config.train.reference is not None:
            models = 2
            self.resident[REFERENCE] = held.weights
        if self.compute < self.master:
            self.resident[COPIES] = models * self.compute * self.units.whole
        # Of each stage, what its blocks save one after another, and what a forward in flight keeps.
        self.offloaded = [sum(work.offloaded for work in stage) for stage in stages]
        self.saved: list[list[float]] = []
        self.waiting: list[float] = []
        # What its blocks from one on leave for weight gradients.
        self.left: list[list[float]] = []
        for stage, kept_ends in zip(stages, ends, strict=True):
            saved = list(accumulate((work.memory.saved for work in stage), initial=0.0))
            self.saved.append(saved)
            self.waiting.append(saved[-1] + kept_ends)
            left = [work.memory.left if defers else 0.0 for work in stage]
            self.left.append(list(accumulate(reversed(left), initial=0.0))[::-1])

    def memory(self, held: HeldOfRank, microbatches: int) -> RankMemory:
        """At the fullest moment."""
        # While all microbatches are in flight, none has made gradients.
        in_flight = max(stage.forwards for stage in held)
        cases = [(held, in_flight < microbatches)]
        if in_flight >= microbatches > 1:
            fewer = tuple(Held(max(stage.forwards - 1, 0), stage.backwards) for stage in held)
            cases.append((fewer, True))
        fullest = {**self.resident, UPDATE: self.updating}
        words = "update"
        for now_held, has_gradients in cases:
            for moment, parts in self._moments(now_held, has_gradients):
                if sum(parts.values()) > sum(fullest.values()):
                    fullest, words = parts, moment
        return RankMemory(
            {part: size for part, size in self.resident.items() if size},
            {part: size for part, size in fullest.items() if size},
            words,
            host=self._on_host(held),
        )

    def _on_host(self, held: HeldOfRank) -> float:
        """Bytes of the host's memory: states, and what forwards in flight have sent."""
        sent = 0.0
        for stage, offloaded in zip(held, self.offloaded, strict=True):
            sent += stage.forwards * offloaded
        return self.host + sent

    def _moments(
        self, held: HeldOfRank, has_gradients: bool
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields moments of a step, and the parts of memory in each. `has_gradients`: of an earlier
        microbatch."""
        everything = 0.0
        for count, waiting, left in zip(held, self.waiting, self.left, strict=True):
            everything += count.forwards * waiting + count.backwards * left[0]
        # A head that computes the loss sums its gradients over the forwards in flight.
        sums = under_way = 0.0
        if sum(count.forwards for count in held) > 1:
            sums = self.works[-1].memory.sums
            # A backward follows the forward of another microbatch, whose last blocks are leaving.
            last_blocks = [work.offloaded for stage in self.stages for work in stage[-2:]]
            under_way = min(sum(last_blocks), LIMIT)
        first = 0
        for stage, saved, left in zip(self.stages, self.saved, self.left, strict=True):
            # What it has handed on stays until its backward is done.
            others = max(everything - saved[-1], 0.0)
            for i in ends_of_runs(stage):
                for moment, parts in self._moments_of(stage[i], first + i, has_gradients):
                    behind = 0.0 if moment == "forward" else left[i + 1] + under_way
                    parts[ACTIVATIONS] += others + saved[i] + behind
                    parts[GRADIENTS] += 0.0 if stage[i].memory.sums else sums
                    yield f"{moment} of {stage[i].name}", parts
            first += len(stage)

    def _moments_of(
        self, work: Work, i: int, has_gradients: bool
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields the moments of the rank's block i, without what other blocks save."""
        units, memory = self.units, work.memory

        def parts(gathered: float, gradients: float, activations: float) -> dict[str, float]:
            return {
                **self.resident,
                GATHERED: self.compute * gathered,
                GRADIENTS: gradients,
                ACTIVATIONS: activations,
            }

        kept = self._gradients(len(self.works), has_gradients)
        # Its weights, also in the message that has brought them, and the message with the next.
        gathered = units.sharded if self.keeps_gathered else units.in_forward(i)
        yield "forward", parts(gathered, kept, memory.forward)

        kept = self._gradients(i + 1, has_gradients)
        if self.keeps_gathered or not units.sharded:
            for live in memory.backward:
                yield "backward", parts(units.sharded, kept + self._made(i, live), live.activations)
            return

        # A message with gradients is freed with the next one: first that of the block behind it.
        gathered = units.in_backward(i)
        summed = self.master * units.summed_behind(i)
        passed_on = 0.0
        experts = units.blocks[i].experts_trained
        experts_done = False
        for live in memory.backward:
            made = self._made(i, live) - passed_on
            yield "backward", parts(gathered, kept + summed + made, live.activations)
            if experts_done:  # the gradients that were copied into their message are freed
                passed_on = self.compute * experts
            elif experts and live.made >= experts:
                experts_done = True
                gathered = units.behind_experts(i)
                summed = self.master * experts

        summed = (self.compute + self.master) * units.summed(i)
        yield "sum of gradients", parts(units.ahead(i), kept + summed, 0.0)

    def _made(self, i: int, live: Live) -> float:
        """Bytes of weight gradients that the backward of block i has made and not yet passed on."""
        if not self.units.sharded:
            return live.temporary
        # FSDP takes those of a unit together. Experts that it does not shard come first, and are
        # added up at once.
        added = self.units.blocks[i].whole_trained
        made = self.compute * max(live.made - added, 0) + self.works[i].memory.sums
        return made + live.temporary if added else made

    def _gradients(self, end: int, has_gradients: bool) -> float:
        """Bytes of gradients kept between microbatches, while blocks before `end` are still to make
        those of the first."""
        units = self.units
        if self.has_buckets:
            return self.resident[GRADIENTS]
        if has_gradients and self.keeps_gathered:
            # Whole ones, which are summed over the ranks once per step.
            return self.master * units.trained
        if has_gradients:
            return self.resident[GRADIENTS]
        return self.master * units.kept_from(end)


def _held(config: Config, layout: Layout, works: Sequence[Work]) -> HeldBytes:
    """What the rank keeps of these blocks between steps."""
    shards = shard_counts(layout)

    def of_block(work: Work) -> HeldBytes:
        own = HeldBytes()
        for parameter in work.parameters:
            own += held_bytes(
                parameter.over(shards[parameter.axis]),
                layout,
                config.train.precision,
                config.optimizer,
                config.parallel.shard_optimizer,
            )
        return own

    return sum(of_each(works, of_block), HeldBytes())


def ends_of_runs(works: Sequence[Work]) -> Iterator[int]:
    """Yields the first two and the last two of each run of blocks of a kind. Between them memory
    grows or shrinks steadily; a block at an end may have no neighbour's message beside it."""
    for i in range(len(works)):
        before, behind = works[max(i - 2, 0) : i], works[i + 1 : i + 3]
        is_inside = len(before) == len(behind) == 2
        if not (is_inside and all(work is works[i] for work in (*before, *behind))):
            yield i
