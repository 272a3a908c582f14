"""Attention with grouped heads: which kernel takes them, and the same numbers either way."""

import pytest
import torch

from meshtrain import attention as module
from meshtrain.attention import attention, document_mask, wants_repeated


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "kv_heads", "width", "repeated"),
    [
        ("cuda", torch.bfloat16, False, 2, 128, False),  # flash
        ("cuda", torch.float16, False, 2, 256, False),
        ("cuda", torch.bfloat16, False, 2, 257, True),
        ("cuda", torch.bfloat16, True, 2, 128, True),  # documents
        ("cuda", torch.float32, False, 2, 128, True),  # the default precision
        ("cuda", torch.float32, True, 2, 128, True),
        ("cuda", torch.float32, True, 8, 128, False),  # nothing to repeat
        ("cuda", torch.float64, False, 2, 128, False),  # no kernel takes it
        ("cpu", torch.float32, True, 2, 128, False),  # its kernel takes all
        ("meta", torch.bfloat16, True, 2, 128, False),
    ],
)
def test_heads_are_repeated_where_no_fused_kernel_takes_groups(
    device: str, dtype: torch.dtype, masked: bool, kv_heads: int, width: int, repeated: bool
) -> None:
    assert wants_repeated(device, dtype, masked, 8, kv_heads, width) is repeated


@pytest.mark.parametrize("masked", [False, True])
def test_repeated_heads_give_the_same(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = torch.tensor([[0] * 5 + [1] * 6, [0] * 11])
    found = []
    for repeated in (False, True):
        monkeypatch.setattr(module, "wants_repeated", lambda *_, repeated=repeated: repeated)
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, h, 11, 8, dtype=torch.float64, requires_grad=True) for h in (6, 3, 3))
        y = attention(q, k, v, document_mask(documents) if masked else None)
        y.square().sum().backward()
        found.append([y.detach(), q.grad, k.grad, v.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "masked"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
def test_no_scores_of_all_tokens_are_held_on_a_gpu(dtype: torch.dtype, masked: bool) -> None:
    b, h, s = 1, 8, 4096
    q, k, v = (torch.randn(b, n, s, 64, dtype=dtype, device="cuda", requires_grad=True) for n in (h, 2, 2))
    mask = document_mask(torch.zeros(b, s, dtype=torch.int64, device="cuda")) if masked else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, mask).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < b * h * s * s * dtype.itemsize
