"""What counts as a difference, and which one is the first."""

import math
from typing import Any

import pytest

from meshtrain.verify.compare import (
    RankStep,
    Tolerances,
    compare_rows,
    first_difference,
    padding_losses,
    sample_losses,
    samples_read,
)

LIMITS = Tolerances(1e-9, 1e-8, 1e-8)


def row(step: int, **changes: Any) -> dict[str, Any]:
    numbers = {"loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "samples_digest": "aa", "tokens": 64}
    machine = {"step_time_s": step * 0.1, "memory_gib": 1.0, "sent_bytes_tp": 7, "goodput": 0.5}
    return {"step": step, **numbers, **machine, **changes}


def test_rows_that_differ_by_rounding_and_by_the_machine_are_equal() -> None:
    other = row(1, loss=2 * (1 + 1e-10), step_time_s=9.0, memory_gib=3.0, sent_bytes_tp=1)
    del other["goodput"]
    assert compare_rows([other], [row(1)], 1e-9) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"loss": 2.00001}, "loss"),
        ({"loss": math.nan}, "loss"),
        ({"loss": None}, "loss"),
        ({"grad_norm": 1.1}, "grad_norm"),
        ({"samples_digest": "bb"}, "samples_digest"),
        ({"lr": 1.0000000001e-3}, "lr"),
        ({"loss/router": 0.3}, "loss/router"),
        ({"eval_loss": 1.0}, "eval_loss"),
    ],
)
def test_rows_that_differ(changes: dict[str, Any], what: str) -> None:
    (difference,) = compare_rows([row(1), row(2, **changes)], [row(1), row(2)], 1e-9)
    assert (difference.step, difference.what) == (2, what)


def test_a_number_that_only_one_process_has() -> None:
    (difference,) = compare_rows([row(1)], [row(1, found=3.0)], 1e-9)
    assert difference.what == "found"
    assert math.isinf(difference.size)


def test_steps_that_are_missing_or_too_many() -> None:
    rows = [row(1), row(2)]
    assert [difference.step for difference in compare_rows(rows[:1], rows, 1e-9)] == [2]
    assert [difference.step for difference in compare_rows(rows, rows[:1], 1e-9)] == [2]


def read(*indices: int) -> list[list[Any]]:
    return [[0, index, f"digest{index}"] for index in indices]


def test_ranks_that_share_samples_count_them_once() -> None:
    first = RankStep(1, samples=read(4, 5), first=0, real=2, losses=[1.0, 0.5, 0.0], speaks=True)
    twin = RankStep(1, samples=read(4, 5), first=0, real=2, losses=[0.5, 0.25, 0.0], speaks=False)
    second = RankStep(1, samples=read(7), first=2, real=1, losses=[2.0, 0.0, 0.0], speaks=True)
    part = RankStep(1, samples=read(7), first=2, real=1, losses=[0.5, 0.0, 0.0], speaks=True)
    ranks = [first, twin, second, part]
    assert sorted(index for _, index, _ in samples_read(ranks).elements()) == [4, 5, 7]
    assert sample_losses(ranks) == {0: 1.0, 1: 0.5, 2: 2.5}
    assert padding_losses(ranks) == 0


def test_the_first_difference_is_the_earliest_of_a_step() -> None:
    """What is wrong early makes everything after it wrong."""
    alone = [[RankStep(0)], [RankStep(1, samples=read(1), real=1, losses=[2.0], speaks=True)]]
    other = RankStep(
        1,
        samples=read(2),
        real=1,
        losses=[2.5],
        speaks=True,
        gradients={"w": 0.3, "b": 0.0},
        weights={"w": 0.1},
    )
    rows = [row(1, loss=2.5, grad_norm=3.0)]
    found = first_difference(rows, [[RankStep(0)], [other]], [row(1)], alone, LIMITS)
    whats = [difference.what for difference in found]
    assert whats == ["samples", "sample_loss", "loss", "gradient", "grad_norm", "weight"]
    assert [x.parameter for x in found if x.what == "gradient"] == ["w"]


def test_initial_weights_come_before_all_steps() -> None:
    alone = [[RankStep(0)], [RankStep(1)]]
    other = [[RankStep(0, weights={"w": 0.5})], [RankStep(1, gradients={"w": 0.5})]]
    (difference,) = first_difference([row(1, loss=9.0)], other, [row(1)], alone, LIMITS)
    assert (difference.step, difference.what, difference.parameter) == (0, "weight", "w")


def test_a_gradient_that_is_no_number_differs() -> None:
    alone = [[RankStep(0)], [RankStep(1)]]
    other = [
        [RankStep(0)],
        [RankStep(1, gradients={"w": math.nan}), RankStep(1, gradients={"w": 0})],
    ]
    (difference,) = first_difference([row(1)], other, [row(1)], alone, LIMITS)
    assert difference.what == "gradient"


def test_a_loss_that_is_no_number_differs_wherever_it_stands() -> None:
    alone = [[RankStep(0)], [RankStep(1, real=2, losses=[2.0, 1.0], speaks=True)]]
    other = [[RankStep(0)], [RankStep(1, real=2, losses=[2.0, math.nan], speaks=True)]]
    (difference,) = first_difference([row(1)], other, [row(1)], alone, LIMITS)
    assert difference.what == "sample_loss"


def test_a_run_that_records_more_or_fewer_steps_differs_in_them() -> None:
    steps = [[RankStep(0)], [RankStep(1)], [RankStep(2)]]
    rows = [row(1), row(2)]
    for few, many in (((rows[:1], steps[:2]), (rows, steps)), ((rows, steps[:2]), (rows, steps))):
        for one, other in ((few, many), (many, few)):
            (difference,) = first_difference(*one, *other, LIMITS)
            assert (difference.step, difference.what) == (2, "step")


def test_steps_before_the_one_asked_for_are_passed_over() -> None:
    steps = [[RankStep(0)], [RankStep(1)], [RankStep(2)]]
    other = [[RankStep(0)], [RankStep(1, weights={"w": 0.5})], [RankStep(2, weights={"w": 0.7})]]
    rows = [row(1), row(2)]
    changed = [row(1, loss=9.0), row(2)]
    (difference,) = first_difference(changed, other, rows, steps, LIMITS, since=2)
    assert (difference.step, difference.size) == (2, 0.7)
