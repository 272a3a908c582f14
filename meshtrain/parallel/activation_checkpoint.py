"""Activation checkpointing: what a block's forward saves for its backward, and what is recomputed
instead."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshtrain.parallel.torch_private import (
    ATTENTION_DROPOUT,
    MATRIX_PRODUCTS,
    VARLEN_ATTENTION,
    KeepsBeforeWrites,
)

# Matrix products, convolutions and attention are expensive to compute and are saved; everything
# between them (norms, activations, rotary embeddings, casts) costs only memory traffic and is
# recomputed.
SAVED_OPERATORS = MATRIX_PRODUCTS | {
    torch.ops.aten.convolution.default,
    torch.ops.higher_order.flex_attention,
}

# Routing is never recomputed: with other rounding, ranks could wait for messages that no rank
# sends. Routers of others choose by torch.topk.
ROUTING_OPERATORS = frozenset(
    {
        *(f"meshtrain.{name}.default" for name in ("choose", "exchange_counts", "message_sizes")),
        "aten.topk.default",
    }
)


Keep = Callable[[Tensor], Callable[[], Tensor]]


def checkpoint_block(
    forward: Callable, recompute: str, *, routes: bool = False, keep: Keep | None = None
) -> Callable:
    """Wraps a forward so that it saves less for its backward.

    Args:
        forward: the forward of one block.
        recompute: "none" saves everything; "full" saves only the block's inputs and reruns the
            block in backward (Chen et al., https://arxiv.org/abs/1604.06174), including its
            communication; "selective" also saves the results of `SAVED_OPERATORS`, of attention and
            of all communication, and recomputes the rest.
        routes: the block has experts, and saves the results of `ROUTING_OPERATORS` with "full" and
            "selective".
        keep: what is saved in the place of the results of operators; see `KeepsBeforeWrites`.
    """
    if recompute == "none":
        return forward
    # A block may draw from torch's generators (F.dropout); the recomputation has to draw the same
    # numbers.
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if recompute == "selective" or routes:
        policy = _policy if recompute == "selective" else _routing_policy
        settings["context_fn"] = partial(_contexts, policy, keep)
    return partial(checkpoint, forward, **settings)


def _contexts(
    policy: Callable, keep: Keep | None
) -> tuple[KeepsBeforeWrites, AbstractContextManager]:
    plain, loading = create_selective_checkpoint_contexts(policy)
    saving = KeepsBeforeWrites(policy, plain.storage)
    saving.keep = keep
    return saving, loading


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in ATTENTION_DROPOUT:
        # With dropout it is recomputed, so that later random operators draw the same.
        return _save_if(_dropout_of(operator, args, kwargs) == 0)
    # meshtrain's own operators communicate, and most of them also multiply matrices.
    is_own = getattr(operator, "namespace", None) == "meshtrain"
    name = str(operator)
    routes = name in ROUTING_OPERATORS
    return _save_if(operator in SAVED_OPERATORS or is_own or routes or name == VARLEN_ATTENTION)


def _dropout_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The dropout probability of an attention operator, whose default is 0."""
    position = ATTENTION_DROPOUT[operator]
    return args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)


def _routing_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _save_if(str(operator) in ROUTING_OPERATORS)


def _save_if(must_save: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE
