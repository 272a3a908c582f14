"""Costs of experts, before a run: their placement on ranks, the active parameters per token, and a
layer's traffic."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshtrain.config import Config
from meshtrain.data.sequence import padded_length
from meshtrain.errors import bytes_text, plural
from meshtrain.layout import EXPERT_AXES, Layout
from meshtrain.modeling.build import parameter_count, spec_of
from meshtrain.parallel.expert import message_rows
from meshtrain.parallel.mixed_precision import compute_dtype
from meshtrain.parallel.sharding import expert_shard_dim
from meshtrain.parallel.tp_plan import expert_modules, has_sequence_parts


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
        counts = 8 * (self.experts - self.on_rank)  # row counts of experts on other ranks
        ways, size = (self.sent - counts) // max(self.message, 1), bytes_text(self.message)
        return (
            f"with even loads a layer sends {ways} x {size} over ep for a microbatch of "
            f"{self.tokens:,} tokens"
        )


def expert_costs(config: Config, layout: Layout) -> ExpertCosts | None:
    """The costs of a run's experts, from closed forms; None for a model without experts."""
    spec = spec_of(config)
    plan, per_token = (
        getattr(spec.module, "ep_plan", None),
        config.model.keys.get("num_experts_per_tok"),
    )
    if not plan or per_token is None:
        return None
    counts = expert_modules(spec.meta, plan)
    most = max(counts.values())
    of_experts = {name: list(spec.meta.get_submodule(name).parameters()) for name in counts}
    idle = sum(
        p.numel() * (n - per_token) // n for name, n in counts.items() for p in of_experts[name]
    )
    ranks, on_rank = layout.size("ep"), -(-most // layout.size("ep"))
    first = of_experts[max(counts, key=counts.__getitem__)][0]
    cp, tp = layout.size("cp"), layout.size("tp")
    parts = (
        tp
        if has_sequence_parts(
            config.parallel.sequence_parallel, getattr(spec.module, "tp_plan", None)
        )
        else 1
    )
    length = padded_length(config.data.seq_len, cp, parts) if cp > 1 else config.data.seq_len
    tokens = config.batch.micro_size * length // (cp * parts)
    rows, width, factor = (
        tokens * per_token * (ranks - 1) // ranks,
        first.shape[-1],
        config.parallel.expert_rows,
    )
    if factor is not None:
        rows = (ranks - 1) * message_rows(tokens * per_token, on_rank, most, factor)
    itemsize = compute_dtype(config.train.precision).itemsize
    return ExpertCosts(
        line=(
            f"experts: {plural(len(counts), 'layer')} x {most}, {per_token} a token; "
            f"{_place(first.shape, layout)}"
        ),
        experts=most,
        on_rank=on_rank,
        active=parameter_count(spec.meta) - idle,
        tokens=tokens,
        message=rows * width * itemsize,
        sent=dispatch_bytes(rows, rows, width, itemsize, most - on_rank, config.parallel.recompute),
    )


def _place(shape: Sequence[int], layout: Layout) -> str:
    """Describes which ranks hold the experts of a layer, whose weights have this shape."""
    copies, shards, ranks = map(layout.size, EXPERT_AXES)
    if ranks == 1:
        return "ep 1: every rank computes all of them"
    on_rank = -(-shape[0] // ranks)
    rows = (
        f"1/{shards} of the rows of {on_rank}"
        if expert_shard_dim(shape, ranks, shards)
        else -(-on_rank // shards)
    )
    sharded = f", over efsdp {shards}: {rows}" if shards > 1 else ""
    without = ranks - -(-shape[0] // on_rank)
    none = f", none on {plural(without, 'rank')} of ep" if without else ""
    return (
        f"over ep {ranks}: {on_rank}{sharded} on a rank{none}; {copies} "
        f"cop{'y' if copies == 1 else 'ies'}"
    )
