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
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, attention
from meshtrain.dropout import Dropout
from meshtrain.experts import Balance, Experts, Router
from meshtrain.huggingface import keys
from meshtrain.prediction import MultiTokenPrediction
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
    def head_width(self) -> int:
        """`head_dim` in Hugging Face's config.json: the width of queries and keys with rotary
        positions."""
        return self.qk_rope_head_dim


class Attention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

    Keys and values of all heads are made of one narrow latent c, and a short rotary key that the
    heads share: in generation a cache need not keep more of a token. For a token x, in the paper's
    names of the weights, with rows of W_UQ, W_QR, W_UK and W_UV for each head:

        c_Q      = norm(W_DQ x)                    q_lora_rank      q_a_proj
        q        = [W_UQ c_Q, RoPE(W_QR c_Q)]      nope + rope      q_b_proj
        c        = norm(W_DKV x)                   kv_lora_rank     kv_a_proj_with_mqa, first part
        k_R      = RoPE(W_KR x)                    rope             kv_a_proj_with_mqa, second part
        k        = [W_UK c, k_R]                   nope + rope      kv_b_proj, first part
        v        = W_UV c                          v_head_dim       kv_b_proj, second part
        o_i      = sum_j softmax_j(q_i . k_j / sqrt(nope + rope)) v_j
        y        = W_O [o of all heads]            hidden_size      o_proj

    Why are the rotated features apart? Without rotation the score of query i and key j is

        q_i . W_UK c_j = (W_UK^T q_i) . c_j

    so generation can multiply queries by W_UK^T once, and attend to the cached latents c_j
    themselves. If W_UK c_j was rotated, a rotation R_{j-i}, another one for each pair of tokens,
    would stand between W_UK^T and c_j. Training makes the keys and values of all heads.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        d, h = config.hidden_size, config.num_attention_heads
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.num_heads = h
        # How the outputs of three projections are split along their last dim.
        self.query_widths = [nope, rope]  # of a head: without and with rotary positions
        self.latent_widths = [config.kv_lora_rank, rope]  # of a token: latent and rotary key
        self.kv_widths = [nope, config.v_head_dim]  # of a head: key and value

        self.q_a_proj = None
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(d, h * (nope + rope), bias=False)
        else:
            self.q_a_proj = nn.Linear(d, config.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, h * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d, config.kv_lora_rank + rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=LATENT_EPS)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, h * (nope + config.v_head_dim), bias=False)
        # A place for the tp_plan to act on: under sequence parallelism a rank has the rotary keys
        # of its own positions, and its heads need those of all. The plan gathers them here, as it
        # gathers the latent at kv_b_proj.
        self.rotary_key = nn.Identity()
        self.o_proj = nn.Linear(h * config.v_head_dim, d, bias=False)

        self.rotate = rotate_interleaved if config.rope_interleave else rotate
        # YaRN, which slows rotations down for longer sequences, also raises the scale of scores.
        _, scaling = config.rope
        self.scale = (nope + rope) ** -0.5 * rotary_score_factor(scaling)

    def forward(self, x: Tensor, rotary: Rotary, context: AttentionContext) -> Tensor:
        # Queries: (b, s, d) -> (b, s, h, nope + rope), through a latent of their own or directly.
        if self.q_a_proj is None:
            q = self.q_proj(x)
        else:
            q_latent = self.q_a_layernorm(self.q_a_proj(x))  # (b, s, q_lora_rank)
            q = self.q_b_proj(q_latent)
        q = q.unflatten(-1, (-1, sum(self.query_widths)))
        q_nope, q_rope = q.split(self.query_widths, dim=-1)

        # One latent and one rotary key for all heads: (b, s, kv_lora_rank) and (b, s, rope).
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(self.latent_widths, dim=-1)
        k_rope = self.rotary_key(k_rope).unsqueeze(2)  # as one head

        # Keys and values of each head from the latent: (b, s, h, nope) and (b, s, h, v_head_dim).
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.unflatten(-1, (-1, sum(self.kv_widths)))
        k_nope, v = kv.split(self.kv_widths, dim=-1)

        # A score is q_nope . k_nope + q_rope . k_rope: one product of the concatenated features.
        q_rope = self.rotate(q_rope, rotary.cos, rotary.sin)
        k_rope = self.rotate(k_rope, rotary.cos, rotary.sin).expand(-1, -1, k_nope.shape[2], -1)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)

        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = attention(q, k, v, context, scale=self.scale)  # (b, h, s, v_head_dim)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


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
        d, f = config.hidden_size, config.moe_intermediate_size
        n = config.n_routed_experts
        balance = Balance(
            num_experts=n,
            layers=config.num_hidden_layers - config.first_k_dense_replace,  # those with experts
            layer=layer,
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
        # The gate returns the routed experts of each token, and their weights.
        return self.experts(x, *self.gate(x)) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.self_attn_dropout = Dropout(config.hidden_dropout)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if number < config.first_k_dense_replace:
            self.mlp: nn.Module = MLP(config.hidden_size, config.intermediate_size)
        else:
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
        x = self.model.norm(x)
        # In training, the losses of further tokens; x itself comes back as it is.
        x = self.mtp(x, lambda i: (rotary, context.at(len(self.model.layers) + i)))
        return self.lm_head(x)


# The largest number that is not taken for a typing error, for each key that counts something. This
# model has no `head_dim`.
_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_COUNTS = keys.COUNTS | dict.fromkeys(_WIDTHS, 1 << 22)
del _COUNTS["head_dim"]


def check(config: Config) -> keys.Problems:
    """Invalid combinations of keys: (key, what is wrong and what would work)."""
    problems = keys.count_problems(config, _COUNTS)
    if problems:
        return problems
    problems = keys.dropout_problems(config) + keys.rope_problems(config)
    if config.kv_heads != config.num_attention_heads:
        message = (
            f"num_key_value_heads is {config.kv_heads}: latent attention makes a key of each of "
            f"the {config.num_attention_heads} heads: use null"
        )
        problems.append(("num_key_value_heads", message))
    if config.qk_rope_head_dim % 2:
        message = (
            f"rotary positions turn pairs of features: qk_rope_head_dim {config.qk_rope_head_dim} "
            f"is odd: use {config.qk_rope_head_dim + 1}"
        )
        problems.append(("qk_rope_head_dim", message))
    problems += keys.prediction_problems(config)
    return problems + keys.router_problems(config, "n_routed_experts")


# A Hugging Face config.json has this `model_type`; a missing key has the default of transformers.
model_type = "deepseek_v3"
_TRANSFORMERS_DEFAULTS: dict[str, Any] = {
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
# One more default of transformers. Presets do not have it: they train such layers only if asked to.
_PREDICTIONS = {"num_nextn_predict_layers": 1}
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
    "deepseek-v3": _TRANSFORMERS_DEFAULTS
    | {"max_position_embeddings": 163840, "rope_scaling": _YARN},
    "moonlight-16b-a3b": _TRANSFORMERS_DEFAULTS
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

# Keys of a config.json that have no effect here. Load balancing (aux_loss_alpha, seq_aux) has keys
# of its own: `router_aux_loss_coef`, `router_balance`.
passed_over = keys.passed_over | {
    "output_router_logits",
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
    return keys.read_config_json(written, _TRANSFORMERS_DEFAULTS | _PREDICTIONS)


def to_hugging_face(config: Config) -> dict[str, Any]:
    """The config.json that describes a model."""
    return keys.write_config_json(config, "DeepseekV3ForCausalLM", model_type, only)


# Initial values, by the first matching pattern: "normal" has the standard deviation
# `initializer_range`.
init_plan = {"*norm.weight": "ones", "*.loads": "zeros", "*bias": "zeros", "*": "normal"}

# How weights are split over `tp`, in Hugging Face's words except for the last. `q_[bp]*` is
# q_b_proj, or q_proj without a latent of queries; `mlp.*gate_proj` also matches that of the shared
# experts.
_TP_PLAN = {
    "model.embed_tokens": "embedding_rowwise_sequence",
    "*.self_attn.q_[bp]*": "colwise",
    "*.self_attn.kv_b_proj": "colwise",
    "*.self_attn.o_proj": "rowwise",
    "*.mlp.*gate_proj": "colwise",
    "*.mlp.*up_proj": "colwise",
    "*.mlp.*down_proj": "rowwise",
    "lm_head": "colwise_logits",
    "*.self_attn.*_a_*": "replicate",
    "*.self_attn.rotary_key": "gather_sequence",
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


# Tensors that files have several times: in each layer that predicts further tokens, a copy of the
# embedding and one of the head.
stored_again = keys.prediction_copies

# Tensors of files that a model without them passes over: DeepSeek-V3's layer 61 predicts further
# tokens, and belongs to a model with `num_nextn_predict_layers` only.
ignored = ("model.layers.61.*",)
