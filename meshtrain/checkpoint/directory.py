"""A directory of checkpoints: which it holds, and how a checkpoint appears in it whole or not at
all.

All ranks write a checkpoint into `.step_0000100.tmp`. When their files are on disk, the manifest is
written, and then COMPLETE with the manifest's checksum; only then is the folder renamed to its
final name. A process killed at any point leaves a folder that no reader takes for a checkpoint.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from meshtrain.checkpoint.folder_lock import check_owner
from meshtrain.checkpoint.json_text import dumps
from meshtrain.checkpoint.manifest import MANIFEST, MAX_BYTES, Manifest
from meshtrain.checkpoint.plain_file import file_exists, open_plain, read_plain
from meshtrain.errors import DamagedError, InputError
from meshtrain.job.storage import fsync_folder, write_whole

COMPLETE = "COMPLETE"
CHECKPOINTS = "checkpoints"  # in a run's folder
_STEP = re.compile(r"step_(\d{7,18})", re.ASCII)
_ASIDE = re.compile(r"step_\d{7,18}\.aside-\d+", re.ASCII)
_UNFINISHED = re.compile(r"\.step_\d{7,18}(\.aside-\d+)?\.(tmp|removed)", re.ASCII)


# What there is ------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    return f"step_{step:07d}"


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None if it is not such a name."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if name == name_of(step) else None


def steps(folder: Path) -> list[int]:
    """The steps that have a folder, complete or not, ascending. Symbolic links are ignored."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                step = step_of(entry.name)
                if step is not None and entry.is_dir(follow_symlinks=False):
                    found.append(step)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found)


def complete_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that were written completely, ascending; their contents are not
    checked."""
    return [step for step in steps(folder) if file_exists(folder / name_of(step) / COMPLETE)]


def find_checkpoint(path: str | Path) -> Path | None:
    """The checkpoint at a path, or the newest complete one if it is the folder of a run or of
    checkpoints.

    Contents are not checked. None: no checkpoint there. Raises InputError: the folder has only
    incomplete ones.
    """
    path = Path(path).expanduser()
    if (path / MANIFEST).is_file() or step_of(path.name) is not None:
        return path
    for place in (path, path / CHECKPOINTS):
        complete = complete_steps(place) if place.is_dir() else []
        if complete:
            return place / name_of(complete[-1])
    if path.is_dir() and _has_traces(path):
        raise InputError(
            f"no checkpoint in {path} is complete: name one that is, or train until one is saved"
        )
    return None


def _has_traces(folder: Path) -> bool:
    """Whether a folder looks like one of a run or of checkpoints."""
    if (folder / CHECKPOINTS).is_dir():
        return True
    return any(folder.glob(".step_*")) or any(folder.glob("step_*"))


def require_checkpoint(path: str | Path) -> Path:
    """As `find_checkpoint`, but raises InputError if there is no checkpoint."""
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        is_there = "holds no checkpoint" if Path(path).expanduser().is_dir() else "is no folder"
        raise InputError(
            f"{path} {is_there}: name a checkpoint (RUN/{CHECKPOINTS}/{name_of(100)}), or a run's "
            "folder, whose newest complete one is taken"
        )
    return checkpoint


# Reading ------------------------------------------------------------------------------------------


def open_manifest(checkpoint: Path) -> tuple[Manifest, str]:
    """The manifest of a checkpoint and its sha256. Checks that all files that it names exist and
    have their sizes.

    Raises:
        DamagedError: something is missing or is not what was written.
        InputError: there is no such folder, or it was written by a newer meshtrain.
    """
    manifest, digest = read_manifest(checkpoint)
    check_files(checkpoint, manifest)
    return manifest, digest


def read_manifest(checkpoint: Path) -> tuple[Manifest, str]:
    """As `open_manifest`, but without checking the other files."""
    if not checkpoint.is_dir():
        raise InputError(
            f"there is no checkpoint {checkpoint}: expected a folder, such as {name_of(100)}"
        )
    if not file_exists(checkpoint / COMPLETE):
        raise DamagedError(
            checkpoint / COMPLETE, "is missing, so this checkpoint was never written to its end"
        )
    path = checkpoint / MANIFEST
    complete = read_plain(checkpoint / COMPLETE, 1000)
    text = read_plain(path, MAX_BYTES)
    digest = hashlib.sha256(text).hexdigest()
    if complete != complete_text(digest).encode():
        if not text:
            raise DamagedError(path, "is empty")
        raise DamagedError(path, f"and {COMPLETE} do not fit together: one of them is damaged")
    manifest = Manifest.parse(text, path)
    if step_of(checkpoint.name) not in (None, manifest.step):
        raise DamagedError(path, f"is that of step {manifest.step}: the folder has another's name")
    return manifest, digest


def check_files(checkpoint: Path, manifest: Manifest, only: str | None = None) -> None:
    """Raises DamagedError, naming the first file that is missing or has a wrong size. `only`: check
    only this file."""
    names = manifest.files if only is None else [only]
    for name in names:
        written = manifest.files[name].size
        descriptor, size = open_plain(checkpoint / name)
        os.close(descriptor)
        if size != written:
            raise DamagedError(checkpoint / name, f"has {size:,} bytes; {written:,} were written")


def complete_text(digest: str) -> str:
    """The content of COMPLETE for the sha256 of a manifest."""
    return dumps({"manifest_sha256": digest}) + "\n"


# Writing: all of these raise TakenError if another job has taken a folder of this process ---------


def begin(folder: Path, step: int) -> Path:
    """Makes an empty folder to write a checkpoint into; removes what an earlier attempt left."""
    check_owner()
    return begin_local(folder, step)


def begin_local(folder: Path, step: int) -> Path:
    """As `begin`, on a local disk: does not need the shared folders."""
    folder.mkdir(parents=True, exist_ok=True)
    abandon(folder, step)
    unfinished = unfinished_path(folder, step)
    unfinished.mkdir()
    return unfinished


def finish(
    folder: Path,
    step: int,
    manifest_text: str,
    say: Callable[[str], None] | None = None,
    *,
    only: str | None = None,
) -> Path:
    """Makes the folder of `begin` the checkpoint of its step.

    Args:
        say: gets a line if another folder was in the way.
        only: on a local disk, the one file that it has; the others are on other hosts.

    Raises:
        DamagedError: a file of the manifest is missing.
        OSError: the disk failed; there is no checkpoint then.
    """
    is_shared = only is None
    if is_shared:
        check_owner()
    unfinished = unfinished_path(folder, step)
    checkpoint = folder / name_of(step)
    check_files(unfinished, Manifest.parse(manifest_text, unfinished / MANIFEST), only)

    # Each file is on disk before the next one says that it is: COMPLETE after the manifest, and the
    # final name after both.
    write_whole(unfinished / MANIFEST, manifest_text)
    fsync_folder(unfinished)
    digest = hashlib.sha256(manifest_text.encode()).hexdigest()
    write_whole(unfinished / COMPLETE, complete_text(digest))
    fsync_folder(unfinished)

    if is_shared:
        check_owner()  # writing may have taken long
    if os.path.lexists(checkpoint):
        aside = set_aside(checkpoint)
        if say is not None:
            say(f"{checkpoint} was in the way of a new checkpoint and is {aside.name} now")
    unfinished.rename(checkpoint)
    fsync_folder(folder)
    return checkpoint


def abandon(folder: Path, step: int) -> None:
    """Removes the folder of a checkpoint that will not be finished."""
    _remove_tree(unfinished_path(folder, step))


def clear_unfinished(folder: Path) -> list[Path]:
    """Removes unfinished folders of killed jobs, and returns them. Only for the holder of the
    folder's lock."""
    check_owner()
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name)]
    for path in paths:
        _remove_tree(path)
    return paths


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint. It is renamed first, so that no reader sees it half deleted."""
    check_owner()
    trash = checkpoint.with_name(f".{checkpoint.name}.removed")
    _remove_tree(trash)
    checkpoint.rename(trash)
    fsync_folder(checkpoint.parent)
    _remove_tree(trash)


def set_aside(path: Path) -> Path:
    """Renames a path that is in the way to `NAME.aside-1`, or the next free number, and returns the
    new path."""
    check_owner()
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}.aside-{number}")):
        number += 1
    aside = path.with_name(f"{path.name}.aside-{number}")
    path.rename(aside)
    fsync_folder(path.parent)
    return aside


def list_set_aside(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _ASIDE.fullmatch(path.name))


def unfinished_path(folder: Path, step: int) -> Path:
    return folder / f".{name_of(step)}.tmp"


def _remove_tree(path: Path) -> None:
    """Removes a folder, file or link; the target of a link stays."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
