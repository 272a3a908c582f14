"""A Llama with gate and up fused in one weight, whose rows cannot be split like those of a single layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.config.locate import model_file

llama = model_file("llama")
Config, init_plan = llama.Config, llama.init_plan
tp_plan = {name.replace("gate_proj", "gate_up_proj"): how for name, how in llama.tp_plan.items() if "up_" not in name}


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = MLP(config)
