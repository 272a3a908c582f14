"""Checks, on the meta device, that a model can be split over `tp`, `cp` and `pp`, and its experts
over ranks.

Each check is skipped where a value that it looks at is wrong, which was reported, or not known yet:
without a world size, a size may be -1.
"""

from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from meshtrain.config.checks import OF_TOKENS
from meshtrain.config.convert import INVALID
from meshtrain.config.draft import ConfigDraft
from meshtrain.config.model_spec import ModelSpec, draft_model
from meshtrain.config.own_loss import (
    OVER_WHOLE_SAMPLES,
    LossFunctions,
    loss_functions,
    reference_problem,
)
from meshtrain.config.schema import SOURCES, ParamGroupSection
from meshtrain.data.order import BatchSizes, microbatches
from meshtrain.errors import InputError, any_of, names_near, yaml_text
from meshtrain.job import locate
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
    plan_splits_sequence,
    split_layers,
    unequal_parts,
)
from meshtrain.pipeline.actions import Schedule, ScheduleError
from meshtrain.pipeline.partition import StageSplitError, blocks_of, split_blocks
from meshtrain.pipeline.schedule import load

Sizes = dict[str, int]  # axis -> size, -1 if it is open


def check_layout(draft: ConfigDraft, sizes: Sizes, device: str | None) -> None:
    """All checks of a layout. `device`: of this job, if known."""
    check_tuning(draft)
    for rule in OF_LAYOUT:
        rule(draft, sizes)
    check_device(draft, sizes, device)


def check_tuning(draft: ConfigDraft) -> None:
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
    from meshtrain.parallel.linear.lora import adapted_layers, is_adapter  # torch, as the model did

    every_name = [name for name, _ in spec.meta.named_parameters(remove_duplicate=False)]
    names = [name for name in every_name if not is_adapter(name)]
    _check_patterns(draft, "train.freeze", freeze, names, "parameter of the model")
    if lora:
        layers = [name for name in adapted_layers(spec.meta, ()) if base_of(name) == name]
        patterns = lora.match or ("*",)
        kind = "linear layer inside of the model's blocks"
        _check_patterns(draft, "train.lora", patterns, layers, kind)

    if not any(parameter.requires_grad for parameter in spec.meta.parameters()):
        key = "train.lora" if lora else "train.freeze"
        draft.refuse(key, "nothing of the model is left to train")


def check_own_loss(draft: ConfigDraft, sizes: Sizes) -> None:
    """Reports what is wrong with a loss that the model's file defines, and what a layout cannot
    do with it."""
    name = draft.values.get("model.name", INVALID)
    try:
        own_loss = _own_loss_of(draft)
    except InputError as error:
        draft.report(draft.place("model.name"), f"the model file {name} cannot be used: {error}")
        return
    cp = sizes.get("cp", 1)
    if own_loss is not None and own_loss.over_whole_samples and cp > 1:
        draft.report(
            draft.place("layout.cp"),
            f"layout.cp is {cp}, and {name} says {OVER_WHOLE_SAMPLES} = True: its loss is no sum "
            "over tokens, and with cp a rank has a part of each sequence: use cp: 1",
        )


def _own_loss_of(draft: ConfigDraft) -> LossFunctions | None:
    """The loss that the model's file defines. Raises InputError: what it defines is none."""
    name = draft.values.get("model.name", INVALID)
    if name is INVALID:
        return None
    try:
        module = locate.model_file(name)
    except (Exception, SystemExit):  # of any type, which `read_model` has reported
        return None
    return loss_functions(module)


def _check_patterns(
    draft: ConfigDraft, key: str, patterns: Sequence[str], names: list[str], kind: str
) -> None:
    """Reports patterns that match none of the names. `kind`: what the names are of."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            draft.refuse(key, f"{pattern!r} matches no {kind}: {names_near(pattern, names)}")


def check_reference(draft: ConfigDraft) -> None:
    """Reports a reference that the model's loss does not take, and a loss that needs one."""
    # A section that is no mapping has no keys at all.
    reference = draft.values.get("train.reference", INVALID)
    name = draft.values.get("model.name", INVALID)
    if INVALID in (reference, name):
        return
    with suppress(Exception, SystemExit):  # of the model's file: others have reported it
        own_loss = loss_functions(locate.model_file(name))
        problem = reference_problem(own_loss, has_reference=reference is not None)
        if problem is not None:
            draft.refuse("train.reference", problem)


def check_loss_options(draft: ConfigDraft) -> None:
    """Reports options of the built-in loss for a model whose file has a `loss` of its own."""
    for option in ("label_smoothing", "z_loss"):
        key = f"train.{option}"
        if draft.values[key] in (INVALID, 0):
            continue
        own_loss = None
        with suppress(InputError):  # which check_own_loss reports
            own_loss = _own_loss_of(draft)
        if own_loss is not None:
            draft.refuse(
                key,
                f"it changes the built-in loss, and {draft.values['model.name']} has a loss of its "
                "own: take the key away, and let that loss call "
                f"meshtrain.loss.token_losses(outputs, targets, {option}=...)",
            )


def check_groups(draft: ConfigDraft) -> None:
    """Reports optimizer groups without a parameter, and Muon groups without a matrix."""
    groups: Any = draft.values["optimizer.groups"]
    if groups is INVALID or not groups:
        return
    spec = draft_model(draft)
    if spec is None:
        return

    trained = [
        (name, parameter.dim())
        for name, parameter in spec.meta.named_parameters()
        if parameter.requires_grad
    ]
    # A parameter is in the first group that matches its name.
    dims_of_groups: list[set[int]] = [set() for _ in groups]
    for name, dim in trained:
        number = _first_match(groups, name)
        if number is not None:
            dims_of_groups[number].add(dim)

    names = [name for name, _ in trained]
    for i, (group, dims) in enumerate(zip(groups, dims_of_groups, strict=True)):
        pattern = yaml_text(group.match)
        if not dims:
            problem = f"group {i}: no parameter that is trained is left for {pattern}"
            draft.refuse("optimizer.groups", f"{problem}; {_why_empty(groups, i, names)}")
        elif group.name == "muon" and not dims & {2, 3}:
            draft.refuse(
                "optimizer.groups",
                f"group {i}: muon is for matrices, and {pattern} has none: use adamw for it",
            )


def _first_match(groups: Sequence[ParamGroupSection], name: str) -> int | None:
    for i, group in enumerate(groups):
        if fnmatchcase(name, group.match):
            return i
    return None


def _why_empty(groups: Sequence[ParamGroupSection], empty: int, names: list[str]) -> str:
    """Where the parameters that a group matches are instead, or the names near its pattern."""
    pattern = groups[empty].match
    earlier = set()
    for name in names:
        number = _first_match(groups, name)
        if number is not None and fnmatchcase(name, pattern):
            earlier.add(number)
    if not earlier:
        return names_near(pattern, names)
    before = any_of([f"group {number}" for number in sorted(earlier)], "and")
    return f"what it matches is in {before}: put it before"


def check_split(draft: ConfigDraft, sizes: Sizes) -> None:
    """Reports what cannot be split over `tp`, if its size and the model are known."""
    tp, cp = sizes.get("tp", 1), sizes.get("cp", 1)
    if tp <= 1:
        return
    spec = draft_model(draft)
    if spec is None:
        return
    plan = spec.plan("tp_plan")
    if not plan:
        model = f"the model {draft.values['model.name']} has no tp_plan, which says how it splits"
        draft.report(draft.place("layout.tp"), f"layout.tp is {tp}, and {model}: use tp: 1")
        return

    sequence_parallel = draft.values["parallel.sequence_parallel"]
    if sequence_parallel is True and not plan_splits_sequence(plan):
        draft.refuse("parallel.sequence_parallel", f"{NO_SEQUENCE}: leave it out, or use false")
    elif (
        sequence_parallel is not INVALID
        and has_sequence_parts(sequence_parallel, plan)
        and cp == 1  # else sequences are padded
    ):
        _check_sequence(draft, tp)

    try:
        split_layers(spec.meta, plan, tp)
    except SplitError as error:
        draft.refuse("layout.tp", *error.problems)


def _check_sequence(draft: ConfigDraft, tp: int) -> None:
    """Reports a length that `tp` does not divide: the length of the samples, or one of those to
    which they are cut early in the run."""
    length, source = draft.values["data.seq_len"], draft.values["data.source"]
    warmup = draft.values["data.seq_len_warmup"]
    if INVALID in (length, source, warmup) or source not in OF_TOKENS:
        return
    for cut, key in [*((cut, "seq_len_warmup") for _, cut in warmup), (length, "seq_len")]:
        if cut % tp:
            problem = unequal_parts(f"data.{key} {cut}", cut, tp)
            draft.report(draft.place("data.seq_len"), problem)
            return


def check_float8(draft: ConfigDraft, sizes: Sizes) -> None:
    """Reports a model without a layer for `train.linear_precision`, or with a split that it does
    not support."""
    name = "train.linear_precision"
    precision = draft.values[name]
    if precision is None or precision is INVALID:
        return
    spec = draft_model(draft)
    if spec is None:
        return
    tp = max(sizes.get("tp", 1), 1)
    splits: Any = []
    if tp > 1:
        plan = spec.plan("tp_plan") or {}
        try:
            splits = split_layers(spec.meta, plan, tp)
        except SplitError:
            return  # check_split reports it
    for problem in float8_problems(spec.meta, splits, tp):
        draft.report(draft.place(name), f"{name} {precision}: {problem}")


def check_context(draft: ConfigDraft, sizes: Sizes) -> None:
    """Reports what cannot be split over `cp`. A size of -1 is not judged."""
    cp, heads = sizes.get("cp", 1), draft.values["parallel.context_heads"]
    if cp <= 1:
        return
    heads_divide = heads is not INVALID and cp % heads == 0
    if heads is not INVALID and not heads_divide:
        place = draft.place_of_any(("parallel.context_heads", "layout.cp"))
        draft.report(place, context_heads_problem(heads, cp))

    spec = draft_model(draft)
    if spec is None:
        return
    place = draft.place("layout.cp")
    plan = spec.plan("cp_plan")
    if not plan:
        model = draft.values["model.name"]
        draft.report(place, no_context_plan(f"layout.cp is {cp}, and the model {model}"))
        return
    source = draft.values["data.source"]
    if source in SOURCES and source not in OF_TOKENS:
        draft.report(
            place,
            f"layout.cp is {cp}, and data.source {source} gives images, not sequences: use cp: 1",
        )
    try:
        context_modules(spec.meta, plan)
    except SplitError as error:
        draft.refuse("layout.cp", *error.problems)
    if heads_divide:
        _check_query_heads(draft, cp=cp, tp=max(sizes.get("tp", 1), 1), heads=heads)


def _check_query_heads(draft: ConfigDraft, *, cp: int, tp: int, heads: int) -> None:
    """Reports query heads that do not divide over the ranks that swap heads, beside `tp`."""
    queries = draft.values.get("model.num_attention_heads", INVALID)
    if not isinstance(queries, int) or queries % tp:
        return  # check_split reports what tp does not divide
    if queries % (tp * heads) == 0:
        return
    fits = [str(n) for n in range(1, cp + 1) if cp % n == 0 and queries % (tp * n) == 0]
    draft.report(
        draft.place("parallel.context_heads"),
        f"{queries} query heads do not divide over tp {tp} x context_heads {heads}: use a "
        f"context_heads of {any_of(fits)}",
    )


def expert_ranks(draft: ConfigDraft, sizes: Sizes) -> int:
    """The number of ranks over which the experts of a layer are dealt out: as given, or by default
    that of `tp`."""
    ranks = draft.values["parallel.expert_parallel"]
    if ranks:
        return ranks
    spec = draft_model(draft)
    has_experts = spec is not None and bool(spec.plan("ep_plan"))
    return sizes.get("tp", 1) if has_experts else 1


def check_experts(draft: ConfigDraft, sizes: Sizes) -> None:
    """Reports what prevents expert parallelism. A size of -1 is not judged."""
    name = "parallel.expert_parallel"
    given, tp = draft.values[name], sizes.get("tp", 1)
    if given is INVALID or (given or tp) <= 1:
        return
    spec = draft_model(draft)
    if spec is None:
        return
    plan = spec.plan("ep_plan")
    if not plan:
        if given is not None:
            model = draft.values["model.name"]
            problem = f"the model {model} has no ep_plan, which names its experts: take it away"
            draft.report(draft.place(name), f"{name} is {given}, and {problem}")
        return

    try:
        fewest = _fewest_experts(spec)
    except SplitError as error:
        draft.refuse(name, *error.problems)
        return
    if -1 not in sizes.values():
        _check_expert_ranks(draft, Layout(sizes), fewest)


@lru_cache(maxsize=8)
def _fewest_experts(spec: ModelSpec) -> int:
    """The number of experts in the layer that has the fewest. Remembered: a search asks for each
    layout, and a large model has thousands of modules. Raises SplitError."""
    return min(expert_modules(spec.meta, spec.plan("ep_plan")).values())


def _check_expert_ranks(draft: ConfigDraft, layout: Layout, experts: int) -> None:
    """`experts`: the number of experts in the layer that has the fewest."""
    name = "parallel.expert_parallel"
    ranks = expert_ranks(draft, layout.sizes)
    fits = [size for size in layout.expert_sizes() if size <= experts]
    if ranks in fits:
        return

    if layout.folds(ranks):
        default = " (null: as many as tp)" if draft.values[name] is None else ""
        problem = f"{name} is {ranks}{default} and a layer has {experts} experts"
    else:
        problem = (
            f"{name} {ranks} does not fold into {written(layout.sizes)}, whose inner ranks it "
            "takes (tp, cp, dp_shard, dp_replicate)"
        )
    # One rank always fits, so there is a smaller size.
    nearest_sizes = [max(size for size in fits if size < ranks)]
    nearest_sizes += [size for size in fits if size > ranks][:1]
    advice = " or ".join(map(str, nearest_sizes))
    draft.report(draft.place_of_any((name, "layout.tp")), f"{problem}: use {advice}")


def check_stages(draft: ConfigDraft, sizes: Sizes) -> None:
    """Reports what cannot run over `pp`, if layout, batch and model are known."""
    name, per_rank, batch_size, micro_size = (
        draft.values.get(key, INVALID)
        for key in (
            "pipeline.schedule",
            "pipeline.stages_per_rank",
            "batch.global_size",
            "batch.micro_size",
        )
    )
    ranks = sizes.get("pp", 1)
    if ranks == 1 or -1 in sizes.values():
        return
    if INVALID in (name, per_rank, batch_size, micro_size):
        return

    spec = draft_model(draft)
    blocks = None
    if spec is not None:
        model: Any = spec.meta
        blocks = len(blocks_of(model))
    # Checked first, since building a schedule may be expensive.
    if blocks is not None and ranks > blocks:
        _check_blocks(draft, blocks, ranks, per_rank or 1)
        return

    # One schedule for each batch size of the run, all with the same stages on the same ranks.
    data_ranks = Layout(sizes).size(*DATA_AXES)
    schedules: list[Schedule] = []
    for size in BatchSizes.of(batch_size).sizes:
        count = microbatches(size, micro_size, data_ranks)
        try:
            schedules.append(load(name, ranks=ranks, microbatches=count, stages_per_rank=per_rank))
        except ScheduleError as error:
            step = "" if isinstance(batch_size, int) else f"batch.global_size {size}: "
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
            "computes those of weights later: use compile: auto or false, or a schedule such as "
            "1f1b",
        )


def _check_blocks(draft: ConfigDraft, blocks: int, ranks: int, per_rank: int) -> None:
    """Reports blocks that do not form the stages."""
    split: Any = draft.values.get("pipeline.split", INVALID)
    if split is INVALID:
        return
    equal_costs = [1.0] * blocks
    try:
        split_blocks(equal_costs, ranks, per_rank, split)
    except StageSplitError as error:
        draft.refuse("pipeline.split" if split else "layout.pp", error)


def check_copies(draft: ConfigDraft, sizes: Sizes) -> None:
    """Reports `parallel.shard_optimizer` in combination with FSDP."""
    name = "parallel.shard_optimizer"
    shards_weights = max(sizes.get("dp_shard", 1), sizes.get("cp", 1)) > 1
    if draft.values[name] is True and shards_weights:
        draft.report(draft.place_of_any((name, "layout")), f"parallel.{NOT_WITH_FSDP}")


def check_batch_norm(draft: ConfigDraft, sizes: Sizes) -> None:
    """Reports `parallel.sync_batch_norm` where a step is not one microbatch, or the model has no
    batch norm."""
    name = "parallel.sync_batch_norm"
    batch_size = draft.values.get("batch.global_size", INVALID)
    micro_size = draft.values.get("batch.micro_size", INVALID)
    if draft.values[name] is not True or -1 in sizes.values():
        return
    if INVALID in (batch_size, micro_size):
        return

    if sizes.get("cp", 1) > 1:
        draft.report(
            draft.place(name),
            f"{name} with cp {sizes['cp']}: ranks have parts of the samples: use cp: 1",
        )

    ranks = Layout(sizes).size(*DATA_AXES)
    batches = BatchSizes.of(batch_size).sizes
    if any(batch != micro_size * ranks for batch in batches):
        draft.report(
            draft.place_of_any((name, "batch.micro_size")),
            f"{name}: the statistics are those of one microbatch on all data ranks, {micro_size} x "
            f"{ranks} samples here, and those of one process only if that is the whole "
            f"batch.global_size {yaml_text(batch_size)}: {_one_microbatch(batches, ranks)}",
        )

    spec = draft_model(draft)
    if spec is not None and not _has_batch_norm(spec.meta):
        draft.refuse(
            name, f"the model {draft.values['model.name']} has no batch norm: take it away"
        )


def _one_microbatch(batches: Sequence[int], ranks: int) -> str:
    """How a step becomes one microbatch on each data rank."""
    if len(set(batches)) > 1:
        return "use one batch size for the whole run"
    batch = batches[0]
    if batch % ranks == 0:
        return f"use batch.micro_size: {batch // ranks}"
    fits = [str(n) for n in range(1, batch + 1) if batch % n == 0]
    return f"use {any_of(fits)} data ranks, or a batch.global_size that {ranks} divides"


def _has_batch_norm(model: Any) -> bool:
    """By the name of the class, since a config is checked without importing torch."""
    for module in model.modules():
        if any(kind.__name__ == "_BatchNorm" for kind in type(module).__mro__):
            return True
    return False


# What depends on the layout alone, which `meshtrain search` asks of each candidate.
OF_LAYOUT = (
    check_split,
    check_own_loss,
    check_context,
    check_experts,
    check_float8,
    check_stages,
    check_copies,
    check_batch_norm,
)


def check_device(draft: ConfigDraft, sizes: Sizes, device: str | None) -> None:
    """Reports options that this job's device, if known, does not support or does not profit
    from."""
    if (
        device == "cpu"
        and sizes.get("tp", 1) > 1
        and draft.values["parallel.symmetric_memory"] is True
    ):
        draft.report(
            draft.place("parallel.symmetric_memory"),
            "parallel.symmetric_memory needs GPUs, and these processes compute on CPUs: use "
            "symmetric_memory: false",
        )

    linear_precision = draft.values["train.linear_precision"]
    is_float32 = draft.values["train.precision"] == "float32"
    if device == "cuda" and is_float32 and linear_precision not in (None, INVALID):
        draft.report(
            draft.place_of_any(("train.linear_precision", "train.precision")),
            f"train.linear_precision {linear_precision} is fast beside train.precision bfloat16 "
            "alone, and it is float32: use precision: bfloat16, or linear_precision: null",
        )
