"""Rotary positions (RoPE, https://arxiv.org/abs/2104.09864): pairs of features turn by an angle per position.

A `scaling`, for longer sequences, is a dict as in transformers: `rope_type` and its numbers, {} for none.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

# rope_type -> the numbers that it needs, and the keys that it may have besides.
LENGTH = "original_max_position_embeddings"
YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (("factor",), (LENGTH, *YARN, "truncate")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (LENGTH,)),
}


class Rotary:
    """What a model hands its blocks of `cos_sin`: tensors that a block gets are cast to the type in which it computes,
    and what this holds is not. No dataclass and no tuple: FSDP would look into those."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin


def rope_type(scaling: dict[str, Any]) -> Any:
    """The kind of scaling; configs from before transformers 4.43 call the key `type`."""
    return scaling.get("rope_type", scaling.get("type", "default"))


def rotary_frequencies(
    theta: float,
    scaling: dict[str, Any],
    width: int,
    max_position_embeddings: int,
    device: torch.device,
    length: int = 0,
) -> Tensor:
    """Angle per position of each pair of features: (width/2), float64.

    `linear` divides all angles by `factor` (https://arxiv.org/abs/2306.15595), `yarn` (https://arxiv.org/abs/2309.00071,
    section 3.2) and `llama3` (https://arxiv.org/abs/2407.21783, section 3.2) those of slow pairs. `dynamic`
    (2309.00071, sections 3.1 and 3.3) raises the base with `length`, the tokens of the whole sequence on all ranks.
    `width`: features of a head that turn; `max_position_embeddings`: the length that the model was made for.
    """
    kind = rope_type(scaling)
    if kind == "dynamic":
        ratio = max(length / max_position_embeddings, 1.0)
        theta *= (scaling["factor"] * ratio - (scaling["factor"] - 1)) ** (width / (width - 2))
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    if kind in ("default", "dynamic"):
        return frequencies
    keep: Tensor | float = 0.0  # 0: divided by the factor, 1: as it was
    original = scaling.get(LENGTH) or max_position_embeddings
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((original * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    if kind == "yarn":  # a blend between the pairs that turn so many times over the original length
        turns = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
        first, last = (width * math.log(original / (2 * math.pi * n)) / (2 * math.log(theta)) for n in turns)
        if scaling.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        pairs = torch.arange(width // 2, dtype=torch.float64, device=device)
        keep = 1 - ((pairs - first) / ((last - first) or 0.001)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling["factor"])


def rotary_magnitude(scaling: dict[str, Any]) -> float:
    """What cosines and sines are multiplied by: YaRN's `attention_factor` (section 3.4 there), otherwise 1."""
    if rope_type(scaling) != "yarn":
        return 1.0
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    growth = 0.1 * math.log(scaling["factor"])
    default = (growth * mscale + 1) / (growth * all_dim + 1) if mscale and all_dim else growth + 1
    return scaling.get("attention_factor") or default


def rotary_score_factor(scaling: dict[str, Any]) -> float:
    """What DeepSeek's attention multiplies the scale of its scores by: YaRN's growth by `mscale_all_dim`, squared."""
    all_dim = scaling.get("mscale_all_dim") if rope_type(scaling) == "yarn" else None
    return (0.1 * all_dim * math.log(scaling["factor"]) + 1) ** 2 if all_dim else 1.0


def cos_sin(
    positions: Tensor,
    theta: float,
    scaling: dict[str, Any],
    width: int,
    max_position_embeddings: int,
    dtype: torch.dtype,
    length: int = 0,
) -> tuple[Tensor, Tensor]:
    """What `rotate` takes for tokens at `positions` (b, s): (b, s, 1, width/2) each, computed in float64.

    `dtype`: of what is turned. 16 bits would round a turn by up to 2^-9 of it, so what they are told is float32.
    `length`: tokens of the whole sequence, where this rank has a part of it (`AttentionContext.length`); 0: s.
    """
    length = length or positions.shape[1]
    frequencies = rotary_frequencies(theta, scaling, width, max_position_embeddings, positions.device, length)
    angles = positions[..., None, None] * frequencies
    magnitude, dtype = rotary_magnitude(scaling), torch.promote_types(dtype, torch.float32)
    return (magnitude * angles.cos()).to(dtype), (magnitude * angles.sin()).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs of features of x (b, s, h, e) by their position's angle, in the type of cos and sin if that is wider.

    cos and sin are (b, s, 1, width/2): the pairs are (0, width/2), (1, width/2 + 1), ...; features behind the first
    `width` stay as they are (`partial_rotary_factor`).
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same for pairs of neighbours (DeepSeek's `rope_interleave`); x is as wide as both halves of a pair.

    The result has first the first features of all pairs, as in transformers: scores do not depend on the order.
    """
    return rotate(rearrange(x, "... (pair two) -> ... (two pair)", two=2), cos, sin)


def scaling_problems(theta: float, scaling: dict[str, Any], width: int, key: str) -> Iterator[str]:
    """What is wrong with the scaling that stands at `key` of a config. Only the first problem counts: later checks rely
    on earlier ones. `theta`: the base that holds; `width`: features of a head that turn."""
    kind = rope_type(scaling)
    if not is_positive(scaling.get("rope_theta", 1)):
        yield f"rope_theta is {scaling['rope_theta']!r}: expected a number above 0"
    if kind == "default" and (key == "rope_parameters" or scaling.keys() & {"rope_type", "type"}):
        return
    if kind not in ROPE_KEYS:
        written = "is missing" if kind == "default" else f"{kind!r} is not built"
        yield f"rope_type {written}: use {', '.join(ROPE_KEYS)} or default, or leave {key} out"
    needed, optional = ROPE_KEYS[kind]
    if missing := [name for name in needed if not is_positive(scaling.get(name))]:
        yield f"rope_type {kind} needs the numbers {', '.join(needed)}, above 0; missing: {', '.join(missing)}"
    if unknown := sorted(scaling.keys() - {*needed, *optional, "rope_theta", "rope_type", "type"}):
        yield f"rope_type {kind} has {', '.join((*needed, *optional))}, not {', '.join(unknown)}: take it away"
    if not isinstance(scaling.get("truncate", True), bool):
        yield f"truncate is {scaling['truncate']!r}: expected true or false"
    numbers = {name: scaling[name] for name in optional if name != "truncate" and scaling.get(name) is not None}
    if wrong := [f"{name} is {value!r}" for name, value in numbers.items() if not is_positive(value)]:
        yield f"{' and '.join(wrong)}: expected a number above 0"
    if scaling["factor"] < 1:
        yield f"factor is {scaling['factor']}: expected at least 1, by which sequences may be longer"
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        yield "high_freq_factor must be larger than low_freq_factor"
    if kind == "yarn" and (scaling.get("beta_fast") or 32) < (scaling.get("beta_slow") or 1):
        yield "beta_fast must not be smaller than beta_slow"
    if kind == "yarn" and theta <= 1:
        yield f"rope_theta is {theta}: rope_type yarn needs one above 1"
    if kind == "dynamic" and width < 4:
        yield f"rope_type dynamic needs heads of at least 4 features, found {width}"


def is_positive(value: Any) -> bool:
    """A number above 0 that is not infinite; `true` is none."""
    return type(value) in (int, float) and 0 < value < math.inf
