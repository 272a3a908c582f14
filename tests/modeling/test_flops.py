"""The arithmetic of a model against closed forms, and the hardware's peak by name."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from meshtrain.attention import AttentionContext, attention, document_mask, sliding_window
from meshtrain.dropout import Dropout
from meshtrain.job.locate import model_file
from meshtrain.modeling.flops import (
    Causal,
    CausalCalls,
    causal_flops,
    mfu,
    peak_flops,
    readable,
    sample_flops,
    table_flops,
    visible_pairs,
)
from meshtrain.run.step_logger import StepLogger

CPU = torch.device("cpu")


def counted(model: nn.Module, *inputs: Tensor | None) -> tuple[int, CausalCalls]:
    calls = CausalCalls()
    flops, message = sample_flops(model, inputs, calls)
    assert flops is not None, message
    assert f"model {readable(flops)}FLOP per sample" in message
    return flops, calls


def on_meta(name: str, **keys: Any) -> Any:
    module = model_file(name)
    with torch.device("meta"):
        return module.Model(module.Config(**keys))


def products(model: nn.Module) -> int:
    """Of a token, with all weights of linear layers: 2 in forward and 4 in backward."""
    return 6 * sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    )


# Whole models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_decoder_is_6n_plus_12_l_d_s(batch: int, documents: bool) -> None:
    """Per token, and 6 N + 6 L d (s + 1) where only the s (s + 1) / 2 pairs count that see each
    other."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = on_meta(
        "llama",
        **sizes,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=70,
        tie_word_embeddings=True,
    )
    tokens = torch.zeros(batch, 40, dtype=torch.int64)
    flops, calls = counted(
        model, tokens, torch.arange(40).expand(batch, 40), tokens if documents else None
    )
    width = 2 * 4 * 32  # of all heads of all layers
    assert flops == 40 * (products(model) + 12 * width * 40)
    assert causal_flops(flops, calls.flops, 3, None) == 3 * 40 * (products(model) + 6 * width * 41)


def test_per_token_of_8192() -> None:
    model = on_meta("llama", **model_file("llama").presets["llama-3.2-1b"])
    assert counted(model, torch.zeros(1, 8192, dtype=torch.int64))[0] / 8192 == pytest.approx(
        10.636e9, rel=1e-4
    )


def test_a_classifier() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10)
    )
    flops, _ = counted(model, torch.zeros(5, 3, 16, 16))
    convolution, linear = 2 * 8 * 3 * 9 * 16 * 16, 2 * 8 * 16 * 16 * 10
    assert flops == 2 * convolution + 3 * linear  # the images need no gradient


def test_the_model_is_left_as_it_was() -> None:
    """And is counted in its own precision, whatever mode the caller is in."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        assert counted(model, torch.rand(3, 4))[0] == 4 * 4 * 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None and value.device == CPU for value in model.parameters())


def test_frozen_weights_need_no_gradient() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False).requires_grad_(False), nn.Linear(4, 4, bias=False)
    )
    assert counted(model, torch.zeros(1, 4))[0] == (1 + 2) * 2 * 16


def test_a_model_that_looks_at_values_is_said_not_to_be_counted() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    flops, message = sample_flops(Looks(4, 4), (torch.ones(1, 4),))
    assert flops is None
    assert "no MFU" in message
    assert "item" in message


# Attention ----------------------------------------------------------------------------------------


EACH_TRAINED = [each for each in itertools.product([False, True], repeat=3) if any(each)]


def zero(queries: Tensor, keys: Tensor) -> Tensor:
    return 0.0 * (queries[:, None, :, None] - keys[:, None, None])


@pytest.mark.parametrize(
    ("trained", "options"),
    [
        *itertools.product(
            EACH_TRAINED,
            [
                {},
                {"soft_cap": 2.0},
                {"window": 3},
                {"bias": zero},
                {"dropout": Dropout(0.1, heads=4)},
            ],
        ),
        # The operator has one backward for all of them.
        *itertools.product(
            [(True, True, True)],
            [{"sinks": torch.zeros(4)}, {"sinks": torch.zeros(4), "window": 3}],
        ),
    ],
)
def test_all_flops_of_attention_are_told_from_the_rest(
    trained: tuple[bool, ...], options: dict[str, Any]
) -> None:
    class Only(nn.Module):
        """Nothing but attention, of 4 heads of width 6 over 2 of values of width 5, for 3
        samples."""

        def __init__(self) -> None:
            super().__init__()
            shapes = (3, 4, 7, 6), (3, 2, 7, 6), (3, 2, 7, 5)
            self.q, self.k, self.v = (
                nn.Parameter(torch.zeros(shape), x)
                for shape, x in zip(shapes, trained, strict=False)
            )

        def forward(self, tokens: Tensor) -> Tensor:
            on_meta = {
                name: x.to("meta") if isinstance(x, Tensor) else x for name, x in options.items()
            }
            return attention(self.q, self.k, self.v, AttentionContext.of(tokens), **on_meta)

    flops, calls = counted(Only(), torch.zeros(3, 7, dtype=torch.int64))
    call = Causal(7, options.get("window"), True)
    assert calls.flops.keys() == {call}
    assert flops == calls.flops[call] * 7 * 7


class Torchs(nn.Linear):
    """Torch's own attention of one head."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q = super().forward(x)[:, None]
        return F.scaled_dot_product_attention(q, q, value=q, **options)


class TorchsCausal(Torchs):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, is_causal=True)


class TorchsWithMask(Torchs):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, attn_mask=x)


def test_torchs_own_causal_attention_counts_as_half_and_any_other_in_full() -> None:
    flops, calls = counted(TorchsCausal(32, 32), torch.zeros(2, 24, 32))
    assert calls.flops == {Causal(24, None, False): 12 * 32}
    for documents in (None, np.array([12, 12])):  # it knows nothing of documents
        assert causal_flops(flops, calls.flops, 1, documents) == flops - 12 * 32 * (
            24 * 24 - 24 * 25 // 2
        )
    for other in (Torchs, TorchsWithMask):
        assert not counted(other(4, 4), torch.zeros(1, 4, 4))[1].flops


def test_a_model_that_calls_attention_of_variable_length_is_counted_in_full() -> None:
    class Packed(nn.Linear):
        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            q = super().forward(x).flatten(0, 1).unflatten(1, (2, 8))
            return varlen_attn(q, q, q, ends, ends, 12, 12, window_size=(-1, 0))

    flops, _ = counted(
        Packed(16, 16, bias=False), torch.zeros(3, 12, 16), torch.zeros(9, dtype=torch.int32)
    )
    assert flops == 12 * (4 * 16 * 16 + 12 * 16 * 12)  # of the inputs no gradient is made


@pytest.mark.parametrize("window", [None, 1, 4, 30, 50])
def test_visible_pairs_are_those_of_the_masks(window: int | None) -> None:
    torch.manual_seed(0)
    documents = (torch.rand(20, 30) < 0.2).long().cumsum(1)
    lengths = np.concatenate(
        [row.unique_consecutive(return_counts=True)[1].numpy() for row in documents]
    )
    mask = document_mask(documents)
    if window is not None:
        mask = mask & sliding_window(30, window, CPU)
    assert visible_pairs(lengths, window) == int(mask.sum())


@pytest.mark.parametrize(
    ("lengths", "expected"), [([2, 6, 8], 2000 - 10 * (2 * 64 - 3 - 21 - 36)), (None, None)]
)
def test_a_step_counts_the_documents_of_its_samples(
    lengths: list[int] | None, expected: int | None
) -> None:
    """If they are not known, neither is the count."""
    calls = CausalCalls()
    calls.flops[Causal(8, None, True)] = 10
    known = {(3, 4): None if lengths is None else np.array(lengths)}
    train = SimpleNamespace(document_lengths=lambda samples: known[tuple(samples)])
    logger: Any = SimpleNamespace(
        _flops=1000,
        _causal=calls,
        _packed=True,
        _items=lambda step: [(0, step), (0, 4)],
        data=SimpleNamespace(train=train),
        config=SimpleNamespace(data=SimpleNamespace(seq_len=8)),
        _counted=8,
    )
    assert StepLogger._causal_flops(logger, 3) == expected
    logger._flops = None
    assert StepLogger._causal_flops(logger, 3) is None


# The hardware -------------------------------------------------------------------------------------


def test_the_table_knows_torchs_names() -> None:
    rows = yaml.safe_load((Path(__file__).parent / "peaks.yaml").read_text())
    peaks = [table_flops(name, precision) for name, precision, _ in rows]
    assert peaks == [None if tera is None else pytest.approx(tera * 1e12) for _, _, tera in rows]


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16", "float16"])
def test_a_cpu_is_measured_in_the_runs_precision(precision: str) -> None:
    state = torch.get_rng_state()
    peak, message = peak_flops(CPU, precision)
    assert 1e6 < peak < 1e14
    assert torch.equal(state, torch.get_rng_state())  # the run's random numbers are not touched
    assert message.startswith(f"peak {readable(peak)}FLOP/s, measured on this CPU by a ")
    assert f" {precision} matmul, {torch.get_num_threads()} thread" in message


def test_a_gpu_in_the_table_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    peak, message = peak_flops(torch.device("cuda", 0), "bfloat16")
    assert peak == pytest.approx(989e12)
    assert message == "peak 989 TFLOP/s, table, NVIDIA H200 bfloat16"


def test_mfu_is_a_fraction_of_all_processes() -> None:
    assert mfu(600.0, 2.0, 100.0, 4) == pytest.approx(0.75)
    assert mfu(None, 2.0, 100.0, 4) is None


def test_readable() -> None:
    texts = {
        0: "0 ",
        999.4: "999 ",
        4200: "4.2 k",
        9.997e11: "1 T",
        9.999e10: "100 G",
        2.25e15: "2.25 P",
        4e18: "4000 P",
    }
    assert {number: readable(number) for number in texts} == texts
