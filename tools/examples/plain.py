from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

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


model = nn.Sequential(nn.Embedding(256, 64), Layer(64), Layer(64), nn.Linear(64, 256, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, 21):
    batch = data[torch.randint(0, len(data), (16,))]
    loss = F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss:.4f}")
