"""Prediction for a config on its hosts: memory of a rank and time of a step, computed when they are
read."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from meshtrain.config import Config
from meshtrain.config.errors import yaml_text
from meshtrain.config.model_spec import ModelSpec
from meshtrain.data.order import microbatches
from meshtrain.foresight import extend, memory, steptime
from meshtrain.foresight import hardware as hardware_files
from meshtrain.foresight.blocks import works_of
from meshtrain.foresight.compiled import shared_graphs
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.memory import RankMemory, schedule_of
from meshtrain.foresight.model import alike, known_blocks, repeated, without
from meshtrain.foresight.steptime import PASSES
from meshtrain.foresight.work import Work
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.modeling.build import block_costs, spec_of
from meshtrain.parallel.tp_plan import has_sequence_parts
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.partition import StageSplit, split_blocks

MOST_RANKS = 4  # up to which every pipeline rank is traced
SAVINGS: dict[
    str, tuple[Any, ...]
] = {  # each value takes less memory than the one before, and no less time
    "parallel.recompute": ("none", "selective", "full"),
    "parallel.regather": (False, True),
    "parallel.reshard_after_forward": (False, True),
    "parallel.shard_optimizer": (False, True),
}


def usable_savings(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """The entries of SAVINGS that can save memory on a layout."""
    sharded = layout.size("fsdp") > 1
    useless = {
        "parallel.regather": layout.size("tp") == 1,
        "parallel.reshard_after_forward": not sharded or layout.size("pp") > 1,
        "parallel.shard_optimizer": sharded or layout.size("dp_replicate") == 1,
    }
    return {key: values for key, values in SAVINGS.items() if not useless.get(key)}


@lru_cache(maxsize=1024)
def _split(
    spec: ModelSpec, seq_len: int, ranks: int, stages: int, blocks: tuple[int, ...] | None
) -> StageSplit:
    return split_blocks(block_costs(spec, seq_len), ranks, stages, blocks)


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
        self.traced, self.pool = traced, pool
        self.config, self.layout, self.hardware = config, config.resolved, hardware
        self.precisions = config.train.precision, config.train.linear_precision and "float8"
        self.microbatches = microbatches(
            config.batch.sizes.largest, config.batch.micro_size, self.layout.size(*DATA_AXES)
        )

    @cached_property
    def spec(self) -> ModelSpec:
        return spec_of(self.config)

    @property
    def _forward_flops(self) -> float:
        """FLOPs of one sample's forward."""
        first = alike(self.config)
        costs = block_costs(without(self.spec, repeated(first)), self.config.data.seq_len)
        return sum(map(costs.__getitem__, first))

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Work of each block, for one microbatch."""
        return works_of(self.config, self.layout)

    @cached_property
    def schedule(self) -> Schedule | None:
        """The pipeline's schedule."""
        section, ranks = self.config.pipeline, self.layout.size("pp")
        return (
            None
            if ranks == 1
            else schedule_of(section.schedule, ranks, self.microbatches, section.stages_per_rank)
        )

    @cached_property
    def bounds(self) -> Sequence[tuple[int, int]]:
        """The range of blocks [first, end) of each stage."""
        schedule, seq_len = self.schedule, self.config.data.seq_len
        if schedule is None:
            return [(0, len(self.works))]
        return _split(
            self.spec, seq_len, schedule.ranks, schedule.stages_per_rank, self.config.pipeline.split
        ).bounds

    @cached_property
    def block_costs(self) -> list[steptime.BlockCost]:
        """Costs of each block, for one microbatch."""
        assert self.hardware is not None
        return steptime.block_costs(self.works, self.layout, self.hardware, *self.precisions)

    @cached_property
    def memory(self) -> RankMemory:
        """Memory of the fullest rank."""
        if self.traced:
            return max(self.ranks, key=lambda rank: rank.total)
        return memory.of(self.config, self.layout, self.works, self.schedule, self.bounds)

    @property
    def per_sample(self) -> int:
        """Tokens of a sample; 1 for an image."""
        return self.config.data.seq_len if "vocab_size" in self.config.model.keys else 1

    @property
    def handed_on(self) -> float:
        """Largest number of bytes that a stage sends to the next one per microbatch."""
        config, layout = self.config, self.layout
        if self.schedule is None:
            return 0.0
        plan = getattr(self.spec.module, "tp_plan", None)
        is_split = has_sequence_parts(config.parallel.sequence_parallel, plan)
        parts = layout.size("cp") * (layout.size("tp") if is_split else 1)
        outputs = known_blocks(self.spec, config.data.seq_len, config.data.mask_documents).outputs
        size = {"float64": 8, "float32": 4}.get(config.train.precision, 2)
        return (
            config.batch.micro_size
            * max(outputs[end - 1] for _, end in self.bounds[:-1])
            * size
            / parts
        )

    @cached_property
    def ranks(self) -> list[RankMemory]:
        """Traced memory of each pipeline rank; of long pipelines of the first rank, the last, and
        the one between them that holds most forwards."""
        ranks = self.layout.size("pp")
        waiting = [
            extend.held_of(self.config, self.layout, pp, self.microbatches) for pp in range(ranks)
        ]
        between = max(range(1, ranks - 1), key=waiting.__getitem__) if ranks > MOST_RANKS else 0
        chosen = {0, between, ranks - 1} if ranks > MOST_RANKS else range(ranks)
        alike(self.config)  # fill its cache before processes are forked
        traces = [self._begin(self.config, pp) for pp in sorted(chosen)]
        if ranks == 1 and self.hardware is not None:
            _ = self._savings  # begins their traces at the same time
        with shared_graphs():
            return [trace() for trace in traces]

    def _begin(self, config: Config, pp: int) -> Callable[[], RankMemory]:
        """Begins a trace of a rank; the returned function waits for its result."""
        if self.pool is None:
            return partial(extend.rank_memory, config, self.layout, pp)
        return self.pool.submit(extend.rank_memory, config, self.layout, pp).result

    @cached_property
    def _savings(self) -> "dict[str, tuple[Prediction, Callable[[], RankMemory]]]":
        """`key=value` -> the prediction with it, and a begun trace of the rank that is fullest
        without it."""
        pp, savings, size = (
            self.memory.pp if self.layout.size("pp") > 1 else 0,
            {},
            self.config.batch.micro_size,
        )
        halves = size > 1 and not (
            self.schedule is not None and self.schedule.name.endswith(".csv")
        )
        knobs = {**usable_savings(self.layout), "batch.micro_size": (size, size // 2)[: 1 + halves]}
        for key, values in knobs.items():
            section, _, name = key.partition(".")
            for value in values[values.index(getattr(getattr(self.config, section), name)) + 1 :]:
                changed: Any = {section: replace(getattr(self.config, section), **{name: value})}
                config = replace(self.config, **changed)
                savings[f"{key}={yaml_text(value)}"] = (
                    Prediction(config, self.hardware),
                    self._begin(config, pp),
                )
        return savings

    def trace(self) -> Callable[[], RankMemory]:
        """Begins a trace of the fullest rank; the returned function waits for its result."""
        return self._begin(self.config, self.memory.pp)

    @cached_property
    def saves(self) -> dict[str, tuple[float, float | None]]:
        """`key=value` -> bytes by which it lowers the peak of the fullest rank, and seconds by
        which it prolongs a step; only settings that save memory."""
        now, saved = self.memory, dict[str, tuple[float, float | None]]()
        for knob, (other, trace) in self._savings.items():
            longer = None if self.hardware is None else other.step.seconds - self.step.seconds
            if (less := now.total - trace().total) > 0:
                saved[knob] = less, longer
        return saved

    @cached_property
    def step(self) -> steptime.StepTime:
        """Seconds of a step, by part."""
        is_text = "vocab_size" in self.config.model.keys
        # unknown for images
        flops = self._forward_flops * 3 * self.config.batch.sizes.largest if is_text else 0
        return self._step(steptime.makespan, flops)

    @cached_property
    def bound(self) -> float:
        """A lower bound of the step's seconds, which leaves out the order of the pipeline's
        actions."""
        return (
            self.step.seconds
            if self.schedule is None
            else self._step(steptime.least_makespan).seconds
        )

    def _step(
        self, clock: Callable[[Schedule, steptime.StageCosts, float], float], flops: float = 0
    ) -> steptime.StepTime:
        assert self.hardware is not None
        config, layout, parallel, train = (
            self.config,
            self.layout,
            self.config.parallel,
            self.config.train,
        )
        size = 8 if train.precision == "float64" else 4
        return steptime.of(
            self.works,
            layout,
            self.schedule,
            self.hardware,
            precision=self.precisions[0],
            product=self.precisions[1],
            microbatches=self.microbatches,
            bounds=self.bounds,
            handed_on=self.handed_on,
            gathers_again=parallel.reshard_after_forward and self.schedule is None,
            shards_optimizer=parallel.shard_optimizer,
            message_size=2 if parallel.reduce_precision == "bfloat16" else size,
            tokens=config.batch.sizes.largest * self.per_sample,
            flops=flops,
            clock=clock,
        )

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that the blocks of a rank send in a step, by axis; empty for pipelines."""
        sent: Counter[str] = Counter()
        for work in self.works if self.schedule is None else ():
            for send in (send for name in PASSES for send in getattr(work, name).sends):
                sent[send.axis] += self.microbatches * send.nbytes
        return dict(sent)

    def json(self) -> dict[str, Any]:
        """The whole prediction for a program."""
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
                    "verdict": self.hardware and rank.verdict(self.hardware.device.room),
                }
                for rank in self.ranks
            ]
        if self.hardware is None:
            return {"memory": of_memory}
        of_memory["verdict"] = self.memory.verdict(self.hardware.device.room)
        if self.traced:
            keys = ("bytes", "seconds")
            of_memory["saves"] = {
                knob: dict(zip(keys, saved, strict=True)) for knob, saved in self.saves.items()
            }
        step = {**asdict(self.step), "limit": self.step.limit}
        return {"memory": of_memory, "step": step, "hardware": asdict(self.hardware)}


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
    return Prediction(
        placed, None if hardware is None else hardware_files.load(hardware), traced=True
    )
