"""What may differ between a checkpoint's config and that of the run which goes on from it."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.checkpoint.config_diff import compare, compare_configs
from meshtrain.layout import Layout
from tests.checkpoint.test_manifest import made

THEN: dict[str, Any] = {
    "model": {"name": "llama", "hidden_size": 64, "rope_scaling": {"factor": 8.0}, "weights": "/there"},
    "data": {"source": "/a/own.py", "path": "/a/x", "seq_len": 32, "validation": 0.02, "workers": 2},
    "layout": {"dp_shard": -1},
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]},
    "train": {"steps": 100, "seed": 0, "precision": "float32", "output": "runs/a", "time_limit": None},
    "checkpoint": {"every": 100, "resume": "latest"},
    "parallel": {"expert_parallel": None},
}


def changed(**values: Any) -> dict[str, Any]:
    """Keys with __ for the point."""
    now = copy.deepcopy(THEN)
    for name, value in values.items():
        section, key = name.split("__")
        now[section][key] = value
    return now


def test_equal_configs_differ_in_nothing() -> None:
    found = compare_configs(THEN, copy.deepcopy(THEN))
    assert (found.refused, found.listed) == ([], [])


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"model__hidden_size": 128}, "model.hidden_size: 64 -> 128"),
        ({"model__name": "convnet"}, "model.name: llama -> convnet"),
        ({"model__rope_scaling": None}, "model.rope_scaling: {factor: 8.0} -> null"),
        ({"data__seq_len": 64}, "data.seq_len: 32 -> 64"),
        ({"data__validation": 0.1}, "data.validation: 0.02 -> 0.1"),
        ({"data__source": "text"}, "data.source: /a/own.py -> text"),
        ({"batch__global_size": 32}, "batch.global_size: 16 -> 32"),
        ({"train__seed": 1}, "train.seed: 0 -> 1"),
        ({"train__precision": "float64"}, "train.precision: float32 -> float64"),
    ],
)
def test_another_run_is_refused(values: dict[str, Any], line: str) -> None:
    found = compare_configs(THEN, changed(**values))
    assert (found.refused, found.listed) == ([line], [])


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"model__weights": None}, "model.weights: /there -> null"),
        ({"data__path": "/b/x"}, "data.path: /a/x -> /b/x"),
        ({"data__workers": 0}, "data.workers: 2 -> 0"),
        ({"batch__micro_size": 2}, "batch.micro_size: 4 -> 2"),
        ({"optimizer__lr": 0.2}, "optimizer.lr: 0.1 -> 0.2"),
        ({"optimizer__betas": [0.9, 0.99]}, "optimizer.betas: [0.9, 0.95] -> [0.9, 0.99]"),
        ({"train__precision": "bfloat16"}, "train.precision: float32 -> bfloat16"),
        ({"checkpoint__every": "epoch"}, "checkpoint.every: 100 -> epoch"),
    ],
)
def test_what_may_change_is_listed(values: dict[str, Any], line: str) -> None:
    found = compare_configs(THEN, changed(**values))
    assert (found.refused, found.listed) == ([], [line])


def test_what_is_told_elsewhere_is_not_told_here() -> None:
    """The layout that -1 stood for is compared with the layout, the number of steps with that of the run."""
    now = changed(
        train__output="b",
        train__time_limit="3h",
        checkpoint__resume="none",
        train__steps=7,
        layout__dp_shard=4,
        parallel__expert_parallel=4,
    )
    assert compare_configs(THEN, now) == compare_configs(THEN, THEN)


def test_files_may_move() -> None:
    assert not compare_configs(THEN, changed(data__source="/b/own.py")).refused
    assert compare_configs(THEN, changed(data__source="/b/other.py")).refused


def test_what_a_checkpoint_says_is_printed_without_harm() -> None:
    found = compare_configs(THEN | {"train": {"seed": "\x1b[2J"}}, THEN)
    assert found.refused == ["train.seed: ?[2J -> 0"]


def test_all_differences_are_told_at_once() -> None:
    found = compare_configs(THEN, changed(train__seed=1, model__hidden_size=1, batch__micro_size=1, optimizer__lr=1.0))
    assert [line.split(":")[0] for line in found.refused] == ["model.hidden_size", "train.seed"]
    assert [line.split(":")[0] for line in found.listed] == ["batch.micro_size", "optimizer.lr"]


def test_other_data_may_be_allowed() -> None:
    found = compare_configs(THEN, changed(data__seq_len=64, batch__global_size=8), other_data=True)
    assert found.refused == ["batch.global_size: 16 -> 8"]
    assert found.listed == ["data.seq_len: 32 -> 64"]


def test_keys_of_another_version_and_strange_sections_contradict_nothing() -> None:
    now = changed(model__new_key=3, train__new=1)
    assert compare_configs(THEN, now) == compare_configs(THEN, THEN)
    assert compare_configs({"model": 3, "train": None, "x": {}}, THEN) == compare_configs(THEN, THEN)


def test_the_layouts_are_compared_with_what_experts_make_of_them() -> None:
    layout = Layout({"dp_shard": 4})
    then = made(layout.with_experts(4), {}, config={}, counters={"steps": 3})
    spec = SimpleNamespace(
        config=SimpleNamespace(plain=dict, checkpoint=SimpleNamespace(allow_other_data=True)),
        data=then.data,
        steps=3,
        versions={},
    )
    job = SimpleNamespace(layout=layout)
    assert compare(then, spec, job).listed == ["experts: 4 -> 1"]


def test_what_changes_at_later_steps_may_differ() -> None:
    """Batch sizes and weights count up to the checkpoint's step; where the data of a source lies does not."""

    def with_values(size: Any, weight: Any, path: str = "a") -> dict[str, Any]:
        sources = [{"name": "a", "path": path, "weight": weight, "epochs": 1, "source": None}]
        return changed(batch__global_size=size, data__sources=sources)

    then = with_values(16, 1.0)
    later = with_values([[0, 16], [50, 32]], [[0, 1.0], [60, 0.5]], path="/moved/a")
    assert compare_configs(then, later, step=50).refused == []
    assert compare_configs(later, then, step=50).refused == []
    refused = compare_configs(then, later, step=61).refused
    assert [line.partition(":")[0] for line in refused] == ["batch.global_size", "data.sources"]
