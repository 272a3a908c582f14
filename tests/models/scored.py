"""A Llama whose attention has everything that changes scores: sinks, windows that differ between
layers, learned and fixed biases of the distance, and dropout of probabilities."""

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, attention
from meshtrain.dropout import Dropout
from meshtrain.job.locate import model_file

llama = model_file("llama")
cp_plan = llama.cp_plan
init_plan = {"*.sinks": "ones", **llama.init_plan}
DISTANCES = 6


@dataclass(frozen=True)
class Config(llama.Config):
    attention_dropout: float = 0.0
    sliding_window: int = 7  # of every second layer
    all_scores: bool = True  # whether layers have biases, too


class Attention(llama.Attention):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config)
        heads = config.num_attention_heads
        self.sinks = nn.Parameter(torch.ones(heads))
        self.distances = nn.Parameter(torch.zeros(heads, DISTANCES)) if config.all_scores else None
        self.dropout = Dropout(config.attention_dropout, heads)
        self.is_far = layer % 2 == 1
        self.window = None if self.is_far else config.sliding_window

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries[:, :, None] - keys[:, None]).clamp(min=0)
        of_heads = self.distances[:, distance.clamp(max=DISTANCES - 1)].transpose(0, 1)
        return of_heads - 0.1 * distance[:, None] if self.is_far else of_heads

    def forward(self, x: Tensor, rotary: Any, context: AttentionContext) -> Tensor:
        q, k, v = (
            rearrange(project(x), "b s (h e) -> b h s e", e=self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = attention(
            q,
            k,
            v,
            context,
            window=self.window,
            sinks=self.sinks,
            bias=None if self.distances is None else self.bias,
            dropout=self.dropout,
        )
        return self.o_proj(rearrange(y, "b h s e -> b s (h e)"))


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = Attention(config, i)
