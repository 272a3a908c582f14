"""Runs a module as `python -m` does, where calls and files that only Linux has are missing, as on
macOS: `without_linux.py meshtrain.train ARGUMENTS`.

What others do below meshtrain (torch, psutil) stays as it is.
"""

import os
import runpy
import signal
import sys
import sysconfig
from pathlib import Path

import psutil
import torch.distributed

PACKAGE = str(Path(__file__).resolve().parents[2] / "meshtrain")
MISSING = {
    os: (
        "sched_getaffinity",
        "sched_setaffinity",
        "sched_getscheduler",
        "sched_setscheduler",
        "sched_param",
        "SCHED_OTHER",
        "SCHED_BATCH",
        "pidfd_open",
        "posix_fadvise",
    ),
    signal: ("sigwaitinfo", "sigtimedwait"),
}
FILES = ("/proc/", "/sys/", "/dev/shm")


def refuse_files_of_linux(event: str, arguments: tuple) -> None:
    """An audit hook: meshtrain's own code finds none of FILES."""
    if event != "open" or not str(arguments[0]).startswith(FILES):
        return
    frame = sys._getframe(1)
    while frame is not None and "/lib/python" in frame.f_code.co_filename:
        if "site-packages" in frame.f_code.co_filename:
            return
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))


if __name__ == "__main__":
    assert psutil.virtual_memory().total
    assert torch.distributed.is_available()
    sysconfig.get_config_vars()  # by the name of the true system
    for module, names in MISSING.items():
        for name in names:
            delattr(module, name)
    sys.platform = "darwin"
    sys.addaudithook(refuse_files_of_linux)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
