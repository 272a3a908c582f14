"""The section `model`: its keys are the fields of the chosen model file's `Config`; presets may
supply their values.

A model file may declare which Hugging Face keys have no effect here (`passed_over`), which keys are
implemented for one value only (`only`), and which combinations are invalid (`check`). With
`model.weights`, keys that the config does not give come from the config.json beside the weights, or
from a checkpoint's manifest.
"""

import dataclasses
import json
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from meshtrain.checkpoint.directory import MANIFEST, find_checkpoint, open_manifest
from meshtrain.config.convert import INVALID, convert, describe_unknown_key, meant_key
from meshtrain.config.draft import ConfigDraft
from meshtrain.config.errors import Place, nearest
from meshtrain.config.hub_names import with_commit
from meshtrain.config.keys import Key, describe_type, keys_of
from meshtrain.config.schema import OWN_MODEL_KEYS
from meshtrain.config.yaml_reader import Node, describe, read_text
from meshtrain.errors import InputError, yaml_text
from meshtrain.huggingface import safetensors as weights
from meshtrain.huggingface.former_models import FORMER_MODELS, of_today
from meshtrain.huggingface.rope_keys import (
    BOTH_FORMS,
    MODEL_KEYS,
    one_form,
    rope_contradictions,
    split_rope,
)
from meshtrain.job import locate
from meshtrain.job.hub import local_path

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
        value, child = key.default, node.get(name)
        if child is not None:
            value = convert(child, key.hint, f"model.{name}", draft.errors, key.limits)
        draft.values[f"model.{name}"] = value

    module = _load(draft, draft.values["model.name"])
    if module is not None:
        values = _ModelReader(draft, node, module, own, model_keys(module)).read()
        for name, value in values.items():
            draft.values[f"model.{name}"] = value


def model_keys(module: ModuleType) -> dict[str, Key]:
    """The keys of a model file's `Config`. Raises TypeError: no such dataclass, or a field that
    YAML cannot express."""
    cls = getattr(module, "Config", None)
    if not dataclasses.is_dataclass(cls) or not isinstance(cls, type):
        raise TypeError(
            "a model file has a dataclass `Config`, whose fields are the keys of the section model"
        )
    keys = keys_of(cls)
    for own in OWN_MODEL_KEYS:
        if own in keys:
            raise TypeError(
                f"its Config has a field called {own}, which the section model has for itself: "
                "rename it"
            )
    return keys


def _load(draft: ConfigDraft, name: Any) -> ModuleType | None:
    """The module of a model file; None, with the error reported, if it is none."""
    if name is INVALID:
        return None
    unusable = f"the model file {name} cannot be used"
    try:
        module = locate.model_file(name)
        model_keys(module)
    except SyntaxError as error:
        problem = f"{error.filename}:{error.lineno}: this is not Python: {error.msg}"
    except FileNotFoundError as error:
        near = nearest(name, locate.names("models", ".py"))
        if name in FORMER_MODELS:
            problem = f"model.name: {name} is no longer a model here: {FORMER_MODELS[name]}"
        elif near:
            problem = f"model.name: {error} (did you mean {near}?)"
        else:
            problem = f"model.name: {error}: mend the path"
    except (ImportError, OSError, TypeError) as error:
        problem = f"{unusable}: {error}"
    except (Exception, SystemExit) as error:
        # A user's file may raise anything while it is imported.
        problem = f"{unusable}: {locate.raised(error)}"
    else:
        if callable(getattr(module, "Model", None)):
            return module
        problem = f"{unusable}: it has no `Model`, a class that takes a Config"
    draft.report(draft.place("model.name"), problem)
    return None


@dataclass(frozen=True)
class _ModelReader:
    """Reads the keys of a model's `Config`."""

    draft: ConfigDraft
    node: Node  # the section
    module: ModuleType  # the model file
    own: dict[str, Key]  # the keys that every model's section has
    keys: dict[str, Key]  # those of the model's Config

    def read(self) -> dict[str, Any]:
        """The values of all keys: as given in the section, else from the preset or from beside the
        weights, else the default."""
        draft = self.draft
        count_before = len(draft.errors)
        given = self._read_given(self.node, self.own)
        if "path" in self.keys:  # a folder with a config.json
            path = with_commit(draft, "model.path", given.get("path"))
            if path is not given.get("path"):
                given["path"] = path if path is INVALID else str(local_path(path))
        has_both_ropes = self.keys.keys() >= BOTH_FORMS
        if has_both_ropes and INVALID not in given.values():
            for names, problem in rope_contradictions(given):
                place = draft.place_of_any([f"model.{name}" for name in names])
                draft.report(place, f"model: {problem}")

        supplied = self._preset() | self._beside_weights()
        if has_both_ropes and given.keys() & {"rope_theta", "rope_scaling"}:
            # As one rope_parameters they would count more than what the config gives.
            supplied = split_rope(supplied, MODEL_KEYS & self.keys.keys())
        self._report_missing(given.keys() | supplied.keys())

        # What is no valid YAML is in `given`, too, and was reported before.
        if len(draft.errors) > count_before or INVALID in given.values():
            values = {name: given.get(name, INVALID) for name in self.keys}
        else:
            defaults = {name: key.default for name, key in self.keys.items()}
            values = self._build_config(defaults | supplied | given)
        if INVALID in values.values():
            return values
        return one_form(values)

    def _read_given(self, node: Node, own: dict[str, Key]) -> dict[str, Any]:
        """The keys that a mapping gives: the section, or what lies beside the weights, which has
        none of the section's `own` keys."""
        draft = self.draft
        passed_over: frozenset[str] = getattr(self.module, "passed_over", frozenset())
        only: dict[str, Any] = getattr(self.module, "only", {})
        values: dict[str, Any] = {}
        for name, child in node.value.items():
            if name in own or name in passed_over or child.broken:
                continue
            if name in only and not _is_same(child.plain, only[name]):
                advice = _WAYS_OUT.get(name, "use that, or leave it out")
                draft.report(
                    child.at,
                    f"model.{name}: {yaml_text(child.plain)} is not built, only "
                    f"{yaml_text(only[name])} is: {advice}",
                )
            elif name in self.keys:
                key = self.keys[name]
                values[name] = convert(
                    child, key.hint, f"model.{name}", draft.errors, key.limits, key.default
                )
            elif name not in only:
                known = own | self.keys
                message = describe_unknown_key(name, "model", known, draft.elsewhere)
                draft.report(child.key_at, message)
                meant = meant_key(name, known)
                if meant in self.keys and meant not in node.value:
                    values[meant] = INVALID
        return values

    def _preset(self) -> dict[str, Any]:
        """The keys of `model.preset`."""
        draft = self.draft
        name = draft.values["model.preset"]
        presets: dict[str, dict[str, Any]] = getattr(self.module, "presets", {})
        if name is None or name is INVALID:
            return {}
        place = draft.place("model.preset")
        if name not in presets:
            near = nearest(name, presets)
            if near:
                advice = f"did you mean {near}?"
            elif presets:
                advice = f"its presets are {', '.join(presets)}"
            else:
                advice = "it has no presets: take the key away"
            draft.report(place, f"the model has no preset {yaml_text(name)}: {advice}")
            draft.values["model.preset"] = INVALID
            return {}
        unknown = sorted(presets[name].keys() - self.keys.keys())
        if unknown:
            draft.report(
                place,
                f"the preset {name} gives {', '.join(unknown)}, which the model's Config does not "
                "have: mend the file",
            )
        return dict(presets[name])

    def _beside_weights(self) -> dict[str, Any]:
        """The keys stored beside `model.weights`. Replaces a run's folder by its newest checkpoint
        in the resolved config, and a name on the hub by that of a commit."""
        draft = self.draft
        name = draft.values["model.weights"]
        if name is None or name is INVALID:
            return {}
        place = draft.place("model.weights")
        count_before = len(draft.errors)
        if draft.values["model.preset"] is not None:
            draft.report(
                place, "model.preset and model.weights both give the sizes: take one of them away"
            )

        name = with_commit(draft, "model.weights", name)
        draft.values["model.weights"] = name
        if name is INVALID:
            return {}

        values: dict[str, Any] = {}
        try:
            folder = local_path(name)
            checkpoint = find_checkpoint(folder)
            if checkpoint is not None:
                values = self._of_checkpoint(place, checkpoint)
                draft.values["model.weights"] = str(checkpoint)
            elif "path" in self.keys:  # of a model of any type, which reads the config.json itself
                values = {"path": str(folder)}
            elif hasattr(self.module, "from_hugging_face"):
                values = self._of_config_json(place, folder)
        except InputError as error:
            draft.report(place, f"model.weights: {error}")

        if len(draft.errors) > count_before:
            draft.values["model.weights"] = INVALID
            return {}
        return values

    def _of_checkpoint(self, place: Place, checkpoint: Path) -> dict[str, Any]:
        """The model keys of the run that wrote a checkpoint, checked like keys given in the
        config."""
        draft = self.draft
        manifest, _ = open_manifest(checkpoint)
        section = of_today(manifest.section("model"))
        theirs, mine = section.get("name"), draft.values["model.name"]
        # A user's model file may have moved; our own models are told apart by their names.
        if theirs != mine and {theirs, mine} & set(locate.names("models", ".py")):
            draft.report(
                place,
                f"model.weights: {checkpoint} holds the model {yaml_text(theirs)}, and model.name "
                f"is {mine}",
            )
            return {}
        keys = {key: value for key, value in section.items() if key not in OWN_MODEL_KEYS}
        text = json.dumps(keys, ensure_ascii=False)
        origin = Place(0, 0, 0, f"{checkpoint / MANIFEST}: config")
        node = read_text(text, lambda line, column: origin, draft.errors)
        if node is None or node.broken:
            return {}
        return self._read_given(node, {})

    def _of_config_json(self, place: Place, folder: Path) -> dict[str, Any]:
        """The keys of a config.json, checked like keys pasted into the config; errors name that
        file and the line."""
        draft = self.draft
        count_before = len(draft.errors)
        file = str(folder / weights.CONFIG)
        text = weights.read_config(folder).replace("\t", " ")  # JSON may be indented with tabs
        node = read_text(text, lambda line, column: Place.in_file(file, line), draft.errors)
        if node is None or node.broken:
            return {}
        kind = node.get("model_type")
        if kind is None or kind.plain != self.module.model_type:
            found = "is missing" if kind is None else f"is {yaml_text(kind.plain)}"
            draft.report(
                place,
                f"model.weights: model_type {found} in {file}: model.name "
                f"{draft.values['model.name']} takes {self.module.model_type} only",
            )
            return {}
        values = self._read_given(node, {})
        if len(draft.errors) > count_before:
            return {}
        keys = self.module.from_hugging_face(values)
        if keys.get("num_nextn_predict_layers"):
            with suppress(InputError):  # of files that cannot be read: others report it
                keys["num_nextn_predict_layers"] = _stored_predictions(keys, folder)
        return keys

    def _report_missing(self, known: Set[str]) -> None:
        """Reports required keys that nothing gives, unless what was to give them is wrong."""
        draft = self.draft
        missing = [name for name, key in self.keys.items() if key.required and name not in known]
        if not missing or INVALID in (draft.values["model.weights"], draft.values["model.preset"]):
            return
        needed = ", ".join(f"{name} ({describe_type(self.keys[name].hint)})" for name in missing)
        advice = "give it" if len(missing) == 1 else "give them"
        presets = getattr(self.module, "presets", {})
        if presets:
            advice += f", or a preset: {', '.join(presets)}"
        draft.report(self.node.key_at, f"the model needs {needed}: {advice}")

    def _build_config(self, values: dict[str, Any]) -> dict[str, Any]:
        """The keys as an instance of the model's Config holds them, after the model's check for
        invalid combinations."""
        draft = self.draft
        try:
            config = self.module.Config(**values)
            problems: list[tuple[str, str]] = []
            if hasattr(self.module, "check"):
                problems = self.module.check(config)
        except (TypeError, ValueError, ArithmeticError) as error:
            # Of __post_init__ about its fields, or a division by 0.
            draft.report(self.node.key_at, f"the model refuses these keys: {error}")
            return dict.fromkeys(values, INVALID)

        for key, problem in problems:
            draft.report(draft.place(self._origin(key)), f"model.{key}: {problem}")
        # They are reported: no rule and no model may use them.
        wrong = {key for key, _ in problems}
        return {name: INVALID if name in wrong else getattr(config, name) for name in values}

    def _origin(self, key: str) -> str:
        """The key of the config from which a value comes: its own, or that of the preset or the
        weights."""
        if self.node.get(key) is None:
            for source in ("model.preset", "model.weights"):
                if self.draft.values[source]:
                    return source
        return f"model.{key}"


def _stored_predictions(keys: Mapping[str, Any], folder: Path) -> int:
    """How many of the layers that predict further tokens a folder has: transformers writes their
    number into each config.json, and leaves them out of its files. `keys`: of config.json."""
    names: set[str] = set()
    for entries in weights.stored(folder).values():
        names |= entries.keys()
    first = keys["num_hidden_layers"]
    last = first + keys["num_nextn_predict_layers"]
    return sum(f"model.layers.{layer}.eh_proj.weight" in names for layer in range(first, last))


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are equal, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
