"""How a process leaves its job: together with all other ranks, or with a failure that names the
rank at fault."""

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from meshtrain.errors import (
    INPUT_STATUS,
    AgreedError,
    DiskError,
    InputError,
    StartError,
    TrainingError,
    UnreadableError,
)
from meshtrain.job.environment import already_printed, tell_launcher
from meshtrain.job.locate import line_of
from meshtrain.job.process import Job
from meshtrain.job.signals import ignore_signals, in_main_thread
from meshtrain.job.storage import DISK_ERRORS, print_error
from meshtrain.job.store import RemoteFailure, describe, is_input
from meshtrain.job.watchdog.records import Diagnosis, DiagnosisKind, failure_line

# how long the process that serves the store waits for the others to finish reading from it
GRACE_S = 10.0


@contextmanager
def job_exit(job: Job) -> Iterator[None]:
    """Wraps everything that a process does in a job.

    Every rank waits for the others before it leaves. Wrong input is printed once and ends all ranks
    with status 2, whichever of them has found it; TrainingError and another rank's failure end them
    with status 1. Any other exception gets the rank's name as a note. Each failure except wrong
    input prints a machine-readable `failure_line`, and all of them tell torchrun the same sentence
    (`tell_launcher`).
    """
    try:
        yield
        _barrier_and_destroy(job)
    except TrainingError as error:
        if job.rank == 0:
            kind = DiagnosisKind.FAILED if isinstance(error, DiskError) else DiagnosisKind.TRAINING
            print_failure(job, Diagnosis(kind, (), str(error)), str(error))
        tell_launcher(str(error))
        _barrier_and_destroy(job)
        _end(job, 1)
    except AgreedError as error:
        # torchrun ends the other ranks as soon as one exits: none may exit before rank 0 has
        # printed this, once.
        if job.rank == 0 and not already_printed(str(error), os.environ):
            print_error(error)
        tell_launcher(str(error))
        _barrier_and_destroy(job)
        _end(job, INPUT_STATUS)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, SystemExit) and signal_of(error) is None:
            raise
        first = job.failures.first_failure(str(job), error)
        if first is not None:
            _leave_after(job, first)
        if not isinstance(error, Exception):
            tell_launcher(f"{job} was ended by {signal_of(error)}")
            raise
        if is_input(error):  # on this rank only: the others learn of it through the store
            text = str(error) if job.world_size == 1 else f"{job}: {error}"
            print_error(text)
            tell_launcher(text)
            _end(job, INPUT_STATUS)
        headline = f"{job} failed: {describe(error)}"
        diagnosis = Diagnosis(DiagnosisKind.FAILED, (job.rank,), headline, hosts=(job.host,))
        if isinstance(error, OSError) and is_of_machine(error):
            # no program has to be mended
            place = "" if error.errno in DISK_ERRORS else f" ({line_of(error)})"
            print_failure(job, diagnosis, f"{headline}{place}")
            tell_launcher(headline)
            _end(job, 1)
        print_failure(job, diagnosis)
        error.add_note(f"This was {job}.")
        get_error_handler().record_exception(error)
        raise


def refuse_start(error: InputError | StartError) -> int:
    """Says why this process does not join its job; returns its exit status."""
    print_error(error)
    tell_launcher(str(error), at_fault=isinstance(error, InputError) or not error.follows)
    return INPUT_STATUS if isinstance(error, InputError) else 1


def outlast_signals(job: Job) -> None:
    """For a process that ends now with a status of its own: its launcher sends signals to all ranks
    once the first has left, and Python takes a while to end."""
    if job.store is not None and in_main_thread():
        ignore_signals()


def _end(job: Job, status: int) -> NoReturn:
    outlast_signals(job)
    raise SystemExit(status) from None


def _leave_after(job: Job, first: RemoteFailure) -> NoReturn:
    """Ends this rank because of another one's failure."""
    diagnosis = first.diagnosis
    tell_launcher(diagnosis.headline, at_fault=job.rank in diagnosis.ranks)
    if diagnosis.kind == DiagnosisKind.INPUT:  # the rank that has found it prints it
        _end(job, INPUT_STATUS)
    if not first.printed:
        print_failure(job, diagnosis, f"{job} stops, because {diagnosis.headline}")
    _end(job, 1)


def is_of_machine(error: OSError) -> bool:
    """Whether a file could not be read or written for a reason that lies with the disk, or with
    rights on it."""
    if isinstance(error, UnreadableError):
        return True
    of_machine = (*DISK_ERRORS, errno.EACCES, errno.EPERM, errno.EROFS)
    return error.filename is not None and error.errno in of_machine


def print_failure(job: Job, diagnosis: Diagnosis, text: str | None = None) -> None:
    """Writes the text for people, unless printed elsewhere, and the machine-readable line to stderr
    in one piece."""
    line = failure_line(diagnosis, *job.failures.progress())
    sys.stdout.flush()
    print_error(line if text is None else f"{text}\n{line}")


def signal_of(error: BaseException) -> str | None:
    """The name of the signal that ends this process with `error`; None: no signal does."""
    if isinstance(error, KeyboardInterrupt):
        return "SIGINT"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        number = error.code - 128
        if number in signal.valid_signals():
            return signal.Signals(number).name
    return None


def _barrier_and_destroy(job: Job) -> None:
    """Without the barrier, gloo threads of a slower rank may still hold tensors, and its process
    aborts at exit."""
    if job.store is None:
        return
    job.reduce("leaving", None, lambda _: None)
    job.failures.leave()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # The process that serves the store leaves last.
    job.store.add("left", 1)
    if not job.environment.hosts_store:
        return
    deadline = time.monotonic() + GRACE_S
    while job.store.add("left", 0) < job.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
