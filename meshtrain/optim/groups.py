"""Parameter groups: a parameter's optimizer, learning rate and weight decay, by patterns of its
name. Pure."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from meshtrain.optim.registry import update_rule
from meshtrain.parallel.sharding import ParameterSpec

if TYPE_CHECKING:
    from meshtrain.config.schema import Optimizer as OptimizerConfig

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


def group_options(config: "OptimizerConfig", spec: ParameterSpec) -> GroupOptions:
    """Options of the first group whose pattern matches the name; by default 1-D parameters have no
    weight decay."""
    group = next((group for group in config.groups if fnmatchcase(spec.name, group.match)), None)
    decay, scale, name = config.weight_decay if len(spec.shape) > 1 else 0.0, 1.0, config.name
    suits = suits_muon(spec)
    if group is not None:
        decay = decay if group.weight_decay is None else group.weight_decay
        scale = group.lr_scale if group.lr is None else group.lr / config.lr
        name, suits = group.name or name, 2 <= len(spec.shape) <= 3 if group.name else suits
    return GroupOptions(decay, scale, "adamw" if name == "muon" and not suits else name)


def suits_muon(spec: ParameterSpec) -> bool:
    """Whether a parameter is a matrix between embedding and head, or the stacked matrices of a
    layer's experts."""
    matrices = len(spec.shape) == 2 or (len(spec.shape) == 3 and "experts" in spec.name.split("."))
    return matrices and not any(fnmatchcase(spec.name, pattern) for pattern in ENDS)


def state_specs(config: "OptimizerConfig", spec: ParameterSpec) -> dict[str, ParameterSpec]:
    """The optimizer state of a trainable parameter: name -> its shape, dtype and sharding. `spec`:
    with ZeRO-1 the parameter's `optimizer_shard`."""
    specs = update_rule(group_options(config, spec).name, config.state_precision).state_specs(spec)
    average = {} if config.ema_decay is None else {EMA: replace(spec, name=f"{spec.name}.{EMA}")}
    return specs | average
