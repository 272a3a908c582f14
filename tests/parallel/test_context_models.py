"""Models on parts of sequences, in a loop of one's own and as a run makes them; and what is refused."""

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
from meshtrain.dropout import set_dropout
from meshtrain.errors import AgreedError, InputError
from meshtrain.evaluate import evaluate
from meshtrain.experts import Experts
from meshtrain.generate import generate
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.loss import GlobalCount, StepTerms, attach, sample_losses, valid_targets
from meshtrain.mesh import Mesh
from meshtrain.modeling.build import build_model, short_sample
from meshtrain.optim import clip_gradients, param_groups
from meshtrain.parallel.context import ContextParallel
from meshtrain.run.setup import context_parallel
from meshtrain.run.weights_export import export
from tests.comparing import ALONE, CPU, llama, same
from tests.parallel.sharded_attention import Mixer
from tests.parity.experiments import QUICKSTART, SMALL

B, S, V, D, STEPS = 4, 22, 40, 24, 3  # 22 tokens do not divide over 4 chunks
SIZES = {
    "hidden_size": D, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": V,
}  # fmt: skip


def fresh(cls: type[nn.Module] = llama.Model, **keys: Any) -> nn.Module:
    """A new model, with the same weights at each call."""
    torch.manual_seed(0)
    return cls(llama.Config(**SIZES | keys))


def batch_of(step: int) -> Batch:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(V, (B, S + 1), generator=draw)
    documents = (torch.rand(B, S, generator=draw) < 0.2).cumsum(1)
    targets = tokens[:, 1:].masked_fill(torch.rand(B, S, generator=draw) < 0.3, IGNORE)
    return Batch.of((tokens[:, :-1], torch.arange(S).repeat(B, 1), documents), targets)


def train(mesh: Mesh | None, *, method: str = "gather", dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
    """Trains; returns loss and gradient norm of each step, (steps, 2). In one process if `mesh` is None."""
    model, one = fresh(hidden_dropout=0.1), mesh or ALONE
    context = ContextParallel(one, method=method, heads=one.layout.context_heads)
    if mesh is None:
        model = model.to(dtype)
    else:
        precision = str(dtype).removeprefix("torch.")
        model = meshtrain.parallelize(model, mesh, precision=precision, context=method, **options)
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)
    rows = []
    for step in range(STEPS):
        batch = context.shard(batch_of(step)).with_context()
        count = GlobalCount(valid_targets(batch.targets), one, CPU)
        set_dropout(model, seed=0, step=step, samples=range(B))
        loss = sample_losses(model(*batch.inputs), batch.targets).sum() / count.value()
        loss.backward()
        norm = clip_gradients(model, one, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = one.sum(loss.detach().double() * one.speaks_for_samples)
        rows.append([float(total), float(norm)])
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("job", "sizes", "heads", "options"),
    [
        (2, {"cp": 2}, 1, {"method": "ring", "recompute": "full"}),
        (2, {"cp": 2}, 2, {}),
        (4, {"dp_replicate": 1, "cp": 4}, 2, {"method": "ring", "recompute": "selective"}),
        (4, {"cp": 2, "tp": 2}, 2, {}),
        (4, {"cp": 2, "tp": 2}, 1, {"method": "ring", "sequence_parallel": False}),
    ],
    indirect=["job"],
    ids=["2-ranks-ring", "2-ranks-heads", "4-ranks-both", "4-ranks-tp", "4-ranks-tp-ring"],
)
def test_losses_and_norms_of_a_loop(job: Job, sizes: dict[str, int], heads: int, options: dict[str, Any]) -> None:
    mesh = meshtrain.build_mesh(Layout(sizes).with_context_heads(heads))
    same(train(mesh, **options), train(None))


@pytest.fixture
def cp(job: Job) -> Mesh:
    """All ranks of the job on the axis `cp`."""
    return meshtrain.build_mesh(Layout({"cp": job.world_size}))


@pytest.mark.ranks(2)
def test_a_compiled_model_has_one_graph(cp: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all layers and microbatches, whatever the documents. Without slow code generation."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    same(train(cp, method="ring", compile=True), train(None))
    assert counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()


@pytest.mark.ranks(2)
def test_bfloat16(cp: Mesh) -> None:
    alone = train(None)
    largest = float(alone.abs().max())
    losses = train(cp, dtype=torch.bfloat16, recompute="selective")
    torch.testing.assert_close(losses, alone, rtol=0, atol=5e-2 * max(1.0, largest))


Built = tuple[nn.Module, Mesh, ContextParallel | None]


def build(layout: str, world: int, *overrides: str) -> Built:
    """A run's model with its initial weights, its mesh, and its context parallelism."""
    keys = [*SMALL, "train.precision=float64", "data.seq_len=22", "model.num_hidden_layers=2", *overrides]
    config = Config.load(QUICKSTART, [*keys, f"layout={layout}"], world_size=world)
    assert config.resolved is not None
    mesh = meshtrain.build_mesh(config.resolved) if world > 1 else Mesh(config.resolved, 0, "cpu", None, {})
    return build_model(config, mesh, CPU), mesh, context_parallel(config, mesh) if mesh.size("cp") > 1 else None


def results(model: nn.Module, mesh: Mesh, context: ContextParallel | None) -> tuple[list[int], float]:
    """A generated text, and the loss over held-out samples."""
    where: dict[str, Any] = {"seq_len": S, "device": CPU, "seed": 5, "context": context}
    text = generate(model, [1, 2, 3], 2 * S, **where)
    data, ranks = mesh.index("data"), mesh.size("data")
    batches = [batch_of(i) for i in range(4)][data::ranks]
    shard = Batch.with_context if context is None else context.shard
    return text, evaluate(model, [shard(batch) for batch in batches], mesh, CPU, torch.float64).loss


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
def test_sample_of_a_run(length: int, cp: int, tp: int, experts: bool, expected: int | None) -> None:
    """As long as its sequences, up to a limit, in whole parts; short for a model with experts."""
    model = nn.Sequential(Experts(2, 1, 1)) if experts else nn.Linear(1, 1)
    sample: Any = short_sample(cast(Any, Text(length)), model, cp, tp)
    assert (sample and sample[0].shape[1]) == expected


RUNS = [
    (2, "{cp: 2}", ()),
    (4, "{cp: 2, tp: 2}", ("parallel.context_heads=2",)),
    (4, "{pp: 2, cp: 2}", ("pipeline.schedule=zbv", "parallel.context=ring")),
    (4, "{dp_shard: 2, cp: 2}", ("parallel.context_heads=2",)),
]


@pytest.mark.parametrize(
    ("job", "layout", "overrides"), RUNS, indirect=["job"], ids=[f"{world}-ranks-{name}" for world, name, _ in RUNS]
)
def test_text_and_evaluation_of_a_run(job: Job, layout: str, overrides: tuple[str, ...]) -> None:
    """Texts are longer than the model's window."""
    expected_text, expected_loss = results(*build("{}", 1))
    text, loss = results(*build(layout, job.world_size, *overrides))
    assert text == expected_text
    same(torch.tensor(loss), torch.tensor(expected_loss))
    assert len(set(text)) > 3, "the text is worth comparing"


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


# Refused ------------------------------------------------------------------------------------------------------------


class OwnLayers(llama.Model):
    """A Llama with a user's part in each layer."""

    layer: type[nn.Module]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for i in range(config.num_hidden_layers):
            self.model.layers[i] = self.layer(config)


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
        return super().forward(x + self.mix(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2), *others)


class OwnAttention(llama.Attention):
    """Attention that does not call meshtrain's `attention`."""

    def forward(self, x: Tensor, rotary: Any, context: AttentionContext) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in self.projections())
        return self.o_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        )

    def projections(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj


class Twice(OwnAttention):
    def forward(self, x: Tensor, rotary: Any, context: AttentionContext) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in self.projections())
        y = attention(q, k, v, context) - 0.5 * attention(q.roll(1, 1), k, v, context)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class KeyBias(OwnAttention):
    """Without rotary angles, softmax is invariant to a bias of keys: the gradient of the bias is rounding only."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.k_proj = nn.Linear(D, self.k_proj.out_features)

    def forward(self, x: Tensor, rotary: Any, context: AttentionContext) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in self.projections())
        return self.o_proj(attention(q, k, v, context).transpose(1, 2).flatten(2))


class Gated(Mixer):
    def forward(self, x: Tensor, gate: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x * gate, context), gate.sin()


class Handing(nn.Module):
    """Its blocks pass on a vector over features: every rank has all of it, and a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gate, self.head = nn.Embedding(V, D), nn.Parameter(torch.ones(D)), nn.Linear(D, V)
        self.layers = nn.ModuleList(Gated() for _ in range(2))

    def blocks(self) -> list[nn.Module]:
        return [*self.layers]

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Any = None) -> Tensor:
        x, gate = self.words(tokens), self.gate.exp()
        for layer in self.layers:
            x, gate = layer(x, gate, AttentionContext.of(documents))
        return self.head(x * gate)


def with_attention(part: type[nn.Module]) -> type[nn.Module]:
    class Layer(llama.Layer):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.self_attn = part(config)

    return own(Layer)


def own(part: type[nn.Module]) -> type[nn.Module]:
    return type(f"With{part.__name__}", (OwnLayers,), {"layer": part})


class Between(llama.Model):
    """Mixes tokens between the blocks."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Any = None) -> Tensor:
        logits = super().forward(tokens, positions, documents)
        return logits - logits.mean(1, keepdim=True)


class Counted(llama.Model):
    """Computes positions itself."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Any = None) -> Tensor:
        return super().forward(tokens, None, documents)


class Pooled(llama.Model):
    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Any = None) -> Tensor:
        return super().forward(tokens, positions, documents).mean(1)


class Normed(llama.Layer):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(D)


REFUSED: dict[type[nn.Module], str] = {
    own(Shift): "model.layers.0: output 0 differs by",
    own(Distant): "model.layers.0: output 0 differs by",
    own(Convolution): "model.layers.0: output 0 differs by",
    with_attention(OwnAttention): "model.layers.0: output 0 differs by",
    with_attention(Twice): "model.layers.0.self_attn calls attention 2 times",
    Between: "the model's output 0 differs by",
    Counted: "model.layers.0: output 0 differs by",
    Pooled: "the model's output 0",
    own(Normed): "is a BatchNorm1d",
}
PLAN = llama.cp_plan


NARROW = {"model.layers.0.self_attn": "attention"}


def refused(sentence: str, action: Callable[[], Any]) -> None:
    with pytest.raises((AgreedError, InputError, ValueError)) as caught:
        action()
    assert sentence in str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("cls", "sentence"), REFUSED.items())
def test_models_that_mix_tokens_elsewhere_are_refused(cp: Mesh, cls: type[nn.Module], sentence: str) -> None:
    refused(sentence, lambda: meshtrain.parallelize(fresh(cls), cp, cp_plan=PLAN))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cp_plan": {"layers.*": "attention"}}, "'layers.*' matches no module"),
        ({"cp_plan": NARROW}, "attention is called elsewhere"),
        ({"cp_plan": {**PLAN, "model.layers.*.mlp": "attention"}}, "mlp calls attention 0 times"),
        ({"context_heads": 3}, "context_heads 3 does not divide layout.cp"),
    ],
)
def test_plans_that_do_not_fit_are_refused(cp: Mesh, options: dict[str, Any], sentence: str) -> None:
    refused(sentence, lambda: meshtrain.parallelize(fresh(), cp, **options))


@pytest.mark.ranks(2)
def test_a_model_without_a_plan_is_refused(cp: Mesh) -> None:
    sentence = "Linear has no cp_plan, which says where it mixes tokens"
    refused(sentence, lambda: meshtrain.parallelize(nn.Linear(3, 3), cp))


@pytest.mark.ranks(4)
def test_heads_that_the_mesh_was_not_built_for_are_refused(cp: Mesh) -> None:
    refused("build the mesh of layout.with_context_heads(2)", lambda: ContextParallel(cp, heads=2))


@pytest.mark.ranks(2)
def test_gradients_of_rounding_and_sums_over_ranks_are_taken(cp: Mesh) -> None:
    meshtrain.parallelize(fresh(with_attention(KeyBias)), cp, cp_plan=PLAN)
    meshtrain.parallelize(Handing(), cp, cp_plan={"layers.?": "attention"})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("cls", "plan", "sentence"),
    [
        (with_attention(Twice), PLAN, "model.layers.0.self_attn calls attention 2 times"),
        (llama.Model, NARROW, "attention is called elsewhere"),
    ],
)
def test_the_first_forward_of_what_was_not_verified(cp: Mesh, cls: Any, plan: dict[str, str], sentence: str) -> None:
    part = ContextParallel(cp).shard(batch_of(0))
    model = meshtrain.parallelize(fresh(cls), cp, cp_plan=plan, verify=False)
    refused(sentence, lambda: model(*part.inputs))


@pytest.mark.ranks(2)
def test_after_the_first_forward_its_hooks_are_gone(cp: Mesh) -> None:
    part = ContextParallel(cp).shard(batch_of(0))
    verified = meshtrain.parallelize(fresh(), cp)
    model = meshtrain.parallelize(fresh(), cp, verify=False, recompute="full")
    model(*part.inputs).sum().backward()
    assert torch.equal(model(*part.inputs), verified(*part.inputs))
    assert not any(m._forward_hooks for m in model.modules() if "Attention" in str(type(m)))


@pytest.mark.ranks(2)
def test_inputs_are_parts(cp: Mesh) -> None:
    model, whole, context = meshtrain.parallelize(fresh(), cp), batch_of(0), ContextParallel(cp)
    part = context.shard(whole)
    refused("a rank's part already", lambda: context.shard(part))
    tokens, positions, documents = part.inputs
    for inputs in (whole.inputs, whole.with_context().inputs, whole.inputs[:1], (tokens, None, documents)):
        refused("shard(batch)", lambda inputs=inputs: model(*inputs))
    by_name = model(tokens, positions=positions, documents=documents)
    assert torch.equal(by_name, model(*part.inputs))


@pytest.mark.ranks(2)
def test_a_term_has_a_number_for_each_token(cp: Mesh) -> None:
    terms = StepTerms(GlobalCount(1, cp, CPU))
    x = torch.ones(B, 12, 4, requires_grad=True)
    with terms.of_microbatch(B, B, torch.arange(12) < 9):
        refused("a number for each of its 12 tokens", lambda: attach(x, "pooled", x.mean((1, 2))))
        attach(x, "each", x)
    assert terms.sums["loss/each"].tolist() == [B * 9 * 4, 0]  # without padding
