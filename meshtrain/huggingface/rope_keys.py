"""The keys of rotary positions in a config.json: `rope_theta`, `rope_scaling`, and
`rope_parameters`, which has both.

transformers 5 writes `rope_parameters`, older versions the other two; `meshtrain/rotary.py`
computes what they say.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# Keys of a model that `rope_parameters` may hold beside the scaling.
MODEL_KEYS = frozenset({"rope_theta", "partial_rotary_factor"})
# Keys of a model that takes both forms.
BOTH_FORMS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})


def rope_type(scaling: Mapping[str, Any]) -> Any:
    """The kind of scaling. Configs older than transformers 4.43 call the key `type`."""
    return scaling.get("rope_type", scaling.get("type", "default"))


def split_rope(
    keys: Mapping[str, Any],
    model_keys: frozenset[str] = MODEL_KEYS,
    *,
    first: str = "rope_parameters",
) -> dict[str, Any]:
    """The keys with `rope_parameters` split up into `rope_scaling` and keys of the model.

    `first`: which of `rope_parameters` and `rope_scaling` counts where both are given.
    """
    split = dict(keys)
    given = split.pop("rope_parameters", None), split.get("rope_scaling")
    if first == "rope_scaling":
        given = given[::-1]
    rope = given[0] or given[1] or {}
    scaling = {}
    for key, value in rope.items():
        if key in model_keys:
            split[key] = value
        else:
            scaling[key] = value
    says_nothing = rope_type(scaling) == "default" and scaling.keys() <= {"rope_type", "type"}
    split["rope_scaling"] = None if says_nothing else scaling
    return split


def one_form(keys: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of a model with `rope_parameters` split up and null; other keys, or damaged ones,
    are unchanged.

    So a resolved config says each thing once: a default of `rope_theta` beside `rope_parameters`,
    which counts, would contradict it.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(keys.get(name), Mapping | None):
            return dict(keys)
    if not keys.keys() >= BOTH_FORMS:
        return dict(keys)
    model_keys = MODEL_KEYS & keys.keys()
    split = split_rope(keys, model_keys)
    for name in model_keys:
        if type(split[name]) is int:
            split[name] = float(split[name])
    return {name: split.get(name) for name in keys}


def rope_contradictions(given: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys that say one thing of rotary positions twice, and not the same: (the keys, what is wrong
    and what works).

    `given`: the keys of one source, such as a YAML file; what another source has given is
    overridden instead.
    """
    parameters = given.get("rope_parameters") or {}
    scaling = given.get("rope_scaling") or {}
    for name in sorted(MODEL_KEYS):
        places = (
            (name, name, given.get(name)),
            ("rope_scaling", f"rope_scaling.{name}", scaling.get(name)),
            ("rope_parameters", f"rope_parameters.{name}", parameters.get(name)),
        )
        said = [(key, place, value) for key, place, value in places if value is not None]
        if any(value != said[0][2] for _, _, value in said):
            written = " and ".join(f"{place} {value}" for _, place, value in said)
            keys = tuple(key for key, _, _ in said)
            yield keys, f"{written} contradict each other: take all but one of them away"
    if parameters and scaling and _kind_of_scaling(parameters) != _kind_of_scaling(scaling):
        written = f"rope_scaling {_text(scaling)} and rope_parameters {_text(parameters)}"
        remedy = (
            "take one of them away (on the command line with model.rope_scaling=null or "
            "model.rope_parameters=null)"
        )
        yield ("rope_scaling", "rope_parameters"), f"{written} contradict each other: {remedy}"


def _kind_of_scaling(rope: dict[str, Any]) -> dict[str, Any]:
    scaling = {key: value for key, value in rope.items() if key not in {*MODEL_KEYS, "type"}}
    return scaling | {"rope_type": rope_type(rope)}


def _text(mapping: dict[str, Any]) -> str:
    """As in YAML."""
    return "{" + ", ".join(f"{key}: {value}" for key, value in mapping.items()) + "}"
