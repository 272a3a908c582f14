"""Parameter groups: which optimizer updates a parameter, at which rate and decay, by patterns of its name. Pure."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from meshtrain.optim.registry import update_rule
from meshtrain.parallel.sharding import ParameterSpec

if TYPE_CHECKING:
    from meshtrain.config.schema import Optimizer as OptimizerConfig
    from meshtrain.config.schema import ParamGroup as GroupConfig

# Names of embeddings and heads, which Muon leaves to AdamW: their rows are vectors of tokens, looked up one by one.
ENDS = ("*embed*", "*wte*", "*wpe*", "*lm_head*", "*head.weight", "*classifier*", "output.weight")

EMA = "ema"  # the name of the average among a parameter's states


@dataclass(frozen=True)
class GroupOptions:
    """What an update does with a parameter."""

    weight_decay: float
    lr_scale: float = 1.0  # multiplies the rate of the schedule
    name: str = ""  # of the optimizer; empty: the config's


def group_of(config: "OptimizerConfig", name: str) -> "GroupConfig | None":
    """The first of a config's groups whose pattern matches a parameter's name."""
    return next((group for group in config.groups if fnmatchcase(name, group.match)), None)


def group_options(config: "OptimizerConfig", spec: ParameterSpec) -> GroupOptions:
    """By its group; without one parameters of one dim (norms, biases) do not decay."""
    group = group_of(config, spec.name)
    decay = config.weight_decay if len(spec.shape) > 1 else 0.0
    name = config.name
    if group is None:
        return GroupOptions(decay, name="adamw" if name == "muon" and not suits_muon(spec) else name)
    name = group.name or ("adamw" if name == "muon" and not suits_muon(spec) else name)
    if name == "muon" and not 2 <= len(spec.shape) <= 3:
        name = "adamw"
    scale = group.lr_scale if group.lr is None else group.lr / config.lr
    return GroupOptions(decay if group.weight_decay is None else group.weight_decay, scale, name)


def suits_muon(spec: ParameterSpec) -> bool:
    """Whether a parameter is a matrix between a model's ends, or a stack of the matrices of a layer's experts."""
    matrices = len(spec.shape) == 2 or (len(spec.shape) == 3 and "experts" in spec.name.split("."))
    return matrices and not any(fnmatchcase(spec.name, pattern) for pattern in ENDS)


def state_specs(config: "OptimizerConfig", spec: ParameterSpec) -> dict[str, ParameterSpec]:
    """What a run keeps for a parameter that is trained: name -> its shape, type, and how it lies. `spec`: of a copy
    that shares the optimizer's work its `optimizer_shard`."""
    specs = update_rule(group_options(config, spec).name, config.state_precision).state_specs(spec)
    return specs if config.ema_decay is None else specs | ema_spec(spec)


def ema_spec(spec: ParameterSpec) -> dict[str, ParameterSpec]:
    """The average of a parameter's values, which lies as it does."""
    return {EMA: replace(spec, name=f"{spec.name}.{EMA}")}
