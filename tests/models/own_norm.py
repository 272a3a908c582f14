"""A Llama whose feed-forward normalizes its own input: the norm is before both layers of the plan, not between them."""

import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.config.locate import model_file

llama = model_file("llama")
Config, init_plan, tp_plan = llama.Config, llama.init_plan, llama.tp_plan


class FeedForward(llama.MLP):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.norm = nn.RMSNorm(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(llama.Model):
    def __init__(self, config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = FeedForward(config)
