"""Trains one run after another in one job, through the function that the command calls, since starting torch costs more
than many small steps.

    torchrun ... train_cells.py CELLS.json        [[config, [override, ...], small], ...]

`small` is the size below which FSDP merges blocks: 0 gathers each block separately, which FSDP would not do for models
as small as in tests. The loss is computed in chunks of 50 tokens for the same reason.

What a run does only once because it takes long costs more than 20 steps of a test's model. Nothing that is compared
depends on it, and other tests cover it: the picture and the FLOP count are left out here, the costs of a model's blocks
are counted once for all cells that train it, and code for compiled blocks is generated on GPUs only.
"""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import meshtrain.modeling.build
import meshtrain.run.results
import meshtrain.run.step_logger
import meshtrain.train
from meshtrain.config import Config
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from meshtrain.modeling.flops import block_flops
from meshtrain.parallel import fsdp, linear_cross_entropy

counted: dict[tuple, tuple[list[float], str]] = {}


def counted_once(model: nn.Module, blocks: Sequence[nn.Module], inputs: tuple[Tensor | None, ...]) -> tuple:
    """`block_flops`, cached by the model's text, which has the sizes of all its weights."""
    key = (str(model), *(None if value is None else value.shape for value in inputs))
    if key not in counted:
        counted[key] = block_flops(model, blocks, inputs)
    return counted[key]


meshtrain.modeling.build.block_flops = counted_once
meshtrain.run.step_logger.sample_flops = lambda *_: (None, "FLOPs are not counted")
meshtrain.run.step_logger.peak_flops = lambda *_: (1.0, "a peak of 1 FLOP/s")
linear_cross_entropy.CHUNK_TOKENS, linear_cross_entropy.CHUNK_LOGITS = 50, 0
meshtrain.run.results.plot_loss = lambda *_: "no picture is drawn"

job = join(read_environment(os.environ))
if job.device.type == "cpu":
    torch.compile = partial(torch.compile, backend="aot_eager_decomp_partition")
with job_exit(job):
    for name, overrides, small in json.loads(Path(sys.argv[1]).read_text()):
        fsdp.MIN_UNIT_SIZE = small
        meshtrain.train.run(Config.load(name, overrides, world_size=job.world_size, for_training=True), job)
