"""A Llama with unusual layers, as `kind` says.

stopped            the second layer passes no gradient back, and the last computes one weight from
two parameters one module         of three layers the first and the last are the same module shared
parameters  ... are two modules with the same parameters own norm           each feed-forward
normalizes its own input: before both layers of the plan, not between them
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.job.locate import model_file

llama = model_file("llama")
tp_plan, check = llama.tp_plan, llama.check
init_plan = {"*weight_g": "ones", **llama.init_plan}


@dataclass(frozen=True)
class Config(llama.Config):
    kind: str = "stopped"


class Stopped(llama.Layer):
    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x.detach(), *others)


class FeedForward(llama.MLP):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm = nn.RMSNorm(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def with_parameters_of(layer: nn.Module, config: Config) -> nn.Module:
    other = llama.Layer(config)
    for name, module in other.named_modules():
        for own in module._parameters:
            module._parameters[own] = layer.get_submodule(name)._parameters[own]
    return other


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        layers = self.model.layers
        match config.kind:
            case "stopped":
                layers[1] = Stopped(config)
                # the deprecated version, which works by hooks
                with warnings.catch_warnings(action="ignore"):
                    nn.utils.weight_norm(layers[-1].mlp.up_proj)
            case "one module":
                layers.append(layers[0])
            case "shared parameters":
                layers.append(with_parameters_of(layers[0], config))
            case "own norm":
                for layer in layers:
                    layer.mlp = FeedForward(config)
