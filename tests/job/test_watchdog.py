"""Deadlines, what a process sees of itself, and jobs of a loop of one's own."""

import bdb
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshtrain.checkpoint.staging import Snapshot
from meshtrain.errors import InputError, TrainingError
from meshtrain.job.environment import Environment
from meshtrain.job.exit import job_exit
from meshtrain.job.pending import PendingWait, Resource, pending_waits, waiting
from meshtrain.job.process import Job
from meshtrain.job.signals import SignalWakeup
from meshtrain.job.store import RemoteFailure, Round
from meshtrain.job.watchdog import diagnose as diagnosing
from meshtrain.job.watchdog import evidence, introspect, watchdog
from meshtrain.job.watchdog.deadlines import LEAST_S, DeadlineClock, Deadlines, process_group_timeout
from meshtrain.job.watchdog.diagnose import Coordinator
from meshtrain.job.watchdog.introspect import Failure, local_status
from meshtrain.job.watchdog.records import (
    FAILURE_MARK,
    Diagnosis,
    DiagnosisKind,
    FailureKind,
    PendingCollective,
    RankReport,
    RankStatus,
    Reach,
)
from meshtrain.job.watchdog.watchdog import Watchdog, watched
from tests.job.test_diagnose import rank, waits
from tests.launching import forked


def test_deadlines_follow_the_steps_that_were_measured() -> None:
    deadlines = Deadlines(start_s=600)
    assert {deadlines.of(phase) for phase in ("start", "step", "evaluation", "saving", "end")} == {600}
    assert deadlines.adapt(1.0) == LEAST_S
    assert deadlines.adapt(5.0) is None, "a little more changes nothing"
    assert deadlines.adapt(30.0) == 600
    assert deadlines.adapt(1.0) is None, "and it does not shrink"
    assert (deadlines.of("step"), deadlines.of("evaluation"), deadlines.of("start")) == (600, 600, 600)
    deadlines.adapt(60.0)
    assert (deadlines.of("step"), deadlines.of("evaluation")) == (1200, 600), "the first evaluation may compile"
    deadlines.warm_phases.add("evaluation")
    assert deadlines.of("evaluation") == 1200
    deadlines.save_s = 60.0
    assert deadlines.of("saving") == 1200


def test_a_deadline_of_the_users_own() -> None:
    deadlines = Deadlines(start_s=600, given_s=7)
    assert deadlines.of("step") == 600, "the first steps compile, and start readers"
    assert deadlines.adapt(1000.0) == 7
    assert deadlines.of("step") == 7
    deadlines.save_s = 0.1
    assert deadlines.of("saving") == 7


def test_who_may_be_busy_hangs_after_some_deadlines_and_who_was_measured_at_once() -> None:
    deadlines = Deadlines()
    assert deadlines.hangs("step", 1)
    assert [deadlines.hangs("saving", missed) for missed in (1, 2, 3, 4)] == [False, False, True, True]
    deadlines.save_s = 1.0
    assert deadlines.hangs("saving", 1)
    assert not deadlines.hangs("start", 100)


def test_who_may_compile_hangs_after_some_deadlines_and_others_wait_for_it_as_long() -> None:
    deadlines = Deadlines(start_s=600, compiles=True)
    assert [deadlines.hangs("step", missed) for missed in (1, 2, 3)] == [False, False, True]
    assert (deadlines.patient("step"), deadlines.longest("step")) == (True, 1800), "groups do not end it before"
    assert Deadlines(start_s=600).longest("step") == 600
    deadlines.adapt(60.0)
    assert (deadlines.hangs("step", 1), deadlines.patient("step"), deadlines.longest("step")) == (True, False, 1200)
    assert (deadlines.hangs("evaluation", 1), deadlines.longest("evaluation")) == (False, 1800), "the first one, too"
    deadlines.warm_phases.add("evaluation")
    assert (deadlines.hangs("evaluation", 1), deadlines.longest("evaluation")) == (True, 1200)


def test_a_clock_counts_the_deadlines_missed_since_the_run_got_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("meshtrain.job.watchdog.deadlines.time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = DeadlineClock()

    def missed(at: float) -> tuple[bool, int]:
        now[0] = at
        return clock.missed(), clock.misses

    assert missed(599) == (False, 0)
    assert missed(604) == (True, 1)
    assert missed(1203) == (False, 1), "as long again from the look that has found it"
    assert missed(1205) == (True, 2)
    assert clock.late()
    now[0] = 5000
    clock.ignore_suspend()
    assert missed(5599) == (False, 2), "a process that was stopped has its time from then on"
    assert missed(5601) == (True, 3)
    clock.enter_phase("step", 7)
    assert (clock.step, clock.misses, clock.late()) == (7, 0, False)


@pytest.mark.parametrize("place", ["device", "disk"])
def test_a_save_that_waits_for_the_device_is_late_sooner_than_one_that_waits_for_the_disk(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, begun, goes_on = [0.0], threading.Event(), threading.Event()
    monkeypatch.setattr("meshtrain.job.watchdog.deadlines.time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = DeadlineClock()
    clock.deadlines.save_s = 1.0
    clock.enter_phase("saving")

    def wait() -> None:
        begun.set()
        goes_on.wait()

    snapshot = Snapshot.__new__(Snapshot)  # the copies of a device that hangs are never there
    copied = SimpleNamespace(synchronize=wait, elapsed_time=lambda _: 0.0)
    snapshot.host_s, snapshot._events = 0.0, [copied, copied]  # type: ignore[list-item]
    job = Job(Environment("none", 0, 1, 0, "a", None), torch.device("cpu"), None)
    thread = threading.Thread(target=snapshot.wait if place == "device" else wait, name="checkpoint", daemon=True)
    thread.start()
    begun.wait()
    try:
        for seconds, late in ((299, False), (301, place == "device"), (3899, place == "device"), (3901, True)):
            now[0] = seconds
            assert local_status(job, clock, None).late == late, seconds
    finally:
        goes_on.set()
        thread.join()


@pytest.mark.parametrize("deadline", [0.5, 7.0, 120.0, 10000.0])
def test_process_groups_are_more_patient_than_the_watchdog(deadline: float) -> None:
    """It needs some seconds to find out, and several looks."""
    assert process_group_timeout(deadline) > deadline + 45


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
    assert not seen_by_another_thread(introspect.debugger_attached)
    monkeypatch.setitem(sys.modules, "pydevd", introspect)
    assert seen_by_another_thread(introspect.debugger_attached)
    monkeypatch.undo()
    assert not seen_by_another_thread(introspect.debugger_attached)
    seen = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame: object) -> None:
            seen.append(seen_by_another_thread(introspect.debugger_attached))
            self.set_continue()

    Debugger().runcall(lambda: seen.append("body"))
    assert True in seen


def test_a_tracer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(introspect, "STATUS", status)
    for tracer, found in ((0, False), (4711, True)):
        status.write_text(f"Name:\tpython\nTracerPid:\t{tracer}\nUid:\t0\n")
        assert introspect.debugger_attached() == found


def test_a_stack_names_the_code_that_matters() -> None:
    me = threading.current_thread()
    frames = introspect.frames(me.ident or 0)
    assert introspect.stack(frames)[-1].startswith("meshtrain/job/watchdog/introspect.py:")
    assert any(re.match(r"job/test_watchdog\.py:\d+ test_a_stack_names", line) for line in introspect.stack(frames))
    assert len(introspect.stack(frames * 9)) == introspect.FRAMES


def waits_of(thread: threading.Thread) -> PendingCollective | None:
    return introspect.pending_collective(pending_waits().get(thread.ident or 0, ()), {})


def test_who_meets_at_a_store_knows_whom_it_waits_for() -> None:
    class Store:
        def add(self, key: str, number: int) -> int:
            return 1

        def get(self, key: str) -> bytes:
            return b'[1, "here"]\n'

    meeting = Round(Store(), 0, 4, "round 7")  # type: ignore[arg-type]

    def collect() -> None:
        with pytest.raises(CancelledError):
            meeting.gather()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while (wait := waits_of(thread)) is None or wait.missing != (0, 2, 3):
        assert time.monotonic() < deadline, wait
        time.sleep(0.01)
    assert wait.label == "the meeting 'round 7' at the store"
    meeting.cancel()
    thread.join()


def test_a_recorder_that_takes_too_long_or_fails_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    job = Job(Environment("none", 0, 1, 0, "a", None), torch.device("cpu"), None)
    for state, seconds, printed in ((lambda _: time.sleep(1000), 0.1, False), (lambda _: 1 // 0, 60.0, True)):
        monkeypatch.setattr(introspect, "RECORDER_S", seconds)
        monkeypatch.setattr(introspect, "flight_recorder_state", state)
        assert local_status(job, DeadlineClock(), None).begun == {}
        assert ("ZeroDivisionError" in capsys.readouterr().err) == printed


def test_a_thread_is_woken_by_signals_and_by_other_threads() -> None:
    wakeup, before = SignalWakeup(), signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert not wakeup.wait(0.01)
        wakeup.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert wakeup.wait(60) == {signal.SIGUSR1}
        assert not wakeup.wait(0.01), "it wakes once"
        wakeup.wake()
        begun = time.monotonic()
        assert not wakeup.wait(20), "nobody asked this process to end"
        assert time.monotonic() - begun < 10
        wakeup.uninstall()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not wakeup.wait(0.1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    """A rank that is told a verdict ignores signals, and so would the jobs that are started after it."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def wakeup() -> Iterator[SignalWakeup]:
    wakeup, before = SignalWakeup(), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    wakeup.install()
    yield wakeup
    wakeup.uninstall()
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_the_watchdogs_only_as_long_as_nobody_takes_it(wakeup: SignalWakeup) -> None:
    def users(number: int, _: object) -> None:
        mine.append(number)

    mine: list[int] = []
    assert wakeup.handle_sigterm()
    os.kill(os.getpid(), signal.SIGTERM)
    assert wakeup.wait(60) == {signal.SIGTERM}
    signal.signal(signal.SIGTERM, users)
    assert not wakeup.handles_sigterm
    assert not wakeup.handle_sigterm()
    os.kill(os.getpid(), signal.SIGTERM)
    assert mine == [signal.SIGTERM]
    wakeup.uninstall()
    assert signal.getsignal(signal.SIGTERM) is users


def test_signals_to_a_child_are_its_own(wakeup: SignalWakeup) -> None:
    assert wakeup.handle_sigterm()
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(3)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    other = os.fork()
    if other == 0:
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(4))
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(20)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 4
    assert not wakeup.wait(0.05), "and this process has had none"
    assert wakeup.handles_sigterm


def watching() -> Watchdog:
    """As a job of one's own has it; who leads an inquest is written down."""
    watch = Watchdog(SimpleNamespace(rank=0))  # type: ignore[arg-type]
    watch.deadlines.start_s = float("inf")
    watch._server = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    watch._wakeup.install()
    watch.handle_sigterm()
    return watch


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_that_the_program_handles_does_not_end_it(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, led = signal.signal(number, lambda *_: None), []
    watch = watching()
    monkeypatch.setattr(watch, "_inquire", lambda hangs, failed=False: led.append(failed))
    try:
        os.kill(os.getpid(), number)
        watch._signals |= watch._wakeup.wait(60)
        watch._look()
        assert (watch._failure, led, watch._asked_to_end) == (None, [False], False)
        os.kill(os.getpid(), signal.SIGTERM)
        watch._signals |= watch._wakeup.wait(60)
        watch._look()
        assert watch._failure is not None
        assert (watch._failure.text, led, watch._asked_to_end) == ("ended by SIGTERM", [False, True], True)
    finally:
        watch.close()
        signal.signal(number, before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_the_users_own_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, mine = watching(), []
    monkeypatch.setattr(watch, "_inquire", lambda hangs, failed=False: None)
    try:
        signal.signal(signal.SIGTERM, lambda number, _: mine.append(number))
        os.kill(os.getpid(), signal.SIGTERM)
        watch._signals |= watch._wakeup.wait(60)
        watch._look()
        assert (mine, watch._failure, watch._asked_to_end) == ([signal.SIGTERM], None, False)
        watch.close()
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "nor is it taken away"
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# A rank that looks into things, in a world that is made up ----------------------------------------------------------


class World:
    """What `Ranks` is to a watchdog: what is seen of the ranks is given, one look after another."""

    def __init__(self, *looks: list[RankReport]) -> None:
        self.looks, self.told = list(looks), list[set[int]]()

    def alive_from_rank_0(self, *, same_host: bool = False) -> list[SimpleNamespace]:
        return [SimpleNamespace(rank=0)]

    def examine(self) -> list[RankReport]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def survivors(self, diagnosis: Diagnosis) -> set[int]:
        return {0, 1, 2} - set(diagnosis.ranks)

    def tell(self, ranks: set[int], what: object) -> None:
        self.told.append(ranks)

    def kill_stopped(self, diagnosis: Diagnosis) -> None:
        pass


def one_of_three(number: int, *looks: list[RankReport]) -> Watchdog:
    """The watchdog of this rank of three."""
    job = Job(Environment("none", number, 3, number, "a", None), torch.device("cpu"), None)
    watch = Watchdog(job)
    watch._server, watch._peers = object(), World(*looks)  # type: ignore[assignment]
    watch._coordinator = Coordinator(watch.peers, watch._clock, watch._closed)
    return watch


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_an_error_is_that_of_a_connection_to_other_ranks_by_where_it_comes_from() -> None:
    reset = "[Errno 104] Connection reset by peer"
    assert not introspect.is_connection_error(raised(ConnectionResetError(reset))), "what reads data raises it"
    assert not introspect.is_connection_error(raised(RuntimeError(reset))), "as does this"
    assert not introspect.is_connection_error(raised(ValueError("NCCL")))
    assert introspect.is_connection_error(
        raised(RuntimeError("[../gloo/transport/tcp/pair.cc:1] Connection closed by peer"))
    )
    assert introspect.is_connection_error(raised(dist.DistStoreError("wait timeout")))

    class Store:
        def add(self, key: str, number: int) -> int:
            raise RuntimeError(reset)

    for store, over in (Store(), False), (dist.HashStore(), True):
        with pytest.raises(RuntimeError) as caught:
            Round(store, 0, 2, "round", lambda over=over: over).gather()  # type: ignore[misc]
        assert introspect.is_connection_error(caught.value)


@pytest.mark.parametrize("what", ["absent", "failed", "deadlock"])
def test_a_rank_that_is_to_blame_prints_its_own_error(what: str) -> None:
    watch = one_of_three(2)
    watch.diagnosis = Diagnosis(DiagnosisKind(what), (2,), "it was rank 2")
    watch._decided.set()
    reader, closed = raised(ConnectionResetError("reset by peer")), raised(RuntimeError("gloo/ Connection closed"))
    assert watch.first_failure("rank 2", reader) is None
    assert watch.first_failure("rank 2", closed) == RemoteFailure(watch.diagnosis, printed=True), "a consequence"
    watch.diagnosis = None
    assert watch.first_failure("rank 2", closed) is None
    watch.diagnosis = Diagnosis(DiagnosisKind(what), (2,), "it was rank 2")
    assert watch.first_failure("rank 2", closed) is None, "it was there before"
    watch.diagnosis = Diagnosis(DiagnosisKind(what), (1,), "it was rank 1")
    assert watch.first_failure("rank 2", closed) == RemoteFailure(watch.diagnosis)


@pytest.mark.parametrize("failure", [None, Failure(FailureKind.ERROR, "the loss is gone")])
def test_an_error_of_the_watchdog_is_told_once_and_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, failure: Failure | None
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.01)
    watch, looks = one_of_three(2), []
    watch._failure = failure

    def look() -> None:
        looks.append(watch._decided.is_set())
        if len(looks) == 3:
            watch.leave()
        raise KeyError("mine")

    monkeypatch.setattr(watch, "_look", look)
    watch._run()
    ends = failure is not None
    assert looks == [False, ends, ends], "who has failed waits no longer; who has not will wait, should it fail later"
    told = capsys.readouterr().err
    assert told.startswith("warning: the watchdog of rank 2 on host a has failed, and goes on:\nTraceback ")
    assert told.count("KeyError: 'mine'") == 1


def test_a_verdict_does_not_wait_for_a_file_system_that_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(evidence, "WRITE_S", 0.2)
    watch = one_of_three(1, [rank(0, reach="gone"), rank(1), rank(2)])
    told, hang = [], threading.Event()

    def lose(diagnosis: Diagnosis) -> None:
        told.append(list(watch.peers.told))  # type: ignore[attr-defined]
        hang.wait(60)

    watch.on_job_lost(lose)
    begun = time.monotonic()
    verdict = watch._coordinate(hangs=False, failed=True)
    assert time.monotonic() - begun < 30
    assert verdict == watch.diagnosis
    assert told == [[{2}]], "the others were told before"
    assert "rank 1 on host a could not write that down within 0 s" in capsys.readouterr().err
    hang.set()


def test_who_is_waited_for_in_a_save_is_told_once_and_ends_the_job_after_three_deadlines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(diagnosing, "FRESH_S", 0)  # in truth a deadline is longer than a look is fresh

    def look(late: bool) -> list[RankReport]:
        here: dict[str, Any] = {"phase": "saving", "late": late, "patient": True}
        meeting = waits("the meeting 'save 4' at the store", "", (0, 1, 2), missing=(2,))
        return [rank(0, wait=meeting, **here), rank(1, wait=meeting, **here), rank(2, **here)]

    watch = one_of_three(0, look(True))
    watch.deadlines.start_s = 0.05
    watch.enter_phase("saving", 5)
    for missed in (1, 2, 3):
        assert watch.diagnosis is None
        time.sleep(0.1)
        watch._look()
        told = capsys.readouterr().err
        waiting = "waiting for rank 2 on host a (dp_shard 2): saving (step 5), for 20 s now\n"
        assert told == {1: waiting, 2: ""}.get(missed, told)
    assert watch.diagnosis is not None
    assert (watch.diagnosis.kind, watch.diagnosis.ranks) == ("absent", (2,))


def test_ranks_in_one_place_are_stuck_only_if_they_stay_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(diagnosing, "MOVES_S", 0.01)

    def at(number: int) -> list[RankReport]:
        wait, begun = waits(f"all_reduce {number}", ranks=(0, 1, 2), number=number), {"0,1,2": number}
        return [rank(i, wait=wait, begun=begun) for i in range(3)]

    assert one_of_three(0, at(7), at(8))._coordinate(hangs=True, failed=False) is None
    assert capsys.readouterr().err == ""
    verdict = one_of_three(0, at(7), at(7))._coordinate(hangs=True, failed=False)
    assert verdict is not None
    assert verdict.kind == "stuck"
    told = capsys.readouterr().err
    assert told.startswith("rank 0 on host a stops, because all ranks wait in all_reduce 7 over dp_shard: a device ")


def test_what_was_looked_into_just_now_is_not_looked_into_again() -> None:
    """All ranks come with the same question when they have missed a deadline."""
    well, gone = [rank(i) for i in range(3)], [rank(0), rank(1, reach="gone"), rank(2)]
    watch = one_of_three(0, well, gone)
    for _ in range(3):
        assert watch._coordinate(hangs=True, failed=False, late=True) is None
    verdict = watch._coordinate(hangs=True, failed=True)
    assert verdict is not None
    assert verdict.ranks == (1,), "who has failed is looked into at once"


def test_the_block_is_printed_by_the_leader_if_it_is_to_blame_itself(capsys: pytest.CaptureFixture) -> None:
    at: dict[str, Any] = {"wait": waits(ranks=(0, 1, 2))}
    watch = one_of_three(0, [rank(0, stack=("mine.py:3 wait",)), rank(1, **at), rank(2, **at)])
    verdict = watch._coordinate(hangs=True, failed=False)
    assert verdict is not None
    assert verdict.ranks == (0,)
    told = capsys.readouterr().err
    assert told.startswith("rank 0 on host a stops, because rank 0 on host a (dp_shard 0) did not arrive at ")
    assert "      mine.py:3 wait\n" in told


def test_what_takes_long_and_cannot_be_explained_is_told_with_all_stacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(diagnosing, "FRESH_S", 0)
    watch = one_of_three(0, [rank(i, stack=("step.py:9 update",)) for i in range(3)])
    for _ in range(2):
        assert watch._coordinate(hangs=True, failed=False, late=True) is None
    told = capsys.readouterr().err
    assert told.count("warning: this takes long (20 s in step 5), and no rank waits") == 1
    assert "  ranks 0-2, in step 5:\n      step.py:9 update\n" in told


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
            # One of the two others may have given up waiting at its own limit before all are asked.
            r"did not arrive at all_reduce 51 over all ranks \(ranks 0-2\), where ranks? (0|2|0, 2) waited",
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
    # One after the other, as a launcher does it, and the one that serves the store last.
    stop = "[os.kill(pid, signal.SIGTERM) for pid in reversed(job.gather('asking', os.getpid())) if job.rank == 0]"
    script.write_text(LOOP.format(fault="pass") + f"        if step == 60: {stop}\n")
    job = forked(2, script)
    assert job.status == 128 + signal.SIGTERM
    assert "stops, because" not in job.err


# The registry of waits -----------------------------------------------------------------------------------------------


class Group:
    """What a process group is to the registry."""

    group_name = "7"


def test_the_innermost_wait_for_ranks_is_where_a_rank_waits() -> None:
    group: Any = Group()
    groups = {"7": ("pp", (1, 3))}
    with waiting("gradients", group), waiting("the next batch", resource=Resource.DATA):
        with waiting("activation", group, missing=lambda: [3]):
            mine = pending_waits()[threading.get_ident()]
        assert len(pending_waits()[threading.get_ident()]) == 2
    assert threading.get_ident() not in pending_waits()
    assert [wait.label for wait in mine] == ["gradients", "the next batch", "activation"]
    inner, outer = (introspect.pending_collective(waits, groups) for waits in (mine, mine[:2]))
    assert (str(inner), inner and inner.missing) == ("activation over pp", (3,))
    assert (str(outer), outer and outer.missing) == ("gradients over pp", None)
    assert introspect.pending_collective(mine, {}) is None, "not a group of this rank"


def test_an_error_tells_which_wait_it_has_ended() -> None:
    group: Any = Group()

    def fail(*waits: PendingWait) -> BaseException:
        try:
            with ExitStack() as stack:
                for wait in waits:
                    stack.enter_context(wait)
                raise RuntimeError("Socket Timeout")
        except RuntimeError as error:
            return error

    error = fail(waiting("gradients", group), waiting("activation", group))
    failure = Failure.of(error)
    assert (failure.broken, failure.wait and failure.wait.label) == (True, "activation")
    failure = Failure.of(fail(waiting("the next batch", resource=Resource.DATA)))
    assert (failure.broken, failure.wait) == (False, None), "what reads data fails alike"


def test_a_rank_that_waits_for_no_rank_says_for_what() -> None:
    job = Job(Environment("none", 0, 1, 0, "a", None), torch.device("cpu"), None)
    clock = DeadlineClock()
    clock.enter_phase("step", 6)
    with waiting("the next batch", resource=Resource.DATA):
        status = seen_by_another_thread(lambda: local_status(job, clock, None))
    assert isinstance(status, RankStatus)
    assert (status.wait, status.resource) == (None, "the next batch")
    busy = RankReport(0, "a", "rank 0 on host a", 1, Reach.ANSWERS, status)
    verdict = diagnosing.diagnose([busy, rank(1, wait=waits(ranks=(0, 1)))], hangs=True)
    assert verdict is not None
    assert ": rank 0 is in step 6, waiting for the next batch; it is at " in verdict.headline


BLOCKED = """
import os, threading, time
import torch, torch.distributed as dist
import meshtrain
from meshtrain.job.exit import job_exit
from meshtrain.job.pending import PendingWait, Resource, pending_waits, waiting
from meshtrain.job.watchdog.deadlines import DeadlineClock
from meshtrain.job.watchdog.introspect import local_status
from meshtrain.parallel import gloo_collectives

def look(job, words):
    while local_status(job, DeadlineClock(), None).wait is None:
        time.sleep(0.01)
    time.sleep(0.2)  # the recorder may have it later
    print(job.rank, words, local_status(job, DeadlineClock(), None).wait, flush=True)
    job.store.set(words, "seen")

with meshtrain.start(60) as job:
    x, group = torch.ones(4), dist.group.WORLD
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "recv": lambda: dist.recv(x, 1),
        "own": lambda: gloo_collectives.all_gather(torch.empty(8), x, group),
    }
    for words, call in calls.items():
        if job.rank == 0:
            threading.Thread(target=look, args=(job, words)).start()
            call()
        else:
            job.store.wait([words])
            dist.send(x, 0) if words == "recv" else call()
"""


@pytest.mark.parametrize("recorder", [True, False])
def test_where_a_rank_waits_is_known_with_the_flight_recorder_and_without(tmp_path: Path, recorder: bool) -> None:
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED if recorder else "import os\nos.environ['TORCH_FR_BUFFER_SIZE'] = '0'\n" + BLOCKED)
    job = forked(2, script)
    assert job.status == 0, job.err
    told = [line for line in job.out.splitlines() if line.startswith("0 ")]
    collective = f"all_reduce{' 1' if recorder else ''} over all ranks"
    own = "0 own sends and receives over all ranks"
    assert told == [f"0 all_reduce {collective}", "0 recv recv", own], job.out + job.err


def test_no_name_of_a_local_variable_decides() -> None:
    text = Path(introspect.__file__).read_text()
    assert text.count("f_locals") == text.count('f_locals.get("group")') == 1  # the argument of torch's own functions
    assert "getline" not in text
    assert '"meshtrain/' not in text


# For programs --------------------------------------------------------------------------------------------------------


def failures_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(FAILURE_MARK)) for line in text.splitlines() if line.startswith(FAILURE_MARK)]


def test_a_failure_is_one_line_for_programs_after_the_block(capsys: pytest.CaptureFixture) -> None:
    watch = one_of_three(0, [rank(0), rank(1, reach="gone"), rank(2)])
    watch.job.failures = watch
    watch.enter_phase("step", 7)
    assert watch._coordinate(hangs=False, failed=True) is not None
    told = capsys.readouterr().err
    assert told.splitlines()[-1].startswith(FAILURE_MARK)
    fields = failures_in(told)
    assert [(each["kind"], each["ranks"], each["hosts"], each["step"], each["phase"]) for each in fields] == [
        ("gone", [1], ["a"], 7, "step")
    ]
    assert fields[0]["text"].startswith("rank 1 on host a (dp_shard 1) is gone: process 1001 was killed")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(KeyError("mine"), "failed"), (TrainingError("the loss is gone"), "training"), (InputError("no"), "")],
)
def test_a_rank_that_fails_alone_prints_the_line_too(
    error: Exception, kind: str, capsys: pytest.CaptureFixture
) -> None:
    job = Job(Environment("none", 0, 1, 0, "a", None), torch.device("cpu"), None)

    def run() -> None:
        with watched(job) as watch, job_exit(job):
            watch.enter_phase("saving", 3)
            raise error

    with pytest.raises((SystemExit, KeyError)):
        run()
    fields = failures_in(capsys.readouterr().err)
    assert [(each["kind"], each["step"], each["phase"]) for each in fields] == ([(kind, 3, "saving")] if kind else [])
    if kind == "failed":
        assert (fields[0]["ranks"], fields[0]["hosts"]) == ([0], ["a"])
        assert fields[0]["text"] == "rank 0 on host a failed: KeyError: 'mine'"


def test_a_diagnosis_comes_through_json_as_it_was() -> None:
    one = Diagnosis(DiagnosisKind.ABSENT, (1, 2), "they did not arrive", ("more",), ("a", "b"))
    assert Diagnosis.from_json(json.loads(json.dumps(asdict(one)))) == one
    status = rank(0, wait=waits(missing=(2,)), begun={"0,1": 3}, stack=("f",), kind=FailureKind.ERROR).answer
    assert RankStatus.from_json(json.loads(json.dumps(asdict(status)))) == status
