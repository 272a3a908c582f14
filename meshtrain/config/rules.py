"""What the keys of a config must keep to together: each rule a small function of a few values.

A rule gets values that are right by themselves, and returns what is wrong and a way out, or None. It is skipped where
one of its values has been reported already, so that one mistake is one error.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshtrain import weights
from meshtrain.checkpoint.named import named
from meshtrain.config import durations
from meshtrain.config.errors import ConfigError, Place, any_of, nearest
from meshtrain.config.nodes import Node, described
from meshtrain.config.values import INVALID, convert
from meshtrain.elastic import which_worlds
from meshtrain.errors import InputError
from meshtrain.layout import Layout, LayoutError

# data.source -> what data.path names, or None where there is nothing to name.
SOURCES: dict[str, str | None] = {
    "python-stdlib": None,
    "text": "a text file, or a folder of .txt and .md files",
    "jsonl": "a .jsonl file, or a folder of them",
    "tokens": "the folder of a token file",
    "megatron": "the prefix of a .bin and an .idx file",
    "digits": None,
    "mnist": "the folder of MNIST's idx files",
    "images": "a folder with one folder of images per class",
}
_OF_TEXT = ("python-stdlib", "text", "jsonl")  # a tokenizer reads them
OF_TOKENS = (*_OF_TEXT, "tokens", "megatron")
RESUME = ("latest", "none")  # what checkpoint.resume may be besides a folder


@dataclass
class Draft:
    """A config while it is being read: its nodes, the values that are right so far, and the errors."""

    root: Node
    errors: list[ConfigError]
    elsewhere: dict[str, str]  # "steps" -> "train.steps": where keys belong, for "did you mean"
    values: dict[str, Any] = field(default_factory=dict)  # "train.steps" -> its value, default, or INVALID

    def place(self, path: str) -> Place:
        """Where a key stands; where it is not given, where its section stands, else the top of the file."""
        section = path.partition(".")[0]
        node = self.root.get(*path.split(".")) or self.root.get(section)
        return node.key_at if node is not None else self.root.at

    def place_of_any(self, paths: tuple[str, ...]) -> Place:
        """Where an error about several keys belongs: at an override if there is one, else at the first one given."""
        given = [path for path in paths if self.root.get(*path.split(".")) is not None]
        overridden = [path for path in given if self.place(path).override]
        return self.place((overridden or given or list(paths))[0])

    def report(self, where: Place, message: str) -> None:
        self.errors.append(ConfigError(where, message))


def check_rules(draft: Draft) -> None:
    """Applies every rule whose values are right by themselves."""
    for paths, rule in RULES:
        values = [draft.values.get(path, INVALID) for path in paths]
        if any(value is INVALID for value in values):
            continue
        problem = rule(*values)
        if problem:
            draft.report(draft.place_of_any(paths), problem)


def one_length(steps: int | None, epochs: int | None) -> str | None:
    if steps is None and epochs is None:
        return "the length of the run is missing: give train.steps or train.epochs"
    if steps is not None and epochs is not None:
        return (
            f"train.steps is {steps} and train.epochs is {epochs}, and a run has one length: take one of them away "
            "(on the command line with train.steps=null or train.epochs=null)"
        )
    return None


def micro_batch_fits(micro_size: int, global_size: int) -> str | None:
    if micro_size <= global_size:
        return None
    return (
        f"batch.micro_size {micro_size} is more than batch.global_size {global_size}, all samples of a step: "
        f"use a micro_size of at most {global_size}"
    )


def lr_falls(min_lr: float, lr: float) -> str | None:
    if min_lr <= lr:
        return None
    return f"optimizer.min_lr {min_lr:g} is above optimizer.lr {lr:g}: lower min_lr, at which the run ends"


def decay_fits(decay_steps: int | None, schedule: str, warmup_steps: int, steps: int | None) -> str | None:
    if decay_steps is None:
        return None
    if schedule != "wsd":
        return (
            f"optimizer.decay_steps is the final decay of the schedule wsd, and the schedule is {schedule}: "
            "take it away (on the command line with optimizer.decay_steps=null), or use schedule: wsd"
        )
    if steps is not None and warmup_steps <= steps < warmup_steps + decay_steps:
        return (
            f"optimizer.warmup_steps {warmup_steps} and optimizer.decay_steps {decay_steps} are more than "
            f"train.steps {steps} together: use a decay_steps of at most {steps - warmup_steps}"
        )
    return None


def profile_in_run(profile: tuple[int, int] | None, steps: int | None) -> str | None:
    if profile is None:
        return None
    first, last = profile
    if first > last:
        return f"metrics.profile goes from step {first} to step {last}: write the first step first, [{last}, {first}]"
    if steps is not None and last > steps:
        return f"metrics.profile ends at step {last} and the run at step {steps}: end it at {steps} or before"
    return None


def timeline_in_run(timeline: int | None, steps: int | None) -> str | None:
    if timeline is None or steps is None or timeline <= steps:
        return None
    return f"metrics.timeline is step {timeline} and the run ends at step {steps}: name one of its steps"


def path_for_source(path: str | None, source: str) -> str | None:
    if source not in SOURCES:  # a user's own file: its business
        return None
    what = SOURCES[source]
    if what is None and path is not None:
        others = [name for name, needs in SOURCES.items() if needs]
        return f"data.source {source} takes no data.path: take it away, or use one of {any_of(others)}"
    if what is not None and not path:
        return f"data.source {source} needs data.path: {what}"
    return None


def validation_of_source(validation: float | str, source: str) -> str | None:
    if source != "digits" or not isinstance(validation, str):
        return None
    return f"data.validation is the path {validation}, and data.source digits has no files: give a share, such as 0.2"


def images_have_a_size(image_size: int | None, source: str) -> str | None:
    if source != "images" or image_size is not None:
        return None
    return "data.source images needs data.image_size: the pixels to which height and width are resized, such as 224"


def sequence_fits_model(seq_len: int, most: int, source: str) -> str | None:
    if source not in OF_TOKENS or seq_len <= most:
        return None
    return (
        f"data.seq_len {seq_len} is more than model.max_position_embeddings {most}: "
        f"shorten the sequences to {most}, or raise the model's key to {seq_len}"
    )


def bytes_fit_model(vocab_size: int, tokenizer: str, source: str) -> str | None:
    if source not in _OF_TEXT or tokenizer != "bytes" or vocab_size >= 256:
        return None
    return f"model.vocab_size {vocab_size} is less than the 256 tokens of data.tokenizer bytes: use at least 256"


def time_limit_reads(time_limit: str | float | None) -> str | None:
    try:
        enough = time_limit is None or durations.seconds(time_limit) > 0
    except ValueError as error:
        return f"train.time_limit: {error}"
    return None if enough else f"train.time_limit {time_limit!r} leaves no time at all: write it as 3h50m, 90s or 2d"


def kept_are_saved(keep_every: int | None, every: int | str) -> str | None:
    if keep_every is None or (isinstance(every, int) and every and keep_every % every == 0):
        return None
    if not isinstance(every, int) or not every:
        when = "only at the end" if every == 0 else "at the ends of epochs"
        return (
            f"checkpoint.keep_every counts steps, and checkpoint.every {every} saves {when}: take keep_every away, or "
            "give every a number of steps"
        )
    return (
        f"checkpoint.keep_every {keep_every} is no multiple of checkpoint.every {every}, so few of these steps are "
        f"saved: use {max(1, round(keep_every / every)) * every}"
    )


def best_is_known(keep_best: bool, every: int | str, eval_every: int | str, validation: float | str) -> str | None:
    """Each checkpoint needs an evaluation of just its step; else the best one would often be none of them."""
    if not keep_best:
        return None
    if eval_every == 0 or validation == 0:
        key = "train.eval_every" if eval_every == 0 else "data.validation"
        return f"checkpoint.keep_best needs evaluations, and {key} is 0: set it, or take keep_best away"
    if every == 0:
        return "checkpoint.keep_best needs several checkpoints, and checkpoint.every is 0: set it, such as to 100"
    if every == "epoch" and eval_every == "epoch":
        return None
    if isinstance(every, int) and isinstance(eval_every, int) and every % eval_every == 0:
        return None
    way = f"checkpoint.every={eval_every}"
    if isinstance(every, int) and isinstance(eval_every, int):
        way += f" or {max(1, round(every / eval_every)) * eval_every}"
    return (
        f"checkpoint.keep_best needs an evaluation with each checkpoint, and checkpoint.every {every} saves where "
        f"train.eval_every {eval_every} does not evaluate: for instance {way}"
    )


RULES: tuple[tuple[tuple[str, ...], Callable[..., str | None]], ...] = (
    (("train.steps", "train.epochs"), one_length),
    (("batch.micro_size", "batch.global_size"), micro_batch_fits),
    (("optimizer.min_lr", "optimizer.lr"), lr_falls),
    (("optimizer.decay_steps", "optimizer.schedule", "optimizer.warmup_steps", "train.steps"), decay_fits),
    (("metrics.profile", "train.steps"), profile_in_run),
    (("metrics.timeline", "train.steps"), timeline_in_run),
    (("data.path", "data.source"), path_for_source),
    (("data.validation", "data.source"), validation_of_source),
    (("data.image_size", "data.source"), images_have_a_size),
    (("data.seq_len", "model.max_position_embeddings", "data.source"), sequence_fits_model),
    (("model.vocab_size", "data.tokenizer", "data.source"), bytes_fit_model),
    (("train.time_limit",), time_limit_reads),
    (("checkpoint.keep_every", "checkpoint.every"), kept_are_saved),
    (("checkpoint.keep_best", "checkpoint.every", "train.eval_every", "data.validation"), best_is_known),
)


# Files --------------------------------------------------------------------------------------------------------------


def check_files(draft: Draft) -> None:
    """Reports files and folders that the config names and that are not there. Training asks; a plan does not."""
    source, path, validation, tokenizer = (
        draft.values.get(f"data.{key}", INVALID) for key in ("source", "path", "validation", "tokenizer")
    )
    if isinstance(source, str) and source not in SOURCES:
        _report_missing(draft, "data.source", source, ("",))
    if isinstance(path, str) and isinstance(source, str) and SOURCES.get(source):
        _report_missing(draft, "data.path", path, _endings(source))
    if isinstance(validation, str) and isinstance(source, str) and source in SOURCES:
        _report_missing(draft, "data.validation", validation, _endings(source))
    if isinstance(tokenizer, str) and tokenizer != "bytes" and source in OF_TOKENS:
        _report_missing(draft, "data.tokenizer", tokenizer, ("",))

    start = draft.values.get("model.weights", INVALID)
    if isinstance(start, str):
        try:
            if named(start) is None:  # of a checkpoint the manifest is read where the keys are
                weights.stored(Path(start).expanduser())
        except InputError as error:
            draft.report(draft.place("model.weights"), f"model.weights: {error}")
    _check_export(draft, draft.values.get("train.export"), start)
    resume = draft.values.get("checkpoint.resume")
    if isinstance(resume, str) and resume not in RESUME:
        _report_missing(draft, "checkpoint.resume", resume, ("",), nearest(resume, RESUME))


def _check_export(draft: Draft, export: Any, start: Any) -> None:
    """Reports a folder into which the weights could not be written at the end of the run."""
    if not isinstance(export, str):
        return
    folder = Path(export).expanduser().absolute()
    problem = weights.export_problem(folder)
    if isinstance(start, str) and folder.resolve() == Path(start).expanduser().resolve():
        problem = f"{folder} is the folder of model.weights, with which the run starts: name another one"
    if problem:
        draft.report(draft.place("train.export"), f"train.export: {problem}")


def _endings(source: str) -> tuple[str, ...]:
    return (".bin", ".idx") if source == "megatron" else ("",)


def _report_missing(draft: Draft, key: str, name: str, endings: tuple[str, ...], meant: str | None = None) -> None:
    if endings != ("",) and name.endswith(endings):
        name = name[:-4]  # one file of the pair stands for both
    for ending in endings:
        path = Path(name + ending).expanduser().absolute()
        if not path.exists():
            above = next((parent for parent in path.parents if parent.is_dir()), path.parent)
            hint = "" if above == path.parent else f"; the folder {above} is there, what follows is not"
            way = f"did you mean {meant}?" if meant else "mend the path or create the file"
            draft.report(draft.place(key), f"{key}: there is no {path}{hint}: {way}")
            return


# Layout -------------------------------------------------------------------------------------------------------------


def read_layout(draft: Draft) -> dict[str, int] | None:
    """The layout as written, outermost axis first; None where something is wrong with it, which is reported."""
    node = draft.root.get("layout")
    if node is None or (node.value is None and not node.broken):
        return {"dp_shard": -1}
    if not node.broken and not isinstance(node.value, dict):
        message = f"expected axes and their sizes, such as {{dp_shard: 4}}, found {described(node.value)}"
        draft.report(node.at, f"layout: {message}")
    if node.broken or not isinstance(node.value, dict):
        return None
    sizes: dict[str, int] = {}
    for axis, child in node.value.items():
        try:
            Layout({}).size(axis)
        except LayoutError as error:
            hint = "; a colon needs a space after it" if ":" in axis else ""
            draft.report(child.key_at, f"layout: {error}{hint}")
            continue
        size = convert(child, int, f"layout.{axis}", draft.errors)
        if size is INVALID:
            continue
        if size < 1 and size != -1:
            message = f"expected an integer of at least 1, or -1 for whatever is left, found {size}"
            draft.report(child.at, f"layout.{axis}: {message}")
        elif size == -1 and -1 in sizes.values():
            first = next(name for name in sizes if sizes[name] == -1)
            draft.report(child.at, f"layout.{axis}: only one axis can be -1, and {first} is: give one of them a size")
        else:
            sizes[axis] = size
    return sizes if len(sizes) == len(node.value) else None


def check_layout(
    draft: Draft, sizes: dict[str, int], world_size: int | None, for_training: bool, again: bool = False
) -> None:
    """Whether a layout without errors of its own fits the world, and whether training builds it.

    Args:
        again: the launcher has started the job again, maybe with the nodes that were left.
    """
    keys = ("layout", *(f"layout.{axis}" for axis in sizes))
    if world_size is not None:
        try:
            sizes = Layout.resolve(sizes, world_size).sizes
        except LayoutError as error:
            left = f". This job was started again with {world_size}: {which_worlds(sizes)}" if again else ""
            draft.report(draft.place_of_any(keys), f"{error}{left}")
            return
    for axis, problem in trainable_layout_problems(sizes) if for_training else ():
        draft.report(draft.place(f"layout.{axis}"), problem)


def check_device(draft: Draft, sizes: dict[str, int], world_size: int | None, device: str | None) -> None:
    """Reports what only GPUs can do and this job, if its device is known, is to do without."""
    try:
        sizes = sizes if world_size is None else Layout.resolve(sizes, world_size).sizes
    except LayoutError:  # reported already
        return
    if sizes.get("tp", 1) > 1 and draft.values["parallel.symmetric_memory"] is True and device == "cpu":
        draft.report(
            draft.place("parallel.symmetric_memory"),
            "parallel.symmetric_memory needs GPUs, and these processes compute on CPUs: use symmetric_memory: false",
        )


def trainable_layout_problems(sizes: dict[str, int]) -> list[tuple[str, str]]:
    """The axes of a layout that training does not build yet: (axis, sentence). A size of -1 is not judged."""
    names = {"cp": "context"}
    return [
        (
            axis,
            f"layout.{axis} is {size}, and {names[axis]}-parallel training is not built yet: use {axis}: 1 and more "
            "dp_shard or dp_replicate (`meshtrain plan` shows such layouts)",
        )
        for axis, size in sizes.items()
        if axis in names and size > 1
    ]
