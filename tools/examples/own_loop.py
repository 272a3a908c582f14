"""A training loop of your own, on any layout, built from meshtrain's functions.

    torchrun --standalone --nproc-per-node=4 tools/examples/own_loop.py dp_replicate=2,dp_shard=2
    torchrun --standalone --nproc-per-node=4 tools/examples/own_loop.py dp_shard=2,tp=2

The last line it prints is the same for every layout: the model is plain, and ranks divide the batch
by samples.
"""

import sys

import torch
from torch import nn

import meshtrain
from meshtrain.data.order import batch_samples, share
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.loss import GlobalCount, sample_losses, valid_targets
from meshtrain.optim import clip_gradients, param_groups

SIZES = (
    dict(item.split("=") for item in sys.argv[1].split(","))
    if len(sys.argv) > 1
    else {"dp_shard": "-1"}
)
BATCH, STEPS = 64, 50
TP_PLAN = {"0": "colwise", "2": "rowwise"}  # how the model's layers are split over `tp`

with meshtrain.start() as job:
    layout = Layout.resolve({axis: int(size) for axis, size in SIZES.items()}, job.world_size)
    mesh = meshtrain.build_mesh(layout)

    torch.manual_seed(0)
    inputs = torch.randn(1000, 16, dtype=torch.float64)
    targets = (
        inputs[:, 0] + inputs[:, 1] > 0
    ).long()  # is the sum of the first two numbers positive?
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2)).to(job.device)
    meshtrain.parallelize(model, mesh, precision="float64", tp_plan=TP_PLAN)
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)

    for step in range(STEPS):
        samples = batch_samples(0, step, BATCH, len(inputs))  # the global batch
        mine = [samples[i] for i in share(BATCH, mesh.size(*DATA_AXES), mesh.index(*DATA_AXES))]
        count = GlobalCount(valid_targets(targets[mine]), mesh, job.device)
        losses = sample_losses(model(inputs[mine].to(job.device)), targets[mine].to(job.device))
        loss = losses.sum() / count.value()  # this rank's part of the mean over the global batch
        loss.backward()  # ends with gradients summed over the data ranks
        norm = clip_gradients(model, mesh, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    # ranks of `tp` see the same samples: count only one of them
    seen = loss.detach() * mesh.speaks_for_samples
    job.say(
        f"{layout}: loss {mesh.sum(seen).item():.9f}, gradient norm {norm.item():.9f} after "
        f"{STEPS} steps"
    )
