"""Activation checkpointing: what a block's forward saves for its backward, and what is recomputed
instead."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshtrain.parallel.torch_private import KeepsBeforeWrites

aten = torch.ops.aten

# Matrix products, convolutions and attention are expensive to compute and are saved; everything
# between them (norms, activations, rotary embeddings, casts) costs only memory traffic and is
# recomputed.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# Those that some versions of torch lack.
_SCALED_AND_GROUPED = (
    "_scaled_mm",
    "_scaled_mm_v2",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_scaled_grouped_mm_v2",
)


def _saved_operators() -> frozenset[Any]:
    saved = {aten.linear.default, aten.convolution.default, torch.ops.higher_order.flex_attention}
    for name in _PRODUCTS:
        product = getattr(aten, name)
        saved |= {product.default, product.dtype}  # the latter with an output of another dtype
    for name in _SCALED_AND_GROUPED:
        if hasattr(aten, name):
            saved.add(getattr(aten, name).default)
    return frozenset(saved)


SAVED_OPERATORS = _saved_operators()
# Attention -> its dropout argument. With dropout it is recomputed, so that later random operators
# draw the same.
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default: 3,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    aten._scaled_dot_product_efficient_attention.default: 5,
    aten._scaled_dot_product_cudnn_attention.default: 5,
    aten._scaled_dot_product_attention_math.default: 4,
}
# packed documents on GPUs; by name, because torch registers it lazily
VARLEN = "torch_attn._varlen_attn.default"

# Routing is never recomputed: with other rounding, ranks could wait for messages that no rank
# sends.
ROUTING_OPERATORS = frozenset(
    f"meshtrain.{name}.default" for name in ("choose", "exchange_counts", "message_sizes")
)


def checkpoint_block(forward: Callable, recompute: str, *, routes: bool = False) -> Callable:
    """Wraps a forward so that it saves less for its backward.

    Args:
        forward: the forward of one block.
        recompute: "none" saves everything; "full" saves only the block's inputs and reruns the
            block in backward (Chen et al., https://arxiv.org/abs/1604.06174), including its
            communication; "selective" also saves the results of `SAVED_OPERATORS`, of attention and
            of all communication, and recomputes the rest.
        routes: the block has experts, and saves the results of `ROUTING_OPERATORS` with "full" and
            "selective".
    """
    if recompute == "none":
        return forward
    # A block may draw from torch's generators (F.dropout); the recomputation has to draw the same
    # numbers.
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if recompute == "selective" or routes:
        policy = _policy if recompute == "selective" else _routing_policy
        settings["context_fn"] = partial(_contexts, policy)
    return partial(checkpoint, forward, **settings)


def _contexts(policy: Callable) -> tuple[KeepsBeforeWrites, AbstractContextManager]:
    saving, loading = create_selective_checkpoint_contexts(policy)
    return KeepsBeforeWrites(policy, saving.storage), loading


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in ATTENTION:
        return _save_if(_dropout_of(operator, args, kwargs) == 0)
    # meshtrain's own operators communicate, and most of them also multiply matrices.
    is_own = getattr(operator, "namespace", None) == "meshtrain"
    return _save_if(operator in SAVED_OPERATORS or is_own or str(operator) == VARLEN)


def _dropout_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The dropout probability of an attention operator, whose default is 0."""
    position = ATTENTION[operator]
    return args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)


def _routing_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _save_if(str(operator) in ROUTING_OPERATORS)


def _save_if(must_save: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE
