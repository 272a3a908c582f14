"""Attention over sharded sequences: every way of exchanging parts against attention in one process.

Run as a script on GPUs, it checks there what can differ from CPUs.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import meshtrain
from meshtrain.data.batch import IGNORE, Batch
from meshtrain.data.sequence import kv_heads_of
from meshtrain.errors import InputError
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.modeling.context import AttentionShape
from meshtrain.parallel.activation_checkpoint import checkpoint_block
from meshtrain.parallel.context import ContextParallel, kernels
from meshtrain.parallel.context.attention import _context_attention_backward
from tests.comparing import Created
from tests.parallel.sharded_attention import DOCUMENTS, B, Case, E, H, Mixer, SegmentBySegment, Way, check, documents_of

# With as many ranks for heads as there are, the methods do not differ.
WAYS = [
    (world, method, heads)
    for world in (2, 3, 4)
    for heads in range(1, world + 1)
    for method in ("gather", "ring")
    if world % heads == 0 and (heads < world or method == "gather")
]
each_way = pytest.mark.parametrize(
    ("job", "method", "heads"),
    WAYS,
    indirect=["job"],
    ids=[f"{world}-ranks-{method}-{heads}" for world, method, heads in WAYS],
)
SIZES = [(3, 1), (3, 3), (3, 12), (37, 1), (37, 3), (37, 12), (48, 3)]
EVERYTHING: dict[str, Any] = {"scale": 0.3, "window": 9, "soft_cap": 2.0, "f": 11}
OPTIONS: list[dict[str, Any]] = [
    {"scale": 0.3},
    {"window": 1},
    {"window": 7},
    {"window": 24},
    {"soft_cap": 2.0},
    {"f": 5},
    {"f": 11},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@each_way
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_sizes_and_documents(job: Job, method: str, heads: int, documents: str) -> None:
    way = Way(job, method, heads)
    for s, kv in SIZES:
        check(way, Case(s, kv, documents))


@each_way
def test_options(job: Job, method: str, heads: int) -> None:
    way = Way(job, method, heads)
    for options in OPTIONS:
        check(way, Case(37, 3, "causal", **options))
        check(way, Case(37, 3, "documents", **options))
    check(way, Case(37, 3, "documents", **EVERYTHING))


@each_way
@pytest.mark.parametrize("documents", ["causal", "documents", "one-token documents"])
def test_collectives_of_gpus(job: Job, method: str, heads: int, documents: str) -> None:
    check(Way(job, method, heads), Case(37, 3, documents), as_on_gpus=True)


@each_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shorter_types(job: Job, method: str, heads: int, dtype: torch.dtype) -> None:
    way = Way(job, method, heads)
    check(way, Case(37, 3, "causal", dtype))
    check(way, Case(37, 3, "documents", dtype))
    check(way, Case(37, 3, "documents", dtype, **EVERYTHING))


@pytest.fixture
def visibilities(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Documents become segments instead of masks, as on GPUs in 16 bits; gets what each kernel was chosen for."""
    choose_kernel, choices, segmented = kernels.choose_kernel, list[str](), SegmentBySegment()

    def choose(q: Tensor, v: Tensor, soft_cap: float | None, visible: str) -> kernels.Kernel:
        choices.append(visible)
        return segmented if visible == "documents" else choose_kernel(q, v, soft_cap, visible)

    monkeypatch.setattr(kernels, "choose_kernel", choose)
    return choices


@each_way
@pytest.mark.parametrize("documents", [name for name, lengths in DOCUMENTS.items() if lengths])
def test_documents_as_segments(job: Job, method: str, heads: int, documents: str, visibilities: list[str]) -> None:
    way = Way(job, method, heads)
    for s, kv in ((37, 3), (48, 1)):
        check(way, Case(s, kv, documents, f=5))
        assert ("mask" in visibilities) == (documents == "returning")
        visibilities.clear()


@each_way
@pytest.mark.usefixtures("visibilities")
@pytest.mark.parametrize("window", [1, 7, 24, 30])
def test_windows_as_segments(job: Job, method: str, heads: int, window: int) -> None:
    way = Way(job, method, heads)
    check(way, Case(37, 3, "documents", window=window))
    check(way, Case(37, 3, "causal", window=window))


class Peak(Created):
    """The peak memory, in bytes, of tensors made while active."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        now = sum(size for storage, size in self._made.values() if not storage.expired())
        self.bytes = max(self.bytes, now)
        return result


@each_way
def test_memory_of_a_backward(job: Job, method: str, heads: int) -> None:
    """Never more than the formula says, and not much less."""
    way, case = Way(job, method, heads), Case(48 * job.world_size, 3, "causal")
    (q, k, v), grad, context = way.sharded(case)
    with torch.no_grad():
        if context.heads:
            q, k, v = torch.ops.meshtrain.to_heads([q, k, v], [H, 3, 3], context.heads)
            [grad] = torch.ops.meshtrain.to_heads([grad], [H], context.heads)
        looks = kv_heads_of(H, 3, *way.cp.neighbours)
        settings = context.documents, context.spans, looks, context.ring, context.method, 0.3, None, None
        out, lse = torch.ops.meshtrain.context_attention(q, k, v, *settings)
        with Peak([grad, q, k, v, out, lse, context.spans]) as peak:
            _context_attention_backward(grad, q, k, v, out, lse, *settings)
    _, numbers = AttentionShape(way.cp.size, H, 3, E, E, B * 48).memory(heads, method, way.cp.index)
    assert 0.5 < peak.bytes / 8 / numbers <= 1


@each_way
def test_recomputed_and_compiled(job: Job, method: str, heads: int) -> None:
    """Gradients are bit-equal, or equal up to rounding if compiled; only `full` sends again; one graph serves all."""
    way = Way(job, method, heads)
    torch.manual_seed(0)
    block = Mixer().double().to(way.device)
    inputs = torch.randn(2, B, 37, 24, dtype=torch.float64)[:, :, way.cp.positions(37).clamp(max=36)]
    contexts = [way.shard(Case(37, 3, documents).batch()) for documents in ("documents", "short")]

    def run(recompute: str, compiled: bool) -> tuple[list[Tensor], int]:
        torch.compiler.reset()
        counters.clear()
        forward = checkpoint_block(block.forward, recompute)
        if compiled:
            forward = torch.compile(forward, fullgraph=True, backend="aot_eager_decomp_partition")
        way.sent()
        gradients = []
        for x, context in zip(inputs, contexts, strict=True):
            leaf = x.to(way.device, copy=True).requires_grad_()
            forward(forward(leaf, context), context).square().sum().backward()
            gradients += [leaf.grad, *(p.grad for p in block.parameters())]
            block.zero_grad()
        assert counters["stats"]["unique_graphs"] == int(compiled)
        return gradients, way.sent()

    expected, sent = run("none", compiled=False)
    assert sent > 0
    for compiled in (False, True):
        for recompute in ("none", "selective", "full"):
            gradients, sent_now = run(recompute, compiled)
            for actual, plain in zip(gradients, expected, strict=True):
                tolerance = 1e-13 * max(1.0, float(plain.abs().max())) if compiled else 0.0
                torch.testing.assert_close(actual, plain, rtol=0, atol=tolerance)
            if recompute != "full":
                assert sent_now == sent
            elif not compiled:
                assert sent_now > sent
    torch.compiler.reset()


@pytest.mark.ranks(2, 3, 4)
def test_shards(job: Job) -> None:
    """A rank's own positions, targets shifted before sharding, padding without targets."""
    cp = ContextParallel(meshtrain.build_mesh(Layout({"cp": job.world_size})))
    s = 8 * job.world_size - 3
    tokens = torch.randint(1, 99, (B, s + 1), generator=torch.Generator().manual_seed(0))
    positions, documents = torch.arange(s).repeat(B, 1), documents_of("short", s)
    batch = Batch.of((tokens[:, :-1], positions, documents), tokens[:, 1:])
    own = cp.positions(s)
    assert [cp.owner(int(p), s) for p in own] == [(cp.index, i) for i in range(len(own))]

    shard = cp.shard(batch)
    real = own < s
    places = own[real]
    assert torch.equal(shard.targets[:, real], tokens[:, places + 1])
    assert (shard.targets[:, ~real] == IGNORE).all()
    assert torch.equal(shard.tensors["tokens"][:, real], tokens[:, places])
    assert torch.equal(shard.tensors["positions"][:, real], places.expand(B, -1))
    record = shard.tensors["documents"]
    assert torch.equal(record.documents[:, :s], documents)
    assert (record.documents[:, s:] > documents[:, -1:]).all()
    assert torch.equal(record.part, own)
    moved = record.to(torch.device("meta"))
    assert (moved.documents.device.type, moved.spans.device.type) == ("cpu", "cpu")

    plain = cp.shard(Batch.of((tokens[:, :-1], None, None), tokens[:, 1:]))
    assert torch.equal(plain.tensors["positions"], shard.tensors["positions"])
    assert list(plain.tensors) == list(batch.tensors)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"method": "ulysses"}, {"heads": 5}])
def test_unknown_ways_are_refused(job: Job, options: dict[str, Any]) -> None:
    mesh = meshtrain.build_mesh(Layout({"cp": job.world_size}))
    with pytest.raises(InputError):
        ContextParallel(mesh, **options)


def main() -> None:
    with meshtrain.start() as job:
        test_shards(job)
        for world, method, heads in WAYS:
            if world == job.world_size:
                for documents in DOCUMENTS:
                    test_sizes_and_documents(job, method, heads, documents)
                test_options(job, method, heads)
                for dtype in DTYPES:
                    test_shorter_types(job, method, heads, dtype)
                test_recomputed_and_compiled(job, method, heads)


if __name__ == "__main__":
    main()
