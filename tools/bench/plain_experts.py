"""Hand-written training of a mixture of experts in one process: a loop over the experts of a layer,
each of which processes the tokens that chose it and adds its results to theirs, as in transformers'
eager implementation.

The baseline of meshtrain's experts. It does the same work on the same samples, load balancing
included, in the most direct way. From meshtrain it uses the plain model except for its experts, and
the order of the samples.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from meshtrain.data.order import batch_samples
from meshtrain.job.locate import model_file
from plain_ddp import adamw, read


class PlainExperts(nn.Module):
    """A router and its experts. Each forward appends its balancing loss to `terms`."""

    def __init__(
        self, layer: nn.Module, experts_per_token: int, factor: float, terms: list[Tensor]
    ) -> None:
        """`layer`: the layer whose weights it takes. `factor`: the weight of the balancing loss of
        one layer."""
        super().__init__()
        weights = dict(layer.named_parameters())
        self.gate, self.gate_up, self.down = (
            weights[name] for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
        )
        self.experts_per_token, self.factor, self.terms = experts_per_token, factor, terms
        # of the loads in the previous step
        self.shares = torch.full((len(self.gate),), 1 / len(self.gate))
        self.counts = torch.zeros(len(self.gate))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = F.linear(rows, self.gate).softmax(-1)
        weights, chosen = scores.topk(self.experts_per_token, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        hits = F.one_hot(chosen, len(self.gate)).permute(2, 1, 0)  # (E, j, n)
        self.counts += hits.sum((1, 2))
        self.terms.append(
            self.factor * len(self.gate) * self.experts_per_token * (scores @ self.shares).sum()
        )
        y = torch.zeros_like(rows)
        for expert in hits.sum((1, 2)).nonzero().flatten().tolist():
            slot, token = hits[expert].nonzero(as_tuple=True)
            gate, up = F.linear(rows[token], self.gate_up[expert]).chunk(2, dim=-1)
            y.index_add_(
                0,
                token,
                F.linear(F.silu(gate) * up, self.down[expert]) * weights[token, slot, None],
            )
        return y.view_as(x)

    def end_step(self) -> None:
        self.shares = self.counts / self.counts.sum()
        self.counts = torch.zeros_like(self.counts)


def train(
    config: dict[str, Any],
    tokens: Path,
    weights: Path,
    log: Path,
    before_step: Callable[[int], None] = lambda _: None,
) -> None:
    """Trains, and writes a line with each step's loss; see plain_ddp.py for the arguments."""
    module = model_file(config["model"]["name"])
    keys = module.Config(**{key: value for key, value in config["model"].items() if key != "name"})
    model = module.Model(keys)
    model.load_state_dict(load_file(weights))
    terms: list[Tensor] = []
    factor = keys.router_aux_loss_coef / len(model.model.layers)
    layers = [
        PlainExperts(layer.mlp, keys.num_experts_per_tok, factor, terms)
        for layer in model.model.layers
    ]
    for layer, experts in zip(model.model.layers, layers, strict=True):
        layer.mlp = experts
    optimizer = adamw(model, config["optimizer"]["lr"])
    data = np.memmap(tokens, np.uint16, "r")
    s, size, micro = (
        config["data"]["seq_len"],
        config["batch"]["global_size"],
        config["batch"]["micro_size"],
    )
    with log.open("w") as lines:
        for step in range(1, config["train"]["steps"] + 1):
            before_step(step)
            samples = batch_samples(config["train"]["seed"], step - 1, size, (len(data) - 1) // s)
            total = torch.zeros(())
            for i in range(0, size, micro):
                terms.clear()
                inputs, targets = read(data, samples[i : i + micro], s)
                loss = F.cross_entropy(
                    model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"
                ) / (size * s)
                (loss + sum(terms) / (size * s)).backward()
                total += loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for experts in layers:
                experts.end_step()
            print(
                json.dumps({"step": step, "loss": total.item(), "grad_norm": norm.item()}),
                file=lines,
                flush=True,
            )
