"""Whether the pipeline of a config can run: the schedule with its counts, and the model's blocks as stages."""

from typing import Any

from meshtrain.config.plain import plain_model
from meshtrain.config.rules import Draft
from meshtrain.config.values import INVALID
from meshtrain.data.order import microbatches
from meshtrain.layout import DATA_AXES, Layout, LayoutError
from meshtrain.pipeline.actions import Kind, ScheduleError
from meshtrain.pipeline.schedule import load
from meshtrain.pipeline.split import StageSplitError, split_blocks

NEEDED = ("pipeline.schedule", "pipeline.stages_per_rank", "batch.global_size", "batch.micro_size")


def check_stages(draft: Draft, sizes: dict[str, int], world_size: int | None, keys: list[str]) -> None:
    """Reports what cannot run over `pp`. It is not judged while the layout, the batch or the model is not known.

    Args:
        sizes: the layout as written. keys: the names of the model's own keys.
    """
    try:
        layout = Layout.resolve(sizes, world_size) if world_size is not None else Layout(sizes)
    except LayoutError:  # reported already, or a size of -1
        return
    name, per_rank, size, micro = (draft.values.get(key, INVALID) for key in NEEDED)
    if layout.size("pp") == 1 or any(value is INVALID for value in (name, per_rank, size, micro)):
        return
    ranks, blocks = layout.size("pp"), _blocks(draft, keys)
    if blocks is not None and ranks > blocks:  # said before a schedule is made, which may be of any size
        _check_blocks(draft, blocks, ranks, per_rank or 1)
        return
    count = microbatches(size, micro, layout.size(*DATA_AXES))
    try:
        schedule = load(name, ranks=ranks, microbatches=count, stages_per_rank=per_rank)
    except ScheduleError as error:
        draft.report(draft.place("pipeline.schedule"), f"pipeline.schedule: {error} (layout.pp is the number of ranks)")
        return
    if blocks is not None:
        _check_blocks(draft, blocks, ranks, schedule.stages_per_rank)
    splits = any(action.kind is Kind.WEIGHT_GRAD for rank in range(schedule.ranks) for action in schedule.flat(rank))
    if splits and draft.values.get("parallel.compile") is True:
        draft.report(
            draft.place("parallel.compile"),
            f"parallel.compile: a compiled block computes its gradients at once, and the schedule {schedule.name} "
            "computes those of weights later: use compile: false, or a schedule such as 1f1b",
        )


def _blocks(draft: Draft, keys: list[str]) -> int | None:
    """How many blocks the model has; None where it is not known."""
    found = plain_model(draft, keys)
    if found is None:
        return None
    _, model = found
    return len(model.blocks()) if hasattr(model, "blocks") else 1


def _check_blocks(draft: Draft, blocks: int, ranks: int, per_rank: int) -> None:
    split: Any = draft.values.get("pipeline.split", INVALID)
    if split is INVALID:
        return
    try:
        split_blocks([1.0] * blocks, ranks, per_rank, split)
    except StageSplitError as error:
        key = "pipeline.split" if split else "layout.pp"
        draft.report(draft.place(key), f"{key}: {error}")
