"""Fault injection (`train.chaos`): a rank is killed, stopped, slowed down or cannot save, as the
config says."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from meshtrain.config.schema import Fault
from meshtrain.job.process import Job
from meshtrain.job.storage import print_error

_EFFECTS = {
    "kill": "is killed (SIGKILL)",
    "stop": "is stopped (SIGSTOP)",
    "raise": "raises an exception",
    "fail-save": "finds no space left on its disk",
}


class PlantedError(Exception):
    """Raised by `fault: raise`."""


class FaultInjector:
    def __init__(
        self, faults: Sequence[Fault], job: Job, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`faults`: of the whole job. `sleep`: how a slow rank spends its time."""
        self.job, self._faults, self._sleep = job, faults, sleep
        self._planted = [fault for fault in faults if fault.again or not job.again]
        self._mine = [fault for fault in self._planted if fault.rank in (None, job.rank)]
        self._struck: set[Fault] = set()  # a fault that lasts is reported once

    def about(self) -> Iterator[str]:
        """Lines that rank 0 prints at the start, so that nobody searches for a fault that was
        planted."""
        for fault in self._planted:
            yield f"warning: a fault is planted (train.chaos): {describe(fault)}"
        left_out = len(self._faults) - len(self._planted)
        if left_out:
            yield (
                f"train.chaos: {left_out} of its faults struck in the first start, and are not "
                "planted again"
            )

    def at_step(self, step: int) -> None:
        """Called at the beginning of a step: within this rank's own time, before its first
        collective."""
        for fault in self._mine:
            if not fault.in_save and _strikes(fault, step):
                self._strike(fault)

    def in_save(self, step: int, path: Path) -> None:
        """Called in the thread that writes this rank's file `path`, just before it. Raises OSError:
        disk full."""
        for fault in self._mine:
            if fault.in_save and _strikes(fault, step):
                self._strike(fault, path)

    def _strike(self, fault: Fault, path: Path | None = None) -> None:
        if fault not in self._struck:
            self._struck.add(fault)
            print_error(f"train.chaos: {self.job}: {fault.fault} strikes, as planted")
        if fault.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.fault == "slow":
            assert fault.seconds is not None  # the config was checked
            self._sleep(fault.seconds)
        elif fault.fault == "fail-save":
            raise OSError(
                errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (planted by train.chaos)", str(path)
            )
        else:
            raise PlantedError(f"planted by train.chaos: {describe(fault)}")


def describe(fault: Fault) -> str:
    """A fault in a sentence: `rank 1 is killed (SIGKILL) at the beginning of step 7`."""
    ranks = "every rank" if fault.rank is None else f"rank {fault.rank}"
    if fault.fault == "slow" and not fault.in_save:
        until = "on" if fault.until is None else f"to step {fault.until}"
        return (
            f"{ranks} takes {fault.seconds:g} s longer for each step, from step {fault.step} "
            f"{until}"
        )
    effect = f"takes {fault.seconds:g} s longer" if fault.fault == "slow" else _EFFECTS[fault.fault]
    moment = "in the save after" if fault.in_save else "at the beginning of"
    return f"{ranks} {effect} {moment} step {fault.step}"


def _strikes(fault: Fault, step: int) -> bool:
    if fault.fault != "slow" or fault.in_save:
        return step == fault.step
    return fault.step <= step and (fault.until is None or step <= fault.until)
