"""The arithmetic of a model against closed forms, and the hardware's peak by name."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from meshtrain.attention import AttentionContext, attention, document_mask, sliding_window
from meshtrain.config.locate import model_file
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


class Block(nn.Module):
    def __init__(self, d: int, h: int, k: int) -> None:
        super().__init__()
        self.h, self.k = h, k
        self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.kv = nn.Linear(d, 2 * k * d // h, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * self.k, -1)).transpose(1, 2).chunk(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Tiny(nn.Module):
    def __init__(self, v: int, d: int, h: int, k: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(v, d)
        self.blocks = nn.Sequential(*(Block(d, h, k) for _ in range(blocks)))
        self.head = nn.Linear(d, v, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def closed_form(model: nn.Module, layers: int, heads_width: int, s: int) -> int:
    """Per sample: 6 per weight and token (2 forward, 4 backward), and 12 L d s per token for the attention (2 products
    of 2 d s each, three times)."""
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    return s * (6 * weights + 12 * layers * heads_width * s)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("k", [4, 2, 1])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_decoder_is_6n_plus_12_l_d_s(k: int, batch: int, device: str) -> None:
    with torch.device(device):
        model = Tiny(v=50, d=32, h=4, k=k, blocks=3)
    flops, said = sample_flops(model, (torch.zeros(batch, 24, dtype=torch.int64),))
    assert flops == closed_form(model, 3, 32, 24)
    assert readable(flops) in said


@pytest.mark.parametrize("documents", [False, True])
def test_the_projects_llama(documents: bool) -> None:
    llama = model_file("llama")
    keys = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = llama.Config(**keys, num_key_value_heads=2, head_dim=32, vocab_size=70, tie_word_embeddings=True)
    with torch.device("meta"):
        model = llama.Model(config)
    tokens = torch.zeros(2, 40, dtype=torch.int64)
    flops, _ = sample_flops(model, (tokens, torch.arange(40).expand(2, 40), tokens if documents else None))
    assert flops == closed_form(model, 2, 4 * 32, 40)


@pytest.mark.parametrize(
    ("preset", "full", "causal"),
    [("llama-3.2-1b", 10.636e9, 9.025e9), ("llama-3.1-8b", 57.9137e9, 51.4712e9)],
)
def test_per_token_of_8192_full_and_causal(preset: str, full: float, causal: float) -> None:
    """6 N + 12 L d s, and 6 N + 6 L d (s + 1) where only the s (s + 1) / 2 pairs count that see each other."""
    llama, s = model_file("llama"), 8192
    with torch.device("meta"):
        model = llama.Model(llama.Config(**llama.presets[preset]))
    calls = CausalCalls()
    flops, _ = sample_flops(model, (torch.zeros(1, s, dtype=torch.int64),), calls)
    assert flops is not None
    config = model.config
    layers, d = config.num_hidden_layers, config.hidden_size  # their heads are together as wide
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    assert flops == s * (6 * weights + 12 * layers * d * s)
    assert causal_flops(flops, calls.flops, 3, None) == 3 * s * (6 * weights + 6 * layers * d * (s + 1))
    assert flops / s == pytest.approx(full, rel=1e-4)
    assert causal_flops(flops, calls.flops, 1, None) / s == pytest.approx(causal, rel=1e-4)


TRAINED = [trained for trained in itertools.product([False, True], repeat=3) if any(trained)]


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0}, {"window": 3}])
def test_all_flops_of_attention_are_told_from_the_rest(trained: tuple[bool, ...], options: dict[str, float]) -> None:
    class Only(nn.Module):
        """Nothing but attention, of 4 heads of width 6 over 2 of values of width 5, for 3 samples."""

        def __init__(self) -> None:
            super().__init__()
            shapes = (3, 4, 7, 6), (3, 2, 7, 6), (3, 2, 7, 5)
            self.q, self.k, self.v = (nn.Parameter(torch.zeros(shape), x) for shape, x in zip(shapes, trained))  # noqa: B905

        def forward(self, tokens: Tensor) -> Tensor:
            return attention(self.q, self.k, self.v, AttentionContext.of(tokens), **options)

    calls = CausalCalls()
    flops, _ = sample_flops(Only(), (torch.zeros(3, 7, dtype=torch.int64),), calls)
    window = options.get("window")
    assert calls.flops.keys() == {Causal(7, window, True)}
    assert flops == calls.flops[Causal(7, window, True)] * 7 * 7


def test_torchs_own_causal_attention_counts_as_half_and_any_other_in_full() -> None:
    calls, tokens = CausalCalls(), torch.zeros(2, 24, dtype=torch.int64)
    flops, _ = sample_flops(Tiny(v=50, d=32, h=4, k=2, blocks=3), (tokens,), calls)
    assert flops is not None
    assert calls.flops == {Causal(24, None, False): 12 * 3 * 32}
    for documents in (None, np.array([12, 12])):  # it knows nothing of documents
        assert causal_flops(flops, calls.flops, 1, documents) == flops - 12 * 3 * 32 * (24 * 24 - 24 * 25 // 2)

    class Both(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            q = super().forward(x)[:, None]
            return F.scaled_dot_product_attention(q, q, q) + F.scaled_dot_product_attention(q, q, value=q, attn_mask=x)

    calls = CausalCalls()
    sample_flops(Both(4, 4), (torch.zeros(1, 4, 4),), calls)
    assert not calls.flops


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_pairs_of_packed_documents_count_in_models_with_experts_and_latent_attention(name: str) -> None:
    module = model_file(name)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    heads = latent if name == "deepseek_v3" else {"num_key_value_heads": 2, "head_dim": 12}
    with torch.device("meta"):
        model = module.Model(module.Config(**sizes, **heads))
    s, calls = 16, CausalCalls()
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    flops, _ = sample_flops(model, (torch.zeros(2, s, dtype=torch.int64), None, documents), calls)
    assert flops is not None
    width = 12 + (6 if name == "deepseek_v3" else 12)
    per_pair = 2 * 3 * 2 * 4 * width
    assert calls.flops == {Causal(s, None, True): per_pair}
    seen = int(document_mask(documents).sum())
    found = causal_flops(flops, calls.flops, 2, np.array([16, 5, 11]))
    assert found == 2 * flops - per_pair * (2 * s * s - seen)


def test_visible_pairs_are_those_of_the_masks() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        documents = (torch.rand(2, 30) < 0.2).long().cumsum(1)
        lengths = np.concatenate([row.unique_consecutive(return_counts=True)[1].numpy() for row in documents])
        for window in (None, 1, 4, 30, 50):
            mask = document_mask(documents)
            mask = mask if window is None else mask & sliding_window(30, window, CPU)
            assert visible_pairs(lengths, window) == int(mask.sum())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_a_step_counts_the_documents_of_its_samples(packed: bool, known: bool) -> None:
    calls = CausalCalls()
    calls.flops[Causal(8, None, packed)] = 10
    lengths = {3: [2, 6], 4: [8], 9: [8]}

    def lengths_of(indices: list[int]) -> np.ndarray | None:
        return np.concatenate([lengths[index] for index in indices]) if known and packed else None

    logger = SimpleNamespace(
        _flops=1000,
        _causal=calls,
        _packed=packed,
        _items=lambda step: [(0, step), (0, 4)],
        data=SimpleNamespace(train=SimpleNamespace(document_lengths=lengths_of)),
        config=SimpleNamespace(data=SimpleNamespace(seq_len=8)),
        _counted=8,
    )
    rows = {step: StepLogger._causal_flops(logger, step) for step in (3, 9)}  # type: ignore[arg-type]
    whole = 2000 - 10 * 2 * (64 - 36)
    cut = whole - 10 * 2 * 6
    assert rows == {3: (cut if known else None) if packed else whole, 9: whole if known or not packed else None}
    logger._flops = None
    assert StepLogger._causal_flops(logger, 3) is None  # type: ignore[arg-type]


def test_a_model_that_calls_attention_of_variable_length_is_counted_in_full() -> None:
    class Packed(nn.Linear):
        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            q = super().forward(x).flatten(0, 1).unflatten(1, (2, 8))
            y = varlen_attn(q, q, q, ends, ends, 12, 12, window_size=(-1, 0))
            assert isinstance(y, Tensor)
            return y

    flops, _ = sample_flops(Packed(16, 16, bias=False), (torch.zeros(3, 12, 16), torch.zeros(9, dtype=torch.int32)))
    assert flops == 12 * (4 * 16 * 16 + 12 * 16 * 12)  # of the inputs no gradient is made


def test_a_classifier() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10))
    flops, _ = sample_flops(model, (torch.zeros(5, 3, 16, 16),))
    convolution, linear = 2 * 8 * 3 * 9 * 16 * 16, 2 * 8 * 16 * 16 * 10
    assert flops == 2 * convolution + 3 * linear  # the images need no gradient


def test_in_the_precision_of_the_model() -> None:
    flops, _ = sample_flops(nn.Linear(8, 8, bias=False).double(), (torch.zeros(1, 8),))
    assert flops == 4 * 8 * 8


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():  # whatever mode the caller is in
        assert sample_flops(model, (torch.rand(3, 4),))[0] == 4 * 4 * 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None and value.device == CPU for value in model.parameters())


def test_frozen_weights_need_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False).requires_grad_(False), nn.Linear(4, 4, bias=False))
    assert sample_flops(model, (torch.zeros(1, 4),))[0] == (1 + 2) * 2 * 16


def test_a_model_that_looks_at_values_is_said_not_to_be_counted() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    flops, said = sample_flops(Looks(4, 4), (torch.ones(1, 4),))
    assert flops is None
    assert "no MFU" in said
    assert "item" in said


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-80GB", "float16", 312),
        ("NVIDIA A100-PCIE-40GB", "float32", 19.5),
        ("NVIDIA A100 80GB PCIe", "float64", 19.5),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835),
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA H200", "float32", 67),
        ("NVIDIA H20", "bfloat16", 148),
        ("NVIDIA GH200 480GB", "bfloat16", 989),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA L40", "bfloat16", 181),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L4", "float64", None),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA A30", "bfloat16", 165),
        ("NVIDIA A40", "bfloat16", 149.7),
        ("NVIDIA RTX A4000", "bfloat16", None),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-PCIE-32GB", "float16", 112),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla V100-SXM2-16GB", "float32", 15.7),
        ("Tesla T4", "float16", 65),
        ("Tesla T4", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("Some GPU of tomorrow", "bfloat16", None),
        ("", "float32", None),
    ],
)
def test_the_table_knows_torchs_names(name: str, precision: str, tera: float | None) -> None:
    assert table_flops(name, precision) == (None if tera is None else pytest.approx(tera * 1e12))


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16", "float16"])
def test_a_cpu_is_measured_in_the_runs_precision(precision: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    peak, said = peak_flops(CPU, precision)
    assert 1e6 < peak < 1e14
    assert torch.equal(state, torch.get_rng_state())  # the run's random numbers are not touched
    assert said.startswith(f"peak {readable(peak)}FLOP/s, measured on this CPU by a ")
    assert f" {precision} matmul, {torch.get_num_threads()} thread" in said


def test_a_gpu_in_the_table_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops(torch.device("cuda", 0), "bfloat16") == (
        pytest.approx(989e12),
        "peak 989 TFLOP/s, table, NVIDIA H200 bfloat16",
    )


def test_mfu_is_a_fraction_of_all_processes() -> None:
    assert mfu(600.0, 2.0, 100.0, 4) == pytest.approx(0.75)
    assert mfu(None, 2.0, 100.0, 4) is None


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 "), (12, "12 "), (999.4, "999 "), (4200, "4.2 k"), (6.1e10, "61 G"), (9.997e11, "1 T"), (9.89e14, "989 T"),
     (2.25e15, "2.25 P"), (1.2345e11, "123 G"), (9.999e10, "100 G"), (4e18, "4000 P")],
)  # fmt: skip
def test_readable(number: float, text: str) -> None:
    assert readable(number) == text
