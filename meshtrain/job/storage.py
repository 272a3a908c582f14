"""Files that a run writes beside its work: it does not end because a disk does not take one of them."""

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

MOST_WAITING = 10_000  # lines that are kept until the disk takes them


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def show_any_text() -> None:
    """From now on stdout has `?` for what its encoding lacks: a log in Latin-1 ends no run whose text is Cyrillic."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def optional(message: str) -> Iterator[None]:
    """Around what a run can do without: an OSError becomes a warning that begins with `message`; the run goes on."""
    try:
        yield
    except OSError as error:
        warn(f"{message}: {error}")


def move_damaged(path: Path, reason: object) -> Path:
    """Takes a file that is not what a run has written out of the way, and says so; returns its new path."""
    number, moved = 1, path.with_name(f"{path.name}.damaged")
    while os.path.lexists(moved):
        number, moved = number + 1, path.with_name(f"{path.name}.damaged-{number}")
    path.rename(moved)
    warn(f"{path} is damaged ({reason}): it is {moved.name} now")
    return moved


class SideFile:
    """A file of lines, each on disk as soon as it can be.

    What the disk does not take is kept, tried again with the next line, and said once; so is what was lost. What others
    have added since is never cut off.
    """

    def __init__(self, path: Path, start: int = 0, end: int | None = 0) -> None:
        """`start`, `end`: of its last line, in bytes; what comes after it is cut off. `end` None: lines are added to
        whatever is there."""
        self.path, self._start, self._end = path, start, end
        self._size: int | None = None  # of the file when this writer has left it, if that is known
        self._shared = False  # somebody else writes to it
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
        """Puts a line in the place of the last one."""
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
        file, self._file = self._file, None  # a line that comes later opens it again
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
        """The next try opens the file anew: a descriptor may be stale. Half a line does not stay."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                if self._size is None and self._end is not None and os.fstat(file.fileno()).st_size >= self._end:
                    file.truncate(self._end)
                    self._size = self._end
            with suppress(OSError):
                file.close()


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """To a file without a buffer, which may take a part at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(file.fileno(), view) :]


def fsync_file(file: BinaryIO) -> None:
    """Waits until a file is on disk, and lets its pages go: 100 GB that nobody reads soon would push data out."""
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fsync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> int:
    """Writes a file whole or not at all, and returns its bytes. OSError: it cannot; nothing of it is left. No link is
    followed that somebody laid under its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a writer that was killed
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


# The pauses of a reader whose file system has a bad moment: a failing server, a stale mount, no descriptor left.
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0)  # a minute and a half

T = TypeVar("T")


def with_retries(read: Callable[[], T], *more: type[InputError]) -> T:
    """What `read` returns. An OSError, or one of `more`, is tried again after each of the pauses. Raises
    UnreadableError for an OSError that stays; one of `more` as it was last."""
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
