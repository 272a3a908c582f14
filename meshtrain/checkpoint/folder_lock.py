"""The lock of a folder: one job writes to it at a time.

`.lock` is locked by flock, which the system releases when the process ends, however it ends. Some
file systems have no locks, or locks per host only, so there is a second sign: the job that comes
writes a token into `.owner`, and a job that finds another token there than its own writes no more.
The token is followed by the launches that held the folder: a restart of a job does not take the
folder back from a job that came after it.
"""

import errno
import fcntl
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshtrain.checkpoint.plain_file import read_plain
from meshtrain.errors import DamagedError, InputError, MissingError
from meshtrain.job.storage import open_guarded, warn, write_whole

LOCK = ".lock"
OWNER = ".owner"
MOST_BYTES = 1000  # of an owner's file
MOST_LAUNCHES = 8  # that a folder remembers
MOST_OF_LAUNCH = 64  # characters of each
# errors of file systems without locks
NO_LOCKS = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOLCK,
    errno.EINVAL,
)

# folders that this process holds -> the token that it wrote into each
_OWNED: dict[Path, bytes] = {}


class InUseError(InputError):
    """Another process has the lock of a folder."""


class TakenError(InputError):
    """Another job has taken a folder that this process held: its file system's locks do not hold
    between hosts."""


def check_owner() -> None:
    """Raises TakenError if another job has taken a folder of this process; UnreadableError if it
    cannot find out."""
    # a copy: another thread may release a folder meanwhile
    for folder, token in list(_OWNED.items()):
        try:
            current = read_plain(folder / OWNER, MOST_BYTES)
        except MissingError:  # a missing token does not mean that another job has taken the folder
            continue
        if current != token:
            raise TakenError(
                f"the folder {folder} was taken by another job meanwhile ({_process_of(current)}): "
                "this one writes no more to it. Its file system does not lock it between hosts: "
                "let only one job have it"
            )


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
        token = _new_token(folder, launch, again) if takes else None
        _write_holder(folder, locks[0])
        if token is not None:
            _take(folder, token)
        yield
    finally:
        _OWNED.pop(folder.absolute(), None)
        with suppress(OSError):  # closing unlocks it, too
            fcntl.flock(locks[0], fcntl.LOCK_UN)
        close()


def _lock(folder: Path) -> int:
    """Locks the folder; returns the descriptor of its lock."""
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
            f"its host is known to be down, remove {folder / LOCK}, which breaks the lock"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            os.close(lock)
            raise InputError(
                f"the folder {folder.absolute()} cannot be locked ({error.strerror})"
            ) from error
        warn(
            f"the folder {folder.absolute()} cannot be locked ({error.strerror}): of two jobs that "
            "write to it, the first stops when it sees the second"
        )
    return lock


def _write_holder(folder: Path, lock: int) -> None:
    """Writes into the lock which process has it, for the message of whoever finds it locked."""
    try:
        os.truncate(lock, 0)
        os.pwrite(lock, _this_process().encode(), 0)
    except OSError as error:
        error.filename = error.filename or str(folder / LOCK)
        raise


def _new_token(folder: Path, launch: str | None, again: bool) -> str:
    """A token of this process, with a line for each launch that held the folder, the latest first.
    Raises TakenError: see `lock_folder`."""
    mine = _one_line(launch or "")
    owner = b""
    with suppress(DamagedError):  # damaged, or missing since no job has taken the folder yet
        owner = read_plain(folder / OWNER, MOST_BYTES)
    launches = owner.decode(errors="replace").split("\n")[1:-1]
    was_before_another = mine != "" and mine in launches[1:]
    if again and was_before_another:
        raise TakenError(
            f"the folder {folder} was taken by another job since this one was first started "
            f"({_process_of(owner)}): start this one anew if it is to go on there"
        )
    others = [other for other in launches if other not in ("", mine)]
    lines = [mine, *others][:MOST_LAUNCHES]
    return f"{uuid.uuid4().hex} {_this_process()}" + "".join(f"{line}\n" for line in lines)


def _take(folder: Path, token: str) -> None:
    try:
        write_whole(folder / OWNER, token)
    except OSError as error:
        error.filename = error.filename or str(folder / OWNER)
        raise
    _OWNED[folder.absolute()] = token.encode()


def _this_process() -> str:
    return f"process {os.getpid()} on host {socket.gethostname()}\n"


def _process_of(token: bytes) -> str:
    """The process in a token; `?` if a terminal would obey it."""
    first_line = token.decode(errors="replace").partition("\n")[0]
    text = first_line.partition(" ")[2]
    return text if text.isprintable() else "?"


def _one_line(launch: str) -> str:
    """An id of a launch as ASCII without line breaks."""
    text = launch.encode("ascii", "backslashreplace").decode()
    return " ".join(text.split())[:MOST_OF_LAUNCH]
