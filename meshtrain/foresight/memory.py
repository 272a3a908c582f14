"""Estimated memory of the fullest rank, by arithmetic over the work of its blocks: as precise as a
search needs it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from meshtrain.config import Config
from meshtrain.foresight.work import Work, over_shards
from meshtrain.layout import Layout
from meshtrain.optim.groups import state_specs
from meshtrain.parallel.sharding import ParameterSpec
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.schedule import NAMES, build, load, read_csv
from meshtrain.pipeline.simulate import simulate

# optimizer, size -> block -> bytes
_state_bytes_of: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
TIGHT = 0.92  # share of a device's memory above which the verdict is "tight"


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
        return (
            "does not fit"
            if self.total > room
            else "tight"
            if self.total > TIGHT * room
            else "fits"
        )


def of(
    config: Config,
    layout: Layout,
    works: Sequence[Work],
    schedule: Schedule | None,
    bounds: Sequence[tuple[int, int]],
) -> RankMemory:
    """Memory of the fullest rank of the pipeline. `bounds`: the range of blocks [first, end) of
    each stage."""
    if schedule is None:
        return _of_rank(config, layout, works, 1)
    ranks = []
    for rank, count in enumerate(held_forwards(schedule)):
        stages = schedule.stages_of(rank)
        own = [work for stage in stages for work in works[slice(*bounds[stage])]]
        ranks.append(replace(_of_rank(config, layout, own, count / len(stages)), pp=rank))
    return max(ranks, key=lambda memory: memory.total)


def _of_rank(config: Config, layout: Layout, works: Sequence[Work], waiting: float) -> RankMemory:
    """`waiting`: largest number of forwards of all these blocks whose backward is still to come."""
    train, shards = config.train, layout.size("fsdp")
    size, compute = (
        (8 if train.precision == "float64" else 4),
        (2 if "16" in train.precision else 4),
    )
    (own, gathered), (trained, summed) = (
        over_shards(works, layout),
        over_shards(works, layout, trained=True),
    )
    resident: dict[str, float] = {"weights": sum(own) * size, "gradients": sum(trained) * size}
    copies = layout.size("dp_replicate") if config.parallel.shard_optimizer else 1
    key = repr(config.optimizer), size
    for name in {work.name for work in works} - _state_bytes_of[key].keys():
        _state_bytes_of[key][name] = _state_bytes(config, name, size)
    states = (n * _state_bytes_of[key][work.name] for work, n in zip(works, trained, strict=True))
    resident["optimizer"] = sum(states) / copies
    parts = dict(resident)
    reshards = config.parallel.reshard_after_forward and layout.size("pp") == 1
    if shards > 1 and reshards:
        largest = sorted(gathered, reverse=True)[:2]
        parts["gathered weights"] = sum(largest) * compute
        parts["gathered gradients"] = max(summed) * size
    elif shards > 1:
        parts["gathered weights"] = sum(gathered) * compute
        parts["gathered gradients"] = sum(summed) * size
    elif compute < size:
        resident["16-bit copies"] = parts["16-bit copies"] = sum(own) * compute
    before, peak, moment = 0.0, 0.0, ""
    for work in works:
        for name, most in (
            ("forward", work.peak_forward),
            ("backward", work.saved + work.peak_backward),
        ):
            if before + most >= peak:
                peak, moment = before + most, f"{name} of {work.name}"
        before += work.saved
    parts["activations"] = max(waiting - 1, 0) * before + peak
    return RankMemory(resident, parts, moment, source="estimated")


def _state_bytes(config: Config, block: str, size: int) -> float:
    """Bytes of optimizer state per element of a block's weights."""
    specs = state_specs(config.optimizer, ParameterSpec(f"{block}.weight", (64, 64), ())).values()
    return (
        sum(
            (size if spec.dtype is None else spec.dtype.itemsize) * spec.dims[0] * spec.dims[-1]
            for spec in specs
        )
        / 4096
    )


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
    about, many = (schedule.name, schedule.ranks, schedule.stages_per_rank), schedule.microbatches
    few = 3 * schedule.ranks
    if many <= 2 * few:
        return _simulated(*about, many)
    first, two = (_simulated(*about, n * few) for n in (1, 2))
    return tuple(b + (b - a) * (many - 2 * few) / few for a, b in zip(first, two, strict=True))


@lru_cache(maxsize=4096)
def _simulated(name: str, ranks: int, per_rank: int, microbatches: int) -> tuple[int, ...]:
    return simulate(
        build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
    ).peak_activations
