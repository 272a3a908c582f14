"""Writes docs/configuration.md and configs/schema.json from the dataclasses: `python -m meshtrain.config.docs`.

The schema lets editors complete and check a config as it is typed. With the YAML language server (VS Code, Neovim, ...)
a config asks for it at its top: `# yaml-language-server: $schema=schema.json`.
"""

import dataclasses
import inspect
import json
import re
import types
from types import ModuleType
from typing import Any, Literal, Union, get_args, get_origin

from meshtrain import locate
from meshtrain.config import NAMES, SECTIONS, ModelSection
from meshtrain.config.errors import written
from meshtrain.config.model import model_keys
from meshtrain.config.values import Key, Limits, expected, is_mapping, keys_of
from meshtrain.layout import AXES

_AXES = {
    "pp": "Pipeline stages: each holds some of the blocks.",
    "dp_replicate": "Copies of the model on different samples (DDP; with `dp_shard` above 1: HSDP).",
    "dp_shard": "Ranks that share one copy of the model and take different samples (FSDP).",
    "cp": "Parts of each sequence (context parallel).",
    "tp": "Parts of each layer (tensor parallel).",
}
_LAYOUT = (
    "The axes of the mesh, outermost first, in the order in which they are written: neighbouring ranks differ in the "
    "last one. The sizes multiply to the number of processes; one of them may be -1, whatever is left. Without this "
    "section it is `{dp_shard: -1}`. The layout never changes what is computed."
)
_SIZE = "an integer of at least 1, or -1 for whatever is left"


# JSON Schema --------------------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 7, which editors know best) of a config."""
    sections: dict[str, Any] = {name: _section_schema(cls) for name, cls in SECTIONS.items()}
    sections["train"]["oneOf"] = [
        {"required": [key], "properties": {key: {"type": "integer"}}} for key in ("steps", "epochs")
    ]
    sections["train"]["type"] = "object"
    sections["model"] = _model_schema()
    size = {"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}]}
    sections["layout"] = {
        "description": _LAYOUT,
        "type": ["object", "null"],
        "properties": {axis: {"description": doc, **size} for axis, doc in _AXES.items()},
        "additionalProperties": False,
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A meshtrain config",
        "type": "object",
        "properties": {name: sections[name] for name in NAMES},
        "required": ["model", "batch", "train"],
        "additionalProperties": False,
    }


def _section_schema(cls: type) -> dict[str, Any]:
    keys = keys_of(cls)
    required = [name for name, key in keys.items() if key.required]
    return {
        "description": inspect.cleandoc(cls.__doc__ or ""),
        "type": "object" if required else ["object", "null"],
        "properties": {name: _key_schema(key) for name, key in keys.items()},
        "additionalProperties": False,
    } | ({"required": required} if required else {})


def _model_schema() -> dict[str, Any]:
    own = {name: _key_schema(key) for name, key in _own_keys().items()}
    kinds: list[dict[str, Any]] = []
    for name, module in _models().items():
        keys, presets = model_keys(module), getattr(module, "presets", {})
        properties = {"name": {"enum": [name]}, "preset": {"enum": [*presets, None]}}
        properties |= {"weights": own["weights"]}
        properties |= {key: _key_schema(_documented(one, module)) for key, one in keys.items()}
        properties |= {key: {"enum": [value]} for key, value in getattr(module, "only", {}).items() if key not in keys}
        kind: dict[str, Any] = {"title": f"models/{name}.py", "properties": properties, "additionalProperties": False}
        if name != own["name"]["default"]:
            kind["required"] = ["name"]
        passed_over = sorted(getattr(module, "passed_over", ()))
        if passed_over:  # as a pattern, so that editors do not offer them
            kind["patternProperties"] = {f"^({'|'.join(passed_over)})$": {}}
        kinds.append(kind)
    file = {"name": {"type": "string", "pattern": r"\.py$"}}
    kinds.append({"title": "a model file of your own", "properties": file, "required": ["name"]})
    return {
        "description": inspect.cleandoc(ModelSection.__doc__ or ""),
        "type": "object",
        "properties": own,
        "anyOf": kinds,
    }


def _key_schema(key: Key) -> dict[str, Any]:
    found = {"description": key.doc} if key.doc else {}
    found |= value_schema(key.hint, key.limits)
    return found if key.required else found | {"default": key.default}


def value_schema(hint: Any, limits: Limits | None = None) -> dict[str, Any]:
    """The JSON Schema of the values that an annotation and its limits allow."""
    limits = limits or Limits()
    kind, args = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        options = [value_schema(option, limits) for option in args]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if kind is Literal:
        return {"enum": list(args)}
    if kind in (int, float):
        named = {"minimum": "minimum", "above": "exclusiveMinimum", "maximum": "maximum", "below": "exclusiveMaximum"}
        bounds = {word: getattr(limits, name) for name, word in named.items() if getattr(limits, name) is not None}
        return {"type": "integer" if kind is int else "number"} | bounds
    if kind is str and limits.names:
        names = {"enum": list(limits.names)}
        file = {"type": "string", "pattern": re.escape(limits.suffix or "") + "$"}
        return {"anyOf": [names, file]} if limits.suffix else names
    if kind in (list, tuple):
        inner = [value_schema(one, limits) for one in args if one is not Ellipsis]
        fixed = {"minItems": len(args), "maxItems": len(args)} if kind is tuple and args and ... not in args else {}
        different = [one for i, one in enumerate(inner) if one not in inner[:i]]
        items = {"items": different[0] if len(different) == 1 else {"anyOf": different}} if different else {}
        return {"type": "array"} | items | fixed
    if is_mapping(kind):
        return _section_schema(kind)
    if kind is dict:
        return {"type": "object"} | ({"additionalProperties": value_schema(args[1])} if args else {})
    names_of = {bool: "boolean", str: "string", type(None): "null", None: "null"}
    return {"type": names_of[kind]} if kind in names_of else {}


# Documentation ------------------------------------------------------------------------------------------------------


def markdown() -> str:
    """docs/configuration.md."""
    parts = [_HEAD]
    for name in NAMES:
        parts.append(f"## {name}\n")
        if name == "layout":
            parts.append(_LAYOUT + "\n")
            parts.append(_table([(axis, _SIZE, "", doc) for axis, doc in _AXES.items()]))
        elif name == "model":
            parts += _model_parts()
        else:
            parts.append(inspect.cleandoc(SECTIONS[name].__doc__) + "\n")
            keys = keys_of(SECTIONS[name])
            parts.append(_table([_row(key) for key in keys.values()]))
            for key in keys.values():
                for cls in filter(is_mapping, get_args(key.hint)):
                    parts.append(f"### {name}.{key.name}\n\n{inspect.cleandoc(cls.__doc__ or '')}\n")
                    parts.append(_table([_row(one) for one in keys_of(cls).values()]))
    return "\n".join(parts)


def _model_parts() -> list[str]:
    parts = [inspect.cleandoc(ModelSection.__doc__ or "") + "\n"]
    parts.append(_table([_row(key) for key in _own_keys().values()]))
    parts.append(_MODEL)
    for name, module in _models().items():
        parts.append(f"### {name}\n")
        parts.append((module.__doc__ or "").split("\n\n")[0].replace("\n", " ") + "\n")
        parts.append(_table([_row(_documented(key, module)) for key in model_keys(module).values()]))
        if getattr(module, "presets", {}):
            parts.append(f"Presets: {_listed(module.presets)}.\n")
        if getattr(module, "only", {}):
            built = [f"{key}: {written(value)}" for key, value in module.only.items()]
            parts.append(f"Accepted with the one value that is built: {_listed(built)}.\n")
        if getattr(module, "passed_over", ()):
            parts.append(f"Passed over, since they change nothing here: {_listed(sorted(module.passed_over))}.\n")
    return parts


def _row(key: Key) -> tuple[str, str, str, str]:
    default = "to be given" if key.required else f"`{written(key.default)}`"
    return key.name, expected(key.hint, key.limits), default, key.doc


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, value, default, doc in rows:
        cells = [f"`{name}`", value, default, doc]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _documented(key: Key, module: ModuleType) -> Key:
    """A key of a model with the comment behind its field, for model files that know nothing of `key(...)`."""
    if key.doc:
        return key
    match = re.search(rf"^\s+{key.name}\s*:[^#\n]*#\s*(.+)$", inspect.getsource(module.Config), re.MULTILINE)
    return dataclasses.replace(key, doc=match[1] if match else "")


def _own_keys() -> dict[str, Key]:
    keys = keys_of(ModelSection)
    own = {name: keys[name] for name in ("name", "preset", "weights")}
    names = tuple(_models())
    return own | {"name": dataclasses.replace(own["name"], limits=Limits(names=names, suffix=".py"))}


def _models() -> dict[str, ModuleType]:
    names = sorted(locate.names("models", ".py"), key=lambda name: name != ModelSection.name)  # the default comes first
    return {name: locate.model_file(name) for name in names}


_HEAD = """# Configuration

<!-- Generated by `python -m meshtrain.config.docs` from the dataclasses in meshtrain/config/: change those. -->

A run is one YAML file. Its sections and their keys are listed below; what a file leaves out has the default. At the
least a config names a model, the sizes of the batch, and the length of the run:

```yaml
model: {name: llama, hidden_size: 256, num_hidden_layers: 4}
batch: {global_size: 32, micro_size: 8}
train: {steps: 200}
```

**Overrides.** Any key can be set on the command line, after the file: `train.steps=50 optimizer.lr=1e-3`. The values
are YAML. `layout.tp=2` adds an axis where the usual order has it (@AXES@), and
`layout='{dp_shard: 2, tp: 2}'` replaces the whole section. `data.path=null` takes a value away. A run shows which of
its values come from the command line, and writes the whole config, defaults included, as `config.yaml` into its folder;
that file can be run again.

**Numbers** are those of YAML 1.2: `3e-4` is a number, `yes` and `on` are texts (write `true`), and `1_000` is a text
(write `1000`). Texts are never read as numbers, so a number has no quotes. An integer is fine where a number is asked
for, but `50.0` is no integer. A key may stand once. Tags, anchors, aliases and merge keys are refused.

**Errors** are found before any process talks to another, and are reported together. Each names the file and the line,
or the override on the command line:

```
configs/mine.yaml: 2 errors
configs/mine.yaml:7: there is no key optimizer.learning_rate: did you mean lr?
command line: train.steps=abc: train.steps: expected an integer of at least 1, or null, found the text 'abc'
```

**Editors** complete and check a config as you type when a comment at its top says
`# yaml-language-server: $schema=schema.json` (the path of `configs/schema.json`, as seen from the file).
""".replace("@AXES@", ", ".join(AXES))

_MODEL = """The other keys of the section are those of the model. They are Hugging Face's, so a `config.json` can be
pasted whole (JSON is YAML). A model file of your own has a dataclass `Config`, whose fields become the keys of this
section, and a class `Model` that takes a `Config`. It may also have `presets` (name -> keys), `passed_over` (keys that
are accepted and change nothing), `only` (key -> the one value that is accepted), and `check(config)`, which returns
impossible combinations as pairs of a key and a sentence. [Hugging Face weights](huggingface.md) says what it has for
those.
"""


def main() -> None:
    """Writes both files into the repository that this package lies in."""
    configs = locate.bundled("configs")
    (configs / "schema.json").write_text(schema_text(), encoding="utf-8")
    (configs.parent / "docs" / "configuration.md").write_text(markdown(), encoding="utf-8")


def schema_text() -> str:
    """configs/schema.json."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    main()
