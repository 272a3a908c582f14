"""Parameter groups: which optimizer updates a parameter, at which rate and decay, by patterns of its name. Pure."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from meshtrain.optim.registry import update_rule
from meshtrain.parallel.sharding import ParameterSpec

if TYPE_CHECKING:
    from meshtrain.config.schema import Optimizer as OptimizerConfig

# Names of embeddings and heads, which Muon leaves to AdamW: their rows are vectors of tokens, looked up one by one.
ENDS = ("*embed*", "*wte*", "*wpe*", "*lm_head*", "*head.weight", "*classifier*", "output.weight")

EMA = "ema"  # the name of the average among a parameter's states


@dataclass(frozen=True)
class GroupOptions:
    """What an update does with a parameter."""

    weight_decay: float
    lr_scale: float  # multiplies the rate of the schedule
    name: str  # of the optimizer


def group_options(config: "OptimizerConfig", spec: ParameterSpec) -> GroupOptions:
    """By the first group whose pattern matches its name; else parameters of one dim (norms, biases) do not decay."""
    group = next((group for group in config.groups if fnmatchcase(spec.name, group.match)), None)
    decay, scale, name = config.weight_decay if len(spec.shape) > 1 else 0.0, 1.0, config.name
    suits = suits_muon(spec)
    if group is not None:
        decay = decay if group.weight_decay is None else group.weight_decay
        scale = group.lr_scale if group.lr is None else group.lr / config.lr
        name, suits = group.name or name, 2 <= len(spec.shape) <= 3 if group.name else suits
    return GroupOptions(decay, scale, "adamw" if name == "muon" and not suits else name)


def suits_muon(spec: ParameterSpec) -> bool:
    """Whether a parameter is a matrix between a model's ends, or a stack of the matrices of a layer's experts."""
    matrices = len(spec.shape) == 2 or (len(spec.shape) == 3 and "experts" in spec.name.split("."))
    return matrices and not any(fnmatchcase(spec.name, pattern) for pattern in ENDS)


def state_specs(config: "OptimizerConfig", spec: ParameterSpec) -> dict[str, ParameterSpec]:
    """What a run keeps for a parameter that is trained: name -> its shape, type, and how it lies. `spec`: of a copy
    that shares the optimizer's work its `optimizer_shard`."""
    specs = update_rule(group_options(config, spec).name, config.state_precision).state_specs(spec)
    average = {} if config.ema_decay is None else {EMA: replace(spec, name=f"{spec.name}.{EMA}")}
    return specs | average
