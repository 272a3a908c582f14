"""A plain training loop on one GPU: gpu_pair.py's other side where torchtitan is missing.

What one would write without a framework: meshtrain's plain model, compiled whole, autocast to
bfloat16, torch's cross entropy on whole logits, fused AdamW, clipping, and a loss that is read at
the end only.
"""

from typing import Any

import torch
from torch import nn

from baseline import Task


def train(task: Task) -> None:
    """Trains in this process; at the end it writes each step's loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: nn.Module = task.plain_model()
    model.to(device)
    keys = task.config["optimizer"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=keys["lr"],
        betas=tuple(keys["betas"]),
        eps=keys["eps"],
        weight_decay=keys["weight_decay"],
        fused=True,
    )
    forward: Any = model
    if task.config["parallel"].get("compile", True):
        forward = torch.compile(model)
    in_16_bits = task.config["train"]["precision"] == "bfloat16"

    losses = []
    for _, samples in task.steps():
        total = torch.zeros((), device=device)
        for i in range(0, len(samples), task.micro_size):
            inputs, targets = task.read(samples[i : i + task.micro_size])
            with torch.autocast(device, torch.bfloat16, enabled=in_16_bits):
                logits = forward(inputs.to(device))
            loss = task.loss(logits, targets.to(device))
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), keys["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    with task.writing() as write_step:
        for step, loss in enumerate(losses, start=1):
            write_step(step, {"loss": loss.item()})
