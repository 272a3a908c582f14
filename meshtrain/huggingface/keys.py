"""Common parts of the config.json of Hugging Face decoders: keys, their checks, and conversion in
both directions.

A model file builds on these functions and adds only what is specific to its model.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from meshtrain.huggingface.rope_keys import rope_type, split_rope
from meshtrain.rotary import is_positive, scaling_problems

Problems = list[tuple[str, str]]  # key, what is wrong with it and what would work

# from 1 to a maximum that no model approaches, so that a mistyped number is reported at once
COUNTS = {
    "hidden_size": 1 << 22,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 22,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 40,
}

# Keys of a Hugging Face config.json that have no effect here.
passed_over = frozenset(
    {
        "architectures",
        "auto_map",
        "model_type",
        "transformers_version",
        "_name_or_path",
        "torch_dtype",
        "dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "use_cache",
        "attn_implementation",
        "_attn_implementation",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "id2label",
        "label2id",
        "problem_type",
        "torchscript",
        "use_bfloat16",
        "is_encoder_decoder",
    }
)

# Keys with the only value that is implemented: another value would be another model.
only: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "quantization_config": None,
}


class DecoderConfig:
    """Values derived from the keys that all decoders have. A model's `Config` is a dataclass with
    them as fields."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None
    hidden_dropout: float

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:  # features of a head that are rotated by the position
        return self.head_width

    @property
    def rope(self) -> tuple[float, dict[str, Any]]:
        """The base of the rotary angles and their scaling, from whichever keys give them."""
        scaling = self.rope_parameters
        if scaling is None:
            scaling = self.rope_scaling or {}
        return scaling.get("rope_theta", self.rope_theta), scaling


def decoder_problems(config: DecoderConfig, counts: Mapping[str, int] = COUNTS) -> Problems:
    """All problems of the common keys; if counts are wrong, only those."""
    problems = count_problems(config, counts)
    if problems:
        return problems
    return dropout_problems(config) + head_problems(config) + rope_problems(config)


def count_problems(config: Any, counts: Mapping[str, int]) -> Problems:
    """Problems of keys that must be a number from 1 to `counts[key]`, or null."""
    problems = []
    for key, most in counts.items():
        value = getattr(config, key)
        if value is None:
            continue
        if value < 1:
            problems.append((key, f"{key} is {value}: use at least 1"))
        elif value > most:
            problems.append((key, f"{key} is {value}: use at most {most:,}"))
    return problems


def dropout_problems(config: DecoderConfig) -> Problems:
    if 0 <= config.hidden_dropout < 1:
        return []
    return [
        (
            "hidden_dropout",
            f"hidden_dropout is {config.hidden_dropout}: use a share from 0 to below 1",
        )
    ]


def head_problems(config: DecoderConfig) -> Problems:
    problems = []
    h, k, d = config.num_attention_heads, config.kv_heads, config.hidden_size
    if config.head_dim is None and d % h:
        heads = f"use {nearest(_divisors(d), h)} heads, or set head_dim"
        problems.append(
            ("num_attention_heads", f"hidden_size {d} does not divide into {h} heads: {heads}")
        )
    elif config.rotary_width % 2:
        width = f"head width {config.head_width} is odd"
        if config.rotary_width != config.head_width:
            width = f"{config.rotary_width} of {config.head_width} features turn, an odd number"
        problems.append(("head_dim", f"rotary positions turn pairs of features: {width}"))
    if h % k:
        way_out = f"use {nearest(_divisors(h), k)}"
        problems.append(
            (
                "num_key_value_heads",
                f"{h} query heads do not divide over {k} key/value heads: {way_out}",
            )
        )
    return problems


def rope_problems(config: DecoderConfig) -> Problems:
    problems = []
    if not is_positive(config.rope_theta):
        problems.append(
            ("rope_theta", f"rope_theta is {config.rope_theta}: expected a number above 0")
        )
    for key in ("rope_scaling", "rope_parameters"):
        written = getattr(config, key)
        if written is None:
            continue
        base, _ = config.rope
        scaling = {name: value for name, value in written.items() if not _is_own_key(config, name)}
        problem = next(scaling_problems(base, scaling, config.rotary_width, key), None)
        if problem is not None:
            problems.append((key, problem))
    return problems


def _is_own_key(config: DecoderConfig, name: str) -> bool:
    """Whether a key of `rope_parameters` is a key of the model that transformers has moved
    there."""
    return name == "partial_rotary_factor" and hasattr(config, name)


def router_problems(config: Any, experts: str) -> Problems:
    """Problems of the keys of a mixture of experts that the config has. `experts`: the key for
    their number."""
    counts = (
        experts,
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "n_group",
        "topk_group",
    )
    problems = count_problems(config, {key: 1 << 22 for key in counts if hasattr(config, key)})
    if problems:
        return problems
    n = getattr(config, experts)
    j = config.num_experts_per_tok
    groups = getattr(config, "n_group", 1)
    best = getattr(config, "topk_group", 1)  # groups from which a token's experts come
    # A group is scored by its two best experts, so it needs two.
    working = [count for count in _divisors(n) if count == 1 or n // count > 1]
    inside = n // groups * best
    if groups not in working:
        way_out = f"use {nearest(working, groups)}"
        problems.append(
            ("n_group", f"{n} experts do not divide into {groups} groups of two or more: {way_out}")
        )
    elif best > groups:
        problems.append(
            ("topk_group", f"topk_group {best} is more than n_group {groups}: use at most {groups}")
        )
    elif j > inside:
        whose = f"{experts} {n}"
        if groups > 1:
            whose = f"the {inside} experts of {best} of {groups} groups"
        message = f"num_experts_per_tok {j} is more than {whose}: use at most {inside}"
        problems.append(("num_experts_per_tok", message))

    dense = getattr(config, "first_k_dense_replace", 0)
    layers = config.num_hidden_layers
    if not 0 <= dense < layers:
        message = (
            f"first_k_dense_replace is {dense}, and some of the {layers} layers have to have "
            f"experts: use 0 to {layers - 1}"
        )
        problems.append(("first_k_dense_replace", message))

    factors = (
        "router_aux_loss_coef",
        "router_z_loss_coef",
        "router_bias_speed",
        "routed_scaling_factor",
    )
    for key in factors:
        value = getattr(config, key, 0.0)
        if not 0 <= value < math.inf:
            problems.append((key, f"{key} is {value}: expected a number of at least 0"))
    return problems


# Layers that predict further tokens ---------------------------------------------------------------

# The layers of a decoder in a table of names, and those of predictions (`meshtrain.prediction`).
_LAYERS = "model.layers.*"
PREDICTIONS = "mtp"
Names = Mapping[str, tuple[str, ...]]


def prediction_problems(config: Any) -> Problems:
    """Problems of the number of layers that predict further tokens."""
    number = config.num_nextn_predict_layers
    if 0 <= number <= COUNTS["num_hidden_layers"]:
        return []
    message = f"num_nextn_predict_layers is {number}: use 0, or the number of such layers"
    return [("num_nextn_predict_layers", message)]


def prediction_tp_plan(config: Any, plan: dict[str, str]) -> dict[str, str]:
    """A `tp_plan`, and where there are layers that predict further tokens, the splits of their
    embedding and head, whose weights are those of the model's."""
    if config.num_nextn_predict_layers == 0:
        return plan
    return {
        **plan,
        f"{PREDICTIONS}.*.ahead.embed_tokens": "embedding_rowwise_sequence",
        f"{PREDICTIONS}.*.head.lm_head": "colwise_logits",
    }


def prediction_names(config: Any, stored_as: Names) -> Names:
    """A table `stored_as`, and that of the layers that predict further tokens, as DeepSeek-V3 and
    GLM-4.5 are published: behind the others, as layers with more in them."""
    names = dict(stored_as)
    for index in range(config.num_nextn_predict_layers):
        layer = _file_layer(config, index)
        own = f"{PREDICTIONS}.{index}.layer"
        # In its decoder, files divide tensors as in other layers.
        for pattern, stored in stored_as.items():
            if pattern.startswith(_LAYERS):
                there = tuple(name.replace(_LAYERS, layer) for name in stored)
                names[pattern.replace(_LAYERS, f"{own}.decoder")] = there
        names[f"{own}.decoder.*"] = (f"{layer}.*",)
        names[f"{own}.norm.*"] = (f"{layer}.shared_head.norm.*",)
        names[f"{own}.*"] = (f"{layer}.*",)
    return names


def prediction_copies(config: Any) -> Names:
    """A table `stored_again`: published files have the embedding and the head in each layer that
    predicts further tokens once more."""
    embedding = "model.embed_tokens.weight"
    head = embedding if config.tie_word_embeddings else "lm_head.weight"
    copies: dict[str, tuple[str, ...]] = {}
    for index in range(config.num_nextn_predict_layers):
        layer = _file_layer(config, index)
        for name, copy in ((embedding, "embed_tokens.weight"), (head, "shared_head.head.weight")):
            copies[name] = (*copies.get(name, ()), f"{layer}.{copy}")
    return copies


def _file_layer(config: Any, index: int) -> str:
    return f"model.layers.{config.num_hidden_layers + index}"


def nearest(working: list[int], value: int) -> str:
    """The nearest valid numbers below and above a value that is not valid."""
    below = [n for n in working if n < value][-1:]
    above = [n for n in working if n > value][:1]
    return " or ".join(str(n) for n in below + above)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def read_config_json(
    keys: dict[str, Any],
    defaults: dict[str, Any],
    rope_keys: frozenset[str] = frozenset({"rope_theta"}),
) -> dict[str, Any]:
    """Converts a config.json's keys to ours: `rope_parameters` is split up, so that each value can
    be overridden.

    Where a file has both, `rope_scaling` counts and `rope_parameters` does not, as in transformers
    5: it is what users add to a file by hand.

    `defaults`: transformers' values for keys that are left out. `rope_keys`: keys of
    `rope_parameters` that are keys of the model; the others are the scaling.
    """
    return split_rope(defaults | keys, rope_keys, first="rope_scaling")


def write_config_json(
    config: Any, architecture: str, model_type: str, only: dict[str, Any]
) -> dict[str, Any]:
    """A config.json that describes a model, for transformers 5 (`rope_parameters`) and older
    versions."""
    theta, rope = config.rope
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    scaling["rope_type"] = rope_type(rope)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **asdict(config),
        **{key: value for key, value in only.items() if value is not None},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "rope_parameters": {**scaling, "rope_theta": theta},
        # an export has those of its tokenizer, and of the folder that its run started from
        "bos_token_id": None,
        "eos_token_id": None,
    }
