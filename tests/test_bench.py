"""The benchmarks run as their README says, and their statistics are right. Nothing here judges a time."""

import random
import sys
from types import ModuleType

import pytest

import data_parallel
import tensor_parallel
from harness import median_interval
from side import overridden
from tests.launching import ROOT, run

FOLDER = ROOT / "tools" / "bench"
BENCHMARKS = [data_parallel, tensor_parallel]
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
