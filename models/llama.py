"""Llama, as single-device PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The parameters bear Hugging Face's names, so that weights need no table of names. Nothing here knows of a mesh; the
small tables at the end say how the weights start (`init_plan`), how they split over `tp` (`tp_plan`), and which modules
mix the tokens of a sequence (`cp_plan`).
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, attention
from meshtrain.dropout import Dropout


@dataclass(frozen=True)
class Config:
    """Hugging Face's keys of a Llama, and their meaning there; `hidden_dropout` is ours."""

    hidden_size: int = 256  # width of the model
    intermediate_size: int = 768  # width between the two halves of a feed-forward part
    num_hidden_layers: int = 4  # layers
    num_attention_heads: int = 8  # query heads of a layer
    num_key_value_heads: int | None = None  # key/value heads of a layer; null: as many as query heads
    head_dim: int | None = None  # width of a head; null: hidden_size / num_attention_heads
    vocab_size: int = 256  # token ids that the model knows, from 0
    max_position_embeddings: int = 2048  # the longest sequence that the model is meant for
    rope_theta: float = 10000.0  # base of the rotary angles
    rope_scaling: dict[str, Any] | None = None  # angles for longer sequences: {rope_type: yarn, factor: 4.0, ...}
    rope_parameters: dict[str, Any] | None = None  # rope_theta and rope_scaling in one, as transformers 5 writes them
    rms_norm_eps: float = 1e-5  # added to the mean square in a norm
    tie_word_embeddings: bool = False  # one matrix for the embedding and the head
    initializer_range: float = 0.02  # standard deviation of the first weights
    hidden_dropout: float = 0.0  # share of features dropped behind the embedding, attention and feed-forward part

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope(self) -> tuple[float, dict[str, Any]]:
        """The base of the rotary angles and their scaling, whichever way they were written."""
        if self.rope_parameters is None:
            return self.rope_theta, self.rope_scaling or {}
        return self.rope_parameters.get("rope_theta", self.rope_theta), self.rope_parameters


def rotary_frequencies(config: Config, device: torch.device, length: int = 0) -> Tensor:
    """Angle per position of each pair of features: (e/2), float64. Keys and formulas are those of transformers.

    `linear` divides all angles by `factor` (https://arxiv.org/abs/2306.15595), `yarn` (https://arxiv.org/abs/2309.00071,
    section 3.2) and `llama3` (https://arxiv.org/abs/2407.21783, section 3.2) those of slow pairs. `dynamic`
    (2309.00071, sections 3.1 and 3.3) raises the base with `length`, the tokens of the whole sequence on all ranks.
    """
    e = config.head_width
    theta, scaling = config.rope
    kind = rope_type(scaling)
    if kind == "dynamic":
        ratio = max(length / config.max_position_embeddings, 1.0)
        theta *= (scaling["factor"] * ratio - (scaling["factor"] - 1)) ** (e / (e - 2))
    frequencies = theta ** -(torch.arange(0, e, 2, dtype=torch.float64, device=device) / e)
    if kind in ("default", "dynamic"):
        return frequencies
    keep: Tensor | float = 0.0  # 0: divided by the factor, 1: as it was
    original = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((original * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    if kind == "yarn":  # a blend between the pairs that turn so many times over the original length
        turns = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
        first, last = (e * math.log(original / (2 * math.pi * n)) / (2 * math.log(theta)) for n in turns)
        if scaling.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, e - 1)
        pairs = torch.arange(e // 2, dtype=torch.float64, device=device)
        keep = 1 - ((pairs - first) / ((last - first) or 0.001)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling["factor"])


def rotary_magnitude(config: Config) -> float:
    """What cosines and sines are multiplied by: YaRN's `attention_factor` (section 3.4 there), otherwise 1."""
    scaling = config.rope[1]
    if rope_type(scaling) != "yarn":
        return 1.0
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    growth = 0.1 * math.log(scaling["factor"])
    default = (growth * mscale + 1) / (growth * all_dim + 1) if mscale and all_dim else growth + 1
    return scaling.get("attention_factor") or default


def rope_type(scaling: dict[str, Any]) -> Any:
    """The kind of scaling; configs from before transformers 4.43 call the key `type`."""
    return scaling.get("rope_type", scaling.get("type", "default"))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of features of x (b, s, h, e) by its position's angle; cos and sin are (b, s, 1, e/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, e = config.hidden_size, config.head_width
        self.head_dim = e
        self.q_proj = nn.Linear(d, config.num_attention_heads * e, bias=False)
        self.k_proj = nn.Linear(d, config.kv_heads * e, bias=False)
        self.v_proj = nn.Linear(d, config.kv_heads * e, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * e, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        q, k, v = (
            rearrange(project(x), "b s (h e) -> b s h e", e=self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (rearrange(t, "b s h e -> b h s e") for t in (q, k, v))
        y = attention(q, k, v, context)
        return self.o_proj(rearrange(y, "b h s e -> b s (h e)"))


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        x = x + self.self_attn_dropout(self.self_attn(self.input_layernorm(x), cos, sin, context))
        return x + self.mlp_dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """What Hugging Face calls `model`: everything but the head."""

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
        """The modules in the order in which they run; any run of them can be a stage."""
        return [self.model.embed_tokens, *self.model.layers, self.model.norm, self.lm_head]

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: AttentionContext | Tensor | None = None
    ) -> Tensor:
        """Tokens (b, s) to logits (b, s, v).

        Args:
            tokens: token ids.
            positions: (b, s), each token's place for the rotary angles; None counts from 0.
            documents: (b, s), the document of each token; none attends across documents. None: one document a row.
                A batch brings the record that attention takes.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.model.dropout(self.model.embed_tokens(tokens))
        context = AttentionContext.of(documents)
        length = context.length or positions.shape[1]
        angles = positions[..., None, None] * rotary_frequencies(self.config, tokens.device, length)
        magnitude = rotary_magnitude(self.config)
        cos, sin = (magnitude * angles.cos()).to(x.dtype), (magnitude * angles.sin()).to(x.dtype)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, context.at(i))
        return self.lm_head(self.model.norm(x))


COUNTS = {  # at least 1, and at most what no model comes near to: a mistyped number is told at once
    "hidden_size": 1 << 22,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 22,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 40,
}


def check(config: Config) -> list[tuple[str, str]]:
    """Combinations of keys that make no model: (key, what is wrong and what would work)."""
    counts = {key: getattr(config, key) for key in COUNTS}
    problems = [
        (key, f"{key} is {value}: use at {'least 1' if value < 1 else f'most {COUNTS[key]:,}'}")
        for key, value in counts.items()
        if value is not None and not 1 <= value <= COUNTS[key]
    ]
    if problems:
        return problems
    if not 0 <= config.hidden_dropout < 1:
        problems.append(("hidden_dropout", f"hidden_dropout is {config.hidden_dropout}: use a share from 0 to below 1"))
    h, k, d = config.num_attention_heads, config.kv_heads, config.hidden_size
    if config.head_dim is None and d % h:
        near = [n for n in range(1, d + 1) if d % n == 0]
        heads = f"use {nearest(near, h)} heads, or set head_dim"
        problems.append(("num_attention_heads", f"hidden_size {d} does not divide into {h} heads: {heads}"))
    elif config.head_width % 2:
        problems.append(("head_dim", f"rotary positions turn pairs of features: head width {config.head_width} is odd"))
    if h % k:
        near = [n for n in range(1, h + 1) if h % n == 0]
        problems.append(
            ("num_key_value_heads", f"{h} query heads do not divide over {k} key/value heads: use {nearest(near, k)}")
        )
    if not _positive(config.rope_theta):
        problems.append(("rope_theta", f"rope_theta is {config.rope_theta}: expected a number above 0"))
    rope = {key: next(_rope_problems(config, key), None) for key in ("rope_scaling", "rope_parameters")}
    return problems + [(key, problem) for key, problem in rope.items() if problem]


def nearest(working: list[int], value: int) -> str:
    """The one or two numbers that work and lie next to the one that does not."""
    below = [n for n in working if n < value][-1:]
    above = [n for n in working if n > value][:1]
    return " or ".join(str(n) for n in below + above)


# rope_type -> the numbers that it needs, and the keys that it may have besides.
_LENGTH = "original_max_position_embeddings"
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor",),
        (_LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_LENGTH,)),
}


def _rope_problems(config: Config, key: str) -> Iterator[str]:
    """What is wrong with a scaling. Only the first problem counts: later checks rely on earlier ones."""
    scaling = getattr(config, key)
    if scaling is None:
        return
    kind = rope_type(scaling)
    if not _positive(scaling.get("rope_theta", 1)):
        yield f"rope_theta is {scaling['rope_theta']!r}: expected a number above 0"
    if kind == "default" and (key == "rope_parameters" or scaling.keys() & {"rope_type", "type"}):
        return
    if kind not in ROPE_KEYS:
        written = "is missing" if kind == "default" else f"{kind!r} is not built"
        yield f"rope_type {written}: use {', '.join(ROPE_KEYS)} or default, or leave {key} out"
    needed, optional = ROPE_KEYS[kind]
    if missing := [name for name in needed if not _positive(scaling.get(name))]:
        yield f"rope_type {kind} needs the numbers {', '.join(needed)}, above 0; missing: {', '.join(missing)}"
    if unknown := sorted(scaling.keys() - {*needed, *optional, "rope_theta", "rope_type", "type"}):
        yield f"rope_type {kind} has {', '.join((*needed, *optional))}, not {', '.join(unknown)}: take it away"
    if not isinstance(scaling.get("truncate", True), bool):
        yield f"truncate is {scaling['truncate']!r}: expected true or false"
    numbers = {name: scaling[name] for name in optional if name != "truncate" and scaling.get(name) is not None}
    if wrong := [f"{name} is {value!r}" for name, value in numbers.items() if not _positive(value)]:
        yield f"{' and '.join(wrong)}: expected a number above 0"
    if scaling["factor"] < 1:
        yield f"factor is {scaling['factor']}: expected at least 1, by which sequences may be longer"
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        yield "high_freq_factor must be larger than low_freq_factor"
    if kind == "yarn" and (scaling.get("beta_fast") or 32) < (scaling.get("beta_slow") or 1):
        yield "beta_fast must not be smaller than beta_slow"
    if kind == "yarn" and config.rope[0] <= 1:
        yield f"rope_theta is {config.rope[0]}: rope_type yarn needs one above 1"
    if kind == "dynamic" and config.head_width < 4:
        yield f"rope_type dynamic needs heads of at least 4 features, found {config.head_width}"


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, _LENGTH: 8192}
_COMMON = {
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": _LLAMA3 | {"factor": 8.0},
}
presets: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _COMMON | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "rope_scaling": _LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True,
    },
    "llama-3.2-3b": _COMMON | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "head_dim": 128, "rope_scaling": _LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _COMMON | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-3.1-70b": _COMMON | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "llama-3.1-405b": _COMMON | {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    },
}  # fmt: skip

# Keys of a Hugging Face config.json that change nothing here.
passed_over = frozenset(
    {
        "architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "torch_dtype", "dtype",
        "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "attn_implementation", "_attn_implementation",
        "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type",
        "torchscript", "use_bfloat16", "is_encoder_decoder",
    }
)  # fmt: skip

# Keys with the one value that is built: another value would be another model.
only: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
}

# A config.json of Hugging Face's has this `model_type`; a key that it leaves out has the value of transformers.
model_type = "llama"
_LEFT_OUT: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
}


def from_hugging_face(keys: dict[str, Any]) -> dict[str, Any]:
    """Our keys for those of a config.json; each of the two values in `rope_parameters` can then be given anew."""
    keys = _LEFT_OUT | keys
    rope = keys.pop("rope_parameters", None)
    if rope is not None:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        keys["rope_theta"] = rope.get("rope_theta", keys.get("rope_theta", Config.rope_theta))
        keys["rope_scaling"] = None if rope_type(scaling) == "default" else scaling
    return keys


def to_hugging_face(config: Config) -> dict[str, Any]:
    """A config.json that describes a model, for transformers 5 (`rope_parameters`) and those before it."""
    theta, rope = config.rope
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    scaling["rope_type"] = rope_type(rope)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": model_type,
        **asdict(config),
        **only,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "rope_parameters": {**scaling, "rope_theta": theta},
        "bos_token_id": None,  # a run knows no special tokens
        "eos_token_id": None,
    }


# First values, by the first pattern that matches: "normal" has the standard deviation `initializer_range`.
init_plan = {"*norm.weight": "ones", "*": "normal"}

# How the weights split over `tp`, in Hugging Face's words.
tp_plan = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}

# The modules in which tokens see each other. A model with this table takes an `AttentionContext` for `documents`.
cp_plan = {"model.layers.*.self_attn": "attention"}
