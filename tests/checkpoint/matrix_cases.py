"""Trains one run after another in one job; a run that resumes from a checkpoint first saves what it has loaded.

python tests/forked.py PROCESSES tests/checkpoint/matrix_cases.py CELLS.json        [[config, [override, ...]], ...]
"""

import json
import os
import sys
from pathlib import Path

import meshtrain.train
from meshtrain.config import Config
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from meshtrain.parallel import fsdp
from meshtrain.run.checkpointing import Checkpointer
from tests.checkpoint.going_on import faster


class SavingAtOnce(Checkpointer):
    """Saves the state that a run resumes from, as this layout holds it, before the first step."""

    def __enter__(self) -> Checkpointer:
        if self._monitor.finished_step > 0:
            self.finish()
            self.check()
        return super().__enter__()


def main() -> None:
    faster()
    meshtrain.train.Checkpointer = SavingAtOnce  # type: ignore[misc]
    fsdp.MIN_UNIT_SIZE = 0  # FSDP gathers each block separately, as it does for larger ones
    job = join(read_environment(os.environ))
    with job_exit(job):
        for name, overrides in json.loads(Path(sys.argv[1]).read_text()):
            config = Config.load(name, overrides, world_size=job.world_size, for_training=True)
            assert meshtrain.train.run(config, job) == 0


if __name__ == "__main__":
    main()
