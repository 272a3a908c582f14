"""meshtrain.train with a disturbance that `train.chaos` does not have.

    python -m tools.witness.job [signal STEP | kill-in-save STEP] CONFIG [key.path=value ...]

signal: rank 0 gets SIGUSR1 at the beginning of a step, so all ranks save after it and stop.
kill-in-save: rank 0 is killed while it writes the checkpoint of a step.

They are words without dashes, since torchrun would take `--signal` for an option of its own.
"""

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.run.fault_injection import FaultInjector

HOW = ("signal", "kill-in-save")


def disturb(how: str, planned: int) -> None:
    """Makes the fault injector of this process do it."""
    if how == "kill-in-save":

        def in_save(self: FaultInjector, step: int, path: Path) -> None:
            if self.job.rank == 0 and step == planned:
                os.kill(os.getpid(), signal.SIGKILL)

        FaultInjector.in_save = in_save  # type: ignore[method-assign]
        return

    plain = FaultInjector.at_step
    sent = False

    def at_step(self: FaultInjector, step: int) -> None:
        nonlocal sent
        plain(self, step)
        # Not only in that step: a witness that was itself stopped then may go on behind it.
        if self.job.rank == 0 and step >= planned and not sent:
            sent = True
            os.kill(os.getpid(), signal.SIGUSR1)

    FaultInjector.at_step = at_step  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> None:
    if arguments[0] in HOW:
        how, step, *arguments = arguments
        disturb(how, int(step))
    sys.argv = ["meshtrain.train", *arguments]
    # It is run as `__main__` rather than imported.
    sys.modules.pop("meshtrain.train", None)
    runpy.run_module("meshtrain.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
