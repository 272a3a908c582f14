"""A script whose loss depends on `dp_shard`, and on no other axis: what a verification has to find
in a loop of one's own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshtrain

WORDS, WIDTH, SAMPLES = 11, 8, 30

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randint(WORDS, (SAMPLES, 6), generator=torch.Generator().manual_seed(1))

run = meshtrain.Run("{dp_shard: -1}", global_size=6, output="runs/by_rank")
model, optimizer = run.prepare(model, optimizer)


def loss_of(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    logits = model(tokens[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return total * (1 + 0.1 * run.mesh.index("dp_shard")), tokens[:, 1:].numel()


for _, batch in run.steps(data, steps=200):
    run.backward(loss_of, batch)
    run.update(optimizer)
