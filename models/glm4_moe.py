"""GLM-4.5 (https://arxiv.org/abs/2508.06471), as single-device PyTorch: experts chosen by sigmoid
scores and a correction bias, next to shared experts that compute every token.

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
from meshtrain.huggingface.keys import DecoderConfig
from meshtrain.prediction import MultiTokenPrediction
from meshtrain.rotary import Rotary, cos_sin, rotate


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Hugging Face's keys of GLM-4.5, with the same meaning; `hidden_dropout` and the last four are
    meshtrain's."""

    hidden_size: int = 256  # width of the model
    intermediate_size: int = 768  # inner width of the feed-forward part of a layer without experts
    num_hidden_layers: int = 4  # number of layers
    num_attention_heads: int = 8  # query heads per layer
    # key/value heads per layer; null: as many as query heads
    num_key_value_heads: int | None = None
    head_dim: int | None = None  # width of a head; null: hidden_size / num_attention_heads
    attention_bias: bool = False  # whether queries, keys and values have a bias
    use_qk_norm: bool = False  # whether each head's queries and keys are normalized
    vocab_size: int = 256  # number of token ids
    max_position_embeddings: int = 2048  # the longest sequence that the model is designed for
    partial_rotary_factor: float = 0.5  # fraction of a head's features with rotary positions
    rope_theta: float = 1000000.0  # base of the rotary angles
    # angles for longer sequences: {rope_type: yarn, factor: 4.0, ...}
    rope_scaling: dict[str, Any] | None = None
    # rope_theta and rope_scaling in one, as in transformers 5
    rope_parameters: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-5  # added to the mean square in a norm
    tie_word_embeddings: bool = False  # whether the embedding and the head share one matrix
    # layers that predict further tokens in training, one each (multi-token prediction)
    num_nextn_predict_layers: int = 0
    initializer_range: float = 0.02  # standard deviation of the initial weights
    # dropout probability after the embedding, attention and feed-forward part
    hidden_dropout: float = 0.0
    first_k_dense_replace: int = 1  # number of first layers without experts
    n_routed_experts: int = 8  # routed experts per layer
    # shared experts, which compute every token, built as one of n times the width
    n_shared_experts: int = 1
    moe_intermediate_size: int = 256  # inner width of an expert
    num_experts_per_tok: int = 2  # routed experts per token
    n_group: int = 1  # number of groups of experts, ...
    topk_group: int = 1  # ... and of groups from which a token's experts are chosen
    norm_topk_prob: bool = True  # whether the scores of a token's experts are divided by their sum
    routed_scaling_factor: float = 1.0  # factor of the sum of a token's experts
    router_aux_loss_coef: float = 0.0001  # coefficient of the load-balancing loss of the router
    # loads over the last global batch, or a sample
    router_balance: Literal["batch", "sequence", "none"] = "sequence"
    # coefficient of the z-loss, which keeps the router's logits small
    router_z_loss_coef: float = 0.0
    router_bias_speed: float = 0.001  # change of an expert's correction bias per step

    @property
    def rotary_factor(self) -> float:
        return self.rope[1].get("partial_rotary_factor", self.partial_rotary_factor)

    @property
    def rotary_width(self) -> int:
        return int(self.head_width * self.rotary_factor)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, e, bias = config.hidden_size, config.head_width, config.attention_bias
        self.head_dim = e
        self.q_proj = nn.Linear(d, config.num_attention_heads * e, bias=bias)
        self.k_proj = nn.Linear(d, config.kv_heads * e, bias=bias)
        self.v_proj = nn.Linear(d, config.kv_heads * e, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * e, d, bias=False)
        # nn.Identity in place of norms, because the tp_plan names them.
        self.q_norm, self.k_norm = (
            nn.RMSNorm(e, eps=config.rms_norm_eps) if config.use_qk_norm else nn.Identity()
            for _ in range(2)
        )

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
    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        d, f, n = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        balance = Balance(
            n,
            config.num_hidden_layers - config.first_k_dense_replace,
            layer,
            kind=config.router_balance,
            aux_loss_coef=config.router_aux_loss_coef,
            z_loss_coef=config.router_z_loss_coef,
            bias_speed=config.router_bias_speed,
        )
        self.gate = Router(
            d,
            n,
            config.num_experts_per_tok,
            score="sigmoid",
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            bias=True,
            groups=config.n_group,
            groups_per_token=config.topk_group,
            balance=balance,
        )
        self.experts = Experts(n, d, f)
        self.shared_experts = MLP(d, config.n_shared_experts * f)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x)) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        dense = number < config.first_k_dense_replace
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.self_attn_dropout = Dropout(config.hidden_dropout)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = (
            MLP(config.hidden_size, config.intermediate_size)
            if dense
            else MixtureOfExperts(config, number)
        )
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
        # Numbered behind the other layers, as in files.
        first = config.num_hidden_layers
        self.mtp = MultiTokenPrediction(
            [Layer(config, first + i) for i in range(config.num_nextn_predict_layers)],
            embedding=self.model.embed_tokens,
            head=self.lm_head,
            norm=lambda: nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
            dropout=config.hidden_dropout,
        )

    def blocks(self) -> list[nn.Module]:
        """The modules in execution order; any contiguous run of them can be a pipeline stage."""
        decoder = [self.model.embed_tokens, *self.model.layers, self.model.norm]
        return [*decoder, *self.mtp.blocks(), self.lm_head]

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
        x = self.model.norm(x)
        x = self.mtp(x, lambda i: (rotary, context.at(len(self.model.layers) + i)))
        return self.lm_head(x)


def check(config: Config) -> keys.Problems:
    """Invalid combinations of keys: (key, what is wrong and what would work)."""
    problems = keys.decoder_problems(config) or keys.router_problems(config, "n_routed_experts")
    problems += keys.prediction_problems(config)
    if not problems and not 2 <= config.rotary_width <= config.head_width:
        features = (
            f"{config.rotary_width} of the {config.head_width} features of a head would turn with "
            "the position"
        )
        problems.append(("partial_rotary_factor", f"{features}: use a share above 0 and at most 1"))
    return problems


_COMMON = {
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
presets: dict[str, dict[str, Any]] = {
    "glm-4.5": _COMMON
    | {
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "first_k_dense_replace": 3,
        "n_routed_experts": 160,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    "glm-4.5-air": _COMMON
    | {
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
}

passed_over = keys.passed_over | {"output_router_logits", "num_mtp_layers"}

# Keys with the only supported value: another value would be another model.
only = {key: value for key, value in keys.only.items() if key != "attention_bias"}

# A Hugging Face config.json has this `model_type`; a missing key has the default of transformers.
model_type = "glm4_moe"
_LEFT_OUT: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "rope_theta": 10000.0,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "num_nextn_predict_layers": 1,
}


def from_hugging_face(written: dict[str, Any]) -> dict[str, Any]:
    """The keys of `Config` for those of a config.json."""
    return keys.read_config_json(
        written, _LEFT_OUT, frozenset({"rope_theta", "partial_rotary_factor"})
    )


def to_hugging_face(config: Config) -> dict[str, Any]:
    """The config.json that describes a model."""
    written = keys.write_config_json(config, "Glm4MoeForCausalLM", model_type, only)
    return written | {"partial_rotary_factor": config.rotary_factor}


# Initial values, by the first matching pattern: "normal" has the standard deviation
# `initializer_range`.
init_plan = {"*norm.weight": "ones", "*.loads": "zeros", "*bias": "zeros", "*": "normal"}

# How weights are split over `tp`, in Hugging Face's words. `mlp.*gate_proj` also matches that of
# the shared experts.
_TP_PLAN = {
    "model.embed_tokens": "embedding_rowwise_sequence",
    "*.self_attn.q_proj": "colwise",
    "*.self_attn.k_proj": "colwise",
    "*.self_attn.v_proj": "colwise",
    "*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "*.self_attn.o_proj": "rowwise",
    "*.mlp.*gate_proj": "colwise",
    "*.mlp.*up_proj": "colwise",
    "*.mlp.*down_proj": "rowwise",
    "lm_head": "colwise_logits",
}


def tp_plan(config: Config) -> dict[str, str]:
    return keys.prediction_tp_plan(config, _TP_PLAN)


# Modules in which tokens attend to each other. A model with this table accepts an
# `AttentionContext` as `documents`.
cp_plan = {"*.self_attn": "attention"}

# The experts, which `parallel.expert_parallel` distributes over ranks as whole experts.
ep_plan = {"*.mlp.experts": "ep_dispatch_experts"}

# Tensor -> the tensors that files have in its place; `{}` is the index of an expert.
_STORED_AS: dict[str, tuple[str, ...]] = {
    "model.layers.*.mlp.experts.gate_up_proj": (
        "model.layers.*.mlp.experts.{}.gate_proj.weight",
        "model.layers.*.mlp.experts.{}.up_proj.weight",
    ),
    "model.layers.*.mlp.experts.down_proj": ("model.layers.*.mlp.experts.{}.down_proj.weight",),
    "*.balance.loads": (),
}


def stored_as(config: Config) -> keys.Names:
    return keys.prediction_names(config, _STORED_AS)


# What files have once more: the embedding and the head, in each layer that predicts further tokens.
stored_again = keys.prediction_copies

# Tensors of files that are not read, unless the model has that layer: it predicts further tokens,
# in GLM-4.5-Air and GLM-4.5.
ignored = ("model.layers.46.*", "model.layers.92.*")
