"""Blocks in stages: the balance against every split there is, the errors, and the costs of real models."""

import math
import time
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.config.locate import model_file
from meshtrain.modeling.flops import block_flops, sample_flops
from meshtrain.pipeline.partition import StageSplit, StageSplitError, split_blocks
from tests.properties import given, st

# Whole numbers, so that sums are exact; few of them, so that there are ties; zeros, as an embedding nearly is.
COSTS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 10, 47]), min_size=1, max_size=10)


def quality(costs: tuple[float, ...]) -> tuple[float, float]:
    """What a split is judged by; smaller is better."""
    return max(costs), sum(cost**2 for cost in costs)


def every_split(costs: list[int], stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(sum(costs[first:end]) for first, end in pairwise((0, *cuts, len(costs))))
        for cuts in combinations(range(1, len(costs)), stages - 1)
    ]


@given(COSTS, st.data())
def test_no_split_is_better(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    split = split_blocks(costs, stages)
    assert quality(split.costs) == min(quality(other) for other in every_split(costs, stages))


def test_the_largest_stage_counts_more_than_an_even_split() -> None:
    """(11, 4, 6) has the smaller sum of squares."""
    assert split_blocks([2, 9, 2, 2, 6], 3).costs == (2, 9, 10)


@given(st.lists(st.floats(0, 1e18), min_size=1, max_size=80), st.data())
def test_any_costs_give_stages_in_order(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    split = split_blocks(costs, stages)
    assert len(split.bounds) == stages
    assert [block for first, end in split.bounds for block in range(first, end)] == list(range(len(costs)))
    assert min(split.counts) >= 1
    assert split.costs == tuple(math.fsum(costs[first:end]) for first, end in split.bounds)
    assert split.imbalance >= -1e-9


@pytest.mark.parametrize("heavy", [1, 100])
def test_many_blocks_are_split_at_once(heavy: float) -> None:
    """A block as heavy as many leaves all others free: the most work there is."""
    start = time.process_time()
    split = split_blocks([1.0] * 999 + [heavy], ranks=128)
    assert time.process_time() - start < 20
    assert max(split.costs) == max(heavy, 8)


@pytest.mark.parametrize(
    ("costs", "ranks", "said"),
    [
        ([1] * 17 + [2.5], 4, "18 blocks in 4 stages: 5 + 5 + 5 + 3, the largest stage 3 % above the mean"),
        ([1, 1], 2, "2 blocks in 2 stages: 1 + 1, the largest stage less than 1 % above the mean"),
        ([1, 3], 2, "2 blocks in 2 stages: 1 + 1, the largest stage 50 % above the mean"),
        ([1] * 35, 32, "35 blocks in 32 stages: 1 to 2 each, the largest stage 83 % above the mean"),
        ([1], 1, "1 block in 1 stage"),
        ([0, 0], 2, "2 blocks in 2 stages: 1 + 1, the largest stage less than 1 % above the mean"),
    ],
)
def test_it_is_said_in_one_line(costs: list[float], ranks: int, said: str) -> None:
    assert split_blocks(costs, ranks).describe() == said


def test_stages_can_be_given() -> None:
    split = split_blocks([1, 2, 3, 4], ranks=1, stages_per_rank=2, blocks_per_stage=[3, 1])
    assert split == StageSplit(bounds=((0, 3), (3, 4)), costs=(6, 4))
    assert split.counts == (3, 1)
    assert split.imbalance == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("blocks", "ranks", "each", "counts", "said"),
    [
        (6, 4, 2, None, "use at most 3 ranks with 2 stages each, or 4 ranks with at most 1 stage each, or a model of"),
        (3, 4, 2, None, "use at most 1 rank with 2 stages each, or at most 3 ranks with 1 stage each, or a model of"),
        (4, 8, 1, None, "4 blocks cannot form 8 stages (8 ranks with 1 stage each): use at most 4 ranks with 1 stage"),
        (1, 2, 4, None, "use at most 1 rank with 1 stage each, or a model of at least 8 blocks"),
        (
            4,
            2,
            1,
            [2, 1],
            "is for 3 blocks, and the model has 4 (embedding and head included): make the numbers",
        ),
        (4, 2, 1, [1, 2, 1], "has 3 numbers, and there are 2 stages: give the number of blocks of each stage"),
        (4, 2, 1, [4, 0], "has a stage without blocks: give each at least 1"),
        (4, 0, 1, None, "use at least one of each"),
    ],
)
def test_an_error_says_what_works(blocks: int, ranks: int, each: int, counts: list[int] | None, said: str) -> None:
    with pytest.raises(StageSplitError) as error:
        split_blocks([1.0] * blocks, ranks, each, counts)
    assert said in str(error.value)


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_a_cost_is_a_number(cost: float) -> None:
    with pytest.raises(StageSplitError, match="none may be negative or not finite"):
        split_blocks([1.0, cost], 2)


# What blocks cost ---------------------------------------------------------------------------------------------------


def llama(**keys: object) -> Any:
    module = model_file("llama")
    small = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    with torch.device("meta"):
        return module.Model(module.Config(**(small | keys)))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_llamas_blocks(batch: int) -> None:
    model, s, d, v = llama(vocab_size=500), 40, 64, 500
    costs, said = block_flops(model, model.blocks(), (torch.zeros(batch, s, dtype=torch.int64),))
    embedding, *layers, norm, head = costs
    weights = sum(weight.numel() for weight in model.model.layers[0].parameters() if weight.dim() == 2)
    assert layers == [s * (2 * weights + 4 * d * s + d)] * 3  # products with weights, attention's two, what is returned
    assert embedding == norm == s * d
    assert head == s * (2 * d * v + v + 5 * v)  # the product, what it returns, and the loss on top
    assert said == "costs of blocks: FLOPs counted on the meta device"


def test_forward_and_backward_are_three_times_the_blocks() -> None:
    model, tokens = llama(), torch.zeros(2, 24, dtype=torch.int64)
    whole, _ = sample_flops(model, (tokens,))
    costs, _ = block_flops(model, model.blocks(), (tokens,))
    assert whole == pytest.approx(3 * sum(costs), rel=0.05)


def test_the_last_stage_has_fewer_layers() -> None:
    """As large a vocabulary as in Llama 3.2 1B: the head costs three layers."""
    model = llama(num_hidden_layers=16, vocab_size=3 * 64 * 8)
    costs, _ = block_flops(model, model.blocks(), (torch.zeros(1, 32, dtype=torch.int64),))
    split = split_blocks(costs, 4)
    layers = range(1, 17)  # of the blocks; before them the embedding, after them norm and head
    assert [len(set(layers) & set(range(*bounds))) for bounds in split.bounds] == [4, 5, 5, 2]


def test_a_classifiers_blocks() -> None:
    module = model_file("convnet")
    model = module.Model(module.Config())
    costs, _ = block_flops(model, model.blocks(), (torch.zeros(2, 1, 28, 28),))
    first = 2 * 28 * 28 * 32 * (9 * 1 + 9 * 32 + 1) + 32 * 14 * 14
    second = 2 * 14 * 14 * 64 * (9 * 32 + 9 * 64 + 32) + 64 * 14 * 14
    assert costs == [first, second, 2 * 64 * 10 + 10 + 5 * 10]


def test_a_model_that_asks_for_values_is_weighed() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(100, 8), nn.Linear(8, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.mix(self.embed(tokens)) if tokens.max() < 100 else tokens

    model = Asking()
    costs, said = block_flops(model, [model.embed, model.mix], (torch.zeros(1, 4, dtype=torch.int64),))
    assert costs == [8 + 1, 2 * 8 * 8 + 1]
    assert said.startswith("costs of blocks by their weights: the model does not run on the meta device (")


def test_nothing_is_left_on_the_model() -> None:
    model = llama()
    block_flops(model, model.blocks(), (torch.zeros(1, 4, dtype=torch.int64),))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
