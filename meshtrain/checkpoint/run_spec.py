"""Run spec: what a checkpoint has to agree with, as plain values."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtrain.config import Config


@dataclass(frozen=True)
class RunSpec:
    """The run that a checkpoint has to agree with."""

    config: "Config"
    folder: Path
    checkpoints: Path  # the folder of the run's own checkpoints
    data: dict[str, Any]  # fingerprint and sizes, as in a manifest
    # of torch, Python, meshtrain, the code, and the weights of a reference
    versions: dict[str, str]
    steps: int  # the run's last step
    in_yaml: bool = True  # whether its settings are keys of a YAML, or stand in a script

    @property
    def folder_option(self) -> str:
        """How another folder is named, for people."""
        return "train.output=FOLDER" if self.in_yaml else 'output="FOLDER"'

    @property
    def resumes_latest(self) -> bool:
        """Whether the config asks for the newest checkpoint, wherever it is."""
        return self.config.checkpoint.resume == "latest"
