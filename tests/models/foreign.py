"""A decoder in the forms that other people's models have: blocks called by keyword, rotary angles
from a module outside blocks that gets the activation for its dtype, an embedding with a
`padding_idx`, blocks that are never called.

    whole        its blocks are modules
    lists        its layers are nn.ModuleLists, of which it calls the parts
    values       ... and its forward reads a value, so that it does not run without them
    reversible   its layers are modules, and their backward is its own, as in reversible networks
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    vocab_size: int = 24
    hidden_size: int = 16
    intermediate_size: int = 20
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    kind: str = "whole"


class Rotary(nn.Module):
    """As in transformers: (b, s, width) for its dtype, (b, s) -> two of (b, s, head width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer(
            "inverse", 1 / 100 ** (torch.arange(0, width, 2) / width), persistent=False
        )

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.inverse.double().to(x.device)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_dim = width // config.num_attention_heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (
            nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
            for _ in range(2)
        )

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = (part[:, None] for part in position_embeddings)
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.attention, self.mlp = Attention(config), Mlp(config)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], mask: Any = None
    ) -> Tensor:
        return self.inside(hidden_states, position_embeddings)

    def inside(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class Reversible(torch.autograd.Function):
    """Runs layers without gradients, and in its backward what is inside of them once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layers: Any) -> Tensor:
        inputs = []
        for layer in layers:
            inputs.append(x)
            x = layer(x, (cos, sin))
        ctx.save_for_backward(*inputs)
        ctx.layers, ctx.angles = layers, (cos, sin)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        for layer, saved in zip(reversed(ctx.layers), reversed(ctx.saved_tensors), strict=True):
            x = saved.detach().requires_grad_()
            with torch.enable_grad():
                y = layer.inside(x, ctx.angles)
            y.backward(grad)
            assert x.grad is not None
            grad = x.grad
        return grad, None, None, None


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.kind = config.kind
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.rotary = Rotary(config.hidden_size // config.num_attention_heads)
        layers: list[nn.Module] = [Layer(config) for _ in range(config.num_hidden_layers)]
        if config.kind in ("lists", "values"):
            layers = [nn.ModuleList(layer.children()) for layer in layers]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def blocks(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.norm, self.head]

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        if self.kind == "values" and int(tokens.max()) < 0:
            raise ValueError("an id is negative")
        x = self.embed(input=tokens)
        positions = (
            torch.arange(tokens.shape[1], device=tokens.device)[None]
            if positions is None
            else positions
        )
        angles = self.rotary(x, position_ids=positions)
        if self.kind == "reversible":
            x = Reversible.apply(x, *angles, self.layers)
        else:
            for layer in self.layers:
                x = self.through(layer, x, angles)
        return self.head(input=self.norm(x))

    def through(self, layer: Any, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        if self.kind == "whole":
            return layer(hidden_states=x, position_embeddings=angles, mask=None)
        norm1, norm2, attention, mlp = layer
        x = x + attention(norm1(x), position_embeddings=angles)
        return x + mlp(norm2(x))


tp_plan = {  # for `whole`
    "embed": "embedding_rowwise_sequence",
    "layers.*.attention.[qkv]": "colwise",
    "layers.*.attention.o": "rowwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
    "head": "colwise_logits",
}
