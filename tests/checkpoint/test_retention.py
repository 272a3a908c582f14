"""Which checkpoints stay: by cases, for any steps and rules, and in a folder."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.checkpoint import retention
from meshtrain.checkpoint.directory import complete_steps
from meshtrain.checkpoint.retention import Pruner, Retention, steps_to_keep
from meshtrain.errors import bytes_text
from tests.checkpoint.by_hand import write_checkpoint
from tests.properties import given, settings, st

LOSSES = {1: 3.0, 2: 1.0, 3: math.nan, 4: 1.0, 5: 2.0}


def named(name: str, values: dict[int, float]) -> dict[int, dict[str, float]]:
    """Evaluations, as manifests have them."""
    return {step: {name: value} for step, value in values.items()}


def of_samples(count: int, losses: dict[int, float]) -> dict[int, dict[str, float]]:
    return {step: {"eval_loss": loss, "eval_samples": count} for step, loss in losses.items()}


@pytest.mark.parametrize(
    ("rules", "evaluations", "kept"),
    [
        (Retention(None), {}, {1, 2, 3, 4, 5}),
        (Retention(0), {}, {5}),  # the newest stays whatever the rules say
        (Retention(2), {}, {4, 5}),
        (Retention(1, 2), {}, {2, 4, 5}),
        (Retention(1, None, True), named("eval_loss", LOSSES), {4, 5}),  # of equal ones the newest
        (Retention(1, None, True), named("accuracy", LOSSES), {1, 5}),
        (
            Retention(1, None, True),
            {1: {"eval_loss": 0.0}, 2: {"eval_loss": 1.0, "accuracy": 0.5}},
            {2, 5},
        ),
        (Retention(1, None, True), named("eval_loss", dict.fromkeys((1, 2), -math.inf)), {5}),
        # Only evaluations of the same number of samples are compared; older checkpoints do not say
        # how many.
        (
            Retention(1, None, True),
            named("eval_loss", {1: 2.0, 2: 1.0}) | of_samples(8, {3: 5.0, 4: 4.0}),
            {2, 4, 5},
        ),
        (Retention(9, 7, True), named("eval_loss", LOSSES), {1, 2, 3, 4, 5}),
    ],
)
def test_rules(rules: Retention, evaluations: dict[int, dict[str, float]], kept: set[int]) -> None:
    assert steps_to_keep([1, 2, 3, 4, 5], evaluations, rules) == kept
    assert steps_to_keep([], evaluations, rules) == set()


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
    newest = set(sorted(steps)[-last:])
    multiples = {step for step in steps if every and step % every == 0}
    known = {step: values[step] for step in steps if step in values and math.isfinite(values[step])}
    assert newest | multiples <= kept <= steps
    assert len(kept - newest - multiples) <= (1 if best and known else 0)
    if best and known:
        assert min(known[step] for step in kept if step in known) == min(known.values())
    assert steps_to_keep(kept, evaluations, rules) == kept, (
        "what stays once stays when nothing was added"
    )


# In a folder --------------------------------------------------------------------------------------


def save(folder: Path, step: int, **evaluation: Any) -> None:
    write_checkpoint(folder, {}, step=step, evaluation=evaluation or None)


@pytest.mark.parametrize(
    ("rules", "evaluations", "kept"),
    [
        (Retention(keep_last=2), {}, [5, 6]),
        (Retention(keep_last=None), {}, [1, 2, 3, 4, 5, 6]),
        (Retention(keep_last=1, keep_best=True), {"eval_loss": [3, 1, 2, 5, 4, 6]}, [2, 6]),
        (
            Retention(keep_last=1, keep_best=True),
            {"eval_loss": [1, 2, 3, 4, 3.5, 5], "eval_samples": [8, 8, 8, 20, 20, 20]},
            [1, 5, 6],
        ),
    ],
)
def test_what_no_rule_keeps_is_deleted(
    tmp_path: Path, rules: Retention, evaluations: dict[str, list[float]], kept: list[int]
) -> None:
    """After each save, by two jobs one after the other: the second one reads what the first has
    written."""
    for steps in ((1, 2, 3), (4, 5, 6)):
        pruner = Pruner(tmp_path, rules, 0)
        for step in steps:
            evaluation = {name: values[step - 1] for name, values in evaluations.items()}
            save(tmp_path, step, **evaluation)
            pruner.prune(step, evaluation or None)
    assert complete_steps(tmp_path) == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


def test_a_warning_comes_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and again only if there was room in between."""
    need = 2**20
    pruner = Pruner(tmp_path, Retention(), need)
    counts = []
    for free in (2 * need, 2 * need - 1, need, 3 * need, need):
        monkeypatch.setattr(
            retention, "disk_usage", lambda _, free=free: SimpleNamespace(free=free)
        )
        pruner.prune(1, None)
        counts.append(len(pruner.notes))
    assert counts == [0, 1, 1, 1, 2]
    assert pruner.notes[1].startswith(
        f"warning: the file system of {tmp_path} has {bytes_text(need)} free"
    )
    assert f"not enough for two more checkpoints of {bytes_text(need)} each" in pruner.notes[1]
