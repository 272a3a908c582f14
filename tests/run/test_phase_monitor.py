"""One object tells everybody what the run does: timers, goodput, the watchdog and the timeouts of
process groups."""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from meshtrain.job.watchdog.deadlines import process_group_timeout
from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.run.phase_monitor import PHASES, PhaseMonitor


@pytest.fixture
def calls() -> Mock:
    """Everybody who is told something; it knows what was called, in order."""
    calls = Mock()
    calls.timer.pop.return_value = {"step_time_s": 2.0, "time_data_s": 0.5}
    calls.watchdog.deadlines = SimpleNamespace(
        longest={"step": 10.0, "evaluation": 20.0}.__getitem__, start_s=30.0, compiles=False
    )
    calls.watchdog.adapt_deadline.side_effect = lambda steps, slowest_s, save_s: slowest_s or None
    calls.stragglers.finish_step.side_effect = lambda step, times: {"own_time_max_rank": step}
    return calls


@pytest.fixture
def monitor(calls: Mock) -> Iterator[PhaseMonitor]:
    goodput = GoodputTracker(None, 4, 0.0)
    readers = (calls.watchdog, calls.stragglers, calls.profiler, calls.faults)
    with PhaseMonitor(calls.mesh, calls.timer, goodput, *readers, print) as monitor:
        calls.reset_mock()
        yield monitor


def test_a_step_is_told_to_all_and_moves_the_deadlines(calls: Mock, monitor: PhaseMonitor) -> None:
    with monitor.step(5):
        pass
    assert calls.mock_calls == [
        call.profiler.step(5),
        call.watchdog.enter_phase("step", 5),
        call.stragglers.probe.begin_step(5),
        call.faults.at_step(5),
        call.watchdog.adapt_deadline(1, 0.0, None),
    ]
    first = monitor.finish_step(5)
    assert (monitor.finished_step, monitor.slowest_s) == (5, 0.0), (
        "the first step of a job starts readers and compiles"
    )
    assert "own_time_max_rank" not in first
    second = monitor.finish_step(6)
    assert (monitor.finished_step, monitor.slowest_s) == (6, 2.0)
    assert second["own_time_max_rank"] == 5, "what was compared after a row stands in the next one"
    assert second["wall_data_s"] >= 0
    with monitor.step(7):
        pass
    assert calls.mock_calls[-1] == call.mesh.set_timeout(2.0)


def test_an_evaluation_has_a_timeout_of_its_own(calls: Mock, monitor: PhaseMonitor) -> None:
    with monitor.phase("evaluation"):
        calls.evaluate()
    assert calls.mock_calls == [
        call.mesh.set_timeout(process_group_timeout(20.0)),
        call.evaluate(),
        call.mesh.set_timeout(process_group_timeout(10.0)),
        call.timer.restart(),
    ]


def test_a_save_is_a_phase_of_the_watchdog_and_no_step_time(
    calls: Mock, monitor: PhaseMonitor
) -> None:
    with monitor.phase("checkpoint"):
        calls.save()
    assert calls.mock_calls == [
        call.watchdog.enter_phase("saving"),
        call.save(),
        call.timer.restart(),
    ]


@pytest.mark.parametrize("name", PHASES)
def test_every_phase_is_a_part_of_the_wall_time(monitor: PhaseMonitor, name: str) -> None:
    before = monitor.goodput.summary().seconds
    with monitor.phase(name):
        during = monitor.goodput.summary().seconds
    after = monitor.goodput.summary().seconds
    part = PHASES[name].goodput
    assert before[part] <= during[part] <= after[part]
    assert after[part] > before[part]


def test_after_the_last_step_waits_may_be_long(calls: Mock, monitor: PhaseMonitor) -> None:
    monitor.end()
    timeout = process_group_timeout(30.0)
    assert calls.mock_calls == [call.watchdog.enter_phase("end"), call.mesh.set_timeout(timeout)]
