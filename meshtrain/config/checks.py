"""Constraints between the keys of a config: each rule is a small function of a few values.

A rule yields what is wrong and a way out. It is skipped if one of its values was already reported
as wrong.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from meshtrain.config.convert import INVALID
from meshtrain.config.draft import ConfigDraft
from meshtrain.config.keys import seconds
from meshtrain.config.schema import (
    OF_TEXT,
    SINKS,
    SOURCES,
    FaultSection,
    ParamGroupSection,
    SourceSection,
)
from meshtrain.data.order import MOST_SOURCES, BatchSizes, changes_of, whole_weights
from meshtrain.errors import any_of

OF_TOKENS = (*OF_TEXT, "tokens", "megatron")
_ROPE = ("model.rope_scaling", "model.rope_parameters")

Problems = Iterator[str]


@dataclass(frozen=True)
class Rule:
    """A constraint between keys."""

    paths: tuple[str, ...]  # the keys that `problems` takes, and at one of which it is reported
    optional: tuple[str, ...]  # further keys, None if the model lacks them
    problems: Callable[..., Problems]


RULES: list[Rule] = []


def rule(
    *paths: str, optional: tuple[str, ...] = ()
) -> Callable[[Callable[..., Problems]], Callable[..., Problems]]:
    """Registers a function as a rule about the values of keys; `optional` ones are None if the
    model lacks them."""

    def add(function: Callable[..., Problems]) -> Callable[..., Problems]:
        RULES.append(Rule(paths, optional, function))
        return function

    return add


def check_rules(draft: ConfigDraft) -> None:
    """Reports what the rules find."""
    for rule in RULES:
        values = [draft.values.get(path, INVALID) for path in rule.paths]
        values += [draft.values.get(path) for path in rule.optional]
        if INVALID in values:
            continue
        for problem in rule.problems(*values):
            draft.report(draft.place_of_any(rule.paths), problem)


@rule("train.steps", "train.epochs")
def one_length(steps: int | None, epochs: int | None) -> Problems:
    if steps is None and epochs is None:
        yield "the length of the run is missing: give train.steps or train.epochs"
    if steps is not None and epochs is not None:
        yield (
            f"train.steps is {steps} and train.epochs is {epochs}, and a run has one length: take "
            "one of them away (on the command line with train.steps=null or train.epochs=null)"
        )


@rule("batch.micro_size", "batch.global_size")
def micro_batch_fits(micro_size: int, size: Any) -> Problems:
    global_size = min(BatchSizes.of(size).sizes)
    if micro_size > global_size:
        yield (
            f"batch.micro_size {micro_size} is more than batch.global_size {global_size}, all "
            f"samples of a step: use a micro_size of at most {global_size}"
        )


@rule("parallel.reduce_precision", "train.precision")
def messages_round_nothing_in_float64(reduce_precision: str | None, precision: str) -> Problems:
    if reduce_precision is not None and precision == "float64":
        yield (
            f"parallel.reduce_precision {reduce_precision} rounds the gradients of train.precision "
            "float64, which is there to check a layout without rounding: leave it out"
        )


@rule("optimizer.min_lr", "optimizer.lr")
def lr_falls(min_lr: float, lr: float) -> Problems:
    if min_lr > lr:
        yield (
            f"optimizer.min_lr {min_lr:g} is above optimizer.lr {lr:g}: lower min_lr, at which the "
            "run ends"
        )


@rule("optimizer.decay_steps", "optimizer.schedule", "optimizer.warmup_steps", "train.steps")
def decay_fits(
    decay_steps: int | None, schedule: str, warmup_steps: int, steps: int | None
) -> Problems:
    if decay_steps is None:
        return
    if schedule != "wsd":
        yield (
            "optimizer.decay_steps is the final decay of the schedule wsd, and the schedule is "
            f"{schedule}: take it away (on the command line with optimizer.decay_steps=null), or "
            "use schedule: wsd"
        )
    elif steps is not None and warmup_steps <= steps < warmup_steps + decay_steps:
        yield (
            f"optimizer.warmup_steps {warmup_steps} and optimizer.decay_steps {decay_steps} are "
            f"more than train.steps {steps} together: use a decay_steps of at most "
            f"{steps - warmup_steps}"
        )


@rule("train.use_ema", "optimizer.ema_decay")
def average_is_kept(use_ema: bool, ema_decay: float | None) -> Problems:
    if use_ema and ema_decay is None:
        yield (
            "train.use_ema needs an average of the weights: give optimizer.ema_decay, such as 0.999"
        )


@rule("optimizer.groups")
def one_rate(groups: tuple[ParamGroupSection, ...]) -> Problems:
    for i, group in enumerate(groups):
        if group.lr is not None and group.lr_scale != 1:
            yield f"optimizer.groups: group {i} has an lr and an lr_scale: take one of the two away"


@rule("optimizer.state_precision", "optimizer.name", "optimizer.groups")
def states_round(precision: str, name: str, groups: tuple[ParamGroupSection, ...]) -> Problems:
    names = {name}
    names |= {group.name for group in groups if group.name is not None}
    others = sorted(names - {"adamw"})
    if precision != "float32" and others:
        yield (
            f"optimizer.state_precision {precision} is built for adamw, and parameters here have "
            f"{any_of(others, 'and')}: use float32"
        )


@rule("train.linear_precision", "train.precision")
def float8_has_range(linear_precision: str | None, precision: str) -> Problems:
    if linear_precision is not None and precision == "float16":
        yield (
            f"train.linear_precision {linear_precision} rounds to values that train.precision "
            "float16 has no room for: use precision: bfloat16"
        )


@rule("metrics.profile", "train.steps")
def profile_in_run(profile: tuple[int, int] | None, steps: int | None) -> Problems:
    if profile is None:
        return
    first, last = profile
    if first > last:
        yield (
            f"metrics.profile goes from step {first} to step {last}: write the first step first, "
            f"[{last}, {first}]"
        )
    elif steps is not None and last > steps:
        yield (
            f"metrics.profile ends at step {last} and the run at step {steps}: end it at {steps} "
            "or before"
        )


@rule("metrics.timeline", "train.steps")
def timeline_in_run(timeline: int | None, steps: int | None) -> Problems:
    if timeline is not None and steps is not None and timeline > steps:
        yield (
            f"metrics.timeline is step {timeline} and the run ends at step {steps}: name one of "
            "its steps"
        )


@rule("metrics.sinks", "metrics.sink_options")
def sinks_have_names(sinks: tuple[str, ...], options: dict[str, Any]) -> Problems:
    for name in sinks:
        is_own_class = re.fullmatch(r".+\.py:\w+", name)
        if name not in SINKS and not is_own_class:
            yield (
                f"metrics.sinks: there is no sink {name!r}: name {any_of(SINKS)}, or a class of "
                "your own, my_sink.py:MySink"
            )
    for name in options.keys() - set(sinks):
        yield (
            f"metrics.sink_options has options of {name}, which is not among metrics.sinks: add it "
            "there"
        )


@rule("data.path", "data.source", "data.sources")
def path_for_source(path: str | None, source: str, sources: tuple[SourceSection, ...]) -> Problems:
    if sources:
        if path is not None:
            yield (
                "data.path is of one source, and data.sources gives several, each with a path: "
                "take data.path away"
            )
        return
    if source not in SOURCES:
        return  # a user's own file may need a path or not
    needed = SOURCES[source]
    if needed is None and path is not None:
        others = [name for name, needs in SOURCES.items() if needs is not None]
        yield (
            f"data.source {source} takes no data.path: take it away, or use one of {any_of(others)}"
        )
    if needed is not None and not path:
        yield f"data.source {source} needs data.path: {needed}"


@rule("data.sources", "data.source")
def sources_mix(sources: tuple[SourceSection, ...], source: str) -> Problems:
    names = [own.name for own in sources]
    for name in sorted(set(names)):
        count = names.count(name)
        if count > 1 or not name:
            yield (
                f"data.sources: {count} of them have the name {name!r}: each needs one of its own"
            )

    for own in sources:
        kind = own.source or source
        if kind not in OF_TOKENS:
            yield (
                f"data.sources: {own.name} is of the kind {kind}, and text or tokens are mixed: "
                f"{any_of(OF_TOKENS)}"
            )
            continue
        needed = SOURCES[kind]
        if needed is not None and own.path is None:
            yield f"data.sources: {own.name} is of the kind {kind}, which needs a path: {needed}"
        if needed is None and own.path is not None:
            yield (
                f"data.sources: {own.name} is of the kind {kind}, which takes no path: take it away"
            )

    if len(sources) > MOST_SOURCES:
        yield f"data.sources has {len(sources)} sources: at most {MOST_SOURCES} are mixed"

    # Exact shares are whole numbers, in each of the stretches between two changes of a weight.
    for step, weights in changes_of([own.weight for own in sources]):
        try:
            whole_weights(weights)
        except ValueError as error:
            yield f"data.sources, from step {step} on: {error}"


@rule("data.path", "data.validation", "data.source", "data.sources")
def tokens_in_storage(
    path: str | None, validation: float | str, source: str, sources: tuple[SourceSection, ...]
) -> Problems:
    named = [(own.source or source, own.path) for own in sources] or [(source, path)]
    named.append((named[0][0], validation if isinstance(validation, str) else None))
    for kind, each in named:
        if each is not None and "://" in each and kind in SOURCES and kind != "tokens":
            yield (
                f"{each} is in object storage, from which data.source tokens is read, and this is "
                f"{kind}: copy it to a folder, or upload what `meshtrain prepare` makes of it"
            )


@rule("data.text_field", "data.source", "data.sources")
def field_of_source(field: str, source: str, sources: tuple[SourceSection, ...]) -> Problems:
    kinds = {source, *(own.source for own in sources)}
    if field != "text" and not kinds & {"jsonl", "parquet", "hub"}:
        yield (
            f"data.source {source} has no fields, of which data.text_field names one: take it away"
        )


@rule("data.split", "data.subset", "data.source", "data.sources")
def split_of_source(
    split: str, subset: str | None, source: str, sources: tuple[SourceSection, ...]
) -> Problems:
    kinds = {own.source or source for own in sources} or {source}
    if (split != "train" or subset is not None) and "hub" not in kinds:
        yield (
            f"data.split and data.subset are of data sets on the hub, and data.source is {source}: "
            "take them away (data.validation says what is held out)"
        )


@rule("data.validation", "data.source")
def validation_of_source(validation: float | str, source: str) -> Problems:
    if source == "digits" and isinstance(validation, str):
        yield (
            f"data.validation is the path {validation}, and data.source digits has no files: give "
            "a share, such as 0.2"
        )


@rule("data.image_size", "data.source")
def images_have_a_size(image_size: int | None, source: str) -> Problems:
    if source == "images" and image_size is None:
        yield (
            "data.source images needs data.image_size: the pixels to which height and width are "
            "resized, such as 224"
        )


def scales_dynamically(*ropes: dict[str, Any] | None) -> bool:
    """Whether RoPE scaling is dynamic, for sequences longer than the trained length,
    `max_position_embeddings`."""
    for rope in ropes:
        # Anything can be pasted; what is no mapping is refused elsewhere.
        if isinstance(rope, dict) and "dynamic" in (rope.get("rope_type"), rope.get("type")):
            return True
    return False


@rule("data.seq_len", "model.max_position_embeddings", "data.source", optional=_ROPE)
def sequence_fits_model(
    seq_len: int, most: int | None, source: str, *ropes: dict[str, Any] | None
) -> Problems:
    if most is None or source not in OF_TOKENS:  # a recurrent model takes any length
        return
    if seq_len > most and not scales_dynamically(*ropes):
        yield (
            f"data.seq_len {seq_len} is more than model.max_position_embeddings {most}: shorten "
            f"the sequences to {most}, or raise the model's key to {seq_len}"
        )


@rule("data.seq_len_warmup", "data.seq_len", "data.source")
def warmup_ends_at_length(
    warmup: tuple[tuple[int, int], ...], seq_len: int, source: str
) -> Problems:
    if not warmup:
        return
    lengths = [length for _, length in warmup]
    if source not in OF_TOKENS:
        yield (
            f"data.seq_len_warmup cuts samples of text or tokens, and data.source is {source}: "
            "take it away"
        )
    elif lengths[-1] != seq_len or max(lengths) > seq_len:
        listed = ", ".join(map(str, lengths))
        yield (
            f"data.seq_len_warmup is {listed}: expected lengths up to data.seq_len {seq_len}, and "
            "this as the last"
        )


@rule("model.vocab_size", "data.tokenizer", "data.source")
def bytes_fit_model(vocab_size: int, tokenizer: str, source: str) -> Problems:
    if source in OF_TEXT and tokenizer == "bytes" and vocab_size < 256:
        yield (
            f"model.vocab_size {vocab_size} is less than the 256 tokens of data.tokenizer bytes: "
            "use at least 256"
        )


@rule("data.begin_token", "data.end_token", "data.tokenizer")
def tokens_of_documents_have_names(begin: str | None, end: str | None, tokenizer: str) -> Problems:
    for name, token in (("begin_token", begin), ("end_token", end)):
        if token is not None and tokenizer == "bytes":
            yield (
                f"data.{name} is a token of a tokenizer.json, and data.tokenizer is bytes: take it "
                "away"
            )


@rule("data.begin_token", "data.source", "data.sources")
def begin_token_of_source(
    begin: str | None, source: str, sources: tuple[SourceSection, ...]
) -> Problems:
    kinds = {own.source or source for own in sources} or {source}
    if begin is not None and not kinds & set(OF_TEXT):
        yield (
            "data.begin_token begins documents of text where they are tokenized, and data.source "
            f"{source} has none: take it away"
        )


@rule("data.loss_on", "data.source", "data.sources")
def answers_of_source(loss_on: str, source: str, sources: tuple[SourceSection, ...]) -> Problems:
    if loss_on != "all" and not {source, *(own.source for own in sources)} & {"jsonl", "hub"}:
        yield (
            f"data.loss_on {loss_on} is for conversations, which data.source {source} does not "
            "have: take it away"
        )


@rule("train.time_limit")
def time_limit_reads(time_limit: str | float | None) -> Problems:
    try:
        if time_limit is not None and seconds(time_limit) <= 0:
            yield (
                f"train.time_limit {time_limit!r} leaves no time at all: write it as 3h50m, 90s or "
                "2d"
            )
    except ValueError as error:
        yield f"train.time_limit: {error}"


@rule("checkpoint.keep_every", "checkpoint.every")
def keep_every_is_saved(keep_every: int | None, every: int | str) -> Problems:
    if keep_every is None:
        return
    if every == 0 or every == "epoch":
        moment = "only at the end" if every == 0 else "at the ends of epochs"
        yield (
            f"checkpoint.keep_every counts steps, and checkpoint.every {every} saves {moment}: "
            "take keep_every away, or give every a number of steps"
        )
    elif isinstance(every, int) and keep_every % every:
        multiple = max(1, round(keep_every / every)) * every
        yield (
            f"checkpoint.keep_every {keep_every} is no multiple of checkpoint.every {every}, so "
            f"few of these steps are saved: use {multiple}"
        )


@rule("checkpoint.keep_best", "checkpoint.every", "train.eval_every", "data.validation")
def best_is_known(
    keep_best: bool, every: Any, eval_every: Any, validation: float | str
) -> Problems:
    """Each checkpoint needs an evaluation of its own step; else the best evaluation would often
    have no checkpoint."""
    if not keep_best:
        return
    if eval_every == 0 or validation == 0:
        key = "train.eval_every" if eval_every == 0 else "data.validation"
        yield (
            f"checkpoint.keep_best needs evaluations, and {key} is 0: set it, or take keep_best "
            "away"
        )
        return
    if every == 0:
        yield (
            "checkpoint.keep_best needs several checkpoints, and checkpoint.every is 0: set it, "
            "such as to 100"
        )
        return

    if every == eval_every == "epoch":
        return
    both_are_steps = isinstance(every, int) and isinstance(eval_every, int)
    if both_are_steps and every % eval_every == 0:
        return
    advice = f"checkpoint.every={eval_every}"
    if both_are_steps:
        advice += f" or {max(1, round(every / eval_every)) * eval_every}"
    yield (
        "checkpoint.keep_best needs an evaluation with each checkpoint, and checkpoint.every "
        f"{every} saves where train.eval_every {eval_every} does not evaluate: for instance "
        f"{advice}"
    )


def check_chaos(draft: ConfigDraft, world_size: int | None) -> None:
    """Reports faults that would never happen. `world_size`: None if the faults were not written for
    this one."""
    faults, node = draft.values["train.chaos"], draft.root.get("train", "chaos")
    if faults is INVALID or node is None or not isinstance(node.value, list):
        return
    steps, every = draft.values["train.steps"], draft.values["checkpoint.every"]
    if not isinstance(steps, int):
        steps = None  # the length is given in epochs, or is wrong
    for i, (fault, item) in enumerate(zip(faults, node.value, strict=True)):
        problems = [
            *_problems_of_rank(fault, world_size),
            *_problems_of_step(fault, steps, every),
            *_problems_of_kind(fault),
        ]
        for key, problem in problems:
            place = (item.get(key) or item).at
            draft.report(place, f"train.chaos[{i}]: {problem}")


# Each as (key of the fault, what is wrong with it).
FaultProblems = Iterator[tuple[str, str]]


def _problems_of_rank(fault: FaultSection, world_size: int | None) -> FaultProblems:
    if fault.rank is None and fault.fault != "fail-save":
        yield "fault", f"{fault.fault} needs a rank: say whose, such as rank: 1"
    if fault.rank is not None and world_size is not None and fault.rank >= world_size:
        ranks = "is rank 0 alone" if world_size == 1 else f"has ranks 0 to {world_size - 1}"
        yield "rank", f"there is no rank {fault.rank}: this job {ranks}"


def _problems_of_step(fault: FaultSection, steps: int | None, every: object) -> FaultProblems:
    """`steps`: the length of the run; None: not known, so that any step may be its last."""
    if steps is not None and fault.step > steps:
        yield (
            "step",
            f"step {fault.step} is beyond the run, which ends at step {steps}: name one of its "
            "steps",
        )
        return
    if not fault.in_save or not isinstance(every, int):
        return  # `epoch`: which steps end one is not known yet
    is_last = steps is None or fault.step == steps
    is_saved = every > 0 and fault.step % every == 0
    if not is_last and not is_saved:
        period = f"every {every} steps, and " if every else ""
        yield (
            "step",
            f"no checkpoint is written after step {fault.step}: checkpoint.every {every} writes "
            f"one {period}at the end of the run",
        )


def _problems_of_kind(fault: FaultSection) -> FaultProblems:
    """Keys that only `slow` has."""
    if fault.fault == "slow" and fault.seconds is None:
        yield "fault", "slow needs seconds: how much longer each step takes, such as seconds: 0.5"
    if fault.fault != "slow" and fault.seconds is not None:
        yield "seconds", f"seconds is for slow, and this fault is {fault.fault}: take it away"
