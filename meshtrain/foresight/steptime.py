"""Seconds of a step, by part: arithmetic over the work of its blocks, put on a clock by the simulated schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate

from meshtrain.foresight.collective import Group, seconds
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.work import Pass, Work
from meshtrain.layout import Layout
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.schedule import NAMES as SCHEDULES
from meshtrain.pipeline.schedule import build
from meshtrain.pipeline.simulate import simulate

MIN_UNIT_SIZE = 2**21  # of `parallel.fsdp`: elements of a block that FSDP gathers by itself
MOST_ACTIONS = 4_000  # of a schedule that is simulated whole; of a longer one the steady state is extrapolated
Seconds = dict[str, float]  # by name
StageCosts = tuple[tuple[float, ...], ...]  # of each stage, seconds of its forward, input gradient, weight gradient
PASSES = ("forward", "input_grad", "weight_grad")
NAMES = {  # of what may limit a step
    "products": "products of matrices",
    "attention": "attention",
    "traffic": "memory traffic",
    "launch": "kernel launches",
}


@dataclass(frozen=True)
class StepTime:
    """A step on the rank of the pipeline with most work. Numbers are seconds.

    Attributes:
        parts: name -> what it adds to the step; they sum to `seconds`.
        hidden: name -> what runs beside computing and adds nothing.
        spent: what the seconds of computing went into; of a kernel the time of its slowest resource.
        sent: axis -> bytes that the rank sends over data ranks: parameters and gradients.
    """

    seconds: float
    parts: dict[str, float]
    hidden: dict[str, float]
    spent: dict[str, float]
    sent: dict[str, float] = field(default_factory=dict)
    tokens_per_s: float = 0.0  # of all ranks together
    mfu: float | None = None

    @property
    def limit(self) -> str:
        """`products of matrices; next: tp (0.381 s without it)`."""
        others = {name: part for name, part in self.parts.items() if name not in ("forward", "backward")}
        first = max(self.spent, key=self.spent.__getitem__)
        name = max(others, key=others.__getitem__)
        if others[name] > self.spent[first]:
            return f"{name} ({self.seconds - others[name]:.3g} s without it)"
        more = f"; next: {name} ({self.seconds - others[name]:.3g} s without it)" if others[name] else ""
        return NAMES[first] + more


@dataclass(frozen=True)
class Cost:
    """Seconds of passes: of computing, by what it goes into, and of each axis over which it waits for messages."""

    spent: Seconds = field(default_factory=dict)
    sent: Seconds = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.spent.values()) + sum(self.sent.values())

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(add(self.spent, other.spent), add(self.sent, other.sent))

    def times(self, n: float) -> "Cost":
        spent, sent = ({name: n * x for name, x in of.items()} for of in (self.spent, self.sent))
        return Cost(spent, sent)


def add(a: Seconds, b: Seconds) -> Seconds:
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in (*a, *b)}


@dataclass(frozen=True, eq=False)
class BlockCost:
    """A block's passes for one microbatch."""

    forward: Cost
    input_grad: Cost
    weight_grad: Cost

    @cached_property
    def backward(self) -> Cost:
        return self.input_grad + self.weight_grad

    @property
    def each(self) -> tuple[Cost, Cost, Cost]:
        return self.forward, self.input_grad, self.weight_grad

    @cached_property
    def passes(self) -> tuple[float, ...]:
        """Seconds of the three."""
        return tuple(cost.seconds for cost in self.each)

    @property
    def seconds(self) -> float:
        return sum(self.passes)


def cost(work: Pass, layout: Layout, hardware: Hardware, precision: str, product: str | None = None) -> Cost:
    """A pass in `precision`, its products in `product` if that is another. Kernels wait for the slower of GPU and CPU.
    What the CPU takes longer to launch them counts as `launch`."""
    compute, peak = hardware.compute, hardware.flops(precision)
    spent, sent = dict[str, float](), dict[str, float]()
    if work.products:
        rate = hardware.flops(product or precision) * compute.matmul
        spent["products"] = sum(p.flops * (1 + compute.edge / min(p.m, p.n, p.k)) for p in work.products) / rate
    spent["attention"] = work.attention_flops / (peak * compute.attention)
    spent["traffic"] = work.moved / (compute.hbm * 1e9 * compute.stream)
    spent["launch"] = max(0.0, work.operators * compute.launch - sum(spent.values()))
    for send in work.sends:
        took = seconds(send.kind, send.nbytes, Group.of(layout, send.axis), hardware)
        sent[send.axis] = sent.get(send.axis, 0.0) + took
    return Cost(spent, sent)


def block_costs(
    works: Sequence[Work], layout: Layout, hardware: Hardware, precision: str, product: str | None = None
) -> list[BlockCost]:
    """What each block costs for one microbatch. `precision`, `product`: see `cost`."""
    costs = {  # blocks of a kind are the same one
        id(work): BlockCost(*(cost(getattr(work, name), layout, hardware, precision, product) for name in PASSES))
        for work in {id(work): work for work in works}.values()
    }
    return [costs[id(work)] for work in works]


def stage_costs(costs: Sequence[BlockCost], bounds: Sequence[tuple[int, int]]) -> StageCosts:
    """Of each stage. `bounds`: see `of`."""
    stages = [[cost.passes for cost in costs[first:end]] for first, end in bounds]
    return tuple(tuple(map(sum, zip(*passes, strict=True))) for passes in stages)


def makespan(schedule: Schedule, costs: StageCosts, transfer: float = 0) -> float:
    """Seconds of all microbatches, simulated. `transfer`: from a stage to one on another rank. Of a named schedule the
    actions are made here; those that it has are not looked at."""
    if schedule.name in SCHEDULES:
        many = schedule.microbatches
        return _named_makespan(schedule.name, schedule.ranks, many, schedule.stages_per_rank, costs, transfer)
    return simulate(schedule, *zip(*costs, strict=True), transfer).makespan  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _named_makespan(name: str, ranks: int, many: int, per_rank: int, costs: StageCosts, transfer: float) -> float:
    if 4 * ranks <= many and many * ranks * per_rank * 2 > MOST_ACTIONS:  # the steady state is extrapolated
        few = many % ranks + 2 * ranks
        two, three = (_named_makespan(name, ranks, n, per_rank, costs, transfer) for n in (few, few + ranks))
        return two + (three - two) * (many - few) / ranks
    schedule = build(name, ranks=ranks, microbatches=many, stages_per_rank=per_rank)
    return simulate(schedule, *zip(*costs, strict=True), transfer).makespan  # type: ignore[arg-type]


def least_makespan(schedule: Schedule, costs: StageCosts, transfer: float = 0) -> float:
    """Seconds below which `makespan` is not, in any order that has this schedule's placement and kinds of actions: each
    rank's work, the filling before it, and the emptying behind it."""
    own = [[0.0, 0.0, 0.0] for _ in range(schedule.ranks)]
    ahead: dict[int, tuple[float, ...]] = {}  # of what is before each rank's first stage
    before, sent, last = (0.0, 0.0, 0.0), 0.0, schedule.placement[0]
    for rank, passes in zip(schedule.placement, costs, strict=True):
        sent += transfer * (rank != last)
        ahead.setdefault(rank, (*before, sent))
        own[rank] = [a + b for a, b in zip(own[rank], passes, strict=True)]
        before, last = (before[0] + passes[0], before[1] + passes[1], before[2] + passes[2]), rank
    bounds = []
    for rank, (filling, input_grads, weight_grads, way) in ahead.items():
        work, emptying = schedule.microbatches * sum(own[rank]), input_grads + weight_grads
        if schedule.splits_backward:  # weight gradients may be computed while the ranks before empty
            shortest = schedule.microbatches * sum(own[rank][:2]) + input_grads + costs[0][2] + way
            bounds.append(filling + way + max(work, shortest))
        else:
            bounds.append(filling + way + work + emptying + way)
    return max(bounds)


def of(
    works: Sequence[Work],
    layout: Layout,
    schedule: Schedule | None,
    hardware: Hardware,
    *,
    precision: str = "bfloat16",
    product: str | None = None,
    microbatches: int = 1,
    bounds: Sequence[tuple[int, int]] = (),
    handed_on: float = 0.0,
    gathers_again: bool = False,
    shards_optimizer: bool = False,
    message_size: int = 4,
    update_bytes: float = 28.0,
    tokens: float = 0.0,
    flops: float = 0.0,
    clock: Callable[[Schedule, StageCosts, float], float] = makespan,
) -> StepTime:
    """A step of blocks with this work on a placed layout.

    Args:
        schedule, bounds: of a pipeline, and the blocks of each stage, from its first to the one after its last.
        microbatches: of a rank, without a schedule.
        handed_on: bytes that a stage gives to the next for a microbatch.
        gathers_again: FSDP gathers parameters for every forward and backward and sums gradients after each, not once.
        shards_optimizer: copies of `dp_replicate` update a part each, and gather the others' (ZeRO-1).
        message_size: bytes of an element of a gradient when it is summed over data ranks.
        update_bytes: that the optimizer reads and writes for an element.
        tokens, flops: of the whole step of all ranks, for `tokens_per_s` and `mfu`.
        clock: of the pipeline's microbatches; `least_makespan` for seconds below which the step is not.
    """
    costs = block_costs(works, layout, hardware, precision, product)
    many, idle, blocks = microbatches, 0.0, list(range(len(works)))
    if schedule is not None:
        many, stages = schedule.microbatches, stage_costs(costs, bounds)
        work = [0.0] * schedule.ranks
        for rank, passes in zip(schedule.placement, stages, strict=True):
            work[rank] += sum(passes)
        rank = max(range(schedule.ranks), key=work.__getitem__)
        idle = clock(schedule, stages, seconds("p2p", handed_on, Group.of(layout, "pp"), hardware)) - work[rank] * many
        blocks = [block for stage in schedule.stages_of(rank) for block in range(*bounds[stage])]
    own, parameters = [costs[i] for i in blocks], [works[i].parameters for i in blocks]
    kinds = [(cost, many * own.count(cost)) for cost in {id(cost): cost for cost in own}.values()]
    forward = sum((cost.forward.times(n) for cost, n in kinds), Cost())
    backward = sum((cost.backward.times(n) for cost, n in kinds), Cost())
    size = 8 if precision == "float64" else 4
    sizes = (size if precision in ("float32", "float64") else 2, message_size, size if shards_optimizer else 0)
    summed, hidden, sent = _data_parallel(own, parameters, many, layout, hardware, gathers_again, sizes)
    updated = sum(parameters) / layout.size("fsdp") / (layout.size("dp_replicate") if shards_optimizer else 1)
    update = updated * update_bytes * size / 4
    parts = {
        "forward": sum(forward.spent.values()),
        "backward": sum(backward.spent.values()),
        **add(forward.sent, backward.sent),
        "idle of pp": idle,
        **summed,
        "update": update / (hardware.compute.hbm * 1e9 * hardware.compute.stream),
    }
    parts = {name: part for name, part in parts.items() if part}
    in_all = sum(parts.values())
    mfu = flops / (in_all * layout.world_size * hardware.flops(precision)) if flops else None
    return StepTime(in_all, parts, hidden, add(forward.spent, backward.spent), sent, tokens / in_all, mfu)


def _data_parallel(
    own: Sequence[BlockCost],
    parameters: Sequence[int],
    many: int,
    layout: Layout,
    hardware: Hardware,
    frees: bool,
    sizes: tuple[int, int, int],
) -> tuple[Seconds, Seconds, dict[str, float]]:
    """By axis what gathers and sums over data ranks add to a step, what of them is hidden, and the bytes they send.
    `sizes`: bytes of an element that is gathered, of one that is summed, and with ZeRO-1 of one that was updated."""
    shards, copies = layout.size("fsdp"), layout.size("dp_replicate")
    bare, hidden, sent = dict[str, float](), dict[str, float](), dict[str, float]()
    forward, backward = [c.forward.seconds for c in own], [c.backward.seconds for c in reversed(own)]

    def count(axis: str, kind: str, nbytes: Sequence[float], computing: Sequence[float], times: int) -> None:
        group = Group.of(layout, "fsdp" if axis == "dp_shard" else axis)
        messages = [seconds(kind, n, group, hardware) if n else 0.0 for n in nbytes]
        waited = (gathered_ahead if kind == "all_gather" else summed_behind)(messages, computing)
        bare[axis] = bare.get(axis, 0.0) + times * waited
        hidden[axis] = hidden.get(axis, 0.0) + times * max(0.0, sum(messages) - waited)
        sent[axis] = sent.get(axis, 0.0) + times * sum(nbytes)

    if shards > 1:
        axis, times = "dp_shard" if layout.size("cp") == 1 else "fsdp", many if frees else 1
        gathered, summed = (size * (shards - 1) / shards for size in sizes[:2])
        ahead, again = gathers_of_units(parameters)
        count(axis, "all_gather", [gathered * n for n in ahead], forward, times)
        if frees:
            count(axis, "all_gather", [gathered * n for n in reversed(again)], backward, times)
        count(axis, "reduce_scatter", [summed * n for n in reversed(ahead)], backward, times)
    if copies > 1:
        part, updated = (copies - 1) / copies / shards, sizes[2]
        kind, times = ("reduce_scatter", 1) if updated else ("all_reduce", 2)
        count("dp_replicate", kind, [times * part * sizes[1] * n for n in reversed(parameters)], backward, 1)
        if updated:  # after the update, with nothing beside it
            count("dp_replicate", "all_gather", [part * updated * sum(parameters)], [0.0], 1)
    return bare, hidden, sent


def gathers_of_units(parameters: Sequence[int]) -> tuple[list[int], list[int]]:
    """Elements that FSDP gathers before each block in the forward (and sums after it in the backward), and again before
    each block in the backward. Small blocks join the next ones, those at the end stay with the model, which is gathered
    first and stays, as does the last unit."""
    ahead, again = [0] * len(parameters), [0] * len(parameters)
    first = size = 0
    ends: list[int] = []
    for i, n in enumerate(parameters):
        size += n
        if size >= MIN_UNIT_SIZE:
            ahead[first], again[i] = size, size
            ends.append(i)
            first, size = i + 1, 0
    ahead[0] += size
    if ends:
        again[ends[-1]] = 0
    return ahead, again


def gathered_ahead(messages: Sequence[float], computing: Sequence[float]) -> float:
    """Seconds that blocks wait for their parameters, which are sent one block after the other while others compute."""
    end = 0.0
    for arrived, work in zip(accumulate(messages), computing, strict=True):
        end = max(end, arrived) + work
    return end - sum(computing)


def summed_behind(messages: Sequence[float], computing: Sequence[float]) -> float:
    """Seconds that sums of gradients go on after the last block of a backward, beside whose blocks they are sent."""
    end = 0.0
    for computed, message in zip(accumulate(computing), messages, strict=True):
        end = max(end, computed) + message
    return end - sum(computing)
