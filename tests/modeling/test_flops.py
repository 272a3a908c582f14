"""The arithmetic of a model against closed forms, and the hardware's peak by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.config.locate import model_file
from meshtrain.modeling.flops import mfu, peak_flops, readable, sample_flops, table_flops

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
