"""Config diff: what may differ between the run that saved a checkpoint and the one that goes on from it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config.errors import yaml_text
from meshtrain.errors import InputError
from meshtrain.job.process import Job

if TYPE_CHECKING:
    from meshtrain.checkpoint.resume import RunSpec

DATA = "the data"  # as a whole: its fingerprint and size
_FIXED = ("model.", "data.", "batch.global_size", "train.seed", "train.freeze", "train.lora")
# Of these sections: where the run began or where its data lies and how it is read, but not what it learns from what.
_FREE = ("model.preset", "model.weights", "data.path", "data.cache", "data.workers", "data.prefetch", "data.pin_memory")
_UNLISTED = frozenset(
    ("checkpoint.resume", "checkpoint.path", "train.output", "train.time_limit", "train.steps", "train.chaos")
) | {"parallel.expert_parallel"}  # as the layout: what it stood for is compared
_FILES = ("model.name", "data.source", "data.validation", "data.tokenizer")  # names, or paths, which may have moved


@dataclass
class Changes:
    """What differs, each as `train.seed: 0 -> 1` (then, now)."""

    refused: list[str] = field(default_factory=list)  # what contradicts the checkpoint
    listed: list[str] = field(default_factory=list)  # the rest
    other_data: bool = False  # some of what is refused is of the data

    def add(
        self, name: str, then: Any, now: Any, *, refuse: bool = False, words: Callable[[Any], object] = lambda x: x
    ) -> None:
        """`words`: what people read of a value, which may be less than what is compared."""
        if then != now:
            line = f"{name}: {yaml_text(words(then))} -> {yaml_text(words(now))}"
            printable = "".join(c if c.isprintable() else "?" for c in line)  # a checkpoint is not trusted
            (self.refused if refuse else self.listed).append(printable)
            self.other_data |= refuse and (name == DATA or name.startswith("data."))


def compare_configs(
    then: Mapping[str, Any], now: Mapping[str, Any], *, other_data: bool = False, step: int | None = None
) -> Changes:
    """Two configs as section -> key -> value, as JSON gives them back; `other_data`: the section `data` may differ.
    `step`: of the checkpoint; what changes at later steps, lengths, batch sizes and weights, may differ.

    Keys that only one of them has were taken away or added by another version of meshtrain, and its default stands.
    """
    changes = Changes()
    before, after = dict(_keys(then, step)), dict(_keys(now, step))
    for name in before.keys() & after.keys() - _UNLISTED:
        old, new = before[name], after[name]
        if name in _FILES and Path(str(old)).name == Path(str(new)).name:
            continue
        fixed = name.startswith(_FIXED) and name not in _FREE and not (other_data and name.startswith("data."))
        if name == "train.precision":  # float64 keeps float64 weights, all others float32
            fixed = "float64" in (old, new)
        changes.add(name, old, new, refuse=fixed)
    changes.refused.sort()
    changes.listed.sort()
    return changes


def _keys(config: Mapping[str, Any], step: int | None) -> Iterator[tuple[str, Any]]:
    for section, keys in config.items():
        if section != "layout" and isinstance(keys, Mapping):  # the layout that -1 stood for is compared, not the -1
            for key, value in keys.items():
                name = f"{section}.{key}"
                if name in ("batch.global_size", "data.seq_len_warmup"):
                    yield name, _until(value, step)
                elif name == "data.sources" and isinstance(value, list):
                    yield name, [_source(source, step) for source in value]
                else:
                    yield name, value


def _source(source: Any, step: int | None) -> Any:
    """What of a source is compared: its data may have moved, and its fingerprint is."""
    if not isinstance(source, Mapping):
        return source
    own = {key: value for key, value in source.items() if key not in ("path", "epochs")}
    return own | {"weight": _until(own.get("weight"), step)}


def _until(value: Any, step: int | None) -> Any:
    """A value that may change at steps, as far as steps up to this one have it."""
    if not isinstance(value, list) or step is None:
        return value
    past = [change for change in value if isinstance(change, list) and change[0] in range(max(step, 1))]
    return past[0][1] if len(past) == 1 else past


def compare(manifest: Manifest, spec: "RunSpec", job: Job) -> Changes:
    """What is different now from what the checkpoint was written with."""
    other_data = spec.config.checkpoint.allow_other_data
    now_config = json.loads(json.dumps(spec.config.plain()))
    changes = compare_configs(manifest.config, now_config, other_data=other_data, step=manifest.step)
    then, now = _data(manifest.data), _data(spec.data)
    if len(then[1]) == 1:  # before images had a fingerprint of the validation
        now = now[0], now[1][:1]
    changes.add(DATA, then, now, refuse=not other_data, words=_data_words)
    assert job.layout is not None
    changes.add("layout", manifest.layout.sizes, job.layout.sizes)
    changes.add("experts", manifest.layout.experts, job.layout.experts)
    changes.add("the last step, where the learning rate ends", manifest.counters.get("steps"), spec.steps)
    for name, version in spec.versions.items():
        changes.add(name, manifest.versions.get(name), version)
    return changes


def _data(about: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The number of samples, and the digests of the training's data and of the validation's own."""
    return about.get("train"), str(about.get("fingerprint")).split()


def _data_words(data: tuple[Any, list[str]]) -> str:
    return f"{data[0]} samples, fingerprint {' '.join(digest[:12] for digest in data[1])}"


def check(manifest: Manifest, spec: "RunSpec", job: Job, checkpoint: Path) -> None:
    """Raises InputError if a checkpoint is another run's: all that differs and may not is named, with both values."""
    changes = compare(manifest, spec, job)
    if changes.refused:
        way = "take the values of the checkpoint, or another folder for another run with train.output=FOLDER"
        if changes.other_data:
            way += ", or allow other data with checkpoint.allow_other_data=true"
        lines = "\n".join(f"  {line}" for line in changes.refused)
        raise InputError(f"the config is not that of {checkpoint} (there -> here):\n{lines}\n{way}")
    counters_of(manifest)
    if manifest.step > spec.steps:
        raise InputError(
            f"{checkpoint} is of step {manifest.step}, and this run ends at step {spec.steps}: give it more steps, "
            "name another folder with train.output=FOLDER, or an earlier checkpoint with checkpoint.resume=CHECKPOINT"
        )


def counters_of(manifest: Manifest) -> dict[str, Any]:
    """What a run had counted, as its step logger wrote it; InputError if it is something else."""
    counters: Mapping[str, Any] = manifest.counters
    epoch: Any = counters.get("epoch")
    good = type(counters.get("tokens")) is int and isinstance(epoch, dict)
    good = good and epoch.keys() == {"loss", "targets", "correct"}
    if not good or not all(isinstance(number, int | float | None) for number in epoch.values()):
        raise InputError(f"the manifest of step {manifest.step} does not say what was counted: its books are broken")
    return dict(counters)
