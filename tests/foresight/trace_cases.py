"""Steps of real processes with real CPU tensors, whose live bytes the trace must match.

    torchrun ... trace_cases.py CASES.json FOLDER        {name: [config, [override, ...]], ...}

Each rank writes its measurements of every case.
"""

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from meshtrain.attention import AttentionContext
from meshtrain.config import Config
from meshtrain.data.batch import Batch
from meshtrain.foresight.trace import TracedStep
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from meshtrain.mesh import build_mesh
from meshtrain.parallel import fsdp

CPU = torch.device("cpu")
to = Batch.to


def copied(self: Batch, device: torch.device, dtype: torch.dtype, first: bool, last: bool) -> Batch:
    """Copies a batch as to a GPU, where the device's batch is another one than the host's."""

    def copy(x: torch.Tensor | AttentionContext | None) -> torch.Tensor | AttentionContext | None:
        return x.clone() if isinstance(x, torch.Tensor) else x and x.apply(torch.clone)

    tensors = to(self, device, dtype, first, last).tensors.items()
    return Batch(
        {name: copy(x) if i or first else x for i, (name, x) in enumerate(tensors)},
        self.targets.clone() if last else self.targets,
    )


def in_turn(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Chooses experts round-robin: equally loaded, as a trace assumes."""
    slots = torch.arange(scores.shape[:-1].numel() * count)
    return (slots % scores.shape[-1]).view(*scores.shape[:-1], count)


def of_host(step: TracedStep, x: torch.Tensor | AttentionContext) -> None:
    """Excludes tensors from the count that would be on the host in a GPU run."""
    for tensor in (x,) if isinstance(x, torch.Tensor) else vars(x).values():
        if isinstance(tensor, torch.Tensor):
            step.live._alive[tensor.untyped_storage()._cdata] = None, 0, "host"


def main() -> None:
    fsdp.MIN_UNIT_SIZE = 0
    experts = torch.library.Library("meshtrain", "IMPL")
    experts.impl("choose", in_turn, "CPU")
    job = join(read_environment(os.environ))
    with job_exit(job):
        job.connect(60)
        seen = {}
        for name, (file, overrides) in json.loads(Path(sys.argv[1]).read_text()).items():
            config = Config.load(file, overrides, world_size=job.world_size)
            mesh = build_mesh(config.resolved, "cpu")
            step = TracedStep(config, mesh, CPU)
            for batch in step.microbatches:
                batch.apply(partial(of_host, step))
            Batch.to = copied
            seen[name] = asdict(step.trace())
            Batch.to = to
        Path(sys.argv[2], f"{job.rank}.json").write_text(json.dumps(seen))


main()
