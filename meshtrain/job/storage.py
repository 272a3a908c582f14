"""File I/O of a run: side files whose disk errors do not end the run, durable writes, and reads
with retries.

A file that the user has not named himself (a lock, a cache, a file beside a run or a log) is opened
by `open_guarded` alone: others may be able to write to its folder, and would choose what a link
there leads to.
"""

import errno
import io
import os
import pwd
import socket
import stat
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from meshtrain.errors import InputError, UnreadableError

MOST_WAITING = 10_000  # lines kept in memory until the disk accepts them
# the most that a small file beside a run may have: exit.json, a token, a config
SIDE_FILE_BYTES = 1 << 20
LOOK_FOR_REMOVAL_S = 60.0  # between looks whether a file that is written still has its name

# What no config can mend: the disk is full, or it, or the server behind it, fails. The same command
# may work later.
DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENODEV,
    errno.ENXIO,
)


def print_error(text: object) -> None:
    """Prints to stderr in one piece: `print` writes the end of the line apart, behind another
    thread's text."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def warn(text: str) -> None:
    print_error(f"warning: {text}")


def show_any_text() -> None:
    """From now on stdout has `?` for what its encoding lacks: a log in Latin-1 ends no run whose
    text is Cyrillic."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def open_guarded(
    path: Path, flags: int = os.O_RDONLY, *, most: int | None = None, mode: int = 0o644
) -> int:
    """Opens a file that the user has not named, and returns its descriptor.

    It has to be a regular file and no link, of this user or of the owner of its folder, and of at
    most `most` bytes. A link would lead wherever whoever can write to the folder likes; a pipe or a
    device would never end.

    Raises OSError, whose `strerror` says what is wrong; PermissionError: the file is another
    user's.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            reason = "it is a link, which is not followed here"
            raise OSError(errno.ELOOP, reason, str(path)) from None
        raise
    try:
        _check_guarded(path, os.fstat(descriptor), most)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_guarded(path: Path, about: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    own = (os.geteuid(), os.stat(path.parent).st_uid)
    if about.st_uid not in own and about.st_uid != _uid_of_new_files(path.parent):
        owner = (
            f"it belongs to {user_name(about.st_uid)}, who is neither this user nor the owner of "
            "its folder"
        )
        raise PermissionError(errno.EPERM, owner, str(path))
    if most is not None and about.st_size > most:
        size = f"it has {about.st_size:,} bytes, and at most {most:,} are read"
        raise OSError(errno.EFBIG, size, str(path))


def _uid_of_new_files(folder: Path) -> int | None:
    """To whom a file belongs that this process makes there: a file server may give those of root to
    `nobody`. None: it cannot make one."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None


def read_guarded(path: Path, most: int = SIDE_FILE_BYTES) -> bytes:
    """The bytes of a file that the user has not named. Raises OSError, as `open_guarded` does."""
    with open(open_guarded(path, most=most), "rb") as file:
        return file.read(most)


def user_name(uid: int) -> str:
    """The name of a user, or his number where this host knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def make_private_folder(folder: Path, *, may_be_shared: bool = True) -> Path:
    """Makes a folder for what this user's processes will execute, with mode 0700, or takes the one
    that is there. `may_be_shared`: whether the folders above have to be looked at. Those of a
    user's home need not be: nobody else writes there, though the user's private group may have all
    rights.

    Raises OSError: it cannot be made, is a link, is another user's, or others can or could write to
    it, or exchange it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    above = folder.parent.resolve()
    if may_be_shared:
        for parent in (above, *above.parents):
            if _others_exchange(os.stat(parent)):
                reason = f"others can write to the folder above it, {parent}"
                raise PermissionError(errno.EPERM, reason, str(folder))
    folder = above / folder.name  # whoever can exchange a link on the way to it changes nothing
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder, or a link to one", str(folder))
    if about.st_uid != os.geteuid() or _others_write(about):
        whose = f"it is {user_name(about.st_uid)}'s, with mode {stat.S_IMODE(about.st_mode):04o}"
        reason = f"{whose}, and others may have put code there"
        raise PermissionError(errno.EPERM, reason, str(folder))
    folder.chmod(0o700)
    return folder


def _others_exchange(about: os.stat_result) -> bool:
    """Whether others can exchange what lies in a folder."""
    if about.st_uid not in (0, os.geteuid()):
        return True
    sticky = bool(about.st_mode & stat.S_ISVTX)  # as /tmp: only the owner of a file can exchange it
    return _others_write(about) and not sticky


def _others_write(about: os.stat_result) -> bool:
    return bool(about.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


@contextmanager
def optional(message: str) -> Iterator[None]:
    """Wraps an optional operation: an OSError becomes a warning that begins with `message`, and the
    run continues."""
    try:
        yield
    except OSError as error:
        warn(f"{message}: {error}")


def move_damaged(path: Path, reason: object) -> Path:
    """Renames a damaged file out of the way, prints a warning, and returns its new path."""
    moved = path.with_name(f"{path.name}.damaged")
    number = 1
    while os.path.lexists(moved):
        moved = path.with_name(f"{path.name}.damaged-{number}")
        number += 1
    path.rename(moved)
    warn(f"{path} is damaged ({reason}): it is {moved.name} now")
    return moved


class SideFile:
    """A file of lines, each written as soon as the disk accepts it.

    Lines that cannot be written are kept and retried with the next one; the failure is reported
    once, and so is the number of lines lost. Lines that other writers have added since are never
    truncated.
    """

    def __init__(self, path: Path, start: int = 0, end: int | None = 0) -> None:
        """`start`, `end`: byte offsets of the file's last line; anything after `end` is truncated.
        `end` None: lines are appended to the existing content."""
        self.path = path
        self._start = start
        self._end = end
        self._size: int | None = None  # of the file after this writer's last write, if known
        self._shared = False  # another process writes to it, too
        self._file: BinaryIO | None = None
        self._waiting: deque[bytes] = deque()
        self._fails = False  # whether the last write failed
        self._lost = 0  # lines
        self._looked_at = time.monotonic()
        self._write()

    def append(self, line: bytes) -> None:
        self._waiting.append(line)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._write()

    def replace_last(self, line: bytes) -> None:
        """Replaces the last line."""
        if self._waiting:
            self._waiting.pop()
        else:
            self._end = self._start
        self.append(line)

    def close(self) -> None:
        if self._waiting:
            self._write()
        if self._waiting:
            warn(f"{self.path} lacks its last {len(self._waiting)} lines")
        file, self._file = self._file, None  # a later line reopens the file
        if file is not None:
            with optional(f"{self.path} could not be closed"):
                file.close()

    def _write(self) -> None:
        try:
            start, end = self._write_waiting()
        except OSError as error:
            self._let_go()
            if not self._fails:
                warn(
                    f"{self.path} cannot be written ({error.strerror}); its lines are kept, and "
                    "tried again"
                )
            self._fails = True
            return
        if self._waiting:
            self._start = max(start, end - len(self._waiting[-1]))
        self._end = self._size = end
        self._waiting.clear()
        if self._fails:
            lost = f"; {self._lost} lines of it are lost" if self._lost else ""
            warn(f"{self.path} is written again{lost}")
        self._fails = False
        self._lost = 0

    def _write_waiting(self) -> tuple[int, int]:
        """Writes the lines that wait; returns where they begin and end. Raises OSError: a part of
        them may be there."""
        if self._file is not None and self._is_removed(self._file):
            self._begin_anew()
        if self._file is None:
            descriptor = open_guarded(self.path, os.O_RDWR | os.O_CREAT)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        start = self._end
        if start is None or size < start or self._size not in (None, size):
            # Somebody else has written, or cut the file off: never truncate their lines.
            start = size
            self._share()
        self._file.seek(start)
        self._end = start
        self._size = None  # unknown until all is written
        data = memoryview(b"".join(self._waiting))
        while data:
            data = data[self._file.write(data) :]
        end = self._file.tell()
        if end < size:
            self._file.truncate()
        return start, end

    def _is_removed(self, file: BinaryIO) -> bool:
        """Whether what is written goes into a file that no longer has its name: its folder was
        removed or renamed."""
        about = os.fstat(file.fileno())
        if about.st_nlink == 0:
            return True
        # A file server keeps the link of a removed file that is open. To ask it at each step would
        # cost too much.
        if time.monotonic() - self._looked_at < LOOK_FOR_REMOVAL_S:
            return False
        self._looked_at = time.monotonic()
        try:
            return not os.path.samestat(about, os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            return True

    def _begin_anew(self) -> None:
        warn(
            f"{self.path} was removed or renamed while this run writes to it: its lines so far are "
            "gone from there, and a new file has those from now on"
        )
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._start = 0
        self._end = self._size = None
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def _share(self) -> None:
        if self._size is not None and not self._shared:
            self._shared = True
            warn(
                f"somebody else has written to {self.path}, or cut it off: lines are added to what "
                "is there now"
            )

    def _let_go(self) -> None:
        """Removes a partly written line and closes the file, whose descriptor may be stale: the
        next try reopens it."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                end = self._end if self._size is None else None  # of the whole lines
                if end is not None and os.fstat(file.fileno()).st_size >= end:
                    file.truncate(end)
                    self._size = end
            with suppress(OSError):
                file.close()


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Writes all of `data` to an unbuffered file, of which one write may accept only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(file.fileno(), view) :]


def fsync_file(file: BinaryIO) -> None:
    """Flushes a file to disk and drops it from the page cache: 100 GB not read soon would evict
    data in use."""
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fsync_folder(folder: Path) -> None:
    """Flushes the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: str | bytes) -> int:
    """Writes a file atomically and returns its size in bytes. Raises OSError: it cannot be written;
    no partial file is left. A symbolic link under its name is replaced, not followed."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a writer that was killed
        with temporary.open("xb") as file:
            size = file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return size


# Pauses between retries of a read whose file system fails for a while: a failing server, a stale
# mount, no descriptor.
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0)  # a minute and a half

T = TypeVar("T")


def with_retries(read: Callable[[], T], *more: type[InputError]) -> T:
    """Returns `read()`, retried after each pause on an OSError or one of `more`. Raises
    UnreadableError: the last try ended with an OSError; an error of `more` in the last try is
    raised as it is."""
    passing: tuple[type[Exception], ...] = (OSError, *more)
    for pause_s in PAUSES_S:
        try:
            return read()
        except passing as error:
            warn(f"on host {socket.gethostname()}: {error}; tried again in {pause_s:g} s")
            time.sleep(pause_s)
    try:
        return read()
    except UnreadableError:
        raise
    except OSError as error:
        raise UnreadableError(error.filename or "a file", error.strerror or str(error)) from error
