"""Qwen3-MoE (https://arxiv.org/abs/2505.09388), as single-device PyTorch: a Qwen3 with experts in
its layers.

Parameters have the names that transformers uses in memory; `stored_as` has their names in files.
Nothing here depends on a mesh; the tables at the end say how weights are initialized and split.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, attention
from meshtrain.dropout import Dropout
from meshtrain.experts import Balance, Experts, Router
from meshtrain.huggingface import keys
from meshtrain.rotary import Rotary, cos_sin, rotate


@dataclass(frozen=True)
class Config(keys.DecoderConfig):
    """Hugging Face's keys of Qwen3-MoE, with the same meaning; `hidden_dropout` and the last two
    are meshtrain's."""

    hidden_size: int = 256  # width of the model
    intermediate_size: int = 768  # inner width of the feed-forward part of a layer without experts
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
    tie_word_embeddings: bool = False  # whether the embedding and the head share one matrix
    initializer_range: float = 0.02  # standard deviation of the initial weights
    # dropout probability after the embedding, attention and feed-forward part
    hidden_dropout: float = 0.0
    num_experts: int = 8  # experts per layer
    num_local_experts: int | None = None  # the name of num_experts in transformers 5
    num_experts_per_tok: int = 2  # experts per token
    moe_intermediate_size: int = 256  # inner width of an expert
    norm_topk_prob: bool = False  # whether the scores of a token's experts are divided by their sum
    decoder_sparse_step: int = 1  # n: every n-th layer has experts, ...
    mlp_only_layers: list[int] | None = None  # ... except these, counted from 0
    router_aux_loss_coef: float = 0.001  # coefficient of the load-balancing loss of the router
    # loads over the last global batch, or a sample
    router_balance: Literal["batch", "sequence", "none"] = "batch"
    # coefficient of the z-loss, which keeps the router's logits small
    router_z_loss_coef: float = 0.0

    @property
    def sparse_layers(self) -> list[int]:
        """The layers that have experts."""
        return [
            layer
            for layer in range(self.num_hidden_layers)
            if (layer + 1) % self.decoder_sparse_step == 0
            and layer not in (self.mlp_only_layers or ())
        ]


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


class MixtureOfExperts(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        d = config.hidden_size
        n = config.num_local_experts or config.num_experts
        balance = Balance(
            n,
            len(config.sparse_layers),
            layer,
            kind=config.router_balance,
            aux_loss_coef=config.router_aux_loss_coef,
            z_loss_coef=config.router_z_loss_coef,
        )
        self.gate = Router(
            d, n, config.num_experts_per_tok, normalize=config.norm_topk_prob, balance=balance
        )
        self.experts = Experts(n, d, config.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x))


class Layer(nn.Module):
    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.self_attn_dropout = Dropout(config.hidden_dropout)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if number in config.sparse_layers:
            self.mlp: nn.Module = MixtureOfExperts(config, number)
        else:
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
    problems = keys.decoder_problems(config, keys.COUNTS | {"decoder_sparse_step": 1 << 12})
    by_other_name = config.num_local_experts is not None
    experts = "num_local_experts" if by_other_name else "num_experts"
    problems = problems or keys.router_problems(config, experts)
    # num_experts with its default value has not been given, as far as one can tell.
    num_experts_fits = config.num_experts in (Config.num_experts, config.num_local_experts)
    if by_other_name and not num_experts_fits:
        message = (
            f"num_experts {config.num_experts} and num_local_experts {config.num_local_experts} "
            "contradict each other: give num_experts alone"
        )
        problems.append((experts, message))
    if not problems and not config.sparse_layers:
        key = "mlp_only_layers" if config.mlp_only_layers else "decoder_sparse_step"
        message = f"none of the {config.num_hidden_layers} layers has experts: use the model qwen3"
        problems.append((key, message))
    return problems


_COMMON = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}
presets: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _COMMON
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": _COMMON
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
}

# Keys of a Hugging Face config.json that have no effect here.
passed_over = keys.passed_over | {"output_router_logits", "sliding_window", "max_window_layers"}

# Keys with the only supported value: another value would be another model.
# Without a sliding window, the two keys of windows above have no effect.
only = keys.only | {"use_sliding_window": False}

# A Hugging Face config.json has this `model_type`; a missing key has the default of transformers.
model_type = "qwen3_moe"
_LEFT_OUT: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
}


def from_hugging_face(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of `Config` for those of a config.json."""
    values = keys.read_config_json(values, _LEFT_OUT)
    experts = values.pop("num_local_experts", None)
    if experts is not None:
        values["num_experts"] = experts
    return values


def to_hugging_face(config: Config) -> dict[str, Any]:
    """The config.json that describes a model."""
    experts = config.num_local_experts or config.num_experts
    written = keys.write_config_json(config, "Qwen3MoeForCausalLM", model_type, only)
    return written | {"num_experts": experts, "num_local_experts": experts}


# Initial values, by the first matching pattern: "normal" has the standard deviation
# `initializer_range`.
init_plan = {"*norm.weight": "ones", "*.loads": "zeros", "*": "normal"}

# How weights are split over `tp`, in Hugging Face's words. All ranks hold dense feed-forward parts
# whole.
tp_plan = {
    "model.embed_tokens": "embedding_rowwise_sequence",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    # each rank normalizes its own heads
    "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
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
        "model.layers.*.mlp.experts.{}.gate_proj.weight",
        "model.layers.*.mlp.experts.{}.up_proj.weight",
    ),
    "model.layers.*.mlp.experts.down_proj": ("model.layers.*.mlp.experts.{}.down_proj.weight",),
    "*.balance.loads": (),
}
