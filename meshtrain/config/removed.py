"""Keys that an earlier version had, and what takes the place of each.

A config that names one gets an error that says so. A checkpoint of an earlier version is still
read: the config in its manifest has every key of its time, so these are taken out of it.
"""

import re
from collections.abc import Mapping
from typing import Any

# The full name of a key -> what its user does now. A key of the entries of a list has the name of
# the list in front: `train.chaos.until`.
REMOVED: dict[str, str] = {
    "checkpoint.make_room": (
        "leave room for one checkpoint more than are kept, or keep fewer of them, "
        "checkpoint.keep_last"
    ),
    "checkpoint.on_failure": (
        "take it away: a run whose save fails says so and goes on, and ends with a fault if its "
        "last state is not saved"
    ),
    "data.pin_memory": "take it away: batches are pinned wherever there is a GPU",
    "data.prefetch": "take it away: the workers read ahead what the next step takes",
    "metrics.gpu_probe": "take it away: GPUs are probed every 200 steps",
    "metrics.memory_snapshot": "use metrics.profile: [FIRST, LAST], which writes a snapshot, too",
    "metrics.tensorboard": "add it to the sinks, metrics.sinks: [tensorboard]",
    "train.chaos.again": "take it away: a fault happens in the first start of a job only",
    "train.chaos.during": "take it away: `fail-save` is the fault of a save",
    "train.chaos.until": "take it away: `slow` lasts to the end of the run",
    "train.export_format": (
        "take it away: an export stores a tensor per expert, as models are published, which "
        "transformers reads as well as fused ones"
    ),
    "train.lock_timeout_s": "take it away: a restarted job waits two minutes for the lock",
}

# A key that is still there -> a value that it had -> what its user does now.
REMOVED_VALUES: dict[str, dict[str, str]] = {
    "train.linear_precision": {
        "mxfp8": "it is no longer there: use float8, scaled for each token and each row of a weight"
    },
}


def what_replaces(section: str, name: str) -> str | None:
    """What takes the place of a key that is gone; None: there never was one.

    Args:
        section: the section as errors print it, such as `metrics`, or `train.chaos[0]` for an
            entry of a list.
    """
    without_index = re.sub(r"\[\d+\]", "", section)
    return REMOVED.get(f"{without_index}.{name}")


def without_removed(config: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sections of a config of an earlier version, without the keys and values that are gone:
    their keys have the default."""
    return {section: _without_removed(section, keys) for section, keys in config.items()}


def _without_removed(name: str, value: Any) -> Any:
    """The value of the key `name`, without the keys below it that are gone."""
    if isinstance(value, list):
        return [_without_removed(name, item) for item in value]

    if not isinstance(value, Mapping):
        return value

    kept = {}
    for key, item in value.items():
        full_name = f"{name}.{key}"
        is_value_gone = isinstance(item, str) and item in REMOVED_VALUES.get(full_name, {})
        if full_name not in REMOVED and not is_value_gone:
            kept[key] = _without_removed(full_name, item)
    return kept
