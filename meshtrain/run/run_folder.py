"""A run's folder, as rank 0 sees it: locked by one job at a time, with a record of how the last job
ended."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.directory import clear_unfinished
from meshtrain.checkpoint.folder_lock import InUseError, TakenError, check_owner, lock_folder
from meshtrain.errors import AgreedError, InputError, join_some
from meshtrain.job.parsing import parse_json
from meshtrain.job.process import Job
from meshtrain.job.storage import move_damaged, optional, read_guarded, warn, write_whole

EXIT = "exit.json"
PROOF = ".seen_by_all_hosts"
# A network file system may take a while to show what another host has written.
LOOK_FOR_S = 15.0
# A restarted job waits so long for the lock that the one before it may still hold, for instance on
# a host to which a link was cut.
LOCK_WAIT_S = 120.0


class RunFolder:
    """The folder `train.output`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def lock(self, job: Job) -> AbstractContextManager[None]:
        """Rank 0 holds a lock on the folder while the body runs. Raises InputError, on every rank,
        if it cannot."""
        return lock_for_job(self.path, job, "the run's folder", option="train.output=FOLDER")

    def last_exit(self) -> dict[str, Any] | None:
        """How the last job ended, as it recorded itself; None if none did. A damaged exit.json is
        moved away."""
        path = self.path / EXIT
        with optional(f"{path} cannot be used"), suppress(FileNotFoundError):
            try:
                end = parse_json(read_guarded(path))
                if isinstance(end, dict) and isinstance(end.get("step"), int):
                    return end
                move_damaged(path, "it does not say how a job ended")
            except InputError as error:
                move_damaged(path, error)
        return None

    def forget_exit(self) -> None:
        with optional(f"the {EXIT} of the last job stays"):
            (self.path / EXIT).unlink(missing_ok=True)

    def write_exit(
        self,
        status: str,
        code: int,
        reason: str,
        step: int,
        goodput: Mapping[str, float] | None = None,
        *,
        kind: str,
        hosts: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Writes how this job ends, "done", "stopped" or "failed", after `step` updates, and
        returns that. On a disk error it is only printed. `kind`: the machine-readable reason:
        "done", a StopKind, or a DiagnosisKind. `hosts`: those at fault."""
        end: dict[str, Any] = {
            "status": status,
            "code": code,
            "reason": reason,
            "kind": kind,
            "step": step,
            "hosts": list(hosts),
        }
        if goodput is not None:
            end["goodput"] = dict(goodput)
        try:
            self.write(EXIT, json.dumps(end) + "\n")
        except (OSError, TakenError) as error:
            warn(f"there is no {EXIT}, which would say {json.dumps(end)}: {error}")
        return end

    def write(self, name: str, text: str) -> None:
        """Writes a file atomically. Raises OSError, or TakenError: another job has the folder
        now."""
        check_owner()
        write_whole(self.path / name, text)


@contextmanager
def lock_for_job(folder: Path, job: Job, purpose: str, *, option: str) -> Iterator[None]:
    """Rank 0 holds a lock on a folder, created if missing, while the body runs. A restarted job
    waits for the one before it to release the lock.

    Args:
        purpose: a readable name of the folder.
        option: the config key that names another one.

    Raises:
        InputError: on every rank: rank 0 cannot get the lock.
    """
    with ExitStack() as stack:
        with job.collective_check(f"opening {purpose}"):
            if job.rank == 0:
                try:
                    _take_lock(folder, job, stack)
                except InputError as error:
                    raise InputError(
                        f"{purpose}: {error}; or name another one with {option}"
                    ) from error
        yield


def _take_lock(folder: Path, job: Job, stack: ExitStack) -> None:
    """Takes the lock on a folder, which is released with `stack`. Raises InUseError: another job
    holds it."""
    wait_s = LOCK_WAIT_S if job.again else 0.0
    deadline = time.monotonic() + wait_s
    printed = False
    while True:
        try:
            stack.enter_context(lock_folder(folder, launch=job.environment.launch, again=job.again))
            return
        except InUseError as error:
            if time.monotonic() >= deadline:
                raise
            if not printed:
                print(f"starting: {error}", flush=True)
                printed = True
            time.sleep(0.5)


@contextmanager
def lock_checkpoints(path: str | None, folder: RunFolder, job: Job) -> Iterator[Path]:
    """The folder of a run's checkpoints (`path` of the config; None: `checkpoints` in the run's
    folder), which all hosts see, and to which no other job writes while the body runs. Raises
    InputError, on every rank."""
    checkpoints = folder.path / "checkpoints" if path is None else Path(path).expanduser()
    if checkpoints.resolve() == folder.path.resolve():
        raise AgreedError(
            f"checkpoint.path is the run's folder itself, {folder.path}: name one inside of it, or "
            "another"
        )
    purpose = "the folder of the checkpoints"
    with lock_for_job(checkpoints, job, purpose, option="checkpoint.path=FOLDER"):
        with job.collective_check("clearing the folder of the checkpoints"):
            if job.rank == 0:
                for unfinished in clear_unfinished(checkpoints):
                    job.say(f"removed {unfinished}, which an earlier job did not finish")
        check_shared_filesystem(job, checkpoints)
        yield checkpoints


def check_shared_filesystem(job: Job, folder: Path) -> None:
    """Raises InputError, on every rank, naming hosts that do not read in this folder what rank 0
    has just written."""
    proof = folder / PROOF
    token = uuid.uuid4().hex
    with job.collective_check("writing to the folder of the checkpoints"):
        try:
            if job.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(proof, token)
        except OSError as error:
            raise InputError(
                f"the folder of the checkpoints, {folder.absolute()}, cannot be written to "
                f"({error.strerror}): name another one with checkpoint.path=FOLDER"
            ) from error

    try:
        token = job.reduce("writing to the folder of the checkpoints", token, itemgetter(0))
        # One process of each host looks; that of rank 0 has just written it.
        looks = job.rank != 0 and job.environment.local_rank == 0
        sees = not looks or _reads(proof, token)
        writer, blind = job.reduce("looking for what rank 0 wrote", [job.host, sees], _blind_hosts)
    finally:
        if job.rank == 0:
            proof.unlink(missing_ok=True)

    if blind:
        raise AgreedError(
            f"the folder of the checkpoints, {folder.absolute()}, is not shared: what rank 0 on "
            f"host {writer} wrote there is not seen on host {join_some(blind, 4)}. Name a folder "
            "that all hosts have in common with checkpoint.path=FOLDER"
        )


def _blind_hosts(rows: list) -> tuple[str, list[str]]:
    """The host of rank 0, and those that do not see what it wrote; from [host, whether it sees it]
    of every rank."""
    writer = rows[0][0]
    blind = [host for host, sees in rows if not sees]
    return writer, list(dict.fromkeys(blind))


def _reads(proof: Path, token: str) -> bool:
    end = time.monotonic() + LOOK_FOR_S
    while True:
        with suppress(OSError):  # it is not there, or not yet
            if read_guarded(proof) == token.encode():
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
