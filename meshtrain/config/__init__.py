"""A run's YAML config: its sections as dataclasses, and how it is read.

The dataclasses of `schema` are the schema: the checks, docs/configuration.md and
configs/schema.json derive from them.

    config = Config.load("configs/quickstart.yaml", ["train.steps=50", "layout.tp=2"])

reads the file, applies the overrides and checks everything: `yaml_reader` (text to nodes with line
numbers), `convert` (nodes to values), `model_section` and `layout_section` (the two sections whose
keys are not fixed), `checks` (rules about several values), `layout_checks` (whether the model can
be split).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshtrain.config.checks import check_chaos, check_rules
from meshtrain.config.convert import convert, read_section
from meshtrain.config.draft import ConfigDraft
from meshtrain.config.errors import ConfigError, ConfigErrors, nearest
from meshtrain.config.file_checks import check_files
from meshtrain.config.hub_names import ask_hub, set_commits
from meshtrain.config.keys import Key, keys_of
from meshtrain.config.layout_checks import (
    check_groups,
    check_layout,
    check_loss_options,
    check_reference,
    expert_ranks,
)
from meshtrain.config.layout_section import read_layout, resolve_layout
from meshtrain.config.model_section import read_model
from meshtrain.config.model_spec import ModelSpec, model_spec
from meshtrain.config.schema import (
    NAMES,
    OWN_MODEL_KEYS,
    SECTIONS,
    BatchSection,
    CheckpointSection,
    DataSection,
    MetricsSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PipelineSection,
    TrainSection,
)
from meshtrain.config.yaml_reader import Node, apply_overrides, read_file, write
from meshtrain.errors import InputError, yaml_text
from meshtrain.job import locate
from meshtrain.job.hub import HubAnswer
from meshtrain.layout import AXES, Layout

__all__ = ["Config", "ConfigErrors", "spec_of"]


@dataclass(frozen=True)
class Config:
    """The checked and complete config of a run: the file's values, overrides, and defaults."""

    model: ModelSection
    data: DataSection
    layout: dict[str, int]  # axis -> size, outermost first, as written: one may be -1
    batch: BatchSection
    parallel: ParallelSection
    pipeline: PipelineSection
    optimizer: OptimizerSection
    train: TrainSection
    checkpoint: CheckpointSection
    metrics: MetricsSection
    # the layout of all processes; None: a size is -1
    resolved: Layout | None = field(default=None, compare=False)
    name: str = field(default="", compare=False)  # the file's name without its extension
    file: str = field(default="", compare=False)  # the file's path as errors print it
    # a line to print for each, with its origin
    overrides: tuple[str, ...] = field(default=(), compare=False)
    # what the hub says of the names that the file has, by the names
    hub: Mapping[str, HubAnswer] = field(default_factory=dict, compare=False)
    # in the place of the model that the keys describe: it without some blocks, in a trace
    spec: ModelSpec | None = field(default=None, compare=False)

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
        hub: Mapping[str, HubAnswer] | None = None,
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
            hub: what the hub says of the config's names, from `ask`; None: it is asked now.

        Raises:
            InputError: there is no such file.
            ConfigErrors: all errors of the config.
        """
        errors: list[ConfigError] = []
        path, root, applied = _read_nodes(name, overrides, errors)
        file = _relative(path)

        # Nothing below raises: all that is wrong is reported together.
        if hub is None:
            hub = ask_hub(root, _output(root, path), for_training=for_training)
        draft = _read_sections(root, errors, hub)
        set_commits(draft)
        sizes = read_layout(draft)
        layout = None
        if sizes is not None:
            layout = resolve_layout(draft, sizes, world_size, again)
            # A layout that does not fit the world is judged no further. Without a world, one size
            # may be -1.
            if layout is not None:
                check_layout(draft, layout.sizes, device)
            elif world_size is None:
                check_layout(draft, sizes, device)
        check_groups(draft)
        check_loss_options(draft)
        check_reference(draft)
        check_rules(draft)
        check_chaos(draft, None if again else world_size)
        if for_training:
            check_files(draft)
        # The model tells it, which may refuse its keys.
        share_experts = 1 if layout is None or errors else expert_ranks(draft, layout.sizes)
        if errors or sizes is None:
            raise ConfigErrors(file, errors)

        # Derived axes: of cp, the ranks that swap heads; of all, those that share experts.
        if layout is not None:
            if layout.size("cp") > 1:
                layout = layout.with_context_heads(draft.values["parallel.context_heads"])
            layout = layout.with_experts(share_experts)

        keys = draft.section("model")
        own = {key: keys.pop(key) for key in OWN_MODEL_KEYS}
        sections = {section: of(**draft.section(section)) for section, of in SECTIONS.items()}
        output = sections["train"].output.replace("{name}", path.stem)
        sections["train"] = replace(sections["train"], output=output)
        return cls(
            model=ModelSection(**own, keys=keys),
            layout=sizes,
            resolved=layout,
            name=path.stem,
            file=file,
            overrides=applied,
            hub=hub,
            **sections,
        )

    @classmethod
    def ask(cls, name: str, overrides: Sequence[str] = ()) -> dict[str, HubAnswer]:
        """What the hub says of the names that a config for training has; empty if it has none, or
        cannot be read."""
        path, root, _ = _read_nodes(name, overrides, errors=[])
        return ask_hub(root, _output(root, path), for_training=True)

    @classmethod
    def read_key(cls, name: str, overrides: Sequence[str], key: str) -> Any:
        """The value of one key of a section, before and without the checks that `load` makes of all
        of them."""
        _, root, _ = _read_nodes(name, overrides, errors=[])
        section, _, own = key.partition(".")
        keys = {own: keys_of(SECTIONS[section])[own]}
        node = root.get(section, own)
        if node is None:
            return keys[own].default
        return convert(node, keys[own].hint, key, [], keys[own].limits)

    def plain(self) -> dict[str, dict[str, Any]]:
        """The sections as a file would give them, in order: section -> key -> value, defaults
        included."""
        model: dict[str, Any] = {"name": self.model.name}
        for key in ("preset", "weights"):
            value = getattr(self.model, key)
            if value:
                model[key] = value
        model |= self.model.keys

        plain = {}
        for section in NAMES:
            if section == "model":
                plain[section] = model
            elif section == "layout":
                plain[section] = dict(self.layout)
            else:
                plain[section] = asdict(getattr(self, section))
        return plain

    def to_yaml(self) -> str:
        """The whole config as YAML, overrides and defaults included; loading it gives an equal
        Config."""
        origin = self.file or "Python"
        remarks = [
            f"The resolved config of a run, from {origin}: overrides and every default included.",
            *self.overrides,
        ]
        comments = [f"# {' '.join(remark.split())}\n" for remark in remarks]
        return "".join(comments) + write(self.plain())


def spec_of(config: Config) -> ModelSpec:
    """The model of a config: its module and keys, and its copy on the meta device."""
    if config.spec is not None:
        return config.spec
    return model_spec(config.model.name, config.model.keys, config.train.freeze, config.train.lora)


def _read_nodes(
    name: str, overrides: Sequence[str], errors: list[ConfigError]
) -> tuple[Path, Node, tuple[str, ...]]:
    """The path of a config, its nodes, and a line for each override. Raises InputError: there is no
    such file, or it is no YAML."""
    try:
        path = locate.config_path(name)
        root = read_file(path, _relative(path), errors)
    except OSError as error:
        raise InputError(str(error)) from error
    if root is None:
        raise ConfigErrors(_relative(path), errors)
    return path, root, tuple(apply_overrides(root, overrides, errors))


def _output(root: Node, path: Path) -> Path:
    """The folder of a run, from the nodes of its config."""
    node = root.get("train", "output")
    output = TrainSection.output
    if node is not None and isinstance(node.value, str):
        output = node.value
    return Path(output.replace("{name}", path.stem))


def _read_sections(
    root: Node, errors: list[ConfigError], hub: Mapping[str, HubAnswer]
) -> ConfigDraft:
    """Reads every section but the layout, value by value."""
    sections = {section: keys_of(cls) for section, cls in SECTIONS.items()}
    draft = ConfigDraft(root, errors, _elsewhere(sections), hub)
    for section, node in root.value.items():
        if section not in NAMES:
            draft.report(node.key_at, _unknown_section(section, draft.elsewhere))

    keys_of_model = keys_of(ModelSection)
    read_model(draft, {name: keys_of_model[name] for name in OWN_MODEL_KEYS})

    for section, keys in sections.items():
        node = root.value.get(section) or Node({}, root.at, root.at)
        values = read_section(node, section, keys, draft.elsewhere, errors)
        for name, value in values.items():
            draft.values[f"{section}.{name}"] = value
    return draft


def _elsewhere(sections: dict[str, dict[str, Key]]) -> dict[str, str]:
    """Every axis and key, and then every alias of a key -> its full name, for "did you mean"."""
    elsewhere = {axis: f"layout.{axis}" for axis in AXES}
    for section, keys in sections.items():
        for name in keys:
            elsewhere.setdefault(name, f"{section}.{name}")
    for section, keys in sections.items():
        for key in keys.values():
            for alias in key.also:
                elsewhere.setdefault(alias, f"{section}.{key.name}")
    return elsewhere


def _unknown_section(section: str, elsewhere: dict[str, str]) -> str:
    unknown = f"there is no section {yaml_text(section)}"
    if ":" in section:
        return f"{unknown}: a colon needs a space after it"
    suggestion = nearest(section, NAMES) or elsewhere.get(section)
    if suggestion:
        return f"{unknown}: did you mean {suggestion}?"
    return f"{unknown}: the sections are {', '.join(NAMES)}"


def _relative(path: Path) -> str:
    """A path as errors print it: relative if the file is below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
