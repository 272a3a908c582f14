"""Deadlines, what a process sees of itself, and jobs of a loop of one's own."""

import bdb
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from meshtrain.operate import witness
from meshtrain.operate.bell import Bell
from meshtrain.operate.deadlines import LEAST_S, Deadlines, patience
from meshtrain.rounds import Round
from tests.launching import forked


def test_deadlines_follow_the_steps_that_were_measured() -> None:
    deadlines = Deadlines(start_s=600)
    assert {deadlines.of(phase) for phase in ("start", "step", "evaluation", "saving", "end")} == {600}
    assert deadlines.measured(1.0) == LEAST_S
    assert deadlines.measured(5.0) is None, "a little more changes nothing"
    assert deadlines.measured(30.0) == 600
    assert deadlines.measured(1.0) is None, "and it does not shrink"
    assert (deadlines.of("step"), deadlines.of("evaluation"), deadlines.of("start")) == (600, 600, 600)
    deadlines.save_s = 60.0
    assert deadlines.of("saving") == 1200


def test_a_deadline_of_the_users_own() -> None:
    deadlines = Deadlines(start_s=600, given_s=7)
    assert deadlines.of("step") == 600, "the first steps compile, and start readers"
    assert deadlines.measured(1000.0) == 7
    assert deadlines.of("step") == 7
    deadlines.save_s = 0.1
    assert deadlines.of("saving") == 7


@pytest.mark.parametrize("deadline", [0.5, 7.0, 120.0, 10000.0])
def test_process_groups_are_more_patient_than_the_watchdog(deadline: float) -> None:
    """It needs some seconds to find out, and several looks."""
    assert patience(deadline) > deadline + 45


# What a process sees of itself --------------------------------------------------------------------------------------


def seen_by_another_thread(do: object) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(do()))  # type: ignore[operator]
    thread.start()
    thread.join()
    return found[0]


def test_a_debugger_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.gettrace() is not None or "pydevd" in sys.modules:
        pytest.skip("there is a debugger, or a tracer")
    assert not seen_by_another_thread(witness.debugged)
    monkeypatch.setitem(sys.modules, "pydevd", witness)
    assert seen_by_another_thread(witness.debugged)
    monkeypatch.undo()
    assert not seen_by_another_thread(witness.debugged)
    seen = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame: object) -> None:
            seen.append(seen_by_another_thread(witness.debugged))
            self.set_continue()

    Debugger().runcall(lambda: seen.append("body"))
    assert True in seen


def test_a_tracer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(witness, "STATUS", status)
    for tracer, found in ((0, False), (4711, True)):
        status.write_text(f"Name:\tpython\nTracerPid:\t{tracer}\nUid:\t0\n")
        assert witness.debugged() == found


def test_a_stack_names_the_code_that_matters() -> None:
    me = threading.current_thread()
    frames = witness.frames(me)
    assert witness.stack(frames)[-1].startswith("meshtrain/operate/witness.py:")
    assert any(re.match(r"operate/test_watchdog\.py:\d+ test_a_stack_names", line) for line in witness.stack(frames))
    assert len(witness.stack(frames * 9)) == witness.FRAMES


def test_who_meets_at_a_store_knows_whom_it_waits_for() -> None:
    class Store:
        def check(self, keys: list[str]) -> bool:
            return keys[0].endswith("/1")

    meeting = Round(Store(), 0, 4, "round 7")  # type: ignore[arg-type]

    def collect() -> None:
        with pytest.raises(CancelledError):
            meeting.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while (wait := witness.waits(witness.frames(thread), {}, 4)) is None or wait.missing != (0, 2, 3):
        assert time.monotonic() < deadline, wait
        time.sleep(0.01)
    assert wait.what == "the meeting 'round 7' at the store"
    meeting.cancel()
    thread.join()


def test_what_takes_too_long_or_fails_is_not_waited_for() -> None:
    assert witness.within(5, lambda: 3) == 3
    assert witness.within(0.1, lambda: time.sleep(2)) is None


def test_a_bell_rings_for_signals_and_for_those_who_ring_it() -> None:
    bell, before = Bell(), signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert not bell.wait(0.01)
        bell.hang()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert bell.wait(5)
        assert not bell.wait(0.01), "it rings once"
        bell.ring()
        begun = time.monotonic()
        assert not bell.wait(20), "nobody asked this process to end"
        assert time.monotonic() - begun < 10
        bell.take_down()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not bell.wait(0.1)
    finally:
        signal.signal(signal.SIGUSR1, before)


# A loop of one's own ------------------------------------------------------------------------------------------------

LOOP = """
import os, signal, sys, time
import torch, torch.distributed as dist
import meshtrain

with meshtrain.start(8) as job:
    for step in range(1000000):
        if step == 50 and job.rank == 1:
            {fault}
        dist.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"is gone: process \d+ was killed"),
        ("raise KeyError('mine')", r"failed: KeyError: 'mine'$"),
        pytest.param("os.kill(os.getpid(), signal.SIGSTOP)", r"is stopped \(SIGSTOP", marks=pytest.mark.cluster),
        pytest.param(
            "time.sleep(1000)",
            r"did not arrive at all_reduce 51 over all ranks \(ranks 0-2\), where ranks? .*2 waited",
            marks=pytest.mark.cluster,
        ),
    ],
    ids=["killed", "raises", "stopped", "busy"],
)
def test_a_loop_of_ones_own_names_the_rank_too(tmp_path: Path, fault: str, said: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(fault=fault))
    job = forked(3, script)
    assert job.status != 0
    for other in (0, 2):
        told = rf"^rank {other} on host \S+ stops, because rank 1 on host \S+ {said}"
        assert re.search(told, job.err, re.MULTILINE), job.err


def test_a_loop_of_ones_own_is_ended_by_a_signal_and_nobody_is_blamed(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(fault="pass") + "        if step == 60: os.kill(os.getpid(), signal.SIGTERM)\n")
    job = forked(2, script)
    assert job.status == 128 + signal.SIGTERM
    assert "stops, because" not in job.err
