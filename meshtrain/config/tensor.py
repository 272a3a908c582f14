"""Checks, on the meta device, that a model can be split over `tp`, `cp` and `pp`, and its experts
over ranks."""

import re
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from meshtrain.config.checks import OF_TOKENS, ConfigDraft
from meshtrain.config.convert import INVALID
from meshtrain.config.errors import nearest, yaml_text
from meshtrain.config.locate import model_file
from meshtrain.config.model_spec import draft_model
from meshtrain.config.schema import SOURCES
from meshtrain.data.order import BatchSizes, microbatches
from meshtrain.errors import any_of
from meshtrain.layout import DATA_AXES, NOT_WITH_FSDP, Layout, context_heads_problem, written
from meshtrain.parallel.float8_layers import float8_problems
from meshtrain.parallel.tp_plan import (
    NO_SEQUENCE,
    SplitError,
    base_of,
    context_modules,
    expert_modules,
    has_sequence_parts,
    no_context_plan,
    shards_sequence,
    split_layers,
    unequal_parts,
)
from meshtrain.pipeline.actions import ScheduleError
from meshtrain.pipeline.partition import StageSplitError, blocks_of, split_blocks
from meshtrain.pipeline.schedule import load


def check_tuning(draft: ConfigDraft, sizes: dict[str, int]) -> None:
    """Reports patterns of `train.freeze` and `train.lora` that match nothing, and a model with no
    trainable parameter left."""
    freeze, lora = draft.values["train.freeze"], draft.values["train.lora"]
    if INVALID in (freeze, lora) or not (freeze or lora):
        return
    if lora and draft.values["train.linear_precision"] not in (None, INVALID):
        draft.refuse(
            "train.lora",
            "train.linear_precision rounds what adapters are beside: use null for one of them",
        )
    spec = draft_model(draft)
    if spec is None:
        return
    # imports torch, as the model did
    from meshtrain.parallel.linear.lora import (
        adapted_layers,
        is_adapter,
    )

    names = [
        name
        for name, _ in spec.meta.named_parameters(remove_duplicate=False)
        if not is_adapter(name)
    ]
    layers = [name for name in adapted_layers(spec.meta, ()) if base_of(name) == name]
    for key, patterns, known, kind in (
        ("train.freeze", freeze, names, "parameter of the model"),
        (
            "train.lora",
            (lora.match or ("*",)) if lora else (),
            layers,
            "linear layer inside of the model's blocks",
        ),
    ):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in known):
                draft.refuse(key, f"{pattern!r} matches no {kind}: {_names_near(pattern, known)}")
    if not any(parameter.requires_grad for parameter in spec.meta.parameters()):
        draft.refuse(
            "train.lora" if lora else "train.freeze", "nothing of the model is left to train"
        )


def check_float8(draft: ConfigDraft, sizes: dict[str, int]) -> None:
    """Reports a model without a layer for `train.linear_precision`, or with a split that it does
    not support."""
    name, tp = "train.linear_precision", max(sizes.get("tp", 1), 1)
    precision = draft.values[name]
    spec = draft_model(draft) if precision not in (None, INVALID) else None
    if spec is None:
        return
    try:
        splits = (
            split_layers(spec.meta, getattr(spec.module, "tp_plan", None) or {}, tp)
            if tp > 1
            else []
        )
    except SplitError:  # check_split reports it
        return
    for problem in float8_problems(spec.meta, splits, tp):
        draft.report(draft.place(name), f"{name} {precision}: {problem}")


def check_split(draft: ConfigDraft, sizes: dict[str, int]) -> None:
    """Reports what cannot be split over `tp`, if its size and the model are known."""
    tp, cp = sizes.get("tp", 1), sizes.get("cp", 1)
    spec = draft_model(draft) if tp > 1 else None
    if spec is None:
        return
    plan = getattr(spec.module, "tp_plan", None)
    if not plan:
        model = f"the model {draft.values['model.name']} has no tp_plan, which says how it splits"
        draft.report(draft.place("layout.tp"), f"layout.tp is {tp}, and {model}: use tp: 1")
        return
    sequence_parallel = draft.values["parallel.sequence_parallel"]
    if sequence_parallel is True and not shards_sequence(plan):
        draft.refuse("parallel.sequence_parallel", f"{NO_SEQUENCE}: leave it out, or use false")
    elif (
        cp == 1 and sequence_parallel is not INVALID and has_sequence_parts(sequence_parallel, plan)
    ):  # cp pads
        _check_sequence(draft, tp)
    try:
        split_layers(spec.meta, plan, tp)
    except SplitError as error:
        draft.refuse("layout.tp", *error.problems)


def _check_sequence(draft: ConfigDraft, tp: int) -> None:
    length, source = draft.values["data.seq_len"], draft.values["data.source"]
    warmup = draft.values["data.seq_len_warmup"]
    if INVALID in (length, source, warmup) or source not in OF_TOKENS:
        return
    length = next((part for _, part in warmup if part % tp), length)
    if length % tp:
        what = f"data.seq_len_warmup {length}" if warmup else f"data.seq_len {length}"
        draft.report(draft.place("data.seq_len"), unequal_parts(what, length, tp))


def check_context(draft: ConfigDraft, sizes: dict[str, int]) -> None:
    """Reports what cannot be split over `cp`. A size of -1 is not judged."""
    cp, heads = sizes.get("cp", 1), draft.values["parallel.context_heads"]
    if cp > 1 and heads is not INVALID and cp % heads:
        draft.report(
            draft.place_of_any(("parallel.context_heads", "layout.cp")),
            context_heads_problem(heads, cp),
        )
    spec = draft_model(draft) if cp > 1 else None
    if spec is None:
        return
    plan, place = getattr(spec.module, "cp_plan", None), draft.place("layout.cp")
    source = draft.values["data.source"]
    if not plan:
        draft.report(
            place, no_context_plan(f"layout.cp is {cp}, and the model {draft.values['model.name']}")
        )
        return
    if source in SOURCES and source not in OF_TOKENS:
        draft.report(
            place,
            f"layout.cp is {cp}, and data.source {source} gives images, not sequences: use cp: 1",
        )
    try:
        context_modules(spec.meta, plan)
    except SplitError as error:
        draft.refuse("layout.cp", *error.problems)
    queries, tp = draft.values.get("model.num_attention_heads", INVALID), max(sizes.get("tp", 1), 1)
    fit = heads is not INVALID and isinstance(queries, int) and cp % heads == queries % tp == 0
    if fit and queries % (tp * heads):
        fits = [str(n) for n in range(1, cp + 1) if cp % n == 0 and queries % (tp * n) == 0]
        draft.report(
            draft.place("parallel.context_heads"),
            f"{queries} query heads do not divide over tp {tp} x context_heads {heads}: use a "
            "context_heads of "
            f"{any_of(fits)}",
        )


def expert_ranks(draft: ConfigDraft, sizes: dict[str, int]) -> int:
    """The number of ranks over which the experts of a layer are dealt out: as given, or by default
    that of `tp`."""
    ranks = draft.values["parallel.expert_parallel"]
    return ranks or (
        sizes.get("tp", 1) if hasattr(model_file(draft.values["model.name"]), "ep_plan") else 1
    )


def check_experts(draft: ConfigDraft, sizes: dict[str, int]) -> None:
    """Reports what prevents expert parallelism. A size of -1 is not judged."""
    name = "parallel.expert_parallel"
    ranks, tp = draft.values[name], sizes.get("tp", 1)
    spec = draft_model(draft) if ranks is not INVALID and (ranks or tp) > 1 else None
    if spec is None:
        return
    plan = getattr(spec.module, "ep_plan", None)
    if not plan:
        if ranks is not None:
            model = (
                f"the model {draft.values['model.name']} has no ep_plan, which names its experts"
            )
            draft.report(draft.place(name), f"{name} is {ranks}, and {model}: take it away")
        return
    sequence = draft.values["parallel.sequence_parallel"]
    if (
        tp > 1
        and sequence is not INVALID
        and not has_sequence_parts(sequence, getattr(spec.module, "tp_plan", None))
    ):
        reason = (
            "ranks of tp would send experts the same tokens" if sequence is False else NO_SEQUENCE
        )
        draft.report(
            draft.place_of_any(("parallel.sequence_parallel", "layout.tp")),
            f"parallel.sequence_parallel false with tp {tp}: {reason}: leave it true, or use "
            "expert_parallel: 1",
        )
    try:
        experts = min(expert_modules(spec.meta, plan).values())
    except SplitError as error:
        draft.refuse(name, *error.problems)
        return
    if -1 not in sizes.values():
        _check_expert_ranks(draft, Layout(sizes), experts)


def _check_expert_ranks(draft: ConfigDraft, layout: Layout, experts: int) -> None:
    """`experts`: the number of experts in the layer that has the fewest."""
    name = "parallel.expert_parallel"
    ranks = expert_ranks(draft, layout.sizes)
    fits = [n for n in layout.expert_sizes() if n <= experts]
    if ranks in fits:
        return
    near = [str(n) for n in (max(n for n in fits if n < ranks), *(n for n in fits if n > ranks))][
        :2
    ]
    if layout.folds(ranks):
        default = " (null: as many as tp)" * (draft.values[name] is None)
        problem = f"{name} is {ranks}{default} and a layer has {experts} experts"
    else:
        inner = "whose inner ranks it takes (tp, cp, dp_shard, dp_replicate)"
        problem = f"{name} {ranks} does not fold into {written(layout.sizes)}, {inner}"
    draft.report(draft.place_of_any((name, "layout.tp")), f"{problem}: use {' or '.join(near)}")


def check_groups(draft: ConfigDraft) -> None:
    """Reports optimizer groups without a parameter, and Muon groups without a matrix."""
    groups: Any = draft.values["optimizer.groups"]
    spec = draft_model(draft) if groups is not INVALID and groups else None
    if spec is None:
        return
    dims = {
        name: parameter.dim()
        for name, parameter in spec.meta.named_parameters()
        if parameter.requires_grad
    }
    names = list(dims)
    taken = [
        next((i for i, group in enumerate(groups) if fnmatchcase(name, group.match)), None)
        for name in names
    ]
    for i, group in enumerate(groups):
        if i in taken:
            own = {dims[name] for name, j in zip(names, taken, strict=True) if j == i}
            if group.name == "muon" and not own & {2, 3}:
                problem = (
                    f"group {i}: muon is for matrices, and {yaml_text(group.match)} has none: use "
                    "adamw for it"
                )
                draft.refuse("optimizer.groups", problem)
            continue
        earlier = {
            j
            for name, j in zip(names, taken, strict=True)
            if j is not None and fnmatchcase(name, group.match)
        }
        before = any_of([f"group {j}" for j in sorted(earlier)], "and")
        out = (
            f"what it matches is in {before}: put it before"
            if earlier
            else _names_near(group.match, names)
        )
        problem = f"group {i}: no parameter that is trained is left for {yaml_text(group.match)}"
        draft.refuse("optimizer.groups", f"{problem}; {out}")


def _names_near(pattern: str, names: list[str]) -> str:
    """The names with a word spelt like the longest word of the pattern, phrased as the end of a
    sentence."""
    words = {re.sub(r"\.\d+(?=\.)", ".*", name): re.split(r"[._]", name) for name in names}
    close = nearest(max(re.split(r"[^A-Za-z0-9]+", pattern), key=len), chain(*words.values()))
    near = [name for name, own in words.items() if close in own][:3]
    return (
        f"near it are {', '.join(near)}"
        if near
        else f"the first is {names[0]}"
        if names
        else "it has none"
    )


def check_stages(draft: ConfigDraft, sizes: dict[str, int]) -> None:
    """Reports what cannot run over `pp`, if layout, batch and model are known."""
    needed = (
        "pipeline.schedule",
        "pipeline.stages_per_rank",
        "batch.global_size",
        "batch.micro_size",
    )
    name, per_rank, size, micro = (draft.values.get(key, INVALID) for key in needed)
    ranks = sizes.get("pp", 1)
    if ranks == 1 or -1 in sizes.values() or INVALID in (name, per_rank, size, micro):
        return
    spec = draft_model(draft)
    model: Any = None if spec is None else spec.meta
    blocks = None if model is None else len(blocks_of(model))
    # checked first, since building a schedule may be expensive
    if blocks is not None and ranks > blocks:
        _check_blocks(draft, blocks, ranks, per_rank or 1)
        return
    parts = Layout(sizes).size(*DATA_AXES)
    schedules = []
    try:
        for batch in BatchSizes.of(size).sizes:
            count = microbatches(batch, micro, parts)
            schedules.append(load(name, ranks=ranks, microbatches=count, stages_per_rank=per_rank))
    except ScheduleError as error:
        step = "" if isinstance(size, int) else f"batch.global_size {batch}: "
        draft.refuse("pipeline.schedule", f"{step}{error} (layout.pp is the number of ranks)")
        return
    schedule = schedules[0]
    if any(other.placement != schedule.placement for other in schedules):
        draft.refuse(
            "pipeline.schedule",
            "it places stages by the number of microbatches, which changes: use another",
        )
        return
    if blocks is not None:
        _check_blocks(draft, blocks, ranks, schedule.stages_per_rank)
    if schedule.splits_backward and draft.values.get("parallel.compile") is True:
        draft.refuse(
            "parallel.compile",
            f"a compiled block computes its gradients at once, and the schedule {schedule.name} "
            "computes those of "
            "weights later: use compile: auto or false, or a schedule such as 1f1b",
        )


def _check_blocks(draft: ConfigDraft, blocks: int, ranks: int, per_rank: int) -> None:
    split: Any = draft.values.get("pipeline.split", INVALID)
    if split is INVALID:
        return
    try:
        split_blocks([1.0] * blocks, ranks, per_rank, split)
    except StageSplitError as error:
        draft.refuse("pipeline.split" if split else "layout.pp", error)


def check_copies(draft: ConfigDraft, sizes: dict[str, int]) -> None:
    """Reports `parallel.shard_optimizer` in combination with FSDP."""
    if (
        draft.values["parallel.shard_optimizer"] is True
        and max(sizes.get("dp_shard", 1), sizes.get("cp", 1)) > 1
    ):
        draft.report(
            draft.place_of_any(("parallel.shard_optimizer", "layout")), f"parallel.{NOT_WITH_FSDP}"
        )


def check_batch_norm(draft: ConfigDraft, sizes: dict[str, int]) -> None:
    """Reports `parallel.sync_batch_norm` where a step is not one microbatch, or the model has no
    batch norm."""
    name = "parallel.sync_batch_norm"
    size, micro = (
        draft.values.get("batch.global_size", INVALID),
        draft.values.get("batch.micro_size", INVALID),
    )
    if draft.values[name] is not True or -1 in sizes.values() or INVALID in (size, micro):
        return
    if sizes.get("cp", 1) > 1:
        draft.report(
            draft.place(name),
            f"{name} with cp {sizes['cp']}: ranks have parts of the samples: use cp: 1",
        )
    ranks = Layout(sizes).size(*DATA_AXES)
    batches = BatchSizes.of(size).sizes
    if any(batch != micro * ranks for batch in batches):
        if len(set(batches)) > 1:
            advice = "use one batch size for the whole run"
        elif batches[0] % ranks:
            fits = [str(n) for n in range(1, batches[0] + 1) if batches[0] % n == 0]
            advice = f"use {any_of(fits)} data ranks, or a batch.global_size that {ranks} divides"
        else:
            advice = f"use batch.micro_size: {batches[0] // ranks}"
        draft.report(
            draft.place_of_any((name, "batch.micro_size")),
            f"{name}: the statistics are those of one microbatch on all data ranks, {micro} x "
            f"{ranks} samples here, "
            "and those of one process only if that is the whole batch.global_size "
            f"{yaml_text(size)}: {advice}",
        )
    spec = draft_model(draft)
    norms = () if spec is None else (type(module).__mro__ for module in spec.meta.modules())
    if spec is not None and not any(
        kind.__name__ == "_BatchNorm" for kinds in norms for kind in kinds
    ):
        draft.refuse(
            name, f"the model {draft.values['model.name']} has no batch norm: take it away"
        )


def check_device(draft: ConfigDraft, sizes: dict[str, int], device: str | None) -> None:
    """Reports options that this job's device, if known, does not support or does not profit
    from."""
    if (
        sizes.get("tp", 1) > 1
        and draft.values["parallel.symmetric_memory"] is True
        and device == "cpu"
    ):
        draft.report(
            draft.place("parallel.symmetric_memory"),
            "parallel.symmetric_memory needs GPUs, and these processes compute on CPUs: use "
            "symmetric_memory: false",
        )
    linear_precision, precision = (
        draft.values["train.linear_precision"],
        draft.values["train.precision"],
    )
    if device == "cuda" and precision == "float32" and linear_precision not in (None, INVALID):
        draft.report(
            draft.place_of_any(("train.linear_precision", "train.precision")),
            f"train.linear_precision {linear_precision} is fast beside train.precision bfloat16 "
            "alone, and it is "
            "float32: use precision: bfloat16, or linear_precision: null",
        )


OF_LAYOUT = (
    check_tuning,
    check_split,
    check_context,
    check_experts,
    check_float8,
    check_stages,
    check_copies,
    check_batch_norm,
)
