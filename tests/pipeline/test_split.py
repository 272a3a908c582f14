"""Blocks in stages: the balance against every split there is, the errors, and the costs of real models."""

import math
import re
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn

from meshtrain.config.locate import model_file
from meshtrain.modeling.flops import block_flops
from meshtrain.pipeline.partition import StageSplit, StageSplitError, split_blocks
from tests.pipeline.formulas import table
from tests.properties import given, st

# Whole numbers, so that sums are exact; few of them, so that there are ties; zeros, as an embedding nearly is.
COSTS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 10, 47]), min_size=1, max_size=10)


@given(COSTS, st.data())
def test_no_split_is_better(costs: list[int], data: st.DataObject) -> None:
    """The largest stage counts first, and then how even the others are."""
    stages = data.draw(st.integers(1, len(costs)))
    split = split_blocks(costs, stages)
    assert [block for first, end in split.bounds for block in range(first, end)] == list(range(len(costs)))
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


# What blocks cost ---------------------------------------------------------------------------------------------------


def test_a_llamas_blocks() -> None:
    s, d, v = 40, 64, 500
    llama = model_file("llama")
    sizes = {"intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    with torch.device("meta"):
        model = llama.Model(llama.Config(hidden_size=d, vocab_size=v, **sizes))
    costs, message = block_flops(model, model.blocks(), (torch.zeros(3, s, dtype=torch.int64),))
    embedding, *layers, norm, head = costs
    weights = sum(weight.numel() for weight in model.model.layers[0].parameters() if weight.dim() == 2)
    assert layers == [s * (2 * weights + 4 * d * s + d)] * 3  # products with weights, attention's two, what is returned
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
    assert message.startswith("costs of blocks by their weights: the model does not run on the meta device (")
