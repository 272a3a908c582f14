"""The loop of plain_ddp.py by `meshtrain.Run`: the same model, optimizer and samples, on any
layout."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import meshtrain
from meshtrain.job.locate import model_file
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


def train(
    config: dict[str, Any],
    tokens: Path,
    weights: Path,
    log: Path,
    before_step: Callable[[int], None] = lambda _: None,
) -> None:
    """As in plain_ddp.py. `config` also has the section `layout`."""
    run = meshtrain.Run(
        config["layout"],
        global_size=config["batch"]["global_size"],
        micro_size=config["batch"]["micro_size"],
        seed=config["train"]["seed"],
        clip_norm=1.0,
        output=log.with_suffix(""),
        every=0,
    )
    llama = model_file("llama")
    sizes = {key: value for key, value in config["model"].items() if key != "name"}
    model = llama.Model(llama.Config(**sizes))
    model.load_state_dict(load_file(weights))
    model, optimizer = run.prepare(model, adamw(model, config["optimizer"]["lr"]))
    rows = Rows(tokens, config["data"]["seq_len"])
    with log.open("w") if run.job.rank == 0 else nullcontext() as lines:
        for step, batch in run.steps(rows, steps=config["train"]["steps"]):
            before_step(step)
            loss = run.backward(loss_of, batch)
            run.update(optimizer)
            if lines is not None:
                print(json.dumps({"step": step, "loss": loss.item()}), file=lines, flush=True)
