"""The keys of rotary positions in a config.json: `rope_theta`, `rope_scaling`, and `rope_parameters`, which has both.

transformers 5 writes `rope_parameters`, older versions the other two; `meshtrain/rotary.py` computes what they say.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# Keys of a model that `rope_parameters` may hold beside the scaling.
MODEL_KEYS = frozenset({"rope_theta", "partial_rotary_factor"})


def rope_type(scaling: Mapping[str, Any]) -> Any:
    """The kind of scaling. Configs older than transformers 4.43 call the key `type`."""
    return scaling.get("rope_type", scaling.get("type", "default"))


def split_rope(
    keys: Mapping[str, Any], model_keys: frozenset[str] = MODEL_KEYS, *, first: str = "rope_parameters"
) -> dict[str, Any]:
    """The keys with `rope_parameters` split up into `rope_scaling` and keys of the model.

    `first`: which of `rope_parameters` and `rope_scaling` counts where both are given.
    """
    split = dict(keys)
    parameters, scaling = split.pop("rope_parameters", None), split.get("rope_scaling")
    rope = (scaling or parameters or {}) if first == "rope_scaling" else (parameters or scaling or {})
    split |= {key: rope[key] for key in model_keys & rope.keys()}
    scaling = {key: value for key, value in rope.items() if key not in model_keys}
    says_nothing = rope_type(scaling) == "default" and scaling.keys() <= {"rope_type", "type"}
    split["rope_scaling"] = None if says_nothing else scaling
    return split


def rope_contradictions(given: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys that say one thing of rotary positions twice, and not the same: (the keys, what is wrong and what works).

    `given`: the keys of one source, such as a YAML file; what another source has given is overridden instead.
    """
    parameters, scaling = given.get("rope_parameters") or {}, given.get("rope_scaling") or {}
    for name in sorted(MODEL_KEYS):
        places = {
            (name,): given.get(name),
            ("rope_scaling", name): scaling.get(name),
            ("rope_parameters", name): parameters.get(name),
        }
        values = {place: value for place, value in places.items() if value is not None}
        if len(set(map(repr, values.values()))) > 1:
            written = " and ".join(f"{'.'.join(place)} {value}" for place, value in values.items())
            keys = tuple(place[0] for place in values)
            yield keys, f"{written} contradict each other: take all but one of them away"
    if parameters and scaling and _kind_of_scaling(parameters) != _kind_of_scaling(scaling):
        written = f"rope_scaling {_text(scaling)} and rope_parameters {_text(parameters)}"
        remedy = "take one of them away (on the command line with model.rope_scaling=null)"
        yield ("rope_scaling", "rope_parameters"), f"{written} contradict each other: {remedy}"


def _kind_of_scaling(rope: dict[str, Any]) -> dict[str, Any]:
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor", "type")}
    return scaling | {"rope_type": rope_type(rope)}


def _text(mapping: dict[str, Any]) -> str:
    """As in YAML."""
    return "{" + ", ".join(f"{key}: {value}" for key, value in mapping.items()) + "}"
