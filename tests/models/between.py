"""A Llama with parameters between its column-wise and row-wise layers: norms of q and k, and a scale in the MLP."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshtrain.attention import attention
from meshtrain.config.locate import model_file
from meshtrain.rotary import Rotary, rotate

llama = model_file("llama")
init_plan = {"*scale": "ones", **llama.init_plan}
style = "replicated_with_grad_allreduce"
tp_plan = {**llama.tp_plan, "model.layers.*.self_attn.[qk]_norm": style, "model.layers.*.mlp.scale": style}


@dataclass(frozen=True)
class Config(llama.Config):
    pass


class Attention(llama.Attention):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        q, k, v = (
            rearrange(project(x), "b s (h e) -> b s h e", e=self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(one, rotary.cos, rotary.sin) for one in (self.q_norm(q), self.k_norm(k)))
        y = attention(*(rearrange(t, "b s h e -> b h s e") for t in (q, k, v)), mask)
        return self.o_proj(rearrange(y, "b h s e -> b s (h e)"))


class MLP(llama.MLP):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.scale * F.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn, layer.mlp = Attention(config), MLP(config)
