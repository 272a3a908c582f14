"""Deadlines, what a process sees of itself, and jobs of a loop of one's own."""

import bdb
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshtrain.checkpoint.snapshot import Snapshot
from meshtrain.environment import Environment
from meshtrain.operate import last_words, leading, watchdog, witness
from meshtrain.operate.bell import Bell
from meshtrain.operate.deadlines import LEAST_S, Clock, Deadlines, patience
from meshtrain.operate.leading import Leader
from meshtrain.operate.testify import Failure, statement
from meshtrain.operate.testimony import Seen, Verdict
from meshtrain.operate.watchdog import Watch
from meshtrain.rounds import Lost, Round
from meshtrain.runtime import Job
from tests.launching import forked
from tests.operate.test_inquest import rank, waits


def test_deadlines_follow_the_steps_that_were_measured() -> None:
    deadlines = Deadlines(start_s=600)
    assert {deadlines.of(phase) for phase in ("start", "step", "evaluation", "saving", "end")} == {600}
    assert deadlines.measured(1.0) == LEAST_S
    assert deadlines.measured(5.0) is None, "a little more changes nothing"
    assert deadlines.measured(30.0) == 600
    assert deadlines.measured(1.0) is None, "and it does not shrink"
    assert (deadlines.of("step"), deadlines.of("evaluation"), deadlines.of("start")) == (600, 600, 600)
    deadlines.measured(60.0)
    assert (deadlines.of("step"), deadlines.of("evaluation")) == (1200, 600), "the first evaluation may compile"
    deadlines.seen.add("evaluation")
    assert deadlines.of("evaluation") == 1200
    deadlines.save_s = 60.0
    assert deadlines.of("saving") == 1200


def test_a_deadline_of_the_users_own() -> None:
    deadlines = Deadlines(start_s=600, given_s=7)
    assert deadlines.of("step") == 600, "the first steps compile, and start readers"
    assert deadlines.measured(1000.0) == 7
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
    deadlines.measured(60.0)
    assert (deadlines.hangs("step", 1), deadlines.patient("step"), deadlines.longest("step")) == (True, False, 1200)
    assert (deadlines.hangs("evaluation", 1), deadlines.longest("evaluation")) == (False, 1800), "the first one, too"
    deadlines.seen.add("evaluation")
    assert (deadlines.hangs("evaluation", 1), deadlines.longest("evaluation")) == (True, 1200)


def test_a_clock_counts_the_deadlines_missed_since_the_run_got_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("meshtrain.operate.deadlines.time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = Clock()

    def missed(at: float) -> tuple[bool, int]:
        now[0] = at
        return clock.missed(), clock.misses

    assert missed(599) == (False, 0)
    assert missed(604) == (True, 1)
    assert missed(1203) == (False, 1), "as long again from the look that has found it"
    assert missed(1205) == (True, 2)
    assert clock.late()
    now[0] = 5000
    clock.slept()
    assert missed(5599) == (False, 2), "a process that was stopped has its time from then on"
    assert missed(5601) == (True, 3)
    clock.at("step", 7)
    assert (clock.step, clock.misses, clock.late()) == (7, 0, False)


@pytest.mark.parametrize("place", ["device", "disk"])
def test_a_save_that_waits_for_the_device_is_late_sooner_than_one_that_waits_for_the_disk(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, begun, goes_on = [0.0], threading.Event(), threading.Event()
    monkeypatch.setattr("meshtrain.operate.deadlines.time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = Clock()
    clock.deadlines.save_s = 1.0
    clock.at("saving")

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
            assert statement(job, clock, None).late == late, seconds
    finally:
        goes_on.set()
        thread.join()


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
        def add(self, key: str, number: int) -> int:
            return 1

        def get(self, key: str) -> bytes:
            return b'[1, "here"]\n'

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
        assert bell.wait(5) == {signal.SIGUSR1}
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


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    """A rank that is told a verdict ignores signals, and so would the jobs that are started after it."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def bell() -> Iterator[Bell]:
    bell, before = Bell(), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    bell.hang()
    yield bell
    bell.take_down()
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_the_bells_only_as_long_as_nobody_takes_it(bell: Bell) -> None:
    def users(number: int, _: object) -> None:
        mine.append(number)

    mine: list[int] = []
    assert bell.catch()
    os.kill(os.getpid(), signal.SIGTERM)
    assert bell.wait(5) == {signal.SIGTERM}
    signal.signal(signal.SIGTERM, users)
    assert not bell.catches
    assert not bell.catch()
    os.kill(os.getpid(), signal.SIGTERM)
    assert mine == [signal.SIGTERM]
    bell.take_down()
    assert signal.getsignal(signal.SIGTERM) is users


def test_signals_to_a_child_are_its_own(bell: Bell) -> None:
    assert bell.catch()
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
    assert not bell.wait(0.05), "and this process has had none"
    assert bell.catches


def watching() -> Watch:
    """As a job of one's own has it; who leads an inquest is written down."""
    watch = Watch(SimpleNamespace(rank=0))  # type: ignore[arg-type]
    watch.deadlines.start_s = float("inf")
    watch._ear = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    watch._bell.hang()
    watch.hear_the_end()
    return watch


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_that_the_program_handles_does_not_end_it(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, led = signal.signal(number, lambda *_: None), []
    watch = watching()
    monkeypatch.setattr(watch, "_inquire", lambda hangs, failed=False: led.append(failed))
    try:
        os.kill(os.getpid(), number)
        watch._signalled |= watch._bell.wait(5)
        watch._look()
        assert (watch._failure, led, watch._asked_to_end) == (None, [False], False)
        os.kill(os.getpid(), signal.SIGTERM)
        watch._signalled |= watch._bell.wait(5)
        watch._look()
        assert watch._failure is not None
        assert (watch._failure.words, led, watch._asked_to_end) == ("ended by SIGTERM", [False, True], True)
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
        watch._signalled |= watch._bell.wait(5)
        watch._look()
        assert (mine, watch._failure, watch._asked_to_end) == ([signal.SIGTERM], None, False)
        watch.close()
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "nor is it taken away"
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# A rank that looks into things, in a world that is made up ----------------------------------------------------------


class World:
    """What `Ranks` is to a watchdog: what is seen of the ranks is given, one look after another."""

    def __init__(self, *looks: list[Seen]) -> None:
        self.looks, self.told = list(looks), list[set[int]]()

    def lowest(self, *, near: bool = False) -> list[SimpleNamespace]:
        return [SimpleNamespace(rank=0)]

    def examine(self) -> list[Seen]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def left(self, verdict: Verdict) -> set[int]:
        return {0, 1, 2} - set(verdict.ranks)

    def tell(self, ranks: set[int], what: object) -> None:
        self.told.append(ranks)

    def put_down(self, verdict: Verdict) -> None:
        pass


def one_of_three(number: int, *looks: list[Seen]) -> Watch:
    """The watchdog of this rank of three."""
    job = Job(Environment("none", number, 3, number, "a", None), torch.device("cpu"), None)
    watch = Watch(job)
    watch._ear, watch._ranks = object(), World(*looks)  # type: ignore[assignment]
    watch._leader = Leader(watch._others, watch._clock, watch._closed)
    return watch


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_an_error_is_that_of_a_connection_to_other_ranks_by_where_it_comes_from() -> None:
    reset = "[Errno 104] Connection reset by peer"
    assert not witness.of_connections(raised(ConnectionResetError(reset))), "what reads data raises it"
    assert not witness.of_connections(raised(RuntimeError(reset))), "as does this"
    assert not witness.of_connections(raised(ValueError("NCCL")))
    assert witness.of_connections(raised(RuntimeError("[../gloo/transport/tcp/pair.cc:1] Connection closed by peer")))
    assert witness.of_connections(raised(dist.DistStoreError("wait timeout")))

    class Store:
        def add(self, key: str, number: int) -> int:
            raise RuntimeError(reset)

    for store, over in (Store(), False), (dist.HashStore(), True):
        with pytest.raises(RuntimeError) as caught:
            Round(store, 0, 2, "round", lambda over=over: over).collect()  # type: ignore[misc]
        assert witness.of_connections(caught.value)


@pytest.mark.parametrize("what", ["absent", "failed", "deadlock"])
def test_a_rank_that_is_to_blame_prints_its_own_error(what: str) -> None:
    watch = one_of_three(2)
    watch.verdict = Verdict(what, (2,), "it was rank 2")
    watch._decided.set()
    reader, closed = raised(ConnectionResetError("reset by peer")), raised(RuntimeError("gloo/ Connection closed"))
    assert watch.failed("rank 2", reader) is None
    assert watch.failed("rank 2", closed) == Lost("it was rank 2", said=True), "it comes of the verdict"
    watch.verdict = None
    assert watch.failed("rank 2", closed) is None
    watch.verdict = Verdict(what, (2,), "it was rank 2")
    assert watch.failed("rank 2", closed) is None, "it was there before"
    watch.verdict = Verdict(what, (1,), "it was rank 1")
    assert watch.failed("rank 2", closed) == Lost("it was rank 1")


@pytest.mark.parametrize("failure", [None, Failure("error", "the loss is gone")])
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
    monkeypatch.setattr(last_words, "WRITE_S", 0.2)
    watch = one_of_three(1, [rank(0, reach="gone"), rank(1), rank(2)])
    told, hang = [], threading.Event()

    def lose(reason: str) -> None:
        told.append(list(watch._others.told))  # type: ignore[attr-defined]
        hang.wait(60)

    watch.loses(lose)
    begun = time.monotonic()
    verdict = watch._lead(hangs=False, failed=True)
    assert time.monotonic() - begun < 30
    assert verdict == watch.verdict
    assert told == [[{2}]], "the others were told before"
    assert "rank 1 on host a could not write that down within 0 s" in capsys.readouterr().err
    hang.set()


def test_who_is_waited_for_in_a_save_is_told_once_and_ends_the_job_after_three_deadlines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(leading, "FRESH_S", 0)  # in truth a deadline is longer than a look is fresh

    def look(late: bool) -> list[Seen]:
        here: dict[str, Any] = {"phase": "saving", "late": late, "patient": True}
        meeting = waits("the meeting 'save 4' at the store", "", (0, 1, 2), missing=(2,))
        return [rank(0, wait=meeting, **here), rank(1, wait=meeting, **here), rank(2, **here)]

    watch = one_of_three(0, look(True))
    watch.deadlines.start_s = 0.05
    watch.at("saving", 5)
    for missed in (1, 2, 3):
        assert watch.verdict is None
        time.sleep(0.1)
        watch._look()
        told = capsys.readouterr().err
        waiting = "waiting for rank 2 on host a (dp_shard 2): saving (step 5), for 20 s now\n"
        assert told == {1: waiting, 2: ""}.get(missed, told)
    assert watch.verdict is not None
    assert (watch.verdict.what, watch.verdict.ranks) == ("absent", (2,))


def test_ranks_in_one_place_are_stuck_only_if_they_stay_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(leading, "MOVES_S", 0.01)

    def at(number: int) -> list[Seen]:
        wait, begun = waits(f"all_reduce {number}", ranks=(0, 1, 2), number=number), {"0,1,2": number}
        return [rank(i, wait=wait, begun=begun) for i in range(3)]

    assert one_of_three(0, at(7), at(8))._lead(hangs=True, failed=False) is None
    assert capsys.readouterr().err == ""
    verdict = one_of_three(0, at(7), at(7))._lead(hangs=True, failed=False)
    assert verdict is not None
    assert verdict.what == "stuck"
    told = capsys.readouterr().err
    assert told.startswith("rank 0 on host a stops, because all ranks wait in all_reduce 7 over dp_shard: a device ")


def test_what_was_looked_into_just_now_is_not_looked_into_again() -> None:
    """All ranks come with the same question when they have missed a deadline."""
    well, gone = [rank(i) for i in range(3)], [rank(0), rank(1, reach="gone"), rank(2)]
    watch = one_of_three(0, well, gone)
    for _ in range(3):
        assert watch._lead(hangs=True, failed=False, late=True) is None
    verdict = watch._lead(hangs=True, failed=True)
    assert verdict is not None
    assert verdict.ranks == (1,), "who has failed is looked into at once"


def test_the_block_is_printed_by_the_leader_if_it_is_to_blame_itself(capsys: pytest.CaptureFixture) -> None:
    at: dict[str, Any] = {"wait": waits(ranks=(0, 1, 2))}
    verdict = one_of_three(0, [rank(0, stack=("mine.py:3 wait",)), rank(1, **at), rank(2, **at)])._lead(True, False)
    assert verdict is not None
    assert verdict.ranks == (0,)
    told = capsys.readouterr().err
    assert told.startswith("rank 0 on host a stops, because rank 0 on host a (dp_shard 0) did not arrive at ")
    assert "      mine.py:3 wait\n" in told


def test_what_takes_long_and_cannot_be_explained_is_told_with_all_stacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(leading, "FRESH_S", 0)
    watch = one_of_three(0, [rank(i, stack=("step.py:9 update",)) for i in range(3)])
    for _ in range(2):
        assert watch._lead(hangs=True, failed=False, late=True) is None
    told = capsys.readouterr().err
    assert told.count("warning: this takes long (20 s in step 5), and no rank waits") == 1
    assert "  ranks 0-2, in step 5:\n      step.py:9 update\n" in told


def test_the_first_pass_over_an_evaluation_counts_as_seen_when_it_is_done() -> None:
    watch = one_of_three(0)
    for _ in watch.through([1, 2], "evaluation"):
        assert watch.deadlines.seen == set()
    assert watch.deadlines.seen == {"evaluation"}


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
