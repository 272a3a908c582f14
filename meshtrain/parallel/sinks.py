"""Attention sinks (gpt-oss, https://arxiv.org/abs/2508.10925): a learned logit for each head that
takes probability from the keys and gives no value, by fused kernels.

No kernel of torch has them. But every one computes the log-sum-exp l of a query's scores, and with
it the output o over the keys alone becomes that with the sink:

    o' = exp(l - l') o,    l' = log(exp l + exp sink)

The kernels' backward takes l' and o' as they are: with them its probabilities exp(x - l') are those
beside the sink, as those of a block are beside other blocks in ring attention
(`context/attention.py`). Over `cp` that operator adds the sinks itself.
"""

from typing import Any

import torch
from torch import Tensor

from meshtrain.parallel.collectives import differentiable, operator
from meshtrain.parallel.context import kernels
from meshtrain.parallel.context.kernels import Block

SETTINGS = "Tensor? mask, Tensor? ends, float scale, int? window"


def attend_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    mask: Tensor | None,
    ends: Tensor | None,
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention with sinks (h,): q (b, h, s, e), k (b, k, t, e) and v (b, k, t, f) -> (b, h,
    s, f).

    Args:
        mask: bool, (s, t) or (b or 1, h or 1, s, t), True where a query sees a key: everything that
            it sees, causality and window included; None: the keys up to itself.
        ends: (documents + 1,) int32, on the device: the rows hold packed documents, as in
            `meshtrain.attention.cumulative_lengths`. Instead of a mask.
        window: of packed documents.
    """
    if mask is not None and mask.dim() == 2:
        mask = mask[None, None]
    if window is not None and window >= k.shape[2]:
        window = None
    return ops.sink_attention(q, k, v, sinks, mask, ends, scale, window)[0]


def _block(q: Tensor, v: Tensor, mask: Tensor | None, ends: Tensor | None, *rest: Any) -> Block:
    scale, window = rest
    if ends is not None:
        if kernels.choose_kernel(q, v, by_products=False, visible="documents").segmented:
            return Block(scale, causal=True, ends=ends, window=window)
        mask = _mask_of(ends, len(q), q.shape[2], window)
    return Block(scale, causal=mask is None, mask=mask)


def _mask_of(ends: Tensor, b: int, s: int, window: int | None) -> Tensor:
    """The mask (b, 1, s, s) of packed documents, for kernels that take nothing else."""
    tokens = torch.arange(b * s, device=ends.device)
    documents = torch.searchsorted(ends, tokens, right=True).view(b, 1, s)
    tokens = tokens[:s]
    distance = tokens[:, None] - tokens
    near = (distance >= 0) & (distance < (s if window is None else window))
    return (documents[..., None] == documents[:, :, None]) & near


def _sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *settings: Any
) -> tuple[Tensor, Tensor]:
    out, lse = kernels.forward_block(q, k, v, _block(q, v, *settings))
    out, lse = kernels.add_sinks(out, lse, sinks)
    # Heads are adjacent in memory, as the projection that follows needs them.
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse


def _sink_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor,
    *settings: Any,
) -> list[Tensor]:
    block = _block(q, v, *settings)
    gradients = kernels.backward_block(grad, q, k, v, out, lse, block)
    of_qkv = [dx.to(x.dtype).contiguous() for dx, x in zip(gradients, (q, k, v), strict=True)]
    return [*of_qkv, kernels.sinks_gradient(grad, out, lse, sinks)]


def _output_shapes(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *settings: Any
) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    lse = q.new_empty(b, h, s, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(b, s, h, v.shape[-1]).transpose(1, 2), lse


def _gradient_shapes(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor,
    *settings: Any,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, sinks)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, mask, ends, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, mask, ends)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    gradients = ops.sink_attention_backward(grad, *ctx.saved_tensors, *ctx.settings)
    no_gradients = [None] * 4  # of the settings
    return *gradients, *no_gradients


operator(
    "sink_attention",
    _sink_attention,
    _output_shapes,
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor sinks, {SETTINGS}) -> (Tensor, Tensor)",
)
operator(
    "sink_attention_backward",
    _sink_attention_backward,
    _gradient_shapes,
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor sinks, "
    f"{SETTINGS}) -> Tensor[]",
)
ops = torch.ops.meshtrain
ATTENTION, BACKWARD = ops.sink_attention, ops.sink_attention_backward
differentiable("sink_attention", _backward, _setup_context)
