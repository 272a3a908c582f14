"""Attention: the formula, whichever kernel takes it, and the record that tells it of documents."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import attention as back_ends
from torch.nn.attention import varlen

from meshtrain import attention as module
from meshtrain.attention import (
    AttentionContext,
    Bias,
    KVCache,
    attention,
    cumulative_lengths,
    document_mask,
    has_varlen,
    takes_varlen,
    varlen_kernel,
    wants_repeated,
)
from meshtrain.data.batch import Batch
from meshtrain.dropout import Dropout, set_dropout
from meshtrain.parallel.activation_checkpoint import checkpoint_block
from meshtrain.parallel.context import kernels
from tests import varlen_on_cpu
from tests.comparing import CPU, Peak, V, small_llama
from tests.parallel.sharded_attention import SegmentsByMask

TABLES = yaml.safe_load(Path(__file__).with_name("attention_kernels.yaml").read_text())
VARLEN = varlen_on_cpu.KERNEL
NEEDS_GPU = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 6, [0] * 2 + [1] + [4] * 8, [0] * 11])


@pytest.fixture
def in_all_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that stand in for those of GPUs take wide types too."""
    monkeypatch.setattr(
        module, "VARLEN_TYPES", (*module.VARLEN_TYPES, torch.float32, torch.float64)
    )


# The formula --------------------------------------------------------------------------------------


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    bias: Bias | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """Attention as it is written. `keep`: factors of the probabilities."""
    tokens = torch.arange(q.shape[2])
    distance = tokens[:, None] - tokens
    seen = (distance >= 0) & (distance < (window or 99))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias(tokens[None], tokens[None])
    exponentials = scores.masked_fill(~seen, -torch.inf).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    p = exponentials / total
    return (p if keep is None else p * keep) @ v


def alibi(slopes: Tensor) -> Bias:
    """The penalty of a distance, with a slope for each head (https://arxiv.org/abs/2108.12409)."""
    return lambda queries, keys: (
        slopes[:, None, None] * (keys[:, None, None] - queries[:, None, :, None])
    )


def learned(table: Tensor) -> Bias:
    """T5's: a parameter (h, n) for each distance, the last one for all from there on."""

    def bias(queries: Tensor, keys: Tensor) -> Tensor:
        distance = queries[:, :, None] - keys[:, None]
        return table[:, distance.clamp(0, table.shape[1] - 1)].transpose(0, 1)

    return bias


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"window": 4},
    {"window": 1, "scale": 2.0},
    {"window": 11},  # as long as a row: none
    {"soft_cap": 0.7},
    {"soft_cap": 2.0, "window": 3},
]


@pytest.mark.usefixtures("in_all_types")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "widths", [(8, 8), (12, 5), (8, 16), (200, 8)], ids=str
)  # padded to 16 and to 256 for a GPU
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("repeated", [False, True])
def test_attention_is_the_formula(
    options: dict[str, Any],
    widths: tuple[int, int],
    kv_heads: int,
    repeated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of documents laid end to end, under masks of bools and of numbers, and of whole rows."""
    monkeypatch.setattr(module, "wants_repeated", lambda *_: repeated)
    torch.manual_seed(0)
    shapes = (6, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1])
    q, k, v = (  # as models have them
        torch.randn(3, 11, heads, width, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for heads, width in shapes
    )
    direction = torch.randn(3, 6, 11, widths[1], dtype=torch.float64)
    mask = document_mask(DOCUMENTS)
    packed = AttentionContext.of(AttentionContext(DOCUMENTS, cumulative_lengths(DOCUMENTS), VARLEN))
    forms = [
        (None, None),
        (None, AttentionContext.of(None)),
        (DOCUMENTS, AttentionContext.of(DOCUMENTS)),
        (DOCUMENTS, AttentionContext(DOCUMENTS)),
        (DOCUMENTS, packed),
        (DOCUMENTS, mask),
        (DOCUMENTS, torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)),
    ]
    for documents, context in forms:
        y, expected = attention(q, k, v, context, **options), formula(q, k, v, documents, **options)
        gradients = [torch.autograd.grad(output, (q, k, v), direction) for output in (y, expected)]
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)
    assert (packed.mask is None) is ("soft_cap" not in options), "a mask is made where it is used"


@pytest.mark.usefixtures("in_all_types")
@pytest.mark.parametrize("names", ["sinks", "alibi", "learned", "sinks learned", "sinks dropped"])
@pytest.mark.parametrize("options", [{}, {"window": 4, "scale": 0.3}, {"soft_cap": 0.7}], ids=str)
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_sinks_biases_and_dropout_are_the_formula(
    names: str, options: dict[str, Any], kv_heads: int
) -> None:
    """With the gradients of all that they are made of, in every form of a context."""
    torch.manual_seed(0)
    q, k, v, direction = (
        torch.randn(3, 11, heads, width, dtype=torch.float64).transpose(1, 2)
        for heads, width in ((6, 8), (kv_heads, 8), (kv_heads, 5), (6, 5))
    )
    sinks, slopes = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    table = torch.randn(6, 4, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks, slopes, table)]
    dropout, factors = dropout_of(6, 3), None
    more: dict[str, Any] = {}
    if "sinks" in names:
        more["sinks"] = sinks
    if "alibi" in names:
        more["bias"] = alibi(slopes)
    if "learned" in names:
        more["bias"] = learned(table)
    if "dropped" in names:
        tokens = torch.arange(11)[None]
        factors = dropout.keep_pairs(3, 6, tokens, tokens).double() / (1 - dropout.p)
    mask = document_mask(DOCUMENTS)
    packed = AttentionContext.of(AttentionContext(DOCUMENTS, cumulative_lengths(DOCUMENTS), VARLEN))
    forms = [
        (None, None),
        (None, AttentionContext.of(None)),
        (DOCUMENTS, AttentionContext.of(DOCUMENTS)),
        (DOCUMENTS, packed),
        (DOCUMENTS, mask),
        (DOCUMENTS, torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)),
    ]
    for documents, context in forms:
        y = attention(
            q, k, v, context, **options, **more, dropout=dropout if "dropped" in names else 0.0
        )
        expected = formula(q, k, v, documents, **options, **more, keep=factors)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        results = [
            torch.autograd.grad(output, leaves, direction, allow_unused=True)
            for output in (y, expected)
        ]
        for actual, known in zip(*results, strict=True):
            assert (actual is None) == (known is None)
            torch.testing.assert_close(actual, known, rtol=1e-11, atol=1e-12)


def dropout_of(heads: int, samples: int) -> Dropout:
    dropout = Dropout(0.3, heads)
    set_dropout(nn.ModuleList([dropout]), seed=3, step=2, samples=range(samples))
    return dropout


def test_dropout_is_of_training_and_of_a_module() -> None:
    x = torch.randn(2, 4, 5, 8)
    dropout = dropout_of(4, 2)
    assert not torch.equal(attention(x, x, x, dropout=dropout), attention(x, x, x))
    assert torch.equal(attention(x, x, x, dropout=dropout.eval()), attention(x, x, x))
    with pytest.raises(ValueError, match="a probability alone"):
        attention(x, x, x, dropout=0.1)
    for unknown in (Dropout(0.1), Dropout(0.1, heads=6)):
        with pytest.raises(ValueError, match="the number of query heads of the whole layer"):
            attention(x, x, x, dropout=unknown)
    torch.manual_seed(0)
    alone = attention(x, x, x, dropout=Dropout(0.5, heads=4))  # of a plain model
    assert not torch.equal(alone, attention(x, x, x, dropout=Dropout(0.5, heads=4)))


@pytest.mark.parametrize("window", [None, 3])
def test_a_cache_gives_what_the_whole_row_gives(window: int | None) -> None:
    """With sinks and a bias, of rows that are padded on the left, token by token."""
    torch.manual_seed(0)
    sinks, table = torch.randn(4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    slopes = torch.rand(4, dtype=torch.float64)
    for options in (
        {"sinks": sinks},
        {"bias": alibi(slopes)},
        {"sinks": sinks, "bias": learned(table)},
        # of absolute positions
        {
            "bias": lambda q, k: (
                q[:, None, :, None] * slopes[:, None, None] * k[:, None, None]
            ).sin()
        },
    ):
        texts = [torch.randn(1, 4, n, 8, dtype=torch.float64) for n in (7, 9)]
        padded = torch.cat([F.pad(texts[0], (0, 0, 2, 0)), texts[1]])
        context = AttentionContext(cache=KVCache(torch.tensor([2, 0])))
        parts = padded.split([6, 1, 2], dim=2)
        outputs = [attention(x, x, x, context, window=window, **options) for x in parts]
        y = torch.cat(outputs, dim=2)
        for row, text, begin in ((0, texts[0], 2), (1, texts[1], 0)):
            expected = attention(text, text, text, window=window, **options)
            torch.testing.assert_close(y[row, :, begin:], expected[0], rtol=1e-12, atol=1e-12)


def test_sinks_take_no_memory_of_all_scores() -> None:
    """A fused kernel's log-sum-exp is enough."""
    s = 1024
    x = torch.randn(1, 2, s, 8, requires_grad=True)
    sinks = torch.zeros(2, requires_grad=True)
    with Peak([x, sinks]) as peak:
        attention(x, x, x, sinks=sinks).sum().backward()
    assert peak.bytes < s * s


@pytest.mark.usefixtures("in_all_types")
@pytest.mark.parametrize("window", [None, 3, 11])
def test_sinks_of_packed_documents_need_no_mask(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs in 16 bits, where flash attention is given the documents' ends."""
    segmented, choose = SegmentsByMask(), kernels.choose_kernel
    monkeypatch.setattr(
        kernels,
        "choose_kernel",
        lambda q, v, by_products, visible: (
            segmented if visible == "documents" else choose(q, v, by_products, visible)
        ),
    )
    packed = AttentionContext.of(AttentionContext(DOCUMENTS, cumulative_lengths(DOCUMENTS), VARLEN))
    masked = AttentionContext.of(DOCUMENTS)
    torch.manual_seed(0)
    q, k, v, direction = (
        torch.randn(3, heads, 11, width, dtype=torch.float64, requires_grad=True)
        for heads, width in ((6, 12), (3, 12), (3, 5), (6, 5))
    )
    sinks = torch.randn(6, dtype=torch.float64, requires_grad=True)
    results = []
    for context in (packed, masked):
        y = attention(q, k, v, context, window=window, sinks=sinks)
        results.append([y, *torch.autograd.grad(y, (q, k, v, sinks), direction)])
    assert packed.mask is None
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_rounded_sinks_are_those_of_float32() -> None:
    torch.manual_seed(0)
    x, sinks = torch.randn(1, 2, 40, 16), torch.randn(2)
    expected = attention(x, x, x, sinks=sinks)
    half = x.bfloat16()
    y = attention(half, half, half, sinks=sinks)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=10 * 2**-8)


def test_soft_capped_scores_of_16_bits_are_capped_in_32(monkeypatch: pytest.MonkeyPatch) -> None:
    capped: list[torch.dtype] = []
    tanh = torch.tanh
    monkeypatch.setattr(torch, "tanh", lambda x: capped.append(x.dtype) or tanh(x))
    x = torch.randn(1, 2, 5, 16, dtype=torch.bfloat16)
    assert attention(x, x, x, soft_cap=5.0).dtype == torch.bfloat16
    assert capped == [torch.float32]


# Which kernel -------------------------------------------------------------------------------------


def test_heads_are_repeated_where_no_fused_kernel_takes_groups() -> None:
    for row in TABLES["repeated"]:
        device, dtype, masked, kv_heads, width, repeated = row
        assert (
            wants_repeated(device, getattr(torch, dtype), masked, 8, kv_heads, width) is repeated
        ), row


def test_what_the_kernel_takes() -> None:
    for row in TABLES["varlen_takes"]:
        dtypes, widths, taken = row
        qkv = (
            torch.empty(1, 2, 3, e, dtype=getattr(torch, t))
            for t, e in zip(dtypes, widths, strict=True)
        )
        assert takes_varlen(*qkv) is taken, row


def test_which_devices_have_attention_of_variable_length(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in TABLES["varlen_devices"]:
        device, capability, dtype, hip, built, there = row
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(
            torch.backends.cuda, "is_flash_attention_available", lambda built=built: built
        )
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, c=capability: c and tuple(c)
        )
        assert has_varlen(torch.device(device), dtype and getattr(torch, dtype)) is there, row


def test_the_kernel_is_called_as_this_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {}
    activated: list[str] = []
    monkeypatch.setattr(module, "has_varlen", lambda *_: True)
    monkeypatch.setattr(module, "find_spec", lambda name: state["installed"] or None)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: tuple(state["capability"])
    )
    monkeypatch.setattr(back_ends, "current_flash_attention_impl", lambda: state["active"])
    monkeypatch.setattr(back_ends, "activate_flash_attention_impl", activated.append)
    make_kernel = partial(varlen_kernel.__wrapped__, torch.device("cuda", 0), torch.bfloat16)

    def of_torch_2_12(
        q: Tensor,
        *others: Any,
        scale: Any = None,
        window_size: Any = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return q

    monkeypatch.setattr(varlen, "varlen_attn", of_torch_2_12)
    for row in TABLES["flash_3"]:
        activated.clear()
        state |= row
        assert make_kernel().keywords == {"enable_gqa": True}
        assert activated == ["FA3"] * row["activated"], row
    # torch 2.11
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda q, *others, scale=None, window_size=(-1, -1): q
    )
    assert make_kernel().keywords == {}


def test_no_mask_is_made_on_a_device_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the batch to the blocks, in a type that the device has it for, of a model that takes a
    record."""
    monkeypatch.setattr(module, "has_varlen", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    varlen_kernel.cache_clear()
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    for dtype, documents, kernel, mask in (
        (torch.bfloat16, tokens, True, False),
        (torch.float32, tokens, False, True),
        (torch.bfloat16, None, False, False),
    ):
        batch = Batch.of((tokens, tokens, documents), tokens).with_context().to(CPU, dtype)
        context = AttentionContext.of(batch.inputs[2])
        assert (context.kernel is not None, context.mask is not None) == (kernel, mask)
    varlen_kernel.cache_clear()


def test_documents_of_another_length_are_not_packed() -> None:
    """The kernel would skip the token that they lack."""
    lengths = cumulative_lengths(DOCUMENTS[:1])
    x = torch.randn(1, 2, 12, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="size"):
        attention(x, x, x, AttentionContext(DOCUMENTS[:1], lengths, VARLEN))


# The record ---------------------------------------------------------------------------------------


def test_the_mask_is_made_once_per_context() -> None:
    context = AttentionContext(DOCUMENTS)
    x = torch.randn(3, 1, 11, 4)
    attention(x, x, x, context, window=2)
    mask, window = context.mask, context.windows[2]
    attention(x, x, x, context.at(1), window=2)
    assert AttentionContext.of(context).mask is mask is not None
    assert context.windows == {2: window}
    assert context.shape == (3, 11)


def test_a_cache_is_told_which_layer_calls_also_when_a_block_runs_again() -> None:
    context = AttentionContext(cache=KVCache(torch.zeros(1, dtype=torch.int64)))
    layers = [context.at(i) for i in range(3)]
    assert [layer.layer for layer in layers] == [0, 1, 2]
    x = torch.randn(1, 1, 3, 4)
    parts = [attention(part, part, part, layers[1]) for part in (x[:, :, :2], x[:, :, 2:])]
    torch.testing.assert_close(torch.cat(parts, 2), attention(x, x, x))
    for wrong in (
        AttentionContext(torch.zeros(1, 3), cache=context.cache),
        AttentionContext(part=torch.arange(3)),
    ):
        with pytest.raises(ValueError, match="a cache takes no documents"):
            attention(x, x, x, wrong)


def test_cumulative_lengths_say_what_the_mask_says() -> None:
    """Padded to few sizes, as if empty documents followed."""
    sizes = set()
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        begins = torch.rand(3, 64, generator=draw) < torch.rand(1, generator=draw) ** 3
        documents = begins.long().cumsum(1)
        lengths = cumulative_lengths(documents).diff()  # type: ignore[union-attr]
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        same = (owner[:, None] == owner).tril()
        assert torch.equal(same, torch.block_diag(*document_mask(documents)[:, 0]).bool())
        assert len(lengths) < 2 * max(int((lengths > 0).sum()), 3) + 3
        sizes.add(len(lengths))
    assert sizes <= {3 * 2**n for n in range(7)}
    starts = cumulative_lengths(torch.tensor([[0, 0, 1, 2], [0, 0, 5, 5]]))
    assert starts is not None
    assert (starts.dtype, starts.tolist()) == (torch.int32, [0, 2, 3, 4, 6, 8, 8, 8, 8])
    assert cumulative_lengths(torch.tensor([[0, 1, 0]])) is None, "its last token sees its first"


def test_a_context_moves_whole() -> None:
    context = AttentionContext.of(AttentionContext(DOCUMENTS, cumulative_lengths(DOCUMENTS)))
    moved = context.to(torch.device("meta"), torch.bfloat16, non_blocking=True)
    assert all(x is not None and x.is_meta for x in (moved.documents, moved.lengths, moved.mask))
    assert (moved.documents.dtype, moved.lengths.dtype) == (torch.int64, torch.int32)
    assert AttentionContext().to(torch.device("meta")).documents is None


# Compiled and recomputed --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("in_all_types")
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_block_is_not_compiled_anew_for_other_documents_or_layers(
    packed: bool, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "varlen_kernel", lambda *_: VARLEN if packed else None)
    torch._dynamo.reset()
    model: Any = small_llama(num_hidden_layers=3)
    plain = copy.deepcopy(model)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.forward = torch.compile(checkpoint_block(layer.forward, recompute), backend=counter)
    positions = torch.arange(12)
    for step in range(3):
        tokens = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(step))
        documents = torch.stack([positions >= step + 3, positions * 5**step // 12])
        batch = Batch.of((tokens, positions.expand(2, 12), documents), tokens).with_context()
        inputs = batch.to(CPU, torch.float32).inputs
        loss = model(*inputs).square().sum()
        loss.backward()
        assert (inputs[2].mask is None) is packed
        expected = plain(tokens, None, documents).square().sum()
        expected.backward()
        torch.testing.assert_close(loss, expected)
        assert counter.frame_count == 1, "of all layers and steps"
    for compiled, known in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(compiled.grad, known.grad)


@pytest.mark.usefixtures("in_all_types")
@pytest.mark.parametrize(("recompute", "forwards"), [("none", 1), ("full", 2), ("selective", 1)])
def test_selective_recomputation_keeps_packed_attention(
    recompute: str, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(varlen_on_cpu, "called", lambda: calls.append(None))
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    context = AttentionContext(documents, cumulative_lengths(documents), VARLEN)
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    checkpoint_block(lambda x: attention(x.sin(), x, x, context).cos(), recompute)(
        x
    ).sum().backward()
    assert len(calls) == forwards


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_layers_with_all_options_are_not_compiled_anew(masked: bool, recompute: str) -> None:
    torch.manual_seed(0)
    sinks, table = torch.randn(2, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    dropout = Dropout(0.3, heads=2)

    def layers(x: Tensor, context: AttentionContext) -> Tensor:
        near = attention(x, x, x, context, window=3, scale=0.2)
        far = attention(near, x, x, context, soft_cap=2.0)
        drained = attention(far, x, x, context, sinks=sinks, window=4)
        drained = attention(drained, x, x, context, sinks=sinks)
        return attention(drained, x, x, context, bias=learned(table), dropout=dropout)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    forward = checkpoint_block(layers, recompute)
    compiled = torch.compile(forward, backend=counter, fullgraph=True)
    for cut in (2, 5, 7):
        set_dropout(nn.ModuleList([dropout]), seed=0, step=cut, samples=range(2))
        documents = (torch.arange(9) >= cut).long().expand(2, 9) if masked else None
        x = torch.randn(2, 2, 9, 4, dtype=torch.float64, requires_grad=True)
        context = AttentionContext.of(documents)
        y = compiled(compiled(x, context), context)
        torch.testing.assert_close(y, layers(layers(x, context), context))
        y.sum().backward()
    assert counter.frame_count == 1


# On a GPU -----------------------------------------------------------------------------------------


def on_gpu(documents: Tensor, packed: bool, dtype: torch.dtype) -> AttentionContext:
    if not packed:
        return AttentionContext.of(documents.cuda())
    context = AttentionContext(documents, cumulative_lengths(documents)).to(
        torch.device("cuda"), dtype
    )
    if context.kernel is None:
        pytest.skip("this GPU has no attention of variable length")
    return context


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "dtype", "limit"),
    [
        ("whole", torch.float32, 8 * 4),
        ("masked", torch.float32, 8 * 4),
        ("masked", torch.bfloat16, 8 * 2),
        ("packed", torch.bfloat16, 1),
    ],
)
def test_no_scores_of_all_tokens_are_held_on_a_gpu(
    form: str, dtype: torch.dtype, limit: int
) -> None:
    """`limit`: bytes for each pair of tokens, those of the scores of 8 heads; packed documents have
    no mask either."""
    s = 16384
    documents = (torch.arange(s) // 1500).expand(1, s)
    context = None if form == "whole" else on_gpu(documents, form == "packed", dtype)
    q, k, v = (
        torch.randn(1, heads, s, 64, dtype=dtype, device="cuda", requires_grad=True)
        for heads in (8, 2, 2)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, context).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < limit * s * s


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("heads", "widths"), [((8, 8), (64, 64)), ((8, 2), (128, 128)), ((4, 4), (192, 128))]
)
def test_on_a_gpu_documents_laid_end_to_end_give_what_the_mask_gives(
    heads: tuple[int, int], widths: tuple[int, int], window: int | None, has_sinks: bool
) -> None:
    b, s, dtype = 2, 1000, torch.bfloat16
    torch.manual_seed(0)
    documents = (torch.rand(b, s) < 0.01).long().cumsum(1)
    shapes = [
        (heads[0], widths[0]),
        (heads[1], widths[0]),
        (heads[1], widths[1]),
        (heads[0], widths[1]),
    ]
    *qkv, direction = (torch.randn(b, h, s, e, dtype=dtype, device="cuda") for h, e in shapes)
    drawn = torch.randn(heads[0], dtype=dtype, device="cuda")
    results = []
    for packed, wide in ((True, dtype), (False, torch.float64)):
        inputs = [x.to(wide).requires_grad_() for x in qkv]
        sinks = None
        if has_sinks:
            sinks = drawn.to(wide).requires_grad_()
            inputs.append(sinks)
        context = on_gpu(documents, packed, dtype)
        y = attention(*inputs[:3], context, window=window, sinks=sinks)
        results.append([y, *torch.autograd.grad(y, inputs, direction.to(wide))])
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() <= 1e-2 * expected.norm()
