"""The cache of prepared corpora: each is made once per host, by the first process to come, while
the others wait.

The processes of a host synchronize through a file lock (flock) rather than a collective, which
would time out. The kernel releases the lock of a process that dies, so that the next one takes
over.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from meshtrain.data.tokens import Document, temporary_prefix
from meshtrain.errors import InputError
from meshtrain.job.parsing import parse_json
from meshtrain.job.pending import advance
from meshtrain.job.storage import open_guarded, read_guarded

Say = Callable[[str], None]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# first and longest polling interval; backing off spares a file server
_POLL_S = 0.1
_LONGEST_POLL_S = 5.0
_SAY_EVERY_S = 10.0
# another host's temporary folder counts as abandoned if it was not written to for so long
_ABANDONED_S = 3600.0


def cache_folder(path: str | None) -> Path:
    """Where prepared corpora are kept: `data.cache`, else meshtrain/ in $XDG_CACHE_HOME or
    ~/.cache."""
    if path is not None:
        return Path(path).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshtrain"


def prepare_once(
    folder: Path, prepare: Callable[[], object], say: Say, *, wait: bool = True
) -> Path:
    """Calls `prepare` in one process of this host if `folder` does not exist yet. If another
    process is preparing it, waits for that process, or returns at once if `wait` is false. Returns
    `folder`.

    `prepare` creates it by a rename, whole or not at all; its exceptions propagate, and the next
    process tries again. `say` gets a line every 10 s while another process prepares. Raises
    InputError: the cache cannot be used.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        path, lock = _open_lock(folder)
    except OSError as error:
        raise InputError(
            f"the cache {folder.parent} cannot be written ({error.filename}: {error.strerror}): "
            "prepared data goes there; name a folder on a disk of this host in data.cache"
        ) from error
    try:
        if _lock_unless_there(path, lock, folder, say, wait):
            _clean(folder)
            try:
                prepare()
            except OSError as error:
                # if it is, another host was first: some shared file systems lock per host
                if not folder.is_dir():
                    if error.errno in NO_ROOM:
                        # a failed write does not name its file
                        error.filename = error.filename or str(folder)
                    raise
    finally:
        os.close(lock)
    return folder


def _open_lock(folder: Path) -> tuple[Path, int]:
    """The lock of a folder, and its descriptor. Each user has a lock of his own: nobody can write
    to another's. Two users may then prepare the same at once, and the first to rename it wins."""
    common = folder.parent / f".{folder.name}.lock"
    own = folder.parent / f".{folder.name}.{os.geteuid()}.lock"
    try:
        return common, open_guarded(common, os.O_RDWR | os.O_CREAT)
    except PermissionError:
        return own, open_guarded(own, os.O_RDWR | os.O_CREAT)


def _lock_unless_there(path: Path, lock: int, folder: Path, say: Say, wait: bool) -> bool:
    """Waits for the lock or the folder, if `wait`. True: this process holds the lock and has to
    prepare the folder."""
    last_message = time.monotonic()
    pause = _POLL_S
    written = 0.0  # when the other process last wrote
    while not folder.is_dir():
        if _try_lock(path, lock):
            if folder.is_dir():  # created between the check and the lock
                return False
            _sign(lock)
            return True
        if not wait:
            return False
        if time.monotonic() - last_message >= _SAY_EVERY_S:
            last_message = time.monotonic()
            say(f"waiting for {folder}: {_holder(path)}")
            now_written = _last_written(folder)
            if now_written != written:
                written = now_written
                advance()  # this process waits for one that gets on
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_POLL_S)
    return False


def _try_lock(path: Path, lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise InputError(
            f"the file system of {path} has no locks ({error.strerror}): "
            "name a folder on a disk of this host in data.cache"
        ) from error
    return True


def _sign(lock: int) -> None:
    """Writes into the lock who holds it, for those who wait. A full disk has no room for that: then
    nobody is named."""
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
    with suppress(OSError):
        # a file of this user's that somebody has given the lock's name, too
        if os.fstat(lock).st_nlink > 1:
            return
        os.truncate(lock, 0)
        os.pwrite(lock, json.dumps(holder).encode(), 0)


def _holder(path: Path) -> str:
    try:
        holder = parse_json(read_guarded(path, 1000))
        seconds = time.time() - holder["since"]
        return (
            f"process {holder['pid']} on {holder['host']} has been preparing it for {seconds:.0f} s"
        )
    except (OSError, ValueError, KeyError, TypeError):  # the holder has not written its name yet
        return "another process begins to prepare it"


def _last_written(folder: Path) -> float:
    """When a process that prepares this folder last wrote to its temporary one."""
    newest = 0.0
    with suppress(OSError):  # it has just become the folder
        for temporary in folder.parent.glob(f"{temporary_prefix(folder)}*.tmp"):
            for path in (temporary, *temporary.glob("*")):
                newest = max(newest, path.lstat().st_mtime)
    return newest


def _clean(folder: Path) -> None:
    """Removes temporary folders that dead processes left for this folder. The caller holds this
    user's lock, so no process of this user and host is preparing it; one of another user, or of
    another host, where a shared file system locks per host, may be."""
    prefix = temporary_prefix(folder)
    for leftover in folder.parent.glob(f"{prefix}*.tmp"):
        with suppress(OSError):  # it has just become the folder, or is another user's
            about = leftover.lstat()
            of_host = leftover.name.startswith(f"{prefix}{socket.gethostname()}.")
            written = [path.lstat().st_mtime for path in leftover.glob("*")]
            is_own = of_host and about.st_uid == os.geteuid()
            is_abandoned = time.time() - max(written, default=about.st_mtime) > _ABANDONED_S
            if is_own or is_abandoned:
                shutil.rmtree(leftover)


class Progress:
    """Reports every 10 s how many documents have been processed."""

    def __init__(self, name: str, say: Say) -> None:
        self._name = name
        self._say = say
        self._start = self._last_message = time.monotonic()
        self._documents = self._tokens = 0

    def count(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents unchanged."""
        for document in documents:
            yield document
            advance()
            self._tokens += len(document.ids)
            self._documents += document.ends
            now = time.monotonic()
            if now - self._last_message >= _SAY_EVERY_S:
                self._last_message = now
                done = (
                    f"{self._documents:,} documents, {self._tokens:,} tokens in "
                    f"{now - self._start:.0f} s"
                )
                self._say(f"preparing {self._name}: {done}")
