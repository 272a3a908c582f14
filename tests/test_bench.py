"""The benchmarks run as their README says, and their statistics are right. Nothing here judges CPU
time."""

import io
import json
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import adapter
import context_parallel
import data_parallel
import expert_balance
import experts
import harness
import host_time
import host_time_side
import optimizers
import own_script
import pipeline
import tensor_parallel
from harness import WORKLOAD, Goal, Running, Turn, chosen, median_interval, read_arguments, summary
from meshtrain.config import Config, spec_of
from meshtrain.data.tokens import Document, write
from meshtrain.pipeline.schedule import build
from meshtrain.pipeline.simulate import simulate
from side import overridden
from tests.launching import ROOT, run

FOLDER = ROOT / "tools" / "bench"
BENCHMARKS = [
    data_parallel,
    tensor_parallel,
    context_parallel,
    pipeline,
    experts,
    optimizers,
    own_script,
    adapter,
]


def printed(script: str, *arguments: str) -> str:
    return run([sys.executable, str(FOLDER / f"{script}.py"), *arguments], timeout=800).check().out


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What takes long to train is no better test of a benchmark."""
    folder = tmp_path_factory.mktemp("bench")
    for name, width in (
        ("workload.yaml", "intermediate_size"),
        ("experts.yaml", "moe_intermediate_size"),
    ):
        values = yaml.safe_load((FOLDER / name).read_text())
        values["model"] |= {"hidden_size": 64, width: 128, "vocab_size": 300}
        values["data"]["seq_len"] = 32
        (folder / name).write_text(yaml.safe_dump(values))
    return folder


def forked_side(
    start: Callable[..., subprocess.Popen], words: list[str], **options: Any
) -> subprocess.Popen:
    """As `start` does, with processes from `forked.py` in the place of torchrun's."""
    for i, word in enumerate(words):
        if word.startswith("--nproc-per-node="):
            ranks = word.partition("=")[2]
            return start(
                [sys.executable, str(ROOT / "tests/forked.py"), ranks, *words[i + 1 :]], **options
            )
    return start(words, **options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("benchmark", "sides"),
    [
        (data_parallel, ["plain DDP, 2 processes", "meshtrain dp_shard=2"]),
        (tensor_parallel, ["meshtrain tp=2", "torch tp=2, sequence sharded"]),
        (context_parallel, ["meshtrain cp=2 ring", "meshtrain tp=2"]),
        (pipeline, ["meshtrain pp=2 zbv", "torch pp=2 zbv"]),
        (experts, ["meshtrain, 1 process", "meshtrain expert_parallel=2"]),
        (optimizers, ["AdamW dp_shard=2"]),
        (own_script, ["Run, 1 process"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_command_prints_its_table(
    benchmark: ModuleType,
    sides: list[str],
    workloads: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A side that does not run here differs from one that does by values that have other tests. One
    benchmark runs as its README says; the sides of the others are forked."""
    named = [f"--only={name}" for name in sides]
    workload = getattr(benchmark, "WORKLOAD", WORKLOAD)
    arguments = ["--pairs=1", "--steps=1", f"--workload={workloads / workload.name}", *named]
    if benchmark is data_parallel:
        out = printed(benchmark.__name__, *arguments)
    else:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setattr(harness.subprocess, "Popen", partial(forked_side, subprocess.Popen))
        monkeypatch.setattr(sys, "argv", [f"{benchmark.__name__}.py", *arguments])
        assert harness.command(benchmark.SIDES, benchmark.GOALS, "", workload) == 0
        out = capfd.readouterr().out
    sides = [benchmark.SIDES[0].name, *sides]
    for side in benchmark.SIDES:
        assert any(line.startswith(side.name + " ") for line in out.splitlines()) == (
            side.name in sides
        ), out
    for goal in benchmark.GOALS:
        assert (f"{goal.side} / {goal.to} " in out) == (goal.side in sides and goal.to in sides)
    apart = float(out.split("differ by at most ")[1])
    assert 0 < apart < 1e-5, "all sides trained the same model on the same samples"


def test_both_sides_of_the_adapter_have_the_same_parameters(tmp_path: Path) -> None:
    write(
        tmp_path,
        [Document(np.zeros(600, dtype=np.int64))],
        vocab_size=1024,
        tokenizer="none",
        source="zeros",
    )
    shapes = []
    for side in adapter.SIDES:
        config = Config.load(WORKLOAD, [f"data.path={tmp_path}", *side.overrides])
        model = spec_of(config).meta
        shapes.append({name: p.shape for name, p in model.named_parameters()})
    ours, of_transformers = shapes
    assert ours == of_transformers


def test_goals_name_sides_and_all_run_unless_some_are_named() -> None:
    for benchmark in BENCHMARKS:
        names = [side.name for side in benchmark.SIDES]
        assert len(set(names)) == len(names)
        assert all(goal.side in names and goal.to in names for goal in benchmark.GOALS)
        assert chosen(benchmark.SIDES, benchmark.GOALS, []) == (
            list(benchmark.SIDES),
            list(benchmark.GOALS),
        )
    with pytest.raises(
        SystemExit, match="no side is called 'torch tp=3'; there are: meshtrain, 1 process; mesh"
    ):
        chosen(tensor_parallel.SIDES, tensor_parallel.GOALS, ["torch tp=3"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_idle_shares_are_told_beside_the_simulator_s() -> None:
    schedules = ["1f1b", "zb-h1", "zbv"]
    small = ["--ranks=2", "--microbatches=4", "--unit=0.02", "--runs=1", "--json"]
    rows = json.loads(printed("pipeline_idle", *small, *schedules))
    assert [row["schedule"] for row in rows] == schedules
    for row in rows:
        simulated = simulate(build(row["schedule"], ranks=2, microbatches=4)).idle_share
        assert row["simulated"] == pytest.approx(simulated)
        assert 0 < row["measured"] < 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_overhead_of_an_action_is_told_for_both_engines() -> None:
    rows = json.loads(printed("pipeline_overhead", "--pairs=1", "--json"))
    assert [row["schedule"] for row in rows] == list(pipeline.BOTH)
    assert all(row["meshtrain"] > 0 and row["torch"] > 0 and row["ratio"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_are_compared_with_plain_files(ranks: int, tmp_path: Path) -> None:
    small = ["--size=24", f"--ranks={ranks}", "--pairs=1", f"--folder={tmp_path}", "--json"]
    result = json.loads(printed("checkpoint", *small))
    assert 24 * 2**20 < result["bytes"] < 25 * 2**20
    assert [row["side"] for row in result["ratios"]] == [
        "save",
        "load from disk",
        *2 * ["load from memory"],
    ]
    for row in result["ratios"]:
        assert row["ratio"] == pytest.approx(row["plain_seconds"] / row["seconds"])
    assert {"waited_s", "save_s"} <= result["lost"].keys()
    assert list(tmp_path.iterdir()) == [], "nothing is left"


@pytest.mark.slow
def test_balances_of_experts_are_compared(tmp_path: Path) -> None:
    early, late = {"loss": 6.0, "eval_loss": 5.0}, {"loss": 4.0, "eval_loss": 3.81}
    dense = 20 * [early] + expert_balance.LAST * [late]
    even = [row | {"expert_load_max": row["eval_loss"], "experts_idle": 1.0} for row in dense]
    uneven = [row | {"expert_load_max": 8.0} for row in even]
    runs = {"batch": [even, uneven], "dense": [dense, dense]}
    assert expert_balance.table(runs).splitlines() == [
        "| balance | held-out loss | largest load / mean | experts without a token |",
        "| --- | --- | --- | --- |",
        "| batch | 3.8100, 3.8100 | 3.81, 8.00 | 1.00, 1.00 |",
        "| dense | 3.8100, 3.8100 | | |",
    ]
    picture = tmp_path / "balance.png"
    expert_balance.draw(runs).savefig(picture)
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_host_s_time_is_told_by_room_and_function(workloads: Path) -> None:
    small = [f"--workload={workloads / 'workload.yaml'}", "--only=tp 2", "--json"]
    plain, tp = json.loads(printed("host_time", *small))
    assert (plain["side"], tp["side"]) == ("plain loop", "tp 2")
    # A forward and a backward of a block have some dozen operators; there are 4 blocks, and 8
    # microbatches in a step.
    for one in (plain, tp):
        assert one["operators"] > one["nodes"] > 4 * 8 * 24
        assert one["process_s"] > 0
        assert one["thread_s"] > 0
    assert plain["products_s"] > 0
    frames = {function["name"]: function["calls"] for function in tp["functions"]}
    assert frames["forward_backward"] == 1, "per step"
    rooms = host_time.Seen(**tp).rooms()
    assert {"meshtrain/parallel", "models/llama.py", "torch/nn"} <= rooms.keys()


def test_functions_in_c_belong_to_the_room_of_their_caller() -> None:
    packages = "/venv/lib/python3/site-packages"
    files = {
        str(ROOT / "meshtrain/optim/muon.py"): "meshtrain/optim",
        str(ROOT / "meshtrain/trainer.py"): "meshtrain/trainer.py",
        f"{packages}/torch/nn/modules/module.py": "torch/nn",
        f"{packages}/einops/einops.py": "einops",
        "/usr/lib/python3/contextlib.py": "Python's library",
    }
    assert [host_time.room_of(file) for file in files] == list(files.values())

    muon, module, *_ = files
    callers = {(muon, 7, "update"): (4, 4, 0.5, 0.5), (module, 9, "call"): (1, 1, 0.25, 0.25)}
    stats = {(muon, 7, "update"): (2, 3, 1.5, 2.0, {}), ("~", 0, "<mm>"): (5, 5, 0.75, 0, callers)}
    assert [
        (one["file"], one["name"], one["calls"], one["own_s"], one["is_c"])
        for one in host_time_side.functions_of(SimpleNamespace(stats=stats))
    ] == [
        (muon, "update", 3, 1.5, False),
        (muon, "<mm>", 4, 0.5, True),
        (module, "<mm>", 1, 0.25, True),
    ]


def test_an_operator_within_an_operator_is_not_launched() -> None:
    linear = SimpleNamespace(name="aten::linear", cpu_parent=None)
    matmul = SimpleNamespace(name="aten::matmul", cpu_parent=linear)
    node = SimpleNamespace(name=f"{host_time_side.NODE}AddmmBackward0", cpu_parent=None)
    product = SimpleNamespace(name="meshtrain::row", cpu_parent=node)
    inner = SimpleNamespace(name="aten::mm", cpu_parent=product)
    memory = SimpleNamespace(name="[memory]", self_cpu_memory_usage=64)
    freed = SimpleNamespace(name="[memory]", self_cpu_memory_usage=-64)
    events = [linear, matmul, node, product, inner, memory, freed]
    counts = host_time_side.counts_of(SimpleNamespace(events=lambda: events))
    assert counts == {"operators": 2, "nodes": 1, "allocations": 1}


def test_cpu_time_is_summed_over_ranks_and_wall_time_is_that_of_the_slowest(tmp_path: Path) -> None:
    side = Running(data_parallel.SIDES[0], SimpleNamespace(), tmp_path)
    ranks = [
        {"cpu_s": 1.0, "wall_s": 3.0, "allocated": 5, "reserved": 6},
        {"cpu_s": 2.0, "wall_s": 2.5},
    ]
    side.ranks = {i: io.StringIO(json.dumps(rank) + "\n") for i, rank in enumerate(ranks)}
    assert side.wait() == Turn(3.0, 3.0, 5, 6)
    turns = {"a": [Turn(2.0, 4.0), Turn(4.0, 9.0)], "b": [Turn(1.0, 8.0), Turn(4.0, 9.0)]}
    options = SimpleNamespace(steps=2, pairs=2, overrides=[])
    result = summary(turns, [[1.0], [1.0]], [Goal("a", "b")], options, (0, 0))
    (ratio,) = result["ratios"]
    assert (ratio["median"], ratio["wall_median"], ratio["wall_low"], ratio["wall_high"]) == (
        1.5,
        0.75,
        0.5,
        1.0,
    )
    assert (result["cpu_s_per_step"]["a"], result["wall_s_per_step"]["a"]) == (1.5, 3.25)


def test_a_script_gets_the_values_with_their_overrides() -> None:
    values = {"layout": {"dp_replicate": -1}, "train": {"steps": 10, "seed": 0}}
    changed = overridden(values, ["train.steps=3", 'layout={"tp": 2}'])
    assert changed == {"layout": {"tp": 2}, "train": {"steps": 3, "seed": 0}}


@pytest.mark.parametrize(
    ("n", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (10, 2, 9), (20, 6, 15)]
)
def test_the_interval_has_the_order_statistics_of_the_sign_test(
    n: int, low: int, high: int
) -> None:
    values = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(values)
    assert median_interval(values)[:2] == (low, high)


def test_a_wrong_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, value in (("--pairs", "0"), ("--steps", "x")):
        monkeypatch.setattr(sys, "argv", ["data_parallel.py", option, value])
        with pytest.raises(SystemExit) as end:
            read_arguments("a benchmark")
        assert end.value.code == 2
        assert (
            f"argument {option}: expected a whole number from 1 on, found '{value}'"
            in capsys.readouterr().err
        )
