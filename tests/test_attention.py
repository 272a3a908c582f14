"""Attention: the formula, whichever kernel takes it, and the record that tells it of documents."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from meshtrain import attention as module
from meshtrain.attention import AttentionContext, attention, cumulative_lengths, document_mask, wants_repeated
from meshtrain.config.locate import model_file
from meshtrain.data.batch import Batch
from meshtrain.parallel.activation_checkpoint import checkpoint_block


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
    context = AttentionContext(cache={})
    layers = [context.at(i) for i in range(3)]
    assert [layer.layer for layer in layers] == [0, 1, 2]
    assert all(one.cache is context.cache for one in layers)
    q = torch.randn(1, 1, 3, 4)
    for unbuilt in (context, AttentionContext(part=torch.arange(3))):
        with pytest.raises(NotImplementedError, match="not built"):
            attention(q, q, q, unbuilt)


def test_cumulative_lengths_are_those_of_all_documents_padded_to_one_size() -> None:
    documents = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 0]])
    lengths = cumulative_lengths(documents)
    assert lengths.dtype == torch.int32
    assert lengths.tolist() == [0, 2, 3, 4, 8, 8, 8, 8, 8]
    assert cumulative_lengths(torch.arange(8).view(2, 4)).tolist() == list(range(9))


def test_a_context_moves_whole() -> None:
    documents = torch.tensor([[0, 0, 1]])
    context = AttentionContext.of(AttentionContext(documents, cumulative_lengths(documents)))
    moved = context.to(torch.device("meta"), torch.bfloat16, non_blocking=True)
    assert all(x is not None and x.is_meta for x in (moved.documents, moved.lengths, moved.mask))
    assert (moved.documents.dtype, moved.lengths.dtype) == (torch.int64, torch.int32)
    assert AttentionContext().to(torch.device("meta")).documents is None


MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_block_is_not_compiled_anew_for_other_documents_or_layers(
    backend: str, masked: bool, recompute: str
) -> None:
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
        documents = (torch.arange(12) >= step + 3).long().expand(2, 12) if masked else None
        inputs = Batch.of((tokens, torch.arange(12).expand(2, 12), documents), tokens).with_context().inputs
        assert isinstance(inputs[2], AttentionContext)
        loss = model(*inputs).square().sum()
        loss.backward()
        expected = plain(tokens, None, documents).square().sum()
        expected.backward()
        torch.testing.assert_close(loss, expected)
        graphs.append(counter.frame_count)
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 3
    assert graphs[0] == 1  # of all layers
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


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
