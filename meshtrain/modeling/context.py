"""Costs of context parallelism, before a run: sequence chunks, and the traffic and memory of the
model's attention."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshtrain.attention import AttentionContext
from meshtrain.config import Config
from meshtrain.data.sequence import head_ranges, kv_heads_of, padded_length
from meshtrain.errors import bytes_text
from meshtrain.layout import Layout
from meshtrain.modeling.build import spec_of
from meshtrain.parallel.mixed_precision import compute_dtype
from meshtrain.parallel.tp_plan import has_sequence_parts


def attention_shapes(model: nn.Module) -> set[tuple[int, int, int, int]]:
    """(query heads, key/value heads, key width, value width) of each attention call; empty if meta
    cannot run it."""
    calls = set()

    class Calls(AttentionContext):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
            calls.add((q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]))
            return v.new_empty(*q.shape[:-1], v.shape[-1])

    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            model(tokens, tokens, Calls())
    except (RuntimeError, TypeError):
        return set()
    return calls


@dataclass(frozen=True)
class AttentionShape:
    """One attention on a rank, and closed forms of its costs (docs/context-parallel.md), in
    elements.

    u is `context_heads`, and `index` is the rank's position on `cp`.
    """

    ranks: int  # size of `cp`
    query_heads: int  # on a rank of `tp`, as are key/value heads
    kv_heads: int
    width: int  # width of queries and keys per head
    value_width: int
    tokens: int  # tokens of a microbatch on a rank, padding included

    def messages(
        self, u: int, index: int | None = None, chunks: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Elements that a rank sends in forward, backward. `index` None: the rank that sends most.
        `chunks`: how many of its chunks other ranks see, summed over them, and how many of theirs
        it sees; None: for one document."""
        if index is None:
            return max((self.messages(u, i) for i in range(self.ranks)), key=sum)
        kv = [len(head_ranges(self.query_heads, self.kv_heads, u, j)[1]) for j in range(u)]
        own, ring, i = kv[index % u], self.ranks // u, index // u
        sends, sees = (ring - 1 + i, 2 * (ring - 1) - i) if chunks is None else chunks
        n = self.tokens * (self.width + self.value_width)
        queries, chunk = (u - 1) * (self.query_heads // u), own * u * n // 2
        return n * (queries + sum(kv) - own) + sends * chunk, n * (queries + (u - 1) * own) + (
            sends + sees
        ) * chunk

    def memory(self, u: int, method: str, index: int = 0) -> tuple[int, int]:
        """Elements saved for backward, and an upper bound of what it needs in addition, without
        masks and kernels' own.

        In addition: the keys and values that a rank sees (gather: those of all ranks; ring: of two
        ranks and its own), those of a block as one tensor, their gradients and the sums of these;
        3.5 times the gradient of q; if heads are not shared evenly, keys and values per query head.
        With one document the first rank sees most.
        """
        own, kv = map(len, head_ranges(self.query_heads, self.kv_heads, u, index % u))
        n, sees, ring = u * self.tokens, 2 * (self.ranks // u) - index // u, self.ranks // u
        chunk = (self.width + self.value_width) * n // 2
        at_once, block = (2 * sees + 4 * ring, sees) if method == "gather" else (12, 2)
        uneven = kv_heads_of(self.query_heads, self.kv_heads, u, index % u)
        repeated = 2 * block * own * chunk if uneven else 0
        return 2 * (
            own + kv
        ) * chunk + n * own, at_once * kv * chunk + 7 * n * own * self.width // 2 + repeated


@dataclass(frozen=True)
class ContextCosts:
    """Costs of a microbatch over `cp`, in bytes, for the layer and rank with the most; empty if
    heads are unknown."""

    ranks: int
    length: int  # tokens of a sequence
    padded: int  # ... with its padding
    # method -> in a layer's forward and backward; the config's method comes first
    sent: dict[str, tuple[int, int]]
    # from a layer's forward to its backward: q, k, v, output and a number per query; 0 if
    # recomputed
    saved: int
    # upper bound of the additional memory in backward, without masks and memory inside kernels
    transient: int

    def describe(self) -> str:
        """`sequence 4096 over cp 4: 1024 a rank in 2 chunks of 512, 0 % padding; attention sends
        ...`"""
        own, padding = self.padded // self.ranks, 1 - self.length / self.padded
        chunks = f"{own} a rank in 2 chunks of {own // 2}, {100 * padding:.2g} % padding"
        text = f"sequence {self.length} over cp {self.ranks}: {chunks}; "
        if not self.sent:
            return (
                text
                + "what attention sends is not known: the model does not run on the meta device"
            )

        def amount(way: str) -> str:
            """Heads are swapped evenly. Some ranks send fewer keys and values; with documents all
            ranks may."""
            return "at most " * (not way.startswith("context_heads")) + bytes_text(*self.sent[way])

        (own_way, sent), *others = self.sent.items()
        ways = [
            own_way,
            *(f"{way}: {'as much' if n == sent else amount(way)}" for way, n in others),
        ]
        return f"{text}attention sends {amount(own_way)} a layer and microbatch ({'; '.join(ways)})"

    def describe_memory(self) -> str:
        saved, more = bytes_text(self.saved), bytes_text(self.transient)
        return (
            f"attention keeps {saved} a layer and microbatch, and in its backward it takes at most "
            f"{more} on top"
        )


def context_costs(config: Config, layout: Layout) -> ContextCosts | None:
    """The costs of `cp` for a run, from closed forms (docs/context-parallel.md); None without
    `cp`."""
    ranks, tp, options, length = (
        layout.size("cp"),
        layout.size("tp"),
        config.parallel,
        config.data.seq_len,
    )
    if ranks == 1:
        return None
    spec = spec_of(config)
    sequence = has_sequence_parts(options.sequence_parallel, getattr(spec.module, "tp_plan", None))
    padded = padded_length(length, ranks, tp if sequence else 1)
    tokens = config.batch.micro_size * padded // ranks
    shapes = [
        AttentionShape(ranks, h // tp, kv_heads_of_rank(h, k, tp), e, f, tokens)
        for h, k, e, f in attention_shapes(spec.meta)
    ]
    itemsize, again = compute_dtype(config.train.precision).itemsize, options.recompute == "full"
    ways = [(options.context, options.context_heads), ("gather", 1), ("ring", 1)]
    if all(shape.query_heads % ranks == 0 for shape in shapes):
        ways.append(("gather", ranks))
    sent = {}
    for method, u in ways if shapes else ():
        forward, backward = max((shape.messages(u) for shape in shapes), key=sum)
        way = ", ".join([method] * (u < ranks) + [f"context_heads {u}"] * (u > 1))
        sent[way] = itemsize * forward, itemsize * (backward + forward * again)
    wider = max(4, itemsize) - itemsize  # sums, and the number per query, are in float32 or wider
    saved = transient = 0
    for shape in shapes:
        elements, more = shape.memory(options.context_heads, options.context)
        saved = max(saved, elements * itemsize + wider * tokens * shape.query_heads)
        # sums are about a quarter of the elements
        transient = max(transient, more * (4 * itemsize + wider) // 4)
    if again:
        saved, transient = 0, saved + transient
    return ContextCosts(ranks, length, padded, sent, saved, transient)


def kv_heads_of_rank(heads: int, kv_heads: int, tp: int) -> int:
    """The most key/value heads of a rank of `tp`; heads not shared evenly are repeated for each
    query head."""
    parts = [(heads, kv_heads, tp, i) for i in range(tp)]
    return max(len(kv_heads_of(*part)) or len(head_ranges(*part)[1]) for part in parts)
