"""A model that runs one of two blocks of the same size, chosen by the tokens of its microbatch."""

import torch
from torch import Tensor, nn

from meshtrain.job.locate import model_file
from meshtrain.parallel import fsdp

fsdp.MIN_UNIT_SIZE = 1000  # these blocks are small, and would be gathered together
Config = model_file("llama").Config  # the configs have Llama's keys


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.hidden_size
        self.words, self.head = nn.Embedding(config.vocab_size, d), nn.Linear(d, config.vocab_size)
        self.choices = nn.ModuleList(nn.Linear(d, d) for _ in range(2))

    def blocks(self) -> list[nn.Module]:
        return [*self.choices]

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        return self.head(x + torch.tanh(self.choices[int(tokens.sum()) % 2](x)))
