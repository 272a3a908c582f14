"""A plain training loop on one GPU: gpu_pair.py's other side where torchtitan is missing.

What one would write without a framework: meshtrain's plain model, compiled whole, autocast to
bfloat16, torch's cross entropy on whole logits, fused AdamW, clipping, and a loss that is read at
the end only.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from harness import model_of
from meshtrain.data.order import batch_samples
from meshtrain.data.tokens import smallest_dtype
from plain_ddp import read


def train(
    config: dict[str, Any],
    tokens: Path,
    weights: Path,
    log: Path,
    before_step: Callable[[int], None] = lambda _: None,
) -> None:
    """Trains in this process; at the end it writes a line with each step's loss.

    Args:
        config: the parsed YAML.
        tokens: the tokens.bin of a token file, in the smallest dtype that holds the vocabulary.
        weights: a safetensors file with the initial weights.
        before_step: called with the number of each step, from 1, before it begins.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module, sizes = model_of(config)
    model: nn.Module = module.Model(sizes)
    model.load_state_dict(load_file(weights))
    model.to(device)
    keys = config["optimizer"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=keys["lr"],
        betas=tuple(keys["betas"]),
        eps=keys["eps"],
        weight_decay=keys["weight_decay"],
        fused=True,
    )
    forward = torch.compile(model) if config["parallel"].get("compile", True) else model
    data: np.memmap = np.memmap(tokens, smallest_dtype(sizes.vocab_size), "r")
    s, size = config["data"]["seq_len"], config["batch"]["global_size"]
    micro = config["batch"]["micro_size"]
    in_16_bits = config["train"]["precision"] == "bfloat16"

    losses = []
    for step in range(1, config["train"]["steps"] + 1):
        before_step(step)
        samples = batch_samples(config["train"]["seed"], step - 1, size, (len(data) - 1) // s)
        total = torch.zeros((), device=device)
        for i in range(0, size, micro):
            inputs, targets = (x.to(device) for x in read(data, samples[i : i + micro], s))
            with torch.autocast(device, torch.bfloat16, enabled=in_16_bits):
                logits = forward(inputs)
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
            ) / (size * s)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), keys["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    lines = [
        json.dumps({"step": step, "loss": loss.item()}) for step, loss in enumerate(losses, start=1)
    ]
    log.write_text("\n".join(lines) + "\n")
