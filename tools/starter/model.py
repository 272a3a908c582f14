"""A small decoder: the whole model in plain PyTorch, for one device. meshtrain parallelizes it for
a layout."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The keys of the section `model` of train.yaml."""

    vocab_size: int = 16
    width: int = 64
    layers: int = 2
    heads: int = 4
    max_positions: int = 64


class Embedding(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_positions, config.width)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(positions)


class Layer(nn.Module):
    """Causal attention, then a feed-forward net: (b, s, width) -> (b, s, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.head_dim = config.width, config.width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        # With tp a rank has only some of the heads: take their number from the tensor, not from the
        # config.
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.linear = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = Head(config)

    def blocks(self) -> list[nn.Module]:
        """The blocks that FSDP gathers one at a time, and of which pp makes stages."""
        return [self.embedding, *self.layers, self.head]

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        """Tokens (b, s) to logits (b, s, vocab_size)."""
        x = self.embedding(tokens, positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# How the layers are split over tp. A model without this table trains on every layout without tp.
tp_plan = {
    "layers.*.q": "colwise",
    "layers.*.k": "colwise",
    "layers.*.v": "colwise",
    "layers.*.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}
