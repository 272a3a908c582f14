"""A run's folder, as rank 0 sees it: taken by one job at a time, and what it says about how the last job ended."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.folder import InUseError, TakenError, check_owner, clear_unfinished, locked
from meshtrain.checkpoint.shared import prove_shared
from meshtrain.disk import write_whole
from meshtrain.errors import AgreedError, InputError
from meshtrain.runtime import Job
from meshtrain.side_file import move_damaged, optional, warn

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

        A damaged exit.json is moved away.
        """
        path = self.path / EXIT
        with optional(f"{path} cannot be used"):
            try:
                found = json.loads(path.read_bytes())
                if isinstance(found, dict) and isinstance(found.get("step"), int):
                    return found
                move_damaged(path, "it does not say how a job ended")
            except FileNotFoundError:
                pass
            except (ValueError, RecursionError) as error:
                move_damaged(path, error)
        return None

    def has_exit(self) -> bool:
        """Whether a job has written down how it ended."""
        return (self.path / EXIT).exists()

    def forget_exit(self) -> None:
        """A job starts: what the last one said of its end does not count any more."""
        with optional(f"the {EXIT} of the last job stays"):
            (self.path / EXIT).unlink(missing_ok=True)

    def write_exit(
        self, status: str, code: int, reason: str, step: int, goodput: Mapping[str, float] | None = None
    ) -> None:
        """How this job ends: status "done", "stopped" or "failed", after `step` updates. Only said if the disk refuses.

        Args:
            goodput: how the wall time of the run was spent, where that is known.
        """
        end: dict[str, Any] = {"status": status, "code": code, "reason": reason, "step": step}
        if goodput is not None:
            end["goodput"] = dict(goodput)
        try:
            self.write(EXIT, json.dumps(end) + "\n")
        except (OSError, TakenError) as error:
            warn(f"there is no {EXIT}, which would say {json.dumps(end)}: {error}")

    def write(self, name: str, text: str) -> None:
        """Writes a file of the folder whole or not at all, whatever happens to the host.

        Raises:
            OSError: it cannot. TakenError: the folder is another job's now.
        """
        check_owner()
        write_whole(self.path / name, text)


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
                    _take(folder, stack, job)
                except InputError as error:
                    raise InputError(f"{what}: {error}; or name another one with {other}") from error
        yield


def _take(folder: Path, stack: ExitStack, job: Job) -> None:
    said, deadline = False, time.monotonic() + (LOST_S if job.again else 0.0)
    while True:
        try:
            stack.enter_context(locked(folder, launch=job.environment.launch, again=job.again))
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
