"""One block of attention, some queries against some keys, with its log-sum-exp, by which blocks can
be merged.

    CPU                   torch's flash attention, also in float64, with grouped heads and a mask
    CUDA, 16 bits         cuDNN, flash, memory-efficient attention; for documents variable-length
    flash attention CUDA, else, or masks  memory-efficient attention; a mask is in memory, once as
    bool and once as numbers CUDA, float64         products: all scores of the block are in memory,
    as in torch's own attention `soft_cap`, anywhere  products, because no fused kernel supports it

On CUDA the first kernel is used that torch allows and whose results on small blocks equal those of
products. Heads whose values and keys have different widths, and widths that a kernel does not
support, are zero-padded, which changes no score and no sum. The log-sum-exp of a query that sees no
key of the block is -inf, and its output is 0.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda

from meshtrain.errors import InputError
from meshtrain.parallel.torch_private import device_type_of

aten = torch.ops.aten
Three = tuple[Tensor, Tensor, Tensor]


class Segments(NamedTuple):
    """Runs of queries of one document among the b m packed ones, and the keys that each run sees:
    int64, on the CPU."""

    queries: Tensor  # their number
    keys: Tensor  # number of keys, may be 0
    first: Tensor  # index of the first key among the b n packed keys


def segments_of(queries: Tensor, keys: Tensor) -> Segments:
    """The segments of a block, from the documents of its queries (b, m) and keys (b, n), on the CPU
    and ascending."""
    both = torch.cat([queries, keys], 1)
    # no document continues in the next row
    apart = torch.arange(len(both))[:, None] * (both.max() - both.min() + 1)
    flat = (keys + apart).flatten()
    documents, lengths = (queries + apart).flatten().unique_consecutive(return_counts=True)
    first, end = (torch.searchsorted(flat, documents, right=right) for right in (False, True))
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
    window: int | None = None  # with `causal` and `segments`


class Kernel:
    """A kernel for q (b, h, m, e) and k, v (b, h or fewer, n, e)."""

    grouped = True  # whether several query heads may share one key/value head
    lower_right = False  # whether it supports `causal` with m < n
    segmented = False  # whether it supports segments
    # the width of a head must be a multiple of this; 0: any width, and values may have another one
    multiple = 8
    allowed: Callable[[cuda.SDPAParams], bool]  # whether torch allows it on this GPU

    forward: Callable[..., tuple[Tensor, Tensor]]  # block, q, k, v -> output, log-sum-exp
    # block, gradient of the output, q, k, v, output, log-sum-exp -> dq, dk, dv
    backward: Callable[..., Three]


def forward_block(
    q: Tensor, k: Tensor, v: Tensor, block: Block, kernel: Kernel | None = None
) -> tuple[Tensor, Tensor]:
    """The output (b, h, m, f), in the dtype of q or wider, and the log-sum-exp (b, h, m), in
    float32 or wider."""
    kernel = kernel or _kernel_of(q, v, block)
    out, lse = kernel.forward(block, *_inputs(kernel, q, k, v, block))
    out, blind = out[..., : v.shape[-1]], None
    # Kernels return different values for queries that see nothing; a log-sum-exp of 0 would count
    # in a merge.
    if block.mask is not None:
        blind = ~block.mask.any(-1)
    elif block.segments is not None and not block.segments.keys.all():
        rows = (block.segments.keys == 0).repeat_interleave(block.segments.queries)
        blind = _on_device(rows, q.device).view(len(q), 1, -1)
    return (
        (out, lse)
        if blind is None
        else (out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf))
    )


def backward_block(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    kernel: Kernel | None = None,
) -> Three:
    """The gradients of a block's q, k and v; `out` and `lse` are those over all blocks of these
    queries."""
    kernel = kernel or _kernel_of(q, v, block)
    inputs = *_inputs(kernel, q, k, v, block), _widened(kernel, out, q, v), lse
    dq, dk, dv = kernel.backward(block, _widened(kernel, grad, q, v), *inputs)
    if dk.shape[1] > k.shape[1]:
        counts = _queries_of(q, k, block)
        dk, dv = (
            torch.stack([x.sum(1) for x in d.to(lse.dtype).split(counts, 1)], 1) for d in (dk, dv)
        )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def merge_blocks(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp over the keys of two blocks of the same queries, in the dtype of
    the log-sum-exp.

    Each query must see a key of the first. (Flash decoding; Liu et al.,
    https://arxiv.org/abs/2310.01889, section 3.)
    """
    total = torch.logaddexp(lse, more_lse)
    return out * (lse - total).exp()[..., None] + more * (more_lse - total).exp()[..., None], total


def choose_kernel(q: Tensor, v: Tensor, soft_cap: float | None, visible: str) -> Kernel:
    """The kernel for blocks in which queries see "all" keys up to themselves, or by their
    "documents" or a "mask".

    Depends only on the GPU and torch, so that ranks with the same ones choose the same. Raises
    InputError: none works.
    """
    device_type = device_type_of(q)
    if soft_cap is not None or (device_type != "cpu" and q.dtype == torch.float64):
        return PRODUCTS
    if device_type == "cpu":
        return CPU_FLASH
    if q.is_meta:  # a trace, in which kernels cannot be tried
        return FLASH if q.dtype.itemsize == 2 and visible != "mask" else EFFICIENT
    kernels: tuple[Kernel, ...] = (EFFICIENT,)
    if q.dtype.itemsize == 2 and visible != "mask":
        kernels = (CUDNN, FLASH, EFFICIENT) if visible == "all" else (FLASH, EFFICIENT)
    return first_correct(kernels, q.device, q.dtype, q.shape[-1], v.shape[-1], visible == "all")


def _kernel_of(q: Tensor, v: Tensor, block: Block) -> Kernel:
    visible = "documents" if block.segments is not None else "all" if block.mask is None else "mask"
    return choose_kernel(q, v, block.soft_cap, visible)


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
        if not problem:
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


def _problem(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, e: int, f: int, all_visible: bool
) -> str:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 4, 39, f), (2, 4, 39, e), (2, 2, 72, e), (2, 2, 72, f)
    grad, q, *kv = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
    with torch.enable_grad():
        like = _widened(kernel, q, q, kv[1]).clone().requires_grad_()
        if not kernel.allowed(cuda.SDPAParams(like, like, like, None, 0.0, False, False)):
            return NOT_ALLOWED
    # distinguishes wrong results from rounding, also of TF32
    tolerance = max(4 * torch.finfo(dtype).eps, 2**-8)
    for block, written, n in _trials(kernel, e, device, all_visible):
        k, v = (x[:, :, :n] for x in kv)
        out, lse = forward_block(q, k, v, written, PRODUCTS)
        whole = out.to(dtype), lse.masked_fill(lse == -torch.inf, 0)
        right = out, lse, *backward_block(grad, q, k, v, *whole, written, PRODUCTS)
        results = (
            *forward_block(q, k, v, block, kernel),
            *backward_block(grad, q, k, v, *whole, block, kernel),
        )
        for x, y in zip(results, right, strict=True):
            size = max(1.0, float(y.masked_fill(y == -torch.inf, 0).abs().max()))
            if not torch.allclose(x.to(y.dtype), y, rtol=0, atol=tolerance * size):
                return "computes something else than attention"
    return ""


def _trials(
    kernel: Kernel, e: int, device: torch.device, all_visible: bool
) -> Iterator[tuple[Block, Block, int]]:
    """Blocks of 39 queries, in the kernel's form and in that of products, and their numbers of
    keys."""
    keys = torch.tensor([[0] * 9 + [1] * 30 + [2] * 33, [3] * 50 + [5] * 22])
    if all_visible:
        for causal in (False, True):
            block = Block(e**-0.5, causal=causal)
            yield block, block, 39 if causal and not kernel.lower_right else 71
        return
    last, others = keys[:, 33:], keys[:, :39] + 1
    for queries, causal, window in ((last, True, None), (last, True, 5), (others, False, None)):
        mask = queries[:, None, :, None] == keys[:, None, None]
        if causal:
            mask &= torch.ones(39, 72, dtype=torch.bool).tril(33).triu(34 - (window or 72))
        written = Block(e**-0.5, mask=mask.to(device))
        segmented = Block(
            e**-0.5, causal=causal, segments=segments_of(queries, keys), window=window
        )
        yield segmented if kernel.segmented else written, written, 72


def _widened(kernel: Kernel, x: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """x zero-padded to the width that the kernel needs for q and v."""
    width = (
        -(-max(q.shape[-1], v.shape[-1]) // kernel.multiple) * kernel.multiple
        if kernel.multiple
        else 0
    )
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _queries_of(q: Tensor, k: Tensor, block: Block) -> list[int]:
    """The number of query heads that share each key/value head."""
    heads = k.shape[1]
    return (
        [block.heads.count(i) for i in range(heads)]
        if block.heads
        else [q.shape[1] // heads] * heads
    )


def _inputs(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, block: Block) -> list[Tensor]:
    """Queries, keys and values as the kernel takes them, keys and values repeated per query head if
    it needs that."""
    if q.shape[1] != k.shape[1] and (block.heads or not kernel.grouped):
        looks = [head for head, n in enumerate(_queries_of(q, k, block)) for _ in range(n)]
        k, v = (torch.cat([x[:, head : head + 1] for head in looks], 1) for x in (k, v))
    return [_widened(kernel, x, q, v) for x in (q, k, v)]


def _bias(block: Block, q: Tensor) -> Tensor | None:
    """The mask (b, h, m, n) as an additive bias of scores, with a row stride of a multiple of 16
    elements."""
    if block.mask is None:
        return None
    *outer, n = block.mask.shape
    bias = q.new_zeros(*outer, -(-n // 16) * 16)[..., :n]
    return bias.masked_fill_(~block.mask, -torch.inf).expand(*q.shape[:2], -1, -1)


def _on_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies x to the device without waiting for it."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


class _CpuFlash(Kernel):
    multiple = 1

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kernel, bias = aten._scaled_dot_product_flash_attention_for_cpu, _bias(block, q)
        return kernel(q, k, v, 0.0, block.causal, attn_mask=bias, scale=block.scale)

    def backward(
        self, block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Three:
        kernel, bias = aten._scaled_dot_product_flash_attention_for_cpu_backward, _bias(block, q)
        return kernel(grad, q, k, v, out, lse, 0.0, block.causal, attn_mask=bias, scale=block.scale)


class _Efficient(Kernel):
    """Rabe and Staats, https://arxiv.org/abs/2112.05682, in xFormers' implementation.

    It assumes that the heads of `out` are adjacent in memory.
    """

    grouped = False
    allowed = staticmethod(cuda.can_use_efficient_attention)
    rows = 32  # its log-sum-exp has a multiple of this many rows: those after the queries are inf
    run = aten._scaled_dot_product_efficient_attention

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        inputs = q, k.contiguous(), v.contiguous(), _bias(block, q)
        out, lse, *_ = self.run(*inputs, True, 0.0, block.causal, scale=block.scale)
        return out, lse.flatten(2)[..., : q.shape[2]]

    def backward(
        self, block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Three:
        kernel, state = (
            aten._scaled_dot_product_efficient_attention_backward,
            q.new_empty((), dtype=torch.int64),
        )
        inputs = (
            q,
            k.contiguous(),
            v.contiguous(),
            _bias(block, q),
            out.transpose(1, 2).contiguous().transpose(1, 2),
        )
        lse = F.pad(lse, (0, -lse.shape[-1] % self.rows), value=torch.inf).contiguous()
        drop = state, state, 0.0, [True, True, True, False]
        return kernel(grad, *inputs, lse, *drop, block.causal, scale=block.scale)[:3]


class _Cudnn(_Efficient):
    grouped = True
    allowed = staticmethod(cuda.can_use_cudnn_attention)
    run = aten._scaled_dot_product_cudnn_attention

    def backward(
        self, block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Three:
        kernel, state = (
            aten._scaled_dot_product_cudnn_attention_backward,
            q.new_empty((), dtype=torch.int64),
        )
        # torch 2.11 caches plans by the strides of q, k and v, and reuses them for any strides of
        # `out` and `grad`.
        if not q.stride() == out.stride() == grad.stride():
            grad, q, out = (x.contiguous() for x in (grad, q, out))
        inputs = q, k.contiguous(), v.contiguous(), out, lse.contiguous()[..., None]
        ends = None, None, q.shape[2], k.shape[2]
        return kernel(
            grad, *inputs, state, state, None, *ends, 0.0, block.causal, scale=block.scale
        )


class _Flash(Kernel):
    """Dao, https://arxiv.org/abs/2307.08691. Without dropout it does not use the state of a
    generator.

    With segments, all sequences are packed; keys that no query sees are left out.
    It reads 16 bytes at a time, so keys sliced from wider rows may be misaligned, and it ignores
    the strides of `lse`.
    """

    lower_right = segmented = True
    allowed = staticmethod(cuda.can_use_flash_attention)

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        (x, *kv), index, settings, options = self._packed(block, q, k, v)
        out, lse = self.run(x, *(y[index].contiguous() for y in kv), *settings, **options)
        if block.segments is not None:
            lse = lse.view(len(lse), len(q), -1).transpose(0, 1)
        return self._unpacked(out, q), lse

    def backward(
        self, block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Three:
        (x, *kv, dy, y), index, settings, options = self._packed(block, q, k, v, grad, out)
        lse = (lse if block.segments is None else lse.transpose(0, 1).flatten(1)).contiguous()
        dq, *dkv = self.run_backward(
            dy, x, *(z[index].contiguous() for z in kv), y, lse, *settings, **options
        )
        if block.segments is not None:
            dkv = [
                torch.zeros_like(z).index_copy_(0, index, d) for z, d in zip(kv, dkv, strict=True)
            ]
        return self._unpacked(dq, q), self._unpacked(dkv[0], k), self._unpacked(dkv[1], v)

    def run(self, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return aten._flash_attention_forward(*inputs, False, **options)[:2]

    def run_backward(self, *inputs: Any, **options: Any) -> Three:
        state = torch.empty(2, dtype=torch.uint64, device=inputs[0].device)
        return aten._flash_attention_backward(*inputs, state, state, **options)

    @staticmethod
    def _packed(
        block: Block, q: Tensor, k: Tensor, *others: Tensor
    ) -> tuple[list[Tensor], Any, tuple, dict[str, Any]]:
        """The tensors as (b, m, h, e), or with segments (b m, h, e); the index of visible keys;
        operator arguments."""
        options: dict[str, Any] = {"scale": block.scale}
        xs = [x.transpose(1, 2) for x in (q, k, *others)]
        if block.segments is None:
            return xs, slice(None), (None, None, q.shape[2], k.shape[2], 0.0, block.causal), options
        if block.window is not None:
            options |= {"window_size_left": block.window - 1, "window_size_right": 0}
        queries, keys, first = block.segments
        ends = [F.pad(lengths.cumsum(0), (1, 0)) for lengths in (queries, keys)]
        index = torch.arange(int(ends[1][-1])) + (first - ends[1][:-1]).repeat_interleave(keys)
        cumulative = [_on_device(x.int(), q.device) for x in ends]
        # single queries take another path in the kernel
        longest = (
            max(2, int(queries.max())),
            int(keys.max()),
        )
        settings = *cumulative, *longest, 0.0, block.causal
        return [x.flatten(0, 1) for x in xs], _on_device(index, q.device), settings, options

    @staticmethod
    def _unpacked(x: Tensor, like: Tensor) -> Tensor:
        return x.view(len(like), like.shape[2], *x.shape[-2:]).transpose(1, 2)


class _Products(Kernel):
    """Attention by its definition: the reference for the other kernels."""

    grouped, lower_right, multiple = False, True, 0

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores, _ = self._scores(q, k, block)
        lse = scores.logsumexp(-1)
        p = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        return p @ v.to(p.dtype), lse

    def backward(
        self, block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Three:
        scores, slope = self._scores(q, k, block)
        p = (scores - lse[..., None]).exp()
        grad, q, k, v, out = (x.to(p.dtype) for x in (grad, q, k, v, out))
        ds = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * slope
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad

    @staticmethod
    def _scores(q: Tensor, k: Tensor, block: Block) -> tuple[Tensor, Tensor | float]:
        """The scores (b, h, m, n), in float32 or wider, and their derivative with respect to q @
        k^T."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * block.scale
        slope: Tensor | float = block.scale
        if block.soft_cap is not None:
            bent = torch.tanh(scores / block.soft_cap)
            scores, slope = block.soft_cap * bent, block.scale * (1 - bent * bent)
        mask = block.mask
        if block.causal:
            m, n = scores.shape[-2:]
            mask = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf), slope


CPU_FLASH, CUDNN, FLASH = _CpuFlash(), _Cudnn(), _Flash()
EFFICIENT, PRODUCTS = _Efficient(), _Products()
