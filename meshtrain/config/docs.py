"""Writes docs/configuration.md and configs/schema.json from the dataclasses: `python -m
meshtrain.config.docs`.

With the schema, editors complete and check a config as it is typed.
"""

import ast
import dataclasses
import inspect
import json
import re
import types
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Union, get_args, get_origin

from meshtrain.config import locate
from meshtrain.config.convert import (
    NO_LIMITS,
    Key,
    Limits,
    describe_type,
    is_mapping,
    is_stepwise,
    keys_of,
)
from meshtrain.config.errors import yaml_text
from meshtrain.config.schema import NAMES, OWN_MODEL_KEYS, SECTIONS, ModelSection

_AXES = {
    "pp": "Pipeline stages: each holds some of the blocks.",
    "dp_replicate": (
        "Copies of the model on different samples (DDP; with `dp_shard` above 1: HSDP)."
    ),
    "dp_shard": "Ranks that share one copy of the model and take different samples (FSDP).",
    "cp": "Parts of each sequence (context parallel).",
    "tp": "Parts of each layer (tensor parallel).",
}
_LAYOUT = (
    "The axes of the mesh, outermost first, in the order in which they are written: neighbouring "
    "ranks differ in the "
    "last one. The sizes multiply to the number of processes; one of them may be -1, whatever is "
    "left. Without this "
    "section it is `{dp_shard: -1}`. The layout never changes what is computed."
)
_SIZE = "an integer of at least 1, or -1 for whatever is left"


def schema() -> dict[str, Any]:
    """The JSON Schema of a config (draft 7, the one that editors support best)."""
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
    keys = _documented(cls)
    required = [name for name, key in keys.items() if key.required]
    return {
        "description": _paragraphs(cls),
        "type": "object" if required else ["object", "null"],
        "properties": {name: _key_schema(key) for name, key in keys.items()},
        "additionalProperties": False,
    } | ({"required": required} if required else {})


def _model_schema() -> dict[str, Any]:
    own = {name: _key_schema(key) for name, key in _own_keys().items()}
    kinds: list[dict[str, Any]] = []
    for name, module in _models().items():
        keys, presets = _documented(module.Config), getattr(module, "presets", {})
        properties = {"name": {"enum": [name]}, "preset": {"enum": [*presets, None]}}
        properties |= {"weights": own["weights"]}
        properties |= {name: _key_schema(key) for name, key in keys.items()}
        properties |= {
            key: {"enum": [value]}
            for key, value in getattr(module, "only", {}).items()
            if key not in keys
        }
        kind: dict[str, Any] = {
            "title": f"models/{name}.py",
            "properties": properties,
            "additionalProperties": False,
        }
        if name != own["name"]["default"]:
            kind["required"] = ["name"]
        passed_over = sorted(getattr(module, "passed_over", ()))
        if passed_over:  # a pattern, so that editors do not suggest these keys
            kind["patternProperties"] = {f"^({'|'.join(passed_over)})$": {}}
        kinds.append(kind)
    file = {"name": {"type": "string", "pattern": r"\.py$"}}
    kinds.append({"title": "a model file of your own", "properties": file, "required": ["name"]})
    return {
        "description": _paragraphs(ModelSection),
        "type": "object",
        "properties": own,
        "anyOf": kinds,
    }


def _key_schema(key: Key) -> dict[str, Any]:
    schema = ({"description": key.doc} if key.doc else {}) | value_schema(key.hint, key.limits)
    return schema if key.required else schema | {"default": key.default}


def value_schema(hint: Any, limits: Limits = NO_LIMITS) -> dict[str, Any]:
    """The JSON Schema of the values that an annotation and its limits allow."""
    kind, args = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        options = [value_schema(option, limits) for option in args]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if kind is Literal:
        return {"enum": list(args)}
    if kind in (int, float):
        words = {
            "minimum": "minimum",
            "above": "exclusiveMinimum",
            "maximum": "maximum",
            "below": "exclusiveMaximum",
        }
        bounds = {
            word: getattr(limits, name)
            for name, word in words.items()
            if getattr(limits, name) is not None
        }
        return {"type": "integer" if kind is int else "number"} | bounds
    if kind is str and limits.names:
        names = {"enum": list(limits.names)}
        file = {"type": "string", "pattern": re.escape(limits.suffix or "") + "$"}
        return {"anyOf": [names, file]} if limits.suffix else names
    if is_stepwise(hint):
        pair = [value_schema(int, Limits(minimum=0)), value_schema(get_args(args[0])[1], limits)]
        items = {"type": "array", "items": pair, "minItems": 2, "maxItems": 2}
        return {"type": "array", "items": items}  # no minItems: [] is the default of some keys
    if kind in (list, tuple):
        inner = [value_schema(argument, limits) for argument in args if argument is not Ellipsis]
        fixed = (
            {"minItems": len(args), "maxItems": len(args)}
            if kind is tuple and args and ... not in args
            else {}
        )
        different = [argument for i, argument in enumerate(inner) if argument not in inner[:i]]
        items = (
            {"items": different[0] if len(different) == 1 else {"anyOf": different}}
            if different
            else {}
        )
        return {"type": "array"} | items | fixed
    if is_mapping(kind):
        return _section_schema(kind)
    if kind is dict:
        return {"type": "object"} | (
            {"additionalProperties": value_schema(args[1])} if args else {}
        )
    names_of = {bool: "boolean", str: "string", type(None): "null", None: "null"}
    return {"type": names_of[kind]} if kind in names_of else {}


def markdown() -> str:
    """docs/configuration.md: the hand-written text before the first section, and the generated
    sections."""
    parts = [_published().read_text(encoding="utf-8").partition("\n## model\n")[0]]
    for name in NAMES:
        parts.append(f"## {name}\n")
        if name == "layout":
            parts.append(_LAYOUT + "\n")
            parts.append(_table([(axis, _SIZE, "", doc) for axis, doc in _AXES.items()]))
        elif name == "model":
            parts += _model_parts()
        else:
            parts.append(_paragraphs(SECTIONS[name]) + "\n")
            keys = _documented(SECTIONS[name])
            parts.append(_table(map(_row, keys.values())))
            for key in keys.values():
                for cls in filter(is_mapping, get_args(key.hint)):
                    parts.append(f"### {name}.{key.name}\n\n{_paragraphs(cls)}\n")
                    parts.append(_table(map(_row, _documented(cls).values())))
    return "\n".join(parts)


def _model_parts() -> list[str]:
    parts = [_paragraphs(ModelSection) + "\n"]
    parts.append(_table(map(_row, _own_keys().values())))
    parts.append(_MODEL)
    for name, module in _models().items():
        parts.append(f"### {name}\n")
        parts.append((module.__doc__ or "").split("\n\n")[0].replace("\n", " ") + "\n")
        parts.append(_table(map(_row, _documented(module.Config).values())))
        if getattr(module, "presets", {}):
            parts.append(f"Presets: {_join_names(module.presets)}.\n")
        if getattr(module, "only", {}):
            built = [f"{key}: {yaml_text(value)}" for key, value in module.only.items()]
            parts.append(f"Accepted with the one value that is built: {_join_names(built)}.\n")
        if getattr(module, "passed_over", ()):
            parts.append(
                "Passed over, since they change nothing here: "
                f"{_join_names(sorted(module.passed_over))}.\n"
            )
    return parts


def _row(key: Key) -> tuple[str, str, str, str]:
    default = "to be given" if key.required else f"`{yaml_text(key.default)}`"
    return key.name, describe_type(key.hint, key.limits), default, key.doc


def _table(rows: Iterable[tuple[str, str, str, str]]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, value, default, doc in rows:
        cells = [f"`{name}`", value, default, doc]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _join_names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _paragraphs(cls: type) -> str:
    """The docstring of a class, a line per paragraph."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _documented(cls: type) -> dict[str, Key]:
    """The keys of a dataclass with their docs: the string below a field, or in model files the
    comment after it or above it."""
    source = inspect.getsource(cls)
    docs: dict[str, str] = {}
    above: list[str] = []
    for line in source.splitlines():
        if line.lstrip().startswith("#"):
            above.append(line.lstrip("# "))
            continue
        field = re.match(r"\s+(\w+)\s*:[^#]*(?:#\s*(.+))?$", line)
        if field is not None:
            docs[field[1]] = field[2] or " ".join(above)
        above = []
    for node, below in pairwise(ast.walk(ast.parse(source))):
        match node, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                docs[name] = " ".join(text.split())
    return {
        name: dataclasses.replace(key, doc=key.doc or docs.get(name, ""))
        for name, key in keys_of(cls).items()
    }


def _own_keys() -> dict[str, Key]:
    keys = _documented(ModelSection)
    own = {name: keys[name] for name in OWN_MODEL_KEYS}
    names = tuple(_models())
    return own | {
        "name": dataclasses.replace(own["name"], limits=Limits(names=names, suffix=".py"))
    }


def _models() -> dict[str, ModuleType]:
    # the default comes first
    names = sorted(locate.names("models", ".py"), key=lambda name: name != ModelSection.name)
    return {name: locate.model_file(name) for name in names}


_MODEL = """\
The other keys of the section are those of the model. They are Hugging Face's, so a `config.json`
can be pasted whole (JSON is YAML). A model file of your own has a dataclass `Config`, whose
fields become the keys of this section, and a class `Model` that takes a `Config`. It may also
have `presets` (name -> keys), `passed_over` (keys that are accepted and change nothing), `only`
(key -> the one value that is accepted), and `check(config)`, which returns impossible
combinations as pairs of a key and a sentence. [Hugging Face weights](huggingface.md) says what it
has for those.
"""


def main() -> None:
    """Writes both files into the repository that contains this package."""
    (locate.bundled("configs") / "schema.json").write_text(schema_text(), encoding="utf-8")
    _published().write_text(markdown(), encoding="utf-8")


def _published() -> Path:
    return locate.bundled("configs").parent / "docs" / "configuration.md"


def schema_text() -> str:
    """configs/schema.json."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    main()
