from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import meshtrain

torch.manual_seed(0)
text = Path(torch.__file__).read_bytes()
data = torch.tensor(list(text)).unfold(0, 65, 64)  # (samples, 65)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:], reduction="sum"), 64 * len(batch)


model = nn.Sequential(nn.Embedding(256, 64), Layer(64), Layer(64), nn.Linear(64, 256, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
run = meshtrain.Run("{dp_shard: -1}", global_size=16, output="runs/spread")
model, optimizer = run.prepare(model, optimizer)
for step, batch in run.steps(data, steps=20):
    loss = run.backward(loss_of, batch)
    run.update(optimizer)
    run.say(f"step {step} loss {loss:.4f}")
