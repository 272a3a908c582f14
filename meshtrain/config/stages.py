"""Whether the pipeline of a config can run: the schedule with its counts, and the model's blocks as stages."""

from typing import Any

from meshtrain.config.checks import ConfigDraft
from meshtrain.config.convert import INVALID
from meshtrain.config.model_spec import draft_model
from meshtrain.data.order import microbatches
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.pipeline.actions import ScheduleError
from meshtrain.pipeline.partition import StageSplitError, split_blocks
from meshtrain.pipeline.schedule import load

NEEDED = ("pipeline.schedule", "pipeline.stages_per_rank", "batch.global_size", "batch.micro_size")


def check_stages(draft: ConfigDraft, sizes: dict[str, int], keys: list[str]) -> None:
    """Reports what cannot run over `pp`, if layout, batch and model are known. `keys`: the names of the model's own."""
    name, per_rank, size, micro = (draft.values.get(key, INVALID) for key in NEEDED)
    ranks = sizes.get("pp", 1)
    if ranks == 1 or -1 in sizes.values() or INVALID in (name, per_rank, size, micro):
        return
    blocks = _blocks(draft, keys)
    if blocks is not None and ranks > blocks:  # said before a schedule is made, which may be of any size
        _check_blocks(draft, blocks, ranks, per_rank or 1)
        return
    count = microbatches(size, micro, Layout(sizes).size(*DATA_AXES))
    try:
        schedule = load(name, ranks=ranks, microbatches=count, stages_per_rank=per_rank)
    except ScheduleError as error:
        draft.report(draft.place("pipeline.schedule"), f"pipeline.schedule: {error} (layout.pp is the number of ranks)")
        return
    if blocks is not None:
        _check_blocks(draft, blocks, ranks, schedule.stages_per_rank)
    if schedule.splits_backward and draft.values.get("parallel.compile") is True:
        draft.report(
            draft.place("parallel.compile"),
            f"parallel.compile: a compiled block computes its gradients at once, and the schedule {schedule.name} "
            "computes those of weights later: use compile: auto or false, or a schedule such as 1f1b",
        )


def _blocks(draft: ConfigDraft, keys: list[str]) -> int | None:
    spec = draft_model(draft, keys)
    if spec is None:
        return None
    blocks = getattr(spec.meta, "blocks", None)
    return 1 if blocks is None else len(blocks())


def _check_blocks(draft: ConfigDraft, blocks: int, ranks: int, per_rank: int) -> None:
    split: Any = draft.values.get("pipeline.split", INVALID)
    if split is INVALID:
        return
    try:
        split_blocks([1.0] * blocks, ranks, per_rank, split)
    except StageSplitError as error:
        key = "pipeline.split" if split else "layout.pp"
        draft.report(draft.place(key), f"{key}: {error}")
