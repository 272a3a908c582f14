"""A Llama with extra operations between its blocks, such as Gemma's scaling of the embedding and soft cap of the
logits, in the model's forward or inside its blocks, as `tweak` says.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshtrain.config.locate import model_file
from meshtrain.rotary import Rotary, cos_sin

llama = model_file("llama")
init_plan, tp_plan, check = llama.init_plan, llama.tp_plan, llama.check


@dataclass(frozen=True)
class Config(llama.Config):
    tweak: str = "none"


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.embedding_dim**0.5


class CappedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return soft_cap(super().forward(x))


def soft_cap(x: Tensor) -> Tensor:
    return 2 * torch.tanh(x / 2)


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.tweak = config.tweak
        if self.tweak == "inside":
            self.model.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size)
            self.lm_head = CappedLinear(config.hidden_size, config.vocab_size, bias=False)
        if self.tweak == "rotary":
            self.rotary = RotaryEmbedding(config)

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        tweak = self.tweak
        mask = (tokens != 0)[:, None, None] if tweak == "mask" else None
        if tweak == "ids":
            tokens = tokens.clamp(max=255)
        x = self.model.dropout(self.model.embed_tokens(tokens))
        if tweak == "scale":
            x = x * x.shape[-1] ** 0.5
        if tweak == "in place":
            x *= 2
        if tweak == "values" and bool((positions < 0).any()):
            x = x * 2
        if tweak == "rotary":
            rotary = self.rotary(positions)
        else:
            rotary = Rotary(*cos_sin(positions, *self.config.rope, self.config.rotary_width, 0, x.dtype))
        first = x
        for i, layer in enumerate(self.model.layers):
            x = layer(x, rotary, mask)
            if tweak == "middle" and i == 0:
                x = torch.relu(x)
            if tweak == "skip" and i == 1:
                x = layer(x, Rotary(first.mean() * rotary.cos, rotary.sin), None)
        if tweak == "order":
            x = self.model.layers[0](x, rotary, mask)
        if tweak == "eval" and not self.training:
            x = x[:, -1:]
        logits = self.lm_head(self.model.norm(x))
        return soft_cap(logits) if tweak == "cap" else logits.float() if tweak == "float" else logits


class RotaryEmbedding(nn.Module):
    """As in Hugging Face's models: a module without parameters that belongs to no block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, positions: Tensor) -> Rotary:
        return Rotary(*cos_sin(positions, *self.config.rope, self.config.rotary_width, 0, torch.float32))
