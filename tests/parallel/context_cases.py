"""Run as a job: attention over sharded sequences against attention in one process; prints what failed."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshtrain
from meshtrain.attention import AttentionContext, attention, document_mask
from meshtrain.data.batch import IGNORE, Batch
from meshtrain.data.sequence import kv_heads_of, padded_length, sees_chunk
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.modeling.context import AttentionShape
from meshtrain.parallel.activation_checkpoint import checkpoint_block
from meshtrain.parallel.context import ContextParallel, ShardedContext, kernels
from meshtrain.parallel.context.attention import _context_attention_backward
from meshtrain.parallel.context.kernels import Block

B, H, E = 2, 12, 8
# Lengths of documents per row; the last one extends to the end.
DOCUMENTS: dict[str, list[list[int]] | None] = {
    "causal": None,
    "documents": [[3, 11, 2, 1, 1, 17], [25, 4]],
    "one-token documents": [[1] * 99, [1] * 99],
    "ends at chunks": [[4] * 25, [8] * 13],
    "short": [[5] * 20, [7] * 15],
    "halves": [[24, 99], [24, 99]],
    "returning": [[5, 9, 4, 20], [11, 3, 9, 2]],  # documents 0 and 1 alternate
}
# In 16 bits, results may be off by ten roundings from float32: of scores, of probabilities, and of blocks' results.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 10 * 2**-8, torch.float16: 10 * 2**-11}


class SegmentBySegment(kernels._Flash):
    """Variable-length flash attention, written out segment by segment: on any device, in any dtype."""

    def run(self, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        q, k, v = inputs[:3]
        out, lse = q.new_full((*q.shape[:2], v.shape[-1]), torch.nan), q.new_full(q.shape[1::-1], torch.inf)
        lse = lse.to(torch.promote_types(q.dtype, torch.float32))
        for queries, keys, block in self.segments(*inputs[3:], **options):
            y, sums = kernels.forward_block(*self.beside(q[queries], k[keys], v[keys]), block, kernels.PRODUCTS)
            out[queries], lse[:, queries] = y[0].transpose(0, 1).to(q.dtype), sums[0]
        return out, lse

    def run_backward(self, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out, lse = inputs[:6]
        dq, dk, dv = torch.zeros_like(q), torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
        for queries, keys, block in self.segments(*inputs[6:], **options):
            dy, x, y = self.beside(grad[queries], q[queries], out[queries])
            whole = y, lse[None, :, queries]
            grads = kernels.backward_block(dy, x, *self.beside(k[keys], v[keys]), *whole, block, kernels.PRODUCTS)
            dq[queries], dk[keys], dv[keys] = (d[0].transpose(0, 1).to(q.dtype) for d in grads)
        return dq, dk, dv

    @staticmethod
    def beside(*xs: Tensor) -> list[Tensor]:
        return [x.transpose(0, 1)[None] for x in xs]

    @staticmethod
    def segments(*settings: Any, scale: float, **window: int) -> Iterator[tuple[slice, slice, Block]]:
        begins, key_begins, longest, most_keys, dropout, causal = settings
        assert (begins.dtype, key_begins.dtype, dropout) == (torch.int32, torch.int32, 0.0)
        pairs = [zip(x.tolist(), x.tolist()[1:], strict=False) for x in (begins, key_begins)]
        rows, columns = ([slice(*pair) for pair in of] for of in pairs)
        assert longest == max(2, *(x.stop - x.start for x in rows))
        assert most_keys == max(x.stop - x.start for x in columns)
        for queries, keys in zip(rows, columns, strict=True):
            m, n = queries.stop - queries.start, keys.stop - keys.start
            mask = torch.ones(m, n, dtype=torch.bool)
            if window:
                mask = mask.triu(n - m - window["window_size_left"]).tril(n - m + window["window_size_right"])
            if n > 0:
                yield (
                    queries,
                    keys,
                    Block(scale, mask=(mask.tril(n - m) if causal else mask).to(begins.device)[None, None]),
                )


class Cases:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.checked = 0
        self.failures: list[str] = []

    def close(self, actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
        """Compares by the largest difference, relative to the largest value if that is above 1."""
        self.checked += 1
        off = largest(actual.double() - expected.double()) if actual.shape == expected.shape else torch.inf
        if not off <= tolerance * max(1.0, largest(expected)):
            self.failures.append(f"rank {self.mesh.rank}: {what}: off by {off:.1e}")

    def equal(self, actual: Any, expected: Any, what: str) -> None:
        self.checked += 1
        if actual != expected:
            self.failures.append(f"rank {self.mesh.rank}: {what}: {actual} and not {expected}")

    def tell(self) -> None:
        """Prints one line for the test that started this job."""
        row = {"checked": self.checked, "failures": self.failures[:20]}  # short enough for one atomic write to a pipe
        print(json.dumps(row) + "\n", end="", flush=True)


def largest(x: Tensor) -> float:
    """The largest absolute value; 0 for an empty tensor, since a rank may have only padding."""
    return float(x.abs().max()) if x.numel() > 0 else 0.0


def documents_of(name: str, s: int) -> Tensor | None:
    """The document numbers, (b, s) int64; None for a purely causal mask."""
    rows = DOCUMENTS[name]
    if rows is None:
        return None
    count = 2 if name == "returning" else 99
    each = [[n % count for n, length in enumerate(row) for _ in range(length)] for row in rows]
    return torch.tensor([(row + [row[-1]] * s)[:s] for row in each])


class Sent:
    """Bytes that this rank sends over `cp` while active: as counted, and as really sent."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._send, self.sent = mesh, dist.isend, 0

    def __enter__(self) -> "Sent":
        self._mesh.comm_bytes.restart()
        dist.isend = self._count
        return self

    def __exit__(self, *error: object) -> None:
        dist.isend = self._send
        self.counted = self._mesh.comm_bytes.by_axis().get("cp", 0)

    def _count(self, tensor: Tensor, **to: Any) -> Any:
        self.sent += tensor.nbytes
        return self._send(tensor, **to)


class Case:
    """Queries, keys and values of a whole sequence, the same on every rank, and the results of one process."""

    device = torch.device("cpu")

    def __init__(self, s: int, kv: int, documents: str, dtype: torch.dtype, f: int = E, **options: Any) -> None:
        self.s, self.kv, self.f, self.dtype, self.options = s, kv, f, dtype, options
        self.name = f"s {s}, kv heads {kv}, {documents}, {dtype}, f {f}, {options}"
        draw = torch.Generator().manual_seed(s + kv)
        shapes = ((B, H, s, E), (B, kv, s, E), (B, kv, s, f), (B, H, s, f))
        *self.qkv, self.grad = (torch.randn(shape, dtype=torch.float64, generator=draw).to(dtype) for shape in shapes)
        self.documents = documents_of(documents, s)
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        leaves = [x.to(wide, copy=True).requires_grad_() for x in self.qkv]
        mask = None if self.documents is None else document_mask(self.documents)
        out = attention(*leaves, mask, **options)
        out.backward(self.grad.to(wide))
        self.expected = [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    def batch(self) -> Batch:
        tokens = torch.arange(self.s).expand(B, -1).contiguous()
        return Batch.of((tokens, tokens, self.documents), tokens + 1)

    def traveling(self, parts: int, index: int) -> tuple[int, int]:
        """By the rules of `meshtrain.data.sequence`: how often other ranks of `parts` see a chunk of this rank, and how
        many of theirs it sees. If documents return, all chunks count as seen."""
        padded = padded_length(self.s, dist.get_world_size())
        chunk = padded // (2 * parts)
        first = [0] * (2 * parts)
        if self.documents is not None and bool((self.documents.diff(dim=1) >= 0).all()):
            rows = [row + [-1] * (padded - self.s) for row in self.documents.tolist()]
            first = [min(row.index(row[y * chunk]) for row in rows) for y in range(2 * parts)]
        near = self.options.get("window", padded)
        first = [max(p, y * chunk - near + 1) for y, p in enumerate(first)]
        own, others = (index, 2 * parts - 1 - index), [i for i in range(parts) if i != index]
        foreign = [x for x in range(2 * parts) if x not in own]
        return (
            sum(sees_chunk(first, chunk, reader, x) for reader in others for x in own),
            sum(sees_chunk(first, chunk, index, x) for x in foreign),
        )

    def sharded(self, cp: ContextParallel) -> tuple[list[Tensor], Tensor, ShardedContext]:
        """This rank's q, k and v as leaves, the gradient of its output, and its context; padding is zero."""
        own = cp.positions(self.s)
        longer = padded_length(self.s, cp.size, cp.tp) - self.s
        *qkv, grad = (torch.nn.functional.pad(x, (0, 0, 0, longer))[:, :, own] for x in (*self.qkv, self.grad))
        record = cp.shard(self.batch()).tensors["documents"]
        assert isinstance(record, ShardedContext)
        leaves = [x.contiguous().to(self.device).requires_grad_() for x in qkv]
        return leaves, grad.to(self.device), record.to(self.device)


def check(cases: Cases, case: Case, *, as_on_gpus: bool = False, **way: Any) -> None:
    """Checks one rank's part of a case: values, bytes sent, and memory kept. `as_on_gpus`: with collectives, which gloo
    has, too."""
    cp = ContextParallel(cases.mesh, **way)
    by_messages = case.device.type == "cpu" and not as_on_gpus
    for group in cp.groups.values():
        group.on_cpu = by_messages
    leaves, grad, context = case.sharded(cp)
    saved: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        if all(x is not shared for shared in (context.documents, context.spans)):
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.itemsize
        return x

    with Sent(cases.mesh) as there, torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        out = attention(*leaves, context, **case.options)
    with Sent(cases.mesh) as back:
        out.backward(grad)
    shape, u = AttentionShape(cp.size, H, case.kv, E, case.f, B * leaves[0].shape[2]), way["heads"]
    numbers = shape.messages(u, cp.index, case.traveling(cp.size // u, cp.index // u))
    expected = tuple(case.dtype.itemsize * n for n in numbers)
    cases.equal((there.counted, back.counted), expected, f"{way}: {case.name}: bytes")
    if by_messages:
        cases.equal((there.sent, back.sent), expected, f"{way}: {case.name}: bytes that gloo was given")
    if case.documents is None and not case.options:
        cases.equal(shape.messages(u, cp.index), numbers, f"{way}: {case.name}: closed form of one document")
    if way["heads"] == 1:
        cases.equal(out.untyped_storage().data_ptr() in saved, True, f"{way}: {case.name}: the output is kept itself")
    kept, _ = shape.memory(u, way["method"], cp.index)
    cases.equal(sum(saved.values()), kept, f"{way}: {case.name}: numbers kept")
    own = cp.positions(case.s)
    real, places = own < case.s, own[own < case.s]
    for name, actual, expected in zip("yqkv", (out, *(x.grad for x in leaves)), case.expected, strict=True):
        assert actual is not None
        cases.equal(actual.dtype, case.dtype, f"{way}: {case.name}: type of {name}")
        what = f"{way}: {case.name}: {name}"
        cases.close(actual.detach().cpu()[:, :, real], expected[:, :, places], TOLERANCE[case.dtype], what)


def shards(cases: Cases) -> None:
    """A rank's shard of a batch: its own positions, targets shifted before sharding, padding without targets."""
    mesh = cases.mesh
    cp = ContextParallel(mesh)
    s = 8 * mesh.size("cp") - 3
    tokens = torch.randint(1, 99, (B, s + 1), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(s).repeat(B, 1)
    documents = documents_of("short", s)
    batch = Batch.of((tokens[:, :-1], positions, documents), tokens[:, 1:])
    mine = cp.shard(batch)
    own = cp.positions(s)
    cases.equal([cp.owner(int(p), s) for p in own], [(cp.index, i) for i in range(len(own))], "owner")
    for i, p in enumerate(own.tolist()):
        cases.equal(mine.targets[:, i].tolist(), tokens[:, p + 1].tolist() if p < s else [IGNORE] * B, f"targets {p}")
        if p < s:
            cases.equal(mine.tensors["tokens"][:, i].tolist(), tokens[:, p].tolist(), f"tokens {p}")
            cases.equal(mine.tensors["positions"][:, i].tolist(), [p] * B, f"positions {p}")
    record = mine.tensors["documents"]
    cases.equal(record.documents[:, :s].tolist(), documents.tolist(), "documents")
    cases.equal(bool((record.documents[:, s:] > documents[:, -1:]).all()), True, "padding is a document of its own")
    cases.equal(record.part.tolist(), own.tolist(), "part")
    plain = cp.shard(Batch.of((tokens[:, :-1], None, None), tokens[:, 1:]))
    cases.equal(plain.tensors["positions"].tolist(), mine.tensors["positions"].tolist(), "positions of none")
    cases.equal(list(plain.tensors), list(batch.tensors), "order of the inputs")
    moved = record.to(torch.device("meta"))
    cases.equal(
        (moved.documents.device.type, moved.spans.device.type), ("cpu", "cpu"), "who sees whom stays on the CPU"
    )
    for wrong in ({"method": "ulysses"}, {"heads": 5}):
        try:
            ContextParallel(mesh, **wrong)
            cases.equal(True, False, f"{wrong} is refused")
        except InputError:
            pass


class Mixer(nn.Module):
    """The attention of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(24, (H + 3 + 3) * E, bias=False), nn.Linear(H * E, 24, bias=False)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        heads = self.qkv(x).unflatten(2, (-1, E)).transpose(1, 2)
        return x + self.o(attention(*heads.split([H, 3, 3], 1), context).transpose(1, 2).flatten(2))


def recomputed_and_compiled(cases: Cases, way: dict[str, Any]) -> None:
    """Gradients are bit-equal, or equal up to rounding if compiled; only `full` sends again; one graph serves all."""
    cp = ContextParallel(cases.mesh, **way)
    torch.manual_seed(0)
    block = Mixer().double()
    whole = torch.randn(2, B, 37, 24, dtype=torch.float64).to(Case.device)
    block.to(Case.device)
    results: dict[tuple[str, bool], list[Tensor]] = {}
    sent = {}
    for compiled, recompute in itertools.product((False, True), ("none", "selective", "full")):
        torch.compiler.reset()
        counters.clear()
        forward = checkpoint_block(block.forward, recompute)
        if compiled:
            forward = torch.compile(forward, fullgraph=True, backend="aot_eager_decomp_partition")
        grads = []
        with Sent(cases.mesh) as traffic:
            for x, documents in zip(whole, ("documents", "short"), strict=True):
                context = cp.shard(Case(37, 3, documents, torch.float64).batch()).tensors["documents"].to(Case.device)
                mine = x[:, cp.positions(37).clamp(max=36).to(Case.device)].requires_grad_()
                forward(forward(mine, context), context).square().sum().backward()
                grads += [mine.grad, *(p.grad for p in block.parameters())]
                block.zero_grad()
        results[recompute, compiled], sent[recompute, compiled] = grads, traffic.counted
        what = f"{way}, recompute {recompute}, compiled {compiled}"
        for a, b in zip(grads, results["none", False], strict=True):
            cases.close(a, b, 1e-13 if compiled else 0.0, f"{what}: gradients")
        cases.equal(counters["stats"]["unique_graphs"], int(compiled), f"{what}: graphs")
    cases.equal(sent["selective", False], sent["none", False], f"{way}: selective recomputation sends nothing again")
    cases.equal(sent["full", False] > sent["none", False] > 0, True, f"{way}: full recomputation does")
    for recompute in ("none", "selective"):
        cases.equal(sent[recompute, True], sent[recompute, False], f"{way}, {recompute}: bytes of what is compiled")


class Peak(TorchDispatchMode):
    """The peak memory, in bytes, of tensors made while active."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known:
                self._made[x.untyped_storage()._cdata] = (
                    StorageWeakRef(x.untyped_storage()),
                    x.untyped_storage().nbytes(),
                )
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._made.values()))
        return made


def memory(cases: Cases, way: dict[str, Any]) -> None:
    """The additional memory of a backward: never more than the formula says, and not much less."""
    case, cp = Case(48 * cases.mesh.size("cp"), 3, "causal", torch.float64), ContextParallel(cases.mesh, **way)
    (q, k, v), grad, context = case.sharded(cp)
    looks = kv_heads_of(H, 3, *cp.neighbours)
    with torch.no_grad():
        if context.heads:
            q, k, v = torch.ops.meshtrain.to_heads([q, k, v], [H, 3, 3], context.heads)
            [grad] = torch.ops.meshtrain.to_heads([grad], [H], context.heads)
        settings = context.documents, context.spans, looks, context.ring, context.method, 0.3, None, None
        out, lse = torch.ops.meshtrain.context_attention(q, k, v, *settings)
        with Peak() as peak:
            _context_attention_backward(grad, q, k, v, out, lse, *settings)
    _, on_top = AttentionShape(cp.size, H, 3, E, E, B * 48).memory(way["heads"], way["method"], cp.index)
    cases.equal(0.5 < peak.bytes / 8 / on_top <= 1, True, f"{way}: {peak.bytes / 8} of {on_top} numbers of a backward")


def ways(cp: int) -> list[dict[str, Any]]:
    """All combinations: every divisor u of cp; with u = cp the methods do not differ."""
    return [
        {"method": method, "heads": u}
        for u in range(1, cp + 1)
        for method in ("gather", "ring")
        if cp % u == 0 and (u < cp or method == "gather")
    ]


def main() -> None:
    with meshtrain.start() as job:
        Case.device, layout = job.device, Layout({"cp": job.world_size})
        cases = Cases(meshtrain.build_mesh(layout))
        shards(cases)
        for way in ways(job.world_size):
            cases.mesh = meshtrain.build_mesh(layout.with_context_heads(way["heads"]))
            exact(cases, way)
            if Case.device.type == "cpu":  # kernels are the same in all dtypes, without internal copies
                in_segments(cases, way)
                memory(cases, way)
            recomputed_and_compiled(cases, way)
        cases.tell()


def exact(cases: Cases, way: dict[str, Any]) -> None:
    sizes = (*itertools.product((3, 37), (1, 3, 12)), (48, 3))
    for (s, kv), documents in itertools.product(sizes, DOCUMENTS):
        check(cases, Case(s, kv, documents, torch.float64), **way)
    for options in (
        {"scale": 0.3},
        {"window": 1},
        {"window": 7},
        {"window": 24},
        {"soft_cap": 2.0},
        {"f": 5},
        {"f": 11},
    ):
        for documents in ("causal", "documents"):
            check(cases, Case(37, 3, documents, torch.float64, **options), **way)
    for documents in ("causal", "documents", "one-token documents"):
        check(cases, Case(37, 3, documents, torch.float64), as_on_gpus=True, **way)
    everything: dict[str, Any] = {"scale": 0.3, "window": 9, "soft_cap": 2.0, "f": 11}
    check(cases, Case(37, 3, "documents", torch.float64, **everything), **way)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for documents, option in (("causal", {}), ("documents", {}), ("documents", everything)):
            check(cases, Case(37, 3, documents, dtype, **option), **way)


def in_segments(cases: Cases, way: dict[str, Any]) -> None:
    """Documents as segments instead of masks, as on GPUs in 16 bits."""
    chosen, choices = kernels.choose_kernel, []

    def choose(q: Tensor, v: Tensor, soft_cap: float | None, visible: str) -> kernels.Kernel:
        choices.append(visible)
        return segmented if visible == "documents" else chosen(q, v, soft_cap, visible)

    segmented = SegmentBySegment()
    kernels.choose_kernel = choose
    for s, kv in ((37, 3), (48, 1)):
        for name, documents in DOCUMENTS.items():
            if documents is not None:
                check(cases, Case(s, kv, name, torch.float64, f=5), **way)
                cases.equal("mask" in choices, name == "returning", f"{way}: {name}: masks")
                choices.clear()
    for name, window in itertools.product(("documents", "causal"), (1, 7, 24, 30)):
        check(cases, Case(37, 3, name, torch.float64, window=window), **way)
    kernels.choose_kernel = chosen


if __name__ == "__main__":
    main()
