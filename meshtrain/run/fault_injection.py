"""Fault injection (`train.chaos`): a rank is killed, stopped, slowed down or cannot save, as the
config says."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from meshtrain.config.schema import FaultSection
from meshtrain.job.process import Job
from meshtrain.job.storage import print_error

_EFFECTS = {
    "kill": "is killed (SIGKILL)",
    "stop": "is stopped (SIGSTOP)",
    "raise": "raises an exception",
}


class PlantedError(Exception):
    """Raised by `fault: raise`."""


class FaultInjector:
    """The faults of one rank. They happen in the first start of a job only: what is rehearsed is
    that the restarted job goes on."""

    def __init__(
        self,
        faults: Sequence[FaultSection],
        job: Job,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`faults`: of the whole job. `sleep`: how a slow rank spends its time."""
        self.job = job
        self._faults = faults
        self._sleep = sleep
        self._mine: list[FaultSection] = []
        if not job.again:
            self._mine = [fault for fault in faults if fault.rank in (None, job.rank)]
        self._struck: set[FaultSection] = set()  # a fault that lasts is reported once

    def about(self) -> Iterator[str]:
        """Lines that rank 0 prints at the start, so that nobody searches for a fault that was
        planted."""
        if self.job.again and self._faults:
            yield (
                f"train.chaos: {len(self._faults)} of its faults struck in the first start, and "
                "are not planted again"
            )
            return
        for fault in self._faults:
            yield f"warning: a fault is planted (train.chaos): {describe(fault)}"

    def at_step(self, step: int) -> None:
        """Called at the beginning of a step: within this rank's own time, before its first
        collective."""
        for fault in self._mine:
            # A slow rank stays slow: what is rehearsed is the search for stragglers.
            if fault.fault == "slow" and step >= fault.step:
                self._report(fault)
                assert fault.seconds is not None  # the config was checked
                self._sleep(fault.seconds)
            elif not fault.in_save and step == fault.step:
                self._report(fault)
                _strike(fault)

    def in_save(self, step: int, path: Path) -> None:
        """Called in the thread that writes this rank's file `path`, just before it. Raises OSError:
        disk full."""
        for fault in self._mine:
            if fault.in_save and step == fault.step:
                self._report(fault)
                message = f"{os.strerror(errno.ENOSPC)} (planted by train.chaos)"
                raise OSError(errno.ENOSPC, message, str(path))

    def _report(self, fault: FaultSection) -> None:
        if fault not in self._struck:
            self._struck.add(fault)
            print_error(f"train.chaos: {self.job}: {fault.fault} strikes, as planted")


def describe(fault: FaultSection) -> str:
    """A fault in a sentence: `rank 1 is killed (SIGKILL) at the beginning of step 7`."""
    ranks = "every rank" if fault.rank is None else f"rank {fault.rank}"
    if fault.in_save:
        return f"{ranks} finds no space left on its disk in the save after step {fault.step}"
    if fault.fault == "slow":
        return f"{ranks} takes {fault.seconds:g} s longer for each step, from step {fault.step} on"
    return f"{ranks} {_EFFECTS[fault.fault]} at the beginning of step {fault.step}"


def _strike(fault: FaultSection) -> None:
    if fault.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise PlantedError(f"planted by train.chaos: {describe(fault)}")
