"""Pipeline-parallel training with torch's own tools: `PipelineStage` and a schedule around a plain
model.

The baseline of meshtrain's pipeline: the same stages, split at the same blocks, under torch's
schedule of the same name. Logits are not kept (`return_outputs=False`), and the loss is divided by
the number of targets, so that no gradient is scaled afterwards.

From meshtrain it uses the plain model, its split into stages, and the order of the samples.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from baseline import Task
from harness import model_of
from meshtrain.modeling.flops import block_flops
from meshtrain.pipeline.forms import Activation, form_of
from meshtrain.pipeline.partition import split_blocks
from meshtrain.pipeline.probe import outline_of
from meshtrain.pipeline.stage import call_stage, keep_stage
from plain_ddp import adamw

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
# two stages a rank
DOUBLE = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


def train(task: Task) -> None:
    """Trains on this rank; the rank of the last stage writes each step's loss. The section `layout`
    is `pp`, and `pipeline.schedule` one of SINGLE and DOUBLE."""
    dist.init_process_group("gloo")
    stages = own_stages(task)
    parameters = nn.ModuleList(stage.submod for stage in stages)
    schedule = scheduled(
        task.config["pipeline"]["schedule"],
        stages,
        n_microbatches=task.global_size // task.micro_size,
        loss_fn=task.loss,
        scale_grads=False,
    )
    optimizer = adamw(parameters, task.learning_rate)
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    with task.writing() if has_last else nullcontext() as write_step:
        for step, samples in task.steps():
            inputs, targets = task.read(samples)
            losses: list[Tensor] = []
            schedule.step(
                *([inputs] if has_first else []),
                target=targets if has_last else None,
                losses=losses,
                return_outputs=False,
            )
            norm = clip(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if write_step is not None:
                loss = torch.stack(losses).sum()
                write_step(step, {"loss": loss.item(), "grad_norm": norm.item()})
    dist.barrier()
    dist.destroy_process_group()


def scheduled(name: str, stages: Sequence[PipelineStage], **how: Any) -> Any:
    """torch's schedule over the stages of this rank."""
    if name in DOUBLE:
        return DOUBLE[name](list(stages), **how)
    return SINGLE[name](stages[0], **how)


def own_stages(task: Task) -> list[PipelineStage]:
    """The stages that the schedule assigns to this rank, in model order."""
    name = task.config["pipeline"]["schedule"]
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    each = 2 if name in DOUBLE else 1
    tokens = torch.zeros(1, task.seq_len, dtype=torch.int64)
    module, config = model_of(task.config)
    with torch.device("meta"):
        plain = module.Model(config)
    costs, _ = block_flops(plain, plain.blocks(), (tokens, None, None))
    bounds = split_blocks(costs, ranks, each).bounds
    outline = outline_of(plain, (tokens,))
    stages = []
    for number in own_numbers(name, rank, ranks):
        model = task.plain_model()
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
        self.model = model
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        tokens = x
        received = None
        if self.first > 0:
            tokens = torch.zeros(x.shape[:2], dtype=torch.int64)
            received = Activation(x, (form_of(x),) * (self.first - 1))
        output = call_stage(self.model, (tokens,), received)
        return output.value if isinstance(output, Activation) else output


def own_numbers(name: str, rank: int, ranks: int) -> list[int]:
    """The numbers of a rank's stages."""
    if name in SINGLE:
        return [rank]
    if name == "zbv":
        return [rank, 2 * ranks - 1 - rank]
    return [rank, rank + ranks]


def clip(model: nn.Module, largest: float) -> Tensor:
    """Clips the gradients of all stages to a norm of at most `largest`; returns the norm before."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    square = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_(gradients, torch.clamp(largest / (norm + 1e-6), max=1.0))
    return norm
