"""Preferences: a Llama that is to prefer one of two answers more than its reference does, by DPO
(https://arxiv.org/abs/2305.18290).

    loss = -log sigmoid(beta * ((log p - log p_ref)(chosen) - (log p - log p_ref)(rejected)))

configs/dpo.yaml trains it; `train.reference` names the weights that it starts from. A sample is a
pair: both texts, prompt and answer, one after the other in a row of `data.seq_len` tokens, as two
documents, so that neither sees the other.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshtrain.job.locate import model_file
from meshtrain.loss import log_probs

llama = model_file("llama")
Config, Model, check = llama.Config, llama.Model, llama.check
init_plan, tp_plan, cp_plan = llama.init_plan, llama.tp_plan, llama.cp_plan

over_whole_samples = True  # the loss of a pair is no sum over its tokens
BETA = 0.1


def loss(outputs: Tensor, targets: Tensor, reference: Tensor) -> tuple[Tensor, dict]:
    """(b, 2s, v), (b, 2s), (b, 2s, v) -> (b,). metrics.jsonl has the share of pairs that are
    preferred as they should be as `preferred`, and the mean margin as `margin`."""
    ratios = log_probs(outputs, targets) - log_probs(reference, targets)  # (b, 2s); 0 in prompts
    chosen, rejected = ratios.unflatten(1, (2, -1)).sum(2).unbind(1)
    margin = BETA * (chosen - rejected)
    ones = torch.ones_like(margin)
    return -F.logsigmoid(margin), {"preferred": (margin > 0, ones), "margin": (margin, ones)}


def weight(targets: Tensor) -> Tensor:
    """-> (b,): each pair counts as much as any other, however long its answers are."""
    return torch.ones(len(targets))


class Pairs:
    """`n` pairs of sums as bytes, "17 + 5 = 22." and one with a wrong result. Zeros fill each of
    the two texts up to half of `length`."""

    def __init__(self, first: int, n: int, length: int) -> None:
        self.first, self.n, self.length = first, n, length

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        a, b, error = torch.randint(1, 50, (3,), generator=draw).tolist()
        prompt = f"{a} + {b} ="
        texts = (f"{prompt} {a + b}.", f"{prompt} {a + b + error}.")

        half = self.length // 2
        tokens = torch.zeros(2, half, dtype=torch.int64)
        targets = torch.full((2, half), -100)
        for row, text in enumerate(texts):
            # As inputs all but the last token, as targets all of the answer.
            encoded = torch.tensor(list(text.encode()))
            tokens[row, : len(encoded) - 1] = encoded[:-1]
            targets[row, len(prompt) - 1 : len(encoded) - 1] = encoded[len(prompt) :]
        positions = torch.arange(half).repeat(2)
        documents = torch.arange(2).repeat_interleave(half)
        return (tokens.flatten(), positions, documents), targets.flatten()


def dataset(config: Any, split: str) -> Pairs:
    """2,000 pairs to train on, and 200 others for validation."""
    first, n = (0, 2000) if split == "train" else (2000, 200)
    return Pairs(first, n, config.seq_len)
