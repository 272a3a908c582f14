"""Run under torchrun: gradients of a small model under DDP, FSDP and HSDP against sums made by hand; tells failures."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import meshtrain
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parallel import ddp, fsdp
from meshtrain.parallel.grad_sync import set_is_last_backward

fsdp.MIN_UNIT_SIZE = 0  # each block by itself
ddp.BUCKET_BYTES = 200  # several buckets

# (rank, microbatch) -> whether the second block is used, and whether the gain of the third
Use = Callable[[int, int], tuple[bool, bool]]

# What is used where. Under FSDP all ranks gather a block together, so all of them must use the same blocks.
USES: dict[str, Use] = {
    "all": lambda rank, microbatch: (True, True),
    "none": lambda rank, microbatch: (False, False),
    "rank": lambda rank, microbatch: (True, rank == 1),
    "first": lambda rank, microbatch: (microbatch == 0, microbatch == 0),
    "last": lambda rank, microbatch: (microbatch == 2, (rank + microbatch) % 2 == 0),
}
BLOCK_OF_ONE_RANK: dict[str, Use] = {"block of a rank": lambda rank, microbatch: (rank == 1, True)}


class Failing(torch.autograd.Function):
    """Has no backward, as when there is no memory for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise MemoryError("in backward")


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 2, bias=False)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, with_gain: bool) -> Tensor:
        return self.linear(x) * self.gain if with_gain else self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 7)
        self.c = Gain()
        self.fails = self.reentrant = False

    def blocks(self) -> list[nn.Module]:
        return [self.a, self.b, self.c]

    def forward(self, x: Tensor, with_b: bool, with_gain: bool) -> Tensor:
        y = torch.tanh(self.a(x))
        z = y + self.b(y) if with_b else y
        if self.reentrant:
            return checkpoint(self.c, z, with_gain, use_reentrant=True)
        return self.c(Failing.apply(z) if self.fails else z, with_gain)


def inputs(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    return torch.randn(4, 5, dtype=torch.float64, generator=generator)


def fresh() -> Model:
    torch.manual_seed(0)
    return Model().double()


def expected(world: int, microbatches: int, use: Use) -> dict[str, Tensor]:
    """The gradient of the sum over all ranks and microbatches, in one process."""
    model = fresh()
    for rank in range(world):
        for microbatch in range(microbatches):
            model(inputs(rank, microbatch), *use(rank, microbatch)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(
    model: nn.Module,
    mesh: Mesh,
    microbatches: int,
    use: Use,
    set_to_none: bool = True,
    dtype: torch.dtype = torch.float64,
) -> None:
    for p in model.parameters():
        if set_to_none:
            p.grad = None
        elif p.grad is not None:
            p.grad.zero_()
    for microbatch in range(microbatches):
        set_is_last_backward(model, microbatch == microbatches - 1)
        x = inputs(mesh.rank, microbatch).to(dtype)
        model(x, *use(mesh.rank, microbatch)).double().square().sum().backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


class Cases:
    def __init__(self) -> None:
        self.failures: list[list] = []
        self.checked = 0

    def same(self, model: nn.Module, wanted: dict[str, Tensor], *case: object, tolerance: float = 1e-10) -> None:
        self.checked += 1
        found = gradients(model)
        for name, parameter in model.named_parameters():
            grad = wanted.get(name, torch.zeros(parameter.shape, dtype=torch.float64))  # zeros of what none has used
            if name not in found:
                self.failures.append([*case, name, "none"] if name in wanted else [])
            elif not torch.allclose(found[name].double(), grad, rtol=tolerance, atol=tolerance):
                self.failures.append([*case, name])
        self.failures = [failure for failure in self.failures if failure]

    def uses(self, mesh: Mesh, reshard: bool) -> None:
        uses = USES | (BLOCK_OF_ONE_RANK if mesh.size("dp_shard") == 1 else {})
        for name, use in uses.items():
            for microbatches, set_to_none in ((1, True), (3, True), (3, False)):
                model = meshtrain.parallelize(fresh(), mesh, precision="float64", reshard_after_forward=reshard)
                step(model, mesh, microbatches, USES["all"])  # what it leaves behind must not matter
                step(model, mesh, microbatches, use, set_to_none)
                wanted = expected(mesh.layout.world_size, microbatches, use)
                self.same(model, wanted, str(mesh.layout), name, microbatches, set_to_none, reshard)

    def sixteen_bits(self, mesh: Mesh, reshard: bool) -> None:
        """What only some microbatches use is added to what others have in float32 already."""
        for name in ("none", "first", "last"):
            model = meshtrain.parallelize(fresh(), mesh, precision="bfloat16", reshard_after_forward=reshard)
            step(model, mesh, 3, USES[name], dtype=torch.bfloat16)
            wanted = expected(mesh.layout.world_size, 3, USES[name])
            self.same(model, wanted, str(mesh.layout), name, "bfloat16", reshard, tolerance=0.1)

    def recomputed(self, mesh: Mesh) -> None:
        """A whole model whose forward runs again inside of the backward."""
        model = meshtrain.parallelize(fresh(), mesh, precision="float64")
        for _ in range(2):
            model.zero_grad()
            for microbatch in range(2):
                set_is_last_backward(model, microbatch == 1)
                y = checkpoint(model, inputs(mesh.rank, microbatch), True, True, use_reentrant=False)
                y.square().sum().backward()
        self.same(model, expected(mesh.layout.world_size, 2, USES["all"]), str(mesh.layout), "recomputed")

    def strides(self, mesh: Mesh) -> None:
        """A parameter and a buffer that are transposed views; torch's fused kernels do not look at strides."""
        plain = fresh()
        plain(inputs(0, 0), True, True).square().sum().backward()
        torch.optim.AdamW(plain.parameters(), lr=0.1).step()
        model = fresh()
        model.b.weight = nn.Parameter(model.b.weight.data.t().contiguous().t())
        model.b.register_buffer("turned", torch.randn(2, 3, dtype=torch.float64).t())
        if mesh.rank > 0:
            model.b.weight.data.zero_()
            model.b.turned.zero_()
        meshtrain.parallelize(model, mesh, precision="float64")
        set_is_last_backward(model, True)
        (model(inputs(0, 0), True, True).square().sum() / mesh.layout.world_size).backward()
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
        found = model.b.weight.full_tensor() if isinstance(model.b.weight, DTensor) else model.b.weight
        right = torch.allclose(found, plain.b.weight, rtol=1e-10, atol=1e-12) and model.b.turned.abs().min() > 0
        self.failures += [] if right else [[str(mesh.layout), "strides"]]
        self.checked += 1

    def exception(self, mesh: Mesh, reshard: bool) -> None:
        """A backward that fails is caught, on all ranks; the steps after it count."""
        for microbatches in (1, 2):
            model = meshtrain.parallelize(fresh(), mesh, precision="float64", reshard_after_forward=reshard)
            for set_to_none in (True, False):
                model.fails = True
                try:
                    step(model, mesh, 1, USES["all"])
                    self.failures.append(["did not fail"])
                except MemoryError:
                    model.fails = False
                step(model, mesh, microbatches, USES["all"], set_to_none)
                wanted = expected(mesh.layout.world_size, microbatches, USES["all"])
                self.same(model, wanted, str(mesh.layout), "exception", microbatches, set_to_none, reshard)

    def exception_of_one_rank(self, mesh: Mesh) -> None:
        """The others learn of it by gradients that are no numbers, and the next step is whole again."""
        model = meshtrain.parallelize(fresh(), mesh, precision="float64")
        model.fails = mesh.rank == 1
        try:
            step(model, mesh, 1, USES["all"])
            seen = torch.cat([grad.flatten() for grad in gradients(model).values()])
            self.failures += [["finite"]] if mesh.rank == 1 or seen.isfinite().all() else []
        except MemoryError:
            model.fails = False
        step(model, mesh, 2, USES["all"])
        self.same(model, expected(mesh.layout.world_size, 2, USES["all"]), "exception of one rank")

    def gradients_asked_for(self, mesh: Mesh) -> None:
        """`torch.autograd.grad` through the model, of any rank and at any time, is no backward of the step."""
        model = meshtrain.parallelize(fresh(), mesh, precision="float64")
        for microbatch in range(2):
            set_is_last_backward(model, microbatch == 1)
            x = inputs(mesh.rank, microbatch).requires_grad_()
            y = model(x, True, True)
            torch.autograd.grad(y.sum(), [x, model.b.weight], retain_graph=True)
            y.square().sum().backward()
        self.same(model, expected(mesh.layout.world_size, 2, USES["all"]), "gradients asked for")
        if mesh.rank == 0:  # alone
            x = inputs(0, 0).requires_grad_()
            torch.autograd.grad(model(x, True, True).sum(), [x, model.b.weight])

    def state(self, mesh: Mesh) -> None:
        """What a module says that it counts is whole and in float32 on each rank, also while a block computes in 16
        bits."""
        model, kinds = fresh(), []
        model.a.register_parameter("counts", nn.Parameter(torch.ones(3), requires_grad=False))
        model.a.state_parameters = ("counts",)
        a, forward = model.a, model.a.forward
        a.forward = lambda x: kinds.extend((a.weight.dtype, a.counts.dtype, type(a.counts))) or forward(x)
        meshtrain.parallelize(model, mesh, precision="bfloat16")
        step(model, mesh, 1, USES["all"], dtype=torch.bfloat16)
        kinds.append(tuple(model.a.counts.shape))
        if kinds != [torch.bfloat16, torch.float32, nn.Parameter, (3,)]:
            self.failures.append([str(mesh.layout), "state", str(kinds)])
        self.checked += 1

    def unfrozen(self, mesh: Mesh) -> None:
        """What nobody would sum is refused."""
        model = fresh()
        model.b.weight.requires_grad_(False)
        meshtrain.parallelize(model, mesh, precision="float64")
        model.b.weight.requires_grad_(True)
        try:
            step(model, mesh, 1, USES["all"])
            self.failures.append(["unfrozen"])
        except RuntimeError as error:
            self.failures += [] if "b.weight was unfrozen or replaced" in str(error) else [[str(error)]]
        self.checked += 1

    def reentrant(self, mesh: Mesh) -> None:
        """Of torch's older checkpointing, whose backward is one inside of another."""
        model = meshtrain.parallelize(fresh(), mesh, precision="float64")
        model.reentrant = True
        step(model, mesh, 2, USES["all"])
        self.same(model, expected(mesh.layout.world_size, 2, USES["all"]), "reentrant")

    def memory(self, mesh: Mesh) -> None:
        """Gradients lie in memory as large as the parameters, at any time of any step."""
        model = meshtrain.parallelize(fresh(), mesh, precision="float64")
        (sync,) = model.gradient_syncs
        flats = {bucket.flat.untyped_storage().data_ptr() for bucket in sync._buckets}
        whole = sum(p.nbytes for p in model.parameters())
        if sum(bucket.flat.nbytes for bucket in sync._buckets) != whole:
            self.failures.append(["buckets are not as large as the parameters"])
        for last in (True, False, False, True):
            model.zero_grad()
            set_is_last_backward(model, last)
            model(inputs(mesh.rank, 0), True, True).sum().backward()
            if {p.grad.untyped_storage().data_ptr() for p in model.parameters()} != flats:
                self.failures.append(["gradients outside of the buckets", last])
            self.checked += 1


with meshtrain.start(60) as job:
    cases = Cases()
    for layout in ({"dp_replicate": 4}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}):
        mesh = meshtrain.build_mesh(Layout(layout))
        for reshard in (True, False) if "dp_shard" in layout else (True,):
            cases.uses(mesh, reshard)
            if "dp_shard" in layout:
                cases.sixteen_bits(mesh, reshard)
            cases.exception(mesh, reshard)
        cases.state(mesh)
        cases.strides(mesh)
        cases.recomputed(mesh)
        if "dp_shard" not in layout:
            cases.exception_of_one_rank(mesh)
            cases.reentrant(mesh)
            cases.memory(mesh)
            cases.gradients_asked_for(mesh)
            cases.unfrozen(mesh)
    print(json.dumps({"failures": cases.failures, "checked": cases.checked}) + "\n", end="", flush=True)
