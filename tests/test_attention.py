"""Attention: the formula, whichever kernel takes it, and the record that tells it of documents."""

import copy
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import attention as back_ends
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode

from meshtrain import attention as module
from meshtrain.attention import (
    AttentionContext,
    KVCache,
    attention,
    cumulative_lengths,
    document_mask,
    has_varlen,
    takes_varlen,
    varlen_kernel,
    wants_repeated,
)
from meshtrain.config.locate import model_file
from meshtrain.data.batch import Batch
from meshtrain.parallel.activation_checkpoint import checkpoint_block
from tests import varlen_on_cpu

KERNEL = partial(varlen.varlen_attn, enable_gqa=True)  # as torch 2.12 and later have it


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


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention as it is written, one query at a time."""
    b, h, s, e = q.shape
    y = torch.zeros(b, h, s, v.shape[-1], dtype=q.dtype)
    for sample, head, i in itertools.product(range(b), range(h), range(s)):
        kv_head = head // (h // k.shape[1])
        first = 0 if window is None else max(0, i - window + 1)
        seen = [j for j in range(first, i + 1) if documents is None or documents[sample, j] == documents[sample, i]]
        scores = k[sample, kv_head, seen] @ q[sample, head, i] * (e**-0.5 if scale is None else scale)
        scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
        y[sample, head, i] = scores.softmax(0) @ v[sample, kv_head, seen]
    return y


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"window": 4}, {"soft_cap": 0.7}, {"window": 1, "scale": 2.0}])
@pytest.mark.parametrize("more", [{}, {"soft_cap": 2.0, "window": 3}])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [8, 5])
def test_attention_is_the_formula(options: dict[str, Any], more: dict[str, Any], masked: bool, width: int) -> None:
    options = options | more
    torch.manual_seed(0)
    q, k = (torch.randn(2, h, 11, 8, dtype=torch.float64, requires_grad=True) for h in (6, 3))
    v = torch.randn(2, 3, 11, width, dtype=torch.float64, requires_grad=True)
    documents = torch.tensor([[0] * 5 + [1] * 6, [0] * 2 + [1] * 9]) if masked else None
    weights = torch.randn(2, 6, 11, width, dtype=torch.float64)
    expected = torch.autograd.grad((formula(q, k, v, documents, **options) * weights).sum(), (q, k, v))
    contexts = [AttentionContext.of(documents), AttentionContext(documents), AttentionContext.of(documents).at(3)]
    for context in (*contexts, None if documents is None else document_mask(documents)):
        y = attention(q, k, v, context, **options)
        torch.testing.assert_close(y, formula(q, k, v, documents, **options), rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad((y * weights).sum(), (q, k, v))
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_a_float_mask_is_added_also_beside_a_window() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 11, 8, dtype=torch.float64) for h in (6, 3, 3))
    documents = torch.tensor([[0] * 5 + [1] * 6, [0] * 11])
    added = torch.zeros(2, 1, 11, 11, dtype=torch.float64).masked_fill(~document_mask(documents), -torch.inf)
    for options in ({}, {"window": 3}, {"soft_cap": 1.0, "window": 3}):
        found, expected = attention(q, k, v, added, **options), formula(q, k, v, documents, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_soft_capped_scores_of_16_bits_are_capped_in_32() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.bfloat16) for _ in range(3))
    found = attention(q, k, v, soft_cap=5.0)
    assert found.dtype == torch.bfloat16
    expected = formula(q.double(), k.double(), v.double(), None, soft_cap=5.0)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


@pytest.fixture
def in_all_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that stand in for those of GPUs take wide types too."""
    monkeypatch.setattr(module, "VARLEN_TYPES", (*module.VARLEN_TYPES, torch.float32, torch.float64))


@pytest.mark.usefixtures("in_all_types")
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize(
    ("widths", "options"),
    [
        ((8, 8), {}),
        ((8, 8), {"scale": 0.3}),
        ((8, 8), {"window": 4}),
        ((8, 8), {"window": 1}),
        ((8, 8), {"window": 11}),  # as long as a row: none
        ((12, 5), {}),  # padded to 16
        ((8, 16), {"window": 3}),
        ((200, 8), {}),  # padded to 256
    ],
)
def test_documents_laid_end_to_end_give_what_the_mask_gives(
    widths: tuple[int, int], options: dict[str, Any], kv_heads: int
) -> None:
    torch.manual_seed(0)
    documents = torch.tensor([[0] * 5 + [1] * 6, [0] * 2 + [1] + [4] * 8, [0] * 11])
    lengths = cumulative_lengths(documents)
    q, k, v = (
        torch.randn(3, 11, h, e, dtype=torch.float64).transpose(1, 2).requires_grad_()  # as models have them
        for h, e in ((6, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))
    )
    weights = torch.randn(3, 6, 11, widths[1], dtype=torch.float64)
    results = []
    for kernel in (None, KERNEL):
        context = AttentionContext.of(AttentionContext(documents, lengths, kernel))
        y = attention(q, k, v, context, **options)
        assert (context.mask is None) is (kernel is not None), "a mask is made where it is used"
        results.append([y, *torch.autograd.grad((y * weights).sum(), (q, k, v))])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("in_all_types")
def never(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
    raise AssertionError("the kernel is called")


def test_what_the_kernel_does_not_take_has_the_mask() -> None:
    documents = torch.tensor([[0] * 5 + [1] * 6])
    q = torch.randn(1, 2, 11, 8, dtype=torch.float64)
    context = AttentionContext.of(AttentionContext(documents, cumulative_lengths(documents), never))
    assert context.mask is None
    found = attention(q, q, q, context, soft_cap=2.0)
    torch.testing.assert_close(found, formula(q, q, q, documents, soft_cap=2.0))
    assert context.mask is not None
    with pytest.raises(RuntimeError, match="size"):  # a token more than the documents have, which the kernel would skip
        attention(*[torch.randn(1, 2, 12, 8, dtype=HALF)] * 3, AttentionContext(documents, context.lengths, never))


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("dtypes", "widths", "soft_cap", "taken"),
    [
        ((HALF, HALF, HALF), (128, 128), None, True),
        ((torch.float16,) * 3, (64, 64), None, True),
        ((HALF, HALF, HALF), (192, 128), None, True),  # padded
        ((HALF, HALF, HALF), (256, 256), None, True),
        ((HALF, HALF, HALF), (257, 256), None, False),
        ((HALF, HALF, HALF), (128, 512), None, False),
        ((HALF, HALF, HALF), (128, 128), 30.0, False),
        ((HALF, HALF, torch.float32), (128, 128), None, False),
        ((torch.float32,) * 3, (128, 128), None, False),
    ],
)
def test_what_the_kernel_takes(
    dtypes: tuple[torch.dtype, ...], widths: tuple[int, int], soft_cap: float | None, taken: bool
) -> None:
    q, k, v = (torch.empty(1, 2, 3, e, dtype=t) for t, e in zip(dtypes, (widths[0], *widths), strict=True))
    assert takes_varlen(q, k, v, soft_cap) is taken


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "hip", "built", "there"),
    [
        ("cuda", (9, 0), torch.bfloat16, None, True, True),
        ("cuda", (8, 0), torch.float16, None, True, True),
        ("cuda", (7, 5), torch.float16, None, True, False),  # T4: no FlashAttention-2
        ("cuda", (9, 0), torch.float32, None, True, False),
        ("cuda", (9, 0), None, None, True, False),
        ("cuda", (9, 0), torch.bfloat16, "6.4", True, False),  # ROCm has other kernels
        ("cuda", (9, 0), torch.bfloat16, None, False, False),
        ("cpu", None, torch.bfloat16, None, True, False),
        ("meta", None, torch.bfloat16, None, True, False),
    ],
)
def test_which_devices_have_attention_of_variable_length(
    device: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype | None,
    hip: str | None,
    built: bool,
    there: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_varlen(torch.device(device), dtype) is there


@pytest.mark.parametrize(
    ("capability", "installed", "active", "activated"),
    [
        ((9, 0), True, None, ["FA3"]),
        ((9, 0), False, None, []),
        ((9, 0), True, "FA4", []),  # whoever chose it has reasons
        ((8, 0), True, None, []),
        ((10, 0), True, None, []),
    ],
)
@pytest.mark.parametrize("asks", [True, False])
def test_the_kernel_is_called_as_this_torch_has_it(
    asks: bool,
    capability: tuple[int, int],
    installed: bool,
    active: str | None,
    activated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_2_11(q: Tensor, *others: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        return q

    chosen: list[str] = []
    monkeypatch.setattr(module, "has_varlen", lambda *_: True)
    monkeypatch.setattr(module, "find_spec", lambda name: SimpleNamespace() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(back_ends, "current_flash_attention_impl", lambda: active)
    monkeypatch.setattr(back_ends, "activate_flash_attention_impl", chosen.append)
    if not asks:
        monkeypatch.setattr(varlen, "varlen_attn", of_2_11)
    kernel = varlen_kernel.__wrapped__(torch.device("cuda", 0), torch.bfloat16)
    assert kernel.keywords == ({"enable_gqa": True} if asks else {})
    assert chosen == activated


def test_no_mask_is_made_on_a_device_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the batch to the blocks, in a type that the device has it for, of a model that takes a record."""
    monkeypatch.setattr(module, "has_varlen", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    varlen_kernel.cache_clear()
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    for dtype, documents in ((torch.bfloat16, tokens), (torch.float32, tokens), (torch.bfloat16, None)):
        batch = Batch.of((tokens, tokens, documents), tokens).with_context().to(torch.device("cpu"), dtype)
        context = AttentionContext.of(batch.inputs[2])
        kernel = documents is not None and dtype == torch.bfloat16
        assert (context.kernel is not None) is kernel
        assert (context.mask is not None) is (documents is not None and not kernel)
    varlen_kernel.cache_clear()


def test_who_watches_torch_functions_sees_attention_and_changes_nothing() -> None:
    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, args[3:], kwargs))
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    q = torch.randn(1, 2, 5, 4)
    with Watch():
        found = attention(q, q, q, None, window=3)
    assert seen == [(attention, (None,), {"scale": None, "window": 3, "soft_cap": None})]
    torch.testing.assert_close(found, attention(q, q, q, window=3), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "widths"), [((8, 8), (64, 64)), ((8, 2), (128, 128)), ((4, 4), (192, 128))])
def test_on_a_gpu_documents_laid_end_to_end_give_what_the_mask_gives(
    heads: tuple[int, int], widths: tuple[int, int], window: int | None
) -> None:
    b, s, dtype = 2, 1000, torch.bfloat16
    torch.manual_seed(0)
    documents = (torch.rand(b, s) < 0.01).long().cumsum(1)
    record = AttentionContext(documents, cumulative_lengths(documents)).to(torch.device("cuda"), dtype)
    if record.kernel is None:
        pytest.skip("this GPU has no attention of variable length")
    shapes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]), (heads[0], widths[1])]
    q, k, v, weights = (torch.randn(b, h, s, e, dtype=dtype, device="cuda") for h, e in shapes)
    results = []
    for context, wide in ((record, dtype), (AttentionContext(documents.cuda()), torch.float64)):
        inputs = [x.to(wide).requires_grad_() for x in (q, k, v)]
        y = attention(*inputs, AttentionContext.of(context), window=window)
        results.append([y, *torch.autograd.grad((y * weights.to(wide)).sum(), inputs)])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
def test_on_a_gpu_packed_documents_take_no_memory_of_a_square() -> None:
    b, h, s, dtype = 1, 4, 16384, torch.bfloat16
    documents = (torch.arange(s) // 1500).expand(b, s)
    record = AttentionContext(documents, cumulative_lengths(documents)).to(torch.device("cuda"), dtype)
    if record.kernel is None:
        pytest.skip("this GPU has no attention of variable length")
    q = torch.randn(b, h, s, 64, dtype=dtype, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, q, q, AttentionContext.of(record)).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < s * s


def test_the_mask_is_made_once_per_context() -> None:
    documents = torch.tensor([[0, 0, 1], [0, 1, 1]])
    context = AttentionContext(documents)
    q = torch.randn(2, 1, 3, 4)
    attention(q, q, q, context)
    made = context.mask
    assert made is not None
    attention(q, q, q, context)
    assert AttentionContext.of(context) is context
    assert context.mask is made
    attention(q, q, q, context, window=2)
    windowed = context.windows[2]
    attention(q, q, q, context.at(1), window=2)
    assert context.windows == {2: windowed}
    assert context.mask is made
    assert AttentionContext(documents, cache=object(), mask=made).at(1).mask is made
    assert AttentionContext.of(None).mask is None
    assert AttentionContext.of(None).shape == ()
    assert context.shape == (2, 3)


def test_a_cache_is_told_which_layer_calls_also_when_a_block_runs_again() -> None:
    context = AttentionContext(cache=KVCache(torch.zeros(1, dtype=torch.int64)))
    layers = [context.at(i) for i in range(3)]
    assert [layer.layer for layer in layers] == [0, 1, 2]
    assert all(one.cache is context.cache for one in layers)
    q = torch.randn(1, 1, 3, 4)
    expected = attention(q, q, q)
    assert torch.equal(attention(q[:, :, :2], q[:, :, :2], q[:, :, :2], layers[1]), expected[:, :, :2])
    torch.testing.assert_close(attention(q[:, :, 2:], q[:, :, 2:], q[:, :, 2:], layers[1]), expected[:, :, 2:])
    for wrong in (AttentionContext(torch.zeros(1, 3), cache=context.cache), AttentionContext(part=torch.arange(3))):
        with pytest.raises(ValueError, match="a cache takes no documents"):
            attention(q, q, q, wrong)


def test_cumulative_lengths_are_those_of_all_documents_padded_to_few_sizes() -> None:
    documents = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 0]])
    lengths = cumulative_lengths(documents)
    assert lengths is not None
    assert lengths.dtype == torch.int32
    assert lengths.tolist() == [0, 2, 3, 4, 8]
    one_more = torch.tensor([[0, 0, 1, 2], [0, 0, 5, 5]])
    assert cumulative_lengths(one_more).tolist() == [0, 2, 3, 4, 6, 8, 8, 8, 8]  # type: ignore[union-attr]
    assert cumulative_lengths(torch.arange(8).view(2, 4)).tolist() == list(range(9))  # type: ignore[union-attr]
    assert cumulative_lengths(torch.zeros(3, 5, dtype=torch.int64)).tolist() == [0, 5, 10, 15]  # type: ignore[union-attr]
    assert cumulative_lengths(torch.tensor([[0, 1, 0]])) is None, "its last token sees its first"


def test_cumulative_lengths_say_what_the_mask_says() -> None:
    sizes = set()
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        begins = torch.rand(3, 64, generator=draw) < torch.rand(1, generator=draw) ** 3
        documents = begins.long().cumsum(1)
        lengths = cumulative_lengths(documents)
        assert lengths is not None
        runs = lengths.diff()
        owner = torch.arange(len(runs)).repeat_interleave(runs)
        same = (owner[:, None] == owner).tril().view(3, 64, 3, 64)
        for i, j in itertools.product(range(3), range(3)):
            assert torch.equal(same[i, :, j], document_mask(documents)[i, 0] if i == j else torch.zeros(64, 64).bool())
        used = int((runs > 0).sum())
        assert len(runs) < 2 * max(used, 3) + 3
        sizes.add(len(runs))
    assert sizes <= {3 * 2**n for n in range(7)}


def test_a_context_moves_whole() -> None:
    documents = torch.tensor([[0, 0, 1]])
    context = AttentionContext.of(AttentionContext(documents, cumulative_lengths(documents)))
    moved = context.to(torch.device("meta"), torch.bfloat16, non_blocking=True)
    assert all(x is not None and x.is_meta for x in (moved.documents, moved.lengths, moved.mask))
    assert (moved.documents.dtype, moved.lengths.dtype) == (torch.int64, torch.int32)
    assert AttentionContext().to(torch.device("meta")).documents is None


MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}


@pytest.mark.usefixtures("in_all_types")
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("masked", ["", "mask", "lengths"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_block_is_not_compiled_anew_for_other_documents_or_layers(
    backend: str, masked: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "varlen_kernel", lambda *_: KERNEL if masked == "lengths" else None)
    torch._dynamo.reset()
    llama = model_file("llama")
    torch.manual_seed(0)
    model = llama.Model(llama.Config(**MODEL, num_key_value_heads=2))
    plain = copy.deepcopy(model)
    counter = CompileCounterWithBackend(backend)
    for layer in model.model.layers:
        layer.forward = torch.compile(checkpoint_block(layer.forward, recompute), backend=counter)
    graphs = []
    for step in range(3):
        tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(step))
        documents = torch.stack([torch.arange(12) >= step + 3, torch.arange(12) * 5**step // 12]) if masked else None
        batch = Batch.of((tokens, torch.arange(12).expand(2, 12), documents), tokens).with_context()
        inputs = batch.to(torch.device("cpu"), torch.float32).inputs
        assert isinstance(inputs[2], AttentionContext)
        loss = model(*inputs).square().sum()
        loss.backward()
        assert (inputs[2].mask is not None) is (masked == "mask")
        expected = plain(tokens, None, documents).square().sum()
        expected.backward()
        torch.testing.assert_close(loss, expected)
        graphs.append(counter.frame_count)
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 3
    assert graphs[0] == 1  # of all layers
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.usefixtures("in_all_types")
@pytest.mark.parametrize(("recompute", "forwards"), [("none", 1), ("full", 2), ("selective", 1)])
def test_selective_recomputation_keeps_packed_attention(
    recompute: str, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(varlen_on_cpu, "called", lambda: calls.append(None))
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    context = AttentionContext(documents, cumulative_lengths(documents), KERNEL)
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    checkpoint_block(lambda x: attention(x.sin(), x, x, context).cos(), recompute)(x).sum().backward()
    assert len(calls) == forwards


def test_a_whole_model_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    llama = model_file("llama")
    model = llama.Model(llama.Config(**MODEL))
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(model, backend=counter, fullgraph=True)
    for cut in (3, 5):
        tokens = torch.arange(12).expand(2, 12)
        documents = (torch.arange(12) >= cut).long().expand(2, 12)
        torch.testing.assert_close(run(tokens, None, documents), model(tokens, None, documents))
    assert counter.frame_count == 1


@pytest.mark.parametrize("masked", [False, True])
def test_layers_with_windows_and_caps_are_not_compiled_anew(masked: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layers(x: Tensor, context: AttentionContext) -> Tensor:
        return attention(attention(x, x, x, context, window=3, scale=0.2), x, x, context, soft_cap=2.0)

    run = torch.compile(layers, backend=counter)
    for cut in (2, 5, 7):
        documents = (torch.arange(9) >= cut).long().expand(2, 9) if masked else None
        x = torch.randn(2, 2, 9, 4, dtype=torch.float64, requires_grad=True)
        found = run(x, AttentionContext.of(documents))
        torch.testing.assert_close(found, layers(x, AttentionContext.of(documents)))
        found.sum().backward()
    assert counter.frame_count == 1
