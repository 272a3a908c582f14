"""The benchmarks run as their README says, and their statistics are right. Nothing here judges CPU time."""

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

import pytest
import yaml

import context_parallel
import data_parallel
import expert_balance
import experts
import harness
import optimizers
import pipeline
import tensor_parallel
from harness import WORKLOAD, Goal, Running, Turn, chosen, median_interval, read_arguments, summary
from meshtrain.config import Config
from meshtrain.modeling.build import parameter_count, spec_of
from meshtrain.modeling.experts import expert_costs
from meshtrain.pipeline.schedule import build
from meshtrain.pipeline.simulate import simulate
from side import overridden
from tests.launching import ROOT, run

FOLDER = ROOT / "tools" / "bench"
BENCHMARKS = [data_parallel, tensor_parallel, context_parallel, pipeline, experts, optimizers]
each = pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda module: module.__name__)


def command(benchmark: ModuleType, *arguments: str) -> list[str]:
    return [sys.executable, str(FOLDER / f"{benchmark.__name__}.py"), *arguments]


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What takes long to train is no better test of a benchmark."""
    folder = tmp_path_factory.mktemp("bench")
    for name, width in (("workload.yaml", "intermediate_size"), ("experts.yaml", "moe_intermediate_size")):
        values = yaml.safe_load((FOLDER / name).read_text())
        values["model"] |= {"hidden_size": 64, width: 128, "vocab_size": 300}
        values["data"]["seq_len"] = 32
        (folder / name).write_text(yaml.safe_dump(values))
    return folder


def forked_side(start: Callable[..., subprocess.Popen], words: list[str], **options: Any) -> subprocess.Popen:
    """As `start` does, with processes from `forked.py` in the place of torchrun's."""
    for i, word in enumerate(words):
        if word.startswith("--nproc-per-node="):
            ranks = word.partition("=")[2]
            return start([sys.executable, str(ROOT / "tests/forked.py"), ranks, *words[i + 1 :]], **options)
    return start(words, **options)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("benchmark", "only"),
    [
        (data_parallel, ["plain DDP, 2 processes", "meshtrain dp_shard=2"]),
        (tensor_parallel, ["meshtrain tp=2", "torch tp=2, sequence sharded"]),
        (context_parallel, ["meshtrain cp=2 ring", "meshtrain tp=2"]),
        (pipeline, ["meshtrain pp=2 zbv", "torch pp=2 zbv"]),
        (experts, ["meshtrain, 1 process", "meshtrain expert_parallel=2"]),
        (optimizers, ["AdamW dp_shard=2"]),
    ],
    ids=["data_parallel", "tensor_parallel", "context_parallel", "pipeline", "experts", "optimizers"],
)
def test_the_command_prints_its_table(
    benchmark: ModuleType,
    only: list[str],
    workloads: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A side that does not run here differs from one that does by values that have other tests. One benchmark runs as
    its README says; the sides of the others are forked."""
    named = [argument for name in only for argument in ("--only", name)]
    workload = getattr(benchmark, "WORKLOAD", WORKLOAD)
    arguments = ["--pairs=1", "--steps=1", f"--workload={workloads / workload.name}", *named]
    if benchmark is data_parallel:
        out = run(command(benchmark, *arguments), timeout=800).check().out
    else:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setattr(harness.subprocess, "Popen", partial(forked_side, subprocess.Popen))
        monkeypatch.setattr(sys, "argv", [f"{benchmark.__name__}.py", *arguments])
        assert harness.command(benchmark.SIDES, benchmark.GOALS, "", workload) == 0
        out = capfd.readouterr().out
    sides = [benchmark.SIDES[0].name, *only]
    for side in benchmark.SIDES:
        assert any(line.startswith(side.name + " ") for line in out.splitlines()) == (side.name in sides), out
    for goal in benchmark.GOALS:
        assert (f"{goal.side} / {goal.to} " in out) == (goal.side in sides and goal.to in sides)
    apart = float(out.split("differ by at most ")[1])
    assert 0 < apart < 1e-5, "all sides trained the same model on the same samples"


@each
def test_every_goal_names_sides_that_run(benchmark: ModuleType) -> None:
    names = [side.name for side in benchmark.SIDES]
    assert len(set(names)) == len(names)
    assert all(goal.side in names and goal.to in names for goal in benchmark.GOALS)


@pytest.mark.timeout(300)
def test_idle_shares_are_told_beside_the_simulator_s() -> None:
    schedules = ["1f1b", "zb-h1", "zbv"]
    small = ["--ranks", "2", "--microbatches", "4", "--unit", "0.02", "--runs", "1", "--json", *schedules]
    done = run([sys.executable, str(FOLDER / "pipeline_idle.py"), *small], timeout=280).check()
    found = json.loads(done.out)
    assert [one["schedule"] for one in found] == schedules
    for one in found:
        simulated = simulate(build(one["schedule"], ranks=2, microbatches=4)).idle_share
        assert one["simulated"] == pytest.approx(simulated)
        assert 0 < one["measured"] < 1
        assert one["time"] >= 1, "a step takes as long as its sleeps"


@pytest.mark.timeout(300)
def test_the_overhead_of_an_action_is_told_for_both_engines() -> None:
    done = run([sys.executable, str(FOLDER / "pipeline_overhead.py"), "--pairs", "1", "--json"], timeout=280).check()
    found = json.loads(done.out)
    assert [one["schedule"] for one in found] == list(pipeline.BOTH)
    assert all(one["meshtrain"] > 0 and one["torch"] > 0 and one["ratio"] > 0 for one in found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_are_compared_with_plain_files(ranks: int, tmp_path: Path) -> None:
    small = ["--size", "24", "--ranks", str(ranks), "--pairs", "1", "--folder", str(tmp_path), "--json"]
    done = run([sys.executable, str(FOLDER / "checkpoint.py"), *small], timeout=280).check()
    found = json.loads(done.out)
    assert 24 * 2**20 < found["bytes"] < 25 * 2**20
    assert [one["side"] for one in found["ratios"]] == ["save", "load from disk", *2 * ["load from memory"]]
    for one in found["ratios"]:
        assert one["ratio"] == pytest.approx(one["plain_seconds"] / one["seconds"])
    assert 0 < found["lost"]["waited_s"] < found["lost"]["save_s"]
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def balance_rows(steps: int, load: float) -> list[dict[str, float]]:
    """Of a run: the last one has an evaluation, as some others have."""
    rows = [{"step": i + 1, "loss": 6.0 - i / 50, "expert_load_max": load, "experts_idle": 1.0} for i in range(steps)]
    for i in (steps // 2, steps - 1):
        rows[i]["eval_loss"] = 5.0 - i / 100
    return rows


def test_balances_of_experts_are_compared(tmp_path: Path) -> None:
    runs = {kind: [balance_rows(120, 2.0), balance_rows(120, 2.5)] for kind in ("batch", "sequence", "none")}
    for row in runs["none"][0][-expert_balance.LAST :]:
        row["expert_load_max"] = 8.0
    dense = [{k: v for k, v in row.items() if not k.startswith("expert")} for row in balance_rows(120, 0)]
    runs["dense"] = [dense, dense]
    head, _, *lines = expert_balance.table(runs).splitlines()
    assert head == "| balance | held-out loss | largest load / mean | experts without a token |"
    assert lines == [
        "| batch | 3.8100, 3.8100 | 2.00, 2.50 | 1.00, 1.00 |",
        "| sequence | 3.8100, 3.8100 | 2.00, 2.50 | 1.00, 1.00 |",
        "| none | 3.8100, 3.8100 | 8.00, 2.50 | 1.00, 1.00 |",
        "| dense | 3.8100, 3.8100 | | |",
    ]
    picture = tmp_path / "balance.png"
    expert_balance.draw(runs).savefig(picture)
    assert picture.stat().st_size > 10_000


def test_the_models_that_are_compared_have_as_many_parameters_active() -> None:
    """The runs themselves are those of `meshtrain.train`; the tests of the documents train the same file."""
    active = {}
    for name, overrides in expert_balance.BALANCES.items():
        config = Config.load(str(expert_balance.CONFIG), overrides, world_size=2)
        assert config.resolved is not None
        assert config.resolved.experts == (1 if name == expert_balance.DENSE else 2)
        costs = expert_costs(config, config.resolved)
        active[name] = parameter_count(spec_of(config).meta) if costs is None else costs.active
    router = 4 * 16 * 128  # which the dense model has not
    assert active == dict.fromkeys(active, active[expert_balance.DENSE] + router) | {"dense": active["dense"]}


def test_cpu_time_is_summed_over_ranks_and_wall_time_is_that_of_the_slowest(tmp_path: Path) -> None:
    side = Running(data_parallel.SIDES[0], SimpleNamespace(), tmp_path)
    ranks = [{"cpu_s": 1.0, "wall_s": 3.0, "allocated": 5, "reserved": 6}, {"cpu_s": 2.0, "wall_s": 2.5}]
    side.ranks = {i: io.StringIO(json.dumps(rank) + "\n") for i, rank in enumerate(ranks)}
    assert side.wait() == Turn(3.0, 3.0, 5, 6)
    turns = {"a": [Turn(2.0, 4.0), Turn(4.0, 9.0)], "b": [Turn(1.0, 8.0), Turn(4.0, 9.0)]}
    options = SimpleNamespace(steps=2, pairs=2, overrides=[])
    result = summary(turns, [[1.0], [1.0]], [Goal("a", "b")], options, (0, 0))
    (ratio,) = result["ratios"]
    assert (ratio["median"], ratio["wall_median"], ratio["wall_low"], ratio["wall_high"]) == (1.5, 0.75, 0.5, 1.0)
    assert (result["cpu_s_per_step"]["a"], result["wall_s_per_step"]["a"]) == (1.5, 3.25)


def test_a_script_gets_the_values_with_their_overrides() -> None:
    values = {"layout": {"dp_replicate": -1}, "train": {"steps": 10, "seed": 0}}
    changed = overridden(values, ["train.steps=3", 'layout={"tp": 2}'])
    assert changed == {"layout": {"tp": 2}, "train": {"steps": 3, "seed": 0}}


@pytest.mark.parametrize(("n", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (10, 2, 9), (20, 6, 15)])
def test_the_interval_has_the_order_statistics_of_the_sign_test(n: int, low: int, high: int) -> None:
    values = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(values)
    assert median_interval(values)[:2] == (low, high)


@pytest.mark.parametrize("n", [6, 10, 13, 20])
def test_the_interval_holds_the_median_as_often_as_it_says(n: int) -> None:
    draw = random.Random(0)
    intervals = [median_interval([draw.random() for _ in range(n)]) for _ in range(4000)]
    held = sum(low <= 0.5 <= high for low, high, _ in intervals) / len(intervals)
    assert intervals[0][2] >= 0.95
    assert held == pytest.approx(intervals[0][2], abs=0.015)


@pytest.mark.parametrize("wrong", [["--pairs", "0"], ["--steps", "x"]])
def test_a_wrong_number_is_refused(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["data_parallel.py", *wrong])
    with pytest.raises(SystemExit) as ended:
        read_arguments("a benchmark")
    assert ended.value.code == 2
    assert f"argument {wrong[0]}: expected a whole number from 1 on, found '{wrong[1]}'" in capsys.readouterr().err


@each
def test_all_sides_run_unless_some_are_named(benchmark: ModuleType) -> None:
    assert chosen(benchmark.SIDES, benchmark.GOALS, []) == (list(benchmark.SIDES), list(benchmark.GOALS))


def test_a_side_that_is_not_there_is_refused() -> None:
    with pytest.raises(SystemExit, match="no side is called 'torch tp=3'; there are: meshtrain, 1 process; mesh"):
        chosen(tensor_parallel.SIDES, tensor_parallel.GOALS, ["torch tp=3"])
