"""Attention over sequences that lie in parts on several ranks: every way of exchanging parts
against one process.

Run as a script on GPUs, it checks there what can differ from CPUs.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import meshtrain
from meshtrain.data.batch import IGNORE, Batch
from meshtrain.data.sequence import kv_heads_of
from meshtrain.errors import InputError
from meshtrain.generate import generate
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.modeling.context import AttentionShape
from meshtrain.parallel.activation_checkpoint import checkpoint_block
from meshtrain.parallel.context import ContextParallel, kernels, visible_spans
from meshtrain.parallel.context.attention import (
    Exchange,
    Settings,
    Visibility,
    _context_attention_backward,
)
from tests.comparing import CPU, Peak, small_llama
from tests.launching import torchrun
from tests.parallel.sharded_attention import (
    DOCUMENTS,
    B,
    Case,
    E,
    H,
    Mixer,
    SegmentsByMask,
    Way,
    check,
    documents_of,
)
from tests.properties import given, st

GPUS = torch.cuda.device_count()
# a GPU hosts several ranks: NCCL 2.30
SHARED = GPUS > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


@pytest.mark.gpu
@pytest.mark.skipif(
    GPUS < 2 and not SHARED, reason="needs 2 GPUs, or one and NCCL_MULTI_RANK_GPU_ENABLE=1"
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [world for world in (2, 4) if world <= max(GPUS, 2) or SHARED])
def test_every_way_computes_the_same_on_gpus(world: int) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    torchrun(
        world, "-m", "tests.parallel.test_context_attention", timeout=800, env=environment
    ).check()


@pytest.mark.parametrize("stages", [[(2, 3, 0)], [(2,), (3,), (0,)]], ids=["gather", "ring"])
def test_gradients_are_added_in_one_order(stages: list[tuple[int, ...]]) -> None:
    """Whether they come together or one after the other: these addends have another sum in another
    order."""
    chunk = torch.zeros(1, 1, 2, 1)
    settings = Settings(
        documents=None,
        spans=torch.zeros(2, 8, dtype=torch.int64),
        heads=(),
        ring="",
        method="ring",
        scale=1.0,
        window=None,
        soft_cap=None,
    )
    visibility = Visibility(chunk, chunk, settings)
    # as if it were rank 1 of 4
    visibility.size, visibility.index, visibility.first = 4, 1, [0] * 8
    visibility.own = visibility.chunks_of(1)
    exchange = Exchange(chunk, settings, visibility)
    values = [1.0, 1e20, -1e20, 3.0]

    class Arrived:
        """What the others of a stage have sent."""

        def __init__(self, ranks: tuple[int, ...]) -> None:
            self.ranks = ranks

        def wait(self) -> list[torch.Tensor]:
            gradients = []
            for rank, value in enumerate(values):
                seen = visibility.own[visibility.needed(rank, 1)] if rank in self.ranks else ()
                gradients.append(torch.full((len(seen), 1, 1, 1, 1), value, dtype=torch.float64))
            return gradients

    exchange.gradient = torch.full((2, 1, 1, 1, 1), values[1], dtype=torch.float64)
    for ranks in stages:
        exchange._returning = Arrived(ranks)  # type: ignore[assignment]
        exchange._add_returned()
    first, second = exchange.total_gradient().flatten().tolist()
    assert first == ((values[1] + values[2]) + values[3]) + values[0] == 4.0
    assert second == values[1] + values[0], "the other ranks' queries do not see it"


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=9), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_spans_say_what_the_queries_of_a_chunk_see(rows: list[list[int]], parts: int) -> None:
    whole = [[n for n, count in enumerate(row) for _ in range(count)] for row in rows]
    m = -(-max(map(len, whole)) // (2 * parts))
    documents = [row + [99] * (2 * parts * m - len(row)) for row in whole]
    first, last = visible_spans(torch.tensor(documents), 2 * parts).tolist()
    for y in range(2 * parts):
        queries = range(y * m, (y + 1) * m)
        assert first[y] == min(
            k for row in documents for q in queries for k in range(q + 1) if row[k] == row[q]
        )
        all_seen = all(
            row[k] == row[q] for row in documents for q in queries for k in range(first[y], q + 1)
        )
        assert (last[y] <= first[y]) == all_seen


def test_a_document_that_returns_may_be_seen_from_everywhere() -> None:
    assert visible_spans(torch.tensor([[0, 1, 1, 0], [0, 0, 1, 2]]), 2).tolist() == [[0, 0], [4, 4]]
    assert visible_spans(None, 2).tolist() == [[0, 0], [0, 0]]


def test_without_cp_nothing_changes_and_a_text_needs_no_group() -> None:
    """A loop of one's own may always make a `ContextParallel`."""
    cp = ContextParallel(build_mesh(Layout({})))
    tokens = torch.arange(7).view(1, 7)
    batch = Batch.of((tokens, tokens, None), tokens)
    assert cp.shard(batch) is batch
    assert cp.positions(7).tolist() == list(range(7))
    assert cp.owner(5, 7) == (0, 5)
    assert len(generate(small_llama(), [1, 2], 3, seq_len=8, device=CPU, seed=1, context=cp)) == 5


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


LEARNED = ["sinks", "alibi dropout", "sinks absolute dropout"]


@each_way
@pytest.mark.parametrize("learned", LEARNED)
def test_sinks_biases_and_dropout(job: Job, method: str, heads: int, learned: str) -> None:
    """With the gradients of what they are made of, each rank's a part; nothing of them is sent."""
    way = Way(job, method, heads)
    for documents in ("causal", "documents", "returning"):
        check(way, Case(37, 3, documents, learned=learned))
    check(way, Case(3, 12, "causal", learned=learned))  # some ranks have padding alone
    check(way, Case(48, 1, "documents", learned=learned, **EVERYTHING))
    check(way, Case(37, 3, "documents", torch.float32, learned=learned, window=7))
    if learned == "sinks":
        check(way, Case(37, 3, "documents", torch.bfloat16, learned=learned))


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
    """Documents become segments instead of masks, as on GPUs in 16 bits; gets what each kernel was
    chosen for."""
    choose_kernel, choices, segmented = kernels.choose_kernel, list[str](), SegmentsByMask()

    def choose(q: Tensor, v: Tensor, by_products: bool, visible: str) -> kernels.Kernel:
        choices.append(visible)
        return segmented if visible == "documents" else choose_kernel(q, v, by_products, visible)

    monkeypatch.setattr(kernels, "choose_kernel", choose)
    return choices


@each_way
@pytest.mark.parametrize(
    ("documents", "options"),
    [
        *((name, {"f": 5}) for name, lengths in DOCUMENTS.items() if lengths),
        *(
            (name, {"window": window})
            for name in ("documents", "causal")
            for window in (1, 7, 24, 30)
        ),
    ],
)
def test_segments(
    job: Job,
    method: str,
    heads: int,
    documents: str,
    options: dict[str, Any],
    visibilities: list[str],
) -> None:
    way = Way(job, method, heads)
    for s, kv in ((37, 3), (48, 1)):
        check(way, Case(s, kv, documents, **options))
        if "window" not in options:  # where one ends within a block, a ring needs a mask
            assert ("mask" in visibilities) == (documents == "returning")
        visibilities.clear()


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
        settings = (
            context.documents,
            context.spans,
            looks,
            context.ring,
            context.method,
            0.3,
            None,
            None,
            None,
            0.0,
            None,
            None,
        )
        out, lse = torch.ops.meshtrain.context_attention(q, k, v, *settings)
        with Peak([grad, q, k, v, out, lse, context.spans]) as peak:
            _context_attention_backward(grad, q, k, v, out, lse, *settings)
    _, numbers = AttentionShape(way.cp.size, H, 3, E, E, B * 48).memory(heads, method, way.cp.index)
    assert 0.5 < peak.bytes / 8 / numbers <= 1


@pytest.mark.slow
@each_way
def test_recomputed_and_compiled(job: Job, method: str, heads: int) -> None:
    """Gradients are bit-equal, or equal up to rounding if compiled; only `full` sends again; one
    graph serves all."""
    way = Way(job, method, heads)
    torch.manual_seed(0)
    block = Mixer().double().to(way.device)
    inputs = torch.randn(2, B, 37, 24, dtype=torch.float64)[
        :, :, way.cp.positions(37).clamp(max=36)
    ]
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
    assert torch.equal(shard.targets[:, real], batch.targets[:, own[real]])
    assert (shard.targets[:, ~real] == IGNORE).all()
    for name in ("tokens", "positions"):
        assert torch.equal(shard.tensors[name][:, real], batch.tensors[name][:, own[real]])
    record = shard.tensors["documents"]
    assert torch.equal(record.documents[:, :s], documents)
    assert (record.documents[:, s:] > documents[:, -1:]).all()
    assert torch.equal(record.part, own)
    moved = record.to(torch.device("meta"))
    assert (moved.documents.device.type, moved.spans.device.type) == ("cpu", "cpu")
    without_positions = cp.shard(Batch.of((tokens[:, :-1], None, None), tokens[:, 1:]))
    assert torch.equal(without_positions.tensors["positions"], shard.tensors["positions"])


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
