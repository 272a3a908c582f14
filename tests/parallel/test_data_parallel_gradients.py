"""Gradients under DDP, FSDP and HSDP are those of one process with all samples, whatever the loop
does."""

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import meshtrain
from meshtrain.errors import InputError
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.parallel import fsdp
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.torch_private import to_local
from tests.comparing import Losses, compare_step, gradients
from tests.parallel.operators import Operators

DDP, FSDP, HSDP = {"dp_replicate": 4}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}
# Layouts, and whether parameters are gathered again for the backward.
KINDS: list[tuple[dict[str, int], bool]] = [
    (DDP, True),
    (FSDP, True),
    (FSDP, False),
    (HSDP, True),
    (HSDP, False),
]
every_kind = pytest.mark.parametrize(("mesh", "reshard"), KINDS, indirect=["mesh"])
pytestmark = [pytest.mark.ranks(4), pytest.mark.usefixtures("small_units")]


def on(*layouts: dict[str, int]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mesh", layouts, indirect=True)


# (rank, microbatch) -> (whether the second block is used, whether the gain of the third is)
Use = Callable[[int, int], tuple[bool, bool]]

USES: dict[str, Use] = {
    "all": lambda rank, microbatch: (True, True),
    "none": lambda rank, microbatch: (False, False),
    "rank": lambda rank, microbatch: (True, rank == 1),
    "first": lambda rank, microbatch: (microbatch == 0, microbatch == 0),
    "last": lambda rank, microbatch: (microbatch == 2, (rank + microbatch) % 2 == 0),
    # Under FSDP all ranks gather a block together, so all of them must use the same blocks.
    "block of a rank": lambda rank, microbatch: (rank == 1, True),
}


@pytest.fixture
def mesh(job: Job, request: pytest.FixtureRequest) -> Mesh:
    return build_mesh(Layout(request.param))


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
    fails = reentrant = twice = False
    input_dtype = torch.float64

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 7)
        self.c = Gain()

    def blocks(self) -> list[nn.Module]:
        return [self.a, self.b, self.c]

    def forward(self, x: Tensor, with_b: bool, with_gain: bool) -> Tensor:
        y = torch.tanh(self.a(x.to(self.input_dtype)))
        if self.twice:
            y = torch.tanh(self.a(y[:, :5]))
        if with_b:
            y = y + self.b(y)
        if self.reentrant:
            return checkpoint(self.c, y, with_gain, use_reentrant=True)
        return self.c(Failing.apply(y) if self.fails else y, with_gain)


def fresh() -> Any:
    torch.manual_seed(0)
    return Model().double()


def split(mesh: Mesh, plain: nn.Module | None = None, **options: Any) -> Any:
    model = plain or fresh()
    meshtrain.parallelize(model, mesh, **{"precision": "float64", **options})
    model.input_dtype = getattr(torch, options.get("precision", "float64"))
    return model


def inputs(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    return torch.randn(4, 5, dtype=torch.float64, generator=generator)


def squares(use: str = "all", run: Callable[..., Tensor] | None = None) -> Losses:
    def losses(model: nn.Module, rank: int, microbatch: int) -> Tensor:
        arguments = inputs(rank, microbatch), *USES[use](rank, microbatch)
        output = model(*arguments) if run is None else run(model, *arguments)
        return output.double().square()

    return losses


def backwards(model: nn.Module, mesh: Mesh, use: str = "all", microbatches: int = 1) -> None:
    """A step that is not compared."""
    for microbatch in range(microbatches):
        set_is_last_backward(model, microbatch == microbatches - 1)
        squares(use)(model, mesh.rank, microbatch).sum().backward()


@pytest.mark.parametrize(
    ("mesh", "reshard", "use"),
    [(*kind, use) for kind in KINDS for use in USES if kind[0] is DDP or use != "block of a rank"],
    indirect=["mesh"],
)
def test_parameters_that_some_ranks_or_microbatches_use(
    mesh: Mesh, reshard: bool, use: str
) -> None:
    for microbatches, set_to_none in ((1, True), (3, True), (3, False)):
        model, plain = split(mesh, reshard_after_forward=reshard), fresh()
        backwards(model, mesh)  # must leave nothing behind that affects the next step
        compare_step(
            model, plain, mesh, squares(use), microbatches=microbatches, set_to_none=set_to_none
        )


@every_kind
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("use", ["none", "first", "last"])
def test_gradients_are_sent_in_16_bits(mesh: Mesh, reshard: bool, precision: str, use: str) -> None:
    """Half the bytes, rounded sums, and float32 before and after."""
    of_sums, of_others, grads = [], [], []
    for reduce_precision in (None, "bfloat16"):
        options = {"reduce_precision": reduce_precision, "reshard_after_forward": reshard}
        model = split(mesh, precision=precision, **options)
        mesh.comm_bytes.restart()
        compare_step(model, fresh(), mesh, squares(use), microbatches=3, tolerance=0.1)
        kinds: Counter[str] = Counter()
        for axis in mesh.layout.axes:
            kinds.update(mesh.comm_bytes.by_kind(axis))
        sums = kinds["all_reduce"] + kinds["reduce_scatter"]
        of_sums.append(sums)
        of_others.append(kinds.total() - sums)
        grads.append(torch.cat([to_local(grad).flatten() for grad in gradients(model).values()]))
    assert of_sums[0] == 2 * of_sums[1]
    assert of_others[0] == of_others[1]
    assert grads[1].dtype == torch.float32
    error = (grads[1] - grads[0]).abs().max() / grads[0].abs().max()
    assert 1e-5 < error < 2**-6
    if not mesh.uses_fsdp or precision == "float32":
        return
    # The dtype in which microbatches accumulate.
    set_is_last_backward(model, False)
    squares()(model, mesh.rank, 0).sum().backward()
    groups = [
        part._get_fsdp_state()._fsdp_param_group
        for part in model.modules()
        if isinstance(part, FSDPModule)
    ]
    units = [unit for unit in groups if unit]
    if not reshard:
        summed = [
            parameter.unsharded_accumulated_grad for unit in units for parameter in unit.fsdp_params
        ]
    elif mesh.size("dp_replicate") > 1:
        summed = [unit._partial_reduce_output for unit in units]
    else:
        summed = list(gradients(model).values())
    assert {grad.dtype for grad in summed} == {torch.float32}


@on(FSDP, HSDP)
def test_messages_in_memory_of_the_process_group(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of FSDP's, with the same sums and counted bytes. If the backend has no such memory, as
    here, they stay in ordinary memory."""
    taken: list[int] = []

    def take(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        taken.append(numel)
        return torch.empty(numel, dtype=dtype, device=device)

    backend = SimpleNamespace(supports_tensor_alloc=lambda device: True, allocate_tensor=take)
    group = SimpleNamespace(_get_backend=lambda device: backend)
    mixin = fsdp.fsdp_collectives.ProcessGroupAllocMixin
    sent = []
    for memory in (None, mixin, lambda group_of_axis: mixin(group)):
        with monkeypatch.context() as patch:
            patch.setattr(fsdp.fsdp_collectives, "ProcessGroupAllocMixin", memory)
            model = split(mesh, symmetric_memory=memory is not None)
        taken.clear()
        mesh.comm_bytes.restart()
        compare_step(model, fresh(), mesh, squares("last"), microbatches=2)
        sent.append(mesh.comm_bytes.by_kind("dp_shard"))
    t = mesh.size("dp_shard")
    gathered, scattered = (
        sent[0][kind] * t // (t - 1) // 8 for kind in ("all_gather", "reduce_scatter")
    )
    assert sum(taken) == gathered + scattered + scattered // t
    assert sent == sent[:1] * 3


@on(HSDP)
def test_the_bytes_of_sums_over_copies_are_counted(mesh: Mesh) -> None:
    """Copies sum the shards that the reduce-scatter has left: of m bytes over r copies, each sends
    2 m (r - 1) / r."""
    model = split(mesh)
    mesh.comm_bytes.restart()
    compare_step(model, fresh(), mesh, squares("last"), microbatches=1)
    shards, copies = mesh.size("dp_shard"), mesh.size("dp_replicate")
    scattered = mesh.comm_bytes.by_kind("dp_shard")["reduce_scatter"]  # all but this rank's shard
    of_shard = scattered / (shards - 1)
    expected = 2 * of_shard * (copies - 1) / copies
    assert mesh.comm_bytes.by_kind("dp_replicate") == {"all_reduce": expected}


@on(DDP, FSDP, HSDP)
def test_a_forward_that_runs_again_within_the_backward(mesh: Mesh) -> None:
    model, plain = split(mesh), fresh()
    for _ in range(2):
        compare_step(
            model,
            plain,
            mesh,
            squares(run=partial(checkpoint, use_reentrant=False)),
            microbatches=2,
        )


class Turned(nn.Linear):
    """Returns a view of what it computes, as a block of convolutions does that turns dims round."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous().t()


@pytest.mark.filterwarnings("error:.*returned a view tensor")
@on(DDP, FSDP, HSDP)
def test_a_model_may_write_into_a_view_that_a_block_returns(mesh: Mesh) -> None:
    plain = fresh()
    plain.b = Turned(7, 7).double()
    model = split(mesh, copy.deepcopy(plain))

    def losses(model: nn.Module, rank: int, microbatch: int) -> Tensor:
        y: Tensor = model.b(model.a(inputs(rank, microbatch)))
        y += 1
        return model.c(y.square(), True).square()

    compare_step(model, plain, mesh, losses, microbatches=2)


@on(DDP)
def test_reentrant_checkpoints_run_a_backward_within_the_backward(mesh: Mesh) -> None:
    model, plain = split(mesh), fresh()
    model.reentrant = True
    compare_step(model, plain, mesh, squares(), microbatches=2)


@on(DDP, FSDP, HSDP)
def test_a_parameter_and_a_buffer_that_are_transposed_views(mesh: Mesh) -> None:
    """torch's fused kernels do not look at strides."""
    plain, model = fresh(), fresh()
    model.b.weight = nn.Parameter(model.b.weight.data.t().contiguous().t())
    model.b.register_buffer("turned", torch.randn(2, 3, dtype=torch.float64).t())
    if mesh.rank > 0:
        model.b.weight.data.zero_()
        model.b.turned.zero_()
    split(mesh, model)
    compare_step(model, plain, mesh, squares())
    for network, fused in ((plain, False), (model, True)):
        torch.optim.AdamW(network.parameters(), lr=0.1, fused=fused).step()
    weight = model.b.weight.full_tensor() if isinstance(model.b.weight, DTensor) else model.b.weight
    torch.testing.assert_close(weight, plain.b.weight, rtol=1e-10, atol=1e-12)
    assert model.b.turned.abs().min() > 0


@every_kind
def test_steps_after_a_backward_that_fails_on_all_ranks(mesh: Mesh, reshard: bool) -> None:
    if mesh.layout.size("dp_shard") > 1 and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("the FSDP of this torch cannot go on after a backward that failed, and says so")
    for microbatches in (1, 2):
        model, plain = split(mesh, reshard_after_forward=reshard), fresh()
        for set_to_none in (True, False):
            model.zero_grad()
            model.fails = True
            with pytest.raises(MemoryError):
                backwards(model, mesh)
            model.fails = False
            compare_step(
                model, plain, mesh, squares(), microbatches=microbatches, set_to_none=set_to_none
            )


@on(DDP)
def test_ranks_notice_by_their_gradients_that_another_has_failed(mesh: Mesh) -> None:
    model = split(mesh)
    if mesh.rank == 1:
        model.fails = True
        with pytest.raises(MemoryError):
            backwards(model, mesh)
        model.fails = False
    else:
        backwards(model, mesh)
        assert any(not grad.isfinite().all() for grad in gradients(model).values())
    compare_step(model, fresh(), mesh, squares(), microbatches=2)


@on(DDP)
def test_gradients_that_are_asked_for_are_no_backward_of_the_step(mesh: Mesh) -> None:
    """`torch.autograd.grad` through the model, on any rank and at any time."""

    def ask(model: Any, x: Tensor, *uses: bool) -> Tensor:
        y = model(x.requires_grad_(), *uses)
        torch.autograd.grad(y.sum(), [x, model.b.weight], retain_graph=True)
        return y

    model = split(mesh)
    compare_step(model, fresh(), mesh, squares(run=ask), microbatches=2)
    if mesh.rank == 0:
        ask(model, inputs(0, 0), True, True)


@on(DDP, FSDP, HSDP)
def test_state_parameters_are_whole_and_wide(mesh: Mesh) -> None:
    """Those in `state_parameters`: on each rank, also while a block computes in 16 bits."""
    model, types = fresh(), []
    counts = nn.Parameter(torch.ones(3), requires_grad=False)
    model.a.register_parameter("counts", counts)
    model.a.state_parameters = ("counts",)
    a, forward = model.a, model.a.forward
    a.forward = lambda x: (
        types.extend((a.weight.dtype, a.counts.dtype, type(a.counts))) or forward(x)
    )
    split(mesh, model, precision="bfloat16")
    backwards(model, mesh)
    assert types == [torch.bfloat16, torch.float32, nn.Parameter]
    assert model.a.counts.shape == (3,)


@on(DDP)
def test_unfreezing_after_the_split_is_refused(mesh: Mesh) -> None:
    """Its gradient would not be reduced."""
    model = fresh()
    model.b.weight.requires_grad_(False)
    split(mesh, model)
    model.b.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"b\.weight was unfrozen or replaced"):
        backwards(model, mesh)


@on(FSDP, HSDP)
def test_a_forward_that_writes_to_a_parameter_is_refused(mesh: Mesh) -> None:
    """FSDP would not keep it."""

    @torch.no_grad()
    def halve(block: Any, _: object) -> None:
        block.gain.mul_(0.5)

    model = fresh()
    model.c.register_forward_pre_hook(halve)
    split(mesh, model)
    with pytest.raises(InputError, match=r"writes to the parameter c\.gain"):
        backwards(model, mesh)


@on(DDP)
@pytest.mark.parametrize("use", USES)
def test_products_accumulate_into_the_gradients(mesh: Mesh, use: str) -> None:
    """As on GPUs; one layer has a hook, and one is called twice."""
    model, plain = fresh(), fresh()
    use_products(model)
    split(mesh, model)
    model.c.linear.weight.register_hook(lambda grad: grad)
    model.twice = plain.twice = True
    for _ in range(2):
        model.zero_grad()
        with Operators() as operators:
            backwards(model, mesh, use, microbatches=3)
        # Gradients that autograd makes: of the biases and the gain, once, and of the weight with a
        # hook.
        assert use != "all" or operators.of(torch.ops.aten.copy_.default) <= 1
    compare_step(model, plain, mesh, squares(use), microbatches=3)


@on(DDP)
def test_gradients_take_as_much_memory_as_the_parameters(mesh: Mesh) -> None:
    """At any time of any step."""
    model = fresh()
    use_products(model)
    split(mesh, model)
    (sync,) = model.gradient_syncs
    buckets = [bucket.flat for bucket in sync._buckets]
    assert sum(flat.nbytes for flat in buckets) == sum(p.nbytes for p in model.parameters())
    for last in (True, False, False, True):
        model.zero_grad()
        set_is_last_backward(model, last)
        squares()(model, mesh.rank, 0).sum().backward()
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        assert storages == {flat.untyped_storage().data_ptr() for flat in buckets}
