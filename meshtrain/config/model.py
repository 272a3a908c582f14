"""The section `model`: its keys are the fields of the chosen model file's `Config`; presets may
supply their values.

A model file may declare which Hugging Face keys have no effect here (`passed_over`), which keys are
implemented for one value only (`only`), and which combinations are invalid (`check`). With
`model.weights`, keys that the config does not give come from the config.json beside the weights, or
from a checkpoint's manifest.
"""

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from meshtrain.checkpoint.directory import MANIFEST, find_checkpoint, open_manifest
from meshtrain.config import locate
from meshtrain.config.checks import ConfigDraft
from meshtrain.config.convert import (
    INVALID,
    Key,
    convert,
    describe_type,
    describe_unknown_key,
    keys_of,
    meant_key,
)
from meshtrain.config.errors import Place, nearest, yaml_text
from meshtrain.config.schema import OWN_MODEL_KEYS
from meshtrain.config.yaml_reader import Node, describe, read_text
from meshtrain.errors import InputError
from meshtrain.huggingface import safetensors as weights
from meshtrain.huggingface.rope_keys import (
    BOTH_FORMS,
    MODEL_KEYS,
    one_form,
    rope_contradictions,
    split_rope,
)

# Advice for keys of `only` for which using the supported value is no way out.
_WAYS_OUT = {
    "quantization_config": (
        "the weights beside it are quantized; convert them to bfloat16, and take this key away"
    )
}


def read_model(draft: ConfigDraft, own: dict[str, Key]) -> None:
    """Reads the section into `draft.values`: its `own` keys (`model.name`, ...) and those of the
    model's `Config`."""
    node = draft.root.get("model")
    if node is None:
        draft.report(
            draft.root.at,
            "the section model is missing: add `model: {name: llama}`, and the sizes you want",
        )
        return
    if node.broken:
        return
    if not isinstance(node.value, dict):
        message = f"expected keys, such as `model: {{name: llama}}`, found {describe(node.value)}"
        draft.report(node.at, f"model is a section: {message}")
        return
    for name, key in own.items():
        child = node.get(name)
        value = (
            key.default
            if child is None
            else convert(child, key.hint, f"model.{name}", draft.errors, key.limits)
        )
        draft.values[f"model.{name}"] = value
    module = _load(draft, draft.values["model.name"])
    if module is not None:
        _read_keys(draft, node, module, own)


def model_keys(module: ModuleType) -> dict[str, Key]:
    """The keys of a model file's `Config`. Raises TypeError: no such dataclass, or a field that
    YAML cannot express."""
    cls = getattr(module, "Config", None)
    if not dataclasses.is_dataclass(cls) or not isinstance(cls, type):
        raise TypeError(
            "a model file has a dataclass `Config`, whose fields are the keys of the section model"
        )
    keys = keys_of(cls)
    taken = [key for key in OWN_MODEL_KEYS if key in keys]
    if taken:
        raise TypeError(
            f"its Config has a field called {taken[0]}, which the section model has for itself: "
            "rename it"
        )
    return keys


def _load(draft: ConfigDraft, name: Any) -> ModuleType | None:
    if name is INVALID:
        return None
    place = draft.place("model.name")
    try:
        module = locate.model_file(name)
        model_keys(module)
    except SyntaxError as error:
        draft.report(place, f"{error.filename}:{error.lineno}: this is not Python: {error.msg}")
    except FileNotFoundError as error:
        near = nearest(name, locate.names("models", ".py"))
        draft.report(
            place,
            f"model.name: {error}" + (f" (did you mean {near}?)" if near else ": mend the path"),
        )
    except (ImportError, OSError, TypeError) as error:
        draft.report(place, f"the model file {name} cannot be used: {error}")
    except (
        Exception,
        SystemExit,
    ) as error:  # a user's file may raise anything while it is imported
        draft.report(place, f"the model file {name} cannot be used: {locate.raised(error)}")
    else:
        if callable(getattr(module, "Model", None)):
            return module
        draft.report(
            place,
            f"the model file {name} cannot be used: it has no `Model`, a class that takes a Config",
        )
    return None


def _read_keys(draft: ConfigDraft, node: Node, module: ModuleType, own: dict[str, Key]) -> None:
    keys = model_keys(module)
    before = len(draft.errors)
    explicit = _read_given_keys(draft, node, module, keys, own)
    has_both_forms = keys.keys() >= BOTH_FORMS
    if has_both_forms and INVALID not in explicit.values():
        for names, problem in rope_contradictions(explicit):
            draft.report(
                draft.place_of_any(tuple(f"model.{name}" for name in names)), f"model: {problem}"
            )
    preset = _preset_values(draft, module, keys) | _weights_values(draft, module, keys)
    if has_both_forms and explicit.keys() & {"rope_theta", "rope_scaling"}:
        # or it would count more than what the config gives
        preset = split_rope(preset, MODEL_KEYS & keys.keys())
    missing = [name for name, key in keys.items() if key.required and name not in explicit | preset]
    if (
        missing
        and draft.values["model.weights"] is not INVALID
        and draft.values["model.preset"] is not INVALID
    ):
        needed = ", ".join(f"{name} ({describe_type(keys[name].hint)})" for name in missing)
        presets = getattr(module, "presets", {})
        out = f"give {'it' if len(missing) == 1 else 'them'}" + (
            f", or a preset: {', '.join(presets)}" * bool(presets)
        )
        draft.report(node.key_at, f"the model needs {needed}: {out}")
    # Values that are not valid YAML were reported before.
    if len(draft.errors) > before or any(value is INVALID for value in explicit.values()):
        values = {name: explicit.get(name, INVALID) for name in keys}
    else:
        defaults = {name: key.default for name, key in keys.items()}
        values = _build_config(draft, node, module, defaults | preset | explicit)
    if INVALID not in values.values():
        values = one_form(values)
    draft.values |= {f"model.{name}": value for name, value in values.items()}


def _read_given_keys(
    draft: ConfigDraft, node: Node, module: ModuleType, keys: dict[str, Key], own: dict[str, Key]
) -> dict[str, Any]:
    passed_over: frozenset[str] = getattr(module, "passed_over", frozenset())
    only: dict[str, Any] = getattr(module, "only", {})
    values = {}
    for name, child in node.value.items():
        if name in own or name in passed_over or child.broken:
            continue
        value = child.plain
        if name in only and (
            value != only[name] or isinstance(value, bool) != isinstance(only[name], bool)
        ):
            built = yaml_text(only[name])
            way_out = _WAYS_OUT.get(name, "use that, or leave it out")
            message = f"model.{name}: {yaml_text(value)} is not built, only {built} is: {way_out}"
            draft.report(child.at, message)
        elif name in keys:
            key = keys[name]
            values[name] = convert(
                child, key.hint, f"model.{name}", draft.errors, key.limits, key.default
            )
        elif name not in only:
            draft.report(
                child.key_at, describe_unknown_key(name, "model", own | keys, draft.elsewhere)
            )
            suggestion = meant_key(name, own | keys)
            if suggestion in keys and suggestion not in node.value:
                values[suggestion] = INVALID
    return values


def _preset_values(draft: ConfigDraft, module: ModuleType, keys: dict[str, Key]) -> dict[str, Any]:
    name, presets = draft.values["model.preset"], getattr(module, "presets", {})
    if name is None or name is INVALID:
        return {}
    place = draft.place("model.preset")
    if name not in presets:
        near = nearest(name, presets)
        known = (
            f"its presets are {', '.join(presets)}"
            if presets
            else "it has no presets: take the key away"
        )
        hint = f"did you mean {near}?" if near else known
        draft.report(place, f"the model has no preset {yaml_text(name)}: {hint}")
        draft.values["model.preset"] = INVALID
        return {}
    strange = sorted(set(presets[name]) - set(keys))
    if strange:
        message = (
            f"the preset {name} gives {', '.join(strange)}, which the model's Config does not "
            "have: mend the file"
        )
        draft.report(place, message)
    return dict(presets[name])


def _weights_values(draft: ConfigDraft, module: ModuleType, keys: dict[str, Key]) -> dict[str, Any]:
    """The keys stored beside the weights. Replaces a run's folder by its newest checkpoint in the
    resolved config."""
    name = draft.values["model.weights"]
    if name is None or name is INVALID:
        return {}
    place, before = draft.place("model.weights"), len(draft.errors)
    folder = Path(name).expanduser()
    values: dict[str, Any] = {}
    if draft.values["model.preset"] is not None:
        draft.report(
            place, "model.preset and model.weights both give the sizes: take one of them away"
        )
    try:
        checkpoint = find_checkpoint(folder)
        if checkpoint is not None:
            values = _checkpoint_values(draft, place, checkpoint, module, keys)
            draft.values["model.weights"] = str(checkpoint)
        elif hasattr(module, "from_hugging_face"):
            values = _config_json_values(draft, place, folder, module, keys)
    except InputError as error:
        draft.report(place, f"model.weights: {error}")
    if len(draft.errors) > before:
        draft.values["model.weights"] = INVALID
        return {}
    return values


def _checkpoint_values(
    draft: ConfigDraft, place: Place, checkpoint: Path, module: ModuleType, keys: dict[str, Key]
) -> dict[str, Any]:
    """The model keys of the run that wrote a checkpoint, checked like keys given in the config."""
    section = open_manifest(checkpoint)[0].section("model")
    name, mine = section.get("name"), draft.values["model.name"]
    # a user's model file may have moved
    if name != mine and {name, mine} & set(locate.names("models", ".py")):
        draft.report(
            place,
            f"model.weights: {checkpoint} holds the model {yaml_text(name)}, and model.name is "
            f"{mine}",
        )
        return {}
    entries = {key: value for key, value in section.items() if key not in OWN_MODEL_KEYS}
    origin = Place(0, 0, 0, f"{checkpoint / MANIFEST}: config")
    node = read_text(
        json.dumps(entries, ensure_ascii=False), lambda line, column: origin, draft.errors
    )
    return {} if node is None or node.broken else _read_given_keys(draft, node, module, keys, {})


def _config_json_values(
    draft: ConfigDraft, place: Place, folder: Path, module: ModuleType, keys: dict[str, Key]
) -> dict[str, Any]:
    """The keys of a config.json, checked like keys pasted into the config; errors name that file
    and the line."""
    text, file, before = (
        weights.read_config(folder),
        str(folder / weights.CONFIG),
        len(draft.errors),
    )
    node = read_text(
        text.replace("\t", " "), lambda line, column: Place.in_file(file, line), draft.errors
    )
    if node is None or node.broken:
        return {}
    kind = node.get("model_type")
    if kind is None or kind.plain != module.model_type:
        is_written = "is missing" if kind is None else f"is {yaml_text(kind.plain)}"
        message = (
            f"model.weights: model_type {is_written} in {file}: model.name "
            f"{draft.values['model.name']} takes "
        )
        draft.report(place, f"{message}{module.model_type} only")
        return {}
    values = _read_given_keys(draft, node, module, keys, {})
    return {} if len(draft.errors) > before else module.from_hugging_face(values)


def _build_config(
    draft: ConfigDraft, node: Node, module: ModuleType, values: dict[str, Any]
) -> dict[str, Any]:
    """The keys as an instance of the model's Config holds them, after the model's check for invalid
    combinations."""
    try:
        config = module.Config(**values)
        problems: list[tuple[str, str]] = module.check(config) if hasattr(module, "check") else []
    except (
        TypeError,
        ValueError,
        ArithmeticError,
    ) as error:  # __post_init__ about its fields, or a division by 0
        draft.report(node.key_at, f"the model refuses these keys: {error}")
        return dict.fromkeys(values, INVALID)
    for key, problem in problems:
        origin = next((of for of in ("preset", "weights") if draft.values[f"model.{of}"]), key)
        place = draft.place(f"model.{key if node.get(key) is not None else origin}")
        draft.report(place, f"model.{key}: {problem}")
    wrong = {key for key, _ in problems}  # already reported: no rule and no model may use them
    return {name: INVALID if name in wrong else getattr(config, name) for name in values}
