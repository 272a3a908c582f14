"""Seconds of a step, by part: arithmetic over the work of its blocks; of a pipeline by simulating
its schedule."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate

from meshtrain.foresight.collective import Group, seconds
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.work import Pass, Work, over_shards
from meshtrain.layout import Layout
from meshtrain.parallel.fsdp import MIN_UNIT_SIZE
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.schedule import NAMES as SCHEDULES
from meshtrain.pipeline.schedule import build
from meshtrain.pipeline.simulate import simulate

# of a schedule that is simulated whole; of longer ones the steady state is extrapolated
MOST_ACTIONS = 4_000
# stage -> seconds of its forward, input gradient and weight gradient
StageCosts = tuple[tuple[float, ...], ...]
PASSES = ("forward", "input_grad", "weight_grad")
NAMES = {  # resource that computing may wait for -> its name for people
    "products": "products of matrices",
    "attention": "attention",
    "traffic": "memory traffic",
    "launch": "kernel launches",
}


@dataclass(frozen=True)
class StepTime:
    """Time of a step on the pipeline rank with most work, in seconds.

    Attributes:
        parts: name -> what it adds to the step; they sum to `seconds`.
        hidden: name -> what overlaps with computing and adds nothing.
        spent: resource -> seconds of computing that went into it.
        sent: axis -> bytes of parameters and gradients that the rank sends over data ranks.
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
        others = {
            name: part for name, part in self.parts.items() if name not in ("forward", "backward")
        }
        first = max(self.spent, key=self.spent.__getitem__)
        name = max(others, key=others.__getitem__)
        if others[name] > self.spent[first]:
            return f"{name} ({self.seconds - others[name]:.3g} s without it)"
        more = (
            f"; next: {name} ({self.seconds - others[name]:.3g} s without it)"
            if others[name]
            else ""
        )
        return NAMES[first] + more


class Cost(dict[str, float]):
    """Seconds by resource (`NAMES`) and by axis over which computing waits for messages."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, other: "Cost", times: int) -> None:
        for name, took in other.items():
            self[name] += times * took

    def total(self) -> float:
        return sum(self.values())


@dataclass(frozen=True, eq=False)
class BlockCost:
    """Costs of a block's three passes for one microbatch, in the order of `PASSES`."""

    costs: tuple[Cost, ...]

    @cached_property
    def passes(self) -> tuple[float, ...]:
        """Seconds of each pass."""
        return tuple(cost.total() for cost in self.costs)


def cost(
    work: Pass, layout: Layout, hardware: Hardware, precision: str, product: str | None = None
) -> Cost:
    """Cost of a pass in `precision`, with its matrix products in `product` if that is given.
    `launch` is the time by which the CPU takes longer to launch the kernels than they run."""
    compute, spent = hardware.compute, Cost()
    if work.products:
        rate = hardware.flops(product or precision) * compute.matmul
        spent["products"] = (
            sum(p.flops * (1 + compute.edge / min(p.m, p.n, p.k)) for p in work.products) / rate
        )
    spent["attention"] = work.attention_flops / (hardware.flops(precision) * compute.attention)
    spent["traffic"] = work.moved / (compute.hbm * 1e9 * compute.stream)
    spent["launch"] = max(
        0.0, work.operators * compute.launch - spent.total() * compute.asynchronous
    )
    for send in work.sends:
        spent[send.axis] += seconds(send.kind, send.nbytes, Group.of(layout, send.axis), hardware)
    return spent


def block_costs(
    works: Sequence[Work],
    layout: Layout,
    hardware: Hardware,
    precision: str,
    product: str | None = None,
) -> list[BlockCost]:
    """Costs of each block for one microbatch. `precision`, `product`: see `cost`."""
    costs = {  # blocks of a kind share one Work
        id(work): BlockCost(
            tuple(cost(getattr(work, n), layout, hardware, precision, product) for n in PASSES)
        )
        for work in {id(work): work for work in works}.values()
    }
    return [costs[id(work)] for work in works]


def stage_costs(costs: Sequence[BlockCost], bounds: Sequence[tuple[int, int]]) -> StageCosts:
    """Costs of each stage. `bounds`: see `of`."""
    stages = [[cost.passes for cost in costs[first:end]] for first, end in bounds]
    return tuple(tuple(map(sum, zip(*passes, strict=True))) for passes in stages)


def makespan(schedule: Schedule, costs: StageCosts, transfer: float = 0) -> float:
    """Simulated seconds of all microbatches. `transfer`: seconds of a message to a stage on another
    rank. A named schedule is built anew for its number of microbatches; the actions that it carries
    are not used."""
    if schedule.name in SCHEDULES:
        many = schedule.microbatches
        return _named_makespan(
            schedule.name, schedule.ranks, many, schedule.stages_per_rank, costs, transfer
        )
    return _simulated(schedule, costs, transfer)


def _simulated(schedule: Schedule, costs: StageCosts, transfer: float) -> float:
    forward, input_grad, weight_grad = zip(*costs, strict=True)
    return simulate(schedule, forward, input_grad, weight_grad, transfer).makespan


@lru_cache(maxsize=4096)
def _named_makespan(
    name: str, ranks: int, many: int, per_rank: int, costs: StageCosts, transfer: float
) -> float:
    # extrapolate the steady state
    if 4 * ranks <= many and many * ranks * per_rank * 2 > MOST_ACTIONS:
        few = many % ranks + 2 * ranks
        two, three = (
            _named_makespan(name, ranks, n, per_rank, costs, transfer) for n in (few, few + ranks)
        )
        return two + (three - two) * (many - few) / ranks
    return _simulated(
        build(name, ranks=ranks, microbatches=many, stages_per_rank=per_rank), costs, transfer
    )


def least_makespan(schedule: Schedule, costs: StageCosts, transfer: float = 0) -> float:
    """A lower bound of `makespan` for any order of actions with this schedule's placement and kinds
    of actions: each rank's own work, the time to fill the pipeline before it, and to drain it
    afterwards."""
    own = [[0.0, 0.0, 0.0] for _ in range(schedule.ranks)]
    ahead: dict[
        int, tuple[float, ...]
    ] = {}  # rank -> seconds of the stages before its first one, and of messages
    before, sent, last = (0.0, 0.0, 0.0), 0.0, schedule.placement[0]
    for rank, passes in zip(schedule.placement, costs, strict=True):
        sent += transfer * (rank != last)
        ahead.setdefault(rank, (*before, sent))
        own[rank] = [a + b for a, b in zip(own[rank], passes, strict=True)]
        before, last = (before[0] + passes[0], before[1] + passes[1], before[2] + passes[2]), rank
    bounds = []
    for rank, (filling, input_grads, weight_grads, way) in ahead.items():
        work, emptying = schedule.microbatches * sum(own[rank]), input_grads + weight_grads
        # weight gradients may be computed while the ranks before it drain
        if schedule.splits_backward:
            shortest = schedule.microbatches * sum(own[rank][:2]) + input_grads + costs[0][2] + way
            bounds.append(filling + way + max(work, shortest))
        else:
            bounds.append(filling + way + work + emptying + way)
    return max(bounds)


def _busiest(schedule: Schedule, costs: StageCosts) -> tuple[int, float]:
    """The rank with most work, and its seconds per microbatch."""
    work = [0.0] * schedule.ranks
    for rank, passes in zip(schedule.placement, costs, strict=True):
        work[rank] += sum(passes)
    most = max(work)
    return work.index(most), most


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
    """Time of a step in which each rank does `works` on a layout with hosts.

    Args:
        schedule, bounds: of a pipeline; the range of blocks [first, end) of each stage.
        microbatches: per rank, without a schedule.
        handed_on: bytes that a stage sends to the next one per microbatch.
        gathers_again: FSDP gathers and reduces for every forward and backward, instead of once per
            step.
        shards_optimizer: each copy over `dp_replicate` updates a part and gathers the others'
            (ZeRO-1).
        message_size: bytes per gradient element when gradients are reduced over data ranks.
        update_bytes: bytes that the optimizer reads and writes per float32 element.
        tokens, flops: of the whole step on all ranks, for `tokens_per_s` and `mfu`.
        clock: seconds of a pipeline's microbatches; `least_makespan` makes the result a lower
            bound.
    """
    costs = block_costs(works, layout, hardware, precision, product)
    many, idle, blocks = microbatches, 0.0, list(range(len(works)))
    if schedule is not None:
        many, stages = schedule.microbatches, stage_costs(costs, bounds)
        rank, work = _busiest(schedule, stages)
        idle = (
            clock(schedule, stages, seconds("p2p", handed_on, Group.of(layout, "pp"), hardware))
            - work * many
        )
        blocks = [block for stage in schedule.stages_of(rank) for block in range(*bounds[stage])]
    own, own_works = [costs[i] for i in blocks], [works[i] for i in blocks]
    forward, backward = Cost(), Cost()
    for block, n in Counter(own).items():
        for total, block_pass in zip((forward, backward, backward), block.costs, strict=True):
            total.add(block_pass, many * n)
    size, copies = (
        8 if precision == "float64" else 4,
        layout.size("dp_replicate") if shards_optimizer else 1,
    )
    sizes = (
        size if precision in ("float32", "float64") else 2,
        message_size,
        size if shards_optimizer else 0,
    )
    summed, hidden, sent = _data_parallel(
        own, own_works, many, layout, hardware, gathers_again, sizes
    )
    update = sum(over_shards(own_works, layout, trained=True)[0]) / copies
    parts = {
        "forward": sum(map(forward.__getitem__, NAMES)),
        "backward": sum(map(backward.__getitem__, NAMES)),
        **{
            axis: forward[axis] + backward[axis]
            for axis in (*forward, *backward)
            if axis not in NAMES
        },
        "idle of pp": idle,
        **summed,
        "update": update
        * update_bytes
        * size
        / 4
        / (hardware.compute.hbm * 1e9 * hardware.compute.stream),
    }
    parts = {name: part for name, part in parts.items() if part}
    in_all, spent = sum(parts.values()), {name: forward[name] + backward[name] for name in NAMES}
    mfu = flops / (in_all * layout.world_size * hardware.flops(precision)) if flops else None
    return StepTime(in_all, parts, hidden, spent, sent, tokens / in_all, mfu)


def _data_parallel(
    own: Sequence[BlockCost],
    works: Sequence[Work],
    many: int,
    layout: Layout,
    hardware: Hardware,
    frees: bool,
    sizes: tuple[int, int, int],
) -> tuple[Cost, Cost, Cost]:
    """Gathers and reductions over data ranks, by axis: seconds added to the step, seconds hidden,
    and bytes sent. `sizes`: bytes per element of gathered parameters, of reduced gradients, and
    with ZeRO-1 of updated parameters."""
    shards, copies = layout.size("fsdp"), layout.size("dp_replicate")
    (parts, gathered), (own_trained, trained) = (
        over_shards(works, layout),
        over_shards(works, layout, trained=True),
    )
    bare, hidden, sent = Cost(), Cost(), Cost()
    forward, backward = [c.passes[0] for c in own], [sum(c.passes[1:]) for c in reversed(own)]

    def count(
        axis: str, kind: str, nbytes: Sequence[float], computing: Sequence[float], times: int
    ) -> None:
        group = Group.of(layout, "fsdp" if axis == "dp_shard" else axis)
        messages = [seconds(kind, n, group, hardware) if n else 0.0 for n in nbytes]
        waits = (messages, computing) if kind == "all_gather" else (computing, messages)
        waited = one_behind_the_other(*waits) - sum(computing)
        bare[axis] += times * waited
        hidden[axis] += times * max(0.0, sum(messages) - waited)
        sent[axis] += times * sum(nbytes)

    if shards > 1:
        axis, times = "dp_shard" if layout.size("cp") == 1 else "fsdp", many if frees else 1
        others = [whole - part for whole, part in zip(gathered, parts, strict=True)]
        ahead, again = gathers_of_units([work.parameters for work in works], others)
        count(axis, "all_gather", [sizes[0] * n for n in ahead], forward, times)
        if frees:
            count(axis, "all_gather", [sizes[0] * n for n in reversed(again)], backward, times)
        summed = [whole - part for whole, part in zip(trained, own_trained, strict=True)]
        ahead, _ = gathers_of_units([work.parameters for work in works], summed)
        count(axis, "reduce_scatter", [sizes[1] * n for n in reversed(ahead)], backward, times)
    if copies > 1:
        part, updated = (copies - 1) / copies, sizes[2]
        kind, times = ("reduce_scatter", 1) if updated else ("all_reduce", 2)
        count(
            "dp_replicate",
            kind,
            [times * part * sizes[1] * n for n in reversed(own_trained)],
            backward,
            1,
        )
        if updated:  # after the update: nothing overlaps with it
            count("dp_replicate", "all_gather", [part * updated * sum(own_trained)], [0.0], 1)
    return bare, hidden, sent


def gathers_of_units(
    parameters: Sequence[int], others: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Elements that FSDP gathers before each block in the forward (and reduces after it in the
    backward), and elements that it gathers again before each block in the backward.

    `parameters`: elements of each block; `others`: those that come from other ranks. Small blocks
    are gathered with the next ones; small ones at the end belong to the model's own unit, which is
    gathered first and kept, as is the last unit."""
    ahead, again = [0] * len(parameters), [0] * len(parameters)
    first = size = sent = 0
    ends: list[int] = []
    for i, (n, other) in enumerate(zip(parameters, others, strict=True)):
        size, sent = size + n, sent + other
        if size >= MIN_UNIT_SIZE:
            ahead[first], again[i] = sent, sent
            ends.append(i)
            first, size, sent = i + 1, 0, 0
    ahead[0] += sent
    if ends:
        again[ends[-1]] = 0
    return ahead, again


def one_behind_the_other(first: Sequence[float], second: Sequence[float]) -> float:
    """Seconds of two overlapping queues, where item i of the second waits for item i of the first:
    blocks wait for their gathered parameters, reductions of gradients wait for blocks."""
    end = 0.0
    for ready, takes in zip(accumulate(first), second, strict=True):
        end = max(end, ready) + takes
    return end
