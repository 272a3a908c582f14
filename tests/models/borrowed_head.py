"""A Llama without a head of its own: its forward computes the logits with the embedding's
weight."""

import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.job.locate import model_file

llama = model_file("llama")
Config, init_plan, check = llama.Config, llama.init_plan, llama.check


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.lm_head = nn.Identity()

    def blocks(self) -> list[nn.Module]:
        return super().blocks()[:-1]

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        return F.linear(
            super().forward(tokens, positions, documents), self.model.embed_tokens.weight
        )
