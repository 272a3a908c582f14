"""Models on parts of sequences, in a loop of one's own and as a run makes them; and what is
refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo.utils import counters

import meshtrain
from meshtrain.attention import AttentionContext, attention
from meshtrain.config import Config
from meshtrain.data.batch import IGNORE, Batch
from meshtrain.errors import AgreedError, InputError
from meshtrain.experts import Experts
from meshtrain.generate import generate
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.loss import Field, GlobalCount, StepTerms, attach
from meshtrain.mesh import Mesh
from meshtrain.modeling.build import build_model, short_sample
from meshtrain.parallel.context import ContextParallel
from meshtrain.run.setup import context_parallel
from meshtrain.run.weights_export import export
from tests.comparing import CPU, V, llama, same, small_llama
from tests.parallel.sharded_attention import Mixer
from tests.parity.experiments import QUICKSTART, SMALL

B, S, D = 4, 22, 24  # 22 tokens do not divide over 4 chunks


def batch_of(step: int) -> Batch:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(V, (B, S + 1), generator=draw)
    documents = (torch.rand(B, S, generator=draw) < 0.2).cumsum(1)
    targets = tokens[:, 1:].masked_fill(torch.rand(B, S, generator=draw) < 0.3, IGNORE)
    return Batch.of((tokens[:, :-1], torch.arange(S).repeat(B, 1), documents), targets)


@pytest.fixture
def cp(job: Job) -> Mesh:
    """All ranks of the job on the axis `cp`."""
    return meshtrain.build_mesh(Layout({"cp": job.world_size}))


@pytest.mark.ranks(2)
def test_a_compiled_model_has_one_graph(
    cp: Mesh, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all layers and microbatches, whatever the documents. Without slow code generation."""
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition")
    )
    model = meshtrain.parallelize(
        small_llama(), cp, precision="float64", context="ring", compile=True
    )
    plain, context = small_llama().double(), ContextParallel(cp, method="ring")
    own = context.positions(S)
    real = own < S
    for batch in map(batch_of, range(3)):
        logits = model(*context.shard(batch).inputs)
        same(logits[:, real], plain(*batch.with_context().inputs)[:, own[real]])
        logits.sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


Built = tuple[nn.Module, Mesh, ContextParallel | None]


def build(layout: str, world: int, *overrides: str) -> Built:
    """A run's model with its initial weights, its mesh, and its context parallelism."""
    keys = [
        *SMALL,
        "train.precision=float64",
        "data.seq_len=22",
        "model.num_hidden_layers=2",
        *overrides,
    ]
    config = Config.load(QUICKSTART, [*keys, f"layout={layout}"], world_size=world)
    assert config.resolved is not None
    mesh = (
        meshtrain.build_mesh(config.resolved)
        if world > 1
        else Mesh(config.resolved, 0, "cpu", None, {})
    )
    return (
        build_model(config, mesh, CPU),
        mesh,
        context_parallel(config, mesh) if mesh.size("cp") > 1 else None,
    )


def text_of(model: nn.Module, mesh: Mesh, context: ContextParallel | None) -> list[int]:
    """A generated text, longer than the model's window."""
    return generate(model, [1, 2, 3], 2 * S, seq_len=S, device=CPU, seed=5, context=context)


class Text:
    """A data set of sequences of this length."""

    def __init__(self, length: int) -> None:
        self.train, self.tokens = self, torch.zeros(2, length, dtype=torch.int64)

    def __len__(self) -> int:
        return 2

    def read(self, items: list[tuple[int, int]], valid: int) -> Batch:
        return Batch.of((self.tokens, self.tokens, None), self.tokens)


@pytest.mark.parametrize(
    ("length", "cp", "tp", "experts", "expected"),
    [
        (110, 2, 1, False, 108),
        (4096, 2, 1, False, 128),
        (3, 2, 1, False, None),
        (110, 1, 4, False, 108),
        (3, 1, 4, False, 3),
        (110, 2, 1, True, 32),
    ],
)
def test_sample_of_a_run(
    length: int, cp: int, tp: int, experts: bool, expected: int | None
) -> None:
    """As long as its sequences, up to a limit, in whole parts; short for a model with experts."""
    model = nn.Sequential(Experts(2, 1, 1)) if experts else nn.Linear(1, 1)
    sample: Any = short_sample(cast(Any, Text(length)), model, cp, tp)
    assert (sample and sample[0].shape[1]) == expected


RUNS = [
    (2, "{cp: 2}", ()),
    (2, "{tp: 2}", ("parallel.sequence_parallel=false",)),
    (2, "{pp: 2}", ("pipeline.schedule=zbv",)),  # the last stage is on the first rank
    (4, "{cp: 2, tp: 2}", ("parallel.context_heads=2",)),
    (4, "{pp: 2, cp: 2}", ("pipeline.schedule=zbv", "parallel.context=ring")),
    (4, "{dp_shard: 2, cp: 2}", ("parallel.context_heads=2",)),
]


@pytest.mark.parametrize(
    ("job", "layout", "overrides"),
    RUNS,
    indirect=["job"],
    ids=[f"{world}-ranks-{name}" for world, name, _ in RUNS],
)
def test_text_of_a_run(job: Job, layout: str, overrides: tuple[str, ...]) -> None:
    expected = text_of(*build("{}", 1))
    assert text_of(*build(layout, job.world_size, *overrides)) == expected
    assert len(set(expected)) > 3, "the text is worth comparing"


@pytest.mark.ranks(4)
def test_weights_that_fsdp_shards_over_cp_are_written_whole(job: Job, shared_path: Path) -> None:
    model, mesh, _ = build("{dp_shard: 2, cp: 2}", job.world_size)
    export(model, shared_path / "weights", job, mesh, dtype=torch.float64)
    files = (shared_path / "weights").glob("*.safetensors")
    stored = {name: x for file in files for name, x in load_file(file).items()}
    plain = dict(build("{}", 1)[0].named_parameters())
    assert set(stored) == set(plain)
    for name, x in stored.items():
        assert torch.equal(x, plain[name]), name


# Refused ------------------------------------------------------------------------------------------


class Shift(llama.Layer):
    """Each token sees half of the features of the token before."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        return super().forward(torch.cat([x[..., : D // 2], before[..., D // 2 :]], -1), *others)


class Distant(llama.Layer):
    """Each token sees the one 40 tokens before."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x + F.pad(x, (0, 0, 40, 0))[:, : x.shape[1]], *others)


class Convolution(llama.Layer):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mix = nn.Conv1d(D, D, 3, groups=D)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(
            x + self.mix(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2), *others
        )


class OwnAttention(llama.Attention):
    """Attention without rotary angles, which does not call meshtrain's `attention`."""

    def forward(self, x: Tensor, rotary: Any, context: AttentionContext) -> Tensor:
        projections = self.q_proj, self.k_proj, self.v_proj
        heads = [
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in projections
        ]
        return self.o_proj(self.attend(*heads, context).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Twice(OwnAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        return attention(q, k, v, context) - 0.5 * attention(q.roll(1, 1), k, v, context)


class KeyBias(OwnAttention):
    """Without rotary angles, softmax is invariant to a bias of keys: the gradient of the bias is
    rounding only."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.k_proj = nn.Linear(D, self.k_proj.out_features)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        return attention(q, k, v, context)


class Gated(Mixer):
    def forward(self, x: Tensor, gate: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x * gate, context), gate.sin()


class Handing(nn.Module):
    """Its blocks pass on a vector over features: every rank has all of it, and a part of its
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gate, self.head = (
            nn.Embedding(V, D),
            nn.Parameter(torch.ones(D)),
            nn.Linear(D, V),
        )
        self.layers = nn.ModuleList(Gated() for _ in range(2))

    def blocks(self) -> list[nn.Module]:
        return [*self.layers]

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Any = None
    ) -> Tensor:
        x, gate = self.words(tokens), self.gate.exp()
        for layer in self.layers:
            x, gate = layer(x, gate, AttentionContext.of(documents))
        return self.head(x * gate)


def with_layers(kind: type[nn.Module]) -> Callable[[Any], nn.Module]:
    def make(config: Any) -> nn.Module:
        model = llama.Model(config)
        model.model.layers = nn.ModuleList(kind(config) for _ in model.model.layers)
        return model

    return make


def with_attention(kind: type[nn.Module]) -> Callable[[Any], nn.Module]:
    def make(config: Any) -> nn.Module:
        model = llama.Model(config)
        for layer in model.model.layers:
            layer.self_attn = kind(config)
        return model

    return make


class Between(llama.Model):
    """Mixes tokens between the blocks."""

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Any = None
    ) -> Tensor:
        logits = super().forward(tokens, positions, documents)
        return logits - logits.mean(1, keepdim=True)


class Counted(llama.Model):
    """Computes positions itself."""

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Any = None
    ) -> Tensor:
        return super().forward(tokens, None, documents)


class Pooled(llama.Model):
    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Any = None
    ) -> Tensor:
        return super().forward(tokens, positions, documents).mean(1)


class Normed(llama.Layer):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(D)


PLAN = llama.cp_plan
NARROW = {"model.layers.0.self_attn": "attention"}
LAYER_DIFFERS, OUTPUT_DIFFERS = "model.layers.0: output 0 differs by", "the model's output 0"
TWO_CALLS, ELSEWHERE = (
    "model.layers.0.self_attn calls attention 2 times",
    "attention is called elsewhere",
)
NO_PLAN = "Linear has no cp_plan, which says where it mixes tokens"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (with_layers(Shift), {}, LAYER_DIFFERS),
    (with_layers(Distant), {}, LAYER_DIFFERS),
    (with_layers(Convolution), {}, LAYER_DIFFERS),
    (with_attention(OwnAttention), {}, LAYER_DIFFERS),
    (with_attention(Twice), {}, TWO_CALLS),
    (Between, {}, f"{OUTPUT_DIFFERS} differs by"),
    (Counted, {}, LAYER_DIFFERS),
    (Pooled, {}, OUTPUT_DIFFERS),
    (with_layers(Normed), {}, "is a BatchNorm1d"),
    (llama.Model, {"cp_plan": {"layers.*": "attention"}}, "'layers.*' matches no module"),
    (llama.Model, {"cp_plan": NARROW}, ELSEWHERE),
    (
        llama.Model,
        {"cp_plan": {**PLAN, "model.layers.*.mlp": "attention"}},
        "mlp calls attention 0 times",
    ),
    (llama.Model, {"context_heads": 3}, "context_heads 3 does not divide layout.cp"),
    (lambda config: nn.Linear(3, 3), {"cp_plan": None}, NO_PLAN),
]
REFUSED_AT_ITS_FIRST_FORWARD = [
    (with_attention(Twice), PLAN, TWO_CALLS),
    (llama.Model, NARROW, ELSEWHERE),
]


def refused(sentence: str, action: Callable[[], Any]) -> None:
    with pytest.raises((AgreedError, InputError, ValueError)) as caught:
        action()
    assert sentence in str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "options", "sentence"), REFUSED)
def test_models_and_plans_that_are_refused(
    cp: Mesh, kind: Any, options: dict[str, Any], sentence: str
) -> None:
    refused(
        sentence,
        lambda: meshtrain.parallelize(small_llama(kind), cp, **{"cp_plan": PLAN, **options}),
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "plan", "sentence"), REFUSED_AT_ITS_FIRST_FORWARD)
def test_the_first_forward_of_what_was_not_verified(
    cp: Mesh, kind: Any, plan: dict[str, str], sentence: str
) -> None:
    part = ContextParallel(cp).shard(batch_of(0))
    model = meshtrain.parallelize(small_llama(kind), cp, cp_plan=plan, verify=False)
    refused(sentence, lambda: model(*part.inputs))


@pytest.mark.ranks(4)
def test_heads_that_the_mesh_was_not_built_for_are_refused(cp: Mesh) -> None:
    refused("build the mesh of layout.with_context_heads(2)", lambda: ContextParallel(cp, heads=2))


@pytest.mark.ranks(2)
def test_gradients_of_rounding_and_sums_over_ranks_are_taken(cp: Mesh) -> None:
    meshtrain.parallelize(small_llama(with_attention(KeyBias)), cp, cp_plan=PLAN)
    meshtrain.parallelize(Handing(), cp, cp_plan={"layers.?": "attention"})


@pytest.mark.ranks(2)
def test_after_the_first_forward_its_hooks_are_gone(cp: Mesh) -> None:
    part = ContextParallel(cp).shard(batch_of(0))
    verified = meshtrain.parallelize(small_llama(), cp, verify=True)
    model = meshtrain.parallelize(small_llama(), cp, verify=False, recompute="full")
    model(*part.inputs).sum().backward()
    assert torch.equal(model(*part.inputs), verified(*part.inputs))
    assert not any(m._forward_hooks for m in model.modules() if "Attention" in str(type(m)))


@pytest.mark.ranks(2)
def test_inputs_are_parts(cp: Mesh) -> None:
    model, whole, context = (
        meshtrain.parallelize(small_llama(), cp),
        batch_of(0),
        ContextParallel(cp),
    )
    part = context.shard(whole)
    refused("a rank's part already", lambda: context.shard(part))
    tokens, positions, documents = part.inputs
    for inputs in (
        whole.inputs,
        whole.with_context().inputs,
        whole.inputs[:1],
        (tokens, None, documents),
    ):
        refused("shard(batch)", lambda inputs=inputs: model(*inputs))
    by_name = model(tokens, positions=positions, documents=documents)
    assert torch.equal(by_name, model(*part.inputs))


@pytest.mark.ranks(2)
def test_a_term_has_a_number_for_each_token(cp: Mesh) -> None:
    terms = StepTerms(GlobalCount(1, cp, CPU))
    x = torch.ones(B, 12, 4, requires_grad=True)
    with terms.of_microbatch(B, B, torch.arange(12) < 9):
        refused(
            "a number for each of this rank's 12 tokens",
            lambda: attach(x, "pooled", x.mean((1, 2))),
        )
        attach(x, "each", x)
    assert terms.sums[Field("loss", "each")].tolist() == [B * 9 * 4]  # without padding
