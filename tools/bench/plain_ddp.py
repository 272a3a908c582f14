"""Hand-written data-parallel training: torch's DDP around a plain model, or no wrapper in a world
of one.

The baseline of meshtrain's data parallelism: it does the same work on the same samples in the most
direct way. Gradients are reduced in the last microbatch only, in DDP's own buckets; samples come
straight from the memory map; every target counts, so the divisor of the loss is known without
communication.

From meshtrain it uses the plain model and the order of the samples.
"""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshtrain.data.order import batch_samples
from meshtrain.job.locate import model_file


def train(
    config: dict[str, Any],
    tokens: Path,
    weights: Path,
    log: Path,
    before_step: Callable[[int], None] = lambda _: None,
) -> None:
    """Trains on this rank; rank 0 writes a line with each step's loss.

    Args:
        config: the parsed YAML.
        tokens: a file of uint16 tokens.
        weights: a safetensors file with the initial weights.
        before_step: called with the number of each step, from 1, before it begins.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    llama = model_file("llama")
    plain = llama.Model(
        llama.Config(**{key: value for key, value in config["model"].items() if key != "name"})
    )
    plain.load_state_dict(load_file(weights))
    model: nn.Module = (
        DistributedDataParallel(plain, gradient_as_bucket_view=True) if world > 1 else plain
    )
    optimizer = adamw(model, config["optimizer"]["lr"])
    data = np.memmap(tokens, np.uint16, "r")
    s, size, micro = (
        config["data"]["seq_len"],
        config["batch"]["global_size"],
        config["batch"]["micro_size"],
    )
    with log.open("w") if rank == 0 else nullcontext() as lines:
        for step in range(1, config["train"]["steps"] + 1):
            before_step(step)
            samples = batch_samples(config["train"]["seed"], step - 1, size, (len(data) - 1) // s)
            mine = samples[rank * size // world : (rank + 1) * size // world]
            total = torch.zeros(())
            for i in range(0, len(mine), micro):
                inputs, targets = read(data, mine[i : i + micro], s)
                more = world > 1 and i + micro < len(mine)
                with model.no_sync() if more else nullcontext():  # type: ignore[operator]
                    loss = F.cross_entropy(
                        model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"
                    ) / (size * s)
                    (loss * world).backward()  # DDP takes the mean over the ranks
                total += loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if world > 1:
                dist.all_reduce(total)
            if lines is not None:
                row = {"step": step, "loss": total.item(), "grad_norm": norm.item()}
                print(json.dumps(row), file=lines, flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The usual AdamW of a language model: 1-d parameters do not decay."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def read(data: np.memmap, samples: list[int], s: int) -> tuple[Tensor, Tensor]:
    """The tokens (b, s) of these samples, and their targets, the tokens shifted by one."""
    rows = torch.from_numpy(
        np.stack([data[i * s : i * s + s + 1] for i in samples]).astype(np.int64)
    )
    return rows[:, :-1], rows[:, 1:]
