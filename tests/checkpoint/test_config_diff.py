"""What may differ between a checkpoint's config and that of the run which goes on from it."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from meshtrain.checkpoint.config_diff import Changes, check, compare, compare_configs
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from tests.checkpoint.test_manifest import made

THEN: dict[str, Any] = {
    "model": {
        "name": "llama",
        "hidden_size": 64,
        "rope_scaling": {"factor": 8.0},
        "weights": "/there",
    },
    "data": {
        "source": "/a/own.py",
        "path": "/a/x",
        "seq_len": 32,
        "validation": 0.02,
        "workers": 2,
    },
    "layout": {"dp_shard": -1},
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]},
    "train": {
        "steps": 100,
        "seed": 0,
        "precision": "float32",
        "z_loss": 0.0,
        "output": "runs/a",
        "time_limit": None,
    },
    "checkpoint": {"every": 100, "resume": "latest"},
    "parallel": {"expert_parallel": None},
}


TABLE = yaml.safe_load(Path(__file__).with_name("changed_configs.yaml").read_text())


def changed(**values: Any) -> dict[str, Any]:
    """Keys with __ for the point."""
    now = copy.deepcopy(THEN)
    for name, value in values.items():
        section, key = name.split("__")
        now[section][key] = value
    return now


def test_what_may_change_is_listed_and_another_run_is_refused() -> None:
    for kind, rows in TABLE.items():
        for name, value, *lines in rows:
            changes = compare_configs(THEN, changed(**{name.replace(".", "__"): value}))
            expected = (lines if kind == "refused" else [], lines if kind == "listed" else [])
            assert (changes.refused, changes.listed) == expected, name
    strange = {"model": 3, "train": None, "x": {}}
    for then in (copy.deepcopy(THEN), strange):
        assert compare_configs(then, THEN) == Changes()


def test_other_data_may_be_allowed() -> None:
    changes = compare_configs(
        THEN, changed(data__seq_len=64, batch__global_size=8), other_data=True
    )
    assert changes.refused == ["batch.global_size: 16 -> 8"]
    assert changes.listed == ["data.seq_len: 32 -> 64"]


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


@pytest.mark.parametrize(
    ("older", "tokenizer"), [(True, "a.json"), (True, "bytes"), (False, "a.json")]
)
def test_the_data_of_an_older_version_may_have_another_end_token(
    older: bool, tokenizer: str
) -> None:
    section = {"tokenizer": tokenizer} | ({} if older else {"end_token": None})
    layout = Layout({"dp_shard": 1})
    then = made(layout, {}, config={"data": section}, counters={"steps": 3})
    config: Any = SimpleNamespace(
        plain=lambda: {"data": section}, checkpoint=SimpleNamespace(allow_other_data=False)
    )
    spec = RunSpec(
        config=config,
        folder=Path("runs/x"),
        checkpoints=Path("runs/x/checkpoints"),
        data=dict(then.data) | {"fingerprint": "cd"},
        versions={},
        steps=3,
    )
    with pytest.raises(InputError, match="allow other data") as refused:
        check(then, spec, SimpleNamespace(layout=layout), Path("x"))
    assert ("data.end_token=TOKEN" in str(refused.value)) == (older and tokenizer == "a.json")


def test_what_changes_at_later_steps_may_differ() -> None:
    """Batch sizes and weights count up to the checkpoint's step; where the data of a source lies
    does not."""

    def with_values(size: Any, weight: Any, path: str = "a") -> dict[str, Any]:
        sources = [{"name": "a", "path": path, "weight": weight, "epochs": 1, "source": None}]
        return changed(batch__global_size=size, data__sources=sources)

    then = with_values(16, 1.0)
    later = with_values([[0, 16], [50, 32]], [[0, 1.0], [60, 0.5]], path="/moved/a")
    assert compare_configs(then, later, step=50).refused == []
    assert compare_configs(later, then, step=50).refused == []
    refused = compare_configs(then, later, step=61).refused
    assert [line.partition(":")[0] for line in refused] == ["batch.global_size", "data.sources"]
