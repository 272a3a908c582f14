"""Writes docs/configuration.md and configs/schema.json from the dataclasses: `python -m
meshtrain.config.docs`.

With the schema, editors complete and check a config as it is typed.
"""

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from meshtrain.config.keys import (
    NO_LIMITS,
    Key,
    Limits,
    describe_type,
    has_fixed_length,
    is_mapping,
    is_stepwise,
    is_union,
    keys_of,
    stepwise_type,
)
from meshtrain.config.schema import NAMES, OWN_MODEL_KEYS, SECTIONS, ModelSection
from meshtrain.errors import yaml_text
from meshtrain.job import locate
from meshtrain.layout import ABOUT_AXES

_LAYOUT = (
    "The axes of the mesh, outermost first, in the order in which they are written: neighbouring "
    "ranks differ in the last one. The sizes multiply to the number of processes; one of them may "
    "be -1, whatever is left. Without this section it is `{dp_shard: -1}`. The layout never "
    "changes what is computed."
)
_SIZE = "an integer of at least 1, or -1 for whatever is left"


Schema = dict[str, Any]


def schema() -> Schema:
    """The JSON Schema of a config (draft 7, the one that editors support best)."""
    sections: dict[str, Schema] = {name: _section_schema(cls) for name, cls in SECTIONS.items()}
    # A run has one length.
    sections["train"]["oneOf"] = [
        {"required": ["steps"], "properties": {"steps": {"type": "integer"}}},
        {"required": ["epochs"], "properties": {"epochs": {"type": "integer"}}},
    ]
    sections["train"]["type"] = "object"
    sections["model"] = _model_schema()
    sections["layout"] = _layout_schema()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A meshtrain config",
        "type": "object",
        "properties": {name: sections[name] for name in NAMES},
        "required": ["model", "batch", "train"],
        "additionalProperties": False,
    }


def _section_schema(cls: type) -> Schema:
    keys = _documented(cls)
    required = [name for name, key in keys.items() if key.required]
    schema: Schema = {
        "description": _paragraphs(cls),
        # A section without required keys may be empty, which is null in YAML.
        "type": "object" if required else ["object", "null"],
        "properties": {name: _key_schema(key) for name, key in keys.items()},
        "additionalProperties": False,
    }
    if required:
        schema["required"] = required
    return schema


def _layout_schema() -> Schema:
    size = {"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}]}
    return {
        "description": _LAYOUT,
        "type": ["object", "null"],
        "properties": {axis: {"description": doc, **size} for axis, doc in ABOUT_AXES.items()},
        "additionalProperties": False,
    }


def _model_schema() -> Schema:
    """The section `model`: the keys that all models have, and those of one of the models."""
    own = {name: _key_schema(key) for name, key in _own_keys().items()}
    kinds = [_kind_of_model(name, module, own) for name, module in _models().items()]
    file = {"name": {"type": "string", "pattern": r"\.py$"}}
    kinds.append({"title": "a model file of your own", "properties": file, "required": ["name"]})
    return {
        "description": _paragraphs(ModelSection),
        "type": "object",
        "properties": own,
        "anyOf": kinds,
    }


def _kind_of_model(name: str, module: ModuleType, own: dict[str, Schema]) -> Schema:
    """The keys of one of meshtrain's models. `own`: the schemas of the section's own keys."""
    properties: dict[str, Schema] = {
        "name": {"enum": [name]},
        "preset": {"enum": [*getattr(module, "presets", {}), None]},
        "weights": own["weights"],
    }
    keys = _documented(module.Config)
    for key_name, key in keys.items():
        properties[key_name] = _key_schema(key)
    for key_name, value in getattr(module, "only", {}).items():
        if key_name not in keys:
            properties[key_name] = {"enum": [value]}

    kind: Schema = {
        "title": f"models/{name}.py",
        "properties": properties,
        "additionalProperties": False,
    }
    if name != own["name"]["default"]:
        kind["required"] = ["name"]
    passed_over = sorted(getattr(module, "passed_over", ()))
    if passed_over:
        # A pattern, so that editors do not suggest these keys.
        kind["patternProperties"] = {f"^({'|'.join(passed_over)})$": {}}
    return kind


def _key_schema(key: Key) -> Schema:
    schema: Schema = {}
    if key.doc:
        schema["description"] = key.doc
    schema |= value_schema(key.hint, key.limits)
    if not key.required:
        schema["default"] = key.default
    return schema


_NAMES_OF_TYPES = {bool: "boolean", str: "string", type(None): "null", None: "null"}


def value_schema(hint: Any, limits: Limits = NO_LIMITS) -> Schema:
    """The JSON Schema of the values that an annotation and its limits allow."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if is_union(hint):
        return {"anyOf": [value_schema(option, limits) for option in arguments]}
    if kind is Literal:
        return {"enum": list(arguments)}
    if kind in (int, float):
        return {"type": "integer" if kind is int else "number", **_bounds(limits)}
    if kind is str and limits.names:
        names = {"enum": list(limits.names)}
        if limits.suffix is None:
            return names
        pattern = re.escape(limits.suffix) + "$"
        if limits.hub:
            pattern += "|^[^/]+/[^/]+$"
        file = {"type": "string", "pattern": pattern}
        return {"anyOf": [names, file]}
    if is_stepwise(hint):
        step, value = Limits(minimum=0), stepwise_type(hint)
        pair = [value_schema(int, step), value_schema(value, limits)]
        items = {"type": "array", "items": pair, "minItems": 2, "maxItems": 2}
        return {"type": "array", "items": items}  # no minItems: [] is the default of some keys
    if kind in (list, tuple):
        return _list_schema(hint, limits)
    if is_mapping(kind):
        return _section_schema(kind)
    if kind is dict:
        schema: Schema = {"type": "object"}
        if arguments:
            schema["additionalProperties"] = value_schema(arguments[1])
        return schema
    if kind in _NAMES_OF_TYPES:
        return {"type": _NAMES_OF_TYPES[kind]}
    return {}  # any value


def _bounds(limits: Limits) -> dict[str, float]:
    bounds = {
        "minimum": limits.minimum,
        "exclusiveMinimum": limits.above,
        "maximum": limits.maximum,
        "exclusiveMaximum": limits.below,
    }
    return {word: bound for word, bound in bounds.items() if bound is not None}


def _list_schema(hint: Any, limits: Limits) -> Schema:
    arguments = get_args(hint)
    kinds: list[Schema] = []
    for argument in arguments:
        if argument is Ellipsis:
            continue
        kind = value_schema(argument, limits)
        if kind not in kinds:
            kinds.append(kind)

    schema: Schema = {"type": "array"}
    if kinds:
        schema["items"] = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if arguments and has_fixed_length(hint):
        schema |= {"minItems": len(arguments), "maxItems": len(arguments)}
    return schema


def markdown() -> str:
    """docs/configuration.md: the hand-written text before the first section, and the generated
    sections."""
    hand_written, _, _ = _published().read_text(encoding="utf-8").partition("\n## model\n")
    parts = [hand_written]
    for name in NAMES:
        parts.append(f"## {name}\n")
        if name == "layout":
            parts.append(_LAYOUT + "\n")
            parts.append(_table([(axis, _SIZE, "", doc) for axis, doc in ABOUT_AXES.items()]))
        elif name == "model":
            parts += _model_parts()
        else:
            parts += _section_parts(name, SECTIONS[name])
    return "\n".join(parts)


def _section_parts(name: str, cls: type) -> list[str]:
    """A section's text and table, and those of each mapping that one of its keys holds."""
    keys = _documented(cls)
    parts = [_paragraphs(cls) + "\n", _table_of_keys(keys)]
    for key in keys.values():
        for inner in get_args(key.hint):
            if is_mapping(inner):
                parts.append(f"### {name}.{key.name}\n\n{_paragraphs(inner)}\n")
                parts.append(_table_of_keys(_documented(inner)))
    return parts


def _model_parts() -> list[str]:
    """The section `model`: its own keys, and those of each of meshtrain's models."""
    parts = [_paragraphs(ModelSection) + "\n", _table_of_keys(_own_keys()), _MODEL]
    for name, module in _models().items():
        first_paragraph = (module.__doc__ or "").split("\n\n")[0]
        parts.append(f"### {name}\n")
        parts.append(first_paragraph.replace("\n", " ") + "\n")
        parts.append(_table_of_keys(_documented(module.Config)))

        presets = getattr(module, "presets", {})
        if presets:
            parts.append(f"Presets: {_join_names(presets)}.\n")
        only = getattr(module, "only", {})
        if only:
            built = [f"{key}: {yaml_text(value)}" for key, value in only.items()]
            parts.append(f"Accepted with the one value that is built: {_join_names(built)}.\n")
        passed_over = sorted(getattr(module, "passed_over", ()))
        if passed_over:
            names = _join_names(passed_over)
            parts.append(f"Passed over, since they change nothing here: {names}.\n")
    return parts


def _table_of_keys(keys: dict[str, Key]) -> str:
    rows = []
    for key in keys.values():
        default = "to be given" if key.required else f"`{yaml_text(key.default)}`"
        rows.append((key.name, describe_type(key.hint, key.limits), default, key.doc))
    return _table(rows)


def _table(rows: Iterable[tuple[str, str, str, str]]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, *others in rows:
        cells = [cell.replace("|", "\\|") for cell in (f"`{name}`", *others)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _paragraphs(cls: type) -> str:
    """The docstring of a class, a line per paragraph."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _documented(cls: type) -> dict[str, Key]:
    """The keys of a dataclass with their docs: the string below a field, or in model files the
    comment after it or above it."""
    source = inspect.getsource(cls)
    docs = _comments_on_fields(source) | _strings_below_fields(source)
    documented = {}
    for name, key in keys_of(cls).items():
        documented[name] = dataclasses.replace(key, doc=key.doc or docs.get(name, ""))
    return documented


def _comments_on_fields(source: str) -> dict[str, str]:
    """Field -> the comment at the end of its line, or else those on the lines above it."""
    docs: dict[str, str] = {}
    above: list[str] = []
    for line in source.splitlines():
        if line.lstrip().startswith("#"):
            above.append(line.lstrip("# "))
            continue
        field = re.match(r"\s+(\w+)\s*:[^#]*(?:#\s*(.+))?$", line)
        if field is not None:
            name, comment = field.groups()
            docs[name] = comment or " ".join(above)
        above = []
    return docs


def _strings_below_fields(source: str) -> dict[str, str]:
    """Field -> the string that stands alone below it, as a docstring does below a class."""
    docs: dict[str, str] = {}
    [cls] = ast.parse(source).body
    assert isinstance(cls, ast.ClassDef)
    for field, below in pairwise(cls.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if not isinstance(below, ast.Expr) or not isinstance(below.value, ast.Constant):
            continue
        text = below.value.value
        if isinstance(text, str):
            docs[field.target.id] = " ".join(text.split())
    return docs


def _own_keys() -> dict[str, Key]:
    """The keys that the section has for every model."""
    keys = _documented(ModelSection)
    own = {name: keys[name] for name in OWN_MODEL_KEYS}
    names = Limits(names=tuple(_models()), suffix=".py")
    own["name"] = dataclasses.replace(own["name"], limits=names)
    return own


def _models() -> dict[str, ModuleType]:
    """meshtrain's models; the default comes first."""
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
