"""The start of models without an `init_plan`: first values, buffers, and the memory that they
take on the host."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.config import Config, spec_of
from meshtrain.job.process import Job
from meshtrain.mesh import build_mesh
from meshtrain.modeling.build import build_model
from meshtrain.parallel.sharding import local_part, parameters_of
from tests.comparing import ALONE, CPU, Peak
from tests.ranks import row

MODEL = Path(__file__).parents[1] / "models" / "of_transformers.py"
HEAD = """
from tests.models.of_transformers import *
from tests.models import of_transformers

class Tuned(of_transformers.Llama):
    def __init__(self, config):
        super().__init__(config)
        {change}

def Model(config):
    return Tuned(config.of_llama)
"""


def config_of(folder: Path, layout: str = "{}", *overrides: str, **keys: Any) -> Config:
    run = folder / "run.yaml"
    model = {"name": str(MODEL), **keys}
    run.write_text(
        f"model: {model}\n"
        f"layout: {layout}\n"
        "data: {source: python-stdlib, seq_len: 16}\n"
        "batch: {global_size: 4, micro_size: 1}\n"
        "parallel: {sequence_parallel: false}\n"
        "train: {steps: 1, seed: 5}\n"
    )
    return Config.load(str(run), overrides)


def build(config: Config, job: Job | None = None) -> nn.Module:
    if job is None:
        return build_model(config, ALONE, CPU)
    layout = config.layout.resolve(job.world_size) if False else config.resolved
    assert layout is not None
    return build_model(config, build_mesh(layout), CPU)
