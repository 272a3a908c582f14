"""A run's folder, as rank 0 sees it: taken by one job at a time, and what it says about how the last job ended."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshtrain.errors import InputError
from meshtrain.runtime import Job

EXIT = "exit.json"


class RunFolder:
    """The folder `train.output`. Whoever takes it holds a lock on it until it leaves."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def take(self) -> None:
        """Makes the folder if there is none, and locks it.

        Raises:
            InputError: the folder cannot be written to, or another job holds it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(
                f"the run's folder {self.path.absolute()} cannot be used ({error.strerror}): "
                "name another one with train.output=FOLDER"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
            os.close(lock)
            raise InputError(
                f"the run's folder {self.path} is in use by {holder or 'another job'}: "
                "wait for it to end, or name another folder with train.output=FOLDER"
            ) from error
        except OSError as error:
            os.close(lock)
            raise InputError(
                f"the run's folder {self.path.absolute()} cannot be locked ({error.strerror}), and without a lock two "
                "jobs could write to it: name one on another file system with train.output=FOLDER"
            ) from error
        os.truncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)
        self._lock = lock
        # A reader process that outlives this one for a moment must not keep the folder locked.
        os.register_at_fork(after_in_child=self._close)

    def leave(self) -> None:
        """Gives the folder back; may be called twice."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def held(self, job: Job) -> Iterator[None]:
        """Rank 0 has taken the folder while the body runs; if it cannot, no rank goes on.

        Raises:
            InputError: as `take`, on every rank.
        """
        with job.together("opening the run's folder"):
            if job.rank == 0:
                self.take()
        try:
            yield
        finally:
            self.leave()

    def last_exit(self) -> dict[str, Any] | None:
        """How the last job ended, as it wrote down itself; None if none did.

        Raises:
            InputError: exit.json is there and is none.
        """
        path = self.path / EXIT
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise InputError(f"{path} is not JSON ({error}): remove it, or name another folder") from error
        if not isinstance(found, dict) or not isinstance(found.get("step"), int):
            raise InputError(f"{path} does not say how a job ended: remove it, or name another folder")
        return found

    def forget_exit(self) -> None:
        """A job starts: what the last one said of its end does not count any more."""
        (self.path / EXIT).unlink(missing_ok=True)

    def write_exit(self, status: str, code: int, reason: str, step: int) -> None:
        """How this job ends: status "done", "stopped" or "failed", after `step` updates."""
        self.write(EXIT, json.dumps({"status": status, "code": code, "reason": reason, "step": step}) + "\n")

    def write(self, name: str, text: str) -> None:
        """Writes a file of the folder whole or not at all."""
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(text)
        temporary.replace(self.path / name)
