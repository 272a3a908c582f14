"""Stages of a model: which blocks and parameters each has, under which names; how blocks are shared
out by cost."""

import copy
import math
import re
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.errors import InputError
from meshtrain.job.locate import model_file
from meshtrain.modeling.flops import block_flops
from meshtrain.pipeline.forms import Activation
from meshtrain.pipeline.partition import StageSplit, StageSplitError, split_blocks
from meshtrain.pipeline.probe import outline_of
from meshtrain.pipeline.stage import (
    OtherStageBlock,
    Outline,
    blocks_of,
    call_stage,
    keep_stage,
    stages_of_parameter,
)
from meshtrain.pipeline.stand_in import StandIn
from tests.pipeline.formulas import table
from tests.properties import given, st

llama = model_file("llama")


def stage(first: int = 0, end: int = 6, tied: bool = False) -> nn.Module:
    """Of six blocks: the embedding, three layers, the norm, the head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "vocab_size": 16}
    model = llama.Model(llama.Config(**sizes, num_hidden_layers=3, tie_word_embeddings=tied))
    model.model.layers[0].window = 7
    if (first, end) != (0, 6):
        keep(model, first, end, torch.zeros(2, 5, dtype=torch.int64))
    return model


def outline(model: nn.Module, *inputs: Tensor) -> Outline:
    return outline_of(copy.deepcopy(model), inputs)


def keep(model: nn.Module, first: int, end: int, *inputs: Tensor) -> None:
    keep_stage(
        model, first, end, outline(model, *inputs), device=torch.device("cpu"), dtype=torch.float32
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 6), (0, 2, 4, 6), (0, 1, 2, 3, 4, 5, 6)])
def test_stages_one_after_the_other_are_the_model(cuts: tuple[int, ...], tied: bool) -> None:
    whole, tokens = stage(tied=tied), torch.arange(10).view(2, 5)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    x: Any = None
    names: set[str] = set()
    for first, end in pairwise(cuts):
        part = stage(first, end, tied)
        x = call_stage(part, (tokens,), x)
        parameters = dict(part.named_parameters(remove_duplicate=False))
        assert all(torch.equal(parameter, expected[name]) for name, parameter in parameters.items())
        names |= set(parameters)
    assert torch.equal(x, whole(tokens))
    assert names == set(expected), (
        "every parameter is in a stage, under the name that it has in the model"
    )


def test_a_stage_has_the_parameters_of_its_blocks_and_the_settings_of_all() -> None:
    model = stage(2, 4, tied=True)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert names
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in names)
    assert len(blocks_of(model)) == 6
    assert isinstance(model.get_submodule("lm_head"), OtherStageBlock)
    assert model.get_submodule("model.layers.0").window == 7, "which a model's forward may read"


def test_a_forward_sees_the_modules_inside_of_blocks_of_other_stages() -> None:
    """Without values, and without any that belong to the stage."""
    model = stage(2, 4)
    block = model.get_submodule("model.layers.0")
    assert list(dict(block.mlp.named_children())) == ["gate_proj", "up_proj", "down_proj"]
    assert isinstance(block.mlp.up_proj.weight, StandIn)
    assert block.mlp.up_proj.weight.shape == (12, 8)
    assert list(block.modules()) == [block]
    assert not hasattr(block, "mpl")


def test_a_submodule_of_that_name_is_no_function_of_blocks() -> None:
    """All transformers of timm have one."""
    model, numbered = nn.Module(), nn.Module()
    model.blocks, numbered.blocks = nn.Sequential(nn.Linear(4, 4)), 12
    assert blocks_of(model) == [model]
    assert blocks_of(numbered) == [numbered]


@pytest.mark.parametrize("bounds", [(0, 2), (4, 6)])
def test_a_tied_weight_keeps_both_of_its_names(bounds: tuple[int, int]) -> None:
    """So that whoever goes by names (first values, weights of a file, splitting) finds it, and it
    is one parameter."""
    names = dict(stage(*bounds, tied=True).named_parameters(remove_duplicate=False))
    assert names["model.embed_tokens.weight"] is names["lm_head.weight"]


class Loose(nn.Module):
    """A model with something of its own around its blocks."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("start", "shift", "unused"):
            setattr(self, name, nn.Parameter(torch.rand(2)))
        self.before = nn.PReLU()
        self.first = nn.Linear(2, 2)
        self.between = nn.PReLU()
        self.second: nn.Module = nn.Linear(2, 2)
        self.after = nn.PReLU()
        self.other_way = False

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        start = self.start
        x = self.first(self.before(x) + start)
        x = self.second(self.between(x) * self.shift)
        return self.after(x + start if self.other_way else x)


def test_what_is_around_the_blocks_goes_with_the_block_behind_it_or_the_last() -> None:
    """Each runs once, with its parameters; what no forward uses is in the first stage."""
    torch.manual_seed(0)
    whole, x = Loose(), torch.ones(3, 2)
    stages = [copy.deepcopy(whole) for _ in range(2)]
    calls = []
    for number, model in enumerate(stages):
        keep(model, number, number + 1, x)
        for name in ("before", "between", "after"):
            getattr(model, name).register_forward_hook(
                lambda _, inputs, y, place=(number, name): (
                    None if isinstance(y, StandIn) else calls.append(place)
                )
            )
    names = [[name for name, _ in model.named_parameters()] for model in stages]
    assert names == [
        ["start", "unused", "before.weight", "first.weight", "first.bias"],
        ["shift", "between.weight", "second.weight", "second.bias", "after.weight"],
    ]
    first = call_stage(stages[0], (x,), None)
    assert torch.equal(call_stage(stages[1], (x,), first), whole(x))
    assert calls == [(0, "before"), (1, "between"), (1, "after")]
    assert stages_of_parameter(whole, [(0, 1), (1, 2)], outline(whole, x)) == {
        name: (int(name in names[1]),) for name, _ in whole.named_parameters()
    }


def test_what_is_used_around_blocks_in_two_stages_is_tied() -> None:
    whole, x = Loose(), torch.ones(3, 2)
    whole.shift = whole.start
    whole.after.weight = whole.before.weight
    holders = stages_of_parameter(whole, [(0, 1), (1, 2)], outline(whole, x))
    assert {name for name, stages in holders.items() if stages == (0, 1)} == {
        "start",
        "before.weight",
    }
    second = copy.deepcopy(whole)
    keep(second, 1, 2, x)
    parameters = dict(second.named_parameters(remove_duplicate=False))
    assert parameters["start"] is parameters["shift"]
    assert parameters["before.weight"] is parameters["after.weight"]


def test_a_stage_that_would_return_a_stand_in_raises() -> None:
    """Where a forward goes another way than it did when the model was looked at."""
    whole, x = Loose(), torch.ones(3, 2)
    second = copy.deepcopy(whole)
    keep(second, 1, 2, x)
    second.other_way = True
    with pytest.raises(InputError, match="a stage of the model needs the parameter start, which"):
        call_stage(second, (x,), Activation(x, ()))


def test_a_block_that_is_there_twice_is_refused() -> None:
    twice, within = Loose(), Loose()
    twice.second, within.second = twice.first, nn.Sequential(within.first)
    for model in (twice, within):
        with pytest.raises(
            InputError, match=r"blocks\(\) name first twice, or within another block.*use pp: 1"
        ):
            outline(model, torch.ones(3, 2))


def test_which_stages_hold_a_parameter() -> None:
    bounds = [(0, 2), (2, 4), (4, 6)]
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    holders = stages_of_parameter(stage(), bounds, outline(stage(), tokens))
    for number, (first, end) in enumerate(bounds):
        names = {name for name, _ in stage(first, end).named_parameters()}
        assert names == {name for name, stages in holders.items() if stages == (number,)}
    whole = stage(tied=True)
    tied = stages_of_parameter(whole, bounds, outline(whole, tokens))
    del holders["lm_head.weight"]
    assert tied == holders | {"model.embed_tokens.weight": (0, 2)}
    alone = stages_of_parameter(whole, [(0, 6)], outline(whole, tokens))
    assert set(alone.values()) == {(0,)}


# How many blocks a stage gets ---------------------------------------------------------------------


# Whole numbers, so that sums are exact; few of them, so that there are ties; zeros, as an embedding
# nearly is.
COSTS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 10, 47]), min_size=1, max_size=10)


@given(COSTS, st.data())
def test_no_split_is_better(costs: list[int], data: st.DataObject) -> None:
    """The largest stage counts first, and then how even the others are."""
    stages = data.draw(st.integers(1, len(costs)))
    split = split_blocks(costs, stages)
    assert [block for first, end in split.bounds for block in range(first, end)] == list(
        range(len(costs))
    )
    assert len(split.bounds) == stages
    assert min(split.counts) >= 1
    assert split.costs == tuple(sum(costs[first:end]) for first, end in split.bounds)
    assert split.imbalance >= 0
    every = (
        [sum(costs[first:end]) for first, end in pairwise((0, *cuts, len(costs)))]
        for cuts in combinations(range(1, len(costs)), stages - 1)
    )
    least = min((max(sums), sum(cost**2 for cost in sums)) for sums in every)
    assert (max(split.costs), sum(cost**2 for cost in split.costs)) == least


@pytest.mark.timeout(60)
@pytest.mark.parametrize("heavy", [1, 100])
def test_many_blocks_are_split(heavy: float) -> None:
    """A block as heavy as many leaves all others free: the most work there is."""
    split = split_blocks([1.0] * 999 + [heavy], ranks=128)
    assert max(split.costs) == max(heavy, 8)


def test_it_is_said_in_one_line() -> None:
    for case in table("splits")["described"]:
        assert split_blocks(case["costs"], case["ranks"]).describe() == case["text"]
    many = split_blocks([1] * 35, 32).describe()
    assert many == "35 blocks in 32 stages: 1 to 2 each, the largest stage 83 % above the mean"


def test_stages_can_be_given() -> None:
    split = split_blocks([1, 2, 3, 4], ranks=1, stages_per_rank=2, blocks_per_stage=[3, 1])
    assert split == StageSplit(bounds=((0, 3), (3, 4)), costs=(6, 4))
    assert split.counts == (3, 1)
    assert split.imbalance == pytest.approx(0.2)


def test_an_error_says_what_works() -> None:
    for case in table("splits")["refused"]:
        with pytest.raises(StageSplitError, match=re.escape(case["message"])):
            split_blocks([1.0] * case["blocks"], case["ranks"], case["stages"], case.get("counts"))
    for cost in (-1.0, math.nan, math.inf):
        with pytest.raises(StageSplitError, match="none may be negative or not finite"):
            split_blocks([1.0, cost], 2)


# What blocks cost ---------------------------------------------------------------------------------


def test_a_llamas_blocks() -> None:
    s, d, v = 40, 64, 500
    llama = model_file("llama")
    sizes = {"intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    with torch.device("meta"):
        model = llama.Model(llama.Config(hidden_size=d, vocab_size=v, **sizes))
    costs, message = block_flops(model, model.blocks(), (torch.zeros(3, s, dtype=torch.int64),))
    embedding, *layers, norm, head = costs
    weights = sum(
        weight.numel() for weight in model.model.layers[0].parameters() if weight.dim() == 2
    )
    # products with weights, attention's two, what is returned
    assert layers == [s * (2 * weights + 4 * d * s + d)] * 3
    assert embedding == norm == s * d
    assert head == s * (2 * d * v + v + 5 * v)  # the product, what it returns, and the loss on top
    assert message == "costs of blocks: FLOPs counted on the meta device"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_asks_for_values_is_weighed() -> None:
    class Asking(nn.Sequential):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) if tokens.max() < 100 else tokens

    model = Asking(nn.Embedding(100, 8), nn.Linear(8, 8))
    costs, message = block_flops(model, list(model), (torch.zeros(1, 4, dtype=torch.int64),))
    assert costs == [8 + 1, 2 * 8 * 8 + 1]
    assert message.startswith(
        "costs of blocks by their weights: the model does not run on the meta device ("
    )
