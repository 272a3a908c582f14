"""Attention of this rank's queries over keys and values that lie on all ranks of `cp`, as operators of torch.

Nothing is sent that nobody sees: which chunks a rank needs follows from the documents, which every rank has. Keys and
values come straight from whose they are, and their gradients go straight back and are added in a fixed order, so that
sums have the same bits every time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshtrain.data.sequence import sees_chunk
from meshtrain.parallel.collectives import AsyncResult, axis_group_by_name, differentiable, operator
from meshtrain.parallel.context.kernels import (
    Block,
    backward_block,
    choose_kernel,
    forward_block,
    merge_blocks,
    segments_of,
)


class _Part(NamedTuple):
    """Queries of this rank and keys that they look at together."""

    rows: slice  # the queries
    first: bool  # whether these are the first keys of these queries
    xs: Sequence[int]  # the chunks of keys
    skip: int  # where in the first of these the keys begin
    kv: Tensor  # keys beside values
    block: Block


class Exchange:
    """The keys and values that this rank's queries see, as they come, and the way back of their gradients.

    Chunks are numbered along the sequence. What is sent of one is (b, k, m, e + f): keys beside values.
    """

    def __init__(self, q: Tensor, v: Tensor, documents: Tensor | None, spans: Tensor, *settings: Any) -> None:
        heads, ring, method, scale, window, soft_cap = settings
        self.axis = axis_group_by_name(ring) if ring else None
        self.size, self.index = (self.axis.size, self.axis.index) if self.axis is not None else (1, 0)
        self.own: Sequence[int] = (self.index, 2 * self.size - 1 - self.index)
        self.chunk = q.shape[2] // 2
        length = 2 * self.size * self.chunk
        self.window = None if window is None or window >= length else window
        self.look = Block(scale, soft_cap, heads=heads)
        self.lower_right = choose_kernel(q, v, soft_cap, "all").lower_right
        # Where neighbours have put their chunks together, a chunk begins with that of the first and ends with the last.
        u = spans.shape[1] // (2 * self.size)
        self.first, self.last = spans[0, ::u].tolist(), spans[1, u - 1 :: u].tolist()
        if self.window is not None:
            self.first = [max(visible, y * self.chunk - self.window + 1) for y, visible in enumerate(self.first)]
        self.batch, self.documents, self.segmented = len(q), documents, False
        if documents is not None or self.window is not None:
            self.documents = documents if documents is not None else torch.zeros(1, length, dtype=torch.int64)
            ascending = bool((self.documents.diff(dim=1) >= 0).all())
            self.segmented = ascending and choose_kernel(q, v, soft_cap, "documents").segmented
        # How far down the ring the ranks are whose keys come together.
        away = range(1, self.size)
        self.stages = [[], *([d] for d in away)] if method == "ring" else [list(away)]
        self.gradients: dict[int, Tensor] = {}  # of the chunks that this rank has seen
        self.going_home: AsyncResult | None = None

    def parts(self, kv: Tensor, backward: bool = False) -> Iterator[_Part]:
        """What to compute, in turn. In backward the gradients of what has come leave when the next is asked for."""
        own, coming = dict(zip(self.own, kv, strict=True)), self._start(kv, self.stages[0])
        for stage, away in enumerate(self.stages):
            received = coming.wait() if coming is not None else []
            pairs = ((self._visible_of(j), chunks) for j, chunks in enumerate(received) if len(chunks) > 0)
            chunks = {x: chunk for xs, arrived in pairs for x, chunk in zip(xs, arrived, strict=True)}
            chunks |= own if stage == 0 else {}
            if stage + 1 < len(self.stages):
                coming = self._start(kv, self.stages[stage + 1])
            for ys, xs in self._pairs(sorted(chunks)):
                rows = slice(self.own.index(ys[0]) * self.chunk, (self.own.index(ys[-1]) + 1) * self.chunk)
                skip = max(0, self.first[ys[0]] - xs[0] * self.chunk)
                keys = torch.cat([chunks[x] for x in xs], 2)[:, :, skip:]
                yield _Part(rows, xs[-1] == ys[-1], xs, skip, keys, self._block(ys, xs, skip, kv.device))
            if backward:
                self._send_home(kv, away)

    def _start(self, kv: Tensor, away: Sequence[int], home: dict[int, Tensor] | None = None) -> AsyncResult | None:
        """Fetches the chunks of the ranks so far down the ring, or sends home their gradients."""
        if self.axis is None or not away:
            return None
        parts, sizes = [kv[:0]] * self.size, [0] * self.size
        for d in away:
            reader, source = (self.index + d) % self.size, (self.index - d) % self.size
            if home is None:
                parts[reader], sizes[source] = kv[self._halves(reader, self.index)], len(self._visible_of(source))
            else:
                parts[source] = home.get(source, kv[:0])
                sizes[reader] = len(range(2)[self._halves(reader, self.index)])
        return self.axis.start_all_to_all(parts, sizes)

    def _halves(self, reader: int, source: int) -> slice:
        """Which of its two chunks a rank sends another."""
        both = (source, 2 * self.size - 1 - source)
        halves = [n for n, x in enumerate(both) if sees_chunk(self.first, self.chunk, reader, x) and source != reader]
        return slice(halves[0], halves[-1] + 1) if halves else slice(0, 0)

    def _visible_of(self, source: int) -> Sequence[int]:
        """The chunks of another rank that this one's queries see."""
        return [source, 2 * self.size - 1 - source][self._halves(self.index, source)]

    def _pairs(self, chunks: list[int]) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Chunks of queries, and the chunks of keys that they look at together."""
        if chunks == [*self.own] and not self._is_masked(self.own, self.own):
            return [(self.own, self.own)]  # causal, because both ascend
        looks = [[x for x in chunks if x <= y and self.first[y] < (x + 1) * self.chunk] for y in self.own]
        if looks[0] == looks[1]:
            return [(self.own, looks[0])] if looks[0] else []
        pairs: list[tuple[Sequence[int], Sequence[int]]] = []
        for y, xs in zip(self.own, looks, strict=True):
            is_split = len(xs) > 1 and xs[-1] == y and not self.lower_right and not self._is_masked((y,), xs)
            pairs += [((y,), part) for part in ((xs[-1:], xs[:-1]) if is_split else (xs,)) if part]
        return pairs

    def _is_masked(self, ys: Sequence[int], xs: Sequence[int]) -> bool:
        """Whether some query of a block does not see all of its keys up to itself."""
        begin = max(self.first[ys[0]], xs[0] * self.chunk)
        all_visible = all(self.last[y] <= self.first[y] <= begin for y in ys)
        return self.window is not None or (self.documents is not None and not all_visible)

    def _block(self, ys: Sequence[int], xs: Sequence[int], skip: int, device: torch.device) -> Block:
        """How a block's queries look at its keys."""
        diagonal = xs[-1] == ys[-1]
        if not self._is_masked(ys, xs):
            return replace(self.look, causal=diagonal)
        assert self.documents is not None
        queries, keys = (
            torch.cat([torch.arange(n * self.chunk, (n + 1) * self.chunk) for n in chunks]) for chunks in (ys, xs)
        )
        keys = keys[skip:]
        adjacent = xs[-1] - xs[0] == len(xs) - 1  # else a window would count over a gap
        if self.segmented and (self.window is None or (diagonal and adjacent)):
            segments = segments_of(*(self.documents[:, x].expand(self.batch, -1) for x in (queries, keys)))
            return replace(self.look, causal=diagonal, segments=segments, window=self.window)
        documents = self.documents.to(device, non_blocking=True)
        queries, keys = (x.to(device, non_blocking=True) for x in (queries, keys))
        mask = (queries[:, None] >= keys) & (documents[:, queries, None] == documents[:, None, keys])
        if self.window is not None:
            mask &= queries[:, None] < keys + self.window
        return replace(self.look, mask=mask[:, None])

    def add_gradient(self, part: _Part, dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients of a block's keys and values to those of its chunks, at least in float32."""
        e, wide = dk.shape[-1], torch.promote_types(dk.dtype, torch.float32)
        for n, x in enumerate(part.xs):
            begin, end = max(0, n * self.chunk - part.skip), (n + 1) * self.chunk - part.skip
            if x not in self.gradients:
                shape = (*dk.shape[:2], self.chunk, e + dv.shape[-1])
                self.gradients[x] = dk.new_zeros(shape, dtype=wide)
            rows = self.gradients[x][:, :, self.chunk - (end - begin) :]
            rows[..., :e] += dk[:, :, begin:end]
            rows[..., e:] += dv[:, :, begin:end]

    def _send_home(self, kv: Tensor, away: Sequence[int]) -> None:
        """Starts the way of the gradients of a stage's chunks to whose they are, in the type of `kv`."""
        self._add_arrived()
        sources = {j: self._visible_of(j) for j in ((self.index - d) % self.size for d in away)}
        home = {j: torch.stack([self.gradients.pop(x) for x in xs]).to(kv.dtype) for j, xs in sources.items() if xs}
        self.going_home = self._start(kv, away, home)

    def _add_arrived(self) -> None:
        """Adds to this rank's own gradients those that others have sent: of the ranks behind it, around the ring."""
        arrived: list[Any] = self.going_home.wait() if self.going_home is not None else []
        self.going_home = None
        for j in ((self.index + d) % self.size for d in range(1, self.size) if arrived):
            for x, gradient in zip(self.own[self._halves(j, self.index)], arrived[j], strict=False):
                self.gradients[x] += gradient

    def gradient(self) -> Tensor:
        """That of this rank's keys beside its values: (2, b, k, m, e + f), at least in float32."""
        self._add_arrived()
        return torch.stack([self.gradients.pop(x) for x in self.own])


def _context_attention(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """The output (b, h, s, f) and its log-sum-exp (b, h, s) of this rank's queries."""
    (out, lse), widths = _outputs(q, v, torch.promote_types(q.dtype, torch.float32)), [k.shape[-1], v.shape[-1]]
    for part in Exchange(q, v, *settings).parts(_side_by_side(k, v)):
        keys, values = part.kv.split(widths, -1)
        more, more_lse = forward_block(q[:, :, part.rows], keys, values, part.block)
        if not part.first:
            more, more_lse = merge_blocks(out[:, :, part.rows], lse[:, :, part.rows], more, more_lse)
        out[:, :, part.rows], lse[:, :, part.rows] = more, more_lse
    return out.to(q.dtype), lse


def _context_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *settings: Any
) -> list[Tensor]:
    """The gradients of this rank's q, k and v. Keys and values of others are fetched again."""
    exchange, widths = Exchange(q, v, *settings), [k.shape[-1], v.shape[-1]]
    dq = torch.zeros_like(q, dtype=lse.dtype)
    for part in exchange.parts(_side_by_side(k, v), backward=True):
        dy, x, y, sums = (tensor[:, :, part.rows] for tensor in (grad, q, out, lse))
        keys, values = part.kv.split(widths, -1)
        dx, dk, dv = backward_block(dy, x, keys, values, y, sums, part.block)
        dq[:, :, part.rows] += dx
        exchange.add_gradient(part, dk, dv)
    dkv = exchange.gradient().movedim(0, 2).flatten(2, 3).to(q.dtype)
    return [dq.to(q.dtype), *(x.contiguous() for x in dkv.split(widths, -1))]


def _side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """(2, b, k, m, e + f): of each of the two chunks, keys beside values."""
    return torch.cat([k, v], -1).unflatten(2, (2, -1)).movedim(2, 0).contiguous()


def _outputs(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for an output, heads beside each other in memory as the next layer wants them, and for its log-sum-exp."""
    b, h, s, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(b, s, h, v.shape[-1], dtype=dtype).transpose(1, 2), q.new_empty(b, h, s, dtype=wide)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, spans, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, documents, spans)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *ops.context_attention_backward(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 8


SETTINGS = (
    "Tensor? documents, Tensor spans, int[] heads, str ring, str method, float scale, int? window, float? soft_cap"
)
operator(
    "context_attention",
    _context_attention,
    lambda q, k, v, *_: _outputs(q, v, q.dtype),
    f"(Tensor q, Tensor k, Tensor v, {SETTINGS}) -> (Tensor, Tensor)",
)
operator(
    "context_attention_backward",
    _context_attention_backward,
    lambda grad, q, k, v, *_: [torch.empty_like(q), *(x.new_empty(x.shape) for x in (k, v))],
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {SETTINGS}) -> Tensor[]",
)
ops = torch.ops.meshtrain
differentiable("context_attention", _backward, _setup_context)
