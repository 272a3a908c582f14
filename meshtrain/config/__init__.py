"""A run's YAML config: its sections as dataclasses, and how it is read.

The dataclasses of `schema` are the schema: the checks, docs/configuration.md and
configs/schema.json derive from them.

    config = Config.load("configs/quickstart.yaml", ["train.steps=50", "layout.tp=2"])

reads the file, applies the overrides and checks everything. Modules: `yaml_reader` (text to nodes
with line numbers), `convert` (nodes to values), `model` (the model's keys), `checks` (rules about
several values).
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtrain.config import checks, locate, schema
from meshtrain.config.checks import ConfigDraft
from meshtrain.config.convert import INVALID, convert, keys_of, read_section
from meshtrain.config.errors import ConfigError, ConfigErrors, nearest, yaml_text
from meshtrain.config.layout_advice import resolve, world_sizes_text
from meshtrain.config.model import read_model
from meshtrain.config.schema import NAMES, SECTIONS, Data, Fault, ModelSection, Optimizer
from meshtrain.config.tensor import OF_LAYOUT, check_device, check_groups, expert_ranks
from meshtrain.config.yaml_reader import Node, apply_overrides, describe, read_file, write
from meshtrain.errors import InputError
from meshtrain.layout import AXES, Layout, LayoutError, unknown_axis

if TYPE_CHECKING:
    from meshtrain.config.model_spec import ModelSpec

__all__ = ["Config", "ConfigErrors", "Data", "Fault"]


@dataclass(frozen=True)
class Config:
    """The checked and complete config of a run: the file's values, overrides, and defaults."""

    model: ModelSection
    data: Data
    layout: dict[str, int]  # axis -> size, outermost first, as written: one may be -1
    batch: schema.Batch
    parallel: schema.Parallel
    pipeline: schema.Pipeline
    optimizer: Optimizer
    train: schema.Train
    checkpoint: schema.Checkpoint
    metrics: schema.Metrics
    # the layout of all processes; None: a size is -1
    resolved: Layout | None = field(default=None, compare=False)
    name: str = field(default="", compare=False)  # the file's name without its extension
    file: str = field(default="", compare=False)  # the file's path as errors print it
    # a line to print for each, with its origin
    overrides: tuple[str, ...] = field(default=(), compare=False)
    # in the place of the model that the keys describe: it without some blocks, in a trace
    spec: "ModelSpec | None" = field(default=None, compare=False)

    @classmethod
    def load(
        cls,
        name: str,
        overrides: Sequence[str] = (),
        *,
        world_size: int | None = None,
        for_training: bool = False,
        device: str | None = None,
        again: bool = False,
    ) -> "Config":
        """Reads a config file and applies overrides to it.

        Args:
            name: the path of a YAML file, or the name of one of meshtrain's own.
            overrides: `section.key=value`, each value YAML; the last one for a key wins.
            world_size: the number of processes, which the layout must multiply to; None: not known
                yet.
            for_training: also report missing files, which only training needs.
            device: "cpu" or "cuda"; None: not known yet.
            again: the launcher restarted the job, perhaps with fewer processes than `train.chaos`
                was written for.

        Raises:
            InputError: there is no such file.
            ConfigErrors: all errors of the config.
        """
        errors: list[ConfigError] = []
        try:
            path = locate.config_path(name)
            file = _relative(path)
            root = read_file(path, file, errors)
        except OSError as error:
            raise InputError(str(error)) from error
        if root is None:
            raise ConfigErrors(file, errors)
        applied = tuple(apply_overrides(root, overrides, errors))
        draft = _read_sections(root, errors)
        sizes = _read_layout(draft)
        layout = None if sizes is None else _resolve_layout(draft, sizes, world_size, again)
        # without a world size, a size may be -1
        if sizes is not None and (layout is not None or world_size is None):
            known = sizes if layout is None else layout.sizes
            for check in OF_LAYOUT:
                check(draft, known)
            check_device(draft, known, device)
        check_groups(draft)
        checks.check_rules(draft)
        checks.check_chaos(draft, None if again else world_size)
        if for_training:
            checks.check_files(draft)
        if errors or sizes is None:
            raise ConfigErrors(file, errors)
        draft.values["train.output"] = draft.values["train.output"].replace("{name}", path.stem)
        if layout is not None and layout.size("cp") > 1:
            layout = layout.with_context_heads(draft.values["parallel.context_heads"])
        if layout is not None:
            layout = layout.with_experts(expert_ranks(draft, layout.sizes))
        sections = {section: keys(**draft.section(section)) for section, keys in SECTIONS.items()}
        own = draft.section("model")
        model = ModelSection(own.pop("name"), own.pop("preset"), own.pop("weights"), own)
        return cls(
            model,
            layout=sizes,
            resolved=layout,
            name=path.stem,
            file=file,
            overrides=applied,
            **sections,
        )

    def plain(self) -> dict[str, dict[str, Any]]:
        """The sections as a file would give them, in order: section -> key -> value, defaults
        included."""
        origin = {"preset": self.model.preset, "weights": self.model.weights}
        model = {
            "name": self.model.name,
            **{key: name for key, name in origin.items() if name},
            **self.model.keys,
        }
        plain = {"model": model, "data": asdict(self.data), "layout": dict(self.layout)}
        return plain | {
            section: asdict(getattr(self, section)) for section in NAMES if section not in plain
        }

    def to_yaml(self) -> str:
        """The whole config as YAML, overrides and defaults included; loading it gives an equal
        Config."""
        head = [
            f"The resolved config of a run, from {self.file or 'Python'}: overrides and every "
            "default included."
        ]
        head += self.overrides
        return "".join(f"# {' '.join(line.split())}\n" for line in head) + write(self.plain())


def _read_sections(root: Node, errors: list[ConfigError]) -> ConfigDraft:
    """Reads every section but the layout, value by value."""
    sections = {section: keys_of(cls) for section, cls in SECTIONS.items()}
    elsewhere = {axis: f"layout.{axis}" for axis in AXES}
    declared = [(section, key) for section, keys in sections.items() for key in keys.values()]
    for section, key in declared:
        elsewhere.setdefault(key.name, f"{section}.{key.name}")
    for section, key in declared:
        elsewhere |= {
            other: f"{section}.{key.name}" for other in key.also if other not in elsewhere
        }
    draft = ConfigDraft(root, errors, elsewhere)
    for section, node in root.value.items():
        if section not in NAMES:
            errors.append(ConfigError(node.key_at, _unknown_section(section, elsewhere)))
    read_model(draft, {name: key for name, key in keys_of(ModelSection).items() if name != "keys"})
    for section, keys in sections.items():
        values = read_section(
            root.value.get(section) or Node({}, root.at, root.at), section, keys, elsewhere, errors
        )
        draft.values |= {f"{section}.{name}": value for name, value in values.items()}
    return draft


def _read_layout(draft: ConfigDraft) -> dict[str, int] | None:
    """The layout as written, outermost axis first; None, with the errors reported, if it is
    wrong."""
    node = draft.root.get("layout")
    if node is None or (node.value is None and not node.broken):
        return {"dp_shard": -1}
    if node.broken:
        return None
    if not isinstance(node.value, dict):
        message = (
            f"expected axes and their sizes, such as {{dp_shard: 4}}, found {describe(node.value)}"
        )
        draft.report(node.at, f"layout: {message}")
        return None
    sizes: dict[str, int] = {}
    for axis, child in node.value.items():
        if axis not in AXES:
            hint = "; a colon needs a space after it" if ":" in axis else ""
            draft.report(child.key_at, f"layout: {unknown_axis(axis)}{hint}")
            continue
        size = convert(child, int, f"layout.{axis}", draft.errors)
        if size is INVALID:
            continue
        if size < 1 and size != -1:
            message = f"expected an integer of at least 1, or -1 for whatever is left, found {size}"
            draft.report(child.at, f"layout.{axis}: {message}")
        elif size == -1 and -1 in sizes.values():
            first = next(name for name in sizes if sizes[name] == -1)
            draft.report(
                child.at,
                f"layout.{axis}: only one axis can be -1, and {first} is: give one of them a size",
            )
        else:
            sizes[axis] = size
    return sizes if len(sizes) == len(node.value) else None


def _resolve_layout(
    draft: ConfigDraft, sizes: dict[str, int], world_size: int | None, again: bool
) -> Layout | None:
    """The layout of the processes; None if a size is still open, or, reported as an error, if it
    does not fit them."""
    if world_size is None:
        return None if -1 in sizes.values() else Layout(sizes)
    experts = draft.values["parallel.expert_parallel"]
    experts = 1 if experts is INVALID or experts is None else experts
    try:
        return resolve(sizes, world_size, experts)
    except LayoutError as error:
        worlds = world_sizes_text(sizes, experts) if again else ""
        suggestion = f". This job was started again with {world_size}: {worlds}" if again else ""
        draft.report(
            draft.place_of_any(("layout", *(f"layout.{axis}" for axis in sizes))),
            f"{error}{suggestion}",
        )
        return None


def _unknown_section(section: str, elsewhere: dict[str, str]) -> str:
    unknown = f"there is no section {yaml_text(section)}: "
    if ":" in section:
        return f"{unknown}a colon needs a space after it"
    suggestion = nearest(section, NAMES) or elsewhere.get(section)
    return unknown + (
        f"did you mean {suggestion}?" if suggestion else f"the sections are {', '.join(NAMES)}"
    )


def _relative(path: Path) -> str:
    """A path as errors print it: relative if the file is below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
