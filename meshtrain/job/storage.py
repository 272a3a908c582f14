"""File I/O of a run: side files whose disk errors do not end the run, durable writes, and reads with retries."""

import io
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from meshtrain.errors import InputError, UnreadableError

MOST_WAITING = 10_000  # lines kept in memory until the disk accepts them


def print_error(text: object) -> None:
    """Prints to stderr in one piece: `print` writes the end of the line apart, behind another thread's text."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def warn(text: str) -> None:
    print_error(f"warning: {text}")


def show_any_text() -> None:
    """From now on stdout has `?` for what its encoding lacks: a log in Latin-1 ends no run whose text is Cyrillic."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def optional(message: str) -> Iterator[None]:
    """Wraps an optional operation: an OSError becomes a warning that begins with `message`, and the run continues."""
    try:
        yield
    except OSError as error:
        warn(f"{message}: {error}")


def move_damaged(path: Path, reason: object) -> Path:
    """Renames a damaged file out of the way, prints a warning, and returns its new path."""
    number, moved = 1, path.with_name(f"{path.name}.damaged")
    while os.path.lexists(moved):
        number, moved = number + 1, path.with_name(f"{path.name}.damaged-{number}")
    path.rename(moved)
    warn(f"{path} is damaged ({reason}): it is {moved.name} now")
    return moved


class SideFile:
    """A file of lines, each written as soon as the disk accepts it.

    Lines that cannot be written are kept and retried with the next one; the failure is reported once, and so is the
    number of lines lost. Lines that other writers have added since are never truncated.
    """

    def __init__(self, path: Path, start: int = 0, end: int | None = 0) -> None:
        """`start`, `end`: byte offsets of the file's last line; anything after `end` is truncated. `end` None: lines
        are appended to the existing content."""
        self.path, self._start, self._end = path, start, end
        self._size: int | None = None  # of the file after this writer's last write, if known
        self._shared = False  # another process writes to it, too
        self._file: BinaryIO | None = None
        self._waiting: deque[bytes] = deque()
        self._fails, self._lost = False, 0
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
            if self._file is None:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._file = os.fdopen(descriptor, "r+b", buffering=0)
            size = os.fstat(self._file.fileno()).st_size
            at = self._end
            if at is None or size < at or self._size not in (None, size):
                at = size
                self._share()
            self._file.seek(at)
            self._end, self._size = at, None
            data = memoryview(b"".join(self._waiting))
            while data:
                data = data[self._file.write(data) :]
            end = self._file.tell()
            if end < size:
                self._file.truncate()
        except OSError as error:
            self._let_go()
            if not self._fails:
                warn(f"{self.path} cannot be written ({error.strerror}); its lines are kept, and tried again")
            self._fails = True
            return
        if self._waiting:
            self._start = max(at, end - len(self._waiting[-1]))
        self._end = self._size = end
        self._waiting.clear()
        if self._fails:
            warn(f"{self.path} is written again" + (f"; {self._lost} lines of it are lost" if self._lost else ""))
        self._fails, self._lost = False, 0

    def _share(self) -> None:
        if self._size is not None and not self._shared:
            self._shared = True
            warn(f"somebody else has written to {self.path}, or cut it off: lines are added to what is there now")

    def _let_go(self) -> None:
        """Removes a partly written line and closes the file, whose descriptor may be stale: the next try reopens it."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                if self._size is None and self._end is not None and os.fstat(file.fileno()).st_size >= self._end:
                    file.truncate(self._end)
                    self._size = self._end
            with suppress(OSError):
                file.close()


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Writes all of `data` to an unbuffered file, of which one write may accept only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(file.fileno(), view) :]


def fsync_file(file: BinaryIO) -> None:
    """Flushes a file to disk and drops it from the page cache: 100 GB not read soon would evict data in use."""
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


def write_whole(path: Path, text: str) -> int:
    """Writes a file atomically and returns its size in bytes. Raises OSError: it cannot be written; no partial file is
    left. A symbolic link under its name is replaced, not followed."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a writer that was killed
        with temporary.open("xb") as file:
            size = file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return size


# Pauses between retries of a read whose file system fails for a while: a failing server, a stale mount, no descriptor.
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0)  # a minute and a half

T = TypeVar("T")


def with_retries(read: Callable[[], T], *more: type[InputError]) -> T:
    """Returns `read()`, retried after each pause on an OSError or one of `more`. Raises UnreadableError: the last try
    ended with an OSError; an error of `more` in the last try is raised as it is."""
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
