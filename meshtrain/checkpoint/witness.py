"""Witness: damage that a host finds in a shared folder is damage only if another host finds it,
too.

A stale mount or bad memory of one host looks like a damaged checkpoint. Falling back to an older
one would lose steps, so a rank of another host reads the same files first.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from meshtrain.errors import InputError, TrainingError
from meshtrain.job.process import Job
from meshtrain.job.storage import with_retries

ACTIVITY = "looking at a checkpoint from another host"


def fail_if_another_host_reads(
    job: Job,
    hosts: Sequence[str],
    blind: Collection[str],
    problem: str,
    look: Callable[[], object],
) -> None:
    """Returns if another host finds the same damage, or if there is no other host. All ranks call
    it.

    Args:
        hosts: the host of each rank.
        blind: the hosts that have found the damage.
        problem: what they have found.
        look: returns whether the files are intact, or raises InputError.

    Raises TrainingError on every rank: the files are intact for the other host.
    """
    witness: int | None = None
    for rank, host in enumerate(hosts):
        if host not in blind:
            witness = rank
            break
    is_intact = False
    with job.collective_check(ACTIVITY):
        if job.rank == witness:
            with suppress(InputError):
                is_intact = bool(with_retries(look))
    if job.reduce(ACTIVITY, is_intact, any):
        assert witness is not None  # the checkpoint was intact there
        raise TrainingError(
            f"host {', '.join(sorted(blind))} cannot read what host {hosts[witness]} reads: "
            f"{problem}. Nothing is wrong with the checkpoint: see to the mount and the memory of "
            "that host, and start again"
        )
