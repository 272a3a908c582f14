"""Which checkpoint a path means: the path of one, of a run's folder, or of the folder that its checkpoints are in."""

from pathlib import Path

from meshtrain.checkpoint import folder
from meshtrain.checkpoint.manifest import MANIFEST
from meshtrain.errors import InputError

CHECKPOINTS = "checkpoints"  # in a run's folder


def named(path: str | Path) -> Path | None:
    """The checkpoint that a path means; of several the newest complete one. None if the path means none at all.

    What is in it is not looked at: `folder.open_manifest` does that.

    Raises:
        InputError: a folder of checkpoints has none that is complete.
    """
    path = Path(path).expanduser()
    if (path / MANIFEST).is_file() or folder.step_of(path.name) is not None:
        return path
    for place in (path, path / CHECKPOINTS):
        steps = folder.complete_steps(place) if place.is_dir() else []
        if steps:
            return place / folder.name_of(steps[-1])
    if path.is_dir() and ((path / CHECKPOINTS).is_dir() or any(path.glob(".step_*")) or any(path.glob("step_*"))):
        raise InputError(f"no checkpoint in {path} is complete: name one that is, or train until one is saved")
    return None


def needed(path: str | Path) -> Path:
    """As `named`, where nothing but a checkpoint will do.

    Raises:
        InputError: the path means none.
    """
    found = named(path)
    if found is None:
        is_there = "holds no checkpoint" if Path(path).expanduser().is_dir() else "is no folder"
        raise InputError(
            f"{path} {is_there}: name a checkpoint (RUN/{CHECKPOINTS}/{folder.name_of(100)}), or a run's folder, whose "
            "newest complete one is taken"
        )
    return found
