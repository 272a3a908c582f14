"""Constraints between the keys of a config: each rule is a small function of a few values.

A rule yields what is wrong and a way out. It is skipped if one of its values was already reported
as wrong.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.directory import find_checkpoint
from meshtrain.config import locate
from meshtrain.config.convert import INVALID, seconds
from meshtrain.config.errors import ConfigError, Place, nearest
from meshtrain.config.schema import SINKS, SOURCES, Fault, ParamGroup, Source
from meshtrain.config.yaml_reader import Node
from meshtrain.data.order import MOST_SOURCES, BatchSizes, changes_of, whole_weights
from meshtrain.errors import InputError, any_of
from meshtrain.huggingface import safetensors as weights

_OF_TEXT = ("python-stdlib", "text", "jsonl", "parquet")  # sources that are tokenized
OF_TOKENS = (*_OF_TEXT, "tokens", "megatron")
_ROPE = ("model.rope_scaling", "model.rope_parameters")


@dataclass
class ConfigDraft:
    """A config while it is being read: its nodes, the values converted so far, and the errors."""

    root: Node
    errors: list[ConfigError]
    elsewhere: dict[str, str]  # "steps" -> "train.steps": where keys belong, for "did you mean"
    # "train.steps" -> its value, default, or INVALID
    values: dict[str, Any] = field(default_factory=dict)

    def place(self, path: str) -> Place:
        """The place of a key; if it is not given, that of its section, else the top of the file."""
        section = path.partition(".")[0]
        node = self.root.get(*path.split(".")) or self.root.get(section)
        return node.key_at if node is not None else self.root.at

    def place_of_any(self, paths: tuple[str, ...]) -> Place:
        """The place for an error about several keys: an override if there is one, else the first
        key that is given."""
        present = [path for path in paths if self.root.get(*path.split(".")) is not None]
        overridden = [path for path in present if self.place(path).override]
        return self.place((overridden or present or list(paths))[0])

    def section(self, name: str) -> dict[str, Any]:
        return {
            path.partition(".")[2]: value
            for path, value in self.values.items()
            if path.startswith(f"{name}.")
        }

    def report(self, place: Place, message: str) -> None:
        self.errors.append(ConfigError(place, message))

    def refuse(self, key: str, *problems: object) -> None:
        """Reports problems of a key, at its place and with its name."""
        for problem in problems:
            self.report(self.place(key), f"{key}: {problem}")


Problems = Iterator[str]
RULES: list[tuple[tuple[str, ...], tuple[str, ...], Callable[..., Problems]]] = []


def rule(
    *paths: str, optional: tuple[str, ...] = ()
) -> Callable[[Callable[..., Problems]], Callable[..., Problems]]:
    """Registers a function as a rule about the values of keys; `optional` ones are None if the
    model lacks them."""

    def add(function: Callable[..., Problems]) -> Callable[..., Problems]:
        RULES.append((paths, optional, function))
        return function

    return add


def check_rules(draft: ConfigDraft) -> None:
    for paths, optional, function in RULES:
        values = [draft.values.get(path, INVALID) for path in paths] + [
            draft.values.get(path) for path in optional
        ]
        for problem in function(*values) if INVALID not in values else ():
            draft.report(draft.place_of_any(paths), problem)


@rule("train.steps", "train.epochs")
def one_length(steps: int | None, epochs: int | None) -> Problems:
    if steps is None and epochs is None:
        yield "the length of the run is missing: give train.steps or train.epochs"
    if steps is not None and epochs is not None:
        yield (
            f"train.steps is {steps} and train.epochs is {epochs}, and a run has one length: take "
            "one of them away "
            "(on the command line with train.steps=null or train.epochs=null)"
        )


@rule("batch.micro_size", "batch.global_size")
def micro_batch_fits(micro_size: int, size: Any) -> Problems:
    global_size = min(BatchSizes.of(size).sizes)
    if micro_size > global_size:
        yield (
            f"batch.micro_size {micro_size} is more than batch.global_size {global_size}, all "
            "samples of a step: "
            f"use a micro_size of at most {global_size}"
        )


@rule("parallel.reduce_precision", "train.precision")
def messages_round_nothing_in_float64(reduce_precision: str | None, precision: str) -> Problems:
    if reduce_precision is not None and precision == "float64":
        yield (
            f"parallel.reduce_precision {reduce_precision} rounds the gradients of train.precision "
            "float64, which is "
            "there to check a layout without rounding: leave it out"
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
    if decay_steps is not None and schedule != "wsd":
        yield (
            "optimizer.decay_steps is the final decay of the schedule wsd, and the schedule is "
            f"{schedule}: "
            "take it away (on the command line with optimizer.decay_steps=null), or use schedule: "
            "wsd"
        )
    elif (
        decay_steps is not None
        and steps is not None
        and warmup_steps <= steps < warmup_steps + decay_steps
    ):
        yield (
            f"optimizer.warmup_steps {warmup_steps} and optimizer.decay_steps {decay_steps} are "
            "more than "
            f"train.steps {steps} together: use a decay_steps of at most {steps - warmup_steps}"
        )


@rule("train.use_ema", "optimizer.ema_decay")
def average_is_kept(use_ema: bool, ema_decay: float | None) -> Problems:
    if use_ema and ema_decay is None:
        yield (
            "train.use_ema needs an average of the weights: give optimizer.ema_decay, such as 0.999"
        )


@rule("optimizer.groups")
def one_rate(groups: tuple[ParamGroup, ...]) -> Problems:
    for i, group in enumerate(groups):
        if group.lr is not None and group.lr_scale != 1:
            yield f"optimizer.groups: group {i} has an lr and an lr_scale: take one of the two away"


@rule("optimizer.state_precision", "optimizer.name", "optimizer.groups")
def states_round(precision: str, name: str, groups: tuple[ParamGroup, ...]) -> Problems:
    others = sorted({name, *(group.name for group in groups if group.name)} - {"adamw"})
    if precision != "float32" and others:
        have = any_of(others, "and")
        yield (
            f"optimizer.state_precision {precision} is built for adamw, and parameters here have "
            f"{have}: use float32"
        )


@rule("train.linear_precision", "train.precision")
def float8_has_range(linear_precision: str | None, precision: str) -> Problems:
    if linear_precision is not None and precision == "float16":
        values = (
            f"train.linear_precision {linear_precision} rounds to values that train.precision "
            "float16"
        )
        yield f"{values} has no room for: use precision: bfloat16"


@rule("metrics.profile", "train.steps")
def profile_in_run(profile: tuple[int, int] | None, steps: int | None) -> Problems:
    first, last = profile or (0, 0)
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
        if name not in SINKS and not re.fullmatch(r".+\.py:\w+", name):
            yield (
                f"metrics.sinks: there is no sink {name!r}: name {any_of(SINKS)}, or a class of "
                "your own, "
                "my_sink.py:MySink"
            )
    for name in options.keys() - set(sinks):
        yield (
            f"metrics.sink_options has options of {name}, which is not among metrics.sinks: add it "
            "there"
        )


@rule("data.path", "data.source", "data.sources")
def path_for_source(path: str | None, source: str, sources: tuple[Source, ...]) -> Problems:
    if sources:
        if path is not None:
            yield (
                "data.path is of one source, and data.sources gives several, each with a path: "
                "take data.path away"
            )
        return
    needed = SOURCES.get(source)  # None for a user's own file, which may need anything
    if source in SOURCES and needed is None and path is not None:
        others = [name for name, needs in SOURCES.items() if needs]
        yield (
            f"data.source {source} takes no data.path: take it away, or use one of {any_of(others)}"
        )
    if needed is not None and not path:
        yield f"data.source {source} needs data.path: {needed}"


@rule("data.sources", "data.source")
def sources_mix(sources: tuple[Source, ...], source: str) -> Problems:
    names = [own.name for own in sources]
    for name in sorted({name for name in names if names.count(name) > 1 or not name}):
        yield (
            f"data.sources: {names.count(name)} of them have the name {name!r}: each needs one of "
            "its own"
        )
    for own in sources:
        kind = own.source or source
        if kind not in OF_TOKENS:
            yield (
                f"data.sources: {own.name} is of the kind {kind}, and text or tokens are mixed: "
                f"{any_of(OF_TOKENS)}"
            )
        elif (SOURCES[kind] is None) != (own.path is None):
            needs = (
                f"needs a path: {SOURCES[kind]}" if SOURCES[kind] else "takes no path: take it away"
            )
            yield f"data.sources: {own.name} is of the kind {kind}, which {needs}"
    if len(sources) > MOST_SOURCES:
        yield f"data.sources has {len(sources)} sources: at most {MOST_SOURCES} are mixed"
    for step, of_sources in changes_of([own.weight for own in sources]):
        try:
            whole_weights(of_sources)
        except ValueError as error:
            yield f"data.sources, from step {step} on: {error}"


@rule("data.text_field", "data.source", "data.sources")
def field_of_source(field: str, source: str, sources: tuple[Source, ...]) -> Problems:
    kinds = {source, *(own.source for own in sources)}
    if field != "text" and not kinds & {"jsonl", "parquet"}:
        yield (
            f"data.source {source} has no fields, of which data.text_field names one: take it away"
        )


@rule("data.validation", "data.source")
def validation_of_source(validation: float | str, source: str) -> Problems:
    if source == "digits" and isinstance(validation, str):
        problem = f"data.validation is the path {validation}, and data.source digits has no files"
        yield f"{problem}: give a share, such as 0.2"


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
    return any(
        "dynamic" in (rope.get("rope_type"), rope.get("type"))
        for rope in ropes
        if isinstance(rope, dict)
    )


@rule("data.seq_len", "model.max_position_embeddings", "data.source", optional=_ROPE)
def sequence_fits_model(
    seq_len: int, most: int, source: str, *ropes: dict[str, Any] | None
) -> Problems:
    if source in OF_TOKENS and seq_len > most and not scales_dynamically(*ropes):
        yield (
            f"data.seq_len {seq_len} is more than model.max_position_embeddings {most}: "
            f"shorten the sequences to {most}, or raise the model's key to {seq_len}"
        )


@rule("data.seq_len_warmup", "data.seq_len", "data.source")
def warmup_ends_at_length(
    warmup: tuple[tuple[int, int], ...], seq_len: int, source: str
) -> Problems:
    if warmup and source not in OF_TOKENS:
        yield (
            f"data.seq_len_warmup cuts samples of text or tokens, and data.source is {source}: "
            "take it away"
        )
    elif warmup and (warmup[-1][1] != seq_len or max(length for _, length in warmup) > seq_len):
        lengths = ", ".join(str(length) for _, length in warmup)
        yield (
            f"data.seq_len_warmup is {lengths}: expected lengths up to data.seq_len {seq_len}, and "
            "this as the last"
        )


@rule("model.vocab_size", "data.tokenizer", "data.source")
def bytes_fit_model(vocab_size: int, tokenizer: str, source: str) -> Problems:
    if source in _OF_TEXT and tokenizer == "bytes" and vocab_size < 256:
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
def begin_token_of_source(begin: str | None, source: str, sources: tuple[Source, ...]) -> Problems:
    kinds = {own.source or source for own in sources} or {source}
    if begin is not None and not kinds & set(_OF_TEXT):
        yield (
            "data.begin_token begins documents of text where they are tokenized, and data.source "
            f"{source} has none: "
            "take it away"
        )


@rule("data.loss_on", "data.source", "data.sources")
def answers_of_source(loss_on: str, source: str, sources: tuple[Source, ...]) -> Problems:
    if loss_on != "all" and not {source, *(own.source for own in sources)} & {"jsonl"}:
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
    if keep_every is not None and (not isinstance(every, int) or not every):
        moment = "only at the end" if every == 0 else "at the ends of epochs"
        yield (
            f"checkpoint.keep_every counts steps, and checkpoint.every {every} saves {moment}: "
            "take keep_every away, "
            "or give every a number of steps"
        )
    elif keep_every is not None and isinstance(every, int) and keep_every % every:
        yield (
            f"checkpoint.keep_every {keep_every} is no multiple of checkpoint.every {every}, so "
            "few of these steps are "
            f"saved: use {max(1, round(keep_every / every)) * every}"
        )


@rule("checkpoint.keep_best", "checkpoint.every", "train.eval_every", "data.validation")
def best_is_known(
    keep_best: bool, every: Any, eval_every: Any, validation: float | str
) -> Problems:
    """Each checkpoint needs an evaluation of its own step; else the best evaluation would often
    have no checkpoint."""
    if not keep_best:
        return
    both_steps = isinstance(every, int) and isinstance(eval_every, int)
    if eval_every == 0 or validation == 0:
        key = "train.eval_every" if eval_every == 0 else "data.validation"
        yield (
            f"checkpoint.keep_best needs evaluations, and {key} is 0: set it, or take keep_best "
            "away"
        )
    elif every == 0:
        yield (
            "checkpoint.keep_best needs several checkpoints, and checkpoint.every is 0: set it, "
            "such as to 100"
        )
    elif not (every == eval_every == "epoch" or (both_steps and every % eval_every == 0)):
        multiple = f" or {max(1, round(every / eval_every)) * eval_every}" if both_steps else ""
        yield (
            "checkpoint.keep_best needs an evaluation with each checkpoint, and checkpoint.every "
            f"{every} saves where "
            f"train.eval_every {eval_every} does not evaluate: for instance "
            f"checkpoint.every={eval_every}{multiple}"
        )


def check_chaos(draft: ConfigDraft, world_size: int | None) -> None:
    """Reports faults that would never happen. `world_size`: None if the faults were not written for
    this one."""
    faults, node = draft.values["train.chaos"], draft.root.get("train", "chaos")
    if faults is INVALID or node is None or not isinstance(node.value, list):
        return
    steps, every = draft.values["train.steps"], draft.values["checkpoint.every"]
    for i, (fault, item) in enumerate(zip(faults, node.value, strict=True)):
        for name, problem in _problems(
            fault, steps if isinstance(steps, int) else None, every, world_size
        ):
            draft.report((item.get(name) or item).at, f"train.chaos[{i}]: {problem}")


def _problems(
    fault: Fault, steps: int | None, every: object, world_size: int | None
) -> Iterator[tuple[str, str]]:
    """The problems of a fault, as (key, sentence). If the length of the run is unknown, any step
    may be its last."""
    is_saved = (
        not isinstance(every, int)
        or steps in (None, fault.step)
        or (every > 0 and fault.step % every == 0)
    )
    if fault.rank is None and fault.fault != "fail-save":
        yield "fault", f"{fault.fault} needs a rank: say whose, such as rank: 1"
    if fault.rank is not None and world_size is not None and fault.rank >= world_size:
        ranks = "is rank 0 alone" if world_size == 1 else f"has ranks 0 to {world_size - 1}"
        yield "rank", f"there is no rank {fault.rank}: this job {ranks}"
    if steps is not None and fault.step > steps:
        yield (
            "step",
            f"step {fault.step} is beyond the run, which ends at step {steps}: name one of its "
            "steps",
        )
    elif fault.in_save and not is_saved:
        period = f"every {every} steps, and " if every else ""
        yield (
            "step",
            f"no checkpoint is written after step {fault.step}: checkpoint.every {every} writes "
            f"one {period}"
            "at the end of the run",
        )
    if fault.fault == "slow" and fault.seconds is None:
        yield "fault", "slow needs seconds: how much longer each step takes, such as seconds: 0.5"
    if fault.fault != "slow" and fault.seconds is not None:
        yield "seconds", f"seconds is for slow, and this fault is {fault.fault}: take it away"


def check_files(draft: ConfigDraft) -> None:
    """Reports files and folders that the config names but that do not exist."""
    source = draft.values.get("data.source", INVALID)
    sources = draft.values.get("data.sources", ())
    if source not in SOURCES:
        _report_missing(draft, "data.source")
    if SOURCES.get(source) and not sources:
        _report_missing(draft, "data.path", source)
    sources = () if sources is INVALID else sources
    for own in sources:
        _report_missing(draft, "data.sources", own.source or source, path=own.path)
    if source in SOURCES:
        _report_missing(
            draft, "data.validation", (sources[0].source if sources else None) or source
        )
    if source in OF_TOKENS:
        _report_missing(draft, "data.tokenizer", words=("bytes",))
    _report_missing(draft, "checkpoint.resume", words=("latest", "none"))
    start = draft.values.get("model.weights", INVALID)
    if isinstance(start, str):
        try:
            # a checkpoint's manifest is checked with the model's keys
            if find_checkpoint(start) is None:
                weights.stored(Path(start).expanduser())
        except InputError as error:
            draft.refuse("model.weights", error)
    _check_export(draft, draft.values.get("train.export"), start)


def _check_export(draft: ConfigDraft, export: Any, start: Any) -> None:
    if not isinstance(export, str):
        return
    folder = Path(export).expanduser().absolute()
    problem = weights.export_problem(folder)
    if isinstance(start, str) and folder.resolve() == Path(start).expanduser().resolve():
        problem = (
            f"{folder} is the folder of model.weights, with which the run starts: name another one"
        )
    if problem:
        draft.refuse("train.export", problem)


def _report_missing(
    draft: ConfigDraft, key: str, source: str = "", words: tuple[str, ...] = (), path: Any = None
) -> None:
    """Reports a path that does not exist; `source`: the kind of data source, if it is one. `words`
    and values that are not strings are no paths. `path` is used instead of the key's value."""
    name = path or draft.values.get(key)
    if not isinstance(name, str) or name in words:
        return
    for part in locate.data_files(source, name):
        file = Path(part).expanduser().absolute()
        if not file.exists():
            above = next((parent for parent in file.parents if parent.is_dir()), file.parent)
            hint = (
                ""
                if above == file.parent
                else f"; the folder {above} is there, what follows is not"
            )
            suggestion = nearest(name, words)
            way = (
                f"did you mean {suggestion}?" if suggestion else "mend the path or create the file"
            )
            draft.refuse(key, f"there is no {file}{hint}: {way}")
            return
