"""Blocks of attention with their log-sum-exp: each kernel against attention as it is written."""

import itertools
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
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
    segments_of,
)
from tests.parallel.sharded_attention import SegmentsByMask
from tests.properties import given, st

GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
)
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
UNEVEN = (0, 0, 0, 0, 1, 1)
BLOCKS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "masked": {"mask": True},
    "uneven heads": {"causal": True, "heads": UNEVEN},
    "uneven heads, masked": {"mask": True, "heads": (0, 1, 1, 1, 1, 1)},
    "soft cap": {"causal": True, "soft_cap": 1.5},
}


def drawn(
    m: int, n: int, e: int, f: int, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], Tensor]:
    """Gradient of the output, q, k and v; and a mask."""
    draw = torch.Generator().manual_seed(m + n)
    shapes = (2, 6, m, f), (2, 6, m, e), (2, 2, n, e), (2, 2, n, f)
    tensors = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    mask = torch.rand(2, 1, m, n, generator=draw).to(device) < 0.4
    mask[:, :, ::3] = False  # rows that see nothing
    return tensors, mask


def by_autograd(tensors: Sequence[Tensor], block: Block) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients by torch's elementary operations in float64."""
    grad, *qkv = tensors
    q, k, v = (x.double().requires_grad_() for x in qkv)
    looks = list(block.heads) or [head // 3 for head in range(6)]
    scores = q @ k[:, looks].transpose(-1, -2) * block.scale
    if block.soft_cap is not None:
        scores = block.soft_cap * torch.tanh(scores / block.soft_cap)
    m, n = scores.shape[-2:]
    seen = block.mask
    if seen is None:
        seen = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(
            n - m if block.causal else n
        )
    blind = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf)
    out = (scores.masked_fill(blind, 0).softmax(-1) * ~blind) @ v[:, looks]
    return (
        out.detach(),
        scores.detach().logsumexp(-1),
        *torch.autograd.grad(out, (q, k, v), grad.double()),
    )


def assert_attention(
    tensors: Sequence[Tensor],
    block: Block,
    expected: Sequence[Tensor],
    kernel: Kernel | None = None,
) -> None:
    """Laid out as where they are used: as rows of a longer sequence, and keys beside values."""
    grad, q, k, v = tensors
    m, widths = q.shape[2], [k.shape[3], v.shape[3]]
    out, lse = forward_block(q, k, v, block, kernel)
    assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
    # backward is only asked for rows that see something in the end
    whole = lse.masked_fill(lse == -torch.inf, 0)
    grad, q, y, whole = (torch.cat([x, x], 2)[:, :, :m] for x in (grad, q, out.to(q.dtype), whole))
    k, v = torch.cat([k, v], -1).split(widths, -1)
    results = out, lse, *backward_block(grad, q, k, v, y, whole, block, kernel)
    where = f"{kernel or kernels._kernel_of(q, v, block)}, {m} x {k.shape[2]}, widths {widths}: "
    for name, actual, right in zip(
        ("out", "lse", "dq", "dk", "dv"), results, expected, strict=True
    ):
        size = max(1.0, float(right[right.isfinite()].abs().max()))
        torch.testing.assert_close(
            actual.double(),
            right,
            rtol=0,
            atol=ROUNDING[tensors[0].dtype] * size,
            msg=lambda text, name=name: where + name + text,
        )


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_kernel_computes_attention_as_it_is_written(
    name: str, dtype: torch.dtype, device: str
) -> None:
    """That of the device, and products, which CUDA takes in float64."""
    for m, n, (e, f) in itertools.product((7, 32), (32, 41), ((8, 8), (12, 5), (4, 16), (16, 4))):
        (grad, q, k, v), mask = drawn(m, n, e, f, dtype, device)
        block = Block(0.3, **(BLOCKS[name] | ({"mask": mask} if "mask" in BLOCKS[name] else {})))
        for kernel in (kernels._kernel_of(q, v, block), kernels.PRODUCTS):
            keys = m if block.causal and not kernel.lower_right else n
            tensors = grad, q, k[:, :, :keys], v[:, :, :keys]
            assert_attention(tensors, block, by_autograd(tensors, block), kernel)


@st.composite
def documents(draw: st.DrawFn) -> Tensor:
    """(b, n), ascending."""
    n = draw(st.integers(2, 40))
    rows = [
        sorted(draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return torch.tensor(rows)


@given(documents(), st.data())
def test_segments_are_the_mask_of_documents(keys: Tensor, data: st.DataObject) -> None:
    """Of the last queries of the keys, and of any others, some of which see nothing."""
    b, n = keys.shape
    m = data.draw(st.integers(1, n))
    for queries, causal in (
        (keys[:, n - m :], True),
        (data.draw(documents())[:1].expand(b, -1), False),
    ):
        segments = segments_of(queries, keys)
        assert bool((segments.queries > 0).all())
        parts = []
        for length, count, first in zip(*(x.tolist() for x in segments), strict=True):
            part = torch.zeros(length, b * n, dtype=torch.bool)
            visible = torch.ones(length, count, dtype=torch.bool)
            part[:, first : first + count] = visible.tril(count - length) if causal else visible
            parts.append(part)
        same = queries[:, :, None] == keys[:, None]
        expected = torch.block_diag(*(same.tril(n - m) if causal else same)).bool()
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("heads", [(), UNEVEN], ids=str)
def test_segments_give_what_their_mask_does(
    heads: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """By the arrangement of flash attention for GPUs, with products in its place on the CPU."""
    keys = torch.tensor([[0] * 9 + [1] * 3 + [2] * 29, [1] * 20 + [4] * 21])
    tensors, _ = drawn(17, 41, 12, 5, dtype, device)
    last, others = keys[:, 24:], keys[:, :17] + 1
    for queries, causal, window in ((last, True, None), (last, True, 4), (others, False, None)):
        segments = segments_of(queries, keys)
        mask = queries[:, None, :, None] == keys[:, None, None]
        if causal:
            mask &= torch.ones(17, 41, dtype=torch.bool).tril(24).triu(25 - (window or 99))
        block = Block(0.3, causal=causal, heads=heads, segments=segments, window=window)
        kernel: Kernel = SegmentsByMask()
        if device == "cuda" and dtype.itemsize == 2:
            kernel = choose_kernel(tensors[1], tensors[3], False, "documents")
            assert kernel.segmented
        written = Block(0.3, mask=mask.to(device), heads=heads)
        assert_attention(tensors, block, by_autograd(tensors, written), kernel)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize(
    "kernel", [kernels.CUDNN, kernels.FLASH, kernels.EFFICIENT, kernels.PRODUCTS]
)
def test_what_cuda_is_asked_for_is_what_its_operators_take(
    kernel: Kernel, dtype: torch.dtype
) -> None:
    """On the meta device, where torch checks the arguments of an operator and says what shapes it
    returns."""
    (grad, q, k, v), mask = drawn(24, 24, 12, 7, dtype, "meta")
    keys = torch.arange(24).div(5, rounding_mode="floor").expand(2, -1)
    by_mask = kernel in (kernels.EFFICIENT, kernels.PRODUCTS)
    blocks = [Block(0.3), Block(0.3, causal=True), Block(0.3, heads=UNEVEN)]
    blocks += [Block(0.3, mask=mask)] if by_mask else []
    if kernel.segmented:
        blocks += [
            Block(0.3, causal=True, segments=segments_of(keys, keys), window=n) for n in (None, 3)
        ]
    for block in blocks:
        out, lse = forward_block(q, k, v, block, kernel)
        grads = backward_block(grad, q, k, v, out.to(dtype), lse, block, kernel)
        assert (out.shape, lse.shape) == (grad.shape, q.shape[:3])
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


class Fake(kernels._Products):
    """Attention as it is written, or something else."""

    lower_right, multiple = False, 8

    def __init__(
        self, off: dict[int, float] | None = None, error: str = "", possible: bool = True
    ) -> None:
        self.off, self.error, self.calls = off or {}, error, 0
        self.allowed = lambda _: possible

    def changed(self, results: tuple[Tensor, ...], first: int) -> Any:
        self.calls += 1
        if self.error:
            raise RuntimeError(self.error)
        return tuple(x + self.off.get(first + n, 0.0) for n, x in enumerate(results))

    def forward(self, *inputs: Any) -> Any:
        return self.changed(super().forward(*inputs), 0)

    def backward(self, *inputs: Any) -> Any:
        return self.changed(super().backward(*inputs), 2)


@pytest.mark.parametrize("all_visible", [True, False])
@pytest.mark.parametrize("result", range(5))
def test_a_kernel_that_is_off_is_passed_over(result: int, all_visible: bool) -> None:
    """Whichever of output, log-sum-exp and gradients it is; and it is said, and tried, once."""
    off, right, behind = Fake({result: 0.2}), Fake(), Fake()
    setting = (off, right, behind), torch.device("cpu"), torch.bfloat16, 12, 7, all_visible
    with pytest.warns(
        UserWarning, match="Fake computes something else than attention, so another is taken"
    ) as warned:
        assert first_correct(*setting) is right
    assert len(warned) == 1
    calls = off.calls, right.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first_correct(*setting) is right
    assert (off.calls, right.calls, behind.calls) == (*calls, 0)


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
        pytest.raises(
            InputError,
            match=r"widths 8 and 8 in torch.float16 on cpu: Fake is not allowed by torch; Fake ",
        ),
    ):
        first_correct((Fake(possible=False), Fake(error="no such image")), *setting)


def on_gpu(dtype: torch.dtype) -> Any:
    """What a choice reads of queries on a GPU."""
    return SimpleNamespace(
        device=torch.device("cuda"), dtype=dtype, shape=(1, 1, 1, 8), is_meta=False
    )


def test_the_order_of_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "first_correct", lambda candidates, *_: candidates)
    choose: Any = choose_kernel
    half, q, double = on_gpu(torch.bfloat16), on_gpu(torch.float32), on_gpu(torch.float64)
    assert choose(half, half, False, "all") == (kernels.CUDNN, kernels.FLASH, kernels.EFFICIENT)
    assert choose(half, half, False, "documents") == (kernels.FLASH, kernels.EFFICIENT)
    assert choose(half, half, False, "mask") == (kernels.EFFICIENT,)
    assert choose(q, q, False, "documents") == (kernels.EFFICIENT,)
    assert choose(half, half, True, "all") is kernels.PRODUCTS
    assert choose(double, double, False, "mask") is kernels.PRODUCTS
    assert choose(torch.empty(1), half, False, "mask") is kernels.CPU_FLASH


def test_a_trace_takes_a_kernel_without_trying_it() -> None:
    half = torch.empty(1, 1, 1, 8, device="meta", dtype=torch.bfloat16)
    assert choose_kernel(half, half, False, "all") is kernels.FLASH
    assert choose_kernel(half, half, False, "mask") is kernels.EFFICIENT
    assert choose_kernel(half.float(), half.float(), False, "documents") is kernels.EFFICIENT
