"""Trains one run after another in one job, through the function that the command calls: starting torch costs more
than many small steps.

    torchrun ... train_cells.py CELLS.json        [[config, [override, ...], small], ...]

`small` is what FSDP takes for a small block: 0 gathers each block by itself, which no model of a test's size would do.
"""

import json
import os
import sys
from pathlib import Path

from meshtrain.config import Config
from meshtrain.environment import read_environment
from meshtrain.parallel import data
from meshtrain.runtime import join, leaving
from meshtrain.train import run

job = join(read_environment(os.environ))
with leaving(job):
    for name, overrides, small in json.loads(Path(sys.argv[1]).read_text()):
        data.SMALL = small
        run(Config.load(name, overrides, world_size=job.world_size, for_training=True), job)
