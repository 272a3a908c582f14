"""A small language model with every kind of dropout but meshtrain's: functional, in attention, torch's modules."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    hidden_size: int = 16  # width
    num_hidden_layers: int = 2  # blocks
    vocab_size: int = 256  # tokens
    dropout: float = 0.3  # share of what is dropped, everywhere


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, self.p = config.hidden_size, config.dropout
        self.norm = nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.dropout = nn.Dropout(self.p)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, d) -> (b, s, d)."""
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, dim=-1)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)[:, 0]
        x = x + F.dropout(self.out(y), self.p, self.training)
        return x + self.dropout(torch.tanh(x))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def blocks(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.head]

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Tokens (b, s) -> logits (b, s, v)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
