"""One block of attention, some queries against some keys, with its log-sum-exp, by which blocks
merge (`attention.py` has the equations).

    CPU                  torch's flash attention, also in float64, with grouped heads and a mask
    CUDA, 16 bits        cuDNN, flash, memory-efficient attention; for documents variable-length
                         flash attention
    CUDA, else or masks  memory-efficient attention; a mask is in memory, once as bool and once as
                         numbers
    CUDA, float64        products: all scores of the block are in memory, as in torch's own
    `soft_cap`, `bias` or dropout, anywhere: products, because no fused kernel supports them

On CUDA the first kernel is used that torch allows and whose results on small blocks equal those of
products. Heads whose values and keys have different widths, and widths that a kernel does not
support, are zero-padded, which changes no score and no sum. The log-sum-exp of a query that sees no
key of the block is -inf, and its output is 0.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda

from meshtrain.errors import InputError
from meshtrain.parallel.torch_private import (
    AttentionGradients,
    FlashOptions,
    cpu_attention,
    cpu_attention_backward,
    cudnn_attention,
    cudnn_attention_backward,
    device_type_of,
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
)


class Segments(NamedTuple):
    """Runs of queries of one document among the b m packed ones, and the keys that each run sees:
    int64, on the CPU."""

    queries: Tensor  # their number
    keys: Tensor  # number of keys, may be 0
    first: Tensor  # index of the first key among the b n packed keys


def segments_of(queries: Tensor, keys: Tensor) -> Segments:
    """The segments of a block, from the documents of its queries (b, m) and keys (b, n), on the CPU
    and ascending."""
    # Numbers of documents ascend over all rows, so that none continues in the next row.
    both = torch.cat([queries, keys], dim=1)
    numbers_per_row = both.max() - both.min() + 1
    offset = torch.arange(len(both))[:, None] * numbers_per_row
    queries = (queries + offset).flatten()
    keys = (keys + offset).flatten()

    documents, lengths = queries.unique_consecutive(return_counts=True)
    first = torch.searchsorted(keys, documents)
    end = torch.searchsorted(keys, documents, right=True)
    return Segments(lengths, end - first, first)


@dataclass(frozen=True)
class Block:
    """How the queries (b, h, m, e) of a block see its keys (b, k, n, e) and values (b, k, n, f)."""

    scale: float  # factor of the scores
    soft_cap: float | None = None  # see `meshtrain.attention.attention`
    causal: bool = False  # the last query sees all keys, the one before it all but the last, ...
    mask: Tensor | None = None  # bool (b or 1, 1, m, n), True where seen; not with `causal`
    heads: Sequence[int] = ()  # the key/value head of each query head; (): shared evenly
    # instead of a mask; `causal` and `window` apply within each segment
    segments: Segments | None = None
    # the same for all of a row's queries and keys, where its documents are known on the device
    # alone: `meshtrain.attention.cumulative_lengths`
    ends: Tensor | None = None
    window: int | None = None  # with `causal` and `segments` or `ends`
    bias: Tensor | None = None  # (b or 1, h, m, n), added to the scores
    # dropout of probabilities: bool (b, h, m, n), True where one stays; and the others' probability
    keep: Tensor | None = None
    dropped: float = 0.0

    @property
    def by_products(self) -> bool:
        """Whether no fused kernel takes it."""
        return not (self.soft_cap is None and self.bias is None and self.keep is None)


class Kernel:
    """A kernel for q (b, h, m, e) and k, v (b, h or fewer, n, e)."""

    grouped = True  # whether several query heads may share one key/value head
    lower_right = False  # whether it supports `causal` with m < n
    segmented = False  # whether it supports segments
    # the width of a head must be a multiple of this; 0: any width, and values may have another one
    multiple = 8
    allowed: Callable[[cuda.SDPAParams], bool]  # whether torch allows it on this GPU

    # block, q, k, v -> output (b, h, m, f), log-sum-exp (b, h, m)
    forward: Callable[..., tuple[Tensor, Tensor]]
    # block, gradient of the output, q, k, v, output, log-sum-exp -> dq, dk, dv, and that of a bias
    backward: Callable[..., tuple[Tensor, ...]]


def forward_block(
    q: Tensor, k: Tensor, v: Tensor, block: Block, kernel: Kernel | None = None
) -> tuple[Tensor, Tensor]:
    """The output (b, h, m, f), in the dtype of q or wider, and the log-sum-exp (b, h, m), in
    float32 or wider."""
    if kernel is None:
        kernel = _kernel_of(q, v, block)
    out, lse = kernel.forward(block, *_inputs(kernel, q, k, v, block))
    out = out[..., : v.shape[-1]]

    # Kernels return different values for queries that see nothing; a log-sum-exp of 0 would count
    # in a merge.
    blind = _blind_queries(block, q)
    if blind is None:
        return out, lse
    return out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)


def _blind_queries(block: Block, q: Tensor) -> Tensor | None:
    """Which queries see no key of the block, (b or 1, 1, m) bool; None: each sees one."""
    if block.mask is not None:
        return ~block.mask.any(-1)
    segments = block.segments
    if segments is None or segments.keys.all():
        return None
    blind = (segments.keys == 0).repeat_interleave(segments.queries)
    return _on_device(blind, q.device).view(len(q), 1, -1)


def backward_block(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    kernel: Kernel | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of a block's q, k and v, and of its bias if it has one; `out` and `lse` are
    those over all blocks of these queries, sinks included."""
    if kernel is None:
        kernel = _kernel_of(q, v, block)
    width = _width(kernel, q, v)
    dq, dk, dv, *of_bias = kernel.backward(
        block,
        _padded(grad, width),
        *_inputs(kernel, q, k, v, block),
        _padded(out, width),
        lse,
    )
    if dk.shape[1] > k.shape[1]:  # of the key/value heads as they were repeated per query head
        dk = _sum_repeated(dk.to(lse.dtype), q, k, block)
        dv = _sum_repeated(dv.to(lse.dtype), q, k, block)
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], *of_bias


def merge_blocks(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp over the keys of two blocks of the same queries, in the dtype of
    the log-sum-exp. Each query must see a key of the first.

        l = log(exp l_1 + exp l_2),  o = exp(l_1 - l) o_1 + exp(l_2 - l) o_2

    (Flash decoding; Liu et al., https://arxiv.org/abs/2310.01889, section 3.)
    """
    total = torch.logaddexp(lse, more_lse)
    share = (lse - total).exp()[..., None]
    more_share = (more_lse - total).exp()[..., None]
    return out * share + more * more_share, total


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The output (b, h, m, f) and the log-sum-exp (b, h, m) over all keys and a sink for each head:
    a logit with the value 0, so it is a merge with a block whose output is 0.

        l' = log(exp l + exp sink),  o' = exp(l - l') o
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * (lse - total).exp()[..., None], total


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient (h,) of the sinks; `out` and `lse` are those with them. A sink is one more key,
    of the probability exp(sink - l), whose value 0 gives dp = 0: dx = p (dp - D), D = rowsum(dO O).
    """
    wide = lse.dtype
    p = (sinks.to(wide)[:, None] - lse).exp()
    row_sums = (grad.to(wide) * out.to(wide)).sum(-1)
    return -(p * row_sums).sum((0, 2)).to(sinks.dtype)


# Which kernel ------------------------------------------------------------------------------------


def choose_kernel(q: Tensor, v: Tensor, by_products: bool, visible: str) -> Kernel:
    """The kernel for blocks in which queries see "all" keys up to themselves, or by their
    "documents" or a "mask". `by_products`: of which no fused kernel is capable.

    Depends only on the GPU and torch, so that ranks with the same ones choose the same. Raises
    InputError: none works.
    """
    on_cpu = device_type_of(q) == "cpu"
    if by_products or (q.dtype == torch.float64 and not on_cpu):
        return PRODUCTS
    if on_cpu:
        return CPU_FLASH
    if q.is_meta:  # a trace, in which kernels cannot be tried
        return FLASH if q.dtype.itemsize == 2 and visible != "mask" else EFFICIENT
    kernels: tuple[Kernel, ...] = (EFFICIENT,)
    if q.dtype.itemsize == 2 and visible == "all":
        kernels = (CUDNN, FLASH, EFFICIENT)
    elif q.dtype.itemsize == 2 and visible == "documents":
        kernels = (FLASH, EFFICIENT)
    return first_correct(kernels, q.device, q.dtype, q.shape[-1], v.shape[-1], visible == "all")


def _kernel_of(q: Tensor, v: Tensor, block: Block) -> Kernel:
    if block.segments is not None or block.ends is not None:
        visible = "documents"
    elif block.mask is not None:
        visible = "mask"
    else:
        visible = "all"
    return choose_kernel(q, v, block.by_products, visible)


@cache
def first_correct(
    kernels: Sequence[Kernel],
    device: torch.device,
    dtype: torch.dtype,
    e: int,
    f: int,
    all_visible: bool,
) -> Kernel:
    """The first kernel whose results on small blocks equal those of products; a process tries each
    only once."""
    problems = []
    for kernel in kernels:
        try:
            problem = _problem(kernel, device, dtype, e, f, all_visible)
        except RuntimeError as error:
            problem = f"fails: {error}"
        if problem is None:
            return kernel
        problems.append(f"{type(kernel).__name__.lstrip('_')} {problem}")
        if problem != NOT_ALLOWED:
            warnings.warn(
                f"attention over cp on {device}, {dtype}: {problems[-1]}, so another is taken",
                stacklevel=2,
            )
    raise InputError(
        f"no attention over cp for widths {e} and {f} in {dtype} on {device}: {'; '.join(problems)}"
    )


NOT_ALLOWED = "is not allowed by torch"

# Sizes of a trial: no multiples of any tile of a kernel, and more than one tile.
QUERIES = 39
KEYS = 72


def _problem(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, e: int, f: int, all_visible: bool
) -> str | None:
    """Why a kernel cannot be used; None if its results for small blocks are those of products."""
    draw = torch.Generator().manual_seed(0)

    def drawn(heads: int, length: int, width: int) -> Tensor:
        return torch.randn(2, heads, length, width, generator=draw).to(device, dtype)

    grad = drawn(4, QUERIES, f)
    q = drawn(4, QUERIES, e)
    keys = drawn(2, KEYS, e)
    values = drawn(2, KEYS, f)
    with torch.enable_grad():
        like = _padded(q, _width(kernel, q, values)).clone().requires_grad_()
        if not kernel.allowed(cuda.SDPAParams(like, like, like, None, 0.0, False, False)):
            return NOT_ALLOWED

    if all_visible:
        trials = _trials_of_all(kernel, e)
    else:
        trials = _trials_of_documents(kernel, e, device)
    for trial in trials:
        k = keys[:, :, : trial.keys]
        v = values[:, :, : trial.keys]
        if not _is_attention(kernel, trial, grad, q, k, v):
            return "computes something else than attention"
    return None


def _is_attention(
    kernel: Kernel, trial: "Trial", grad: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> bool:
    """Whether output, log-sum-exp and gradients of a block are those of products but for
    rounding."""
    forward = forward_block(q, k, v, trial.written, PRODUCTS)
    # Both get the same in backward. It is only asked for rows that see something in the end.
    out, lse = forward
    saved = out.to(q.dtype), lse.masked_fill(lse == -torch.inf, 0)
    backward = backward_block(grad, q, k, v, *saved, trial.written, PRODUCTS)

    own_forward = forward_block(q, k, v, trial.block, kernel)
    own_backward = backward_block(grad, q, k, v, *saved, trial.block, kernel)

    # Tells wrong results from rounding, also from that of TF32.
    tolerance = max(4 * torch.finfo(q.dtype).eps, 2**-8)
    own = (*own_forward, *own_backward)
    for result, expected in zip(own, (*forward, *backward), strict=True):
        finite = expected.masked_fill(expected == -torch.inf, 0)
        size = max(1.0, float(finite.abs().max()))
        result = result.to(expected.dtype)
        if not torch.allclose(result, expected, rtol=0, atol=tolerance * size):
            return False
    return True


class Trial(NamedTuple):
    block: Block  # as the kernel takes it
    written: Block  # the same for products
    keys: int  # their number


def _trials_of_all(kernel: Kernel, e: int) -> list[Trial]:
    everything = Block(e**-0.5)
    causal = Block(e**-0.5, causal=True)
    causal_keys = KEYS - 1 if kernel.lower_right else QUERIES
    return [
        Trial(everything, everything, keys=KEYS - 1),
        Trial(causal, causal, keys=causal_keys),
    ]


def _trials_of_documents(kernel: Kernel, e: int, device: torch.device) -> list[Trial]:
    """Documents that begin in, at and between rows; queries of them, causal with and without a
    window, and of others, some of which see nothing."""
    # The document of each key, in two rows.
    keys = torch.tensor([[0] * 9 + [1] * 30 + [2] * 33, [3] * 50 + [5] * 22])
    # Queries at the last positions, which see what is not behind them; and at others.
    before = KEYS - QUERIES
    causal_mask = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(before)
    last = keys[:, before:]
    others = keys[:, :QUERIES] + 1

    trials = []
    for queries, causal, window in ((last, True, None), (last, True, 5), (others, False, None)):
        mask = queries[:, None, :, None] == keys[:, None, None]
        if causal:
            mask &= causal_mask
        if window is not None:
            mask &= causal_mask.triu(before + 1 - window)
        masked = Block(e**-0.5, mask=mask.to(device))
        block = masked
        if kernel.segmented:
            segments = segments_of(queries, keys)
            block = Block(e**-0.5, causal=causal, segments=segments, window=window)
        trials.append(Trial(block, written=masked, keys=KEYS))
    return trials


# Inputs as a kernel takes them -------------------------------------------------------------------


def _inputs(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, block: Block) -> list[Tensor]:
    """q, k and v, zero-padded, and keys and values repeated per query head if the kernel needs
    that."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and (block.heads or not kernel.grouped):
        k = _repeated(k, q, block)
        v = _repeated(v, q, block)
    width = _width(kernel, q, v)
    return [_padded(q, width), _padded(k, width), _padded(v, width)]


def _width(kernel: Kernel, q: Tensor, v: Tensor) -> int:
    """The least width of heads that the kernel takes for q (..., e) and v (..., f); 0: these."""
    if kernel.multiple == 0:
        return 0
    widest = max(q.shape[-1], v.shape[-1])
    return -(-widest // kernel.multiple) * kernel.multiple


def _padded(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing > 0 else x


def _queries_per_head(q: Tensor, k: Tensor, block: Block) -> list[int]:
    """The number of query heads that share each key/value head."""
    heads = k.shape[1]
    if block.heads:
        return [block.heads.count(head) for head in range(heads)]
    return [q.shape[1] // heads] * heads


def _repeated(x: Tensor, q: Tensor, block: Block) -> Tensor:
    """(b, k, n, e) -> (b, h, n, e): for each query head the key/value head that it uses."""
    heads: list[Tensor] = []
    for head, queries in enumerate(_queries_per_head(q, x, block)):
        heads += [x[:, head : head + 1]] * queries
    return torch.cat(heads, dim=1)


def _sum_repeated(gradient: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
    """(b, h, n, e) -> (b, k, n, e): the gradient of what `_repeated` has repeated."""
    of_heads = gradient.split(_queries_per_head(q, k, block), dim=1)
    return torch.stack([x.sum(1) for x in of_heads], dim=1)


def _bias(block: Block, q: Tensor) -> Tensor | None:
    """The mask (b, h, m, n) as an additive bias of scores, with a row stride of a multiple of 16
    elements."""
    if block.mask is None:
        return None
    *outer, n = block.mask.shape
    aligned = -(-n // 16) * 16
    bias = q.new_zeros(*outer, aligned)[..., :n]
    return bias.masked_fill_(~block.mask, -torch.inf).expand(*q.shape[:2], -1, -1)


def _on_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies x to the device without waiting for it."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


# Kernels -----------------------------------------------------------------------------------------


class _CpuFlash(Kernel):
    multiple = 1

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return cpu_attention(q, k, v, _bias(block, q), causal=block.causal, scale=block.scale)

    def backward(
        self, block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> AttentionGradients:
        bias = _bias(block, q)
        return cpu_attention_backward(
            grad, q, k, v, out, lse, bias, causal=block.causal, scale=block.scale
        )


class _Efficient(Kernel):
    """Rabe and Staats, https://arxiv.org/abs/2112.05682, in xFormers' implementation."""

    grouped = False
    allowed = staticmethod(cuda.can_use_efficient_attention)
    rows = 32  # its log-sum-exp has a multiple of this many rows: those after the queries are inf

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = k.contiguous(), v.contiguous()
        out, lse = efficient_attention(
            q, k, v, _bias(block, q), causal=block.causal, scale=block.scale
        )
        return out, lse[..., : q.shape[2]]

    def backward(
        self, block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> AttentionGradients:
        # It assumes that the heads of `out` are adjacent in memory, and all rows of `lse`.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        more_rows = -lse.shape[-1] % self.rows
        lse = F.pad(lse, (0, more_rows), value=torch.inf).contiguous()
        return efficient_attention_backward(
            grad,
            q,
            k.contiguous(),
            v.contiguous(),
            out,
            lse,
            _bias(block, q),
            causal=block.causal,
            scale=block.scale,
        )


class _Cudnn(Kernel):
    allowed = staticmethod(cuda.can_use_cudnn_attention)

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = k.contiguous(), v.contiguous()
        out, lse = cudnn_attention(q, k, v, causal=block.causal, scale=block.scale)
        return out, lse.flatten(2)

    def backward(
        self, block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> AttentionGradients:
        # torch 2.11 caches plans by the strides of q, k and v, and reuses them for any strides of
        # `out` and `grad`.
        if not q.stride() == out.stride() == grad.stride():
            grad, q, out = grad.contiguous(), q.contiguous(), out.contiguous()
        return cudnn_attention_backward(
            grad,
            q,
            k.contiguous(),
            v.contiguous(),
            out,
            lse.contiguous()[..., None],
            causal=block.causal,
            scale=block.scale,
        )


class _Flash(Kernel):
    """Dao, https://arxiv.org/abs/2307.08691. It takes (b, m, h, e), or with segments all sequences
    packed as (b m, h, e), of which keys that no query sees are left out.

    It reads 16 bytes at a time, so keys sliced from wider rows may be misaligned, and it ignores
    the strides of `lse`: both are copied where they are not contiguous.
    """

    lower_right = segmented = True
    allowed = staticmethod(cuda.can_use_flash_attention)
    # In attributes, so that a test on a CPU can put products in their place.
    run = staticmethod(flash_attention)
    run_backward = staticmethod(flash_attention_backward)

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        packing = _Packing.of(block, q, k)
        out, lse = self.run(
            packing.packed(q),
            packing.visible(packing.packed(k)),
            packing.visible(packing.packed(v)),
            packing.options,
        )
        if packing.is_flat:  # (h, b m) -> (b, h, m)
            lse = lse.view(len(lse), len(q), -1).transpose(0, 1)
        return packing.unpacked(out, like=q), lse

    def backward(
        self, block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> AttentionGradients:
        packing = _Packing.of(block, q, k)
        if packing.is_flat:
            lse = lse.transpose(0, 1).flatten(1)
        dq, dk, dv = self.run_backward(
            packing.packed(grad),
            packing.packed(q),
            packing.visible(packing.packed(k)),
            packing.visible(packing.packed(v)),
            packing.packed(out),
            lse.contiguous(),
            packing.options,
        )
        return (
            packing.unpacked(dq, like=q),
            packing.unpacked(packing.with_invisible(dk, like=k), like=k),
            packing.unpacked(packing.with_invisible(dv, like=v), like=v),
        )


@dataclass(frozen=True)
class _Packing:
    """The arrangement of a block's tensors for flash attention."""

    options: FlashOptions
    # whether the sequences of a batch are laid end to end
    is_flat: bool = False
    # with segments, on the device: of the b n packed keys those that queries see, one segment after
    # the other; None: all
    index: Tensor | None = None

    @classmethod
    def of(cls, block: Block, q: Tensor, k: Tensor) -> "_Packing":
        window_left = None if block.window is None else block.window - 1
        window_right = None if block.window is None else 0
        if block.ends is not None:
            options = FlashOptions(
                causal=block.causal,
                scale=block.scale,
                # A constant, as no document is longer: which one is the longest, the device knows.
                longest_queries=max(2, q.shape[2]),
                longest_keys=k.shape[2],
                query_ends=block.ends,
                key_ends=block.ends,
                window_left=window_left,
                window_right=window_right,
            )
            return cls(options, is_flat=True)
        if block.segments is None:
            options = FlashOptions(
                causal=block.causal,
                scale=block.scale,
                longest_queries=q.shape[2],
                longest_keys=k.shape[2],
            )
            return cls(options)

        queries, keys, first = block.segments
        query_ends = F.pad(queries.cumsum(0), (1, 0))
        key_ends = F.pad(keys.cumsum(0), (1, 0))
        # Key i of all the visible ones, which is of segment j, is key first_j + (i - begin_j).
        begins = key_ends[:-1]
        index = torch.arange(int(key_ends[-1])) + (first - begins).repeat_interleave(keys)
        options = FlashOptions(
            causal=block.causal,
            scale=block.scale,
            longest_queries=max(2, int(queries.max())),  # 1 takes another path in the kernel
            longest_keys=int(keys.max()),
            query_ends=_on_device(query_ends.int(), q.device),
            key_ends=_on_device(key_ends.int(), q.device),
            window_left=window_left,
            window_right=window_right,
        )
        return cls(options, is_flat=True, index=_on_device(index, q.device))

    def packed(self, x: Tensor) -> Tensor:
        """(b, h, m, e) -> (b, m, h, e), or with segments (b m, h, e)."""
        x = x.transpose(1, 2)
        return x.flatten(0, 1) if self.is_flat else x

    def unpacked(self, x: Tensor, like: Tensor) -> Tensor:
        return x.view(len(like), like.shape[2], *x.shape[-2:]).transpose(1, 2)

    def visible(self, packed: Tensor) -> Tensor:
        """The keys or values that queries see, contiguous."""
        return (packed if self.index is None else packed[self.index]).contiguous()

    def with_invisible(self, gradient: Tensor, like: Tensor) -> Tensor:
        """The gradient of all packed keys from that of the visible ones: zeros for the others."""
        if self.index is None:
            return gradient
        tokens = like.shape[0] * like.shape[2]
        zeros = gradient.new_zeros(tokens, *gradient.shape[1:])
        return zeros.index_copy_(0, self.index, gradient)


class _Products(Kernel):
    """Attention by its definition: the reference for the other kernels."""

    grouped = False
    lower_right = True
    multiple = 0

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores, _ = self._scores(q, k, block)
        lse = scores.logsumexp(-1)
        finite = lse.masked_fill(lse == -torch.inf, 0)  # of queries that see nothing: p = 0
        p = (scores - finite[..., None]).exp()
        return self._drop(p, block) @ v.to(p.dtype), lse

    def backward(
        self, block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        """
        p = exp(x - l),  dx = p (dO V^T - D),  D = rowsum(dO O)
        dV = p^T dO,     dQ = dx K,            dK = dx^T Q       (times the scores' derivative)

        Dropout multiplies p where it meets V, and dO V^T where it meets p. A bias gets dx, summed
        over the samples that share it.
        """
        scores, slope = self._scores(q, k, block)
        p = (scores - lse[..., None]).exp()
        grad, q, k, v, out = (x.to(p.dtype) for x in (grad, q, k, v, out))
        row_sums = (grad * out).sum(-1, keepdim=True)
        dx = p * (self._drop(grad @ v.transpose(-1, -2), block) - row_sums)
        ds = dx * slope
        dv = self._drop(p, block).transpose(-1, -2) @ grad
        gradients = ds @ k, ds.transpose(-1, -2) @ q, dv
        if block.bias is None:
            return gradients
        return *gradients, dx.sum_to_size(len(block.bias), *dx.shape[1:])

    @staticmethod
    def _drop(p: Tensor, block: Block) -> Tensor:
        if block.keep is None:
            return p
        return torch.where(block.keep, p * (1 / (1 - block.dropped)), 0)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, block: Block) -> tuple[Tensor, Tensor | float]:
        """The scores (b, h, m, n), in float32 or wider, and their derivative with respect to q @
        k^T."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * block.scale
        slope: Any = block.scale
        if block.soft_cap is not None:  # c tanh(x / c), whose derivative is 1 - tanh(x / c)^2
            bent = torch.tanh(scores / block.soft_cap)
            scores = block.soft_cap * bent
            slope = block.scale * (1 - bent * bent)
        if block.bias is not None:
            scores = scores + block.bias
        mask = block.mask
        if block.causal:
            m, n = scores.shape[-2:]
            mask = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores, slope


CPU_FLASH = _CpuFlash()
CUDNN = _Cudnn()
FLASH = _Flash()
EFFICIENT = _Efficient()
PRODUCTS = _Products()
