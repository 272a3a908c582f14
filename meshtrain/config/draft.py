"""A config while it is being read: its nodes, the values converted so far, and the errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshtrain.config.convert import INVALID
from meshtrain.config.errors import ConfigError, Place
from meshtrain.config.yaml_reader import Node
from meshtrain.job.hub import HubAnswer


@dataclass
class ConfigDraft:
    """What the readers of the sections fill in, and the checks look at."""

    root: Node
    errors: list[ConfigError]
    elsewhere: dict[str, str]  # "steps" -> "train.steps": where keys belong, for "did you mean"
    # names on the hub, as they are written -> what the hub says of them
    hub: Mapping[str, HubAnswer] = field(default_factory=dict)
    # "train.steps" -> its value, default, or INVALID
    values: dict[str, Any] = field(default_factory=dict)

    def valid(self, *paths: str) -> bool:
        """Whether none of these keys was reported as wrong. A key that the model lacks is not."""
        return all(self.values.get(path) is not INVALID for path in paths)

    def section(self, name: str) -> dict[str, Any]:
        """The values of a section's keys."""
        prefix = f"{name}."
        keys = {}
        for path, value in self.values.items():
            if path.startswith(prefix):
                keys[path.removeprefix(prefix)] = value
        return keys

    def place(self, path: str) -> Place:
        """The place of a key; if it is not given, that of its section, else the top of the file."""
        section = path.partition(".")[0]
        node = self.root.get(*path.split(".")) or self.root.get(section)
        return node.key_at if node is not None else self.root.at

    def place_of_any(self, paths: Sequence[str]) -> Place:
        """The place for an error about several keys: an override if there is one, else the first
        key that is given."""
        given = [path for path in paths if self.root.get(*path.split(".")) is not None]
        overridden = [path for path in given if self.place(path).override]
        candidates = overridden or given or list(paths)
        return self.place(candidates[0])

    def report(self, place: Place, message: str) -> None:
        self.errors.append(ConfigError(place, message))

    def refuse(self, key: str, *problems: object) -> None:
        """Reports problems of a key, at its place and with its name."""
        for problem in problems:
            self.report(self.place(key), f"{key}: {problem}")
