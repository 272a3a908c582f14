"""What a rank says and writes down before it ends because its job is lost."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from meshtrain.operate import witness
from meshtrain.runtime import Job

WRITE_S = 5.0  # for exit.json: its file system may be what was lost


class LastWords:
    """
    Attributes:
        said: whether it was.
        lose: writes down in the run's folder that the job is lost; None: there is no folder, or it was done.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.said = False
        self.lose: Callable[[str], None] | None = None

    def say(self, reason: str) -> None:
        """In one piece, and once."""
        if self.said:
            return
        self.said = True
        sys.stdout.flush()
        sys.stderr.write(f"{self._job} stops, because {reason}\n")
        sys.stderr.flush()

    def write_down(self, reason: str) -> None:
        """Waits for it no longer than it may take: the folder may be on a host that is gone."""
        lose, self.lose = self.lose, None
        if lose is not None and witness.within(WRITE_S, lambda: self._written(lose, reason)) is None:
            print(f"{self._job} could not write that down within {WRITE_S:.0f} s", file=sys.stderr, flush=True)

    def _written(self, lose: Callable[[str], None], reason: str) -> bool:
        try:
            lose(reason)
        except OSError as error:
            print(f"{self._job} could not write that down: {error}", file=sys.stderr, flush=True)
        return True

    def fail(self, reason: str) -> NoReturn:
        """Ends this process, with the reason in torchrun's summary."""
        try:
            raise RuntimeError(f"{self._job} stops, because {reason}")
        except RuntimeError as error:
            get_error_handler().record_exception(error)  # it wants one that was raised
        end(1)


def end(status: int) -> NoReturn:
    """Ends this process at once: its main thread may be in a collective that never ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
