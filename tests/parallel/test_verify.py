"""A model that is split over `tp` is compared with the plain one before its first step."""

import gc
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import meshtrain
from meshtrain.dropout import Dropout, set_dropout
from meshtrain.errors import AgreedError, InputError
from meshtrain.experts import Experts, Router
from meshtrain.job.locate import model_file
from meshtrain.job.process import Job
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.parallel import tensor_parallel
from meshtrain.parallel.options import ParallelOptions
from meshtrain.parallel.sharding import local_part
from meshtrain.parallel.torch_private import to_local
from meshtrain.parallel.verify import checks, compares
from meshtrain.parallel.verify.comparison import Plain, Verdict
from meshtrain.parallel.verify.recording import Recording
from tests.comparing import B, D, S, V, compare, llama, same, small_llama, tokens, train
from tests.parity.experiments import MODELS as OWN_MODELS

pytestmark = [pytest.mark.ranks(2), pytest.mark.usefixtures("float64")]

TABLE = yaml.safe_load(Path(__file__).with_name("verified.yaml").read_text())
WHOLE = {"sequence_parallel": False}
AROUND = {"words": "embedding_rowwise_sequence", "head": "colwise_logits"}
MLP = {**AROUND, "inner.up": "colwise", "inner.down": "rowwise"}


class Around(nn.Module):
    """A model with one block around a given part."""

    def __init__(
        self, inner: nn.Module, finish: Callable[[Tensor], Any] = lambda logits: logits
    ) -> None:
        super().__init__()
        self.words, self.norm, self.inner = nn.Embedding(V, D), nn.RMSNorm(D), inner
        self.head = nn.Linear(D, V, bias=False)
        self.finish = finish

    def forward(self, inputs: Tensor) -> Any:
        x = self.words(inputs)
        return self.finish(self.head(x + self.inner(self.norm(x))))


class Attention(nn.Module):
    """Attention with a norm per head of q and k, of at most so many tokens. `seen`: what keys and
    values read."""

    def __init__(self, most: int = 1000, seen: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(5), nn.RMSNorm(5)
        self.most, self.seen = most, seen

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] <= self.most
        seen = self.seen(x)
        q, k, v = (
            y.unflatten(-1, (-1, 5)).transpose(1, 2)
            for y in (self.q(x), self.k(seen), self.v(seen))
        )
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Applies a function between the column-wise and the row-wise layer, of `width` features."""

    def __init__(self, between: Callable[["Mlp", Tensor], Tensor], width: int = 4 * D) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(width, D)
        self.scale = nn.Parameter(torch.ones(width))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.between(self, self.up(x))))


def two_in_one(_: Mlp, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class Mixture(nn.Module):
    """A layer of experts; `centred`: tokens are routed by their difference from the mean of their
    sample."""

    def __init__(self, centred: bool, width: int = 4) -> None:
        super().__init__()
        self.gate, self.experts, self.centred = Router(D, 5, 2), Experts(5, D, width), centred

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x - x.mean(1, keepdim=True) if self.centred else x))


class Changing(nn.Module):
    """A block with a buffer, keyword arguments and several outputs, which modifies tensors in
    place."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 7), nn.Linear(7, D)
        self.register_buffer("table", torch.linspace(1, 2, number))

    def forward(self, x: Tensor, *, turns: Tensor) -> tuple[Tensor, None, dict[str, Tensor]]:
        y = self.down(F.gelu(self.up(self.norm(x))) * turns.imag.sum() * self.table.sum())
        y += x
        return y, None, {"half": y / 2}


class Unusual(nn.Module):
    """`Changing` blocks, one of them run twice, tied weights, complex numbers, and a parameter
    outside all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.head.weight = self.words.weight
        self.layers = nn.ModuleList(Changing(number) for number in (2, 3))
        self.scale = nn.Parameter(torch.ones(D))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))

    def blocks(self) -> list[nn.Module]:
        return [self.words, *self.layers, self.head]

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.words(inputs) * self.scale
        for layer in [*self.layers, self.layers[0]]:
            y, _, more = layer(x, turns=self.turns)
            x = x + y
            x += more["half"]
        return self.head(x)


def frozen() -> nn.Module:
    model: Any = small_llama()
    model.model.layers.requires_grad_(False)
    return model


def mixing(learned_positions: int) -> nn.Module:
    file = model_file(str(OWN_MODELS / "mixing.py"))
    return file.Model(file.Config(vocab_size=V, hidden_size=D, learned_positions=learned_positions))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "norms of heads": lambda: Around(Attention()),
    "keys of another tensor": lambda: Around(Attention(seen=torch.tanh)),
    "16 tokens at most": lambda: Around(Attention(most=16)),
    "classes": lambda: Around(Attention(), lambda logits: logits.mean(1)),
    "logits that are cut": lambda: Around(
        Attention(), lambda y: torch.cat([y[..., :1], y[..., 1:]], -1)
    ),
    "an object around logits": lambda: Around(Attention(), lambda y: SimpleNamespace(logits=y)),
    "unusual": Unusual,
    "frozen layers": frozen,
    "a norm over all features": lambda: Around(Mlp(lambda _, x: F.rms_norm(x, x.shape[-1:]))),
    "a scale for each feature": lambda: Around(Mlp(lambda layer, x: x * layer.scale)),
    "two matrices in one": lambda: Around(Mlp(two_in_one, width=2 * D)),
    "a mean in training": lambda: Around(
        Mlp(lambda layer, x: x - x.mean(-1, keepdim=True) * layer.training)
    ),
    "a batch norm": lambda: nn.Sequential(nn.Embedding(V, D), nn.BatchNorm1d(D), nn.Linear(D, V)),
    "mixing": lambda: mixing(learned_positions=0),
    "mixing by places": lambda: mixing(learned_positions=16),
    "experts": lambda: Around(Mixture(centred=False)),
    "experts for differences": lambda: Around(Mixture(centred=True)),
    "wide experts for differences": lambda: Around(Mixture(centred=True, width=4096)),
}


def losses_of_any(model: nn.Module, data_rank: int, microbatch: int) -> Tensor:
    inputs = tokens()
    output = model(inputs)
    logits = getattr(output, "logits", output)
    return sample_losses(logits, inputs if logits.dim() == 3 else inputs[:, 0])


@pytest.mark.parametrize(("name", "options"), TABLE["same"])
def test_models_that_compute_the_same_are_accepted(
    tp: Mesh, name: str, options: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    compare(MODELS[name], tp, losses_of_any, **{"verify": True, **options})
    assert not [warning for warning in recwarn if "compared" in str(warning.message)]


@pytest.mark.parametrize(("name", "options", "words"), TABLE["different"])
def test_models_that_compute_something_else_are_refused(
    tp: Mesh, name: str, options: dict[str, Any], words: list[str]
) -> None:
    torch.manual_seed(0)
    with pytest.raises(AgreedError) as refusal:
        meshtrain.parallelize(MODELS[name](), tp, precision="float64", **options)
    for word in words:
        assert word in str(refusal.value)


def with_positions(name: str) -> dict[str, Any]:
    """A sample for the models that take positions."""
    return (
        {"sample": (tokens()[:, :8], torch.arange(8).expand(2, 8))}
        if name.startswith("mixing")
        else {}
    )


@pytest.mark.parametrize(("name", "options", "problem"), TABLE["whole"])
def test_sequence_parallelism_that_was_not_asked_for_is_off_where_it_computes_something_else(
    tp: Mesh, name: str, options: dict[str, Any], problem: str, recwarn: pytest.WarningsRecorder
) -> None:
    def losses(model: nn.Module, data_rank: int, microbatch: int) -> Tensor:
        inputs = (
            (tokens(), torch.arange(S).expand(B, S)) if name.startswith("mixing") else (tokens(),)
        )
        logits = model(*inputs)
        return sample_losses(logits, tokens() if logits.dim() == 3 else tokens()[:, 0])

    options = {**options, **with_positions(name)}
    compare(MODELS[name], tp, losses, **options)
    said = [
        str(warning.message)
        for warning in recwarn
        if "sequence_parallel is off" in str(warning.message)
    ]
    assert len(said) == (tp.rank == 0)
    assert all(problem in text for text in said)
    with pytest.raises(AgreedError, match="sequence_parallel: false, which passes"):
        meshtrain.parallelize(
            MODELS[name](), tp, precision="float64", sequence_parallel=True, **options
        )


def norms_before(layer: "Beside", x: Tensor) -> Tensor:
    y = layer.down(F.gelu(layer.up(layer.norm1(x))))
    return x + y + layer.down(F.gelu(layer.up(layer.norm2(x) * (1 + layer.scale))))


def norm_between(layer: "Beside", x: Tensor) -> Tensor:
    """Of a tensor into which a part of the features was written."""
    parts = layer.up(x).unflatten(-1, (-1, 2))
    written = torch.empty_like(parts)
    written[..., 0] = parts[..., 1]
    written[..., 1] = parts[..., 0]
    return layer.down((written * (1 + layer.scale[:2])).flatten(-2))


def reads_values(layer: "Beside", x: Tensor) -> Tensor:
    return norms_before(layer, x) if float(x.sum()) > 0 else norms_before(layer, x) * 2


class Beside(nn.Module):
    """Norms and a scale in one module with a column-wise and a row-wise layer."""

    def __init__(self, function: Callable[["Beside", Tensor], Tensor]) -> None:
        super().__init__()
        self.norm1, self.norm2, self.function = nn.LayerNorm(D), nn.RMSNorm(D), function
        self.scale = nn.Parameter(torch.zeros(D))
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


PLAIN_MLP: dict[str, Any] = {"tp_plan": MLP, "verify": False, **WHOLE}


def test_norms_beside_split_layers_need_no_check_and_no_word(tp: Mesh) -> None:
    """As those of a pre-norm block, which are in one module with the layers."""
    compare(lambda: Around(Beside(norms_before)), tp, losses_of_any, **PLAIN_MLP)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            norm_between,
            r"^inner.scale: they lie between .* have to be summed: give them the style "
            r"replicated_with",
        ),
        (
            reads_values,
            r"inner.scale, .*: whether they lie between .* \(verify is off\), .* or replicate if "
            r"not$",
        ),
    ],
)
def test_parameters_that_may_lie_between_split_layers_are_named(
    tp: Mesh, function: Any, words: str
) -> None:
    with pytest.raises(AgreedError, match=words):
        meshtrain.parallelize(Around(Beside(function)), tp, precision="float64", **PLAIN_MLP)


class FewKeys(nn.Module):
    """Attention with one head of keys and values for two of queries. `head_dim`: whether it says
    how wide one is."""

    def __init__(self, head_dim: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, n) for n in (D, D // 2, D // 2, D))
        if head_dim:
            self.head_dim = D // 2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, D // 2)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


def test_the_width_of_a_head_is_asked_for_where_a_split_cuts_heads(tp: Mesh) -> None:
    plan = {**AROUND, "inner.[qkv]": "colwise", "inner.o": "rowwise"}
    compare(lambda: Around(FewKeys(head_dim=True)), tp, tp_plan=plan)
    with pytest.raises(
        AgreedError, match="If inner is attention, set its attribute head_dim, by which heads stay"
    ):
        meshtrain.parallelize(
            Around(FewKeys(head_dim=False)), tp, precision="float64", tp_plan=plan
        )


@pytest.mark.parametrize(
    "draw",
    [lambda x: F.dropout(x, 0.1), lambda x: x * random.random(), lambda x: x * np.random.rand()],
)
def test_random_numbers_of_a_model_are_the_same_in_the_check(
    tp: Mesh, draw: Callable[[Tensor], Tensor]
) -> None:
    state = random.getstate()
    model = Around(Mlp(lambda layer, x: draw(x) if layer.training else x))
    meshtrain.parallelize(model, tp, precision="float64", tp_plan=MLP)
    assert random.getstate() == state


def test_experts_that_are_dealt_out(tp: Mesh) -> None:
    mesh = build_mesh(tp.layout.with_experts(tp.size("tp")))
    ep_plan = {"inner.experts": "ep_dispatch_experts"}
    for options in ({}, WHOLE):
        compare(MODELS["experts"], mesh, tp_plan=AROUND, ep_plan=ep_plan, **options)
    with pytest.raises(InputError, match="has no ep_plan"):
        meshtrain.parallelize(MODELS["experts"](), mesh, tp_plan=AROUND)


class Rows(nn.Sequential):
    """Of features without a sequence dim."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        return super().forward(x)


def test_nothing_splits_the_sequence(tp: Mesh, recwarn: pytest.WarningsRecorder) -> None:
    def split(kind: type[nn.Sequential] = nn.Sequential, **options: Any) -> list[str]:
        """The warnings, which rank 0 alone gives."""
        recwarn.clear()
        model = kind(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        meshtrain.parallelize(model, tp, tp_plan={"0": "colwise", "2": "rowwise"}, **options)
        return [str(warning.message) for warning in recwarn]

    assert sum("sequence_parallel is off" in warning for warning in split()) == (tp.rank == 0)
    assert split(**WHOLE, sample=(torch.randn(2, D),)) == []
    assert sum("was not compared" in warning for warning in split(Rows, **WHOLE)) == (tp.rank == 0)
    with pytest.raises(InputError, match="no embedding_rowwise_sequence layer"):
        split(sequence_parallel=True)
    with pytest.raises(InputError, match="the plain model does not take"):
        split(**WHOLE, sample=(torch.randn(2, D + 1),))


def test_dropout_of_one_token_per_rank_is_refused(tp: Mesh) -> None:
    model = nn.Sequential(nn.Embedding(V, D), Dropout(0.5), nn.Linear(D, V))
    meshtrain.parallelize(
        model, tp, tp_plan={"0": "embedding_rowwise_sequence", "2": "colwise_logits"}
    )
    set_dropout(model, seed=0, step=1, samples=range(B))
    single, two = (torch.zeros(B, n * tp.size("tp"), dtype=torch.int64) for n in (1, 2))
    with pytest.raises(InputError, match="each rank has one"):
        model(single)
    model(two)
    model.eval()(single)


def test_one_wrong_rank_suffices_and_the_others_are_told(
    tp: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = tensor_parallel.RowParallelLinear.forward
    wrong = 1 + 0.01 * tp.rank
    monkeypatch.setattr(
        tensor_parallel.RowParallelLinear, "forward", lambda layer, x: forward(layer, x) * wrong
    )
    with pytest.raises(InputError, match=r"model\.layers\.0: output 0 differs by 0\.0"):
        meshtrain.parallelize(small_llama(), tp, verify=True)


def test_the_check_leaves_all_alone(tp: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no generator and no weight; identical blocks run once in each of the two
    models."""
    calls: list[int] = []
    forward = llama.Layer.forward

    def count(*inputs: Any) -> Tensor:
        calls.append(1)
        return forward(*inputs)

    def runs_of_checks() -> int:
        return sum(isinstance(thing, Recording) for thing in gc.get_objects())

    monkeypatch.setattr(llama.Layer, "forward", count)
    plain = small_llama(num_hidden_layers=6)
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    state = torch.get_rng_state()
    gc.collect()
    gc.disable()
    runs = runs_of_checks()
    model = meshtrain.parallelize(plain, tp, precision="float64", verify=True)
    runs_that_are_held = runs_of_checks() - runs
    gc.enable()
    assert runs_that_are_held == 0
    assert len(calls) == 2
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.named_parameters():
        same(to_local(value), weights[name][local_part(value)[1]], name)
        assert value.grad is None


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if memory is None:
            return self.q(x) + self.k(x * 2) + self.v(x * 3)
        return self.q(x) + self.k(memory) + self.v(memory)


def test_products_of_layers_that_may_share_an_input(tp: Mesh, products: list[int]) -> None:
    """One for each layer if they read two tensors; nothing is kept, nor by a forward without
    gradients."""

    def products_of(*inputs: Tensor) -> int:
        products.clear()
        model(*inputs)
        return len(products)

    options = {"tp_plan": {"[qkv]": "colwise"}, "verify": False, **WHOLE}
    model: Any = meshtrain.parallelize(Three(), tp, precision="float64", **options)
    x, memory = torch.randn(2, 1, 4, D)
    assert products_of(x, memory) == 3
    assert products_of(x) == 5, "the first layer computes for all three"
    assert products_of(x, x) == 3
    shared = model.q.shared_input
    with torch.no_grad():
        shared.begin([x])
        model.q(x)
        shared.end()
    assert model.k(x).requires_grad
    assert not shared._outputs
    assert shared._input is None


def test_uneven_heads_make_no_tensor_from_host_data(
    tp: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would synchronize."""
    model: Any = meshtrain.parallelize(
        small_llama(num_attention_heads=12, num_key_value_heads=3), tp
    )
    layer = model.model.layers[0].self_attn.k_proj
    assert layer.heads.repeated is not None
    x = torch.randn(1, 4, 24, dtype=torch.float32)
    monkeypatch.setattr(
        torch, "tensor", lambda *_, **named: pytest.fail("a tensor is made from numbers")
    )
    layer(x)


def test_a_run_says_that_nothing_splits_the_sequence(
    job: Job, shared_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_dtype(torch.float32)
    train(
        job,
        shared_path / "run",
        "layout={tp: 2}",
        f"model.name={OWN_MODELS / 'whole_sequence.py'}",
        "train.steps=1",
    )
    off = "parallel.sequence_parallel is off: the tp_plan has no embedding_rowwise_sequence layer"
    assert capsys.readouterr().out.count(off) == (job.rank == 0)


def test_only_models_from_elsewhere_are_compared_unless_it_is_asked_for(tp: Mesh) -> None:
    own, elsewhere, derived = small_llama(), small_llama(), small_llama()
    elsewhere.model.layers[0].mlp = Mlp(lambda _, x: x)
    derived.__class__ = type("Derived", (llama.Model,), {"__module__": __name__})
    answers = {True: (True,) * 4, False: (False,) * 4, "auto": (False, True, True, True)}
    for verify, expected in answers.items():
        options = ParallelOptions(verify=verify)  # type: ignore[arg-type]
        models = (own, elsewhere, derived, Around(Attention()))
        assert tuple(compares(model, options) for model in models) == expected
    assert compares(own, ParallelOptions(tp_plan={})), "a plan that no parity test knows"
    assert not compares(elsewhere, ParallelOptions(trace=True)), "nothing has values"
    parallel = meshtrain.parallelize(small_llama(), tp, precision="bfloat16", recompute="full")
    assert not compares(parallel, ParallelOptions())


def test_a_model_of_meshtrains_own_is_split_without_a_comparison(
    tp: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Plain] = []

    def compare_split(plain: Plain, *unused: Any, **named: Any) -> Verdict:
        asked.append(plain)
        return Verdict(None, None)

    monkeypatch.setattr(checks, "compare_split", compare_split)
    meshtrain.parallelize(small_llama(), tp)
    meshtrain.parallelize(small_llama(), tp, **WHOLE)
    assert asked == []
    meshtrain.parallelize(small_llama(), tp, verify=True)
    meshtrain.parallelize(Around(Mlp(lambda _, x: x)), tp, tp_plan=MLP)
    assert len(asked) == 2
