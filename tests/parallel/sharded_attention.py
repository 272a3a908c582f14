"""Attention over a sequence that lies in parts on several ranks, against attention in one
process."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, attention, document_mask
from meshtrain.data.batch import Batch
from meshtrain.data.sequence import padded_length, sees_chunk
from meshtrain.dropout import Dropout, set_dropout
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.modeling.context import AttentionShape
from meshtrain.parallel.context import ContextParallel, ShardedContext, kernels
from meshtrain.parallel.context.kernels import Block
from meshtrain.parallel.torch_private import AttentionGradients, FlashOptions
from tests.comparing import Sent

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
# In 16 bits, results may be off by ten roundings from float32: of scores, of probabilities, and of
# blocks' results.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 10 * 2**-8,
    torch.float16: 10 * 2**-11,
}


class SegmentsByMask(kernels._Flash):
    """Variable-length flash attention by products with a mask of the segments: on any device, in
    any dtype."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, options: FlashOptions) -> tuple[Tensor, Tensor]:
        block, blind = block_of(options)
        out, lse = kernels.forward_block(*heads_first(q, k, v), block, kernels.PRODUCTS)
        out = out[0].transpose(0, 1).to(q.dtype)
        out = out.masked_fill(blind[:, None, None], torch.nan)
        return out, lse[0].masked_fill(blind, torch.inf)

    def run_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: FlashOptions,
    ) -> AttentionGradients:
        block, _ = block_of(options)
        tensors = heads_first(grad, q, k, v, out)
        gradients = kernels.backward_block(*tensors, lse[None], block, kernels.PRODUCTS)
        dq, dk, dv = (x[0].transpose(0, 1).to(q.dtype) for x in gradients)
        return dq, dk, dv


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1)[None] for x in tensors]


def block_of(options: FlashOptions) -> tuple[Block, Tensor]:
    """All segments as one block, and which queries see nothing."""
    assert options.query_ends is not None
    assert options.key_ends is not None
    assert options.query_ends.dtype == options.key_ends.dtype == torch.int32
    queries, keys = options.query_ends.diff(), options.key_ends.diff()
    longest = max(2, int(queries.max())), int(keys.max())
    if options.query_ends is options.key_ends:  # of packed rows, which the device alone knows
        assert (options.longest_queries, options.longest_keys) >= longest
    else:
        assert (options.longest_queries, options.longest_keys) == longest
    parts = []
    for m, n in zip(queries.tolist(), keys.tolist(), strict=True):
        part = torch.ones(m, n, dtype=torch.bool)
        if options.window_left is not None:
            assert options.window_right is not None
            part = part.triu(n - m - options.window_left).tril(n - m + options.window_right)
        parts.append(part.tril(n - m) if options.causal else part)
    mask = torch.block_diag(*parts).bool().to(options.query_ends.device)
    return Block(options.scale, mask=mask[None, None]), ~mask.any(1)


def documents_of(name: str, s: int) -> Tensor | None:
    """The document numbers, (b, s) int64; None for a purely causal mask."""
    rows = DOCUMENTS[name]
    if rows is None:
        return None
    count = 2 if name == "returning" else 99
    each = [[n % count for n, length in enumerate(row) for _ in range(length)] for row in rows]
    return torch.tensor([(row + [row[-1]] * s)[:s] for row in each])


class Learned:
    """What changes scores and probabilities besides: sinks, biases and dropout, each a word of
    `names`, with the parameters that get gradients. The same on every rank."""

    def __init__(self, names: str, dtype: torch.dtype) -> None:
        draws = torch.Generator().manual_seed(7)
        self.names = names
        self.sinks, self.slopes, self.table = (
            torch.randn(shape, dtype=torch.float64, generator=draws).to(dtype).requires_grad_()
            for shape in ((H,), (H,), (H, 5))
        )
        self.dropout = Dropout(0.3, heads=H)
        set_dropout(nn.ModuleList([self.dropout]), seed=1, step=1, samples=range(B))

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(1 or b, h, s, t): ALiBi's penalty of a distance, or a parameter for a pair of absolute
        positions."""
        if "alibi" in self.names:
            distance = queries[:, None, :, None] - keys[:, None, None]
            return -0.1 * self.slopes[:, None, None] * distance
        pairs = (queries[:, :, None] * keys[:, None]) % 5
        return self.table[:, pairs].transpose(0, 1)

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if "sinks" in self.names:
            options["sinks"] = self.sinks
        if "alibi" in self.names or "absolute" in self.names:
            options["bias"] = self.bias
        if "dropout" in self.names:
            options["dropout"] = self.dropout
        return options

    def gradients(self) -> list[Tensor]:
        leaves = self.sinks, self.slopes, self.table
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


class Case:
    """Queries, keys and values of a whole sequence, the same on every rank, and the results of one
    process."""

    def __init__(
        self,
        s: int,
        kv: int,
        documents: str,
        dtype: torch.dtype = torch.float64,
        *,
        f: int = E,
        learned: str = "",
        **options: Any,
    ) -> None:
        """`learned`: the names of a `Learned`."""
        self.s, self.kv, self.f, self.dtype, self.options = s, kv, f, dtype, options
        self.learned = learned
        draws = torch.Generator().manual_seed(s + kv)
        shapes = (B, H, s, E), (B, kv, s, E), (B, kv, s, f), (B, H, s, f)
        tensors = [
            torch.randn(shape, dtype=torch.float64, generator=draws).to(dtype) for shape in shapes
        ]
        *self.qkv, self.grad = tensors
        self.documents = documents_of(documents, s)
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        leaves = [x.to(wide, copy=True).requires_grad_() for x in self.qkv]
        mask = None if self.documents is None else document_mask(self.documents)
        besides = Learned(learned, wide)
        out = attention(*leaves, mask, **options, **besides.options())
        out.backward(self.grad.to(wide))
        self.of_learned = besides.gradients()
        self.expected = [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    def batch(self) -> Batch:
        tokens = torch.arange(self.s).expand(B, -1).contiguous()
        return Batch.of((tokens, tokens, self.documents), tokens + 1)

    def traveling(self, parts: int, index: int) -> tuple[int, int]:
        """By the rules of `meshtrain.data.sequence`: how often other ranks of `parts` see a chunk
        of this rank, and how many of theirs it sees. If documents return, all chunks count as
        seen."""
        padded = padded_length(self.s, dist.get_world_size())
        chunk = padded // (2 * parts)
        first = [0] * (2 * parts)
        if self.documents is not None and bool((self.documents.diff(dim=1) >= 0).all()):
            rows = [row + [-1] * (padded - self.s) for row in self.documents.tolist()]
            first = [min(row.index(row[y * chunk]) for row in rows) for y in range(2 * parts)]
        near = self.options.get("window", padded)
        first = [max(p, y * chunk - near + 1) for y, p in enumerate(first)]
        own = index, 2 * parts - 1 - index
        others = [i for i in range(parts) if i != index]
        foreign = [x for x in range(2 * parts) if x not in own]
        return (
            sum(sees_chunk(first, chunk, reader, x) for reader in others for x in own),
            sum(sees_chunk(first, chunk, index, x) for x in foreign),
        )


class Way:
    """How the ranks of a job exchange parts of a sequence: a method, and how many ranks share out
    heads."""

    def __init__(self, job: Job, method: str, heads: int) -> None:
        self.method, self.heads, self.device = method, heads, job.device
        self.mesh = build_mesh(Layout({"cp": job.world_size}).with_context_heads(heads))
        self.cp = ContextParallel(self.mesh, method=method, heads=heads)

    def shard(self, batch: Batch) -> ShardedContext:
        record = self.cp.shard(batch).tensors["documents"]
        assert isinstance(record, ShardedContext)
        return record.to(self.device)

    def sharded(self, case: Case) -> tuple[list[Tensor], Tensor, ShardedContext]:
        """This rank's q, k and v as leaves, the gradient of its output, and its context; padding is
        zero."""
        own = self.cp.positions(case.s)
        padding = padded_length(case.s, self.cp.size, self.cp.tp) - case.s
        tensors = [F.pad(x, (0, 0, 0, padding))[:, :, own] for x in (*case.qkv, case.grad)]
        *qkv, grad = (x.contiguous().to(self.device) for x in tensors)
        return [x.requires_grad_() for x in qkv], grad, self.shard(case.batch())

    def sent(self) -> int:
        """Bytes over `cp` since the last call, as they are counted."""
        count = self.mesh.comm_bytes.by_axis().get("cp", 0)
        self.mesh.comm_bytes.restart()
        return count


def check(way: Way, case: Case, *, as_on_gpus: bool = False) -> None:
    """Compares this rank's part of a case: values, bytes sent, and numbers kept. `as_on_gpus`: with
    collectives, which gloo has, too."""
    cp = way.cp
    by_messages = way.device.type == "cpu" and not as_on_gpus
    for group in cp.groups.values():
        group.on_cpu = by_messages
    leaves, grad, context = way.sharded(case)
    besides = Learned(case.learned, case.dtype)
    kept: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        if x is not context.documents and x is not context.spans:
            storage = x.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() // x.itemsize
        return x

    way.sent()
    with Sent() as there, torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        out = attention(*leaves, context, **case.options, **besides.options())
    counted = [way.sent()]
    with Sent() as back:
        out.backward(grad)
    counted.append(way.sent())

    shape = AttentionShape(cp.size, H, case.kv, E, case.f, B * leaves[0].shape[2])
    traveling = case.traveling(cp.size // way.heads, cp.index // way.heads)
    numbers = shape.messages(way.heads, cp.index, traveling)
    expected_bytes = [case.dtype.itemsize * n for n in numbers]
    assert counted == expected_bytes
    if by_messages:
        assert [there.bytes, back.bytes] == expected_bytes
    if case.documents is None and not case.options:
        assert shape.messages(way.heads, cp.index) == numbers  # one document has a closed form
    if way.heads == 1:
        assert out.untyped_storage().data_ptr() in kept, "the output is kept itself"
    if not case.learned:
        assert sum(kept.values()) == shape.memory(way.heads, way.method, cp.index)[0]

    own = cp.positions(case.s)
    real = own < case.s
    for name, actual, expected in zip(
        "yqkv", (out, *(x.grad for x in leaves)), case.expected, strict=True
    ):
        assert actual.dtype == case.dtype
        largest = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(
            actual.detach().cpu()[:, :, real],
            expected[:, :, own[real]],
            rtol=0,
            atol=TOLERANCE[case.dtype] * largest,
            check_dtype=False,
            msg=lambda text, name=name: f"{name}: {text}",
        )

    # Each rank has that of its own queries.
    for actual, expected in zip(besides.gradients(), case.of_learned, strict=True):
        dist.all_reduce(actual)
        torch.testing.assert_close(
            actual,
            expected,
            rtol=0,
            atol=TOLERANCE[case.dtype] * max(1.0, float(expected.abs().max())),
            check_dtype=False,
        )


class Mixer(nn.Module):
    """The attention of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, (H + 3 + 3) * E, bias=False)
        self.o = nn.Linear(H * E, 24, bias=False)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        heads = self.qkv(x).unflatten(2, (-1, E)).transpose(1, 2)
        q, k, v = heads.split([H, 3, 3], 1)
        return x + self.o(attention(q, k, v, context).transpose(1, 2).flatten(2))
