"""Run under torchrun: torch's optimizers in a user's loop, on `tp` with and without `dp_shard`; prints failures."""

import json
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import meshtrain
from meshtrain.layout import Layout
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh
from meshtrain.optim import clip_gradients, param_groups
from meshtrain.parallel import fsdp
from tests.parallel.tensor_parallel_cases import small_llama

fsdp.MIN_UNIT_SIZE = 0  # make each block an FSDP unit
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
]


def trained(mesh: Mesh | None, kind: Any, options: dict[str, Any], tokens: torch.Tensor) -> nn.Module:
    model = small_llama()
    if mesh is not None:
        meshtrain.parallelize(model, mesh, precision="float64")
        tokens = tokens.chunk(mesh.size("dp_shard"))[mesh.index("dp_shard")]
    optimizer = kind(param_groups(model), lr=1e-2, **options)
    for _ in range(3):
        sample_losses(model(tokens), tokens).sum().backward()
        if mesh is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            clip_gradients(model, mesh, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


torch.set_default_dtype(torch.float64)
tokens = torch.randint(11, (4, 12), generator=torch.Generator().manual_seed(1))
with meshtrain.start(60) as job:
    failures = []
    checked = 0
    mesh = meshtrain.build_mesh(Layout({"tp": 2} if job.world_size == 2 else {"dp_shard": 2, "tp": 2}))
    for kind, options in KINDS:
        plain = dict(trained(None, kind, options, tokens).named_parameters())
        for name, parameter in trained(mesh, kind, options, tokens).named_parameters():
            found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if not torch.allclose(found, plain[name], rtol=1e-9, atol=1e-12):
                failures.append([kind.__name__, *options, name])
            checked += 1
    print(json.dumps({"failures": failures, "checked": checked}) + "\n", end="", flush=True)
