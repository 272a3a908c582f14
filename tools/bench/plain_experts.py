"""Hand-written training of a mixture of experts in one process: a loop over the experts of a layer,
each of which processes the tokens that chose it and adds its results to theirs, as in transformers'
eager implementation.

The baseline of meshtrain's experts. It does the same work on the same samples, load balancing
included, in the most direct way. From meshtrain it uses the plain model except for its experts, and
the order of the samples.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baseline import Task
from plain_ddp import adamw


class PlainExperts(nn.Module):
    """A router and its experts. Each forward appends its balancing loss to `terms`."""

    def __init__(
        self, layer: nn.Module, experts_per_token: int, factor: float, terms: list[Tensor]
    ) -> None:
        """`layer`: the layer whose weights it takes. `factor`: the weight of the balancing loss of
        one layer."""
        super().__init__()
        weights = dict(layer.named_parameters())
        self.gate = weights["gate.weight"]
        self.gate_up = weights["experts.gate_up_proj"]
        self.down = weights["experts.down_proj"]
        self.experts_per_token = experts_per_token
        self.factor = factor
        self.terms = terms
        # of the loads in the previous step
        n_experts = len(self.gate)
        self.shares = torch.full((n_experts,), 1 / n_experts)
        self.counts = torch.zeros(n_experts)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = F.linear(rows, self.gate).softmax(-1)
        weights, chosen = scores.topk(self.experts_per_token, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        hits = F.one_hot(chosen, len(self.gate)).permute(2, 1, 0)  # (E, j, n)
        loads = hits.sum((1, 2))
        self.counts += loads
        balance = (scores @ self.shares).sum()
        self.terms.append(self.factor * len(self.gate) * self.experts_per_token * balance)

        y = torch.zeros_like(rows)
        for expert in loads.nonzero().flatten().tolist():
            slot, token = hits[expert].nonzero(as_tuple=True)
            gate, up = F.linear(rows[token], self.gate_up[expert]).chunk(2, dim=-1)
            result = F.linear(F.silu(gate) * up, self.down[expert])
            y.index_add_(0, token, result * weights[token, slot, None])
        return y.view_as(x)

    def end_step(self) -> None:
        self.shares = self.counts / self.counts.sum()
        self.counts = torch.zeros_like(self.counts)


def train(task: Task) -> None:
    """Trains in this process; writes each step's loss."""
    model = task.plain_model()
    keys = model.config
    terms: list[Tensor] = []
    factor = keys.router_aux_loss_coef / len(model.model.layers)
    plain_experts = []
    for layer in model.model.layers:
        layer.mlp = PlainExperts(layer.mlp, keys.num_experts_per_tok, factor, terms)
        plain_experts.append(layer.mlp)
    optimizer = adamw(model, task.learning_rate)
    targets_of_step = task.global_size * task.seq_len
    with task.writing() as write_step:
        for step, samples in task.steps():
            total = torch.zeros(())
            for i in range(0, len(samples), task.micro_size):
                terms.clear()
                inputs, targets = task.read(samples[i : i + task.micro_size])
                loss = task.loss(model(inputs), targets)
                balance = sum(terms) / targets_of_step
                (loss + balance).backward()
                total += loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for experts in plain_experts:
                experts.end_step()
            write_step(step, {"loss": total.item(), "grad_norm": norm.item()})
