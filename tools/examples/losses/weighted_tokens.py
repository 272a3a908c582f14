"""A language model whose tokens count differently: digits twice, the prompt not at all.

configs/weighted-tokens.yaml trains a Llama on sums in words. The loss and the weight are sums over
tokens, so that every layout can split them, `cp` too.
"""

from typing import Any

import torch
from torch import Tensor

from meshtrain.job.locate import model_file
from meshtrain.loss import token_losses

llama = model_file("llama")
Config, Model, check = llama.Config, llama.Model, llama.check
init_plan, tp_plan, cp_plan = llama.init_plan, llama.tp_plan, llama.cp_plan


def loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """(b, s, v), {"tokens": (b, s), "weights": (b, s)} -> (b,). A token without a target has a loss
    of 0."""
    return (token_losses(outputs, targets["tokens"]) * targets["weights"]).sum(1)


def weight(targets: dict[str, Tensor]) -> Tensor:
    """-> (b,): the weights of the tokens that have a target."""
    return (targets["weights"] * (targets["tokens"] != -100)).sum(1)


class Sums:
    """`n` lines like "17 + 5 = 22.", as bytes: the answer has a loss, and its digits count 1, the
    full stop 0.25. Zeros fill a line up to `length`."""

    def __init__(self, first: int, n: int, length: int) -> None:
        self.first, self.n, self.length = first, n, length

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(self.first + index)
        a, b = torch.randint(0, 50, (2,), generator=draw).tolist()
        prompt, answer = f"{a} + {b} =", f" {a + b}."
        text = torch.tensor(list(f"{prompt}{answer}".encode()))
        # As inputs all but the last token, as targets all but the first.
        tokens, weights = torch.zeros(self.length, dtype=torch.int64), torch.zeros(self.length)
        targets = torch.full((self.length,), -100)
        tokens[: len(text) - 1] = text[:-1]
        targets[len(prompt) - 1 : len(text) - 1] = text[len(prompt) :]
        weights[len(prompt) - 1 : len(text) - 2] = 1.0
        weights[len(text) - 2] = 0.25
        return tokens, {"tokens": targets, "weights": weights}


def dataset(config: Any, split: str) -> Sums:
    """2,000 lines to train on, and 200 others for validation."""
    first, n = (0, 2000) if split == "train" else (2000, 200)
    return Sums(first, n, config.seq_len)
