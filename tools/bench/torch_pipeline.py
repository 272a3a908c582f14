"""Pipeline-parallel training with torch's own tools: `PipelineStage` and a schedule around a plain
model.

The baseline of meshtrain's pipeline: the same stages, split at the same blocks, under torch's
schedule of the same name. Logits are not kept (`return_outputs=False`), and the loss is divided by
the number of targets, so that no gradient is scaled afterwards.

From meshtrain it uses the plain model, its split into stages, and the order of the samples.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from meshtrain.data.order import batch_samples
from meshtrain.job.locate import model_file
from meshtrain.modeling.flops import block_flops
from meshtrain.pipeline.forms import Activation, form_of
from meshtrain.pipeline.partition import split_blocks
from meshtrain.pipeline.probe import outline_of
from meshtrain.pipeline.stage import call_stage, keep_stage
from plain_ddp import adamw, read

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
# two stages a rank
DOUBLE = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


def train(
    config: dict[str, Any],
    tokens: Path,
    weights: Path,
    log: Path,
    before_step: Callable[[int], None] = lambda _: None,
) -> None:
    """Trains on this rank; the rank of the last stage writes a line with each step's loss.

    Args:
        config: the parsed YAML; `layout` is `pp`, and `pipeline.schedule` one of SINGLE and DOUBLE.
        tokens: a file of uint16 tokens.
        weights: a safetensors file with the initial weights.
        before_step: called with the number of each step, from 1, before it begins.
    """
    dist.init_process_group("gloo")
    s, size, micro = (
        config["data"]["seq_len"],
        config["batch"]["global_size"],
        config["batch"]["micro_size"],
    )
    stages = own_stages(config, weights)
    parameters = nn.ModuleList(stage.submod for stage in stages)
    schedule = scheduled(
        config["pipeline"]["schedule"],
        stages,
        n_microbatches=size // micro,
        loss_fn=lambda logits, targets: (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (size * s)
        ),
        scale_grads=False,
    )
    optimizer = adamw(parameters, config["optimizer"]["lr"])
    data = np.memmap(tokens, np.uint16, "r")
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    with log.open("w") if last else nullcontext() as lines:
        for step in range(1, config["train"]["steps"] + 1):
            before_step(step)
            samples = batch_samples(config["train"]["seed"], step - 1, size, (len(data) - 1) // s)
            inputs, targets = read(data, samples, s)
            losses: list[Tensor] = []
            schedule.step(
                *([inputs] if first else []),
                target=targets if last else None,
                losses=losses,
                return_outputs=False,
            )
            norm = clip(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if lines is not None:
                row = {
                    "step": step,
                    "loss": torch.stack(losses).sum().item(),
                    "grad_norm": norm.item(),
                }
                print(json.dumps(row), file=lines, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def scheduled(name: str, stages: Sequence[PipelineStage], **how: Any) -> Any:
    """torch's schedule over the stages of this rank."""
    return DOUBLE[name](list(stages), **how) if name in DOUBLE else SINGLE[name](stages[0], **how)


def own_stages(config: dict[str, Any], weights: Path) -> list[PipelineStage]:
    """The stages that the schedule assigns to this rank, in model order."""
    name, rank, ranks = config["pipeline"]["schedule"], dist.get_rank(), dist.get_world_size()
    each = 2 if name in DOUBLE else 1
    tokens = torch.zeros(1, config["data"]["seq_len"], dtype=torch.int64)
    with torch.device("meta"):
        plain = whole_model(config)
    costs, _ = block_flops(plain, plain.blocks(), (tokens, None, None))
    bounds = split_blocks(costs, ranks, each).bounds
    outline = outline_of(plain, (tokens,))
    stages = []
    for number in own_numbers(name, rank, ranks):
        model = whole_model(config)
        model.load_state_dict(load_file(weights))
        first, end = bounds[number]
        keep_stage(model, first, end, outline, device=torch.device("cpu"), dtype=torch.float32)
        stage = OwnStage(model, first)
        stages.append(PipelineStage(stage, number, len(bounds), torch.device("cpu")))
    return stages


class OwnStage(nn.Module):
    """A stage of meshtrain as torch calls one: with what it has received in the place of the
    tokens."""

    def __init__(self, model: nn.Module, first: int) -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, x: Tensor) -> Tensor:
        tokens, received = x, None
        if self.first > 0:
            tokens = torch.zeros(x.shape[:2], dtype=torch.int64)
            received = Activation(x, (form_of(x),) * (self.first - 1))
        output = call_stage(self.model, (tokens,), received)
        return output.value if isinstance(output, Activation) else output


def own_numbers(name: str, rank: int, ranks: int) -> list[int]:
    """The numbers of a rank's stages."""
    if name in SINGLE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank if name == "zbv" else rank + ranks]


def whole_model(config: dict[str, Any]) -> Any:
    llama = model_file("llama")
    return llama.Model(
        llama.Config(**{key: value for key, value in config["model"].items() if key != "name"})
    )


def clip(model: nn.Module, largest: float) -> Tensor:
    """Clips the gradients of all stages to a norm of at most `largest`; returns the norm before."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    square = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_(gradients, torch.clamp(largest / (norm + 1e-6), max=1.0))
    return norm
