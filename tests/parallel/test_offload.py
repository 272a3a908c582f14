"""Offloading changes no bit, waits where it has to, and keeps its limits."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel import activation_offload, host_link
from meshtrain.parallel import parallelize as parallelize_module
from meshtrain.parallel.activation_offload import ActivationOffload
from meshtrain.parallel.host_link import HostLink
from meshtrain.parallel.mixed_precision import set_numerics
from meshtrain.parallel.parallelize import parallelize
from meshtrain.parallel.torch_private import share_version, version_witness
from tests.comparing import ALONE, V, small_llama, tokens
from tests.optim.steps import config
from tests.parallel.late_copies import Late
from tests.parallel.test_activation_checkpoint import Dropping, WritingBlock


@pytest.fixture(autouse=True)
def _everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "LEAST", 0)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    copier = Late()
    monkeypatch.setattr(host_link, "copier_of", lambda device: copier)
    return copier


class Layers(nn.Module):
    """Layers that are its blocks, after one that is none."""

    def __init__(self, *layers: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Sequential(layer) for layer in layers)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def gradients_of(
    make: Callable[[], nn.Module], x: Tensor, link: HostLink | None = None, **options: Any
) -> list[Tensor | None]:
    """Of a microbatch, after a backward; with a link, what blocks save goes over it."""
    torch.manual_seed(0)
    model = make()
    if link is not None:
        options |= {"offload": "activations", "host_link": link}
    parallelize(model, ALONE, **options)
    model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_equal(own: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(own, expected, rtol=0, atol=0)


# Activations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_late_copies_change_no_bit(recompute: str, precision: str, late: Late) -> None:
    """Three microbatches at once, as in a pipeline, whose backwards come in another order."""

    def gradients(offload: str) -> list[Tensor | None]:
        model = small_llama(num_hidden_layers=4)
        options = {"recompute": recompute, "precision": precision}
        parallelize(model, ALONE, offload=offload, **options)
        losses = [sample_losses(model(tokens(0, i)), tokens(0, i)).sum() for i in range(3)]
        for i in (1, 0, 2):
            losses[i].backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_equal(gradients("activations"), gradients("none"))
    kinds = [kind for kind, _ in late.log]
    assert kinds.count("out") > kinds.count("in") > 0


def test_the_order_of_copies_and_waits(late: Late) -> None:
    """Four blocks, each of which saves its input. A forward waits for the block before the previous
    one; a backward fetches the previous one before it waits for its own."""
    model = partial(Layers, *(Function(torch.sin) for _ in range(4)))
    gradients_of(model, torch.ones(2, 4), HostLink())
    forward = [("out", 0), ("out", 1), ("wait", 0), ("out", 2), ("wait", 1), ("out", 3)]
    # Blocks 3 and 2 have not left yet, and are used where they are: what is not needed any more
    # is waited for.
    backward = [("wait", 3), ("in", 4), ("wait", 2), ("in", 5), ("wait", 4), ("wait", 5)]
    assert late.log == forward + backward


def sines(x: Tensor) -> Tensor:
    for _ in range(12):
        x = x.sin()
    return x


SAVED = 4 * 8 * 4  # bytes of each tensor that it saves for an input (8, 4)


@pytest.mark.parametrize("layers", [6, 12])
@pytest.mark.parametrize(
    ("limit", "most"),
    [(5 * SAVED, 5 * SAVED), (2**20, 2 * 12 * SAVED)],
    ids=["by the limit", "by two blocks"],
)
def test_bytes_on_their_way_are_limited(
    layers: int, limit: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not grow with the number of blocks."""
    link = HostLink(limit)
    leaving: list[int] = []
    arriving: list[int] = []

    class Watched(ActivationOffload):
        def pack(self, x: Tensor) -> Any:
            saved = super().pack(x)
            leaving.append(link.leaving_bytes)
            return saved

        def unpack(self, saved: Any) -> Tensor:
            tensor = super().unpack(saved)
            arriving.append(sum(one.target.nbytes for one in self._arriving))
            return tensor

    monkeypatch.setattr(parallelize_module, "ActivationOffload", Watched)
    model = partial(Layers, *(Function(sines) for _ in range(layers)))
    gradients_of(model, torch.ones(8, 4), link)
    assert max(leaving) == most
    assert 0 < max(arriving) <= most
    assert link.sent == link.host_bytes == 12 * layers * SAVED


def test_memory_of_the_host_is_allocated_once() -> None:
    link = HostLink()
    model = small_llama()
    parallelize(model, ALONE, offload="activations", host_link=link)
    sizes = []
    for _ in range(3):
        sample_losses(model(tokens()), tokens()).sum().backward()
        sizes.append(link.host_bytes)
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_only_what_a_block_has_computed_leaves() -> None:
    """Neither weights, nor their 16-bit copies, nor buffers; an input that several layers and
    blocks save leaves once."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("table", torch.ones(6, 4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.q(x) * self.table + self.k(x.view(-1, 4)) * y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.layers = nn.ModuleList([Block(), Block()])

        def blocks(self) -> list[nn.Module]:
            return list(self.layers)

        def forward(self, x: Tensor) -> Tensor:
            x = y = self.first(x)
            for layer in self.layers:
                x = layer(x, y)
            return x

    for precision, size in (("float32", 4), ("bfloat16", 2)):
        link = HostLink()
        gradients_of(Model, torch.ones(6, 4), link, precision=precision)
        # of each block its input and the result of k; y is the first block's input
        assert link.sent == 4 * 6 * 4 * size, precision


@pytest.mark.parametrize(("recompute", "tensors"), [("none", 2), ("selective", 2), ("full", 1)])
def test_of_a_recomputed_block_leaves_what_it_keeps(recompute: str, tensors: int) -> None:
    """Its input, and with `selective` the results of products."""
    link = HostLink()
    blocks = [nn.Sequential(nn.Linear(4, 4), Function(torch.sin)) for _ in range(3)]
    gradients_of(partial(Layers, *blocks), torch.ones(6, 4), link, recompute=recompute)
    assert link.sent == 3 * tensors * 6 * 4 * 4


def test_nothing_leaves_without_gradients_or_of_single_layers() -> None:
    link = HostLink()
    model = parallelize(Layers(Function(torch.sin)), ALONE, offload="activations", host_link=link)
    with torch.no_grad():
        model(torch.ones(2, 4))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers.blocks = lambda: list(layers)
    parallelize(layers, ALONE, offload="activations", host_link=link)
    layers(torch.ones(2, 4)).sum().backward()
    assert link.sent == 0


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "LEAST", 100)
    link = HostLink()
    gradients_of(lambda: Layers(Function(torch.sin)), torch.ones(6, 4), link)
    assert link.sent == 0
    gradients_of(lambda: Layers(Function(torch.sin)), torch.ones(7, 4), link)
    assert link.sent == 7 * 4 * 4


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_block_may_write_to_its_activations(recompute: str, late: Late) -> None:
    """Also through views that share memory and no version (a GRU)."""
    x = torch.randn(2, 3, 4)
    make = partial(Layers, WritingBlock(), WritingBlock())
    own = gradients_of(make, x, HostLink(), recompute=recompute)
    assert_equal(own, gradients_of(make, x))


def test_memory_that_is_written_to_behind_torchs_back_leaves_again() -> None:
    """Two parts of one storage with versions of their own, which are equal."""

    def parts(x: Tensor) -> Tensor:
        a, b = x.cos().unsafe_chunk(2)
        a.add_(1)
        y = a.sin()
        b.mul_(2)
        return torch.cat([y, b.sin()])

    make = partial(Layers, *(Function(parts) for _ in range(3)))
    x = torch.ones(2, 4)
    assert_equal(gradients_of(make, x, HostLink()), gradients_of(make, x))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_block_that_draws_draws_the_same(recompute: str, late: Late) -> None:
    x = torch.randn(2, 6, 8)
    make = partial(Layers, Dropping(), Dropping(), width=8)
    own = gradients_of(make, x, HostLink(), recompute=recompute)
    assert_equal(own, gradients_of(make, x))


def strided(x: Tensor) -> Tensor:
    """Saves views of one storage with strides, a step of 0, and an offset."""
    a, b, c = torch.cat([x, x.cos(), x.sin()], dim=-1).chunk(3, dim=-1)
    scores = F.softmax(a @ b.mT, dim=-1)
    return (scores @ c) * a[..., :1].expand_as(c) * c.mT.contiguous().mT


def test_views_come_back_with_their_strides(late: Late) -> None:
    seen: list[tuple[torch.Size, tuple[int, ...], int]] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            return tensors[0].clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            seen.extend((x.shape, x.stride(), x.storage_offset()) for x in ctx.saved_tensors)
            return gradient, *[None] * (len(ctx.saved_tensors) - 1)

    def views(x: Tensor) -> Tensor:
        return Seen.apply(x, x[:, 1:], x.mT, x[:, :1].expand_as(x), x[1:, ::2])

    x = torch.ones(3, 4)
    gradients_of(partial(Layers, *(Function(views) for _ in range(4))), x, HostLink())
    expected = [x, x[:, 1:], x.mT, x[:, :1].expand_as(x), x[1:, ::2]]
    assert seen == 4 * [(x.shape, x.stride(), x.storage_offset()) for x in expected]
    make = partial(Layers, *(Function(strided) for _ in range(3)))
    assert_equal(gradients_of(make, x, HostLink()), gradients_of(make, x))


@pytest.mark.parametrize("least", [0, 2**20])
@pytest.mark.parametrize("when", ["in the forward", "after it"])
def test_a_write_to_what_was_saved_is_refused(
    when: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without offloading, whether it has left or stays."""
    monkeypatch.setattr(activation_offload, "LEAST", least)
    outputs: list[Tensor] = []

    def writing(x: Tensor) -> Tensor:
        y = x.sin()
        outputs.append(y)
        z = y.cos()
        if when == "in the forward":
            y.detach().add_(1)
        return z

    for offload in ("none", "activations"):
        model = parallelize(Layers(*(Function(writing) for _ in range(4))), ALONE, offload=offload)
        loss = model(torch.ones(2, 4)).sum()
        if when == "after it":
            outputs[-4].detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_graph_may_be_used_twice_and_for_second_derivatives(late: Late) -> None:
    def derivatives(offload: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = Layers(*(Function(torch.sin) for _ in range(4)))
        parallelize(model, ALONE, offload=offload)
        x = torch.ones(2, 4, requires_grad=True)
        loss = model(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x)
        return [first.detach(), second, again]

    assert_equal(derivatives("activations"), derivatives("none"))


def test_a_graph_that_is_dropped_gives_its_memory_back(late: Late) -> None:
    """After no backward, and after that of a part, which has fetched what nobody asks for."""
    link, hidden = HostLink(), []

    def sine(x: Tensor) -> Tensor:
        hidden.append(x)
        return x.sin()

    model = Layers(*(Function(sine) for _ in range(6)))
    parallelize(model, ALONE, offload="activations", host_link=link)
    model(torch.ones(2, 4))
    hidden.clear()
    before = link.host_bytes
    loss = model(torch.ones(2, 4)).sum()
    torch.autograd.grad(loss, hidden[-3])
    del loss
    hidden.clear()
    fetched = {number for kind, number in late.log if kind == "in"}
    assert fetched - {number for kind, number in late.log if kind == "wait"}
    model(torch.ones(2, 4)).sum().backward()
    assert link.host_bytes == before
    assert fetched <= {number for kind, number in late.log if kind == "wait"}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_blocks_share_a_graph(
    recompute: str, monkeypatch: pytest.MonkeyPatch, late: Late
) -> None:
    """Compiled code is specific to the hooks of saved tensors, which are the same for all."""
    backend = "aot_eager_decomp_partition"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))

    def gradients(offload: str) -> list[Tensor | None]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = small_llama(num_hidden_layers=4)
        options = {"recompute": recompute, "precision": "bfloat16", "compile": True}
        parallelize(model, ALONE, offload=offload, **options)
        for i in range(2):
            sample_losses(model(tokens(0, i)), tokens(0, i)).sum().backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        return [parameter.grad for parameter in model.parameters()]

    assert_equal(gradients("activations"), gradients("none"))
    assert "in" in {kind for kind, _ in late.log}


def test_a_copy_of_the_model_is_refused() -> None:
    model = parallelize(small_llama(), ALONE, offload="activations")
    with pytest.raises(InputError, match="a copy of this model would compute with the weights"):
        copy.deepcopy(model)


def test_versions_are_shared_by_views_and_not_by_what_looks_alike() -> None:
    x = torch.zeros(4)
    witness = version_witness(x)
    a, b = x.unsafe_chunk(2)
    assert share_version(witness, x)
    assert share_version(witness, x[1:])
    assert share_version(witness, x.detach())
    assert not share_version(witness, a)
    assert not share_version(a, b)
    x[:2].add_(1)
    assert witness._version == x._version == 1
    assert witness.untyped_storage().nbytes() == 0


# On a GPU -----------------------------------------------------------------------------------------


@pytest.fixture
def _deterministic() -> Iterator[None]:
    set_numerics(deterministic=True)
    yield
    torch.cuda.set_sync_debug_mode("default")
    set_numerics(deterministic=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_on_a_gpu_memory_is_freed_and_no_bit_changes(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three updates of 12 layers with 4,096 tokens in bfloat16; the last without a wait of the
    host."""
    monkeypatch.undo()  # what is small stays
    gpu = Mesh(Layout({}), 0, "cuda", None, {})
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
    text = torch.randint(V, (4, 1024), generator=torch.Generator().manual_seed(0)).cuda()

    def run(offload: str) -> tuple[list[Tensor], int, HostLink]:
        link = HostLink()
        model = small_llama(**sizes).cuda()
        options = {"precision": "bfloat16", "recompute": recompute}
        parallelize(model, gpu, offload=offload, host_link=link, **options)
        optimizer = Optimizer(model, config(ema_decay=0.9), gpu, 10)
        factor, skip = torch.tensor(0.5, device="cuda").double(), torch.tensor(False, device="cuda")
        for step in (1, 2, 3):
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
            optimizer.zero_grad()
            (sample_losses(model(text), text).sum() / text.numel()).backward()
            optimizer.squared_norm()
            optimizer.update(step, factor, skip)
        torch.cuda.set_sync_debug_mode("default")
        with optimizer.averaged(model):
            averages = [p.detach().cpu() for p in model.parameters()]
        weights = [p.detach().cpu() for p in model.parameters()]
        return weights + averages, torch.cuda.max_memory_allocated(), link

    expected, most, _ = run("none")
    own, own_most, link = run("both")
    assert_equal(own, expected)
    assert own_most < 0.8 * most
    assert link.sent > 2 * link.host_bytes
