"""Memory of a rank: a record of it by part, and an estimate by arithmetic over the work of its
blocks, as precise as a search needs it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from meshtrain.config import Config
from meshtrain.foresight.parameters import HeldBytes, compute_size, held_bytes, master_size
from meshtrain.foresight.work import Work, of_each, over_shards, shard_counts
from meshtrain.layout import Layout
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.schedule import NAMES, build, load, read_csv
from meshtrain.pipeline.simulate import simulate

TIGHT = 0.92  # share of a device's memory above which the verdict is "tight"

# Names of parts, here and in traces.
WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer state"
REFERENCE = "reference weights"  # of `train.reference`
COPIES = "16-bit copies"  # of the weights, on ranks whose weights FSDP does not gather
GATHERED = "gathered weights"
ACTIVATIONS = "activations"


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank by part: `resident` between two steps, `parts` at the peak."""

    resident: dict[str, float]
    parts: dict[str, float]
    moment: str
    pp: int = 0  # index of the rank on that axis
    compiled: bool = False  # whether the blocks are compiled
    # extended: from traces of fewer blocks, microbatches and stages; estimated: by arithmetic
    source: str = "traced"

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


def estimate(
    config: Config,
    layout: Layout,
    works: Sequence[Work],
    schedule: Schedule | None,
    bounds: Sequence[tuple[int, int]],
) -> RankMemory:
    """Memory of the fullest rank of the pipeline. `bounds`: the range of blocks [first, end) of
    each stage."""
    if schedule is None:
        return _estimate_rank(config, layout, works, in_flight=1)
    ranks = []
    for rank, held in enumerate(held_forwards(schedule)):
        stages = schedule.stages_of(rank)
        own = [work for stage in stages for work in works[slice(*bounds[stage])]]
        memory = _estimate_rank(config, layout, own, in_flight=held / len(stages))
        ranks.append(replace(memory, pp=rank))
    return max(ranks, key=lambda memory: memory.total)


def _estimate_rank(
    config: Config, layout: Layout, works: Sequence[Work], in_flight: float
) -> RankMemory:
    """`in_flight`: largest number of forwards of all these blocks whose backward is still to
    come."""
    held = _held(config, layout, works)
    resident: dict[str, float] = {
        WEIGHTS: held.weights,
        GRADIENTS: held.gradients,
        STATES: held.states,
    }
    has_reference = config.train.reference is not None
    if has_reference:
        resident[REFERENCE] = held.weights
    master = master_size(config.train.precision)
    compute = compute_size(config.train.precision)
    if layout.size("fsdp") == 1 and compute < master:
        models = 2 if has_reference else 1
        resident[COPIES] = models * held.weights // master * compute

    parts = dict(resident)
    if layout.size("fsdp") > 1:
        gathered = [shards.all for shards in over_shards(works, layout)]
        summed = [shards.all for shards in over_shards(works, layout, trained=True)]
        if config.parallel.reshard_after_forward and layout.size("pp") == 1:
            # While a block computes, the next one is gathered.
            gathered = sorted(gathered, reverse=True)[:2]
            summed = [max(summed)]
        parts[GATHERED] = sum(gathered) * compute
        parts["gathered gradients"] = sum(summed) * master

    saved, peak, moment = _peak_of_microbatch(works)
    # Each forward in flight has what its blocks save; one more is at its peak.
    parts[ACTIVATIONS] = max(in_flight - 1, 0) * saved + peak
    return RankMemory(resident, parts, moment, source="estimated")


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


def _peak_of_microbatch(works: Sequence[Work]) -> tuple[float, float, str]:
    """Of one microbatch that runs through these blocks and back: bytes that all of them save, the
    most bytes alive at once, and that moment."""
    saved, peak, moment = 0.0, 0.0, ""
    for work in works:
        in_forward = saved + work.peak_forward
        if in_forward >= peak:
            peak, moment = in_forward, f"forward of {work.name}"
        # In its backward the blocks behind it have freed what they saved.
        saved += work.saved
        in_backward = saved + work.peak_backward
        if in_backward >= peak:
            peak, moment = in_backward, f"backward of {work.name}"
    return saved, peak, moment


# Forwards in flight -------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def short_schedule(name: str, ranks: int, stages_per_rank: int | None) -> Schedule:
    """A schedule with as few microbatches as possible, to look up its placement of stages."""
    if name.endswith(".csv"):
        return read_csv(name, ranks=ranks)
    return build(name, ranks=ranks, microbatches=1, stages_per_rank=stages_per_rank)


def schedule_of(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> Schedule:
    """A schedule. A named one, which may be long, has only the actions of one microbatch; one from
    a file has them all, and the file's path as its name."""
    if name.endswith(".csv"):
        loaded = load(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        return replace(loaded, name=name)
    return replace(short_schedule(name, ranks, stages_per_rank), microbatches=microbatches)


def held_forwards(schedule: Schedule) -> tuple[float, ...]:
    """The largest number of stage forwards that each rank holds at once. Simulated; for many
    microbatches extrapolated from two simulations with fewer."""
    if schedule.name not in NAMES:
        return simulate(schedule).peak_activations
    name, ranks, per_rank = schedule.name, schedule.ranks, schedule.stages_per_rank
    few = 3 * ranks
    if schedule.microbatches <= 2 * few:
        return _simulated_forwards(name, ranks, per_rank, schedule.microbatches)
    with_few = _simulated_forwards(name, ranks, per_rank, few)
    with_twice = _simulated_forwards(name, ranks, per_rank, 2 * few)
    more = (schedule.microbatches - 2 * few) / few
    return tuple(
        twice + more * (twice - once) for once, twice in zip(with_few, with_twice, strict=True)
    )


@lru_cache(maxsize=4096)
def _simulated_forwards(name: str, ranks: int, per_rank: int, microbatches: int) -> tuple[int, ...]:
    schedule = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
    return simulate(schedule).peak_activations
