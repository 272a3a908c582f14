"""torch's variable-length attention on a CPU: each document separately, by matrix products, in any dtype.

torch has kernels of these operators for GPUs only. This module registers CPU kernels under torch's own operator names,
autograd and shape functions, and refuses arguments that the GPU kernels do not accept.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward


def called() -> None:
    """Called by each forward; tests patch it to count calls."""


def _documents(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, causal: bool, window: list[int]
) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
    """For each document: its tokens, its mask of query-key pairs, and its queries, keys and values, (h, n, e)."""
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert ends.dtype == torch.int32
    assert window[1] == 0
    assert causal == (window[0] == -1)
    bounds = ends.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(q) == len(k) == len(v)
    for start, stop in pairwise(bounds):
        assert start <= stop <= start + longest
        if start < stop:
            place, i = slice(start, stop), torch.arange(stop - start)
            seen = (i[:, None] >= i) & (i[:, None] - i <= (stop if causal else window[0]))
            keys, values = (x[place].transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (k, v))
            yield place, seen, [q[place].transpose(0, 1), keys, values]


def _probabilities(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


@_varlen_attn.register_kernel("cpu")
def forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, ends_k: Tensor, longest: int, longest_k: int, causal: bool,
    scale: float, window: list[int], enable_gqa: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    called()
    assert longest == longest_k
    assert torch.equal(ends, ends_k)
    assert enable_gqa or q.shape[1] == k.shape[1]
    y, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for place, seen, (queries, keys, values) in _documents(q, k, v, ends, longest, causal, window):
        p, lse[:, place] = _probabilities(queries, keys, seen, scale)
        y[place] = (p @ values).transpose(0, 1)
    return y, lse, torch.zeros(2, dtype=torch.uint64)


@_varlen_attn_backward.register_kernel("cpu")
def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, ends: Tensor, ends_k: Tensor, longest: int,
    longest_k: int, causal: bool, state: Tensor, scale: float, window: list[int]
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for place, seen, (queries, keys, values) in _documents(q, k, v, ends, longest, causal, window):
        p, _ = _probabilities(queries, keys, seen, scale)
        dy = grad[place].transpose(0, 1)
        dp = dy @ values.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        for total, own in zip(grads, (ds @ keys, ds.transpose(1, 2) @ queries, p.transpose(1, 2) @ dy), strict=True):
            total[place] = own.unflatten(0, (total.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(grads)
