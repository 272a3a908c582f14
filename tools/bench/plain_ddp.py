"""Hand-written data-parallel training: torch's DDP around a plain model, or no wrapper in a world
of one.

The baseline of meshtrain's data parallelism: it does the same work on the same samples in the most
direct way. Gradients are reduced in the last microbatch only, in DDP's own buckets; samples come
straight from the memory map; every target counts, so the divisor of the loss is known without
communication.

From meshtrain it uses the plain model and the order of the samples.
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from baseline import Task


def train(task: Task) -> None:
    """Trains on this rank; rank 0 writes each step's loss."""
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model = task.plain_model()
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(model, task.learning_rate)
    size = task.global_size
    micro = task.micro_size
    with task.writing() if rank == 0 else nullcontext() as write_step:
        for step, samples in task.steps():
            mine = samples[rank * size // world : (rank + 1) * size // world]
            total = torch.zeros(())
            for i in range(0, len(mine), micro):
                inputs, targets = task.read(mine[i : i + micro])
                is_last = i + micro >= len(mine)
                with nullcontext() if is_last or world == 1 else model.no_sync():
                    loss = task.loss(model(inputs), targets)
                    (loss * world).backward()  # DDP takes the mean over the ranks
                total += loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if world > 1:
                dist.all_reduce(total)
            if write_step is not None:
                write_step(step, {"loss": total.item(), "grad_norm": norm.item()})
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The usual AdamW of a language model: 1-d parameters do not decay."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
