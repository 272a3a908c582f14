"""What may differ between the run that saved a checkpoint and the one that goes on from it, and what may not.

The layout is not part of the experiment, nor is the size of a forward, or how the rest is computed. Another model,
another order of samples or another global batch would make it a run that never was.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshtrain.config.errors import written

_FIXED = ("model.", "data.", "batch.global_size", "train.seed")
# Of these sections: where the run began or where its data lies and how it is read, but not what it learns from what.
_FREE = frozenset(
    ("model.preset", "model.weights", "data.path", "data.cache", "data.workers", "data.prefetch", "data.pin_memory")
)
# Of this job alone, or told elsewhere.
_UNTOLD = frozenset(
    ("checkpoint.resume", "checkpoint.path", "train.output", "train.time_limit", "train.steps", "train.chaos")
)
_FILES = (
    "model.name",
    "data.source",
    "data.validation",
    "data.tokenizer",
)  # names, or the paths of files that may have moved


@dataclass
class Changes:
    """What differs, each as `train.seed: 0 -> 1` (then, now): what contradicts the checkpoint, and what need not."""

    refused: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)

    def add(
        self, name: str, then: Any, now: Any, *, refuse: bool = False, words: Callable[[Any], object] = lambda x: x
    ) -> None:
        """`words`: what people read of a value, which may be less than what is compared."""
        if then != now:
            line = f"{name}: {written(words(then))} -> {written(words(now))}"
            printable = "".join(each if each.isprintable() else "?" for each in line)  # whoever wrote the checkpoint
            (self.refused if refuse else self.listed).append(printable)


def compare_configs(then: Mapping[str, Any], now: Mapping[str, Any], *, other_data: bool = False) -> Changes:
    """Two configs as section -> key -> value, as JSON gives them back.

    Keys that only one of them has were taken away or added by another version of meshtrain, and its default stands.

    Args:
        other_data: whether the section `data` may differ.
    """
    changes = Changes()
    before, after = dict(_keys(then)), dict(_keys(now))
    for name in before.keys() & after.keys() - _UNTOLD:
        one, other = before[name], after[name]
        if name in _FILES and Path(str(one)).name == Path(str(other)).name:
            continue
        fixed = name.startswith(_FIXED) and name not in _FREE and not (other_data and name.startswith("data."))
        if name == "train.precision":  # float64 keeps float64 weights, all others float32
            fixed = "float64" in (one, other)
        changes.add(name, one, other, refuse=fixed)
    changes.refused.sort()
    changes.listed.sort()
    return changes


def _keys(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, keys in config.items():
        if section != "layout" and isinstance(keys, Mapping):  # the layout that -1 stood for is compared, not the -1
            yield from ((f"{section}.{key}", value) for key, value in keys.items())
