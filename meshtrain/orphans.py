"""A process ends with the one that started it, whatever ends that: nobody is left behind to hold a GPU or a port.

A launcher that is killed with SIGKILL cannot end its workers. On Linux the kernel does it, from the first moment on,
also for a worker that is stopped, or stuck in a call (prctl(2), PR_SET_PDEATHSIG). Elsewhere nothing happens here.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent(parent: int | None = None) -> None:
    """From now on the kernel kills this process when the thread that started it ends.

    Args:
        parent: who has started it, where that is known: if somebody else is its parent now, it is late, and ends.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_launcher(variables: Mapping[str, str]) -> None:
    """The same for a worker of torchrun or a task of srun, and for nobody else: a shell may end before its children."""
    of_torchrun = "TORCHELASTIC_RUN_ID" in variables
    of_srun = "SLURM_STEP_ID" in variables and _name(os.getppid()) == "slurmstepd"
    if of_torchrun or of_srun:
        end_with_parent()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""
