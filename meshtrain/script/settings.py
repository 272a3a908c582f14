"""Settings of a script's run, as a `Config`: what a checkpoint is compared with, and the run's
folder shows. It has no model and no data, which are the script's."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from meshtrain.config import Config
from meshtrain.config.layout_advice import resolve
from meshtrain.config.schema import (
    BatchSection,
    CheckpointSection,
    DataSection,
    MetricsSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PipelineSection,
    TrainSection,
)
from meshtrain.config.yaml_reader import parse_yaml
from meshtrain.errors import InputError
from meshtrain.layout import LayoutError
from meshtrain.parallel.mixed_precision import PRECISIONS

VARIABLE = "MESHTRAIN_LAYOUT"
# Each has the last word over an argument of `Run`, or of `run.steps`.
OUTPUT, PRECISION, STEPS = "MESHTRAIN_OUTPUT", "MESHTRAIN_PRECISION", "MESHTRAIN_STEPS"
# what a checkpoint of a script's run has of a config
SECTIONS = ("layout", "batch", "pipeline", "optimizer", "train", "checkpoint")
KEYS = {
    "batch": ("global_size", "micro_size"),
    "pipeline": ("schedule",),
    "optimizer": ("clip_norm",),
    "train": ("steps", "seed", "precision", "output"),
    "checkpoint": ("every",),
}


class ScriptConfig(Config):
    """The config of a run whose model, data and optimizer stand in a script."""

    def plain(self) -> dict[str, dict[str, Any]]:
        whole = super().plain()
        plain = {}
        for section in SECTIONS:
            names = KEYS.get(section, whole[section].keys())
            plain[section] = {name: whole[section][name] for name in names}
        return plain

    def of_steps(self, steps: int) -> "ScriptConfig":
        return replace(self, train=replace(self.train, steps=steps))


def script_config(
    layout: str | Mapping[str, int],
    world_size: int,
    *,
    launched: bool,
    variable: str | None,
    global_size: int,
    micro_size: int | None,
    seed: int,
    precision: str,
    clip_norm: float | None,
    output: str,
    every: int,
    schedule: str | None,
) -> ScriptConfig:
    """Checks the arguments of `Run`, and the value of MESHTRAIN_LAYOUT, which goes before `layout`.
    `launched`: by torchrun or srun. Raises InputError: one is wrong, or the layout does not fit the
    world."""
    giver = VARIABLE if variable else "meshtrain.Run"
    sizes = read_layout(variable or layout, giver)
    try:
        resolved = resolve(sizes, world_size, 1)
    except LayoutError as error:
        how = "" if launched else ". `torchrun --nproc-per-node=N SCRIPT` starts N processes"
        raise InputError(f"{giver}: {error}{how}") from error
    if resolved.size("cp") > 1:
        raise InputError(
            f"{giver}: layout {resolved}: with cp a rank has a part of each sequence, and "
            "meshtrain.Run deals out whole samples: use cp: 1, split batches by "
            "meshtrain.ContextParallel in a loop of meshtrain.start, or train by a YAML"
        )
    counts = {"global_size": global_size, "every": every}
    if micro_size is not None:
        counts["micro_size"] = micro_size
    for name, count in counts.items():
        least = 0 if name == "every" else 1
        if not isinstance(count, int) or isinstance(count, bool) or count < least:
            raise InputError(
                f"{name} of meshtrain.Run is {count!r}: expected a whole number of at least {least}"
            )
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(
            f"clip_norm of meshtrain.Run is {clip_norm!r}: expected a number above 0, or None"
        )
    if precision not in PRECISIONS or precision == "float16":
        raise InputError(
            f"precision of meshtrain.Run is {precision!r}: expected float32, bfloat16 or float64"
        )
    return ScriptConfig(
        model=ModelSection(name="a script's own"),
        data=DataSection(),
        layout=dict(sizes),
        batch=BatchSection(global_size=global_size, micro_size=micro_size or global_size),
        parallel=ParallelSection(),
        pipeline=PipelineSection(schedule=schedule or "1f1b"),
        optimizer=OptimizerSection(clip_norm=clip_norm),
        train=TrainSection(
            steps=1,
            seed=seed,
            precision=precision,  # type: ignore[arg-type]
            output=output,
            eval_every=0,
        ),
        checkpoint=CheckpointSection(every=every),
        metrics=MetricsSection(),
        resolved=resolved,
        name=output,
        file="meshtrain.Run",
    )


def most_steps(steps: int, variables: Mapping[str, str]) -> int:
    """`steps`, or those of the variable MESHTRAIN_STEPS. Raises InputError: it is no number."""
    given = variables.get(STEPS)
    if not given:
        return steps
    if not given.isdecimal() or int(given) < 1:
        raise InputError(f"the variable {STEPS} is {given!r}: expected a number of steps")
    return int(given)


def read_layout(layout: str | Mapping[str, int], giver: str) -> Mapping[str, int]:
    """Axis -> size, from a mapping or its YAML. Raises InputError: it is something else, and
    `giver` is where it stands."""
    value: Any = layout
    if isinstance(layout, str):
        with suppress(InputError):  # braces left out are no YAML, and the remedy is the same
            value = parse_yaml(layout)
    is_layout = isinstance(value, Mapping) and all(type(size) is int for size in value.values())
    if not is_layout:
        raise InputError(
            f"{giver}: the layout is {layout!r}: expected axes and their sizes in braces, such as "
            "'{dp_shard: -1}' or '{dp_replicate: 2, dp_shard: 4}'"
        )
    return value
