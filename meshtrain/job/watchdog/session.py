"""A session: a job with a loop of one's own, whose ranks look after each other."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from meshtrain.errors import InputError
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import Job, join
from meshtrain.job.signals import end_with_launcher
from meshtrain.job.watchdog.watchdog import watched


@contextmanager
def start(timeout_s: float = 600) -> Iterator[Job]:
    """Joins the job that the environment describes (torchrun, srun, or a world of one) and leaves it cleanly.

    The others name a rank that is lost, or for which a collective waits `timeout_s` seconds, the limit for joining too.

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
    with watched(job) as watchdog, job_exit(job):
        watchdog.handle_sigterm()
        watchdog.deadlines.start_s = float("inf")  # what the body does, and how fast, nobody knows here
        watchdog.enter_phase("its own loop")
        job.connect(timeout_s)
        yield job
