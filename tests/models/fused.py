"""A decoder whose layers are several in one, in which a norm needs all features, and whose head has
the weight of its embedding, which scales what it looks up: over `tp` by Hugging Face's words."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.job.locate import model_file
from meshtrain.parallel.torch_private import to_local

tp_plan = {
    "layers.*.attention.qkv": "packed_colwise",
    "layers.*.attention.o": "rowwise",
    "layers.*.mixer.up": "colwise_gather_output",
    "layers.*.mixer.down": "rowwise_split_input",
    "layers.*.mlp.gate_up": "packed_colwise",
    "layers.*.mlp.down": "rowwise",
    "head": "colwise_gather_output",
}
init_plan = {"*norm.weight": "ones", "*.bias": "zeros", "*": "normal"}


@dataclass(frozen=True)
class Config(model_file("llama").Config):  # the configs have Llama's keys
    pass


class Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embedding_dim**0.5


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = d // heads
        self.qkv = nn.Linear(d, (heads + 2 * kv_heads) * self.head_dim)
        self.o = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        queries = to_local(self.o.weight).shape[1] // self.head_dim
        keys = (heads.shape[1] - queries) // 2
        q, k, v = heads.split([queries, keys, keys], 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mixer(nn.Module):
    def __init__(self, d: int, inner: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(d, inner, bias=False), nn.RMSNorm(inner)
        self.down = nn.Linear(inner, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.norm(self.up(x))))


class Mlp(nn.Module):
    def __init__(self, d: int, inner: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(d, 2 * inner), nn.Linear(inner, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.norm = nn.RMSNorm(d)
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        self.attention = Attention(d, config.num_attention_heads, kv_heads)
        self.mixer, self.mlp = Mixer(d, inner), Mlp(d, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        x = x + self.mixer(self.norm(x))
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head.weight = self.words.weight

    def blocks(self) -> list[nn.Module]:
        return [self.words, *self.layers, self.head]

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
