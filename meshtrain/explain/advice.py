"""What of a run's own config helps against a failure: options with the value that they have now (`options.yaml`)."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from meshtrain.layout import AXES

LEVELS = 8  # folders above a log with its run's config.yaml: logs/slurm-7.0/node_0/ID/attempt_0/3/stderr.log is 7
OPTIONS: dict[str, list[dict[str, str]]] = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text())
SECTIONS = ("model", "data", "layout", "batch", "parallel", "pipeline", "optimizer", "train", "checkpoint", "metrics")


class _Section(SimpleNamespace):
    """The keys of a section; None for one that it does not give."""

    def __getattr__(self, name: str) -> None:
        return None


class Settings:
    """A config as it was written, of which any section and key may be missing."""

    def __init__(self, sections: Mapping[str, Any] | None) -> None:
        self.known = sections is not None
        by_section = defaultdict[str, Any](dict, {} if sections is None else sections)
        keys = {name: by_section[name] if isinstance(by_section[name], Mapping) else {} for name in SECTIONS}
        keys["layout"] = dict.fromkeys(AXES if self.known else (), 1) | dict(keys["layout"])
        self._names: dict[str, Any] = {name: _Section(**{str(k): v for k, v in keys[name].items()}) for name in keys}
        self._names |= {"known": self.known, "now": _now, "max": max, "__builtins__": {}}

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of options.yaml. Raises TypeError: a value in it is missing, or no number."""
        return eval(expression, self._names)  # our own text; what a config holds is only looked at

    def fill(self, text: str) -> str:
        """A text with its expressions, in braces, replaced by their values."""
        return re.sub(r"\{([^{}]+)\}", lambda match: _written(self.evaluate(match[1])), text)


def settings_beside(path: str) -> Settings:
    """The config of the run to which a log belongs: the nearest config.yaml above it that is one of meshtrain's."""
    log = Path(path).resolve()
    for folder in ([log] if log.is_dir() else []) + list(log.parents)[:LEVELS]:
        try:
            sections = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            continue
        if isinstance(sections, dict) and {"model", "batch", "train"} <= set(sections):
            return Settings(sections)
    return Settings(None)


def advice(name: str | None, settings: Settings) -> list[str]:
    """Options that help, best first: each an override with a word on it, or a sentence."""
    texts = []
    for option in [] if name is None else OPTIONS[name]:
        try:
            if settings.evaluate(option.get("if", "True")):
                texts.append(settings.fill(option["text"]))
        except TypeError:  # without a value that it speaks of
            continue
    return texts


def _now(value: Any) -> str:
    return "" if value is None else f" (now {_written(value)})"


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
