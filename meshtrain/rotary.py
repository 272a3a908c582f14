"""Rotary positions (RoPE, https://arxiv.org/abs/2104.09864): pairs of features rotate by an angle
per position.

A `scaling`, for longer sequences, is a dict as in transformers: `rope_type` and its parameters, {}
for none.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshtrain.huggingface.rope_keys import rope_type

# rope_type -> the numbers that it requires, and its optional keys.
LENGTH = "original_max_position_embeddings"
YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (("factor",), (LENGTH, *YARN, "truncate")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (LENGTH,)),
}


class Rotary:
    """The result of `cos_sin`, as a model passes it to its blocks. FSDP casts the tensors that a
    block receives to the compute dtype, but not those inside this object: it is neither a dataclass
    nor a tuple, into which FSDP descends."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin


def rotary_frequencies(
    theta: float,
    scaling: dict[str, Any],
    width: int,
    max_position_embeddings: int,
    device: torch.device,
    length: int = 0,
) -> Tensor:
    """Angle per position of each pair of features: (width/2), float64.

    `linear` divides all angles by `factor` (https://arxiv.org/abs/2306.15595), `yarn`
    (https://arxiv.org/abs/2309.00071, section 3.2) and `llama3` (https://arxiv.org/abs/2407.21783,
    section 3.2) only those of slow pairs. `dynamic` (2309.00071, sections 3.1 and 3.3) raises the
    base with `length`, the tokens of the whole sequence on all ranks. `width`: number of rotated
    features of a head; `max_position_embeddings`: the context length of the model.
    """
    kind = rope_type(scaling)
    if kind == "dynamic":
        ratio = max(length / max_position_embeddings, 1.0)
        theta *= (scaling["factor"] * ratio - (scaling["factor"] - 1)) ** (width / (width - 2))
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    if kind in ("default", "dynamic"):
        return frequencies
    # The share of each angle that is kept; the rest is divided by the factor.
    keep: Tensor | float = 0.0
    original = scaling.get(LENGTH) or max_position_embeddings
    if kind == "llama3":
        # A ramp between the pairs that rotate `low` and `high` times over the original length.
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        rotations = original * frequencies / (2 * math.pi)
        keep = ((rotations - low) / (high - low)).clamp(0, 1)
    if kind == "yarn":
        keep = _yarn_ramp(theta, scaling, width, original, device)
    return frequencies * (keep + (1 - keep) / scaling["factor"])


def _yarn_ramp(
    theta: float, scaling: dict[str, Any], width: int, original: int, device: torch.device
) -> Tensor:
    """1 for the pairs before the one that rotates `beta_fast` times over the original length, 0
    after the one that rotates `beta_slow` times, and a ramp between them: (width/2)."""

    def pair_with(rotations: float) -> float:
        return width * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    first = pair_with(scaling.get("beta_fast") or 32)
    last = pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float64, device=device)
    return 1 - ((pairs - first) / ((last - first) or 0.001)).clamp(0, 1)


def rotary_magnitude(scaling: dict[str, Any]) -> float:
    """The factor of cosines and sines: YaRN's `attention_factor` (section 3.4 of its paper),
    otherwise 1."""
    if rope_type(scaling) != "yarn":
        return 1.0
    given = scaling.get("attention_factor")
    if given:
        return given
    growth = 0.1 * math.log(scaling["factor"])
    mscale = scaling.get("mscale")
    all_dim = scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return (growth * mscale + 1) / (growth * all_dim + 1)
    return growth + 1


def rotary_score_factor(scaling: dict[str, Any]) -> float:
    """The factor of the score scale in DeepSeek's attention: YaRN's magnitude for `mscale_all_dim`,
    squared."""
    all_dim = scaling.get("mscale_all_dim")
    if rope_type(scaling) != "yarn" or not all_dim:
        return 1.0
    return (0.1 * all_dim * math.log(scaling["factor"]) + 1) ** 2


def cos_sin(
    positions: Tensor,
    theta: float,
    scaling: dict[str, Any],
    width: int,
    max_position_embeddings: int,
    dtype: torch.dtype,
    length: int = 0,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `rotate`, of tokens at `positions` (b, s): (b, s, 1, width/2) each,
    computed in float64.

    `dtype`: that of the tensors to rotate. For 16 bits the result is float32, because rounding to
    16 bits would have a relative error of up to 2^-9. `length`: tokens of the whole sequence, if
    this rank has a part of it; 0: s.
    """
    length = length or positions.shape[1]
    frequencies = rotary_frequencies(
        theta, scaling, width, max_position_embeddings, positions.device, length
    )
    angles = positions[..., None, None] * frequencies
    magnitude = rotary_magnitude(scaling)
    wide = torch.promote_types(dtype, torch.float32)
    return (magnitude * angles.cos()).to(wide), (magnitude * angles.sin()).to(wide)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of features of x (b, s, h, e) by their position's angle, in the dtype of cos
    and sin if wider.

    cos and sin are (b, s, 1, width/2): the pairs are (0, width/2), (1, width/2 + 1), ...; features
    after the first `width` stay unchanged (`partial_rotary_factor`).
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.cat(rotated, dim=-1).to(x.dtype)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` for pairs of adjacent features (DeepSeek's `rope_interleave`); x has exactly `width`
    features.

    In the result the first features of all pairs come first, as in transformers: scores do not
    depend on the order.
    """
    pairs = x.unflatten(-1, (-1, 2))  # (..., pair, 2)
    return rotate(pairs.transpose(-2, -1).flatten(-2), cos, sin)


def scaling_problems(theta: float, scaling: dict[str, Any], width: int, key: str) -> Iterator[str]:
    """Problems of the scaling at `key` of a config. Only the first one is meaningful: later checks
    rely on earlier ones. `theta`: the base in effect; `width`: number of rotated features of a
    head."""
    kind = rope_type(scaling)
    if not is_positive(scaling.get("rope_theta", 1)):
        yield f"rope_theta is {scaling['rope_theta']!r}: expected a number above 0"
    has_type = bool(scaling.keys() & {"rope_type", "type"})
    others = sorted(scaling.keys() - {"rope_theta", "rope_type", "type"})
    if kind == "default" and others and has_type:
        yield (
            f"rope_type default has no {', '.join(others)}: take it away, or name the type that it "
            "belongs to"
        )
    if kind == "default" and not others and (has_type or key == "rope_parameters"):
        return
    if kind not in ROPE_KEYS:
        written = "is missing" if kind == "default" else f"{kind!r} is not built"
        yield f"rope_type {written}: use {', '.join(ROPE_KEYS)} or default, or leave {key} out"
    needed, optional = ROPE_KEYS[kind]
    missing = [name for name in needed if not is_positive(scaling.get(name))]
    if missing:
        yield (
            f"rope_type {kind} needs the numbers {', '.join(needed)}, above 0; missing: "
            f"{', '.join(missing)}"
        )
    known = {*needed, *optional, "rope_theta", "rope_type", "type"}
    unknown = sorted(scaling.keys() - known)
    if unknown:
        yield (
            f"rope_type {kind} has {', '.join((*needed, *optional))}, not {', '.join(unknown)}: "
            "take it away"
        )
    if not isinstance(scaling.get("truncate", True), bool):
        yield f"truncate is {scaling['truncate']!r}: expected true or false"
    wrong: list[str] = []
    for name in optional:
        value = scaling.get(name)
        if name != "truncate" and value is not None and not is_positive(value):
            wrong.append(f"{name} is {value!r}")
    if wrong:
        yield f"{' and '.join(wrong)}: expected a number above 0"
    if scaling["factor"] < 1:
        yield (
            f"factor is {scaling['factor']}: expected at least 1, by which sequences may be longer"
        )
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        yield "high_freq_factor must be larger than low_freq_factor"
    if kind == "yarn" and (scaling.get("beta_fast") or 32) < (scaling.get("beta_slow") or 1):
        yield "beta_fast must not be smaller than beta_slow"
    if kind == "yarn" and theta <= 1:
        yield f"rope_theta is {theta}: rope_type yarn needs one above 1"
    if kind == "dynamic" and width < 4:
        yield f"rope_type dynamic needs heads of at least 4 features, found {width}"


def is_positive(value: Any) -> bool:
    """Whether the value is a finite number above 0; `true` is not."""
    return type(value) in (int, float) and 0 < value < math.inf
