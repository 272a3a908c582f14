"""A small copy of a large model: fewer layers, heads and experts, narrower, with every feature that
a layout may get wrong. By the names that the configs of decoders share. Pure.

What stays: several query heads for a key/value head, and several of these; a head of its own width;
groups of experts of which some are chosen; layers of every kind; a window that is shorter than a
sequence; latents; ties, biases, dropout, and every key that is no size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

# A model of at most so many parameters is trained as it is.
MOST_PARAMETERS = 300_000

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 4, 2, 16
HEAD_DIM_OF_8_BITS = 32  # products of 8 bits are of layers with 128 features
LAYERS = 2
EXPERTS, CHOSEN, EXPERT_WIDTH = 8, 2, 24
VOCABULARY = 256  # bytes
SEQ_LEN = 32
GLOBAL_SIZE, MICRO_SIZE = 12, 2
# Widths that stand by themselves.
WIDTHS = {
    "intermediate_size": 128,
    "moe_intermediate_size": EXPERT_WIDTH,
    "shared_expert_intermediate_size": EXPERT_WIDTH,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "hidden_size_per_layer_input": 16,
}
COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Keys with one entry for each layer.
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


def small_model(
    keys: Mapping[str, Any],
    *,
    layouts: Sequence[Mapping[str, int]],
    stages: int,
    experts: int,
    head_dim: int = HEAD_DIM,
) -> dict[str, Any]:
    """The keys of a model's config that have another value in its small copy.

    Args:
        layouts: the sizes of their axes, over which heads and widths have to divide.
        stages: the most stages of a pipeline.
        experts: over how many ranks the experts of a layer are dealt out.
        head_dim: the width of a head, and with it of the model.
    """
    tp = math.lcm(*(sizes.get("tp", 1) for sizes in layouts))
    changed: dict[str, Any] = {}
    for name, width in WIDTHS.items():
        wide = _wide(width, tp)
        if _above(keys, name, wide):
            changed[name] = wide
    changed |= _heads(keys, tp, head_dim) | _layers(keys, stages) | _experts(keys, experts, tp)
    if _above(keys, "vocab_size", VOCABULARY):
        changed["vocab_size"] = VOCABULARY
    # A window counts where it is shorter than the sequence.
    if _above(keys, "sliding_window", SEQ_LEN // 3):
        changed["sliding_window"] = SEQ_LEN // 3
    return {name: value for name, value in changed.items() if keys.get(name) != value}


def _above(keys: Mapping[str, Any], name: str, most: int) -> bool:
    value = keys.get(name)
    return isinstance(value, int) and not isinstance(value, bool) and value > most


def _wide(width: int, tp: int) -> int:
    """The width, or the next one that divides over tp."""
    return -(-width // tp) * tp


def _heads(keys: Mapping[str, Any], tp: int, few_features: int) -> dict[str, Any]:
    """Heads, key/value heads and the width."""
    heads = keys.get("num_attention_heads")
    if not isinstance(heads, int):
        return {}
    key_value_heads = keys.get("num_key_value_heads") or heads
    few = min(heads, max(HEADS, tp))
    if heads % few:
        few = heads  # as they are: an uneven number may be what is tried
    if key_value_heads == heads:
        few_key_value = few
    else:
        few_key_value = min(key_value_heads, KEY_VALUE_HEADS if few > KEY_VALUE_HEADS else 1)
    if few % few_key_value:
        few = few_key_value * 2
    changed: dict[str, Any] = {"num_attention_heads": few}
    if keys.get("num_key_value_heads") is not None:
        changed["num_key_value_heads"] = few_key_value

    head_dim = keys.get("head_dim")
    width = keys.get("hidden_size", 0)
    narrow = few * few_features
    if width > narrow:
        changed["hidden_size"] = narrow
    if isinstance(head_dim, int):
        # A width of heads that does not follow from the model's stays one that does not.
        follows = width == heads * head_dim
        changed["head_dim"] = min(head_dim, few_features if follows else few_features + 8)
    return changed


def _layers(keys: Mapping[str, Any], stages: int) -> dict[str, Any]:
    """As many layers as a layer of every kind and the stages need."""
    layers = keys.get("num_hidden_layers")
    if not isinstance(layers, int):
        return {}
    few = max(LAYERS, stages)
    first_dense = keys.get("first_k_dense_replace")
    changed: dict[str, Any] = {}
    if isinstance(first_dense, int) and first_dense > 0:
        changed["first_k_dense_replace"] = 1
        few = max(few, 3)
    step = keys.get("decoder_sparse_step")
    if isinstance(step, int):
        few = max(few, step)
    per_layer: dict[str, list[Any]] = {}
    for name in PER_LAYER:
        kinds = keys.get(name)
        if isinstance(kinds, Sequence) and not isinstance(kinds, str):
            per_layer[name] = list(kinds)
    for kinds in per_layer.values():
        for kind in set(kinds):
            few = max(few, kinds.index(kind) + 1)
    without = keys.get("mlp_only_layers")
    if without:
        few = max(few, min(min(without) + 2, layers))
    few = min(few, layers)
    for name, kinds in per_layer.items():
        changed[name] = kinds[:few]
    if without:
        changed["mlp_only_layers"] = [layer for layer in without if layer < few]
    return {**changed, "num_hidden_layers": few}


def _experts(keys: Mapping[str, Any], ranks: int, tp: int) -> dict[str, Any]:
    counts = [name for name in COUNTS_OF_EXPERTS if _above(keys, name, 1)]
    if not counts:
        return {}
    few = max(EXPERTS, ranks)
    changed: dict[str, Any] = {name: few for name in counts if _above(keys, name, few)}
    wide = _wide(EXPERT_WIDTH, tp)
    # Where experts have no width of their own, every layer has them.
    if "moe_intermediate_size" not in keys and _above(keys, "intermediate_size", wide):
        changed["intermediate_size"] = wide
    if _above(keys, "num_experts_per_tok", CHOSEN):
        changed["num_experts_per_tok"] = CHOSEN
    groups, chosen = keys.get("n_group"), keys.get("topk_group")
    if isinstance(groups, int) and groups > 2:
        changed["n_group"] = 2
        # Where some of the groups are chosen, some are.
        changed["topk_group"] = 1 if isinstance(chosen, int) and chosen < groups else 2
    return changed
