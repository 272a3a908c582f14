"""Seconds of a step, by part: arithmetic over the work of its blocks; of a pipeline by simulating
its schedule."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from meshtrain.config.schema import OptimizerSection
from meshtrain.foresight.collective import Group, seconds
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.offload import (
    seconds_beside_block,
    seconds_beside_update,
    state_visits,
)
from meshtrain.foresight.parameters import compute_size, first_part, master_size
from meshtrain.foresight.schedules import built
from meshtrain.foresight.work import Pass, Product, Work, of_each, over_shards, shard_counts
from meshtrain.layout import Layout
from meshtrain.optim.groups import update_bytes, update_flops
from meshtrain.parallel.ddp import BUCKET_BYTES
from meshtrain.parallel.fsdp import MIN_UNIT_SIZE
from meshtrain.parallel.sharding import ParameterSpec, optimizer_shard
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.schedule import NAMES as SCHEDULES
from meshtrain.pipeline.simulate import simulate

# of a schedule that is simulated whole; of longer ones the steady state is extrapolated
MOST_ACTIONS = 4_000
# stage -> seconds of its forward, input gradient and weight gradient
StageCosts = tuple[tuple[float, ...], ...]
NAMES = {  # resource that computing may wait for -> its name for people
    "products": "products of matrices",
    "attention": "attention",
    "traffic": "memory traffic",
    "launch": "kernel launches",
    "host": "copies to the host's memory and back",
}
COPIES_OF_STATES = "copies of optimizer states"  # part of a step: what they add to the update


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How the ranks of a layout, placed on hosts, run a step."""

    layout: Layout
    schedule: Schedule | None = None  # of a pipeline
    bounds: Sequence[tuple[int, int]] = ()  # the range of blocks [first, end) of each stage
    microbatches: int = 1  # per rank, without a schedule
    handed_on: float = 0.0  # bytes that a stage sends to the next one per microbatch
    precision: str = "bfloat16"
    compiled: bool = False  # whether blocks are compiled that can be
    # FSDP gathers and reduces for every forward and backward, instead of once per step
    gathers_again: bool = False
    message_size: int = 4  # bytes per gradient element when gradients are summed over data ranks
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    # each copy over `dp_replicate` updates a part and gathers the others' (ZeRO-1)
    shards_optimizer: bool = False
    # optimizer states come from the host's memory for an update, and go back
    states_on_host: bool = False
    # how files divide the model's tensors, for an optimizer that updates matrix by matrix
    stored_as: Mapping[str, Any] = field(default_factory=dict)
    tokens: float = 0.0  # of the whole step on all ranks, for the throughput
    flops: float = 0.0  # ... for MFU; 0: not known


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
        resource = max(self.spent, key=self.spent.__getitem__)
        # Computing counts by its resources, all other parts as a whole.
        others = {
            name: part for name, part in self.parts.items() if name not in ("forward", "backward")
        }
        part = max(others, key=others.__getitem__)
        without = f"{part} ({self.seconds - others[part]:.3g} s without it)"
        if others[part] > self.spent[resource]:
            return without
        if others[part] == 0:
            return NAMES[resource]
        return f"{NAMES[resource]}; next: {without}"


# Computing ----------------------------------------------------------------------------------------


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
    """Costs of a block's three passes for one microbatch: forward, input gradient, weight
    gradient."""

    costs: tuple[Cost, ...]

    @cached_property
    def passes(self) -> tuple[float, ...]:
        """Seconds of each pass."""
        return tuple(cost.total() for cost in self.costs)

    @property
    def forward(self) -> float:
        """Seconds of the forward."""
        return self.passes[0]

    @property
    def backward(self) -> float:
        """Seconds of both gradients."""
        return self.passes[1] + self.passes[2]


def cost(
    work: Pass, layout: Layout, hardware: Hardware, precision: str, compiled: bool = False
) -> Cost:
    """Cost of a pass in `precision`, of a block that is compiled if it can be. `launch` is the time
    by which the CPU takes longer to launch the kernels than they run."""
    compute = hardware.compute
    spent = Cost()
    if work.products:
        spent["products"] = product_seconds(work.products, hardware, precision)
    spent["attention"] = work.attention_flops / (hardware.flops(precision) * compute.attention)
    moved, operators = work.moved, work.operators
    if compiled and work.fused_moved is not None and work.fused_operators is not None:
        moved, operators = work.fused_moved, work.fused_operators
    spent["traffic"] = moved / _memory_rate(hardware)
    # Kernels that were launched run while the CPU launches the next ones.
    launching = operators * compute.launch
    running = spent.total() if compute.asynchronous else 0.0
    spent["launch"] = max(0.0, launching - running)
    for send in work.sends:
        group = Group.of(layout, send.axis)
        spent[send.axis] += seconds(send.kind, send.nbytes, group, hardware, send.times)
    return spent


def product_seconds(products: Sequence[Product], hardware: Hardware, precision: str) -> float:
    """A product whose smallest side is `edge` reaches half of the rate of large ones."""
    took = 0.0
    for product in products:
        small = hardware.compute.edge / min(product.m, product.n, product.k)
        rate = _product_rate(hardware, product.precision or precision)
        took += product.flops * (1 + small) / rate
    return took


def _product_rate(hardware: Hardware, precision: str) -> float:
    """FLOP/s of large matrix products."""
    return hardware.flops(precision) * hardware.compute.matmul


def _memory_rate(hardware: Hardware) -> float:
    """Bytes/s of operators that read and write memory."""
    return hardware.compute.hbm * 1e9 * hardware.compute.stream


def block_costs(
    works: Sequence[Work],
    layout: Layout,
    hardware: Hardware,
    precision: str,
    compiled: bool = False,
    deferred: bool = False,
) -> list[BlockCost]:
    """Costs of each block for one microbatch.

    Args:
        precision, compiled: see `cost`.
        deferred: the schedule computes weight gradients later, so that no message travels beside
            them.
    """

    def of_block(work: Work) -> BlockCost:
        costs = []
        for one in work.passes:
            spent = cost(one, layout, hardware, precision, compiled)
            if not deferred:
                _hide_messages(spent, one, layout, hardware, precision)
            costs.append(spent)
        if work.offloaded:
            _add_host_copies(costs, work, hardware, deferred)
        return BlockCost(tuple(costs))

    return of_each(works, of_block)


def _hide_messages(
    spent: Cost, work: Pass, layout: Layout, hardware: Hardware, precision: str
) -> None:
    """Takes from the cost of a pass what its messages do not add, as products run beside them."""
    for send in work.sends:
        group = Group.of(layout, send.axis)
        sending = seconds(send.kind, send.nbytes, group, hardware, send.times)
        overlapped = min(sending, product_seconds(send.beside, hardware, precision))
        # Both share the device, and slow each other down.
        spent[send.axis] -= (1 - hardware.compute.contention) * overlapped


def _add_host_copies(costs: Sequence[Cost], work: Work, hardware: Hardware, deferred: bool) -> None:
    """Adds what copies of saved tensors add to a block's forward, and those back to its backward.
    `deferred`: see `block_costs`."""
    forward, input_grad, weight_grad = costs
    backward = input_grad.total()
    if not deferred:
        backward += weight_grad.total()
    forward["host"] = seconds_beside_block(work.offloaded, forward.total(), hardware)
    input_grad["host"] = seconds_beside_block(work.offloaded, backward, hardware)


# Pipelines ----------------------------------------------------------------------------------------


def stage_costs(costs: Sequence[BlockCost], bounds: Sequence[tuple[int, int]]) -> StageCosts:
    """Costs of each stage. `bounds`: see `StepPlan`."""
    stages = []
    for first, end in bounds:
        passes_of_blocks = [cost.passes for cost in costs[first:end]]
        stages.append(tuple(map(sum, zip(*passes_of_blocks, strict=True))))
    return tuple(stages)


def makespan(schedule: Schedule, costs: StageCosts, transfer: float = 0) -> float:
    """Simulated seconds of all microbatches. `transfer`: seconds of a message to a stage on another
    rank. A named schedule is built anew for its number of microbatches; the actions that it carries
    are not used."""
    if schedule.name not in SCHEDULES:
        return _simulated(schedule, costs, transfer)
    return _named_makespan(
        schedule.name,
        schedule.ranks,
        schedule.microbatches,
        schedule.stages_per_rank,
        costs,
        transfer,
    )


def _simulated(schedule: Schedule, costs: StageCosts, transfer: float) -> float:
    forward, input_grad, weight_grad = zip(*costs, strict=True)
    return simulate(schedule, forward, input_grad, weight_grad, transfer).makespan


@lru_cache(maxsize=4096)
def _named_makespan(
    name: str,
    ranks: int,
    microbatches: int,
    per_rank: int,
    costs: StageCosts,
    transfer: float,
) -> float:
    actions = 2 * microbatches * ranks * per_rank
    if microbatches < 4 * ranks or actions <= MOST_ACTIONS:
        return _simulated(built(name, ranks, microbatches, per_rank), costs, transfer)
    # In its steady state a schedule repeats itself every `ranks` microbatches: extrapolate from two
    # short ones with the same remainder.
    few = microbatches % ranks + 2 * ranks
    shorter = _named_makespan(name, ranks, few, per_rank, costs, transfer)
    longer = _named_makespan(name, ranks, few + ranks, per_rank, costs, transfer)
    return shorter + (longer - shorter) * (microbatches - few) / ranks


def _work_of_ranks(schedule: Schedule, costs: StageCosts) -> list[list[float]]:
    """Seconds of the three passes of all stages of each rank, for one microbatch."""
    work = [[0.0] * 3 for _ in range(schedule.ranks)]
    for rank, passes in zip(schedule.placement, costs, strict=True):
        for i, took in enumerate(passes):
            work[rank][i] += took
    return work


# A step -------------------------------------------------------------------------------------------


def step_time(works: Sequence[Work], plan: StepPlan, hardware: Hardware) -> StepTime:
    """Time of a step in which each rank does `works`, or its stages' part of them."""
    layout = plan.layout
    share = _largest_share(works, plan, hardware)
    forward, backward = _computing(share)
    messages = _Messages(layout, hardware)
    if layout.size("fsdp") > 1:
        messages.of_fsdp(share, plan)
    if layout.size("dp_replicate") > 1:
        messages.of_copies(share, plan)

    parts = {
        "forward": sum(forward[name] for name in NAMES),
        "backward": sum(backward[name] for name in NAMES),
    }
    for axis in (*forward, *backward):
        if axis not in NAMES:
            parts[axis] = forward[axis] + backward[axis]
    parts["idle of pp"] = share.idle
    parts |= messages.added
    parts["update"] = _update_seconds(share.works, plan, hardware)
    if plan.states_on_host:
        visits = state_visits(
            share.works, layout, plan.precision, plan.optimizer, plan.shards_optimizer
        )
        added = seconds_beside_update(visits, parts["update"], hardware)
        parts[COPIES_OF_STATES] = added
    parts = {name: part for name, part in parts.items() if part}

    total = sum(parts.values())
    peak = layout.world_size * hardware.flops(plan.precision)
    return StepTime(
        total,
        parts,
        messages.hidden,
        spent={name: forward[name] + backward[name] for name in NAMES},
        sent=messages.sent,
        tokens_per_s=plan.tokens / total,
        mfu=plan.flops / (total * peak) if plan.flops else None,
    )


@dataclass(frozen=True)
class _Share:
    """What one rank computes in a step."""

    works: Sequence[Work]
    costs: Sequence[BlockCost]
    microbatches: int
    idle: float = 0.0  # seconds in which it waits for other ranks of the pipeline


def _largest_share(works: Sequence[Work], plan: StepPlan, hardware: Hardware) -> _Share:
    """The share of the pipeline rank with most work."""
    layout, schedule = plan.layout, plan.schedule
    deferred = schedule is not None and schedule.splits_backward
    costs = block_costs(works, layout, hardware, plan.precision, plan.compiled, deferred)
    if schedule is None:
        return _Share(works, costs, plan.microbatches)
    stages = stage_costs(costs, plan.bounds)
    of_ranks = [sum(passes) for passes in _work_of_ranks(schedule, stages)]
    busiest = max(range(schedule.ranks), key=of_ranks.__getitem__)
    message = seconds("p2p", plan.handed_on, Group.of(layout, "pp"), hardware)
    busy = schedule.microbatches * of_ranks[busiest]
    own_works: list[Work] = []
    own_costs: list[BlockCost] = []
    for stage in schedule.stages_of(busiest):
        first, end = plan.bounds[stage]
        own_works += works[first:end]
        own_costs += costs[first:end]
    idle = makespan(schedule, stages, message) - busy
    return _Share(own_works, own_costs, schedule.microbatches, idle)


def _computing(share: _Share) -> tuple[Cost, Cost]:
    """Costs of all forwards and of all backwards of a step."""
    forward, backward = Cost(), Cost()
    for block, count in Counter(share.costs).items():  # blocks of a kind share one BlockCost
        of_forward, of_input_grad, of_weight_grad = block.costs
        forward.add(of_forward, share.microbatches * count)
        backward.add(of_input_grad, share.microbatches * count)
        backward.add(of_weight_grad, share.microbatches * count)
    return forward, backward


def _update_seconds(works: Sequence[Work], plan: StepPlan, hardware: Hardware) -> float:
    """Seconds of the optimizer's update: its traffic, and its products of matrices."""
    updates = of_each(works, lambda work: _update_of_block(work, plan))
    nbytes = sum(update.nbytes for update in updates)
    flops = sum(update.flops for update in updates)
    took = nbytes / _memory_rate(hardware)
    if flops:
        # Matrices are multiplied in bfloat16, whatever blocks compute with, or in float64.
        precision = "float64" if plan.precision == "float64" else "bfloat16"
        took += flops / _product_rate(hardware, precision)
    return took


class _Update(NamedTuple):
    """What a rank does to update the parameters of a block."""

    nbytes: float  # that it reads and writes
    flops: float  # of products of matrices


def _update_of_block(work: Work, plan: StepPlan) -> _Update:
    layout = plan.layout
    shards = shard_counts(layout)
    stage_ranks = layout.world_size // layout.size("pp")
    nbytes = flops = 0.0
    for parameter in work.parameters:
        if not parameter.trained:
            continue
        # A rank moves the bytes of the elements that it updates.
        updated = parameter.over(shards[parameter.axis])
        if plan.shards_optimizer:
            updated = optimizer_shard(updated, layout)
        unsharded = ParameterSpec(parameter.name, parameter.shape)
        share = first_part(updated) / max(1, first_part(unsharded))
        nbytes += share * update_bytes(plan.optimizer, unsharded, master_size(plan.precision))
        # The ranks of a stage share the products, which take whole matrices.
        whole = ParameterSpec(parameter.name, parameter.whole or parameter.shape)
        flops += update_flops(plan.optimizer, whole, plan.stored_as) / stage_ranks
    return _Update(nbytes, flops)


class _Messages:
    """Gathers and reductions over data ranks, by axis: seconds added to the step, seconds hidden
    beside computing, and bytes sent."""

    def __init__(self, layout: Layout, hardware: Hardware) -> None:
        self.layout = layout
        self.hardware = hardware
        self.added = Cost()
        self.hidden = Cost()
        self.sent = Cost()

    def of_fsdp(self, share: _Share, plan: StepPlan) -> None:
        """FSDP gathers parameters before each block and reduces their gradients after it."""
        axis = "dp_shard" if self.layout.size("cp") == 1 else "fsdp"
        times = share.microbatches if plan.gathers_again else 1
        forward = [cost.forward for cost in share.costs]
        backward = [cost.backward for cost in reversed(share.costs)]
        elements = [work.elements for work in share.works]

        parameters = over_shards(share.works, self.layout)
        from_others = [shards.others for shards in parameters]
        ahead, again = gathers_of_units(elements, from_others)
        size = compute_size(plan.precision)
        gathered = [size * n for n in ahead]
        self._add(axis, "all_gather", gathered, forward, times)
        if plan.gathers_again:
            gathered = [size * n for n in reversed(again)]
            self._add(axis, "all_gather", gathered, backward, times)

        trained = over_shards(share.works, self.layout, trained=True)
        to_others = [shards.others for shards in trained]
        after, _ = gathers_of_units(elements, to_others)
        reduced = [plan.message_size * n for n in reversed(after)]
        self._add(axis, "reduce_scatter", reduced, backward, times)

    def of_copies(self, share: _Share, plan: StepPlan) -> None:
        """DDP sums gradients over copies, bucket by bucket; with ZeRO-1 each copy gets a part of
        the sum, and its part of the updated parameters is gathered."""
        copies = self.layout.size("dp_replicate")
        sent = (copies - 1) / copies  # bytes of a scatter or a gather per byte
        backward = [cost.backward for cost in reversed(share.costs)]
        summed = [shards.own for shards in over_shards(share.works, self.layout, trained=True)]
        scattered = [sent * plan.message_size * n for n in reversed(summed)]
        buckets = buckets_of_blocks(share.works, self.layout, master_size(plan.precision))
        if not plan.shards_optimizer:
            # An all-reduce is a scatter and a gather.
            both = [2 * nbytes for nbytes in scattered]
            self._add("dp_replicate", "all_reduce", both, backward, messages=buckets)
            return
        self._add("dp_replicate", "reduce_scatter", scattered, backward, messages=buckets)
        # The optimizer gathers what it has updated, in the precision of the weights, a bucket after
        # the other, and nothing overlaps with that.
        updated = sent * master_size(plan.precision) * sum(summed)
        self._add("dp_replicate", "all_gather", [updated], [0.0], messages=[sum(buckets)])

    def _add(
        self,
        axis: str,
        kind: str,
        nbytes: Sequence[float],
        computing: Sequence[float],
        times: int = 1,
        messages: Sequence[int] = (),
    ) -> None:
        """Adds the messages of all blocks, which overlap with their computing. `nbytes`,
        `computing`, `messages`: bytes, seconds and number of messages (1, if it is not given) of
        each block, in the order in which blocks compute."""
        group = Group.of(self.layout, "fsdp" if axis == "dp_shard" else axis)
        counts = messages or [1] * len(nbytes)
        takes = [
            seconds(kind, n, group, self.hardware, count) if n else 0.0
            for n, count in zip(nbytes, counts, strict=True)
        ]
        if kind == "all_gather":  # a block waits for its parameters
            end = one_behind_the_other(takes, computing)
        else:  # a sum waits for its block
            end = one_behind_the_other(computing, takes)
        exposed = end - sum(computing)
        overlapped = max(0.0, sum(takes) - exposed)
        slowed = self.hardware.compute.contention * overlapped
        self.added[axis] += times * (exposed + slowed)
        self.hidden[axis] += times * (overlapped - slowed)
        self.sent[axis] += times * sum(nbytes)


def buckets_of_blocks(works: Sequence[Work], layout: Layout, size: int) -> list[int]:
    """How many buckets of gradients DDP fills with each block, in the order of the backward.
    `size`: bytes per element."""
    shards = shard_counts(layout)
    full: list[int] = []
    open_bucket = 0  # bytes
    for work in reversed(works):
        filled = 0
        for parameter in reversed(work.parameters):
            if not parameter.trained:
                continue
            nbytes = size * first_part(parameter.over(shards[parameter.axis]))
            if open_bucket + nbytes > BUCKET_BYTES:
                filled += open_bucket > 0
                open_bucket = 0
            open_bucket += nbytes
        full.append(filled)
    if full and open_bucket:
        full[-1] += 1
    return full


def gathers_of_units(
    parameters: Sequence[int], others: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Elements that FSDP gathers before each block in the forward (and reduces after it in the
    backward), and elements that it gathers again before each block in the backward.

    `parameters`: elements of each block; `others`: those that come from other ranks. Small blocks
    are gathered with the next ones; small ones at the end belong to the model's own unit, which is
    gathered first and kept, as is the last unit."""
    ahead = [0] * len(parameters)
    again = [0] * len(parameters)
    first = size = sent = 0  # of the unit so far: its first block, its elements, those to gather
    last = None  # block of the last unit
    for i, (own, from_others) in enumerate(zip(parameters, others, strict=True)):
        size += own
        sent += from_others
        if size >= MIN_UNIT_SIZE:
            ahead[first] = sent
            again[i] = sent
            last = i
            first, size, sent = i + 1, 0, 0
    ahead[0] += sent
    if last is not None:
        again[last] = 0
    return ahead, again


def one_behind_the_other(first: Sequence[float], second: Sequence[float]) -> float:
    """Seconds of two overlapping queues, where item i of the second waits for item i of the first:
    blocks wait for their gathered parameters, reductions of gradients wait for blocks."""
    end = 0.0
    for ready, takes in zip(accumulate(first), second, strict=True):
        end = max(end, ready) + takes
    return end
