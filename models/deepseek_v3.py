"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437), as single-device PyTorch: latent attention, and
experts chosen by sigmoid scores and a correction bias, next to shared experts that compute every
token.

Parameters have the names that transformers uses in memory; `stored_as` has their names in files.
Nothing here depends on a mesh; the tables at the end say how weights are initialized and split.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, attention
from meshtrain.dropout import Dropout
from meshtrain.experts import Balance, Experts, Router
from meshtrain.huggingface import keys
from meshtrain.rotary import Rotary, cos_sin, rotary_score_factor, rotate, rotate_interleaved

LATENT_EPS = 1e-6  # epsilon of the norms of latents, independent of `rms_norm_eps`


@dataclass(frozen=True)
class Config(keys.DecoderConfig):
    """Hugging Face's keys of DeepSeek-V3, with the same meaning; `hidden_dropout` and the last four
    are meshtrain's."""

    hidden_size: int = 256  # width of the model
    intermediate_size: int = 768  # inner width of the feed-forward part of a layer without experts
    num_hidden_layers: int = 4  # number of layers
    num_attention_heads: int = 8  # attention heads per layer
    num_key_value_heads: int | None = None  # must be num_attention_heads, or null
    q_lora_rank: int | None = 96  # width of the latent of queries; null: none
    kv_lora_rank: int = 64  # width of the latent of keys and values
    # width of the part of a head's query and key without rotary positions
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16  # width of the part with rotary positions; all heads share this key
    v_head_dim: int = 32  # width of a head's values
    vocab_size: int = 256  # number of token ids
    max_position_embeddings: int = 2048  # the longest sequence that the model is designed for
    rope_theta: float = 10000.0  # base of the rotary angles
    # angles for longer sequences: {rope_type: yarn, factor: 4.0, ...}
    rope_scaling: dict[str, Any] | None = None
    # rope_theta and rope_scaling in one, as in transformers 5
    rope_parameters: dict[str, Any] | None = None
    # whether adjacent features form the rotated pairs, or the two halves of a head
    rope_interleave: bool = True
    rms_norm_eps: float = 1e-6  # added to the mean square in a norm
    tie_word_embeddings: bool = False  # whether the embedding and the head share one matrix
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
    def head_width(self) -> int:
        """`head_dim` in Hugging Face's config.json: the width of queries and keys with rotary
        positions."""
        return self.qk_rope_head_dim


class Attention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1): the
    keys and values of all heads are projected from one narrow latent, and the rotary part of the
    key is shared by all heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d, h, rope = config.hidden_size, config.num_attention_heads, config.qk_rope_head_dim
        self.num_heads = h
        # output widths of three projections, in turn
        self.latent_widths = [
            config.kv_lora_rank,
            rope,
        ]
        self.query_widths = [config.qk_nope_head_dim, rope]
        self.kv_widths = [config.qk_nope_head_dim, config.v_head_dim]
        self.rotate = rotate_interleaved if config.rope_interleave else rotate
        self.scale = sum(self.query_widths) ** -0.5 * rotary_score_factor(config.rope[1])
        self.q_a_proj = None
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(d, h * sum(self.query_widths), bias=False)
        else:
            self.q_a_proj = nn.Linear(d, config.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, h * sum(self.query_widths), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d, sum(self.latent_widths), bias=False)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=LATENT_EPS)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, h * sum(self.kv_widths), bias=False)
        self.rotary_key = nn.Identity()  # a name for the tp_plan
        self.o_proj = nn.Linear(h * config.v_head_dim, d, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, context: AttentionContext) -> Tensor:
        q = (
            self.q_proj(x)
            if self.q_a_proj is None
            else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        )
        latent, rotary_key = self.kv_a_proj_with_mqa(x).split(self.latent_widths, dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        q, q_rotary = rearrange(q, "b s (h e) -> b s h e", e=sum(self.query_widths)).split(
            self.query_widths, dim=-1
        )
        k, v = rearrange(kv, "b s (h e) -> b s h e", e=sum(self.kv_widths)).split(
            self.kv_widths, dim=-1
        )
        k_rotary = self.rotate(
            rearrange(self.rotary_key(rotary_key), "b s e -> b s 1 e"), rotary.cos, rotary.sin
        )
        q = torch.cat((q, self.rotate(q_rotary, rotary.cos, rotary.sin)), dim=-1)
        k = torch.cat((k, k_rotary.expand(-1, -1, k.shape[2], -1)), dim=-1)
        q, k, v = (rearrange(t, "b s h e -> b h s e") for t in (q, k, v))
        y = attention(q, k, v, context, scale=self.scale)
        return self.o_proj(rearrange(y, "b h s e -> b s (h e)"))


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
        width, longest = self.config.rotary_width, self.config.max_position_embeddings
        rotary = Rotary(
            *cos_sin(positions, *self.config.rope, width, longest, x.dtype, context.length)
        )
        for i, layer in enumerate(self.model.layers):
            x = layer(x, rotary, context.at(i))
        return self.lm_head(self.model.norm(x))


_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_COUNTS = keys.COUNTS | dict.fromkeys(_WIDTHS, 1 << 22)
del _COUNTS["head_dim"]


def check(config: Config) -> keys.Problems:
    """Invalid combinations of keys: (key, what is wrong and what would work)."""
    if problems := keys.count_problems(config, _COUNTS):
        return problems
    problems = keys.dropout_problems(config) + keys.rope_problems(config)
    if config.kv_heads != config.num_attention_heads:
        message = (
            f"num_key_value_heads is {config.kv_heads}: latent attention makes a key of each of "
            "the "
        )
        problems.append(
            ("num_key_value_heads", f"{message}{config.num_attention_heads} heads: use null")
        )
    if config.qk_rope_head_dim % 2:
        message = (
            f"rotary positions turn pairs of features: qk_rope_head_dim {config.qk_rope_head_dim} "
            "is odd"
        )
        problems.append(("qk_rope_head_dim", f"{message}: use {config.qk_rope_head_dim + 1}"))
    return problems + keys.router_problems(config, "n_routed_experts")


# A Hugging Face config.json has this `model_type`; a missing key has the default of transformers.
model_type = "deepseek_v3"
_LEFT_OUT: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
presets: dict[str, dict[str, Any]] = {
    "deepseek-v3": _LEFT_OUT | {"max_position_embeddings": 163840, "rope_scaling": _YARN},
    "moonlight-16b-a3b": _LEFT_OUT
    | {
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "vocab_size": 163840,
        "max_position_embeddings": 8192,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
    },
}

# Keys of a config.json that have no effect here: of multi-token prediction layers, and of load
# balancing.
passed_over = keys.passed_over | {
    "output_router_logits",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "head_dim",
    "qk_head_dim",
    "ep_size",
    "aux_loss_alpha",
    "seq_aux",
}

# Keys with the only supported value: another value would be another model.
_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
only = keys.only | _ROUTING | {"pretraining_tp": 1}


def from_hugging_face(written: dict[str, Any]) -> dict[str, Any]:
    """The keys of `Config` for those of a config.json."""
    return keys.read_config_json(written, _LEFT_OUT)


def to_hugging_face(config: Config) -> dict[str, Any]:
    """The config.json that describes a model."""
    return keys.write_config_json(config, "DeepseekV3ForCausalLM", model_type, only) | {
        "num_nextn_predict_layers": 0
    }


# Initial values, by the first matching pattern: "normal" has the standard deviation
# `initializer_range`.
init_plan = {"*norm.weight": "ones", "*.loads": "zeros", "*bias": "zeros", "*": "normal"}

# How weights are split over `tp`, in Hugging Face's words except for the last. `q_[bp]*` is
# q_b_proj, or q_proj without a latent of queries; `mlp.*gate_proj` also matches that of the shared
# experts.
tp_plan = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_[bp]*": "colwise",
    "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.*gate_proj": "colwise",
    "model.layers.*.mlp.*up_proj": "colwise",
    "model.layers.*.mlp.*down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
    "model.layers.*.self_attn.*_a_*": "replicate",
    "model.layers.*.self_attn.rotary_key": "gather_sequence",
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

# Tensors of files that are not read: those of the multi-token prediction layer.
ignored = ("model.layers.61.*",)
