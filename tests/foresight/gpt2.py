"""The starter's model with GPT-2's layers: one projection for q, k and v, and the other GELU."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.job.locate import model_file

starter = model_file("tools/starter/model.py")


@dataclass(frozen=True)
class Config(starter.Config):
    vocab_size: int = 256


class Layer(starter.Layer):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        del self.q, self.k, self.v
        self.qkv = nn.Linear(config.width, 3 * config.width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(starter.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
