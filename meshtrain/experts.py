"""Mixture of experts for plain models: a router chooses experts for each token, and each expert
computes its tokens.

No token is dropped, and no sum depends on which rank or microbatch a token is in: the statistics
that `Balance` uses are over the whole global batch, over that of the previous step, or over one
sample.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.loss import attach, real_tokens, tally
from meshtrain.parallel.collectives import AxisGroup, operator
from meshtrain.parallel.linear.grouped import GatherRows, GroupedMatmul
from meshtrain.parallel.linear.weight_grad import SupportsDeferral
from meshtrain.parallel.torch_private import never_compiled, to_local

Products = Callable[[Tensor, Tensor], Tensor]


class Experts(nn.Module, SupportsDeferral):
    """The SwiGLU experts of a layer, in fused tensors named as in transformers."""

    # Set by `parallel/expert.py` where experts are on several ranks: (rows (n, d) sorted by expert,
    # counts (E,), products) -> rows (n, d) in the same order. It calls `products` with the rows of
    # this rank's experts and their counts.
    dispatch: Callable[[Tensor, Tensor, Products], Tensor] | None = None

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(weight.shape[2])  # as nn.Linear
            nn.init.uniform_(weight, -bound, bound)

    @never_compiled
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `run_experts`."""
        return run_experts(self, x, chosen, weights, self._products)

    def _products(self, rows: Tensor, counts: Tensor) -> Tensor:
        """SwiGLU of each row by its expert: W_down (silu(W_gate x) * W_up x)."""
        queue = self.weight_grad_queue
        gate_up = GroupedMatmul.apply(rows, to_local(self.gate_up_proj), counts, queue)
        gate, up = gate_up.chunk(2, dim=-1)
        return GroupedMatmul.apply(F.silu(gate) * up, to_local(self.down_proj), counts, queue)


@never_compiled
def run_experts(
    module: Any, x: Tensor, chosen: Tensor, weights: Tensor, products: Products
) -> Tensor:
    """The weighted sum of the outputs of each token's experts, in the order of the token's slots:
    the forward of a layer of experts of any class.

    Args:
        module: has `num_experts`, and `dispatch` (see `Experts`).
        x: (..., d); in training (b, s, d), or (b·s, d).
        chosen, weights: (..., j), the experts of each token (int64) and the factors of their
            outputs.
        products: (rows (n, d) sorted by expert, counts) -> (n, d): what the experts that this rank
            has compute of their rows.

    Returns (..., d), zeros for padding.
    """
    slots = chosen.shape[-1]
    real = real_tokens(x.device)
    if real is not None:
        # The slots of padding belong to no expert, and sort last.
        of_samples = chosen.view(len(real), -1, slots)
        is_real = real.expand(of_samples.shape[:-1])[..., None]
        chosen = torch.where(is_real, of_samples, module.num_experts).view(chosen.shape)

    # The rows of an expert lie together: one grouped product computes all experts.
    experts, order = chosen.flatten().sort(stable=True)
    positions = torch.arange(len(order), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, positions)
    numbers = torch.arange(module.num_experts, device=order.device)
    ends = torch.searchsorted(experts, numbers, right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))

    rows = GatherRows.apply(x.flatten(0, -2), order, inverse, slots)
    if module.dispatch is None:
        rows = products(rows, counts)
    else:
        rows = module.dispatch(rows, counts, products)
    results = GatherRows.apply(rows, inverse, order, 1).view(*chosen.shape, x.shape[-1])
    return (results * weights[..., None]).sum(-2).to(x.dtype)


class Router(nn.Module):
    """Scores the experts for each token, in float32 or wider, and chooses the best: `gate` in
    transformers."""

    state_parameters: Sequence[str] = ()

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        experts_per_token: int,
        *,
        score: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        bias: bool = False,
        groups: int = 1,
        groups_per_token: int = 1,
        balance: "Balance | None" = None,
    ) -> None:
        """
        Args:
            score: "softmax", or "sigmoid" (DeepSeek-V3, https://arxiv.org/abs/2412.19437).
            normalize: divides the weights of a token's experts by their sum. scale: then multiplies
                the weights.
            bias: experts are chosen by score + `e_score_correction_bias`
                (https://arxiv.org/abs/2408.15664).
            groups, groups_per_token: experts are chosen only from the best `groups_per_token` of
                `groups` groups.
        """
        super().__init__()
        self.experts_per_token = experts_per_token
        self.score = score
        self.normalize = normalize
        self.scale = scale
        self.groups = groups
        self.groups_per_token = groups_per_token
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        bound = 1 / math.sqrt(hidden_size)
        nn.init.uniform_(self.weight, -bound, bound)
        if bias:
            self.e_score_correction_bias = nn.Parameter(
                torch.zeros(num_experts), requires_grad=False
            )
            self.state_parameters = ("e_score_correction_bias",)
        else:
            self.register_parameter("e_score_correction_bias", None)
        self.balance = balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (..., d) -> the chosen experts (..., j), best first, and their weights (..., j)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(dtype), self.weight.to(dtype))
        sigmoid = self.score == "sigmoid"
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        chosen = choose(self._ranked(scores.detach()), self.experts_per_token)
        weights = scores.gather(-1, chosen)
        if self.normalize:
            # Sigmoids may all be 0, a softmax is not.
            smallest = 1e-20 if sigmoid else 0
            weights = weights / (weights.sum(-1, keepdim=True) + smallest)
        weights = weights * self.scale
        if self.balance is not None:
            weights = self.balance(weights, logits, scores, chosen, self.e_score_correction_bias)
        return chosen, weights

    def _ranked(self, scores: Tensor) -> Tensor:
        """The scores by which experts are chosen: with the bias, and -inf outside the best
        groups."""
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.groups == 1:
            return scores
        # A group is as good as its best expert (DeepSeek-V2), or, with the bias, as its best two
        # together (DeepSeek-V3).
        grouped = scores.unflatten(-1, (self.groups, -1))
        best = 1 if self.e_score_correction_bias is None else 2
        best = min(best, grouped.shape[-1])
        of_groups = grouped.topk(best, dim=-1).values.sum(-1)
        groups = choose(of_groups, self.groups_per_token)
        inside = torch.zeros_like(of_groups, dtype=torch.bool).scatter(-1, groups, True)
        return grouped.masked_fill(~inside[..., None], -math.inf).flatten(-2)


class Balance(nn.Module):
    """Loss terms and bias corrections that balance the load of a layer's experts, the same on every
    layout.

    For a token with the probabilities p (scores divided by their sum) and the experts' load shares
    f, which sum to 1, the terms are aux_loss_coef · E · j · (f · p) and z_loss_coef ·
    logsumexp(logits)², each divided by `layers`. Like all attached terms they are summed over the
    global batch and divided by its number of valid targets.

    `loads` (E,) holds how many tokens of the last step's global batch each expert got: zeros before
    the first step.
    """

    state_parameters: Sequence[str] = ("loads",)

    def __init__(
        self,
        num_experts: int,
        layers: int,
        layer: int,
        *,
        kind: str = "batch",
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        bias_speed: float = 0.0,
    ) -> None:
        """
        Args:
            layers: how many layers of the model have experts. layer: the index of this one in the
                model.
            kind: the tokens over which f is taken: "batch": the global batch of the previous step
                (uniform in the first); "sequence": the token's sample
                (https://arxiv.org/abs/2412.19437); "none": no such term.
            aux_loss_coef: coefficient of Switch's term (https://arxiv.org/abs/2101.03961), scaled
                as in transformers.
            z_loss_coef: coefficient of ST-MoE's term (https://arxiv.org/abs/2202.08906).
            bias_speed: by how much a step moves the router's bias of each expert
                (https://arxiv.org/abs/2408.15664).
        """
        super().__init__()
        self.num_experts = num_experts
        self.layers = layers
        self._layer = layer  # private, so that `parallel/verify` still finds the layers alike
        self.kind = kind
        self.aux_loss_coef = aux_loss_coef
        self.z_loss_coef = z_loss_coef
        self.bias_speed = bias_speed
        self.loads = nn.Parameter(torch.zeros(num_experts), requires_grad=False)
        # of ranks with parts of the same samples; set by `parallelize`
        self.sample_groups: list[AxisGroup] = []

    def forward(
        self, weights: Tensor, logits: Tensor, scores: Tensor, chosen: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Returns the weights (b, s, j) of the chosen experts, with the loss terms attached.

        Args:
            logits, scores: (b, s, E), before and after softmax or sigmoid. chosen: (b, s, j).
            bias: (E,), the router's bias, which is updated at the end of the step.
        """
        if not torch.is_grad_enabled():
            return weights
        hits = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
        self._count(hits, bias)
        if self.kind != "none" and self.aux_loss_coef:
            shares = self._shares(hits) * chosen.shape[-1]
            probabilities = scores / scores.sum(-1, keepdim=True)  # unchanged for softmax
            factor = self.aux_loss_coef * self.num_experts / self.layers
            term = factor * (shares.to(scores.dtype) * probabilities).sum(-1)
            weights = attach(weights, "balance", term)
        if self.z_loss_coef:
            factor = self.z_loss_coef / self.layers
            term = factor * logits.logsumexp(-1).square()
            weights = attach(weights, "router_z", term)
        return weights

    @never_compiled  # compiled, each layer index would need its own graph
    def _count(self, hits: Tensor, bias: Tensor | None) -> None:
        receive = partial(self._end_step, bias)
        tally(str(self._layer), hits, receive, owner=self, kind="expert_loads")

    def _shares(self, hits: Tensor) -> Tensor:
        """Each expert's share of the slots, (E,), or per sample (b, 1, E): they sum to 1."""
        loads = self.loads.detach()
        if self.kind == "sequence":
            real = real_tokens(hits.device)
            if real is not None:
                hits = hits & real[..., None]
            loads = hits.sum(1, keepdim=True, dtype=torch.float64)
            for group in self.sample_groups:
                loads = torch.ops.meshtrain.all_reduce(loads, group.name)
        total = loads.sum(-1, keepdim=True)
        return torch.where(total > 0, loads / total.clamp(min=1), 1 / self.num_experts)

    def _end_step(self, bias: Tensor | None, loads: Tensor, bad: Tensor) -> None:
        with torch.no_grad():
            self.loads.copy_(torch.where(bad, self.loads, loads.to(self.loads.dtype)))
            if bias is not None and self.bias_speed:
                # Towards experts that got less than their share.
                step = self.bias_speed * torch.sign(loads.mean() - loads)
                bias.add_(torch.where(bad, 0, step).to(bias.dtype))


# selective recomputation sees the operators between graphs, but maybe not those inside one
@never_compiled
def choose(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores (..., E), highest first, ties to the lower index: (...,
    count) int64.

    torch.topk breaks ties arbitrarily. An operator without gradient, so that recomputation does not
    choose again.
    """
    return torch.ops.meshtrain.choose(scores, count)


def _choose(scores: Tensor, count: int) -> Tensor:
    if scores.dtype == torch.float64:
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return order[..., :count].contiguous()
    # One key for both, in 64 bits: integers that sort like the floats above, and below them those
    # that put the lower index first. No two are equal, so topk, which is faster than a stable sort,
    # has no ties to break.
    bits = (scores.float() + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last_first = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    keys = (ordered << 32) + last_first
    return keys.topk(count, dim=-1).indices


operator(
    "choose",
    _choose,
    lambda scores, count: scores.new_empty(*scores.shape[:-1], count, dtype=torch.int64),
)


def load_metrics(loads: Sequence[Tensor]) -> dict[str, float]:
    """Fields of a step's metrics from the loads of each layer's experts: the largest ratio of a
    load to the mean of its layer, and how many experts of all layers got no token."""
    if not loads:
        return {}
    ratios = [float(layer.max() / layer.mean().clamp(min=1e-9)) for layer in loads]
    idle = [int((layer == 0).sum()) for layer in loads]
    return {"expert_load_max": max(ratios), "experts_idle": float(sum(idle))}
