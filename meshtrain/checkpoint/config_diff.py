"""Config diff: what may differ between the run that saved a checkpoint and the run that resumes
from it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.errors import InputError, yaml_text
from meshtrain.huggingface.former_models import what_replaces
from meshtrain.huggingface.rope_keys import one_form
from meshtrain.job.process import Job

DATA = "the data"  # name of the data as a whole: its fingerprint and size
# Name, among the versions, of the digest of a frozen second model's weights. It says what is
# computed, and the config says only where they lie.
REFERENCE = "the weights of train.reference"

# Keys that begin so may not differ: they say what is computed.
_FIXED = ("model.", "data.", "batch.global_size", "train.seed", "train.freeze", "train.lora")
# Of these, keys that may differ: where the run started from, where its data lies, how it is read.
_FREE = (
    "model.preset",
    "model.weights",
    "data.path",
    "data.cache",
    "data.cache_gib",
    "data.workers",
)
# Keys that are not worth a line: each job may have its own.
_UNLISTED = frozenset(
    (
        "checkpoint.resume",
        "checkpoint.path",
        "train.output",
        "train.time_limit",
        "train.steps",
        "train.chaos",
        "parallel.expert_parallel",  # compared as resolved, beside the layout
    )
)
# Names or paths of files, which may have moved.
_FILES = (
    "model.name",
    "data.source",
    "data.validation",
    "data.tokenizer",
)


@dataclass
class Changes:
    """Differences, each as `train.seed: 0 -> 1` (then, now)."""

    refused: list[str] = field(default_factory=list)  # differences that contradict the checkpoint
    listed: list[str] = field(default_factory=list)  # the other differences
    other_data: bool = False  # whether a refused difference is one of the data

    def add(
        self,
        name: str,
        then: Any,
        now: Any,
        *,
        refuse: bool = False,
        words: Callable[[Any], object] = lambda x: x,
    ) -> None:
        """`words`: the printed form of a value, which may show less than is compared."""
        if then == now:
            return
        line = f"{name}: {yaml_text(words(then))} -> {yaml_text(words(now))}"
        # a checkpoint is not trusted
        printable = "".join(c if c.isprintable() else "?" for c in line)
        if not refuse:
            self.listed.append(printable)
            return
        self.refused.append(printable)
        if name == DATA or name.startswith("data."):
            self.other_data = True


def compare_configs(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    other_data: bool = False,
    step: int | None = None,
) -> Changes:
    """Compares two configs, section -> key -> value as read from JSON.

    Keys that only one config has were removed or added by another version of meshtrain; its default
    applies.

    Args:
        other_data: the section `data` may differ.
        step: the checkpoint's step; lengths, batch sizes and weights that change at later steps may
            differ.
    """
    changes = Changes()
    before, after = dict(_keys(then, step)), dict(_keys(now, step))
    for name in before.keys() & after.keys() - _UNLISTED:
        old, new = before[name], after[name]
        if name in _FILES and Path(str(old)).name == Path(str(new)).name:
            continue
        if name == "train.precision":
            # float64 keeps float64 weights, all others float32
            fixed = "float64" in (old, new)
        elif other_data and name.startswith("data."):
            fixed = False
        else:
            fixed = name.startswith(_FIXED) and name not in _FREE
        changes.add(name, old, new, refuse=fixed)
    changes.refused.sort()
    changes.listed.sort()
    return changes


def _keys(config: Mapping[str, Any], step: int | None) -> Iterator[tuple[str, Any]]:
    """The full names of all keys, and their values as they are compared."""
    for section, keys in config.items():
        # The resolved layout, which has no -1, is compared instead.
        if section == "layout" or not isinstance(keys, Mapping):
            continue
        if section == "model":
            keys = one_form(keys)  # older versions kept rope_parameters as they were given
        for key, value in keys.items():
            name = f"{section}.{key}"
            if name in ("batch.global_size", "data.seq_len_warmup"):
                yield name, _until(value, step)
            elif name == "data.sources" and isinstance(value, list):
                yield name, [_source(source, step) for source in value]
            else:
                yield name, value


def _source(source: Any, step: int | None) -> Any:
    """The keys of a source that are compared. Its data may have moved, and is compared by its
    fingerprint."""
    if not isinstance(source, Mapping):
        return source
    own = {key: value for key, value in source.items() if key not in ("path", "epochs")}
    return own | {"weight": _until(own.get("weight"), step)}


def _until(value: Any, step: int | None) -> Any:
    """A value that may change at steps, [[step, value], ...], restricted to the changes before
    `step`. With one change only it is what it would be without a list."""
    if not isinstance(value, list) or step is None:
        return value
    steps_done = range(max(step, 1))
    past = [change for change in value if isinstance(change, list) and change[0] in steps_done]
    if len(past) == 1:
        return past[0][1]
    return past


def compare(manifest: Manifest, spec: RunSpec, job: Job) -> Changes:
    """The differences between this run and the run that wrote the checkpoint."""
    # The config, in the form in which a manifest keeps it: tuples are lists.
    other_data = spec.config.checkpoint.allow_other_data
    now_config = json.loads(json.dumps(spec.config.plain()))
    changes = compare_configs(
        manifest.config, now_config, other_data=other_data, step=manifest.step
    )

    # What the data hold, wherever they lie.
    then, now = _Data.of(manifest.data), _Data.of(spec.data)
    if len(then.digests) == 1:  # written before images had a fingerprint of the validation set
        now = _Data(now.samples, now.digests[:1])
    changes.add(DATA, then, now, refuse=not other_data, words=str)

    # What may differ, and is said.
    assert job.layout is not None
    changes.add("layout", manifest.layout.sizes, job.layout.sizes)
    changes.add("experts", manifest.layout.experts, job.layout.experts)
    last_step = manifest.counters.get("steps")
    changes.add("the last step, where the learning rate ends", last_step, spec.steps)

    # Versions of the code, and a digest of the reference, which either run may be without.
    for name in dict.fromkeys((*spec.versions, REFERENCE)):
        then_version, now_version = manifest.versions.get(name), spec.versions.get(name)
        changes.add(name, then_version, now_version, refuse=name == REFERENCE)
    return changes


@dataclass(frozen=True)
class _Data:
    """What is compared of a run's data."""

    samples: Any  # the number of training samples
    digests: tuple[str, ...]  # of the training data, and of a separate validation set

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> "_Data":
        """`about`: as in a manifest."""
        return cls(about.get("train"), tuple(str(about.get("fingerprint")).split()))

    def __str__(self) -> str:
        digests = " ".join(digest[:12] for digest in self.digests)
        return f"{self.samples} samples, fingerprint {digests}"


def check(manifest: Manifest, spec: RunSpec, job: Job, checkpoint: Path) -> None:
    """Raises InputError if a checkpoint is not of this run; names every refused difference, with
    both values."""
    changes = compare(manifest, spec, job)
    if changes.refused:
        lines = "\n".join(f"  {line}" for line in changes.refused)
        raise InputError(
            f"the config is not that of {checkpoint} (there -> here):\n{lines}\n"
            f"{_remedy(changes, manifest, spec)}"
        )
    counters_of(manifest)
    if manifest.step > spec.steps:
        earlier = ", or an earlier checkpoint with checkpoint.resume=CHECKPOINT"
        raise InputError(
            f"{checkpoint} is of step {manifest.step}, and this run ends at step {spec.steps}: "
            f"give it more steps, name another folder with {spec.folder_option}"
            f"{earlier if spec.in_yaml else ''}"
        )


def _remedy(changes: Changes, manifest: Manifest, spec: RunSpec) -> str:
    remedy = (
        "take the values of the checkpoint, or another folder for another run with "
        f"{spec.folder_option}"
    )
    model = manifest.section("model")
    instead = what_replaces(model)
    if instead is not None:
        remedy += f"; {model['name']} is no longer a model here: {instead}"
    if not changes.other_data or not spec.in_yaml:
        return remedy
    remedy += ", or allow other data with checkpoint.allow_other_data=true"
    data = manifest.section("data")
    if "end_token" not in data and data.get("tokenizer", "bytes") != "bytes":
        remedy += (
            "; an older version of meshtrain, which wrote it, may have ended documents with "
            "another token: data.end_token=TOKEN takes that one (docs/data.md)"
        )
    return remedy


def counters_of(manifest: Manifest) -> dict[str, Any]:
    """The counters of a run as its step logger wrote them. Raises InputError: they are something
    else."""
    if not _are_counters(manifest.counters):
        raise InputError(
            f"the manifest of step {manifest.step} does not say what was counted: its books are "
            "broken"
        )
    return dict(manifest.counters)


def _are_counters(counters: Mapping[str, Any]) -> bool:
    if type(counters.get("tokens")) is not int:
        return False
    epoch = counters.get("epoch")
    # Checkpoints from before losses of the user's own have no weight.
    if not isinstance(epoch, dict) or epoch.keys() - {"weight"} != {"loss", "targets", "correct"}:
        return False
    return all(isinstance(number, int | float | None) for number in epoch.values())
