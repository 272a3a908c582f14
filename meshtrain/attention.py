"""Causal attention as models call it: one small function, so that another kind of attention can take its place."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal scaled dot-product attention with grouped key/value heads.

    Args:
        q: (b, h, s, e).
        k, v: (b, k, s, e); h is a multiple of k, and each key/value head serves h/k query heads.
        mask: None for causal attention over the whole sequence, or what `document_mask` gives.

    Returns:
        (b, h, s, e).
    """
    if wants_repeated(q.device.type, q.dtype, mask is not None, q.shape[1], k.shape[1], q.shape[-1]):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def wants_repeated(device: str, dtype: torch.dtype, masked: bool, heads: int, kv_heads: int, width: int) -> bool:
    """Whether each key/value head is to be repeated for all of its query heads, so that a fused kernel takes them.

    On GPUs torch's flash attention takes grouped heads, but only in 16 bits, without a mask, and up to a width of 256.
    Its memory-efficient kernel takes float32 and masks, but grouped heads only in the newest versions. Where no kernel
    does, torch computes with all scores in memory, (b, h, s, s). In float64 it always does.
    """
    flash = dtype in (torch.float16, torch.bfloat16) and not masked and width <= 256
    return device == "cuda" and heads != kv_heads and dtype != torch.float64 and not flash


def document_mask(documents: Tensor) -> Tensor:
    """Who sees whom when no token attends across documents: documents (b, s) -> bool (b, 1, s, s), True where seen."""
    s = documents.shape[1]
    causal = torch.ones(s, s, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal
