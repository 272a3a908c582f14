"""A run's folder, as rank 0 sees it: taken by one job at a time, and what it says about how the last job ended."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.folder import InUseError, clear_unfinished, locked
from meshtrain.checkpoint.shared import prove_shared
from meshtrain.errors import AgreedError, InputError
from meshtrain.runtime import Job

EXIT = "exit.json"
LOST_S = 120.0  # within which file servers give up the locks of a host that was lost, or it has seen that itself


class RunFolder:
    """The folder `train.output`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @contextmanager
    def held(self, job: Job) -> Iterator[None]:
        """Rank 0 has taken the folder while the body runs; if it cannot, no rank goes on.

        Raises:
            InputError: on every rank: the folder cannot be written to, or another job holds it.
        """
        with held(self.path, job, "the run's folder", "train.output=FOLDER"):
            yield

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

    def has_exit(self) -> bool:
        """Whether a job has written down how it ended."""
        return (self.path / EXIT).exists()

    def forget_exit(self) -> None:
        """A job starts: what the last one said of its end does not count any more."""
        (self.path / EXIT).unlink(missing_ok=True)

    def write_exit(
        self, status: str, code: int, reason: str, step: int, goodput: Mapping[str, float] | None = None
    ) -> None:
        """How this job ends: status "done", "stopped" or "failed", after `step` updates.

        Args:
            goodput: how the wall time of the run was spent, where that is known.
        """
        end: dict[str, Any] = {"status": status, "code": code, "reason": reason, "step": step}
        if goodput is not None:
            end["goodput"] = dict(goodput)
        self.write(EXIT, json.dumps(end) + "\n")

    def write(self, name: str, text: str) -> None:
        """Writes a file of the folder whole or not at all."""
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(text)
        temporary.replace(self.path / name)


@contextmanager
def held(folder: Path, job: Job, what: str, other: str) -> Iterator[None]:
    """Rank 0 has a lock on a folder, which it makes if there is none, while the body runs.

    A job that was started again waits for the one before: that had it on a host to which a link was cut, for instance.

    Args:
        what: the folder is, for people.
        other: how another one is named.

    Raises:
        InputError: on every rank: rank 0 cannot have it.
    """
    with ExitStack() as stack:
        with job.together(f"opening {what}"):
            if job.rank == 0:
                try:
                    _take(folder, stack, time.monotonic() + (LOST_S if job.again else 0.0))
                except InputError as error:
                    raise InputError(f"{what}: {error}; or name another one with {other}") from error
        yield


def _take(folder: Path, stack: ExitStack, deadline: float) -> None:
    said = False
    while True:
        try:
            stack.enter_context(locked(folder))
            return
        except InUseError as error:
            if time.monotonic() >= deadline:
                raise
            if not said:
                print(f"starting: {error}", flush=True)
                said = True
            time.sleep(0.5)


@contextmanager
def checkpoints_held(path: str | None, folder: RunFolder, job: Job) -> Iterator[Path]:
    """The folder of a run's checkpoints, which all hosts see, and to which nobody else writes while the body runs.

    Args:
        path: as the config names it; None: `checkpoints` in the run's folder, which is held.

    Raises:
        InputError: on every rank: it cannot be had, or it is not shared.
    """
    checkpoints = folder.path / "checkpoints" if path is None else Path(path).expanduser()
    if checkpoints.resolve() == folder.path.resolve():
        raise AgreedError(
            f"checkpoint.path is the run's folder itself, {folder.path}: name one inside of it, or another"
        )
    with held(checkpoints, job, "the folder of the checkpoints", "checkpoint.path=FOLDER"):
        with job.together("clearing the folder of the checkpoints"):
            for unfinished in clear_unfinished(checkpoints) if job.rank == 0 else ():
                job.say(f"removed {unfinished}, which an earlier job did not finish")
        prove_shared(job, checkpoints)
        yield checkpoints
