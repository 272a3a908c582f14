"""Ring attention: causal attention of this rank's queries over keys and values that are split over
all ranks of `cp`, as torch operators (Liu et al., https://arxiv.org/abs/2310.01889).

**Who has what.** With c ranks a sequence is cut into 2c chunks, and rank i has chunks i and
2c - 1 - i (`meshtrain.data.sequence`). Queries stay where they are; keys and values travel. What
rank 1 of 3 computes, with `\\` for the causal diagonal and `x` for all keys:

    keys of chunk    0   1   2   3   4   5
    held by rank     0   1   2   2   1   0
    queries of 1     x   \\   .   .   .   .
    queries of 4     x   x   x   x   \\   .

**Who sends what, when.** Keys and values come directly from the rank that has them, only if one of
the reader's queries sees their chunk, and only once. In stage d of the ring, rank i computes with
those of rank i - d while those of rank i - d - 1 are under way:

    stage of the ring            0             1             2
    rank 1 computes with     1, 4 (own)    0 of rank 0   2, 3 of rank 2
    rank 1 receives          from rank 0   from rank 2
    backward: rank 1 sends the gradient of 0 to rank 0 in stage 2, those of 2, 3 to rank 2 after it

`gather` is the same with all other ranks in one stage, before any computation. Only the visible
chunks travel in both: which these are follows from the documents, and every rank has those.

**Forward.** For a query with scores x_j over a set of keys A, one kernel returns

    l_A = log sum_{j in A} exp(x_j)        and        o_A = sum_{j in A} exp(x_j - l_A) v_j

l is the log-sum-exp; the kernel subtracts the largest score m before it exponentiates, so that
nothing overflows: l = m + log sum exp(x_j - m). Results over disjoint sets A and B of keys merge
exactly, in any order of arrival (the online softmax, https://arxiv.org/abs/1805.02867):

    l = log(exp l_A + exp l_B)             and        o = exp(l_A - l) o_A + exp(l_B - l) o_B

**Backward.** The forward keeps o and l over *all* keys. With them the probabilities of any block
are final, p_ij = exp(x_ij - l_i), so blocks are independent of each other and their gradients add:

    D_i  = do_i . o_i                      the same for all blocks: sum over all j of p_ij dp_ij
    dp_ij = do_i . v_j,      dx_ij = p_ij (dp_ij - D_i)
    dv_j = sum_i p_ij do_i,  dk_j  = scale sum_i dx_ij q_i,  dq_i = scale sum_j dx_ij k_j

Keys and values are fetched again rather than kept. The gradients of a rank's keys go directly back
to it, which adds them in the order of the ring after itself: each method gives the same bits in
each run, and the two may differ in rounding.

**What else changes scores.** Three options of attention fit into the same equations, and none of
them travels: all belong to the queries.

A *sink* is a logit z of a head that takes probability and gives no value (gpt-oss): a block of one
key, whose output is 0. It is merged last, and the backward, which knows only the final l and o,
stays as it is for q, k and v:

    l' = log(exp l + exp z),   o' = exp(l - l') o,   dz = sum_i exp(z - l'_i) (0 - D_i)

A *bias* of the positions of query and key (ALiBi) is an addend of x_ij, so its gradient is dx_ij.

*Dropout* multiplies p_ij by m_ij, 0 or 1 / (1 - p), where it meets v_j, and so dp_ij = m_ij do_i .
v_j. The normalization l is that of all keys, dropped or not, and D_i = do_i . o_i still holds. m_ij
is a hash of the sample, the head and both positions (`meshtrain.dropout`), so every rank knows the
part that it needs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshtrain.data.sequence import sees_chunk
from meshtrain.dropout import keep_pairs
from meshtrain.parallel.collectives import (
    AsyncResult,
    AxisGroup,
    axis_group_by_name,
    differentiable,
    operator,
)
from meshtrain.parallel.context import kernels
from meshtrain.parallel.context.kernels import Block

# In shapes: b batch, h query heads, k key/value heads, s tokens of this rank, m = s / 2 tokens of a
# chunk, n keys of a stage, e width of queries and keys, f width of values.


@dataclass(frozen=True)
class Settings:
    """The arguments of the operators after q, k and v, in the order of `SETTINGS`."""

    documents: Tensor | None  # (b, length of the padded sequence), on the CPU
    spans: Tensor  # (2, chunks), what `visible_spans` says of the documents, on the CPU
    heads: Sequence[int]  # the key/value head of each query head; (): shared evenly
    ring: str  # name of the group that exchanges keys and values; "": this rank has all of them
    method: str  # "gather" or "ring"
    scale: float
    window: int | None
    soft_cap: float | None
    dropout_keys: Tensor | None = None  # (b, h), from `meshtrain.dropout.head_keys`
    dropped: float = 0.0  # probability of dropout
    sinks: Tensor | None = None  # (h,), a logit for each head
    # (b or 1, h, s, length of the padded sequence), added to the scores
    bias: Tensor | None = None

    @property
    def axis(self) -> AxisGroup | None:
        return axis_group_by_name(self.ring) if self.ring else None


SETTINGS = (
    "Tensor? documents, Tensor spans, int[] heads, str ring, str method, float scale, int? window, "
    "float? soft_cap, Tensor? dropout_keys, float dropped, Tensor? sinks, Tensor? bias"
)


@dataclass(frozen=True)
class Part:
    """Some of this rank's queries against some of the keys that are here: one call of a kernel."""

    rows: slice  # of this rank's s queries
    columns: slice  # of the n keys of this stage
    block: Block  # how these queries see these keys
    # of these keys in the sequence, on the CPU; None: scores do not depend on them
    positions: Tensor | None
    # Whether these queries have met no keys before, so that there is nothing to merge with. The
    # first keys that a query meets are those of its own chunk: it sees at least itself, and its
    # log-sum-exp is finite.
    is_first: bool


class Visibility:
    """Which chunks this rank's queries see, and how. All ranks know this of each other, from the
    same documents: so it follows on each of them who sends what.

    Chunks are named by their number in the sequence: y where they are queries, x where they are
    keys.

    Attributes:
        index: this rank's among the `size` ranks that share the sequence.
        own: the two chunks that this rank has. chunk: the length m of each chunk, in tokens.
        first: for each chunk, the first position that one of its queries sees, in any row of the
            batch.
        last_begin: for each chunk, the last position up to its end at which a document begins, in
            any row. If last_begin <= first, no document begins after `first`: then each query of
            the chunk sees all keys from there up to itself, and needs no mask.
    """

    def __init__(self, q: Tensor, v: Tensor, settings: Settings) -> None:
        axis = settings.axis
        self.size = 1 if axis is None else axis.size
        self.index = 0 if axis is None else axis.index
        self.own = self.chunks_of(self.index)
        self.chunk = q.shape[2] // 2
        self._needed: dict[tuple[int, int], slice] = {}  # by reader and source; see `needed`
        self.batch = q.shape[0]
        length = 2 * self.size * self.chunk

        # `spans` has 2 chunks for each rank of `cp`. Where u neighbours have exchanged heads for
        # parts of the sequence (`heads.py`), the ring has fewer ranks, and a chunk of theirs
        # consists of u chunks of `spans`: it sees from where the first of them sees, and the last
        # begin of a document is that of the last of them.
        u = settings.spans.shape[1] // (2 * self.size)
        self.first: list[int] = settings.spans[0, ::u].tolist()
        self.last_begin: list[int] = settings.spans[1, u - 1 :: u].tolist()
        # `visible_spans` gives `length`, which no document can begin at, if a document goes on
        # after another one: then nothing but a mask is right.
        documents_resume = self.last_begin[-1] >= length

        self.window = settings.window
        if self.window is not None and self.window >= length:
            self.window = None  # it leaves no key out
        self.documents = settings.documents
        if self.window is not None:
            self.first = [
                max(first, y * self.chunk - self.window + 1) for y, first in enumerate(self.first)
            ]
            if self.documents is None:  # a window needs masks, and they compare documents
                self.documents = torch.zeros(1, length, dtype=torch.int64)

        self.plain = Block(settings.scale, settings.soft_cap, heads=settings.heads)
        self.dropout_keys = settings.dropout_keys
        self.dropped = settings.dropped
        self.bias = settings.bias
        # No fused kernel takes these options: scores are computed by plain matrix products.
        by_products = (settings.soft_cap, self.bias, self.dropout_keys) != (None, None, None)
        kernel = kernels.choose_kernel(q, v, by_products, "all")
        # Of fewer queries than keys under a causal mask: whether the last query sees the last key
        # (else the first query sees the first key alone).
        self.kernel_aligns_ends = kernel.lower_right
        # Segments instead of a mask, which has a number for each pair of query and key.
        self.segmented = False
        if self.documents is not None and not documents_resume:
            kernel = kernels.choose_kernel(q, v, by_products, "documents")
            self.segmented = kernel.segmented

    def chunks_of(self, rank: int) -> Sequence[int]:
        return rank, 2 * self.size - 1 - rank

    def needed(self, reader: int, source: int) -> slice:
        """Which of the two chunks of rank `source` the queries of rank `reader` see."""
        if (reader, source) not in self._needed:
            seen = [
                place
                for place, x in enumerate(self.chunks_of(source))
                if sees_chunk(self.first, self.chunk, reader, x)
            ]
            self._needed[reader, source] = slice(seen[0], seen[-1] + 1) if seen else slice(0, 0)
        return self._needed[reader, source]

    def needed_from(self, source: int) -> Sequence[int]:
        """The chunks of rank `source` that this rank's queries see."""
        return self.chunks_of(source)[self.needed(self.index, source)]

    def parts(self, chunks: Sequence[int], device: torch.device) -> Iterator[Part]:
        """What to compute with the keys of these chunks, which are ascending and concatenated."""
        for ys, xs in self._pairs(chunks):
            row = self.own.index(ys[0]) * self.chunk  # where ys begin among this rank's queries
            column = chunks.index(xs[0]) * self.chunk  # where xs begin among the keys
            # The number of keys before the first visible one, which are left out.
            skip = max(0, self.first[ys[0]] - xs[0] * self.chunk)
            rows = slice(row, row + len(ys) * self.chunk)
            block = self._block(ys, xs, skip, device)
            positions: Tensor | None = None
            if self.bias is not None or self.dropout_keys is not None:
                positions = self._positions(xs)[skip:]
                block = self._scored(block, rows, ys, positions)
            yield Part(
                rows=rows,
                columns=slice(column + skip, column + len(xs) * self.chunk),
                block=block,
                positions=positions,
                is_first=xs[-1] == ys[-1],
            )

    def _pairs(self, chunks: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """(Chunks of queries, the consecutive ones of `chunks` that they see), a block each. As few
        and as large blocks as kernels without a mask allow. Of each query's blocks the one with its
        own chunk comes first (`Part.is_first`)."""
        visible = [self._visible(y, chunks) for y in self.own]
        if tuple(chunks) == self.own and not self._is_masked(self.own, self.own):
            # Stage 0 of a ring, in which each rank has its own two chunks. Queries and keys are the
            # same positions in ascending order: so one causal square over both chunks is right,
            # whatever lies between them in the sequence.
            yield self.own, self.own
        elif visible[0] == visible[1]:  # both halves see the same chunks, which are not their own
            if visible[0]:
                yield self.own, visible[0]
        else:
            for y, xs in zip(self.own, visible, strict=True):
                # Fewer queries than keys, causal: a kernel that does not align the last query with
                # the last key gets the square at the diagonal as a block of its own.
                is_oblong = len(xs) > 1 and xs[-1] == y
                if is_oblong and not self.kernel_aligns_ends and not self._is_masked((y,), xs):
                    yield (y,), xs[-1:]
                    xs = xs[:-1]
                if xs:
                    yield (y,), xs

    def _visible(self, y: int, chunks: Sequence[int]) -> list[int]:
        """The chunks in which some query of chunk y sees a key."""
        return [x for x in chunks if x <= y and self.first[y] < (x + 1) * self.chunk]

    def _is_masked(self, ys: Sequence[int], xs: Sequence[int]) -> bool:
        """Whether some query of a block does not see all of the block's keys up to itself."""
        if self.window is not None:
            return True
        first_key = max(self.first[ys[0]], xs[0] * self.chunk)  # of the block, as a position
        for y in ys:
            sees_without_gap = self.last_begin[y] <= self.first[y]
            sees_first_key = self.first[y] <= first_key
            if not (sees_without_gap and sees_first_key):
                return True
        return False

    def _block(
        self, ys: Sequence[int], xs: Sequence[int], skip: int, device: torch.device
    ) -> Block:
        """How the queries of chunks `ys` see the keys of chunks `xs` but the first `skip`."""
        diagonal = xs[-1] == ys[-1]
        if not self._is_masked(ys, xs):
            return replace(self.plain, causal=diagonal)

        documents = self.documents
        assert documents is not None  # nothing else masks
        queries = self._positions(ys)
        keys = self._positions(xs)[skip:]

        # A kernel counts a window in keys of the block, so there must be no gap between them.
        adjacent = xs[-1] - xs[0] == len(xs) - 1
        if self.segmented and (self.window is None or (diagonal and adjacent)):
            segments = kernels.segments_of(
                documents[:, queries].expand(self.batch, -1),
                documents[:, keys].expand(self.batch, -1),
            )
            return replace(self.plain, causal=diagonal, segments=segments, window=self.window)

        documents = documents.to(device, non_blocking=True)
        queries = queries.to(device, non_blocking=True)
        keys = keys.to(device, non_blocking=True)
        causal = queries[:, None] >= keys
        mask = causal & (documents[:, queries, None] == documents[:, None, keys])
        if self.window is not None:
            mask &= queries[:, None] < keys + self.window
        return replace(self.plain, mask=mask[:, None])

    def _scored(self, block: Block, rows: slice, ys: Sequence[int], positions: Tensor) -> Block:
        """The block with its part of the bias and of the dropout masks. `rows`: of this rank's
        queries, those of chunks `ys`. `positions`: of the block's keys, on the CPU."""
        if self.bias is not None:
            columns = _to(self.bias, positions)
            block = replace(block, bias=self.bias[:, :, rows, columns])
        if self.dropout_keys is not None:
            of_heads = self.dropout_keys  # (b, h), the hashes that seed the masks
            queries = _to(of_heads, self._positions(ys))
            keys = _to(of_heads, positions)
            # One row of positions serves all samples.
            keep = keep_pairs(of_heads, queries[None], keys[None], self.dropped)
            block = replace(block, keep=keep, dropped=self.dropped)
        return block

    def _positions(self, chunks: Sequence[int]) -> Tensor:
        """The positions of these chunks in the sequence, on the CPU."""
        return torch.cat([torch.arange(x * self.chunk, (x + 1) * self.chunk) for x in chunks])


class Exchange:
    """The way of keys and values to the ranks that see them, and of their gradients back.

    A chunk travels as (b, k, m, e + f), keys beside values, so one message has both. All ranks
    start the same messages in the same order, also where they have nothing to send or to receive.
    """

    def __init__(self, kv: Tensor, settings: Settings, visibility: Visibility) -> None:
        """`kv`: (2, b, k, m, e + f), those of this rank's two chunks."""
        self.kv = kv
        self.visibility = visibility
        self.axis = settings.axis
        self.size, self.index = visibility.size, visibility.index
        # For each stage, how far back on the ring the ranks are whose keys arrive in it.
        distances = list(range(1, self.size))
        if settings.method == "ring":
            self.stages = [[], *([distance] for distance in distances)]
        else:
            self.stages = [distances]
        self.stage = 0  # the one whose keys were yielded last
        self.chunks: list[int] = []  # of that stage, ascending
        # (2, b, k, m, e + f) in float32 or wider: the gradient of `kv`, so far
        self.gradient: Tensor | None = None
        self._returning: AsyncResult | None = None

    def arrivals(self) -> Iterator[tuple[list[int], Tensor]]:
        """For each stage its chunks, ascending, and their keys and values (b, k, n, e + f).

        The messages of the next stage are under way while the caller computes with these.
        """
        coming = self._start_fetch(self.stages[0])
        for stage, distances in enumerate(self.stages):
            arrived: dict[int, Tensor] = {}
            if stage == 0:
                arrived.update(zip(self.visibility.own, self.kv, strict=True))
            if coming is not None:
                received = coming.wait()
                for distance in distances:
                    source = (self.index - distance) % self.size
                    needed = self.visibility.needed_from(source)
                    arrived.update(zip(needed, received[source], strict=True))
                del received
            is_last = stage + 1 == len(self.stages)
            coming = None if is_last else self._start_fetch(self.stages[stage + 1])

            chunks = sorted(arrived)
            if chunks:
                keys = torch.cat([arrived[x] for x in chunks], dim=2)
            else:  # no query of this rank sees any of them
                keys = self.kv[0, :, :, :0]
            arrived.clear()
            self.stage, self.chunks = stage, chunks
            yield chunks, keys
            del keys

    def return_gradient(self, gradient: Tensor) -> None:
        """Sends the gradient (b, k, n, e + f) of the keys yielded last to the ranks that have them.
        It travels while the caller computes the next stage."""
        by_chunk: dict[int, Tensor] = {}
        if self.chunks:
            pieces = gradient.split(self.visibility.chunk, dim=2)
            by_chunk = dict(zip(self.chunks, pieces, strict=True))
        if self.stage == 0:
            self.gradient = torch.stack([by_chunk[x] for x in self.visibility.own])
        self._add_returned()
        self._returning = self._start_return(self.stages[self.stage], by_chunk)

    def total_gradient(self) -> Tensor:
        """The gradient of `kv` over all queries of all ranks, once each stage's is on its way."""
        self._add_returned()
        assert self.gradient is not None  # from stage 0
        return self.gradient

    def _start_fetch(self, distances: Sequence[int]) -> AsyncResult | None:
        """Fetches the visible chunks of the ranks at these distances back on the ring, and sends
        its own to those as far ahead."""
        if self.axis is None or not distances:
            return None
        outgoing = [self.kv[:0]] * self.size
        counts = [0] * self.size
        for distance in distances:
            reader = (self.index + distance) % self.size
            source = (self.index - distance) % self.size
            outgoing[reader] = self.kv[self.visibility.needed(reader, self.index)]
            counts[source] = len(self.visibility.needed_from(source))
        return self.axis.start_all_to_all(outgoing, counts)

    def _start_return(
        self, distances: Sequence[int], by_chunk: dict[int, Tensor]
    ) -> AsyncResult | None:
        """The reverse of `_start_fetch`: gradients go back in the dtype of the keys."""
        if self.axis is None or not distances:
            return None
        outgoing = [self.kv[:0]] * self.size
        counts = [0] * self.size
        for distance in distances:
            reader = (self.index + distance) % self.size
            source = (self.index - distance) % self.size
            chunks = [by_chunk[x].to(self.kv.dtype) for x in self.visibility.needed_from(source)]
            if chunks:
                outgoing[source] = torch.stack(chunks)
            own = self.visibility.own[self.visibility.needed(reader, self.index)]
            counts[reader] = len(own)
        return self.axis.start_all_to_all(outgoing, counts)

    def _add_returned(self) -> None:
        """Adds the gradients that other ranks have sent, in the order of the ring after this rank:
        floating-point addition depends on the order, and `ring` receives them one by one."""
        if self._returning is None:
            return
        returned = self._returning.wait()
        self._returning = None
        assert self.gradient is not None  # from stage 0, whose own part is the first addend
        for distance in range(1, self.size):
            reader = (self.index + distance) % self.size
            if len(returned[reader]) > 0:
                self.gradient[self.visibility.needed(reader, self.index)] += returned[reader]


def _context_attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """q (b, h, s, e), k (b, k, s, e) and v (b, k, s, f) of this rank's positions -> the output
    (b, h, s, f) there and its log-sum-exp (b, h, s) over all keys of the sequence."""
    settings = Settings(*arguments)
    visibility = Visibility(q, v, settings)
    exchange = Exchange(_side_by_side(k, v), settings, visibility)
    widths = [k.shape[-1], v.shape[-1]]
    # Blocks merge in float32 or wider, and only the end result is rounded to 16 bits.
    out, lse = _empty_outputs(q, v, torch.promote_types(q.dtype, torch.float32))

    for chunks, kv in exchange.arrivals():
        keys, values = kv.split(widths, dim=-1)  # (b, k, n, e) and (b, k, n, f)
        for part in visibility.parts(chunks, q.device):
            rows, columns = part.rows, part.columns
            block_out, block_lse = kernels.forward_block(
                q[:, :, rows], keys[:, :, columns], values[:, :, columns], part.block
            )
            if not part.is_first:
                block_out, block_lse = kernels.merge_blocks(
                    out[:, :, rows], lse[:, :, rows], block_out, block_lse
                )
            out[:, :, rows] = block_out
            lse[:, :, rows] = block_lse
    if settings.sinks is not None:
        out, lse = kernels.add_sinks(out, lse, settings.sinks)
    return out.to(q.dtype), lse


def _context_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> list[Tensor]:
    """The gradients of this rank's q, k and v, and of sinks and bias if there are any, from that of
    its output (b, h, s, f). `out` and `lse` are those of the forward, over all keys."""
    settings = Settings(*arguments)
    visibility = Visibility(q, v, settings)
    exchange = Exchange(_side_by_side(k, v), settings, visibility)
    widths = [k.shape[-1], v.shape[-1]]
    # Sums of blocks are in float32 or wider, as in the forward.
    dq = torch.zeros_like(q, dtype=lse.dtype)
    sinks = settings.sinks
    bias = settings.bias
    dbias = None if bias is None else torch.zeros_like(bias, dtype=lse.dtype)

    def stage_gradient(chunks: Sequence[int], kv: Tensor) -> Tensor:
        """The gradient of the keys and values of a stage (b, k, n, e + f); adds to those of the
        queries and of the bias."""
        keys, values = kv.split(widths, dim=-1)
        dkv = torch.zeros_like(kv, dtype=lse.dtype)
        dk, dv = dkv.split(widths, dim=-1)
        for part in visibility.parts(chunks, q.device):
            rows, columns = part.rows, part.columns
            block_dq, block_dk, block_dv, *of_bias = kernels.backward_block(
                grad[:, :, rows],
                q[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                out[:, :, rows],
                lse[:, :, rows],
                part.block,
            )
            dq[:, :, rows] += block_dq
            dk[:, :, columns] += block_dk
            dv[:, :, columns] += block_dv
            if dbias is not None:
                assert part.positions is not None
                # Its last dim has all positions of the sequence, of which these keys are some.
                dbias[:, :, rows].index_add_(3, _to(q, part.positions), of_bias[0])
        return dkv

    for chunks, kv in exchange.arrivals():
        exchange.return_gradient(stage_gradient(chunks, kv))
        del kv  # not in memory while the next stage's gradients are computed

    dkv = exchange.total_gradient()  # (2, b, k, m, e + f)
    dkv = dkv.movedim(0, 2).flatten(2, 3).to(q.dtype)  # (b, k, s, e + f)
    dk, dv = dkv.split(widths, dim=-1)
    gradients = [dq.to(q.dtype), dk.contiguous(), dv.contiguous()]
    if sinks is not None:
        gradients.append(kernels.sinks_gradient(grad, out, lse, sinks))
    if dbias is not None:
        assert bias is not None
        gradients.append(dbias.to(bias.dtype))
    return gradients


def _side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """k (b, k, s, e) and v (b, k, s, f) -> (2, b, k, m, e + f): each chunk contiguous, as it is
    sent."""
    return torch.cat([k, v], dim=-1).unflatten(2, (2, -1)).movedim(2, 0).contiguous()


def _to(x: Tensor, positions: Tensor) -> Tensor:
    """Positions on the device of x."""
    return positions.to(x.device, non_blocking=True)


def _empty_outputs(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for an output (b, h, s, f) of this dtype, and for its log-sum-exp (b, h, s)."""
    b, h, s, _ = q.shape
    # Heads are adjacent in memory, as the projection that follows attention needs them.
    out = q.new_empty(b, s, h, v.shape[-1], dtype=dtype).transpose(1, 2)
    lse = q.new_empty(b, h, s, dtype=torch.promote_types(q.dtype, torch.float32))
    return out, lse


# The operators: what they return for tensors without values, and their gradient ------------------


def _output_shapes(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q, v, q.dtype)


def _gradient_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> list[Tensor]:
    settings = Settings(*arguments[2:])  # after `out` and `lse`
    gradients = [torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)]
    if settings.sinks is not None:
        gradients.append(settings.sinks.new_empty(settings.sinks.shape))
    if settings.bias is not None:
        gradients.append(torch.empty_like(settings.bias))
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments = inputs
    out, lse = output
    settings = Settings(*arguments)
    # The two settings that can have a gradient, the last ones.
    ctx.has_sinks = settings.sinks is not None
    ctx.has_bias = settings.bias is not None
    # Autograd has to save the tensors among the settings; all others are kept as they are.
    tensors: list[Tensor | None] = []
    others: list[Any] = []
    for argument in arguments:
        is_tensor = isinstance(argument, Tensor)
        tensors.append(argument if is_tensor else None)
        others.append(None if is_tensor else argument)
    ctx.others = others
    ctx.save_for_backward(q, k, v, out, lse, *tensors)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    arguments = []
    for tensor, other in zip(tensors, ctx.others, strict=True):
        arguments.append(other if tensor is None else tensor)
    gradients = ops.context_attention_backward(grad, q, k, v, out, lse, *arguments)
    dq, dk, dv, *of_sinks_and_bias = gradients

    # The operator returns those of sinks and bias only if there are any; autograd wants an entry
    # for each argument.
    dsinks: Tensor | None = None
    dbias: Tensor | None = None
    if ctx.has_sinks:
        dsinks = of_sinks_and_bias[0]
    if ctx.has_bias:
        dbias = of_sinks_and_bias[-1]
    of_other_settings = [None] * (len(arguments) - 2)
    return dq, dk, dv, *of_other_settings, dsinks, dbias


operator(
    "context_attention",
    _context_attention,
    _output_shapes,
    schema=f"(Tensor q, Tensor k, Tensor v, {SETTINGS}) -> (Tensor, Tensor)",
)
operator(
    "context_attention_backward",
    _context_attention_backward,
    _gradient_shapes,
    schema=f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {SETTINGS})"
    " -> Tensor[]",
)
ops = torch.ops.meshtrain
differentiable("context_attention", _backward, _setup_context)
