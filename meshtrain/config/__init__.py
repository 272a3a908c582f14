"""The YAML of a run: its sections as dataclasses, and how it is read.

The dataclasses of `config.sections` are the schema. Each key stands once, with its type, default, limits and
documentation; from them come the checks, docs/configuration.md and configs/schema.json (`python -m
meshtrain.config.docs` writes both).

    config = Config.load("configs/quickstart.yaml", ["train.steps=50", "layout.tp=2"])

reads the file, lays the overrides over it and checks everything. Whatever is wrong is raised once, as `ConfigErrors`:
each error with file and line, and a way out. The rooms behind it: `config.nodes` (text to nodes that know their line),
`config.values` (nodes to values), `config.rules` and `config.model` (what values must keep to together).
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshtrain import locate
from meshtrain.config.errors import ConfigError, ConfigErrors, nearest, written
from meshtrain.config.faults import Fault, check_chaos
from meshtrain.config.model import read_model
from meshtrain.config.nodes import Node, apply_overrides, read_file, write
from meshtrain.config.rules import Draft, check_device, check_files, check_layout, check_rules, read_layout
from meshtrain.config.sections import (
    NAMES,
    SECTIONS,
    Batch,
    Checkpoint,
    Data,
    Metrics,
    ModelSection,
    Optimizer,
    Parallel,
    Pipeline,
    Train,
)
from meshtrain.config.stages import check_stages
from meshtrain.config.tensor import check_split
from meshtrain.config.values import keys_of, read_section
from meshtrain.errors import InputError
from meshtrain.layout import AXES

__all__ = [
    "NAMES",
    "SECTIONS",
    "Batch",
    "Checkpoint",
    "Config",
    "ConfigError",
    "ConfigErrors",
    "Data",
    "Fault",
    "Metrics",
    "ModelSection",
    "Optimizer",
    "Parallel",
    "Pipeline",
    "Train",
]


@dataclass(frozen=True)
class Config:
    """A run, checked and complete: what the file gives, what overrides it, and every default."""

    model: ModelSection
    data: Data
    layout: dict[str, int]  # axis -> size, outermost first, as written: one may be -1
    batch: Batch
    parallel: Parallel
    pipeline: Pipeline
    optimizer: Optimizer
    train: Train
    checkpoint: Checkpoint
    metrics: Metrics
    name: str = field(default="", compare=False)  # of the file, without its ending
    file: str = field(default="", compare=False)  # as errors name it
    overrides: tuple[str, ...] = field(default=(), compare=False)  # each with its origin, one line to print

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
        """Reads a config file and lays overrides over it.

        Args:
            name: the path of a YAML file, or the name of one of meshtrain's own.
            overrides: `section.key=value`, each value YAML; the last one for a key wins.
            world_size: the number of processes, which the layout has to make; None where that is not known yet.
            for_training: also refuses what cannot be trained now: files that are missing, axes that are not built.
            device: what the processes compute on, "cpu" or "cuda"; None where that is not known yet.
            again: this is not the first start of the job: fewer processes may be left than its faults were planted for.

        Raises:
            InputError: there is no such file.
            ConfigErrors: everything that is wrong with the config.
        """
        try:
            path = locate.config_path(name)
            shown = _shown(path)
            errors: list[ConfigError] = []
            root = read_file(path, shown, errors)
        except OSError as error:
            raise InputError(str(error)) from error
        if root is None:
            raise ConfigErrors(shown, errors)
        applied = apply_overrides(root, overrides, errors)
        draft = _read(root, errors)
        own = keys_of(ModelSection)
        model_keys = [path[6:] for path in draft.values if path.startswith("model.") and path[6:] not in own]
        layout = read_layout(draft)
        if layout is not None:
            check_layout(draft, layout, world_size, for_training, again)
            check_split(draft, layout, world_size, model_keys)
            check_stages(draft, layout, world_size, model_keys)
            check_device(draft, layout, world_size, device)
        check_rules(draft)
        check_chaos(draft, None if again else world_size)
        if for_training:
            check_files(draft)
        if errors or layout is None:
            raise ConfigErrors(shown, errors)
        return _made(draft, layout, path.stem, shown, tuple(map(str, applied)))

    def plain(self) -> dict[str, dict[str, Any]]:
        """The sections as a file would give them, in their order: section -> key -> value, defaults included."""
        origin = {"preset": self.model.preset, "weights": self.model.weights}
        model = {"name": self.model.name, **{key: name for key, name in origin.items() if name}, **self.model.keys}
        plain = {"model": model, "data": asdict(self.data), "layout": dict(self.layout)}
        return plain | {section: asdict(getattr(self, section)) for section in NAMES if section not in plain}

    def to_yaml(self) -> str:
        """The whole config as YAML, overrides and defaults included: read again, it gives an equal Config."""
        head = [f"The resolved config of a run, from {self.file or 'Python'}: overrides and every default included."]
        head += self.overrides
        return "".join(f"# {' '.join(line.split())}\n" for line in head) + write(self.plain())


def _read(root: Node, errors: list[ConfigError]) -> Draft:
    """Every section but the layout, value by value."""
    sections = {section: keys_of(cls) for section, cls in SECTIONS.items()}
    elsewhere = {axis: f"layout.{axis}" for axis in AXES}
    declared = [(section, one) for section, keys in sections.items() for one in keys.values()]
    for section, one in declared:
        elsewhere.setdefault(one.name, f"{section}.{one.name}")
    for section, one in declared:
        elsewhere |= {other: f"{section}.{one.name}" for other in one.also if other not in elsewhere}
    draft = Draft(root, errors, elsewhere)
    for section, node in root.value.items():
        if section not in NAMES:
            errors.append(ConfigError(node.key_at, _unknown_section(section, elsewhere)))
    own = keys_of(ModelSection)
    del own["keys"]
    read_model(draft, own)
    for section, keys in sections.items():
        node = root.value.get(section) or Node({}, root.at, root.at)
        values = read_section(node, section, keys, elsewhere, errors)
        draft.values |= {f"{section}.{one}": value for one, value in values.items()}
    return draft


def _unknown_section(section: str, elsewhere: dict[str, str]) -> str:
    meant = nearest(section, NAMES) or elsewhere.get(section)
    if ":" in section:
        return f"there is no section {written(section)}: a colon needs a space after it"
    return f"there is no section {written(section)}: " + (
        f"did you mean {meant}?" if meant else f"the sections are {', '.join(NAMES)}"
    )


def _made(draft: Draft, layout: dict[str, int], name: str, file: str, overrides: tuple[str, ...]) -> Config:
    def values(section: str) -> dict[str, Any]:
        start = f"{section}."
        return {path.removeprefix(start): value for path, value in draft.values.items() if path.startswith(start)}

    model = values("model")
    train = values("train")
    train["output"] = train["output"].replace("{name}", name)
    return Config(
        model=ModelSection(model.pop("name"), model.pop("preset"), model.pop("weights"), model),
        data=Data(**values("data")),
        layout=layout,
        batch=Batch(**values("batch")),
        parallel=Parallel(**values("parallel")),
        pipeline=Pipeline(**values("pipeline")),
        optimizer=Optimizer(**values("optimizer")),
        train=Train(**train),
        checkpoint=Checkpoint(**values("checkpoint")),
        metrics=Metrics(**values("metrics")),
        name=name,
        file=file,
        overrides=overrides,
    )


def _shown(path: Path) -> str:
    """A path as errors name it: relative where the file lies under the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
