"""A model that mixes tokens outside its parallel layers (each sees the mean of the tokens before
it) and has learned positions: with a part of the sequence on each rank it would compute something
else."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.job.locate import model_file

tp_plan = {
    "words": "embedding_rowwise_sequence",
    "blocks_.*.up": "colwise",
    "blocks_.*.down": "rowwise",
    "head": "colwise_logits",
}
init_plan = {"*norm.weight": "ones", "*.bias": "zeros", "*": "normal"}


@dataclass(frozen=True)
class Config(model_file("llama").Config):  # the configs have Llama's keys
    learned_positions: int = 48  # 0: none


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, learned = config.hidden_size, config.learned_positions
        self.words, self.head = nn.Embedding(config.vocab_size, d), nn.Linear(d, config.vocab_size)
        self.positions = nn.Embedding(learned, d) if learned else None
        self.blocks_ = nn.ModuleList(Block(d) for _ in range(2))

    def blocks(self) -> list[nn.Module]:
        return [self.words, *self.blocks_, self.head]

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        if self.positions is not None:
            x = x + self.positions(positions)
        x = (
            x
            + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        )
        for block in self.blocks_:
            x = block(x)
        return self.head(x)
