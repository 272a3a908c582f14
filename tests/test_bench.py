"""The benchmarks run as their README says, and their statistics are right. Nothing here judges CPU time."""

import json
import random
import sys
from types import ModuleType

import pytest

import data_parallel
import pipeline
import tensor_parallel
from harness import median_interval
from meshtrain.pipeline.schedule import build
from meshtrain.pipeline.simulate import simulate
from side import overridden
from tests.launching import ROOT, run

FOLDER = ROOT / "tools" / "bench"
BENCHMARKS = [data_parallel, tensor_parallel, pipeline]
each = pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda module: module.__name__)


def command(benchmark: ModuleType, *arguments: str) -> list[str]:
    return [sys.executable, str(FOLDER / f"{benchmark.__name__}.py"), *arguments]


@each
@pytest.mark.timeout(900)
def test_the_command_prints_its_table(benchmark: ModuleType) -> None:
    done = run(command(benchmark, "--pairs", "1", "--steps", "1"), timeout=800).check()
    for side in benchmark.SIDES:
        assert any(line.startswith(side.name + " ") for line in done.out.splitlines()), done.out
    for goal in benchmark.GOALS:
        assert f"{goal.side} / {goal.to} " in done.out
    apart = float(done.out.split("differ by at most ")[1])
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
def test_a_wrong_number_is_refused(wrong: list[str]) -> None:
    assert run(command(data_parallel, *wrong), timeout=60).status == 2
