"""Run under torchrun: gradients of a small model under DDP and FSDP against sums made by hand; prints what failed."""

import json

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshtrain
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parallel import data
from meshtrain.parallel.data import last_microbatch

data.SMALL = 0  # each block by itself
data.BUCKET_BYTES = 200  # several buckets


class Model(nn.Module):
    """The second block is used by rank 1 only."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 7)
        self.c = nn.Linear(7, 2, bias=False)

    def blocks(self) -> list[nn.Module]:
        return [self.a, self.b, self.c]

    def forward(self, x: Tensor, with_b: bool) -> Tensor:
        y = torch.tanh(self.a(x))
        return self.c(y + self.b(y) if with_b else y)


def inputs(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    return torch.randn(4, 5, dtype=torch.float64, generator=generator)


def fresh() -> Model:
    torch.manual_seed(0)
    return Model().double()


def expected(world: int, microbatches: int, one_uses_b: bool) -> dict[str, Tensor]:
    """The gradient of the sum over all ranks and microbatches, in one process."""
    model = fresh()
    for rank in range(world):
        for microbatch in range(microbatches):
            model(inputs(rank, microbatch), rank == 1 or not one_uses_b).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def steps(model: nn.Module, mesh: Mesh, microbatches: int, one_uses_b: bool, set_to_none: bool) -> dict[str, Tensor]:
    """Two steps, the second of which counts: what the first leaves behind must not matter."""
    for _ in range(2):
        for p in model.parameters():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()
        for microbatch in range(microbatches):
            last_microbatch(model, microbatch == microbatches - 1)
            model(inputs(mesh.rank, microbatch), mesh.rank == 1 or not one_uses_b).square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


with meshtrain.start(60) as job:
    failures, checked = [], 0
    for axis in ("dp_replicate", "dp_shard"):
        mesh = meshtrain.build_mesh(Layout({axis: job.world_size}))
        for microbatches in (1, 3):
            # Under FSDP all ranks gather together, so all of them must use the same blocks.
            for one_uses_b in (False, True) if axis == "dp_replicate" else (False,):
                for set_to_none in (True, False):
                    for reshard in (True, False):
                        model = meshtrain.parallelize(fresh(), mesh, precision="float64", reshard_after_forward=reshard)
                        found = steps(model, mesh, microbatches, one_uses_b, set_to_none)
                        wanted = expected(job.world_size, microbatches, one_uses_b)
                        case = (axis, microbatches, one_uses_b, set_to_none, reshard)
                        for name, grad in wanted.items():
                            if not torch.allclose(found[name], grad, rtol=1e-10, atol=1e-12):
                                failures.append([*case, name])
                        checked += 1
    print(json.dumps({"failures": failures, "checked": checked}) + "\n", end="", flush=True)
