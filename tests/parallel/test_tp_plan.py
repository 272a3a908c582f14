"""What a model's layers become under tensor parallelism, and what is refused."""

import pickle
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.job.locate import model_file
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parallel.sharding import chunk_range, local_slice
from meshtrain.parallel.tensor_parallel import TensorParallel, replace_layers
from meshtrain.parallel.tp_plan import (
    REPLICATED,
    STYLES,
    Split,
    SplitError,
    Style,
    split_layers,
    styled_parameters,
    undecided,
)
from tests.properties import given, st

PLAN = {
    "attention.[qkv]": "colwise",
    "attention.o": "rowwise",
    "head": "colwise_logits",
    "words": "embedding_rowwise_sequence",
}


def attention_model(heads: int = 8, kv_heads: int = 8, tied: bool = False) -> nn.Module:
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(10, 32),
            "attention": nn.ModuleDict(
                {
                    "q": nn.Linear(32, 4 * heads),
                    "k": nn.Linear(32, 4 * kv_heads),
                    "v": nn.Linear(32, 4 * kv_heads),
                    "o": nn.Linear(4 * heads, 32),
                }
            ),
            "norm": nn.RMSNorm(32),
            "head": nn.Linear(32, 10),
        }
    )
    model.attention.head_dim = 4
    if tied:
        model.head.weight = model.words.weight
    return model


def styles(model: nn.Module, tp: int) -> dict[str, Split]:
    return {split.layer: split for split in split_layers(model, PLAN, tp)}


def test_every_layer_of_the_plan_is_split() -> None:
    splits = styles(attention_model(), 4)
    assert {name: split.style for name, split in splits.items()} == {
        "words": "embedding_rowwise_sequence",
        "attention.q": "colwise",
        "attention.k": "colwise",
        "attention.v": "colwise",
        "attention.o": "rowwise",
        "head": "colwise_logits",
    }
    assert not any(split.everywhere for split in splits.values())


def test_few_key_value_heads_are_held_by_every_rank() -> None:
    splits = styles(attention_model(kv_heads=2), 4)
    assert [splits[f"attention.{name}"].everywhere for name in "qkv"] == [False, True, True]
    heads = [splits["attention.k"].heads_of(4, index) for index in range(4)]
    assert [(few.rows.start // 4, few.rows.stop // 4) for few in heads if few] == [
        (0, 1),
        (0, 1),
        (1, 2),
        (1, 2),
    ]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_each_query_looks_at_its_head(k: int, group: int, tp: int) -> None:
    h = k * group
    if h % tp:
        h, group = h * tp, group * tp
    split = Split("k", "colwise", queries=h, heads=k, width=3, everywhere=True)
    seen = []
    for index in range(tp):
        heads = split.heads_of(tp, index)
        assert heads is not None
        mine = list(range(heads.rows.start // 3, heads.rows.stop // 3))
        each = h // tp // len(mine)
        seen += (
            [mine[i] for i in heads.repeated]
            if heads.repeated
            else [head for head in mine for _ in range(each)]
        )
    assert seen == [query // group for query in range(h)]


LINEAR = nn.Sequential(nn.Linear(4, 4))
COMPUTED = nn.ModuleDict(
    {name: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)) for name in ("up", "down")}
)
REFUSED: list[tuple[nn.Module, dict[str, str], int, list[str]]] = [
    (attention_model(), PLAN, 3, ["8 query heads do not divide over tp 3: use a tp of 1, 2, 4, 8"]),
    (attention_model(), PLAN | {"mlp.*": "rowwise"}, 2, ["'mlp.*' matches no layer"]),
    (
        attention_model(),
        PLAN | {f"layers.{n}.attention_q": "colwise" for n in range(3)},
        2,
        ["'layers.0.attention_q' (and 2 more like it) matches no layer: near it are attention"],
    ),
    (attention_model(), PLAN | {"attentoin.oo": "rowwise"}, 2, ["near it are attention"]),
    (attention_model(), PLAN | {"norm.scale": REPLICATED}, 2, ["'norm.scale' matches no layer"]),
    (
        attention_model(),
        PLAN | {"norm": "colwise"},
        2,
        ["wants norm colwise, which is for a linear layer"],
    ),
    (attention_model(), PLAN | {"head": "columns"}, 2, ["'columns': use one of colwise"]),
    (
        attention_model(),
        PLAN | {"head": "embedding_rowwise_sequence"},
        2,
        ["head embedding_rowwise_sequence, which is for an embedding, and it is a Linear"],
    ),
    (
        LINEAR,
        {"0": "gather_sequence"},
        2,
        ["0 gather_sequence, which is for an nn.Identity, and it is a Linear"],
    ),
    (
        attention_model(tied=True),
        PLAN | {"head": "rowwise"},
        2,
        ["words and head share one weight"],
    ),
    # Two computed weights are not taken for one: each is a new tensor, whose id another may have
    # had.
    (
        COMPUTED,
        {"up": "colwise", "down": "rowwise"},
        2,
        [f"{name} has no parameter weight, but computes it from others" for name in COMPUTED],
    ),
    *(
        (
            nn.Sequential(nn.Embedding(4, 2, **{option: value})),
            {"0": "embedding_rowwise_sequence"},
            2,
            [f"an embedding with {option} cannot be split over tp"],
        )
        for option, value in {"max_norm": 1.0, "sparse": True}.items()
    ),
]


@pytest.mark.parametrize(
    ("model", "plan", "tp", "expected"), REFUSED, ids=[row[-1][0] for row in REFUSED]
)
def test_what_cannot_be_split(
    model: nn.Module, plan: dict[str, str], tp: int, expected: list[str]
) -> None:
    with pytest.raises(SplitError) as error:
        split_layers(model, plan, tp)
    for message in expected:
        assert any(message in problem for problem in error.value.problems), error.value.problems


TOGETHER = dict.fromkeys(("q", "k", "v", "gate", "up"), "colwise") | {
    "o": "rowwise",
    "down": "rowwise",
}


def together(order: str, heads: int, kv_heads: int, inner: int) -> nn.Module:
    """Attention and a feed-forward net in one module, their layers defined in this order."""
    width = 8 * heads
    sizes = {
        "q": (width, width),
        "k": (width, 8 * kv_heads),
        "v": (width, 8 * kv_heads),
        "o": (width, width),
    }
    sizes |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    model: Any = nn.ModuleDict({name: nn.Linear(*sizes[name]) for name in order.split()})
    model.head_dim = 8
    return model


ORDERS = (
    "q k v o gate up down",
    "q k v gate up o down",
    "gate up down q k v o",
    "gate up q k v down o",
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("kv_heads", "inner"), [(4, 128), (4, 61), (2, 128), (1, 61), (1, 256)])
def test_layers_of_a_feed_forward_net_beside_attention_have_no_heads(
    order: str, kv_heads: int, inner: int
) -> None:
    splits = {
        split.layer: split
        for split in split_layers(together(order, 4, kv_heads, inner), TOGETHER, 2)
    }
    expected = {"q": 4, "k": kv_heads, "v": kv_heads, "gate": 0, "up": 0}
    assert {name: splits[name].heads for name in expected} == expected
    assert [splits[name].everywhere for name in "qkv"] == [False, kv_heads == 1, kv_heads == 1]
    with pytest.raises(
        SplitError, match=r"^3 query heads do not divide over tp 2: use a tp of 1, 3$"
    ):
        split_layers(together(order, 3, 3, 96), TOGETHER, 2)


def test_two_attentions_in_one_module_have_heads() -> None:
    """As in a decoder layer with cross attention; their keys and values have fewer heads."""
    first, second = together("q k v o gate up down", 8, 2, 61), together("q k v o", 8, 2, 61)
    for name, layer in second.named_children():
        first.add_module(f"cross_{name}", layer)
    plan = TOGETHER | {f"cross_{name}": TOGETHER[name] for name in "qkvo"}
    splits = {split.layer: split for split in split_layers(first, plan, 4)}
    assert [splits[name].heads for name in ("q", "k", "v", "gate", "up")] == [8, 2, 2, 0, 0]
    assert [splits[f"cross_{name}"].heads for name in "qkv"] == [8, 2, 2]
    assert splits["k"].everywhere
    assert splits["cross_k"].everywhere


def test_a_shared_weight_is_split_in_one_way() -> None:
    assert len(split_layers(attention_model(tied=True), PLAN, 2)) == 6


@given(st.integers(0, 40), st.integers(1, 9))
def test_cuts_are_the_whole(size: int, parts: int) -> None:
    pieces = [chunk_range(size, parts, index) for index in range(parts)]
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(size))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))
def test_a_cut_of_a_cut(size: int, outer: int, inner: int) -> None:
    """FSDP cuts the rows that tp has left: together the parts are the whole, each row once."""
    rows: list[int] = []
    for i, j in product(range(outer), range(inner)):
        part = local_slice((size, 3), [(0, outer, i), (0, inner, j)])[0]
        rows += range(part.start, part.stop)
    assert rows == list(range(size))


class Normed(nn.Module):
    """Norms of q and k, and a number, beside layers that are split; the last norm is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.q, self.inner.o, self.inner.q_norm = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.RMSNorm(4),
        )
        self.inner.scale = nn.Parameter(torch.ones(1))
        self.norm = nn.RMSNorm(8)


NORMED = {"inner.q": "colwise", "inner.o": "rowwise"}


@pytest.mark.parametrize(
    ("more", "covered", "open_ones"),
    [
        ({}, [], ["inner.scale", "inner.q_norm.weight"]),
        ({"inner.q_norm": REPLICATED}, ["weight"], ["inner.scale"]),
        ({"inner.*": REPLICATED}, ["scale", "weight"], []),
        ({"inner": REPLICATED}, ["scale", "weight"], []),
    ],
)
def test_parameters_between_layers_are_covered_or_undecided(
    more: dict[str, str], covered: list[str], open_ones: list[str]
) -> None:
    model, plan = Normed(), NORMED | more
    splits = split_layers(model, plan, 2)
    assert [split.layer for split in splits] == ["inner.q", "inner.o"]
    between = [
        split
        for split in styled_parameters(model, plan)
        if split.layer not in ("inner.q", "inner.o")
    ]
    assert [name for split in between for name in split.parameters] == covered
    assert undecided(model, plan, splits) == open_ones


LATENT = {
    "self_attn.q_b_proj": "colwise",
    "self_attn.kv_b_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "self_attn.rotary_key": "gather_sequence",
}


def test_heads_may_have_a_width_of_their_own_in_each_layer() -> None:
    """Between a latent and its projection every rank has all features, which the plan can say."""
    deepseek = model_file("deepseek_v3")
    with torch.device("meta"):
        model = deepseek.Layer(deepseek.Config(), 0)
    splits = {split.layer: split for split in split_layers(model, LATENT, 4)}
    widths = {name: (split.heads, split.width) for name, split in splits.items() if split.heads}
    assert widths == {"self_attn.q_b_proj": (8, 48), "self_attn.kv_b_proj": (8, 64)}
    assert not any(split.everywhere for split in splits.values())
    assert [
        name.removeprefix("self_attn.") for name in undecided(model, LATENT, list(splits.values()))
    ] == [
        *(
            "q_a_proj.weight",
            "q_a_layernorm.weight",
            "kv_a_proj_with_mqa.weight",
            "kv_a_layernorm.weight",
        )
    ]
    assert not undecided(model, LATENT | {"self_attn.*_a_*": "replicate"}, list(splits.values()))


class Halved(Style):
    """A toy: a linear layer that computes half of its outputs, on every rank the same."""

    word, becomes, dim = "halved", "Linear", 0

    def check(self, name: str, module: Any) -> list[str]:
        return super().check(name, module) or (["an odd number"] if module.out_features % 2 else [])

    def apply(self, plain: Any, split: Split, layers: Any) -> Any:
        layer = nn.Linear(plain.in_features, plain.out_features // layers.mesh.size("tp"))
        nn.init.ones_(layer.weight)
        return layer


def test_one_class_makes_a_style(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is checked, planned with, and put in place like the others."""
    model, plan, mesh = Normed(), {"inner.q": "halved"}, Mesh(Layout({"tp": 2}), 0, "cpu", None, {})
    with pytest.raises(SplitError, match="'halved': use one of colwise"):
        split_layers(model, plan, 2)
    monkeypatch.setitem(STYLES, "halved", Halved())
    splits = split_layers(model, plan, 2)
    assert [
        (split.layer, split.dim_of("weight"), STYLES[split.style].becomes) for split in splits
    ] == [("inner.q", 0, "Linear")]
    replace_layers(model, TensorParallel(mesh, plan, splits, sequence_parallel=False))
    assert torch.equal(model.inner.q.weight, torch.ones(4, 8))
    model.inner.q = nn.Linear(8, 7)
    with pytest.raises(SplitError, match="an odd number"):
        split_layers(model, plan, 2)


def test_a_split_error_survives_a_process() -> None:
    error = pickle.loads(pickle.dumps(SplitError(["one", "other"])))
    assert str(error) == "one; other"
    assert error.problems == ["one", "other"]
