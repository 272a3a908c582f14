"""Qwen3 (https://arxiv.org/abs/2505.09388), as single-device PyTorch: a Llama with norms of each
head's query and key.

Parameters have Hugging Face's names, so weights need no table of names. Nothing here depends on a
mesh; tables at the end say how weights are initialized (`init_plan`) and split over `tp`
(`tp_plan`), and what mixes tokens (`cp_plan`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, attention
from meshtrain.dropout import Dropout
from meshtrain.huggingface import keys
from meshtrain.rotary import Rotary, cos_sin, rotate


@dataclass(frozen=True)
class Config(keys.DecoderConfig):
    """Hugging Face's keys of Qwen3, with the same meaning; `hidden_dropout` is meshtrain's."""

    hidden_size: int = 256  # width of the model
    intermediate_size: int = 768  # inner width of the feed-forward part
    num_hidden_layers: int = 4  # number of layers
    num_attention_heads: int = 8  # query heads per layer
    # key/value heads per layer; null: as many as query heads
    num_key_value_heads: int | None = None
    head_dim: int | None = None  # width of a head; null: hidden_size / num_attention_heads
    vocab_size: int = 256  # number of token ids
    max_position_embeddings: int = 2048  # the longest sequence that the model is designed for
    rope_theta: float = 10000.0  # base of the rotary angles
    # angles for longer sequences: {rope_type: yarn, factor: 4.0, ...}
    rope_scaling: dict[str, Any] | None = None
    # rope_theta and rope_scaling in one, as in transformers 5
    rope_parameters: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6  # added to the mean square in a norm
    # full_attention for each layer: a sliding window is not supported
    layer_types: list[str] | None = None
    tie_word_embeddings: bool = False  # whether the embedding and the head share one matrix
    initializer_range: float = 0.02  # standard deviation of the initial weights
    # dropout probability after the embedding, attention and feed-forward part
    hidden_dropout: float = 0.0


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.hidden_size
        e = config.head_width
        self.head_dim = e
        self.q_proj = nn.Linear(d, config.num_attention_heads * e, bias=False)
        self.k_proj = nn.Linear(d, config.kv_heads * e, bias=False)
        self.v_proj = nn.Linear(d, config.kv_heads * e, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * e, d, bias=False)
        self.q_norm = nn.RMSNorm(e, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(e, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: Rotary, context: AttentionContext) -> Tensor:
        # (b, s, d) -> (b, s, h, e): heads of e features
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))

        # Otherwise scores would grow with the weights, until training is no longer stable.
        q = self.q_norm(q)
        k = self.k_norm(k)

        # After this, positions enter a score q_i . k_j by their distance i - j alone.
        q = rotate(q, rotary.cos, rotary.sin)
        k = rotate(k, rotary.cos, rotary.sin)

        # o_i = sum over j <= i of softmax_j(q_i . k_j / sqrt(e)) v_j, in each head: (b, h, s, e).
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        o = attention(q, k, v, context)

        # (b, h, s, e) -> (b, s, d): the heads of a token side by side, mixed by a product.
        return self.o_proj(o.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.self_attn_dropout = Dropout(config.hidden_dropout)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)
        self.mlp_dropout = Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, rotary: Rotary, context: AttentionContext) -> Tensor:
        x = x + self.self_attn_dropout(self.self_attn(self.input_layernorm(x), rotary, context))
        return x + self.mlp_dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """Everything except the head: `model` in Hugging Face."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def blocks(self) -> list[nn.Module]:
        """The modules in execution order; any contiguous run of them can be a pipeline stage."""
        return [self.model.embed_tokens, *self.model.layers, self.model.norm, self.lm_head]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: AttentionContext | Tensor | None = None,
    ) -> Tensor:
        """Tokens (b, s) to logits (b, s, v); `positions` and `documents` as in models/llama.py."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        context = AttentionContext.of(documents)
        x = self.model.dropout(self.model.embed_tokens(tokens))  # (b, s, d)
        theta, scaling = self.config.rope
        cos, sin = cos_sin(
            positions,
            theta,
            scaling,
            width=self.config.rotary_width,
            max_position_embeddings=self.config.max_position_embeddings,
            dtype=x.dtype,
            length=context.length,
        )
        rotary = Rotary(cos, sin)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, rotary, context.at(i))
        return self.lm_head(self.model.norm(x))


def check(config: Config) -> keys.Problems:
    """Invalid combinations of keys: (key, what is wrong and what would work)."""
    problems = keys.decoder_problems(config)
    if problems or config.layer_types is None:
        return problems
    if config.layer_types != ["full_attention"] * config.num_hidden_layers:
        problems.append(
            ("layer_types", "only full_attention in every layer is built: leave layer_types out")
        )
    return problems


_COMMON = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
}
presets: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _COMMON
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": _COMMON
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": _COMMON
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _COMMON
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-14b": _COMMON
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "qwen3-32b": _COMMON
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
}

# Keys of a Hugging Face config.json that have no effect here.
passed_over = keys.passed_over | {"sliding_window", "max_window_layers"}

# Keys with the only supported value: another value would be another model. Without a sliding
# window, the two keys above have no effect.
only = keys.only | {"use_sliding_window": False}

# A Hugging Face config.json has this `model_type`; a missing key has the default of transformers.
model_type = "qwen3"
_LEFT_OUT: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}


def from_hugging_face(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of `Config` for those of a config.json."""
    return keys.read_config_json(values, _LEFT_OUT)


def to_hugging_face(config: Config) -> dict[str, Any]:
    """The config.json that describes a model."""
    return keys.write_config_json(config, "Qwen3ForCausalLM", model_type, only)


# Initial values, by the first matching pattern: "normal" has the standard deviation
# `initializer_range`.
init_plan = {"*norm.weight": "ones", "*": "normal"}

# How weights are split over `tp`, in Hugging Face's words.
tp_plan = {
    "model.embed_tokens": "embedding_rowwise_sequence",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    # each rank normalizes its own heads
    "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_logits",
}

# Modules in which tokens attend to each other. A model with this table accepts an
# `AttentionContext` as `documents`.
cp_plan = {"model.layers.*.self_attn": "attention"}
