"""Layers that compute several in a row (queries, keys and values; gate and up), split over `tp`,
and embeddings that do more than look up."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshtrain
from meshtrain.config.schema import OptimizerSection
from meshtrain.errors import InputError
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel.linear.lora import add_adapters, merge_adapters
from meshtrain.parallel.sharding import local_part
from meshtrain.parallel.tensor_parallel import TensorParallel, replace_layers
from meshtrain.parallel.torch_private import to_local
from meshtrain.parallel.tp_plan import Split, SplitError, split_layers
from tests.comparing import ALONE, D, V, compare, llama, same, small_llama, token_losses, tokens
from tests.properties import given, st


class Attention(nn.Module):
    """It finds queries, keys and values by the number of queries that it has."""

    def __init__(self, heads: int, kv_heads: int, width: int = 3) -> None:
        super().__init__()
        self.head_dim = width
        self.qkv = nn.Linear(D, (heads + 2 * kv_heads) * width)
        self.out = nn.Linear(heads * width, D)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
        queries = to_local(self.out.weight).shape[1] // self.head_dim
        keys = (heads.shape[-3] - queries) // 2
        q, k, v = heads.split([queries, keys, keys], dim=-3)
        groups = queries // k.shape[-3]
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(-3, -2).flatten(-2))


class Fused(nn.Module):
    def __init__(self, heads: int = 4, kv_heads: int = 2, inner: int = 7) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.attention = Attention(heads, kv_heads)
        self.gate_up, self.down = nn.Linear(D, 2 * inner), nn.Linear(inner, D, bias=False)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.words(inputs)
        x = x + self.attention(x)
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.head(x + self.down(F.silu(gate) * up))


FUSED = {
    "words": "embedding_rowwise",
    "attention.qkv": "packed_colwise",
    "attention.out": "rowwise",
    "gate_up": "packed_colwise",
    "down": "rowwise",
    "head": "colwise_gather_output",
}
IN_PARTS = FUSED | {"words": "embedding_rowwise_sequence", "head": "colwise_logits"}


def rows_of(split: Split, tp: int) -> list[list[int]]:
    used = [split.rows_of(tp, index) for index in range(tp)]
    return [[row for run in runs for row in range(run.start, run.stop)] for runs in used]


def split_of(heads: int, kv_heads: int, tp: int) -> Split:
    splits = split_layers(Fused(heads, kv_heads), FUSED, tp)
    return next(split for split in splits if split.layer == "attention.qkv")


def test_each_rank_uses_its_rows_of_each_part() -> None:
    assert rows_of(Split("gate_up", "packed_colwise", packed=(5, 5)), 2) == [
        [0, 1, 2, 5, 6, 7],
        [3, 4, 8, 9],
    ]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_queries_meet_their_keys(kv_heads: int, group: int, tp: int) -> None:
    heads = kv_heads * group * tp
    width = 3
    every_query = []
    for rows in rows_of(split_of(heads, kv_heads, tp), tp):
        own = [row // width for row in rows[::width]]
        queries, keys = own[: heads // tp], own[heads // tp :]
        keys, values = keys[: len(keys) // 2], keys[len(keys) // 2 :]
        assert [value - kv_heads for value in values] == keys
        each = len(queries) // len(keys)
        for i, query in enumerate(queries):
            assert keys[i // each] - heads == query // (heads // kv_heads)
        every_query += queries
    assert every_query == list(range(heads))


REFUSED = [
    (Fused(3, 3), 2, "3 query heads do not divide over tp 2"),
    (nn.ModuleDict({"x": nn.Linear(4, 9), "y": nn.Linear(6, 4)}), 2, "no parts of 6 each"),
]


@pytest.mark.parametrize(("model", "tp", "problem"), REFUSED)
def test_what_is_no_fused_layer(model: nn.Module, tp: int, problem: str) -> None:
    plan = FUSED if isinstance(model, Fused) else {"x": "packed_colwise", "y": "rowwise"}
    with pytest.raises(SplitError, match=problem):
        split_layers(model, plan, tp)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("plan", [FUSED, IN_PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (12, 3)])
def test_fused_layers(tp: Mesh, heads: int, kv_heads: int, plan: dict[str, str]) -> None:
    """Heads as many as queries, one for all, and three, of which ranks share some unevenly."""
    compare(lambda: Fused(heads, kv_heads), tp, steps=2, microbatches=2, tp_plan=plan)


@pytest.mark.ranks(2)
def test_only_rows_that_are_needed_elsewhere_travel(tp: Mesh) -> None:
    """Of gate and up on two ranks half of what each holds, and then the gradients of these rows."""
    layer = nn.Linear(D, 8, bias=False)
    plan = {"x": "packed_colwise"}
    model = nn.ModuleDict({"x": layer})
    splits = split_layers(model, plan, 2)
    replace_layers(model, TensorParallel(tp, plan, splits, sequence_parallel=False))
    tp.comm_bytes.restart()
    x = torch.zeros(3, D)
    assert model["x"](x).shape == (3, 4)
    model["x"](x).sum().backward()
    assert tp.comm_bytes.by_kind("tp")["all_to_all"] == 3 * (2 * D * 4)


@pytest.mark.ranks(2)
def test_a_plan_with_the_old_words_computes_the_same(tp: Mesh) -> None:
    """With Hugging Face's meaning: whole sequences, and all logits on each rank."""
    plan = llama.tp_plan | {
        "model.embed_tokens": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
    }
    model, _ = compare(small_llama, tp, tp_plan=plan)
    assert not model.has_sequence_part
    with pytest.raises(InputError, match="no embedding_rowwise_sequence layer"):
        meshtrain.parallelize(small_llama(), tp, tp_plan=plan, sequence_parallel=True)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fused_layers_with_fsdp_and_an_optimizer(
    job: Job, small_units: None, optimizer: str
) -> None:
    """Each sees one matrix in the plain model's order."""
    mesh = build_mesh(Layout({"dp_shard": 2, "tp": 2}))
    model, plain = compare(Fused, mesh, steps=1, tp_plan=FUSED)
    section = OptimizerSection(name=optimizer, lr=0.05, warmup_steps=0)
    norms = []
    for one, ranks in ((model, mesh), (plain, ALONE)):
        updates = Optimizer(one, section, ranks, 10)
        norm = updates.squared_norm()
        if ranks is mesh:
            dist.all_reduce(norm)
        norms.append(norm)
        updates.update(1, None, torch.tensor(False))
    same(*norms)
    parameters = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        part = parameters[name][local_part(parameter)[1]]
        same(to_local(parameter), part, name, tolerance=1e-9)


@pytest.mark.ranks(2)
def test_an_adapter_of_a_fused_layer(tp: Mesh) -> None:
    def adapted() -> nn.Module:
        model = Fused()
        add_adapters(model, ["*gate_up", "*qkv", "*down"], 2, 4.0, 0.0)
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        return model

    model, plain = compare(adapted, tp, steps=2, tp_plan=FUSED)
    with torch.no_grad():
        before = plain(tokens())
        merge_adapters(model)
        same(model(tokens()), before)


# Embeddings --------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    """As Gemma's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale.to(self.weight.dtype)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = Scaled(V, D, 4)
        self.up, self.down = nn.Linear(D, 7), nn.Linear(7, D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.words.weight

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.words(inputs)
        return self.head(x + self.down(F.silu(self.up(x))))


MLP = {"up": "colwise", "down": "rowwise"}
TIED = {
    "the embedding": {"words": "embedding_rowwise"},
    "the head": {"head": "colwise_gather_output"},
    "both": {"words": "embedding_rowwise", "head": "colwise_logits"},
    "the embedding in parts": {"words": "embedding_rowwise_sequence"},
    "neither": {},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("named", TIED)
def test_a_weight_of_embedding_and_head(tp: Mesh, named: str) -> None:
    """Whichever a plan names, both are split over the vocabulary."""
    model, _ = compare(Tied, tp, steps=2, tp_plan=MLP | TIED[named])
    assert model.words.weight is model.head.weight
    size = to_local(model.head.weight).shape[0]
    assert (size < V) == (named != "neither")


@pytest.mark.ranks(2)
def test_a_weight_that_one_of_two_cannot_split_stays_whole(tp: Mesh) -> None:
    def limited() -> nn.Module:
        model = Tied()
        model.words.scale_grad_by_freq = True
        model.words.padding_idx = None
        return model

    plan = MLP | TIED["the head"]
    assert [split.layer for split in split_layers(limited(), plan, 2)] == ["up", "down"]
    compare(limited, tp, tp_plan=plan)
    in_parts = {"head": "colwise_logits", "words": "embedding_rowwise_sequence"}
    with pytest.raises(SplitError, match="scale_grad_by_freq cannot be split"):
        split_layers(limited(), MLP | in_parts, 2)


@pytest.mark.ranks(2, 4)
def test_an_embedding_split_by_features(tp: Mesh) -> None:
    class Wide(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = nn.Parameter(torch.randn(V, D))

    compare(Wide, tp, steps=2, tp_plan=MLP | {"words": "embedding_colwise"})


@pytest.mark.ranks(2)
def test_a_head_gathers_its_logits(tp: Mesh) -> None:
    whole, split = ({**FUSED, "head": word} for word in ("colwise_gather_output", "colwise_logits"))
    losses = []
    for plan in (whole, split):
        torch.manual_seed(0)
        model = meshtrain.parallelize(Fused(), tp, tp_plan=plan, precision="float64")
        logits = model(tokens())
        assert type(logits) is (Tensor if plan is whole else type(logits))
        losses.append(token_losses(model, 0, 0))
    same(losses[0], losses[1])


def test_words_of_whole_sequences_are_not_for_parts() -> None:
    plan = IN_PARTS | {"down": "rowwise_split_input", "gate_up": "colwise_gather_output"}
    with pytest.raises(SplitError, match="down is rowwise_split_input, which works on whole ones"):
        split_layers(Fused(), plan, 2)


class Counting(Fused):
    """It counts its heads by itself."""

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.words(inputs)
        self.attention.qkv(x).view(*x.shape[:2], 8, 3)
        return super().forward(inputs)


@pytest.mark.ranks(2)
def test_a_refusal_says_how_heads_are_counted(tp: Mesh) -> None:
    with pytest.raises(InputError, match=r"take their number from its tensors, view\(..., -1"):
        meshtrain.parallelize(Counting(), tp, tp_plan=FUSED)
