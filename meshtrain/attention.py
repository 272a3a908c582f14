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
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def document_mask(documents: Tensor) -> Tensor:
    """Who sees whom when no token attends across documents: documents (b, s) -> bool (b, 1, s, s), True where seen."""
    s = documents.shape[1]
    causal = torch.ones(s, s, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal
