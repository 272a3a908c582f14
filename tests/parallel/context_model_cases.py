"""Run as a job of 2 or 4 processes: whole models with context parallelism in a user's loop, and what is refused."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo.utils import counters

import meshtrain
from meshtrain.attention import AttentionContext, attention
from meshtrain.config import Config
from meshtrain.config.locate import model_file
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
from tests.parallel.sharded_attention import Mixer
from tests.parity.experiments import QUICKSTART, SMALL

llama, CPU = model_file("llama"), torch.device("cpu")
B, S, V, D, STEPS = 4, 22, 40, 24, 3  # 22 tokens do not divide over 4 chunks
SIZES = {
    "hidden_size": D, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": V,
}  # fmt: skip


class Cases:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.checked = 0
        self.failures: list[str] = []

    def close(self, actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
        """Compares by the largest difference, relative to the largest value if that is above 1."""
        self.checked += 1
        off = largest(actual.double() - expected.double()) if actual.shape == expected.shape else torch.inf
        if not off <= tolerance * max(1.0, largest(expected)):
            self.failures.append(f"rank {self.mesh.rank}: {what}: off by {off:.1e}")

    def equal(self, actual: Any, expected: Any, what: str) -> None:
        self.checked += 1
        if actual != expected:
            self.failures.append(f"rank {self.mesh.rank}: {what}: {actual} and not {expected}")

    def tell(self) -> None:
        """Prints one line for the test that started this job."""
        row = {"checked": self.checked, "failures": self.failures[:20]}  # short enough for one atomic write to a pipe
        print(json.dumps(row) + "\n", end="", flush=True)


def largest(x: Tensor) -> float:
    """The largest absolute value; 0 for an empty tensor, since a rank may have only padding."""
    return float(x.abs().max()) if x.numel() > 0 else 0.0


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
    model, one = fresh(hidden_dropout=0.1), mesh or Mesh(Layout({}), 0, "cpu", None, {})
    context = ContextParallel(one, method=method, heads=one.layout.context_heads)
    if mesh is None:
        model = model.to(dtype)
    else:
        precision = str(dtype).removeprefix("torch.")
        model = meshtrain.parallelize(model, mesh, precision=precision, context=method, **options)
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)
    found = []
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
        found.append([float(total), float(norm)])
    return torch.tensor(found)


def loops(cases: Cases, sizes: dict[str, int], heads: int = 1, **options: Any) -> None:
    mesh = meshtrain.build_mesh(Layout(sizes).with_context_heads(heads))
    what = f"{sizes}, heads {heads}, {options}"
    cases.close(train(mesh, **options), cases.alone, 1e-12, f"losses and norms: {what}")


def compiled(cases: Cases, mesh: Mesh) -> None:
    """One graph for all layers and microbatches, whatever the documents. Without slow code generation."""
    counters.clear()
    with patch("torch.compile", partial(torch.compile, backend="aot_eager_decomp_partition")):
        cases.close(train(mesh, method="ring", compile=True), cases.alone, 1e-12, "compiled")
    cases.equal(counters["stats"]["unique_graphs"], 1, "graphs")


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


def sample_of_a_run(cases: Cases) -> None:
    """As long as its sequences, up to a limit, in whole parts; short for a model with experts."""

    class Text:
        def __init__(self, length: int) -> None:
            self.train, self.tokens = self, torch.zeros(2, length, dtype=torch.int64)

        def __len__(self) -> int:
            return 2

        def read(self, items: list[tuple[int, int]], valid: int) -> Batch:
            return Batch.of((self.tokens, self.tokens, None), self.tokens)

    plain, routed = nn.Linear(1, 1), nn.Sequential(Experts(2, 1, 1))
    for length, cp, tp, model, expected in (
        *((110, 2, 1, plain, 108), (4096, 2, 1, plain, 128), (3, 2, 1, plain, None)),
        *((110, 1, 4, plain, 108), (3, 1, 4, plain, 3), (110, 2, 1, routed, 32)),
    ):
        found: Any = short_sample(cast(Any, Text(length)), model, cp, tp)
        cases.equal(found and found[0].shape[1], expected, f"tokens of a sample of {length}, cp {cp}, tp {tp}")


def builds(cases: Cases, layout: str, *overrides: str) -> None:
    """Compares text and evaluation with one process; texts are longer than the model's window."""
    alone, found = results(*build("{}", 1)), results(*build(layout, cases.mesh.layout.world_size, *overrides))
    cases.equal(found[0], alone[0], f"text on {layout}, {overrides}")
    cases.close(torch.tensor(found[1]), torch.tensor(alone[1]), 1e-12, f"evaluation on {layout}, {overrides}")
    cases.equal(len(set(alone[0])) > 3, True, "the text is worth comparing")


def exports(cases: Cases, job: Job, folder: Path) -> None:
    """Weights that FSDP shards over `fsdp` are written whole."""
    model, mesh, _ = build("{dp_shard: 2, cp: 2}", job.world_size)
    export(model, folder, job, mesh, dtype=torch.float64)
    stored = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    plain = dict(build("{}", 1)[0].named_parameters())
    cases.equal(set(stored), set(plain), "names of exported weights")
    for name, x in stored.items():
        cases.equal(torch.equal(x, plain[name]), True, f"exported {name}")


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


def message(action: Callable[[], Any]) -> str:
    """The message of the error that `action` raises."""
    try:
        action()
    except (AgreedError, InputError, ValueError) as error:
        return str(error)
    return "nothing was refused"


def refusals(cases: Cases, mesh: Mesh) -> None:
    def says(action: Callable[[], Any], sentence: str, what: str) -> None:
        said = message(action)
        cases.equal(sentence in said, True, f"{what}: {sentence!r} in {said!r}")

    for cls, sentence in REFUSED.items():
        says(lambda cls=cls: meshtrain.parallelize(fresh(cls), mesh, cp_plan=PLAN), sentence, cls.__name__)
    spread = meshtrain.parallelize
    says(lambda: spread(nn.Linear(3, 3), mesh), "Linear has no cp_plan, which says where it mixes tokens", "no plan")
    says(lambda: spread(fresh(), mesh, cp_plan={"layers.*": "attention"}), "'layers.*' matches no module", "pattern")
    narrow = {"model.layers.0.self_attn": "attention"}
    says(lambda: spread(fresh(), mesh, cp_plan=narrow), "attention is called elsewhere", "a plan of one layer")
    wide = {**PLAN, "model.layers.*.mlp": "attention"}
    says(lambda: spread(fresh(), mesh, cp_plan=wide), "mlp calls attention 0 times", "a plan of too many")
    says(lambda: spread(fresh(), mesh, context_heads=3), "context_heads 3 does not divide layout.cp", "heads")

    biased = message(lambda: spread(fresh(with_attention(KeyBias)), mesh, cp_plan=PLAN))
    cases.equal(biased, "nothing was refused", "a gradient that is rounding")
    handing = message(lambda: spread(Handing(), mesh, cp_plan={"layers.?": "attention"}))
    cases.equal(handing, "nothing was refused", "gradients that are sums over the ranks")

    model, whole, context = spread(fresh(), mesh), batch_of(0), ContextParallel(mesh)
    part = context.shard(whole)
    says(lambda: context.shard(part), "a rank's part already", "a part of a part")
    for cls, plan, sentence in (
        (with_attention(Twice), PLAN, "model.layers.0.self_attn calls attention 2 times"),
        (llama.Model, narrow, "attention is called elsewhere"),
    ):
        unseen = spread(fresh(cls), mesh, cp_plan=plan, verify=False)
        says(lambda unseen=unseen: unseen(*part.inputs), sentence, "the first forward of what was not compared")
    unseen = spread(fresh(), mesh, verify=False, recompute="full")
    unseen(*part.inputs).sum().backward()
    cases.equal(torch.equal(unseen(*part.inputs), model(*part.inputs)), True, "after the first forward")
    cases.equal([m for m in unseen.modules() if m._forward_hooks and "Attention" in str(type(m))], [], "hooks are gone")
    for inputs in (whole.inputs, whole.with_context().inputs, whole.inputs[:1], (part.inputs[0], None, part.inputs[2])):
        says(lambda inputs=inputs: model(*inputs), "shard(batch)", "a whole sequence")
    named = {"positions": part.inputs[1], "documents": part.inputs[2]}
    cases.equal(torch.equal(model(part.inputs[0], **named), model(*part.inputs)), True, "inputs by their names")

    terms = StepTerms(GlobalCount(1, mesh, CPU))
    x = torch.ones(B, 12, 4, requires_grad=True)
    with terms.of_microbatch(B, B, torch.arange(12) < 9):
        says(lambda: attach(x, "pooled", x.mean((1, 2))), "a number for each of its 12 tokens", "a term of samples")
        attach(x, "each", x)
    cases.equal(terms.sums["loss/each"].tolist(), [B * 9 * 4, 0], "a term without padding")


def main() -> None:
    with meshtrain.start() as job:
        world = job.world_size
        mesh = meshtrain.build_mesh(Layout({"cp": world}))
        cases = Cases(mesh)
        cases.alone = train(None)
        if world == 2:
            loops(cases, {"cp": 2}, method="ring", recompute="full")
            loops(cases, {"cp": 2}, heads=2)
            refusals(cases, mesh)
            sample_of_a_run(cases)
            compiled(cases, mesh)
            builds(cases, "{cp: 2}")
            bits = train(mesh, dtype=torch.bfloat16, recompute="selective")
            cases.close(bits, cases.alone, 5e-2, "bfloat16")
        else:
            loops(cases, {"dp_replicate": 1, "cp": 4}, heads=2, method="ring", recompute="selective")
            said = message(lambda: ContextParallel(mesh, heads=2))
            cases.equal("build the mesh of layout.with_context_heads(2)" in said, True, said)
            loops(cases, {"cp": 2, "tp": 2}, heads=2)
            loops(cases, {"cp": 2, "tp": 2}, sequence_parallel=False, method="ring")
            two = "parallel.context_heads=2"
            builds(cases, "{cp: 2, tp: 2}", two)
            builds(cases, "{pp: 2, cp: 2}", "pipeline.schedule=zbv", "parallel.context=ring")
            builds(cases, "{dp_shard: 2, cp: 2}", two)
            exports(cases, job, Path(sys.argv[1]) / "weights")
        cases.tell()


if __name__ == "__main__":
    main()
