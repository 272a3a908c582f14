"""Parameter groups: a parameter's optimizer, learning rate and weight decay, by patterns of its
name. Pure."""

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING

from meshtrain.optim.registry import update_rule
from meshtrain.parallel.sharding import ParameterSpec

if TYPE_CHECKING:
    from meshtrain.config.schema import OptimizerSection
    from meshtrain.huggingface.stored_names import Table
    from meshtrain.optim.optimizer import UpdateRule

# Names of embeddings and heads, which Muon leaves to AdamW: their rows are token vectors, looked up
# one by one.
ENDS = ("*embed*", "*wte*", "*wpe*", "*lm_head*", "*head.weight", "*classifier*", "output.weight")

EMA = "ema"  # the name of a parameter's moving average among its states


@dataclass(frozen=True)
class GroupOptions:
    """How an update treats a parameter."""

    weight_decay: float
    lr_scale: float  # multiplies the schedule's learning rate
    name: str  # the optimizer's name


def group_options(config: "OptimizerSection", spec: ParameterSpec) -> GroupOptions:
    """Options of the first group whose pattern matches the name; by default 1-D parameters have no
    weight decay."""
    weight_decay = config.weight_decay if len(spec.shape) > 1 else 0.0
    lr_scale = 1.0
    name = config.name
    can_be_muon = suits_muon(spec)

    for group in config.groups:
        if not fnmatchcase(spec.name, group.match):
            continue
        if group.weight_decay is not None:
            weight_decay = group.weight_decay
        lr_scale = group.lr_scale if group.lr is None else group.lr / config.lr
        if group.name:
            # The user's word overrides what the name of the parameter suggests.
            name = group.name
            can_be_muon = 2 <= len(spec.shape) <= 3
        break

    if name == "muon" and not can_be_muon:
        name = "adamw"
    return GroupOptions(weight_decay, lr_scale, name)


def suits_muon(spec: ParameterSpec) -> bool:
    """Whether a parameter is a matrix between embedding and head, or the stacked matrices of a
    layer's experts."""
    if any(fnmatchcase(spec.name, pattern) for pattern in ENDS):
        return False
    is_matrix = len(spec.shape) == 2
    are_experts = len(spec.shape) == 3 and "experts" in spec.name.split(".")
    return is_matrix or are_experts


def state_specs(config: "OptimizerSection", spec: ParameterSpec) -> dict[str, ParameterSpec]:
    """The optimizer state of a trainable parameter: name -> its shape, dtype and sharding. `spec`:
    with ZeRO-1 the parameter's `optimizer_shard`."""
    specs = _rule_of(config, spec).state_specs(spec)
    if config.ema_decay is not None:
        specs |= {EMA: replace(spec, name=f"{spec.name}.{EMA}")}
    return specs


def update_bytes(config: "OptimizerSection", spec: ParameterSpec, size: int) -> int:
    """Bytes that the end of a step reads and writes in memory for a whole trainable parameter: for
    the gradient's norm, the update (`UpdateRule.update_bytes`), and the moving average. A rank
    moves its share: that of the elements that it updates. `size`: bytes per element."""
    tensor = math.prod(spec.shape) * size
    norm = tensor
    average = 0 if config.ema_decay is None else 3 * tensor
    return norm + _rule_of(config, spec).update_bytes(spec, config, size) + average


def update_flops(
    config: "OptimizerSection", spec: ParameterSpec, stored_as: "Table" = MappingProxyType({})
) -> int:
    """Floating-point operations of the products of matrices in an update of a whole trainable
    parameter. All ranks of its stage share them, copies included. They are in bfloat16, or in
    float64 if the parameter is. `stored_as`: how files divide the model's tensors."""
    return _rule_of(config, spec).update_flops(spec, stored_as)


def _rule_of(config: "OptimizerSection", spec: ParameterSpec) -> "type[UpdateRule]":
    return update_rule(group_options(config, spec).name, config.state_precision)
