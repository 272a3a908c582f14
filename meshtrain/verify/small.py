"""A small copy of a large model: fewer layers, heads and experts, narrower, with every feature that
a layout may get wrong. By the names that the configs of decoders share. Pure.

What stays: several query heads for a key/value head, and several of these; a head of its own width;
groups of experts of which some are chosen; layers of every kind; a window that is shorter than a
sequence; latents; ties, biases, dropout, and every key that is no size; and what does not divide
over the ranks of a layout.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshtrain.data.sequence import padded_length

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
    sizes_of_tp = [sizes.get("tp", 1) for sizes in layouts]
    changed: dict[str, Any] = {}
    for name, width in WIDTHS.items():
        if _above(keys, name, width):
            changed[name] = divides_alike(keys[name], width, sizes_of_tp)
    changed |= _heads(keys, sizes_of_tp, head_dim)
    changed |= _layers(keys, stages) | _experts(keys, experts, sizes_of_tp)
    if _above(keys, "vocab_size", VOCABULARY):
        changed["vocab_size"] = divides_alike(keys["vocab_size"], VOCABULARY, sizes_of_tp)
    # A window counts where it is shorter than the sequence.
    if _above(keys, "sliding_window", SEQ_LEN // 3):
        changed["sliding_window"] = SEQ_LEN // 3
    return {name: value for name, value in changed.items() if keys.get(name) != value}


def divides_alike(value: int, least: int, sizes: Sequence[int]) -> int:
    """The smallest number from `least` to `value` that divides by those of the sizes by which
    `value` divides, and by no other: what lies unevenly on the ranks of a layout stays uneven."""
    return next(
        n
        for n in range(least, value + 1)
        if all((n % size == 0) == (value % size == 0) for size in sizes)
    )


def small_batch(global_size: int, layouts: Sequence[Mapping[str, int]]) -> int:
    """The samples of a step of a small copy, of more than `GLOBAL_SIZE`."""
    data_ranks = [sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1) for sizes in layouts]
    return divides_alike(global_size, GLOBAL_SIZE, data_ranks)


def small_sequence(length: int, layouts: Sequence[Mapping[str, int]]) -> int:
    """The tokens of a sequence of a small copy, of more than `SEQ_LEN`."""
    parts = []
    for sizes in layouts:
        tp, cp = sizes.get("tp", 1), sizes.get("cp", 1)
        parts += [tp, padded_length(1, cp, tp) if cp > 1 else 1]
    return divides_alike(length, SEQ_LEN, parts)


def _above(keys: Mapping[str, Any], name: str, most: int) -> bool:
    value = keys.get(name)
    return isinstance(value, int) and not isinstance(value, bool) and value > most


def _heads(
    keys: Mapping[str, Any], sizes_of_tp: Sequence[int], few_features: int
) -> dict[str, Any]:
    """Heads, key/value heads and the width."""
    tp = math.lcm(*sizes_of_tp)
    heads = keys.get("num_attention_heads")
    if not isinstance(heads, int):
        return {}
    key_value_heads = keys.get("num_key_value_heads") or heads
    few = min(heads, max(HEADS, tp))
    if heads % few:
        few = heads  # as they are: an uneven number may be what is tried
    few_key_value = few
    if key_value_heads != heads:
        # Ranks that share a head have a part of its gradient each.
        few_key_value = divides_alike(
            key_value_heads, min(key_value_heads, KEY_VALUE_HEADS), sizes_of_tp
        )
        if few % few_key_value or few == few_key_value:
            few = math.lcm(2 * few_key_value, tp)
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


def _experts(keys: Mapping[str, Any], ranks: int, sizes_of_tp: Sequence[int]) -> dict[str, Any]:
    counts = [name for name in COUNTS_OF_EXPERTS if _above(keys, name, 1)]
    if not counts:
        return {}
    least = max(EXPERTS, ranks)
    changed: dict[str, Any] = {}
    for name in counts:
        if _above(keys, name, least):
            changed[name] = divides_alike(keys[name], least, [ranks])
    # Where experts have no width of their own, every layer has them.
    if "moe_intermediate_size" not in keys and _above(keys, "intermediate_size", EXPERT_WIDTH):
        wide = divides_alike(keys["intermediate_size"], EXPERT_WIDTH, sizes_of_tp)
        changed["intermediate_size"] = wide
    if _above(keys, "num_experts_per_tok", CHOSEN):
        changed["num_experts_per_tok"] = CHOSEN
    groups, chosen = keys.get("n_group"), keys.get("topk_group")
    if isinstance(groups, int) and groups > 2:
        changed["n_group"] = 2
        # Where some of the groups are chosen, some are.
        changed["topk_group"] = 1 if isinstance(chosen, int) and chosen < groups else 2
    return changed
