"""How long a rank may take, and when it is late."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from meshtrain.checkpoint.staging import Snapshot
from meshtrain.job.watchdog.deadlines import (
    LEAST_S,
    DeadlineClock,
    Deadlines,
    process_group_timeout,
)
from meshtrain.job.watchdog.introspect import local_status
from tests.job.fakes import FakeTime, job_of


def test_deadlines_of_phases() -> None:
    wrong = []
    for case in yaml.safe_load(Path(__file__).with_name("deadlines.yaml").read_text()):
        deadlines, phase = Deadlines(start_s=600, **case.get("with", {})), case["phase"]
        hangs = next((missed for missed in range(1, 9) if deadlines.hangs(phase, missed)), None)
        patient = phase in ("start", "saving", "end") or case["longest"] > case["of"]
        expected = (case["of"], case["longest"], case["hangs"], patient)
        if (
            deadlines.of(phase),
            deadlines.longest(phase),
            hangs,
            deadlines.patient(phase),
        ) != expected:
            wrong.append(case)
    assert wrong == []


def test_a_deadline_grows_with_the_slowest_step_and_never_shrinks() -> None:
    deadlines = Deadlines()
    a_little_more = 1.2 * LEAST_S / 20
    assert [deadlines.adapt(slowest) for slowest in (1.0, a_little_more, 30.0, 1.0)] == [
        LEAST_S,
        None,
        600,
        None,
    ]
    assert deadlines.step_s == 600
    assert Deadlines(given_s=7).adapt(1000.0) == 7


def test_process_groups_are_more_patient_than_the_watchdog() -> None:
    """It needs some seconds to find out, and several looks."""
    assert all(
        process_group_timeout(deadline) > deadline + 45 for deadline in (0.5, 7.0, 120.0, 10000.0)
    )


def test_a_clock_counts_the_deadlines_missed_since_the_run_got_on(clock: FakeTime) -> None:
    deadlines = DeadlineClock()

    def missed(at: float) -> tuple[bool, int]:
        clock.now = at
        return deadlines.missed(), deadlines.misses

    assert missed(599) == (False, 0)
    assert missed(604) == (True, 1)
    assert missed(1203) == (False, 1), "as long again from the look that has found it"
    assert missed(1205) == (True, 2)
    assert deadlines.late()
    clock.now = 5000
    deadlines.ignore_suspend()
    assert missed(5599) == (False, 2), "a process that was stopped has its time from then on"
    assert missed(5601) == (True, 3)
    deadlines.enter_phase("step", 7)
    assert (deadlines.step, deadlines.misses, deadlines.late()) == (7, 0, False)


def test_a_start_that_gets_on_takes_as_long_as_it_needs(clock: FakeTime) -> None:
    """A corpus is prepared for hours, or weights are read; what does not get on has three
    deadlines."""
    deadlines = DeadlineClock()
    for hour in range(1, 9):
        clock.now = 3600.0 * hour
        deadlines.advanced(hour)
        assert (deadlines.missed(), deadlines.late()) == (False, False)
    for missed in (1, 2, 3):
        clock.now += 601
        deadlines.advanced(8)
        assert (deadlines.missed(), deadlines.late()) == (True, True)
        assert deadlines.deadlines.hangs("start", deadlines.misses) == (missed == 3)
    deadlines.enter_phase("step", 1)
    clock.now += 601
    deadlines.advanced(9)
    assert deadlines.missed(), "in training a reader's progress is none of the step"


@pytest.mark.parametrize("place", ["device", "disk"])
def test_a_save_that_waits_for_the_device_is_late_sooner_than_one_that_waits_for_the_disk(
    place: str, clock: FakeTime
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    deadlines = DeadlineClock()
    deadlines.deadlines.save_s = 1.0
    deadlines.enter_phase("saving")

    def wait() -> None:
        begun.set()
        goes_on.wait()

    snapshot = Snapshot.__new__(Snapshot)  # the copies of a device that hangs are never there
    copied = SimpleNamespace(synchronize=wait, elapsed_time=lambda _: 0.0)
    snapshot.host_s, snapshot._events = 0.0, [copied, copied]
    thread = threading.Thread(
        target=snapshot.wait if place == "device" else wait, name="checkpoint", daemon=True
    )
    thread.start()
    begun.wait()
    try:
        for seconds, late in (
            (299, False),
            (301, place == "device"),
            (3899, place == "device"),
            (3901, True),
        ):
            clock.now = seconds
            assert local_status(job_of(), deadlines, None).late == late, seconds
    finally:
        goes_on.set()
        thread.join()
