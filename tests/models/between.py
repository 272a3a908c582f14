"""A Qwen3, whose norms of q and k lie between its column-wise and row-wise layers, with a scale in the MLP, too."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.config.locate import model_file

qwen3 = model_file("qwen3")
Config, check = qwen3.Config, qwen3.check
init_plan = {"*scale": "ones", **qwen3.init_plan}
tp_plan = {**qwen3.tp_plan, "model.layers.*.mlp.scale": "replicated_with_grad_allreduce"}


class MLP(qwen3.MLP):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.scale * F.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(qwen3.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = MLP(config)
