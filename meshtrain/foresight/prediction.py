"""Prediction for a config on its hosts: memory of a rank and time of a step, computed when they are
read."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from meshtrain.config import Config, spec_of
from meshtrain.config.model_spec import ModelSpec
from meshtrain.data.order import microbatches
from meshtrain.errors import yaml_text
from meshtrain.foresight import extend, memory, steptime
from meshtrain.foresight import hardware as hardware_files
from meshtrain.foresight.blocks import works_of
from meshtrain.foresight.compiled import shared_graphs
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.memory import RankMemory, schedule_of
from meshtrain.foresight.model import alike, known_blocks, repeated, without
from meshtrain.foresight.parameters import compute_size, master_size
from meshtrain.foresight.steptime import StepPlan, StepTime
from meshtrain.foresight.torch_patches import META
from meshtrain.foresight.work import Work
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.modeling.build import block_costs, compile_choice
from meshtrain.parallel.tp_plan import has_sequence_parts
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.partition import StageSplit, split_blocks

MOST_RANKS = 4  # up to which every pipeline rank is traced
# Key -> its values: each takes less memory than the one before, and no less time.
SAVINGS: dict[str, tuple[Any, ...]] = {
    "parallel.recompute": ("none", "selective", "full"),
    "parallel.regather": (False, True),
    "parallel.reshard_after_forward": (False, True),
    "parallel.shard_optimizer": (False, True),
}


def usable_savings(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """The entries of SAVINGS that can save memory on a layout."""
    has_fsdp = layout.size("fsdp") > 1
    useful = {
        "parallel.recompute": True,
        "parallel.regather": layout.size("tp") > 1,
        "parallel.reshard_after_forward": has_fsdp and layout.size("pp") == 1,
        "parallel.shard_optimizer": not has_fsdp and layout.size("dp_replicate") > 1,
    }
    return {key: values for key, values in SAVINGS.items() if useful[key]}


@dataclass(frozen=True)
class Saving:
    """What another value of a key changes: the prediction with it, and the begun trace of its
    memory."""

    prediction: "Prediction"
    wait_for_memory: Callable[[], RankMemory]


class Prediction:
    """Prediction for a config that was loaded for its hosts. Without hardware there is memory
    alone."""

    def __init__(
        self,
        config: Config,
        hardware: Hardware | None = None,
        traced: bool = False,
        pool: Executor | None = None,
    ) -> None:
        """`traced`: memory by tracing the ranks' steps, else by arithmetic, which is fast enough
        for a search. `pool`: processes for traces, forked from this one, which must not have used a
        GPU."""
        assert config.resolved is not None
        self.config = config
        self.layout = config.resolved
        self.hardware = hardware
        self.traced = traced
        self.pool = pool
        self.microbatches = microbatches(
            config.batch.sizes.largest, config.batch.micro_size, self.layout.size(*DATA_AXES)
        )

    # The model and its pipeline -------------------------------------------------------------------

    @cached_property
    def spec(self) -> ModelSpec:
        return spec_of(self.config)

    @property
    def is_text(self) -> bool:
        return "vocab_size" in self.config.model.keys

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Work of each block, for one microbatch."""
        return works_of(self.config, self.layout)

    @cached_property
    def schedule(self) -> Schedule | None:
        """The pipeline's schedule."""
        ranks = self.layout.size("pp")
        if ranks == 1:
            return None
        section = self.config.pipeline
        return schedule_of(section.schedule, ranks, self.microbatches, section.stages_per_rank)

    @cached_property
    def bounds(self) -> Sequence[tuple[int, int]]:
        """The range of blocks [first, end) of each stage."""
        if self.schedule is None:
            return [(0, len(self.works))]
        split = _split(
            self.spec,
            self.config.data.seq_len,
            self.schedule.ranks,
            self.schedule.stages_per_rank,
            self.config.pipeline.split,
        )
        return split.bounds

    @property
    def handed_on(self) -> float:
        """Largest number of bytes that a stage sends to the next one per microbatch."""
        if self.schedule is None:
            return 0.0
        config, layout = self.config, self.layout
        known = known_blocks(self.spec, config.data.seq_len, config.data.mask_documents)
        outputs = [known.outputs[end - 1] for _, end in self.bounds[:-1]]
        # Ranks of cp, and of tp with sequence parallelism, hand on a part of the sequence each.
        parts = layout.size("cp")
        plan = self.spec.plan("tp_plan")
        if has_sequence_parts(config.parallel.sequence_parallel, plan):
            parts *= layout.size("tp")
        return config.batch.micro_size * max(outputs) * compute_size(config.train.precision) / parts

    # Memory ---------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> RankMemory:
        """Memory of the fullest rank."""
        if self.traced:
            return max(self.ranks, key=lambda rank: rank.total)
        return memory.estimate(self.config, self.layout, self.works, self.schedule, self.bounds)

    @cached_property
    def ranks(self) -> list[RankMemory]:
        """Traced memory of each pipeline rank; of long pipelines of the first rank, the last, and
        the one between them that holds most forwards."""
        ranks = self.layout.size("pp")
        chosen = list(range(ranks))
        if ranks > MOST_RANKS:
            in_flight = [
                extend.held_of(self.config, self.layout, pp, self.microbatches)
                for pp in range(ranks)
            ]
            between = max(range(1, ranks - 1), key=in_flight.__getitem__)
            chosen = [0, between, ranks - 1]
        alike(self.config)  # fill its cache before processes are forked
        # All traces begin before the first is waited for.
        traces = [self._begin(self.config, pp) for pp in chosen]
        if ranks == 1 and self.hardware is not None:
            _ = self._savings  # begins their traces at the same time
        with shared_graphs():
            return [wait() for wait in traces]

    def trace(self) -> Callable[[], RankMemory]:
        """Begins a trace of the fullest rank; the returned function waits for its result."""
        return self._begin(self.config, self.memory.pp)

    def _begin(self, config: Config, pp: int) -> Callable[[], RankMemory]:
        """Begins a trace of a rank; the returned function waits for its result."""
        if self.pool is None:
            return partial(extend.rank_memory, config, self.layout, pp)
        return self.pool.submit(extend.rank_memory, config, self.layout, pp).result

    @cached_property
    def saves(self) -> dict[str, tuple[float, float | None]]:
        """`key=value` -> bytes by which it lowers the peak of the fullest rank, and seconds by
        which it prolongs a step; only settings that save memory."""
        saved: dict[str, tuple[float, float | None]] = {}
        for change, saving in self._savings.items():
            fewer_bytes = self.memory.total - saving.wait_for_memory().total
            if fewer_bytes > 0:
                longer = None
                if self.hardware is not None:
                    longer = saving.prediction.step.seconds - self.step.seconds
                saved[change] = fewer_bytes, longer
        return saved

    @cached_property
    def _savings(self) -> dict[str, Saving]:
        """`key=value` -> what it changes on the rank that is fullest without it."""
        pp = self.memory.pp if self.layout.size("pp") > 1 else 0
        savings = {}
        for key, value in self._leaner_values():
            section, _, name = key.partition(".")
            changed: Any = {section: replace(getattr(self.config, section), **{name: value})}
            config = replace(self.config, **changed)
            savings[f"{key}={yaml_text(value)}"] = Saving(
                Prediction(config, self.hardware), self._begin(config, pp)
            )
        return savings

    def _leaner_values(self) -> list[tuple[str, Any]]:
        """Keys with values that may take less memory than the config's."""
        pairs = []
        for key, values in usable_savings(self.layout).items():
            section, _, name = key.partition(".")
            now = getattr(getattr(self.config, section), name)
            pairs += [(key, value) for value in values[values.index(now) + 1 :]]
        size = self.config.batch.micro_size
        # The schedule of a file is made for a number of microbatches.
        from_file = self.schedule is not None and self.schedule.name.endswith(".csv")
        if size > 1 and not from_file:
            pairs.append(("batch.micro_size", size // 2))
        return pairs

    # Time -----------------------------------------------------------------------------------------

    @cached_property
    def plan(self) -> StepPlan:
        """How the ranks run a step."""
        config, parallel, train = self.config, self.config.parallel, self.config.train
        samples = config.batch.sizes.largest
        in_bfloat16 = parallel.reduce_precision == "bfloat16"
        message_size = 2 if in_bfloat16 else master_size(train.precision)
        return StepPlan(
            layout=self.layout,
            schedule=self.schedule,
            bounds=self.bounds,
            microbatches=self.microbatches,
            handed_on=self.handed_on,
            precision=train.precision,
            compiled=self.compiled,
            gathers_again=parallel.reshard_after_forward and self.schedule is None,
            message_size=message_size,
            optimizer=config.optimizer,
            shards_optimizer=parallel.shard_optimizer,
            stored_as=self.spec.plan("stored_as") or {},
            tokens=samples * self.tokens_per_sample,
            # A backward has two products for each of the forward. For images they are unknown.
            flops=3 * samples * self._forward_flops if self.is_text else 0,
        )

    @cached_property
    def compiled(self) -> bool:
        """Whether blocks are compiled that can be."""
        device_type = "cuda"
        if self.hardware is not None and not self.hardware.compute.asynchronous:
            device_type = "cpu"
        choice = compile_choice(self.config, self.layout, META, device_type)
        return choice.compiles

    @property
    def tokens_per_sample(self) -> int:
        """1 for an image."""
        return self.config.data.seq_len if self.is_text else 1

    @property
    def _forward_flops(self) -> float:
        """FLOPs of one sample's forward."""
        first = alike(self.config)
        costs = block_costs(without(self.spec, repeated(first)), self.config.data.seq_len)
        return sum(costs[i] for i in first)

    @cached_property
    def block_costs(self) -> list[steptime.BlockCost]:
        """Costs of each block, for one microbatch."""
        assert self.hardware is not None
        deferred = self.schedule is not None and self.schedule.splits_backward
        return steptime.block_costs(
            self.works,
            self.layout,
            self.hardware,
            self.config.train.precision,
            self.compiled,
            deferred,
        )

    @cached_property
    def step(self) -> StepTime:
        """Seconds of a step, by part."""
        assert self.hardware is not None
        return steptime.step_time(self.works, self.plan, self.hardware)

    @cached_property
    def bound(self) -> float:
        """A lower bound of the step's seconds, which leaves out the order of the pipeline's
        actions."""
        if self.schedule is None:
            return self.step.seconds
        assert self.hardware is not None
        least = steptime.step_time(
            self.works, self.plan, self.hardware, clock=steptime.least_makespan
        )
        return least.seconds

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that the blocks of a rank send in a step, by axis; empty for pipelines."""
        sent: Counter[str] = Counter()
        if self.schedule is None:
            for work in self.works:
                for one_pass in work.passes:
                    for send in one_pass.sends:
                        sent[send.axis] += self.microbatches * send.nbytes  # type: ignore[assignment]
        return dict(sent)

    # For programs ---------------------------------------------------------------------------------

    def json(self) -> dict[str, Any]:
        """The whole prediction for a program."""
        room = None if self.hardware is None else self.hardware.device.room
        of_memory: dict[str, Any] = {**asdict(self.memory), "total": self.memory.total}
        if self.traced:
            of_memory["ranks"] = [
                {
                    "pp": rank.pp,
                    "kept": rank.resident,
                    "parts": rank.parts,
                    "peak": rank.total,
                    "when": rank.moment,
                    "source": rank.source,
                    "verdict": None if room is None else rank.verdict(room),
                }
                for rank in self.ranks
            ]
        if self.hardware is None or room is None:
            return {"memory": of_memory}
        of_memory["verdict"] = self.memory.verdict(room)
        if self.traced:
            of_memory["saves"] = {
                change: {"bytes": fewer_bytes, "seconds": longer}
                for change, (fewer_bytes, longer) in self.saves.items()
            }
        step = {**asdict(self.step), "limit": self.step.limit}
        return {"memory": of_memory, "step": step, "hardware": asdict(self.hardware)}


@lru_cache(maxsize=1024)
def _split(
    spec: ModelSpec, seq_len: int, ranks: int, stages: int, blocks: tuple[int, ...] | None
) -> StageSplit:
    return split_blocks(block_costs(spec, seq_len), ranks, stages, blocks)


def predict(
    config: Config | str,
    overrides: Sequence[str] = (),
    hosts: Sequence[int] = (8,),
    hardware: str | None = None,
) -> Prediction:
    """Predicts memory and time of a step of a config on given hosts.

    Args:
        config: a name, a path, or a Config that was loaded for this number of processes.
        hosts: number of processes on each host.
        hardware: the name of a built-in file or the path of one; None: memory alone.

    Raises InputError: the config or the file is wrong.
    """
    if isinstance(config, str):
        config = Config.load(config, list(overrides), world_size=sum(hosts))
    assert config.resolved is not None
    placed = replace(config, resolved=config.resolved.on_hosts(hosts))
    rates = None if hardware is None else hardware_files.load(hardware)
    return Prediction(placed, rates, traced=True)
