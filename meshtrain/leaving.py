"""The one way out of a job, whatever happens in it."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from meshtrain.elastic import told_before
from meshtrain.errors import AgreedError, InputError, TrainingError
from meshtrain.layout import LayoutError
from meshtrain.runtime import Job

GRACE_S = 10.0  # how long the process that serves the store stays for the others to read their last word


@contextmanager
def leaving(job: Job) -> Iterator[None]:
    """Around all that a process does in a job.

    When all is well every rank waits for the others before it leaves. Wrong input ends the ranks with status 2, told
    once; a run that cannot go on ends them with status 1. Any other exception is told with the rank's name, and
    recorded where torchrun's summary finds it. A rank that fails, or is ended by a signal, because another one was
    lost before says which.
    """
    try:
        yield
        _part(job)
    except TrainingError as error:
        if job.rank == 0:
            print(error, file=sys.stderr, flush=True)
            get_error_handler().record_exception(error)
        _part(job)
        raise SystemExit(1) from None
    except AgreedError as error:
        # torchrun ends the other ranks as soon as one exits: nobody may before rank 0 has spoken. A worker that
        # torchrun starts again does not say the same once more.
        if job.rank == 0 and not told_before(str(error), os.environ):
            print(error, file=sys.stderr, flush=True)
        _part(job)
        raise SystemExit(2) from None
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, SystemExit) and not by_signal(error):
            raise
        lost = job.failures.failed(str(job), error)
        if lost is not None:
            if not lost.said:
                print(f"{job} stops, because {lost.reason}", file=sys.stderr, flush=True)
            raise SystemExit(1) from None
        if not isinstance(error, Exception):
            raise
        if isinstance(error, InputError | LayoutError):  # on this rank alone: the others learn of it by the store
            print(error if job.world_size == 1 else f"{job}: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None
        error.add_note(f"This was {job}.")
        get_error_handler().record_exception(error)
        raise


def by_signal(error: BaseException) -> bool:
    """Whether a signal has ended this process."""
    if isinstance(error, SystemExit):
        return isinstance(error.code, int) and error.code - 128 in signal.valid_signals()
    return isinstance(error, KeyboardInterrupt)


def signal_of(error: BaseException) -> str:
    """Its name, where `by_signal` is so."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return signal.Signals(error.code - 128).name
    return "SIGINT"


def _part(job: Job) -> None:
    """Waits for all ranks and closes the process groups.

    Without the barrier gloo's threads of a slower rank may still hold tensors, and its process aborts at the end.
    """
    if job.store is None:
        return
    job.gather("leaving", None)
    job.failures.leave()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    job.store.add("left", 1)
    deadline = time.monotonic() + GRACE_S
    while job.environment.hosts_store and job.store.add("left", 0) < job.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
