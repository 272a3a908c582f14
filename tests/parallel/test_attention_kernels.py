"""Blocks of attention with their log-sum-exp: each kernel against attention as it is written, and their merging."""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from meshtrain.errors import InputError
from meshtrain.parallel.context import kernels
from meshtrain.parallel.context.kernels import (
    Block,
    Kernel,
    backward_block,
    choose_kernel,
    first_correct,
    forward_block,
    merge_blocks,
    segments_of,
)
from tests.parallel.context_cases import SegmentBySegment
from tests.properties import given, st

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
SAME = ROUNDING | {torch.float64: 1e-13}
BLOCKS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "masked": {"mask": True},
    "uneven heads": {"causal": True, "heads": (0, 0, 0, 0, 1, 1)},
    "uneven heads, masked": {"mask": True, "heads": (0, 1, 1, 1, 1, 1)},
    "soft cap": {"causal": True, "soft_cap": 1.5},
}


def drawn(m: int, n: int, e: int, f: int, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor]:
    draw = torch.Generator().manual_seed(m + n)
    shapes = (2, 6, m, f), (2, 6, m, e), (2, 2, n, e), (2, 2, n, f)
    tensors = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    mask = torch.rand(2, 1, m, n, generator=draw).to(device) < 0.4
    mask[:, :, ::3] = False  # rows that see nothing
    return tensors, mask


def by_autograd(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients by torch's elementary operations in float64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    looks = list(block.heads) or [head // 3 for head in range(6)]
    scores = q @ k[:, looks].transpose(-1, -2) * block.scale
    if block.soft_cap is not None:
        scores = block.soft_cap * torch.tanh(scores / block.soft_cap)
    m, n = scores.shape[-2:]
    seen = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m if block.causal else n)
    seen = seen if block.mask is None else block.mask
    blind = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf)
    out = (scores.masked_fill(blind, 0).softmax(-1) * ~blind) @ v[:, looks]
    return out.detach(), scores.detach().logsumexp(-1), *torch.autograd.grad(out, (q, k, v), grad.double())


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_kernel_computes_attention_as_it_is_written(name: str, dtype: torch.dtype, device: str) -> None:
    for m, n, (e, f) in itertools.product((7, 32), (32, 41), ((8, 8), (12, 5), (4, 16), (16, 4))):
        (grad, q, k, v), mask = drawn(m, n, e, f, dtype, device)
        if BLOCKS[name].get("causal") and not choose_kernel(q, v, BLOCKS[name].get("soft_cap"), "all").lower_right:
            k, v = k[:, :, :m], v[:, :, :m]
        options = BLOCKS[name] | ({"mask": mask} if "mask" in BLOCKS[name] else {})
        block = Block(0.3, **options)
        expected = by_autograd(grad, q, k, v, block)
        out, lse = forward_block(q, k, v, block)
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        whole = lse.masked_fill(lse == -torch.inf, 0)  # backward is only asked for rows that see something in the end
        # As rows of a longer sequence, and keys beside values, which is how they lie where they are used.
        longer = [torch.cat([x, x], 2)[:, :, :m] for x in (grad, q, out.to(dtype), whole)]
        beside = torch.cat([k, v], -1).split([e, f], -1)
        found = out, lse, *backward_block(longer[0], longer[1], *beside, longer[2], longer[3], block)
        for what, actual, right in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
            where = f"{what}, {kernels._kernel_of(q, v, block)}, {m} x {n}, widths {e} and {f}"
            scale = max(1.0, float(right[right.isfinite()].abs().max()))
            assert actual.shape == right.shape, where
            torch.testing.assert_close(
                actual.double(), right, rtol=0, atol=ROUNDING[dtype] * scale, msg=lambda text, where=where: where + text
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "soft cap"])
def test_fused_kernels_and_products_agree(name: str, dtype: torch.dtype) -> None:
    """The kernel that CUDA takes in float64, on the CPU."""
    (grad, q, k, v), mask = drawn(21, 21, 8, 5, dtype, "cpu")
    block = Block(0.3, **(BLOCKS[name] | ({"mask": mask} if "mask" in BLOCKS[name] else {})))
    assert_same(SAME[dtype], block, block, (grad, q, k, v), kernels.CPU_FLASH, kernels.PRODUCTS)


def assert_same(
    rounding: float, block: Block, written: Block, tensors: Sequence[Tensor], kernel: Kernel | None, reference: Kernel
) -> None:
    grad, *qkv = tensors
    out, lse = forward_block(*qkv, written, reference)
    whole = out.to(grad.dtype), lse.masked_fill(lse == -torch.inf, 0)
    expected = out, lse, *backward_block(grad, *qkv, *whole, written, reference)
    results = *forward_block(*qkv, block, kernel), *backward_block(grad, *qkv, *whole, block, kernel)
    for actual, right in zip(results, expected, strict=True):
        atol = rounding * max(1.0, float(right.masked_fill(right == -torch.inf, 0).abs().max()))
        torch.testing.assert_close(actual.to(right.dtype), right, rtol=0, atol=atol)


@st.composite
def documents(draw: st.DrawFn) -> Tensor:
    """(b, n), ascending."""
    n = draw(st.integers(2, 40))
    rows = [sorted(draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))) for _ in range(draw(st.integers(1, 3)))]
    return torch.tensor(rows)


@given(documents(), st.data())
def test_segments_are_the_mask_of_documents(keys: Tensor, data: st.DataObject) -> None:
    """Of the last queries of the keys, and of any others, some of which see nothing."""
    b, n = keys.shape
    m = data.draw(st.integers(1, n))
    for queries, causal in ((keys[:, n - m :], True), (data.draw(documents())[:1].expand(b, -1), False)):
        segments = segments_of(queries, keys)
        assert int(segments.queries.sum()) == queries.numel()
        assert bool((segments.queries > 0).all())
        mask = torch.zeros(queries.numel(), b * n, dtype=torch.bool)
        row = 0
        for length, count, first in zip(*(x.tolist() for x in segments), strict=True):
            visible = torch.ones(length, count, dtype=torch.bool)
            mask[row : row + length, first : first + count] = visible.tril(count - length) if causal else visible
            row += length
        same = queries[:, :, None] == keys[:, None]
        expected = torch.block_diag(*(same.tril(n - m) if causal else same)).bool()
        assert torch.equal(mask, expected)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", list(SAME), ids=str)
@pytest.mark.parametrize("heads", [(), (0, 0, 0, 0, 1, 1)], ids=str)
def test_segments_give_what_their_mask_does(heads: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """By the arrangement of flash attention for GPUs, with one product after the other in its place on the CPU."""
    keys = torch.tensor([[0] * 9 + [1] * 3 + [2] * 29, [1] * 20 + [4] * 21])
    tensors, _ = drawn(17, 41, 12, 5, dtype, device)
    for queries, causal, window in (
        (keys[:, 24:], True, None),
        (keys[:, 24:], True, 4),
        (keys[:, :17] + 1, False, None),
    ):
        segments = segments_of(queries, keys)
        mask = queries[:, None, :, None] == keys[:, None, None]
        if causal:
            mask &= torch.ones(17, 41, dtype=torch.bool).tril(24).triu(25 - (window or 99))
        block = Block(0.3, causal=causal, heads=heads, segments=segments, window=window)
        kernel: Kernel = SegmentBySegment()
        if device == "cuda" and dtype.itemsize == 2:
            kernel = choose_kernel(tensors[1], tensors[3], None, "documents")
            assert kernel.segmented
        written = Block(0.3, mask=mask.to(device), heads=heads)
        assert_same(SAME[dtype], block, written, tensors, kernel, kernels.PRODUCTS)


def test_blocks_of_keys_merge_to_the_whole_of_them() -> None:
    (grad, q, k, v), mask = drawn(12, 30, 8, 8, torch.float64, "cpu")
    mask[..., :4] = True  # of the first block each query sees a key
    expected = forward_block(q, k, v, Block(0.3, mask=mask))
    keys, values, masks = (x.split([10, 11, 9], dim) for x, dim in ((k, 2), (v, 2), (mask, 3)))
    blocks = [Block(0.3, mask=part) for part in masks]
    (out, lse), *more = [forward_block(q, *kv, block) for *kv, block in zip(keys, values, blocks, strict=True)]
    for other in more:
        out, lse = merge_blocks(out, lse, *other)
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=1e-13)
    dq, *whole = backward_block(grad, q, k, v, out, lse, Block(0.3, mask=mask))
    parts = [backward_block(grad, q, *kv, out, lse, block) for *kv, block in zip(keys, values, blocks, strict=True)]
    torch.testing.assert_close(sum(part[0] for part in parts), dq, rtol=0, atol=1e-13)
    for n in (1, 2):
        torch.testing.assert_close(torch.cat([part[n] for part in parts], 2), whole[n - 1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("kernel", [kernels.CUDNN, kernels.FLASH, kernels.EFFICIENT, kernels.PRODUCTS])
def test_what_cuda_is_asked_for_is_what_its_operators_take(kernel: Kernel, dtype: torch.dtype) -> None:
    """On the meta device, where torch checks the arguments of an operator and says what shapes it returns."""
    (grad, q, k, v), mask = drawn(24, 24, 12, 7, dtype, "meta")
    keys = torch.arange(24).div(5, rounding_mode="floor").expand(2, -1)
    by_mask = kernel in (kernels.EFFICIENT, kernels.PRODUCTS)
    blocks = [Block(0.3), Block(0.3, causal=True), Block(0.3, heads=(0, 0, 0, 0, 1, 1))]
    blocks += [Block(0.3, mask=mask)] if by_mask else []
    if kernel.segmented:
        blocks += [Block(0.3, causal=True, segments=segments_of(keys, keys), window=n) for n in (None, 3)]
    for block in blocks:
        out, lse = forward_block(q, k, v, block, kernel)
        grads = backward_block(grad, q, k, v, out.to(dtype), lse, block, kernel)
        assert (out.shape, lse.shape) == (grad.shape, q.shape[:3])
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


class Fake(kernels._Products):
    """Attention as it is written, or something else."""

    grouped, lower_right = True, False
    multiple = 8

    def __init__(self, off: dict[int, float] | None = None, error: str = "", possible: bool = True) -> None:
        self.off, self.error, self.tried = off or {}, error, 0
        self.allowed = lambda _: possible

    def changed(self, results: tuple[Tensor, ...], first: int) -> Any:
        self.tried += 1
        if self.error:
            raise RuntimeError(self.error)
        return tuple(x + self.off.get(first + n, 0.0) for n, x in enumerate(results))

    def forward(self, block: Block, *inputs: Tensor) -> Any:
        q, k, v = inputs
        return self.changed(kernels.PRODUCTS.forward(block, *self.repeated(q, k, v)), 0)

    def backward(self, block: Block, *inputs: Tensor) -> Any:
        grad, q, k, v, out, lse = inputs
        dq, *dkv = kernels.PRODUCTS.backward(block, grad, *self.repeated(q, k, v), out, lse)
        return self.changed((dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in dkv)), 2)

    def repeated(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return q, *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))


@pytest.mark.parametrize("all_visible", [True, False])
@pytest.mark.parametrize("result", range(5))
def test_a_kernel_that_is_off_is_passed_over(result: int, all_visible: bool) -> None:
    """Whichever of output, log-sum-exp and gradients it is; and it is said, and tried, once."""
    off, right, behind = Fake({result: 0.2}), Fake(), Fake()
    setting = (off, right, behind), torch.device("cpu"), torch.bfloat16, 12, 7, all_visible
    with pytest.warns(UserWarning, match="Fake computes something else than attention, so another is taken") as said:
        assert first_correct(*setting) is right
    assert len(said) == 1
    tried = off.tried, right.tried
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first_correct(*setting) is right
    assert (off.tried, right.tried, behind.tried) == (*tried, 0)


def test_a_kernel_is_passed_over_where_torch_does_not_allow_it_or_it_fails() -> None:
    right = Fake()
    setting = torch.device("cpu"), torch.float16, 8, 8, True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first_correct((Fake({0: 9.0}, possible=False), right), *setting) is right
    with pytest.warns(UserWarning, match="Fake fails: no such image, so another is taken"):
        assert first_correct((Fake(error="no such image"), right), *setting) is right
    with (
        pytest.warns(UserWarning, match="Fake fails"),
        pytest.raises(InputError, match=r"widths 8 and 8 in torch.float16 on cpu: Fake is not allowed by torch; Fake "),
    ):
        first_correct((Fake(possible=False), Fake(error="no such image")), *setting)


def test_the_order_of_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "first_correct", lambda candidates, *_: candidates)
    q, half = torch.empty(1, 1, 1, 8, device="meta"), torch.empty(1, 1, 1, 8, device="meta", dtype=torch.bfloat16)
    choose: Any = choose_kernel
    assert choose(half, half, None, "all") == (kernels.CUDNN, kernels.FLASH, kernels.EFFICIENT)
    assert choose(half, half, None, "documents") == (kernels.FLASH, kernels.EFFICIENT)
    assert choose(half, half, None, "mask") == choose(q, q, None, "documents") == (kernels.EFFICIENT,)
    assert choose(half, half, 2.0, "all") is choose(q.double(), q.double(), None, "mask") is kernels.PRODUCTS
    assert choose(half.to("meta").new_empty(1, device="cpu"), half, None, "mask") is kernels.CPU_FLASH
