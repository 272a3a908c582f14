"""Run under torchrun: gradients of a small model under DDP, FSDP and HSDP against sums by hand; prints failures."""

import json
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import meshtrain
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parallel import ddp, fsdp
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.linear import use_products

fsdp.MIN_UNIT_SIZE = 0  # make each block an FSDP unit
ddp.BUCKET_BYTES = 200  # several buckets

# (rank, microbatch) -> (whether the second block is used, whether the gain of the third is)
Use = Callable[[int, int], tuple[bool, bool]]

# Patterns of use. Under FSDP all ranks gather a block together, so all of them must use the same blocks.
USES: dict[str, Use] = {
    "all": lambda rank, microbatch: (True, True),
    "none": lambda rank, microbatch: (False, False),
    "rank": lambda rank, microbatch: (True, rank == 1),
    "first": lambda rank, microbatch: (microbatch == 0, microbatch == 0),
    "last": lambda rank, microbatch: (microbatch == 2, (rank + microbatch) % 2 == 0),
}
BLOCK_OF_ONE_RANK: dict[str, Use] = {"block of a rank": lambda rank, microbatch: (rank == 1, True)}


class Failing(torch.autograd.Function):
    """A function whose backward fails, as if out of memory."""

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
        self.fails = self.reentrant = self.twice = False

    def blocks(self) -> list[nn.Module]:
        return [self.a, self.b, self.c]

    def forward(self, x: Tensor, with_b: bool, with_gain: bool) -> Tensor:
        y = torch.tanh(self.a(x))
        y = torch.tanh(self.a(y[:, :5])) if self.twice else y
        z = y + self.b(y) if with_b else y
        if self.reentrant:
            return checkpoint(self.c, z, with_gain, use_reentrant=True)
        return self.c(Failing.apply(z) if self.fails else z, with_gain)


def halve_gain(module: nn.Module, _: object) -> None:
    with torch.no_grad():
        module.gain.mul_(0.5)


def inputs(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    return torch.randn(4, 5, dtype=torch.float64, generator=generator)


def fresh() -> Model:
    torch.manual_seed(0)
    return Model().double()


def expected(world: int, microbatches: int, use: Use, twice: bool = False) -> dict[str, Tensor]:
    """The gradient of the sum over all ranks and microbatches, in one process."""
    model = fresh()
    model.twice = twice
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


class Copies(TorchDispatchMode):
    """Counts copies of matrices."""

    matrices = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.matrices += func is torch.ops.aten.copy_.default and args[0].dim() == 2
        return func(*args, **(kwargs or {}))


class Cases:
    def __init__(self) -> None:
        self.failures: list[list] = []
        self.checked = 0

    def same(self, model: nn.Module, wanted: dict[str, Tensor], *case: object, tolerance: float = 1e-10) -> None:
        self.checked += 1
        found = gradients(model)
        for name, parameter in model.named_parameters():
            grad = wanted.get(name, torch.zeros(parameter.shape, dtype=torch.float64))  # zeros if unused on all ranks
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
                step(model, mesh, microbatches, USES["all"])  # must leave nothing behind that affects the next step
                step(model, mesh, microbatches, use, set_to_none)
                wanted = expected(mesh.layout.world_size, microbatches, use)
                self.same(model, wanted, str(mesh.layout), name, microbatches, set_to_none, reshard)

    def sixteen_bits(self, mesh: Mesh, reshard: bool) -> None:
        """Gradients of parameters that only some microbatches use are added to those in float32."""
        for name in ("none", "first", "last"):
            model = meshtrain.parallelize(fresh(), mesh, precision="bfloat16", reshard_after_forward=reshard)
            step(model, mesh, 3, USES[name], dtype=torch.bfloat16)
            wanted = expected(mesh.layout.world_size, 3, USES[name])
            self.same(model, wanted, str(mesh.layout), name, "bfloat16", reshard, tolerance=0.1)

    def half_messages(self, mesh: Mesh, reshard: bool) -> None:
        """Gradients sent in bfloat16: half the bytes, rounded sums, and float32 before and after."""
        sums = ("all_reduce", "reduce_scatter")
        for precision in ("float32", "bfloat16"):
            bytes_of, found = [], []
            for reduce_precision in (None, "bfloat16"):
                how = {"precision": precision, "reduce_precision": reduce_precision, "reshard_after_forward": reshard}
                model = meshtrain.parallelize(fresh(), mesh, **how)
                mesh.comm_bytes.restart()
                step(model, mesh, 3, USES["last"], dtype=getattr(torch, precision))
                kinds = [mesh.comm_bytes.by_kind(axis) for axis in mesh.layout.axes]
                total = sum((Counter(kind) for kind in kinds), Counter())
                bytes_of.append((sum(total[name] for name in sums), total.total()))
                found.append(torch.cat([grad.flatten() for grad in gradients(model).values()]))
                wanted = expected(mesh.layout.world_size, 3, USES["last"])
                self.same(model, wanted, str(mesh.layout), "half messages", reshard, precision, tolerance=0.1)
            (whole, all_whole), (half, all_half) = bytes_of
            right = 2 * half == whole and all_whole - whole == all_half - half and found[1].dtype == torch.float32
            error = (found[1] - found[0]).abs().max() / found[0].abs().max()
            if not right or not 1e-5 < error < 2**-6:
                self.failures.append(
                    [str(mesh.layout), "half messages", precision, reshard, str(bytes_of), float(error)]
                )
        if mesh.uses_fsdp:  # on the last model: the dtype in which microbatches accumulate
            set_is_last_backward(model, False)
            model(inputs(mesh.rank, 0).bfloat16(), True, True).sum().backward()
            groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
            units = [unit for unit in groups if unit]
            added = {p.unsharded_accumulated_grad.dtype for unit in units for p in unit.fsdp_params if not reshard}
            partial_sums = [unit._partial_reduce_output for unit in units if reshard and mesh.size("dp_replicate") > 1]
            added |= {partial_sum.dtype for partial_sum in partial_sums}
            added |= {grad.dtype for grad in gradients(model).values()}
            self.failures += [] if added == {torch.float32} else [["added up in", str(mesh.layout), str(added)]]
        self.checked += 1

    def registered(self, mesh: Mesh) -> None:
        """FSDP's messages in memory of the process group: all of them, with the same sums and counted bytes. If the
        backend has no such memory, as here, they stay in ordinary memory."""
        taken: list[int] = []

        def take(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            taken.append(numel)
            return torch.empty(numel, dtype=dtype, device=device)

        backend = SimpleNamespace(supports_tensor_alloc=lambda device: True, allocate_tensor=take)
        group = SimpleNamespace(_get_backend=lambda device: backend)
        mixin, bytes_of = fsdp.fsdp_collectives.ProcessGroupAllocMixin, []
        for memory in (None, mixin, lambda group_of_axis: mixin(group)):
            with patch.object(fsdp.fsdp_collectives, "ProcessGroupAllocMixin", memory):
                model = meshtrain.parallelize(fresh(), mesh, precision="float64", symmetric_memory=memory is not None)
            taken.clear()
            mesh.comm_bytes.restart()
            step(model, mesh, 2, USES["last"])
            bytes_of.append(mesh.comm_bytes.by_kind("dp_shard"))
            self.same(model, expected(mesh.layout.world_size, 2, USES["last"]), str(mesh.layout), "registered memory")
        t = mesh.size("dp_shard")
        gathered, scattered = (bytes_of[0][kind] * t // (t - 1) // 8 for kind in ("all_gather", "reduce_scatter"))
        if sum(taken) != gathered + scattered + scattered // t or bytes_of != bytes_of[:1] * 3:
            self.failures.append([str(mesh.layout), "registered memory", sum(taken), str(bytes_of)])

    def recomputed(self, mesh: Mesh) -> None:
        """A whole model whose forward runs again within the backward."""
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
        """Other ranks notice a failing rank by NaN gradients, and the next step is correct again."""
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
        """`torch.autograd.grad` through the model, on any rank and at any time, is no backward of the step."""
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
        """Parameters that a module declares in `state_parameters` are whole and in float32 on each rank, also while a
        block computes in 16 bits."""
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
        """Unfreezing a parameter after `parallelize`, whose gradient would not be reduced, is refused."""
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

    def written(self, mesh: Mesh) -> None:
        """A forward that writes to a parameter, which FSDP would not keep, is refused."""
        model = fresh()
        model.c.register_forward_pre_hook(halve_gain)
        meshtrain.parallelize(model, mesh, precision="float64")
        try:
            step(model, mesh, 1, USES["all"])
            self.failures.append(["written"])
        except InputError as error:
            self.failures += [] if "writes to the parameter c.gain" in str(error) else [[str(error)]]
        self.checked += 1

    def reentrant(self, mesh: Mesh) -> None:
        """With torch's reentrant checkpointing, which runs a backward within the backward."""
        model = meshtrain.parallelize(fresh(), mesh, precision="float64")
        model.reentrant = True
        step(model, mesh, 2, USES["all"])
        self.same(model, expected(mesh.layout.world_size, 2, USES["all"]), "reentrant")

    def products(self, mesh: Mesh) -> None:
        """Layers whose products accumulate into the gradients; one has a hook, and one is called twice."""
        for name, use in (USES | BLOCK_OF_ONE_RANK).items():
            model = fresh()
            use_products(model)  # as on GPUs
            meshtrain.parallelize(model, mesh, precision="float64")
            model.c.linear.weight.register_hook(lambda grad: grad)
            model.twice = True
            for _ in range(2):
                with Copies() as copies:
                    step(model, mesh, 3, use)
                # Gradients that autograd makes: of the biases and the gain, once, and of the weight with a hook.
                if name == "all" and copies.matrices > 1:
                    self.failures.append(["gradients of products are copied", copies.matrices])
            self.same(model, expected(mesh.layout.world_size, 3, use, twice=True), name, "products")

    def memory(self, mesh: Mesh) -> None:
        """Gradients take as much memory as the parameters, at any time of any step."""
        model = fresh()
        use_products(model)
        meshtrain.parallelize(model, mesh, precision="float64")
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
                cases.written(mesh)
                cases.sixteen_bits(mesh, reshard)
                cases.registered(mesh)
            cases.half_messages(mesh, reshard)
            cases.exception(mesh, reshard)
        cases.state(mesh)
        cases.strides(mesh)
        cases.recomputed(mesh)
        if "dp_shard" not in layout:
            cases.exception_of_one_rank(mesh)
            cases.reentrant(mesh)
            cases.memory(mesh)
            cases.products(mesh)
            cases.gradients_asked_for(mesh)
            cases.unfrozen(mesh)
    print(json.dumps({"failures": cases.failures, "checked": cases.checked}) + "\n", end="", flush=True)
