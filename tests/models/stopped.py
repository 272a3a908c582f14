"""A Llama whose second layer passes no gradient back, and whose last layer computes one weight from two parameters."""

import warnings
from typing import Any

from torch import Tensor, nn

from meshtrain.config.locate import model_file

llama = model_file("llama")
Config, tp_plan, check = llama.Config, llama.tp_plan, llama.check
init_plan = {"*weight_g": "ones", **llama.init_plan}


class Stopped(llama.Layer):
    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x.detach(), *others)


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model.layers[1] = Stopped(config)
        with warnings.catch_warnings(action="ignore"):  # the deprecated version, which works by hooks
            nn.utils.weight_norm(self.model.layers[-1].mlp.up_proj)
