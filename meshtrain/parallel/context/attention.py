"""Attention of this rank's queries over keys and values that are split over all ranks of `cp`, as
torch operators.

Only visible chunks are sent: the chunks that a rank needs follow from the documents, which every
rank has. Keys and values come directly from their ranks, and gradients go directly back, summed in
a fixed order (bitwise reproducible).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshtrain.data.sequence import sees_chunk
from meshtrain.parallel.collectives import AsyncResult, axis_group_by_name, differentiable, operator
from meshtrain.parallel.context import kernels
from meshtrain.parallel.context.kernels import Block

Part = tuple[slice, bool, Tensor, Block]


class Exchange:
    """Receives the keys and values that this rank's queries see, and returns their gradients.

    Chunks are numbered along the sequence. A chunk is sent as (b, k, m, e + f): keys concatenated
    with values.
    """

    gradient: Tensor  # of this rank's keys and values, (2, b, k, m, e + f), in float32 or wider
    total: Tensor  # of the keys and values of the current block

    def __init__(
        self, q: Tensor, v: Tensor, documents: Tensor | None, spans: Tensor, *settings: Any
    ) -> None:
        heads, ring, method, scale, window, soft_cap = settings
        self.axis = axis_group_by_name(ring) if ring else None
        self.size, self.index = (
            (self.axis.size, self.axis.index) if self.axis is not None else (1, 0)
        )
        self.own: Sequence[int] = (self.index, 2 * self.size - 1 - self.index)
        self.chunk = q.shape[2] // 2
        length = 2 * self.size * self.chunk
        self.window = None if window is None or window >= length else window
        self.look = Block(scale, soft_cap, heads=heads)
        self.lower_right = kernels.choose_kernel(q, v, soft_cap, "all").lower_right
        # If u neighbours have exchanged heads, a chunk here consists of u chunks: it spans from the
        # first to the last.
        u = spans.shape[1] // (2 * self.size)
        self.first, self.last = spans[0, ::u].tolist(), spans[1, u - 1 :: u].tolist()
        self.batch, self.documents, ascend = len(q), documents, self.last[-1] < length
        if self.window is not None:
            self.first = [
                max(visible, y * self.chunk - self.window + 1)
                for y, visible in enumerate(self.first)
            ]
            self.documents = (
                torch.zeros(1, length, dtype=torch.int64) if documents is None else documents
            )
        masks = self.documents is not None
        self.segmented = (
            masks and ascend and kernels.choose_kernel(q, v, soft_cap, "documents").segmented
        )
        # Distances down the ring of the ranks whose keys arrive together.
        away = range(1, self.size)
        self.stages = [[], *([d] for d in away)] if method == "ring" else [list(away)]
        self.going_home: AsyncResult | None = None

    def parts(self, kv: Tensor, backward: bool = False) -> Iterator[Part]:
        """The blocks to compute, in turn: rows of queries, whether these are the first keys of the
        rows, keys and values concatenated, and how queries see them. In backward the caller adds
        their gradient to `total`; gradients of keys that arrived together are sent when the next
        part is requested."""
        arrived, coming = dict(zip(self.own, kv, strict=True)), self._start(kv, self.stages[0])
        wide = torch.promote_types(kv.dtype, torch.float32)
        for away, following in zip(self.stages, (*self.stages[1:], []), strict=True):
            received = coming.wait() if coming is not None else []
            for j in ((self.index - d) % self.size for d in away):
                arrived |= zip(self._visible_of(j), received[j], strict=True)
            coming, xs = self._start(kv, following), sorted(arrived)
            keys = torch.cat([arrived[x] for x in xs], 2) if xs else kv[0, :, :, :0]
            arrived, received = {}, []
            gradient = torch.zeros_like(keys, dtype=wide) if backward else keys[:0]
            for ys, visible in self._pairs(xs):
                begin, end = (
                    self.own.index(ys[0]) * self.chunk,
                    (xs.index(visible[-1]) + 1) * self.chunk,
                )
                skip = max(0, self.first[ys[0]] - visible[0] * self.chunk)
                rows = slice(begin, begin + len(ys) * self.chunk)
                columns = slice(end - len(visible) * self.chunk + skip, end)
                block = self._block(ys, visible, skip, kv.device)
                self.total = gradient[:, :, columns]
                yield rows, visible[-1] == ys[-1], keys[:, :, columns], block
            if backward:
                gradients = dict(zip(xs, gradient.split(self.chunk, 2), strict=len(xs) > 0))
                if self.own[0] in gradients:
                    self.gradient = torch.stack([gradients[x] for x in self.own])
                self._add_arrived()
                self.going_home = self._start(kv, away, gradients)
                self.total, gradients = keys[:0], {}
            del keys, gradient
        self._add_arrived()

    def _start(
        self, kv: Tensor, away: Sequence[int], home: dict[int, Tensor] | None = None
    ) -> AsyncResult | None:
        """Fetches the chunks of the ranks at these distances, or sends back their gradients in the
        dtype of `kv`."""
        if self.axis is None or not away:
            return None
        parts, sizes = [kv[:0]] * self.size, [0] * self.size
        for d in away:
            reader, source = (self.index + d) % self.size, (self.index - d) % self.size
            if home is None:
                parts[reader], sizes[source] = (
                    kv[self._halves(reader, self.index)],
                    len(self._visible_of(source)),
                )
            else:
                chunks = [home[x].to(kv.dtype) for x in self._visible_of(source)]
                parts[source] = torch.stack(chunks) if chunks else kv[:0]
                sizes[reader] = len(self.own[self._halves(reader, self.index)])
        return self.axis.start_all_to_all(parts, sizes)

    def _halves(self, reader: int, source: int) -> slice:
        """The slice of its two chunks that `source` sends to `reader`."""
        both = (source, 2 * self.size - 1 - source)
        halves = [n for n, x in enumerate(both) if sees_chunk(self.first, self.chunk, reader, x)]
        return slice(halves[0], halves[-1] + 1) if halves else slice(0, 0)

    def _visible_of(self, source: int) -> Sequence[int]:
        """The chunks of rank `source` that this rank's queries see."""
        return [source, 2 * self.size - 1 - source][self._halves(self.index, source)]

    def _pairs(self, chunks: list[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Chunks of queries, and the chunks of keys that they attend to in one block."""
        looks = [
            [x for x in chunks if x <= y and self.first[y] < (x + 1) * self.chunk] for y in self.own
        ]
        if chunks == [*self.own] and not self._is_masked(self.own, self.own):
            yield self.own, self.own  # causal, because both are in ascending order
        elif looks[0] == looks[1]:
            yield from [(self.own, looks[0])] if looks[0] else []
        else:
            for y, xs in zip(self.own, looks, strict=True):
                if (
                    len(xs) > 1
                    and xs[-1] == y
                    and not self.lower_right
                    and not self._is_masked((y,), xs)
                ):
                    yield (y,), [xs.pop()]
                if xs:
                    yield (y,), xs

    def _is_masked(self, ys: Sequence[int], xs: Sequence[int]) -> bool:
        """Whether some query of a block does not see all of the block's keys up to itself."""
        begin = max(self.first[ys[0]], xs[0] * self.chunk)
        return self.window is not None or not all(
            self.last[y] <= self.first[y] <= begin for y in ys
        )

    def _block(
        self, ys: Sequence[int], xs: Sequence[int], skip: int, device: torch.device
    ) -> Block:
        """How a block's queries see its keys."""
        diagonal = xs[-1] == ys[-1]
        if not self._is_masked(ys, xs):
            return replace(self.look, causal=diagonal)
        assert self.documents is not None
        queries, keys = (
            torch.cat([torch.arange(n * self.chunk, (n + 1) * self.chunk) for n in chunks])
            for chunks in (ys, xs)
        )
        keys = keys[skip:]
        adjacent = xs[-1] - xs[0] == len(xs) - 1  # otherwise a window would span a gap
        if self.segmented and (self.window is None or (diagonal and adjacent)):
            segments = kernels.segments_of(
                *(self.documents[:, x].expand(self.batch, -1) for x in (queries, keys))
            )
            return replace(self.look, causal=diagonal, segments=segments, window=self.window)
        documents, queries, keys = (
            x.to(device, non_blocking=True) for x in (self.documents, queries, keys)
        )
        mask = (queries[:, None] >= keys) & (
            documents[:, queries, None] == documents[:, None, keys]
        )
        if self.window is not None:
            mask &= queries[:, None] < keys + self.window
        return replace(self.look, mask=mask[:, None])

    def _add_arrived(self) -> None:
        """Adds the gradients that other ranks have sent to this rank's own, in ring order after
        this rank."""
        arrived = self.going_home.wait() if self.going_home is not None else []
        self.going_home = None
        for j in ((self.index + d) % self.size for d in range(1, self.size) if arrived):
            if len(arrived[j]) > 0:
                self.gradient[self._halves(j, self.index)] += arrived[j]


def _context_attention(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """The output (b, h, s, f) and its log-sum-exp (b, h, s) of this rank's queries."""
    (out, lse), widths = (
        _outputs(q, v, torch.promote_types(q.dtype, torch.float32)),
        [k.shape[-1], v.shape[-1]],
    )
    for rows, is_first, kv, block in Exchange(q, v, *settings).parts(_side_by_side(k, v)):
        keys, values = kv.split(widths, -1)
        more, more_lse = kernels.forward_block(q[:, :, rows], keys, values, block)
        if not is_first:
            more, more_lse = kernels.merge_blocks(out[:, :, rows], lse[:, :, rows], more, more_lse)
        out[:, :, rows], lse[:, :, rows] = more, more_lse
    return out.to(q.dtype), lse


def _context_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *settings: Any
) -> list[Tensor]:
    """The gradients of this rank's q, k and v. Keys and values of other ranks are fetched again."""
    exchange, widths = Exchange(q, v, *settings), [k.shape[-1], v.shape[-1]]
    dq = torch.zeros_like(q, dtype=lse.dtype)
    for rows, _, kv, block in exchange.parts(_side_by_side(k, v), backward=True):
        dy, x, y, sums = (tensor[:, :, rows] for tensor in (grad, q, out, lse))
        keys, values = kv.split(widths, -1)
        dx, dk, dv = kernels.backward_block(dy, x, keys, values, y, sums, block)
        dq[:, :, rows] += dx
        exchange.total[..., : widths[0]] += dk
        exchange.total[..., widths[0] :] += dv
    dkv = exchange.gradient.movedim(0, 2).flatten(2, 3).to(q.dtype)
    return [dq.to(q.dtype), *(x.contiguous() for x in dkv.split(widths, -1))]


def _side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """(2, b, k, m, e + f): for each of the two chunks, keys concatenated with values."""
    return torch.cat([k, v], -1).unflatten(2, (2, -1)).movedim(2, 0).contiguous()


def _outputs(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Empty tensors for an output, with heads adjacent in memory as the next layer needs them, and
    its log-sum-exp."""
    b, h, s, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(b, s, h, v.shape[-1], dtype=dtype).transpose(1, 2), q.new_empty(
        b, h, s, dtype=wide
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, spans, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, documents, spans)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *ops.context_attention_backward(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 8


SETTINGS = (
    "Tensor? documents, Tensor spans, int[] heads, str ring, str method, float scale, int? window, "
    "float? soft_cap"
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
