"""Attention as models call it: one function that picks the kernel, and one record of what it must know of the tokens.

The record travels through a model as any argument does, so recomputation and compilation need to know nothing of it.
Another kind of attention (over parts of a sequence, with a cache) is a subclass of it with its own `attend`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(eq=False, repr=False)
class AttentionContext:
    """What attention must know about the tokens of a microbatch."""

    documents: Tensor | None = None  # (b, s), the document of each token; none attends across; None: one a row
    # (b s + 1) int32, for kernels of variable length: see `cumulative_lengths`. None: no documents, or not counted.
    lengths: Tensor | None = None
    part: Tensor | None = None  # (s of this rank), the positions in the sequence that this rank has; None: all
    length: int = 0  # tokens of the whole sequence, without padding, where this rank has a part; 0: those that it has
    cache: Any = None  # keys and values of earlier tokens, in generation
    layer: int | None = None  # the number of the layer that calls, where there is a cache; see `at`
    mask: Tensor | None = None  # (b, 1, s, s) bool, that of the documents: made once, shared by the layers
    windows: dict[int, Tensor] = field(default_factory=dict)  # window -> mask, the same with a sliding window

    @classmethod
    def of(cls, documents: "AttentionContext | Tensor | None") -> "AttentionContext":
        """The record for a forward, with its mask: of a batch's record, of a plain tensor (b, s), or of nothing.

        A model calls it outside of its blocks, so that no block has to make a mask.
        """
        context = documents if isinstance(documents, AttentionContext) else cls(documents)
        if context.mask is None and context.documents is not None and context.part is None:
            context.mask = document_mask(context.documents)
        return context

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the documents: what the sizes of activations depend on."""
        return () if self.documents is None else tuple(self.documents.shape)

    def at(self, layer: int) -> "AttentionContext":
        """The same for one layer. A copy, because a block may run again in backward, when a counter has gone on."""
        return self if self.cache is None else replace(self, layer=layer)

    def apply(self, function: Callable[[Tensor], Tensor]) -> "AttentionContext":
        """The same of other tensors, for instance of those on a device."""
        tensors = (None if x is None else function(x) for x in (self.documents, self.lengths, self.part, self.mask))
        documents, lengths, part, mask = tensors
        return replace(self, documents=documents, lengths=lengths, part=part, mask=mask, windows={})

    def to(self, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False) -> Any:
        """On a device; `dtype` is for floating-point tensors, and there is none."""
        return self.apply(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "AttentionContext":
        return self.apply(Tensor.pin_memory)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, soft_cap: float | None
    ) -> Tensor:
        if self.part is not None or self.cache is not None:
            raise NotImplementedError("attention over parts of a sequence, or with a cache, is not built")
        keep = not torch.compiler.is_compiling()  # in a graph it would be a guard that fails at the next layer
        mask = self.mask
        if mask is None and self.documents is not None:
            mask = document_mask(self.documents)
            if keep:
                self.mask = mask
        if window is not None and window < k.shape[2]:
            mask = self.windows[window] if keep and window in self.windows else _windowed(mask, window, k)
            if keep:
                self.windows[window] = mask
        return _attend(q, k, v, mask, scale, soft_cap)

    def __repr__(self) -> str:
        return f"AttentionContext{self.shape}"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: AttentionContext | Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal scaled dot-product attention with grouped key/value heads.

    Args:
        q: (b, h, s, e).
        k: (b, k, s, e); h is a multiple of k, and each key/value head serves h/k query heads.
        v: (b, k, s, f), of whatever width f.
        context: None for one document a row; a tensor is a mask that broadcasts to (b, h, s, s), such as
            `document_mask` gives: True where a query sees a key.
        scale: of the scores; None: 1 / sqrt(e).
        window: a token sees itself and the window - 1 tokens before it (https://arxiv.org/abs/2004.05150); None: all.
        soft_cap: scores x become soft_cap * tanh(x / soft_cap) (Gemma 2, https://arxiv.org/abs/2408.00118, section 2).
            No fused kernel of torch's does that: all scores (b, h, s, s) are in memory.

    Returns:
        (b, h, s, f).
    """
    if isinstance(context, AttentionContext):
        return context.attend(q, k, v, scale, window, soft_cap)
    mask = context if window is None or window >= k.shape[2] else _windowed(context, window, k)
    return _attend(q, k, v, mask, scale, soft_cap)


def _windowed(mask: Tensor | None, window: int, k: Tensor) -> Tensor:
    near = sliding_window(k.shape[2], window, k.device)
    if mask is None:
        return near
    return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, -torch.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, cap: float | None) -> Tensor:
    heads, kv_heads = q.shape[1], k.shape[1]
    widths = q.shape[-1], v.shape[-1]
    if cap is not None or wants_repeated(q.device.type, q.dtype, mask is not None, heads, kv_heads, *widths):
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    if cap is not None:
        return _soft_capped(q, k, v, mask, scale, cap)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=heads != k.shape[1]
    )


def _soft_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, soft_cap: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    scores = soft_cap * torch.tanh(scores * ((q.shape[-1] ** -0.5 if scale is None else scale) / soft_cap))
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).to(v.dtype) @ v


def wants_repeated(
    device: str, dtype: torch.dtype, masked: bool, heads: int, kv_heads: int, width: int, value_width: int | None = None
) -> bool:
    """Whether each key/value head is to be repeated for all of its query heads, so that a fused kernel takes them.

    On GPUs torch's flash attention takes grouped heads, but only in 16 bits, without a mask, and up to a width of 256
    that values share. Its memory-efficient kernel takes float32, masks and other widths of values, but grouped heads
    only in the newest versions. Where no kernel does, torch computes with all scores in memory, (b, h, s, s). In
    float64 it always does.
    """
    flash = dtype in (torch.float16, torch.bfloat16) and not masked and width <= 256 and value_width in (None, width)
    return device == "cuda" and heads != kv_heads and dtype != torch.float64 and not flash


def document_mask(documents: Tensor) -> Tensor:
    """Who sees whom when no token attends across documents: documents (b, s) -> bool (b, 1, s, s), True where seen."""
    s = documents.shape[1]
    causal = torch.ones(s, s, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal


def sliding_window(s: int, window: int, device: torch.device) -> Tensor:
    """Who sees whom when a token sees itself and the window - 1 before it: bool (s, s), True where seen."""
    return torch.ones(s, s, dtype=torch.bool, device=device).tril().triu(1 - window)


def cumulative_lengths(documents: Tensor) -> Tensor:
    """Where the documents of (b, s) begin in its b s tokens laid end to end, and b s: (b s + 1) int32.

    Rows end documents. There are as many numbers as there could be documents, so that a compiled kernel sees one shape;
    those behind the last are b s too, the ends of documents without tokens. On the CPU nothing waits for a device.
    """
    begins = torch.ones(documents.shape, dtype=torch.bool, device=documents.device)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts, total = begins.flatten().nonzero().flatten(), documents.numel()
    return F.pad(starts.int(), (0, total + 1 - len(starts)), value=total)
