"""Mixtral (https://arxiv.org/abs/2401.04088), as single-device PyTorch: a Llama with experts in
each layer.

Parameters have the names that transformers uses in memory; `stored_as` has their names in files.
Nothing here depends on a mesh; the tables at the end say how weights are initialized and split.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, attention
from meshtrain.dropout import Dropout
from meshtrain.experts import Balance, Experts, Router
from meshtrain.huggingface import keys
from meshtrain.huggingface.keys import DecoderConfig
from meshtrain.rotary import Rotary, cos_sin, rotate


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Hugging Face's keys of Mixtral, with the same meaning; `hidden_dropout` and the last two are
    meshtrain's."""

    hidden_size: int = 256  # width of the model
    intermediate_size: int = 768  # inner width of an expert
    num_hidden_layers: int = 4  # number of layers
    num_attention_heads: int = 8  # query heads per layer
    # key/value heads per layer; null: as many as query heads
    num_key_value_heads: int | None = None
    head_dim: int | None = None  # width of a head; null: hidden_size / num_attention_heads
    vocab_size: int = 256  # number of token ids
    max_position_embeddings: int = 2048  # the longest sequence that the model is designed for
    # number of tokens that a token sees, itself included; null: all
    sliding_window: int | None = None
    rope_theta: float = 1000000.0  # base of the rotary angles
    # angles for longer sequences: {rope_type: yarn, factor: 4.0, ...}
    rope_scaling: dict[str, Any] | None = None
    # rope_theta and rope_scaling in one, as in transformers 5
    rope_parameters: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-5  # added to the mean square in a norm
    tie_word_embeddings: bool = False  # whether the embedding and the head share one matrix
    initializer_range: float = 0.02  # standard deviation of the initial weights
    # dropout probability after the embedding, attention and feed-forward part
    hidden_dropout: float = 0.0
    num_local_experts: int = 8  # experts per layer
    num_experts_per_tok: int = 2  # experts per token
    router_aux_loss_coef: float = 0.001  # coefficient of the load-balancing loss of the router
    # loads over the last global batch, or a sample
    router_balance: Literal["batch", "sequence", "none"] = "batch"
    # coefficient of the z-loss, which keeps the router's logits small
    router_z_loss_coef: float = 0.0


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, e = config.hidden_size, config.head_width
        self.head_dim, self.window = e, config.sliding_window
        self.q_proj = nn.Linear(d, config.num_attention_heads * e, bias=False)
        self.k_proj = nn.Linear(d, config.kv_heads * e, bias=False)
        self.v_proj = nn.Linear(d, config.kv_heads * e, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * e, d, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, context: AttentionContext) -> Tensor:
        q, k, v = (
            rearrange(project(x), "b s (h e) -> b s h e", e=self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(t, rotary.cos, rotary.sin) for t in (q, k))
        q, k, v = (rearrange(t, "b s h e -> b h s e") for t in (q, k, v))
        y = attention(q, k, v, context, window=self.window)
        return self.o_proj(rearrange(y, "b h s e -> b s (h e)"))


class MixtureOfExperts(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        d, n = config.hidden_size, config.num_local_experts
        balance = Balance(
            n,
            config.num_hidden_layers,
            layer,
            kind=config.router_balance,
            aux_loss_coef=config.router_aux_loss_coef,
            z_loss_coef=config.router_z_loss_coef,
        )
        self.gate = Router(d, n, config.num_experts_per_tok, balance=balance)
        self.experts = Experts(n, d, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x))


class Layer(nn.Module):
    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.self_attn_dropout = Dropout(config.hidden_dropout)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MixtureOfExperts(config, number)
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
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
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
        x = self.model.dropout(self.model.embed_tokens(tokens))
        context = AttentionContext.of(documents)
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
    problems = keys.decoder_problems(config, keys.COUNTS | {"sliding_window": 1 << 40})
    return problems + keys.router_problems(config, "num_local_experts")


_COMMON = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
presets: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": _COMMON
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 32768,
        "router_aux_loss_coef": 0.02,
    },
    "mixtral-8x22b": _COMMON
    | {
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "max_position_embeddings": 65536,
        "router_aux_loss_coef": 0.001,
    },
}

passed_over = keys.passed_over | {"output_router_logits"}

# Keys with the only supported value: another value would be another model.
only = keys.only | {"router_jitter_noise": 0.0}

# A Hugging Face config.json has this `model_type`; a missing key has the default of transformers.
model_type = "mixtral"
_LEFT_OUT: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
}


def from_hugging_face(written: dict[str, Any]) -> dict[str, Any]:
    """The keys of `Config` for those of a config.json."""
    return keys.read_config_json(written, _LEFT_OUT)


def to_hugging_face(config: Config) -> dict[str, Any]:
    """The config.json that describes a model."""
    return keys.write_config_json(config, "MixtralForCausalLM", model_type, only)


# Initial values, by the first matching pattern: "normal" has the standard deviation
# `initializer_range`.
init_plan = {"*norm.weight": "ones", "*.loads": "zeros", "*": "normal"}

# How weights are split over `tp`, in Hugging Face's words.
tp_plan = {
    "model.embed_tokens": "embedding_rowwise_sequence",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "lm_head": "colwise_logits",
}

# Modules in which tokens attend to each other. A model with this table accepts an
# `AttentionContext` as `documents`.
cp_plan = {"model.layers.*.self_attn": "attention"}

# The experts, which `parallel.expert_parallel` distributes over ranks as whole experts.
ep_plan = {"model.layers.*.mlp.experts": "ep_dispatch_experts"}

# Tensor -> the tensors that files have in its place; `{}` is the index of an expert.
stored_as: dict[str, tuple[str, ...]] = {
    "model.layers.*.mlp.experts.gate_up_proj": (
        "model.layers.*.block_sparse_moe.experts.{}.w1.weight",
        "model.layers.*.block_sparse_moe.experts.{}.w3.weight",
    ),
    "model.layers.*.mlp.experts.down_proj": (
        "model.layers.*.block_sparse_moe.experts.{}.w2.weight",
    ),
    "model.layers.*.mlp.gate.weight": ("model.layers.*.block_sparse_moe.gate.weight",),
    "*.balance.loads": (),
}
