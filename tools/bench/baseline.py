"""What a baseline gets from side.py: a workload by its names, the plain model with the weights to
begin with, the samples of each step in meshtrain's order, and the file of losses.

How a step is computed is the baseline's own."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from harness import model_of
from meshtrain.data.order import batch_samples
from meshtrain.data.tokens import smallest_dtype

# Writes the numbers of one step.
WriteStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Task:
    """What a baseline's function `train` is called with."""

    config: dict[str, Any]  # the parsed YAML
    tokens: Path  # the tokens.bin of a token file, in the smallest dtype that holds the vocabulary
    weights: Path  # a safetensors file with the initial weights, under Hugging Face's names
    log: Path  # gets a line of JSON for each step, with its loss
    # called with the number of each step, from 1, before it begins
    before_step: Callable[[int], None] = lambda _: None

    @property
    def seq_len(self) -> int:
        return self.config["data"]["seq_len"]

    @property
    def global_size(self) -> int:
        return self.config["batch"]["global_size"]

    @property
    def micro_size(self) -> int:
        return self.config["batch"]["micro_size"]

    @property
    def learning_rate(self) -> float:
        return self.config["optimizer"]["lr"]

    def plain_model(self) -> Any:
        """The model of the workload, with the weights to begin with."""
        module, config = model_of(self.config)
        model = module.Model(config)
        model.load_state_dict(load_file(self.weights))
        return model

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """The number of each step, and the samples of its global batch."""
        seed = self.config["train"]["seed"]
        n_samples = (len(self._data) - 1) // self.seq_len
        for step in range(1, self.config["train"]["steps"] + 1):
            self.before_step(step)
            yield step, batch_samples(seed, step - 1, self.global_size, n_samples)

    def read(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The tokens (b, s) of these samples, and their targets, the tokens shifted by one."""
        s = self.seq_len
        rows = np.stack([self._data[i * s : i * s + s + 1] for i in samples])
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1], both[:, 1:]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """What these targets (b, s) add to the mean over all targets of the global batch."""
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return total / (self.global_size * self.seq_len)

    @contextmanager
    def writing(self) -> Iterator[WriteStep]:
        """Opens the file of losses, for one rank of a side."""
        with self.log.open("w") as lines:

            def write_step(step: int, numbers: dict[str, float]) -> None:
                print(json.dumps({"step": step, **numbers}), file=lines, flush=True)

            yield write_step

    @cached_property
    def _data(self) -> np.memmap:
        _, config = model_of(self.config)
        return np.memmap(self.tokens, smallest_dtype(config.vocab_size), "r")
