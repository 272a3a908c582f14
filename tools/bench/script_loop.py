"""The loop of plain_ddp.py by `meshtrain.Run`: the same model, optimizer and samples, on any
layout."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import meshtrain
from baseline import Task
from plain_ddp import adamw


class Rows:
    """Samples of `length` tokens and the one behind them, from a file of uint16 tokens."""

    def __init__(self, tokens: Path, length: int) -> None:
        self._data = np.memmap(tokens, np.uint16, "r")
        self._length = length

    def __len__(self) -> int:
        return (len(self._data) - 1) // self._length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._length
        return torch.from_numpy(self._data[start : start + self._length + 1].astype(np.int64))


def loss_of(model: Any, rows: Tensor) -> tuple[Tensor, int]:
    inputs, targets = rows[:, :-1], rows[:, 1:]
    logits = model(inputs).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()


def train(task: Task) -> None:
    """Trains on this rank, over the layout of the config; rank 0 writes each step's loss."""
    config = task.config
    run = meshtrain.Run(
        config["layout"],
        global_size=task.global_size,
        micro_size=task.micro_size,
        seed=config["train"]["seed"],
        clip_norm=1.0,
        output=task.log.with_suffix(""),
        every=0,
    )
    model = task.plain_model()
    model, optimizer = run.prepare(model, adamw(model, task.learning_rate))
    rows = Rows(task.tokens, task.seq_len)
    with task.writing() if run.job.rank == 0 else nullcontext() as write_step:
        for step, batch in run.steps(rows, steps=config["train"]["steps"]):
            task.before_step(step)
            loss = run.backward(loss_of, batch)
            run.update(optimizer)
            if write_step is not None:
                write_step(step, {"loss": loss.item()})
