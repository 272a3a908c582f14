"""Costs of context parallelism, before a run: sequence chunks, and the traffic and memory of the
model's attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, AttentionOptions
from meshtrain.config import Config
from meshtrain.config.schema import ParallelSection
from meshtrain.data.sequence import head_ranges, kv_heads_of, padded_length
from meshtrain.errors import bytes_text
from meshtrain.layout import Layout
from meshtrain.modeling.build import spec_of
from meshtrain.parallel.mixed_precision import compute_dtype
from meshtrain.parallel.tp_plan import has_sequence_parts


def attention_shapes(model: nn.Module) -> set[tuple[int, int, int, int, bool]]:
    """(query heads, key/value heads, key width, value width, whether it has a bias) of each
    attention call; empty if meta cannot run it."""
    calls = set()

    class Calls(AttentionContext):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            has_bias = options.bias is not None
            calls.add((q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], has_bias))
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
    # of the bias of a head for the rank's queries of a sequence and all keys; 0: no bias
    bias: int = 0

    def messages(
        self, u: int, index: int | None = None, chunks: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Elements that a rank sends in forward, backward.

        Args:
            index: None: the rank that sends most.
            chunks: how many of its chunks other ranks see, summed over them, and how many of theirs
                it sees; None: for one document.
        """
        if index is None:
            return max((self.messages(u, i) for i in range(self.ranks)), key=sum)
        # Key/value heads of each of the u neighbours that swap heads.
        kv_of_neighbours = [
            len(head_ranges(self.query_heads, self.kv_heads, u, j)[1]) for j in range(u)
        ]
        own_kv = kv_of_neighbours[index % u]
        ring = self.ranks // u
        position = index // u
        if chunks is None:
            # Of the two chunks of each rank, one early and one late, those in front are seen.
            sends, sees = ring - 1 + position, 2 * (ring - 1) - position
        else:
            sends, sees = chunks
        per_head = self.tokens * (self.width + self.value_width)  # queries and outputs, or k and v
        chunk = own_kv * u * per_head // 2
        # Neighbours get their heads of q, k and v, and give back outputs.
        queries = (u - 1) * (self.query_heads // u)
        swapped = per_head * (queries + sum(kv_of_neighbours) - own_kv)
        swapped_back = per_head * (queries + (u - 1) * own_kv)
        # Backward fetches keys and values again, and returns their gradients.
        return swapped + sends * chunk, swapped_back + (sends + sees) * chunk

    def memory(self, u: int, method: str, index: int = 0) -> tuple[int, int]:
        """Elements saved for backward, and an upper bound of what it needs in addition, without
        masks and kernels' own.

        In addition: the keys and values that a rank sees (gather: those of all ranks; ring: of two
        ranks and its own), those of a block as one tensor, their gradients and the sums of these;
        3.5 times the gradient of q; if heads are not shared evenly, keys and values per query head.
        With one document the first rank sees most. A bias, which all samples are taken to share, is
        kept, and has a gradient.
        """
        own_heads, own_kv_heads = head_ranges(self.query_heads, self.kv_heads, u, index % u)
        heads, kv_heads = len(own_heads), len(own_kv_heads)
        ring = self.ranks // u
        tokens = u * self.tokens  # of which the rank has these heads
        chunk = (self.width + self.value_width) * tokens // 2  # of one head's keys and values
        sees = 2 * ring - index // u  # chunks
        if method == "gather":
            at_once, block = 2 * sees + 4 * ring, sees
        else:
            at_once, block = 12, 2
        # q, k, v and the output, and a number per query.
        bias = u * heads * self.bias
        saved = 2 * (heads + kv_heads) * chunk + tokens * heads + bias
        more = at_once * kv_heads * chunk + 7 * tokens * heads * self.width // 2 + bias
        if kv_heads_of(self.query_heads, self.kv_heads, u, index % u):
            more += 2 * block * heads * chunk
        return saved, more


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
        own = self.padded // self.ranks
        padding = 1 - self.length / self.padded
        text = (
            f"sequence {self.length} over cp {self.ranks}: {own} a rank in 2 chunks of "
            f"{own // 2}, {100 * padding:.2g} % padding; "
        )
        if not self.sent:
            unknown = "what attention sends is not known: the model does not run on the meta device"
            return text + unknown

        def amount(way: str) -> str:
            sent = bytes_text(*self.sent[way])
            # Heads are swapped evenly. Some ranks send fewer keys and values; with documents all
            # ranks may.
            return sent if way.startswith("context_heads") else f"at most {sent}"

        own_way, *other_ways = self.sent
        ways = [own_way]
        for way in other_ways:
            same = self.sent[way] == self.sent[own_way]
            ways.append(f"{way}: {'as much' if same else amount(way)}")
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
    ranks = layout.size("cp")
    tp = layout.size("tp")
    if ranks == 1:
        return None
    spec = spec_of(config)
    options = config.parallel
    length = config.data.seq_len
    plan = spec.plan("tp_plan")
    has_sequence_part = has_sequence_parts(options.sequence_parallel, plan)
    padded = padded_length(length, ranks, tp if has_sequence_part else 1)
    tokens = config.batch.micro_size * padded // ranks
    shapes = [
        AttentionShape(
            ranks=ranks,
            query_heads=heads // tp,
            kv_heads=kv_heads_of_rank(heads, kv_heads, tp),
            width=width,
            value_width=value_width,
            tokens=tokens,
            bias=padded // ranks * padded if has_bias else 0,
        )
        for heads, kv_heads, width, value_width, has_bias in attention_shapes(spec.meta)
    ]
    itemsize = compute_dtype(config.train.precision).itemsize
    saved, transient = _memory(shapes, options, itemsize)
    return ContextCosts(
        ranks=ranks,
        length=length,
        padded=padded,
        sent=_messages(shapes, options, itemsize),
        saved=saved,
        transient=transient,
    )


def _messages(
    shapes: Sequence[AttentionShape], options: ParallelSection, itemsize: int
) -> dict[str, tuple[int, int]]:
    """Each way to exchange keys and values -> bytes that it sends in a layer's forward and
    backward, the config's own way first."""
    if not shapes:
        return {}
    ranks = shapes[0].ranks
    ways = [(options.context, options.context_heads), ("gather", 1), ("ring", 1)]
    if all(shape.query_heads % ranks == 0 for shape in shapes):
        ways.append(("gather", ranks))
    sent: dict[str, tuple[int, int]] = {}
    for method, u in ways:
        forward, backward = max((shape.messages(u) for shape in shapes), key=sum)
        if options.recompute == "full":  # the forward runs again
            backward += forward
        sent[_way(method, u, ranks)] = itemsize * forward, itemsize * backward
    return sent


def _memory(
    shapes: Sequence[AttentionShape], options: ParallelSection, itemsize: int
) -> tuple[int, int]:
    """`saved` and `transient` of `ContextCosts`, of the layer with the most."""
    # Sums, and the number per query, are in float32 or wider.
    wider = max(4, itemsize) - itemsize
    saved = 0
    transient = 0
    for shape in shapes:
        elements, more = shape.memory(options.context_heads, options.context)
        numbers = shape.tokens * shape.query_heads
        saved = max(saved, elements * itemsize + numbers * wider)
        # Sums are about a quarter of the elements.
        transient = max(transient, more * (4 * itemsize + wider) // 4)
    if options.recompute == "full":  # nothing is kept, and all is there again in backward
        return 0, saved + transient
    return saved, transient


def _way(method: str, u: int, ranks: int) -> str:
    """`ring, context_heads 2`: how keys and values travel, if they do, and who swaps heads."""
    words = []
    if u < ranks:
        words.append(method)
    if u > 1:
        words.append(f"context_heads {u}")
    return ", ".join(words)


def kv_heads_of_rank(heads: int, kv_heads: int, tp: int) -> int:
    """The most key/value heads of a rank of `tp`; heads not shared evenly are repeated for each
    query head."""
    most = 0
    for index in range(tp):
        repeated = kv_heads_of(heads, kv_heads, tp, index)
        _, shared = head_ranges(heads, kv_heads, tp, index)
        most = max(most, len(repeated) or len(shared))
    return most
