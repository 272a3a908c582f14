"""torch's variable-length attention on a CPU: by torch's attention with a mask of the documents, in
any dtype.

torch has kernels of these operators for GPUs only. This module registers CPU kernels under torch's
own operator names, autograd and shape functions, and refuses arguments that the GPU kernels do not
accept.
"""

import inspect
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward, varlen_attn

aten = torch.ops.aten
HAS_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.12 on
# for grouped heads, too
KERNEL = partial(varlen_attn, enable_gqa=True) if HAS_FLAG else varlen_attn


def called() -> None:
    """Called by each forward; tests patch it to count calls."""


def _mask(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, causal: bool, window: list[int]
) -> Tensor:
    """(n, n), 0 where a query sees a key and -inf elsewhere."""
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert len(q) == len(k) == len(v) == ends[-1]
    assert ends.dtype == torch.int32
    assert ends[0] == 0
    assert window[1] == 0
    assert causal == (window[0] == -1)
    lengths = ends.diff()
    assert 0 <= lengths.min() <= lengths.max() <= longest
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    token = torch.arange(len(q))
    distance = token[:, None] - token
    near = (distance >= 0) & (distance <= (len(q) if causal else window[0]))
    seen = near & (document[:, None] == document)
    return torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)


def _batched(*tensors: Tensor) -> list[Tensor]:
    """(n, h, e) -> (1, h, n, e)"""
    return [x.transpose(0, 1)[None] for x in tensors]


@_varlen_attn.register_kernel("cpu")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    ends_k: Tensor,
    longest: int,
    longest_k: int,
    causal: bool,
    scale: float,
    window: list[int],
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    called()
    assert longest == longest_k
    assert torch.equal(ends, ends_k)
    assert enable_gqa or not HAS_FLAG or q.shape[1] == k.shape[1]
    mask = _mask(q, k, v, ends, longest, causal, window)
    y, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *_batched(q, k, v), attn_mask=mask, scale=scale
    )
    return y[0].transpose(0, 1).contiguous(), lse[0].float(), torch.zeros(2, dtype=torch.uint64)


@_varlen_attn_backward.register_kernel("cpu")
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    ends: Tensor,
    ends_k: Tensor,
    longest: int,
    longest_k: int,
    causal: bool,
    state: Tensor,
    scale: float,
    window: list[int],
) -> tuple[Tensor, ...]:
    mask = _mask(q, k, v, ends, longest, causal, window)
    inputs = _batched(q, k, v)
    results = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, attn_mask=mask, scale=scale)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_batched(grad), *inputs, *results, 0.0, False, attn_mask=mask, scale=scale
    )
    return tuple(x[0].transpose(0, 1).contiguous() for x in grads)
