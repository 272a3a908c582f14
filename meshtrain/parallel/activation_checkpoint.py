"""Activation checkpointing: what a block's forward keeps for its backward, and what it computes again instead."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten

# Products of matrices, convolutions and attention are dear to compute and are kept; everything between them (norms,
# activations, rotary turns, casts) costs memory traffic only and is computed again.
SAVED_OPERATORS = frozenset(op.default for op in (aten.mm, aten.addmm, aten.bmm, aten.linear, aten.convolution))
# Attention, and which of its arguments is the dropout. One that draws is run again, as everything that draws must be:
# what draws after it would else not draw the same.
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default: 3,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    aten._scaled_dot_product_efficient_attention.default: 5,
    aten._scaled_dot_product_cudnn_attention.default: 5,
    aten._scaled_dot_product_attention_math.default: 4,
}


# What says where tokens go is never computed twice: rounding that came out otherwise could send them elsewhere, and
# ranks would wait for messages that nobody sends.
ROUTING_OPERATORS = frozenset(f"meshtrain.{name}.default" for name in ("choose", "exchange_counts", "message_sizes"))


def checkpoint_block(forward: Callable, recompute: str, *, routes: bool = False) -> Callable:
    """A forward that keeps less for its backward.

    Args:
        forward: the forward of one block.
        recompute: "none" keeps everything; "full" keeps the block's inputs only and runs it again in backward
            (Chen et al., https://arxiv.org/abs/1604.06174), what it sends included; "selective" keeps the results of
            `SAVED_OPERATORS`, of attention, and of all communication besides and computes the rest again.
        routes: the block has experts, and keeps the results of `ROUTING_OPERATORS` in each of the two.
    """
    if recompute == "none":
        return forward
    # A block may draw from torch's generators (F.dropout); run again, it has to draw the same.
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if recompute == "selective" or routes:
        policy = _policy if recompute == "selective" else _routing_policy
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, forward, **settings)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Operators of our own communicate, and most of them multiply matrices too.
    must_save = operator in SAVED_OPERATORS or getattr(operator, "namespace", None) == "meshtrain"
    if operator in ATTENTION:
        must_save = kwargs.get("dropout_p", (*args, *[0.0] * 9)[ATTENTION[operator]]) == 0
    return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE


def _routing_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    must_save = str(operator) in ROUTING_OPERATORS
    return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE
