"""Prediction for a config on its hosts: memory of a rank and time of a step, computed when they are
read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from meshtrain.config import Config, spec_of
from meshtrain.config.model_spec import ModelSpec
from meshtrain.data.order import microbatches
from meshtrain.errors import yaml_text
from meshtrain.foresight import hardware as hardware_files
from meshtrain.foresight import memory, steptime
from meshtrain.foresight.blocks import (
    compiled_works_of,
    deferring_works_of,
    offloading_works_of,
    works_of,
)
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.memory import RankMemory
from meshtrain.foresight.model import alike
from meshtrain.foresight.parameters import compute_size, master_size
from meshtrain.foresight.schedules import schedule_of
from meshtrain.foresight.steptime import StepPlan, StepTime
from meshtrain.foresight.trace import trace_rank
from meshtrain.foresight.work import Work
from meshtrain.layout import DATA_AXES, LOSS_AXES, Layout
from meshtrain.modeling.build import block_costs
from meshtrain.modeling.kinds import known_blocks
from meshtrain.parallel.compile import choose_compile
from meshtrain.parallel.tp_plan import has_sequence_parts
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.partition import StageSplit, split_blocks

SHORT = 32  # up to so many (microbatch, block) pairs a step is traced whole
# Key -> its values: each takes less memory than the one before, and no less time.
SAVINGS: dict[str, tuple[Any, ...]] = {
    # `activations` alone is in no order with `optimizer`.
    "parallel.offload": ("none", "optimizer", "both"),
    "parallel.recompute": ("none", "selective", "full"),
    "parallel.regather": (False, True),
    "parallel.reshard_after_forward": (False, True),
    "parallel.shard_optimizer": (False, True),
}


def usable_savings(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """The entries of SAVINGS that can save memory on a layout."""
    has_fsdp = layout.size("fsdp") > 1
    useful = {
        "parallel.offload": True,
        "parallel.recompute": True,
        "parallel.regather": layout.size("tp") > 1,
        "parallel.reshard_after_forward": has_fsdp and layout.size("pp") == 1,
        "parallel.shard_optimizer": not has_fsdp and layout.size("dp_replicate") > 1,
    }
    return {key: values for key, values in SAVINGS.items() if useful[key]}


def leaner_values(key: str, value: Any) -> tuple[Any, ...]:
    """The values of an entry of SAVINGS that save more than this one, which save less first."""
    values = SAVINGS[key]
    return values[values.index(value) + 1 :] if value in values else values[-1:]


def compiles(setting: bool | str, hardware: Hardware | None, splits_backward: bool) -> bool:
    """Whether blocks are compiled that can be. `setting`: of `parallel.compile`."""
    device_type = "cuda"
    if hardware is not None and not hardware.compute.asynchronous:
        device_type = "cpu"
    device = torch.device(device_type)
    return choose_compile(setting, device, splits_backward, has_tools=True).compiles


class Prediction:
    """Prediction for a config that was loaded for its hosts. Without hardware there is memory
    alone."""

    def __init__(
        self,
        config: Config,
        hardware: Hardware | None = None,
        exact: bool = False,
    ) -> None:
        """`exact`: with the compiler's graphs for these very sizes, and of a short step with every
        operator; without, fast enough for a search."""
        assert config.resolved is not None
        self.config = config
        self.layout = config.resolved
        self.hardware = hardware
        self.exact = exact
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
        if self.config.parallel.offloads_activations:
            return self._works_in_memory  # of which it is known what leaves the device
        return works_of(self.config, self.layout)

    @cached_property
    def _works_in_memory(self) -> tuple[Work, ...]:
        """`works` with the memory that they take as they are run."""
        config, layout = self.config, self.layout
        if self.compiled:
            works = compiled_works_of(config, layout, exact=self.exact)
        elif self._hands_on_first or (self.schedule is not None and self.schedule.splits_backward):
            works = deferring_works_of(config, layout)
        else:
            works = works_of(config, layout)
        if config.parallel.offloads_activations:
            works = offloading_works_of(
                config, layout, works, compiled=self.compiled, exact=self.exact
            )
        return works

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
            return [(0, len(alike(self.config)))]
        split = split_of(
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
        return max(self.ranks, key=lambda rank: rank.total)

    @cached_property
    def ranks(self) -> list[RankMemory]:
        """Memory of the first rank of the pipeline, of the fullest, and of the last."""
        is_traced = self.exact and self._is_short
        last = 0 if self.schedule is None else self.schedule.ranks - 1
        if is_traced and last <= 1:
            # The first and the last are all: no search for the fullest, whose blocks would be
            # compiled a second time.
            return [self._trace(pp) for pp in range(last + 1)]

        by_blocks = self._ranks_by_blocks(self._works_in_memory)
        fullest = max(by_blocks, key=lambda rank: rank.total)
        chosen = sorted({0, fullest.pp, last})
        if is_traced:
            return [self._trace(pp) for pp in chosen]
        return [by_blocks[pp] for pp in chosen]

    @property
    def _hands_on_first(self) -> bool:
        """Whether the last backward of a stage computes weight gradients after it has sent its
        input's (modeling/build.py), which matters if what they need is back from the host."""
        offloads = self.config.parallel.offloads_activations and not self.compiled
        if self.schedule is None or self.schedule.splits_backward or not offloads:
            return False
        return self.layout.size(*LOSS_AXES) == 1

    def _ranks_by_blocks(self, works: Sequence[Work]) -> list[RankMemory]:
        ranks = memory.of_ranks(
            self.config,
            self.layout,
            works,
            self.schedule,
            self.bounds,
            self.microbatches,
            self.handed_on,
            self._hands_on_first,
        )
        return [replace(rank, compiled=self.compiled) for rank in ranks]

    @property
    def _is_short(self) -> bool:
        """Whether the step of every rank is so short that all of it is traced."""
        most = max(end - first for first, end in self.bounds)
        if self.schedule is not None:
            most *= self.schedule.stages_per_rank
        return most * self.microbatches <= SHORT

    def _trace(self, pp: int) -> RankMemory:
        config = replace(self.config, parallel=replace(self.config.parallel, compile=self.compiled))
        trace = trace_rank(config, self.layout, self.layout.group(0, "pp")[pp])
        return RankMemory(
            resident={**trace.resident},
            parts={**trace.parts},
            moment=trace.moment,
            pp=pp,
            compiled=trace.compiled,
            host=trace.host,
            source="traced",
        )

    @cached_property
    def saves(self) -> dict[str, tuple[float, float | None]]:
        """`key=value` -> bytes by which it lowers the peak of the fullest rank, and seconds by
        which it prolongs a step; only settings that save memory."""
        saved: dict[str, tuple[float, float | None]] = {}
        for key, value in self._leaner_values():
            section, _, name = key.partition(".")
            changed: Any = {section: replace(getattr(self.config, section), **{name: value})}
            leaner = Prediction(replace(self.config, **changed), self.hardware, self.exact)
            fewer_bytes = self.memory.total - leaner.memory.total
            if fewer_bytes > 0:
                longer = None
                if self.hardware is not None:
                    longer = leaner.step.seconds - self.step.seconds
                saved[f"{key}={yaml_text(value)}"] = fewer_bytes, longer
        return saved

    def _leaner_values(self) -> list[tuple[str, Any]]:
        """Keys with values that may take less memory than the config's."""
        pairs = []
        for key in usable_savings(self.layout):
            if key == "parallel.offload" and not self._has_host_memory:
                continue
            section, _, name = key.partition(".")
            now = getattr(getattr(self.config, section), name)
            pairs += [(key, value) for value in leaner_values(key, now)]
        size = self.config.batch.micro_size
        # The schedule of a file is made for a number of microbatches.
        from_file = self.schedule is not None and self.schedule.name.endswith(".csv")
        if size > 1 and not from_file:
            pairs.append(("batch.micro_size", size // 2))
        return pairs

    @property
    def _has_host_memory(self) -> bool:
        """Whether what is offloaded leaves the device."""
        return self.hardware is None or self.hardware.has_host_memory

    @property
    def host_memory(self) -> float:
        """Most bytes that the ranks of a host together take of its memory, with
        `parallel.offload`."""
        most_ranks = max((span.count for span in self.layout.host_spans), default=1)
        return most_ranks * max(rank.host for rank in self.ranks)

    @property
    def fits_hosts(self) -> bool:
        """Whether hosts have as much memory, as far as that is known."""
        room = None if self.hardware is None else self.hardware.host.room
        return room is None or self.host_memory <= room

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
            states_on_host=parallel.offloads_optimizer,
            stored_as=self.spec.plan("stored_as") or {},
            tokens=samples * self.tokens_per_sample,
            # A backward has two products for each of the forward. For images they are unknown.
            flops=3 * samples * self._forward_flops if self.is_text else 0,
        )

    @cached_property
    def compiled(self) -> bool:
        """Whether blocks are compiled that can be."""
        splits_backward = self.schedule is not None and self.schedule.splits_backward
        return compiles(self.config.parallel.compile, self.hardware, splits_backward)

    @property
    def tokens_per_sample(self) -> int:
        """1 for an image."""
        return self.config.data.seq_len if self.is_text else 1

    @property
    def _forward_flops(self) -> float:
        """FLOPs of one sample's forward."""
        return sum(block_costs(self.spec, self.config.data.seq_len))

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
        of_memory: dict[str, Any] = {
            **asdict(self.memory),
            "total": self.memory.total,
            "of_host": self.host_memory,
        }
        if self.exact:
            of_memory["ranks"] = [
                {
                    "pp": rank.pp,
                    "kept": rank.resident,
                    "parts": rank.parts,
                    "peak": rank.total,
                    "when": rank.moment,
                    "source": rank.source,
                    "host": rank.host,
                    "verdict": None if room is None else rank.verdict(room),
                }
                for rank in self.ranks
            ]
        if self.hardware is None or room is None:
            return {"memory": of_memory}
        of_memory["verdict"] = self.memory.verdict(room)
        of_memory["host_fits"] = self.fits_hosts
        if self.exact:
            of_memory["saves"] = {
                change: {"bytes": fewer_bytes, "seconds": longer}
                for change, (fewer_bytes, longer) in self.saves.items()
            }
        step = {**asdict(self.step), "limit": self.step.limit}
        return {"memory": of_memory, "step": step, "hardware": asdict(self.hardware)}


@lru_cache(maxsize=1024)
def split_of(
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
    return Prediction(placed, rates, exact=True)
