"""A directory of checkpoints: which it holds, and how a checkpoint appears in it whole or not at
all.

All ranks write a checkpoint into `.step_0000100.tmp`. When their files are on disk, the manifest is
written, and then COMPLETE with the manifest's checksum; only then is the folder renamed to its
final name. A process killed at any point leaves a folder that no reader takes for a checkpoint.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshtrain.checkpoint.manifest import MANIFEST, MAX_BYTES, Manifest, dumps
from meshtrain.checkpoint.shard_file import open_plain
from meshtrain.errors import DamagedError, InputError, MissingError, UnreadableError
from meshtrain.job.storage import fsync_folder, open_guarded, warn, write_whole

COMPLETE = "COMPLETE"
CHECKPOINTS = "checkpoints"  # in a run's folder
LOCK, OWNER = ".lock", ".owner"
# number of launches that a folder remembers, and characters of each
MOST_LAUNCHES, MOST_OF_LAUNCH = (
    8,
    64,
)
# errors of file systems without locks
NO_LOCKS = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOLCK,
    errno.EINVAL,
)
_STEP = re.compile(r"step_(\d{7,18})", re.ASCII)
_ASIDE = re.compile(r"step_\d{7,18}\.aside-\d+", re.ASCII)
_UNFINISHED = re.compile(r"\.step_\d{7,18}(\.aside-\d+)?\.(tmp|removed)", re.ASCII)


def name_of(step: int) -> str:
    return f"step_{step:07d}"


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None if it is not such a name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == name_of(int(match[1])) else None


def steps(folder: Path) -> list[int]:
    """The steps that have a folder, complete or not, ascending. Symbolic links are ignored."""
    try:
        with os.scandir(folder) as entries:
            numbers = [
                step_of(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(step for step in numbers if step is not None)


def complete_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that were written completely, ascending; their contents are not
    checked."""
    return [step for step in steps(folder) if _exists(folder / name_of(step) / COMPLETE)]


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
    if path.is_dir() and (
        (path / CHECKPOINTS).is_dir() or any(path.glob(".step_*")) or any(path.glob("step_*"))
    ):
        raise InputError(
            f"no checkpoint in {path} is complete: name one that is, or train until one is saved"
        )
    return None


def require_checkpoint(path: str | Path) -> Path:
    """As `find_checkpoint`, but raises InputError if there is no checkpoint."""
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        is_there = "holds no checkpoint" if Path(path).expanduser().is_dir() else "is no folder"
        raise InputError(
            f"{path} {is_there}: name a checkpoint (RUN/{CHECKPOINTS}/{name_of(100)}), or a run's "
            "folder, whose "
            "newest complete one is taken"
        )
    return checkpoint


def _exists(path: Path) -> bool:
    """As `os.path.lexists`, but raises UnreadableError on other errors, where `lexists` returns
    False."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UnreadableError(path, error.strerror) from error
    return True


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
    if not _exists(checkpoint / COMPLETE):
        raise DamagedError(
            checkpoint / COMPLETE, "is missing, so this checkpoint was never written to its end"
        )
    complete = read_plain(checkpoint / COMPLETE, 1000)
    text = read_plain(checkpoint / MANIFEST, MAX_BYTES)
    digest = hashlib.sha256(text).hexdigest()
    if complete != complete_text(digest).encode():
        if not text:
            raise DamagedError(checkpoint / MANIFEST, "is empty")
        raise DamagedError(
            checkpoint / MANIFEST, f"and {COMPLETE} do not fit together: one of them is damaged"
        )
    manifest = Manifest.parse(text, checkpoint / MANIFEST)
    if step_of(checkpoint.name) not in (None, manifest.step):
        raise DamagedError(
            checkpoint / MANIFEST, f"is that of step {manifest.step}: the folder has another's name"
        )
    return manifest, digest


def check_files(checkpoint: Path, manifest: Manifest, only: str | None = None) -> None:
    """Raises DamagedError, naming the first file that is missing or has a wrong size. `only`: check
    only this file."""
    for name, expected in (
        manifest.files.items() if only is None else [(only, manifest.files[only])]
    ):
        descriptor, size = open_plain(checkpoint / name)
        os.close(descriptor)
        if size != expected.size:
            raise DamagedError(
                checkpoint / name, f"has {size:,} bytes; {expected.size:,} were written"
            )


def read_plain(path: Path, most: int) -> bytes:
    """The bytes of an untrusted file. Raises DamagedError: it has more than `most` bytes, or is not
    a regular file."""
    descriptor, size = open_plain(path)
    with open(descriptor, "rb") as file:
        if size > most:
            raise DamagedError(path, f"has {size:,} bytes; at most {most:,} are expected")
        try:
            return file.read(most)
        except OSError as error:
            raise UnreadableError(path, error.strerror) from error


def complete_text(digest: str) -> str:
    """The content of COMPLETE for the sha256 of a manifest."""
    return dumps({"manifest_sha256": digest}) + "\n"


def begin(folder: Path, step: int) -> Path:
    """Makes an empty folder to write a checkpoint into; removes what an earlier attempt left.

    This, `finish` and all that rename or remove raise TakenError if another job has taken a folder
    of this process.
    """
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
    """Makes the folder of `begin` the checkpoint of its step; `say` gets a line if another folder
    was in the way. `only`: on a local disk, the one file that it has; the others are on other
    hosts.

    Raises:
        DamagedError: a file of the manifest is missing.
        OSError: the disk failed; there is no checkpoint then.
    """
    if only is None:
        check_owner()
    unfinished, checkpoint = unfinished_path(folder, step), folder / name_of(step)
    check_files(unfinished, Manifest.parse(manifest_text, unfinished / MANIFEST), only)
    write_whole(unfinished / MANIFEST, manifest_text)
    fsync_folder(unfinished)
    write_whole(
        unfinished / COMPLETE, complete_text(hashlib.sha256(manifest_text.encode()).hexdigest())
    )
    fsync_folder(unfinished)
    if only is None:
        check_owner()
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
    paths = (
        [path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name)]
        if folder.is_dir()
        else []
    )
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
    while os.path.lexists(aside := path.with_name(f"{path.name}.aside-{number}")):
        number += 1
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


class InUseError(InputError):
    """Another process has the lock of a folder."""


class TakenError(InputError):
    """Another job has taken a folder that this process held: its file system's locks do not hold
    between hosts."""


_OWNED: dict[
    Path, bytes
] = {}  # folders that this process holds -> the token that it wrote into each


def check_owner() -> None:
    """Raises TakenError if another job has taken a folder of this process; UnreadableError if it
    cannot find out."""
    # a copy: another thread may release a folder meanwhile
    for folder, token in list(_OWNED.items()):
        try:
            current = read_plain(folder / OWNER, 1000)
        except MissingError:  # a missing token does not mean that another job has taken the folder
            continue
        if current != token:
            raise TakenError(
                f"the folder {folder} was taken by another job meanwhile ({_process_of(current)}): "
                "this one "
                "writes no more to it. Its file system does not lock it between hosts: let only "
                "one job have it"
            )


def _process_of(token: bytes) -> str:
    text = token.decode(errors="replace").partition("\n")[0].partition(" ")[2]
    return text if text.isprintable() else "?"


def owner_changed() -> str | None:
    """The message of `check_owner` if another job has taken a folder; None if not, or if it cannot
    find out."""
    with suppress(OSError):
        try:
            check_owner()
        except InputError as error:
            return str(error)
    return None


@contextmanager
def lock_folder(
    folder: Path, *, takes: bool = True, launch: str | None = None, again: bool = False
) -> Iterator[None]:
    """Holds the exclusive lock of a folder while the body runs. Makes the folder if it does not
    exist.

    If the file system has no locks, or locks per host only, the token in `.owner` shows whether
    another job has come.

    Args:
        takes: write a token, by which a job that holds the folder on another host notices this one.
        launch: id of this job's launch, which all its restarts share; None: not known.
        again: this is a restart of the job.

    Raises:
        TakenError: this is a restart, and another launch has taken the folder since.
        InUseError: another process holds the folder; the message says which.
        InputError: the folder cannot be locked.
    """
    locks = [_lock(folder)]

    def close() -> None:
        while locks:
            os.close(locks.pop())

    # A child that is forked meanwhile and briefly outlives this process must not keep the folder
    # locked.
    os.register_at_fork(after_in_child=close)
    try:
        _write_owner(folder, locks[0], takes, launch, again)
        yield
    finally:
        _OWNED.pop(folder.absolute(), None)
        with suppress(OSError):  # closing unlocks it, too
            fcntl.flock(locks[0], fcntl.LOCK_UN)
        close()


def _write_owner(folder: Path, lock: int, takes: bool, launch: str | None, again: bool) -> None:
    """Writes into the folder which process holds it, and a line for each launch that held it, the
    latest first."""
    mine = " ".join((launch or "").encode("ascii", "backslashreplace").decode().split())[
        :MOST_OF_LAUNCH
    ]
    launches: list[str] = []
    with suppress(DamagedError):  # damaged, or missing since no job has taken the folder yet
        launches = (
            read_plain(folder / OWNER, 1000).decode(errors="replace").split("\n")[1:-1]
            if takes
            else []
        )
    if again and mine and mine in launches[1:]:
        raise TakenError(
            f"the folder {folder} was taken by another job since this one was first started "
            f"({_process_of(read_plain(folder / OWNER, 1000))}): start this one anew if it is to "
            "go on there"
        )
    launches = [mine, *[other for other in launches if other not in ("", mine)]][:MOST_LAUNCHES]
    process = f"process {os.getpid()} on host {socket.gethostname()}\n"
    try:
        os.truncate(lock, 0)
        os.pwrite(lock, process.encode(), 0)
        if takes:
            token = f"{uuid.uuid4().hex} {process}" + "".join(f"{name}\n" for name in launches)
            write_whole(folder / OWNER, token)
            _OWNED[folder.absolute()] = token.encode()
    except OSError as error:
        error.filename = error.filename or str(folder / LOCK)
        raise


def _lock(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_guarded(folder / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise InputError(
            f"the folder {folder.absolute()} cannot be used ({error.strerror})"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
        os.close(lock)
        raise InUseError(
            f"the folder {folder} is in use by {holder or 'another job'}: wait for it to end. If "
            "its host is known to "
            f"be down, remove {folder / LOCK}, which breaks the lock"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            os.close(lock)
            raise InputError(
                f"the folder {folder.absolute()} cannot be locked ({error.strerror})"
            ) from error
        warn(
            f"the folder {folder.absolute()} cannot be locked ({error.strerror}): of two jobs that "
            "write to it, the "
            "first stops when it sees the second"
        )
    return lock
