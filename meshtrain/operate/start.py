"""A job with a loop of one's own, whose ranks look after each other."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from meshtrain.environment import read_environment
from meshtrain.errors import InputError
from meshtrain.leaving import leaving
from meshtrain.operate.watchdog import watched
from meshtrain.orphans import end_with_launcher
from meshtrain.runtime import Job, join


@contextmanager
def start(timeout_s: float = 600) -> Iterator[Job]:
    """Joins the job that the environment describes (torchrun, srun, or a world of one) and leaves it cleanly.

    If a rank is lost, the others say which; a rank that hangs is named when a collective has taken `timeout_s`.

    Args:
        timeout_s: the time limit in seconds for joining and for collectives.

    Raises:
        SystemExit: with status 2 if the body raises InputError, with status 1 if another rank was lost before. Whatever
            else the body raises passes through, with a note that names rank, host and coordinate.
    """
    end_with_launcher(os.environ)
    try:
        job = join(read_environment(os.environ), timeout_s)
    except InputError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    with watched(job) as watch, leaving(job):
        watch.hear_the_end()
        watch.deadlines.start_s = float("inf")  # what the body does, and how fast, nobody knows here
        watch.at("its own loop")
        job.connect(timeout_s)
        yield job
