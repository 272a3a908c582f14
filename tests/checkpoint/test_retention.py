"""Which checkpoints stay: by cases, and for any steps and rules."""

import math

import pytest

from meshtrain.checkpoint.retention import Retention, best_metric, steps_to_keep
from tests.properties import given, settings, st

STEPS = [100, 200, 300, 400, 500]
LOSSES = {100: 3.0, 200: 1.0, 300: math.nan, 400: 1.0, 500: 2.0}


def named(name: str, values: dict[int, float]) -> dict[int, dict[str, float]]:
    """Evaluations, as manifests have them."""
    return {step: {name: value} for step, value in values.items()}


@pytest.mark.parametrize(
    ("last", "every", "best", "lower", "kept"),
    [
        (None, None, False, True, {100, 200, 300, 400, 500}),
        (2, None, False, True, {400, 500}),
        (1, 200, False, True, {200, 400, 500}),
        (1, None, True, True, {400, 500}),  # of equal ones the newest
        (1, None, True, False, {100, 500}),
        (9, 7, True, True, {100, 200, 300, 400, 500}),
    ],
)
def test_rules(last: int | None, every: int | None, best: bool, lower: bool, kept: set[int]) -> None:
    evaluations = named("eval_loss" if lower else "accuracy", LOSSES)
    assert steps_to_keep(STEPS, evaluations, Retention(last, every, best)) == kept


def test_only_evaluations_of_the_same_number_of_samples_are_compared() -> None:
    """Older checkpoints do not say how many; the best of each number stays."""
    rules = Retention(keep_last=1, keep_best=True)
    losses = {1: 2.0, 2: 1.0, 3: 5.0, 4: 4.0, 5: 3.0, 6: 9.0}
    samples = {3: 8, 4: 8, 5: 20, 6: 20}
    evaluations = {step: {"eval_loss": loss} for step, loss in losses.items()}
    assert steps_to_keep(losses, evaluations, rules) == {2, 6}
    for step, count in samples.items():
        evaluations[step]["eval_samples"] = count
    assert steps_to_keep(losses, evaluations, rules) == {2, 4, 5, 6}


def test_accuracy_is_judged_by_where_there_is_one() -> None:
    assert best_metric([{}, {"eval_loss": 1.0, "perplexity": 2.7}]) == ("eval_loss", True)
    assert best_metric([{"eval_loss": 1.0}, {"eval_loss": 1.0, "accuracy": 0.5}]) == ("accuracy", False)
    assert best_metric([]) == ("eval_loss", True)


def test_a_value_that_is_no_number_is_not_the_best() -> None:
    rules = Retention(keep_last=1, keep_best=True)
    assert steps_to_keep([1, 2, 3, 4], named("eval_loss", {1: math.nan, 2: -math.inf, 3: 1.0, 4: 2.0}), rules) == {
        3,
        4,
    }
    assert steps_to_keep([1, 2], named("eval_loss", {1: math.nan, 2: math.nan}), rules) == {2}


def test_the_newest_stays_whatever_the_rules_say() -> None:
    assert steps_to_keep([1, 2, 3], {}, Retention(0, None, False)) == {3}
    assert steps_to_keep([], {}, Retention(0, 2, True)) == set()


@settings(max_examples=60)
@given(
    st.sets(st.integers(0, 60)),
    st.dictionaries(st.integers(0, 60), st.floats()),
    st.integers(1, 70),
    st.none() | st.integers(1, 20),
    st.booleans(),
)
def test_what_is_true_of_any_rules(
    steps: set[int], values: dict[int, float], last: int, every: int | None, best: bool
) -> None:
    evaluations = named("eval_loss", values)
    rules = Retention(last, every, best)
    kept = steps_to_keep(steps, evaluations, rules)
    newest = sorted(steps)[-last:]
    assert kept <= steps
    assert set(newest) <= kept
    assert all(step in kept for step in steps if every and step % every == 0)
    known = {step: values[step] for step in steps if step in values and math.isfinite(values[step])}
    others = {step for step in kept if step not in newest and not (every and step % every == 0)}
    assert len(others) <= (1 if best and known else 0)
    if best and known:
        assert min(known[step] for step in kept if step in known) == min(known.values())
    again = steps_to_keep(kept, evaluations, rules)
    assert again == kept, "what stays once stays when nothing was added"
