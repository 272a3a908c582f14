"""Costs of experts, before a run: their placement on ranks, the active parameters per token, and a
layer's traffic."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from meshtrain.config import Config
from meshtrain.data.sequence import padded_length
from meshtrain.errors import bytes_text, plural
from meshtrain.layout import EXPERT_AXES, Layout
from meshtrain.modeling.build import parameter_count, spec_of
from meshtrain.parallel.expert import message_rows
from meshtrain.parallel.mixed_precision import compute_dtype
from meshtrain.parallel.sharding import expert_shard_dim
from meshtrain.parallel.tp_plan import expert_modules


def dispatch_bytes(
    out: int, answered: int, width: int, itemsize: int, foreign: int, recompute: str = "none"
) -> int:
    """Bytes that a rank sends over `ep` for a layer and microbatch, forward and backward: `out`
    rows of its tokens to experts of other ranks, results for the `answered` rows of other ranks,
    and the gradients of both; and first the number of rows for each of the `foreign` experts.
    `recompute: full` sends rows and results once more."""
    passes = 3 if recompute == "full" else 2
    return passes * (out + answered) * width * itemsize + 8 * foreign


@dataclass(frozen=True)
class ExpertCosts:
    """The experts of a model over a layout; bytes are for the layer with the most experts, with
    even loads."""

    # `experts: 48 layers x 128, 8 a token; over ep 8: 16, over efsdp 2: 8 on a rank; 2 copies`
    line: str
    experts: int  # the most of a layer
    on_rank: int  # the most of these on one rank of `ep`
    active: int  # parameters used per token
    tokens: int  # tokens of a microbatch on a rank
    # bytes of the rows that a rank sends to experts, or of the results that it returns
    message: int
    sent: int  # bytes that a rank sends over `ep` for a microbatch, forward and backward

    def describe_sent(self) -> str:
        """`with even loads a layer sends 4 x 112 MiB over ep for a microbatch of 4,096 tokens`"""
        row_counts = 8 * (self.experts - self.on_rank)  # for experts on other ranks
        messages = (self.sent - row_counts) // max(self.message, 1)
        return (
            f"with even loads a layer sends {messages} x {bytes_text(self.message)} over ep for a "
            f"microbatch of {self.tokens:,} tokens"
        )


def expert_costs(config: Config, layout: Layout) -> ExpertCosts | None:
    """The costs of a run's experts, from closed forms; None for a model without experts."""
    spec = spec_of(config)
    plan = spec.plan("ep_plan")
    per_token = config.model.keys.get("num_experts_per_tok")
    if not plan or per_token is None:
        return None
    counts = expert_modules(spec.meta, plan)  # layer -> its experts
    largest = max(counts, key=counts.__getitem__)
    most = counts[largest]
    ranks = layout.size("ep")
    on_rank = -(-most // ranks)
    idle = sum(_idle_parameters(spec.meta, name, n, per_token) for name, n in counts.items())

    tokens = _tokens_of_microbatch(config, layout)
    itemsize = compute_dtype(config.train.precision).itemsize
    weight = next(spec.meta.get_submodule(largest).parameters())  # (experts, rows, ..., width)
    factor = config.parallel.expert_rows
    if factor is None:
        rows = tokens * per_token * (ranks - 1) // ranks
    else:
        rows = (ranks - 1) * message_rows(tokens * per_token, on_rank, most, factor)
    width = weight.shape[-1]
    sent = dispatch_bytes(
        rows, rows, width, itemsize, foreign=most - on_rank, recompute=config.parallel.recompute
    )
    line = (
        f"experts: {plural(len(counts), 'layer')} x {most}, {per_token} a token; "
        f"{_place(weight.shape, layout)}"
    )
    return ExpertCosts(
        line=line,
        experts=most,
        on_rank=on_rank,
        active=parameter_count(spec.meta) - idle,
        tokens=tokens,
        message=rows * width * itemsize,
        sent=sent,
    )


def _idle_parameters(model: nn.Module, name: str, experts: int, per_token: int) -> int:
    """The parameters of a layer of experts that a token does not meet."""
    parameters = model.get_submodule(name).parameters()
    return sum(p.numel() * (experts - per_token) // experts for p in parameters)


def _tokens_of_microbatch(config: Config, layout: Layout) -> int:
    """The tokens whose rows one rank sends: without sequence parallelism too, ranks of `tp` send
    different ones."""
    parts, cp = layout.size("tp"), layout.size("cp")
    length = config.data.seq_len
    if cp > 1:
        length = padded_length(length, cp, parts)
    return config.batch.micro_size * length // (cp * parts)


def _place(shape: Sequence[int], layout: Layout) -> str:
    """Describes which ranks hold the experts of a layer, whose weights have this shape."""
    copies, shards, ranks = map(layout.size, EXPERT_AXES)
    if ranks == 1:
        return "ep 1: every rank computes all of them"
    on_rank = -(-shape[0] // ranks)
    text = f"over ep {ranks}: {on_rank}"
    if shards > 1:
        cuts_rows = expert_shard_dim(shape, ranks, shards) == 1
        experts = -(-on_rank // shards)
        text += f", over efsdp {shards}: "
        text += f"1/{shards} of the rows of {on_rank}" if cuts_rows else str(experts)
    text += " on a rank"
    without = ranks - -(-shape[0] // on_rank)
    if without:
        text += f", none on {plural(without, 'rank')} of ep"
    return f"{text}; {copies} {'copy' if copies == 1 else 'copies'}"
