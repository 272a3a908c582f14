"""How a process leaves its job: together with all other ranks, or with a failure that names the rank at fault."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from meshtrain.errors import AgreedError, InputError, TrainingError
from meshtrain.job.environment import already_printed
from meshtrain.job.process import Job
from meshtrain.job.storage import print_error
from meshtrain.job.store import describe
from meshtrain.job.watchdog.records import Diagnosis, DiagnosisKind, failure_line
from meshtrain.layout import LayoutError

GRACE_S = 10.0  # how long the process that serves the store waits for the others to finish reading from it


@contextmanager
def job_exit(job: Job) -> Iterator[None]:
    """Wraps everything that a process does in a job.

    Every rank waits for the others before it leaves. Wrong input is printed once and ends the ranks with status 2;
    TrainingError and another rank's failure end them with status 1. Any other exception gets the rank's name as a note
    and is recorded for torchrun's summary. Each failure except wrong input prints a machine-readable `failure_line`.
    """
    try:
        yield
        _barrier_and_destroy(job)
    except TrainingError as error:
        if job.rank == 0:
            print_failure(job, Diagnosis(DiagnosisKind.TRAINING, (), str(error)), str(error))
            get_error_handler().record_exception(error)
        _barrier_and_destroy(job)
        raise SystemExit(1) from None
    except AgreedError as error:
        # torchrun ends the other ranks as soon as one exits: none may exit before rank 0 has printed this, once.
        if job.rank == 0 and not already_printed(str(error), os.environ):
            print_error(error)
        _barrier_and_destroy(job)
        raise SystemExit(2) from None
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, SystemExit) and signal_of(error) is None:
            raise
        first = job.failures.first_failure(str(job), error)
        if first is not None:
            if not first.printed:
                print_failure(job, first.diagnosis, f"{job} stops, because {first.diagnosis.headline}")
            raise SystemExit(1) from None
        if not isinstance(error, Exception):
            raise
        if isinstance(error, InputError | LayoutError):  # on this rank only: the others learn of it through the store
            print_error(error if job.world_size == 1 else f"{job}: {error}")
            raise SystemExit(2) from None
        headline = f"{job} failed: {describe(error)}"
        print_failure(job, Diagnosis(DiagnosisKind.FAILED, (job.rank,), headline, hosts=(job.host,)))
        error.add_note(f"This was {job}.")
        get_error_handler().record_exception(error)
        raise


def print_failure(job: Job, diagnosis: Diagnosis, text: str | None = None) -> None:
    """Writes the text for people, unless printed elsewhere, and the machine-readable line to stderr in one piece."""
    line = failure_line(diagnosis, *job.failures.progress())
    sys.stdout.flush()
    print_error(line if text is None else f"{text}\n{line}")


def signal_of(error: BaseException) -> str | None:
    """The name of the signal that ends this process with `error`; None: no signal does."""
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code - 128 in signal.valid_signals():
        return signal.Signals(error.code - 128).name
    return "SIGINT" if isinstance(error, KeyboardInterrupt) else None


def _barrier_and_destroy(job: Job) -> None:
    """Without the barrier, gloo threads of a slower rank may still hold tensors, and its process aborts at exit."""
    if job.store is None:
        return
    job.reduce("leaving", None, lambda _: None)
    job.failures.leave()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    job.store.add("left", 1)
    deadline = time.monotonic() + GRACE_S
    while job.environment.hosts_store and job.store.add("left", 0) < job.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
