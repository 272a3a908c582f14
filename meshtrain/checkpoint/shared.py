"""Whether all hosts see one folder. A checkpoint that lies in pieces on many hosts' own disks is none."""

import time
import uuid
from pathlib import Path

from meshtrain.errors import AgreedError, InputError
from meshtrain.runtime import Job

LOOK_FOR_S = 15.0  # a network file system may take a while to show what another host has written
PROOF = ".seen_by_all_hosts"


def prove_shared(job: Job, folder: Path) -> None:
    """Goes on only if every host reads in this folder what rank 0 has just written there.

    Raises:
        InputError: on every rank; names the hosts that do not.
    """
    proof, token = folder / PROOF, uuid.uuid4().hex
    with job.together("writing to the folder of the checkpoints"):
        if job.rank == 0:
            _write(proof, token)
    try:
        token = job.gather("writing to the folder of the checkpoints", token)[0]
        found = True if job.rank == 0 or job.environment.local_rank > 0 else _reads(proof, token)
        seen = job.gather("looking for what rank 0 wrote", [job.host, found])
    finally:
        if job.rank == 0:
            proof.unlink(missing_ok=True)
    blind = list(dict.fromkeys(host for host, found in seen if not found))
    if blind:
        more = f" and {len(blind) - 4} more" if len(blind) > 4 else ""
        raise AgreedError(
            f"the folder of the checkpoints, {folder.absolute()}, is not shared: what rank 0 on host {seen[0][0]} "
            f"wrote there is not seen on host {', '.join(blind[:4])}{more}. Name a folder that all hosts have in "
            "common with checkpoint.path=FOLDER"
        )


def _write(proof: Path, token: str) -> None:
    try:
        proof.parent.mkdir(parents=True, exist_ok=True)
        proof.write_text(token)
    except OSError as error:
        raise InputError(
            f"the folder of the checkpoints, {proof.parent.absolute()}, cannot be written to ({error.strerror}): name "
            "another one with checkpoint.path=FOLDER"
        ) from error


def _reads(proof: Path, token: str) -> bool:
    end = time.monotonic() + LOOK_FOR_S
    while True:
        try:
            if proof.read_text() == token:
                return True
        except OSError:  # it is not there, or not yet
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
