"""Trains one run after another in one job, through the function that the command calls: starting torch costs more
than many small steps.

    torchrun ... train_cells.py CELLS.json        [[config, [override, ...]], ...]
"""

import json
import os
import sys
from pathlib import Path

from meshtrain.config import Config
from meshtrain.environment import read_environment
from meshtrain.runtime import join, leaving
from meshtrain.train import run

job = join(read_environment(os.environ))
with leaving(job):
    for name, overrides in json.loads(Path(sys.argv[1]).read_text()):
        run(Config.load(name, overrides, world_size=job.world_size, for_training=True), job)
