"""One object tells everybody what the run does: timers, goodput, the watchdog and the timeouts of process groups."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.job.watchdog.deadlines import process_group_timeout
from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.run.phase_monitor import PHASES, PhaseMonitor


class Recorder(SimpleNamespace):
    """Writes down what is called, as (name of the object, method, arguments)."""

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: self.calls.append((self.name, method, *arguments))


@pytest.fixture
def calls() -> list[tuple]:
    return []


@pytest.fixture
def monitor(calls: list[tuple]) -> Iterator[PhaseMonitor]:
    times = {"step_time_s": 2.0, "time_data_s": 0.5}
    deadlines = SimpleNamespace(longest={"step": 10.0, "evaluation": 20.0}.__getitem__, start_s=30.0, compiles=False)

    def recorder(name: str, **known: Any) -> Any:
        return Recorder(calls=calls, name=name, **known)

    with PhaseMonitor(
        recorder("mesh"),
        recorder("timer", pop=lambda: dict(times)),
        GoodputTracker(None, 4, 0.0),
        recorder("watchdog", deadlines=deadlines, adapt_deadline=lambda *of: of[1] or None),
        recorder("stragglers", probe=recorder("probe"), finish_step=lambda step, times: {"own_time_max_rank": step}),
        recorder("profiler"),
        recorder("faults"),
        print,
    ) as monitor:
        calls.clear()
        yield monitor


def test_a_step_is_told_to_all_and_moves_the_deadlines(calls: list[tuple], monitor: PhaseMonitor) -> None:
    with monitor.step(5):
        pass
    assert calls == [
        ("profiler", "step", 5),
        ("watchdog", "enter_phase", "step", 5),
        ("probe", "begin_step", 5),
        ("faults", "at_step", 5),
    ]
    first = monitor.finish_step(5)
    assert (monitor.finished_step, monitor.slowest_s) == (5, 0.0), "the first step of a job starts readers and compiles"
    assert "own_time_max_rank" not in first
    second = monitor.finish_step(6)
    assert (monitor.finished_step, monitor.slowest_s) == (6, 2.0)
    assert second["own_time_max_rank"] == 5, "what was compared after a row stands in the next one"
    assert second["wall_data_s"] >= 0
    with monitor.step(7):
        pass
    assert calls[-1] == ("mesh", "set_timeout", 2.0)


def test_an_evaluation_has_a_timeout_of_its_own(calls: list[tuple], monitor: PhaseMonitor) -> None:
    with monitor.phase("evaluation"):
        calls.append(("evaluated",))
    assert calls == [
        ("mesh", "set_timeout", process_group_timeout(20.0)),
        ("evaluated",),
        ("mesh", "set_timeout", process_group_timeout(10.0)),
        ("timer", "restart"),
    ]


def test_a_save_is_a_phase_of_the_watchdog_and_no_step_time(calls: list[tuple], monitor: PhaseMonitor) -> None:
    with monitor.phase("checkpoint"):
        calls.append(("saved",))
    assert calls == [("watchdog", "enter_phase", "saving"), ("saved",), ("timer", "restart")]


@pytest.mark.parametrize("name", PHASES)
def test_every_phase_is_a_part_of_the_wall_time(monitor: PhaseMonitor, name: str) -> None:
    before = monitor.goodput.summary().seconds
    with monitor.phase(name):
        during = monitor.goodput.summary().seconds
    after = monitor.goodput.summary().seconds
    part = PHASES[name].goodput
    assert before[part] <= during[part] <= after[part]
    assert after[part] > before[part]


def test_after_the_last_step_waits_may_be_long(calls: list[tuple], monitor: PhaseMonitor) -> None:
    monitor.end()
    assert calls == [("watchdog", "enter_phase", "end"), ("mesh", "set_timeout", process_group_timeout(30.0))]
