"""meshtrain.train on a rank whose save is struck, as `train.chaos` does not: in the first start of
the job, while it writes its file of the checkpoint after a step.

    torchrun ... -m tests.fault_in_save kill|stop|SECONDS RANK STEP CONFIG [key.path=value ...]
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from meshtrain.run.fault_injection import FaultInjector

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def main(fault: str, rank: str, step: str) -> None:
    def in_save(injector: FaultInjector, saved: int, path: Path) -> None:
        job = injector.job
        if job.again or (job.rank, saved) != (int(rank), int(step)):
            return
        if fault in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault])
        else:
            time.sleep(float(fault))

    FaultInjector.in_save = in_save
    # It is run as `__main__` rather than imported.
    sys.modules.pop("meshtrain.train", None)
    runpy.run_module("meshtrain.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    planted = sys.argv[1:4]
    sys.argv[1:4] = []
    main(*planted)
