"""What a process sees of itself: debuggers, stacks, what it waits for, and which errors are
consequences."""

import bdb
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshtrain.job.pending import PendingWait, Resource, pending_waits, waiting
from meshtrain.job.store import Round
from meshtrain.job.watchdog import introspect
from meshtrain.job.watchdog.deadlines import DeadlineClock
from meshtrain.job.watchdog.diagnose import diagnose
from meshtrain.job.watchdog.introspect import Failure, local_status
from meshtrain.job.watchdog.records import RankReport, RankStatus, Reach
from tests.job.fakes import job_of, raised, rank, waits
from tests.launching import forked


def seen_by_another_thread(look: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(look).result()


def test_a_debugger_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.gettrace() is not None or "pydevd" in sys.modules:
        pytest.skip("there is a debugger, or a tracer")
    assert not seen_by_another_thread(introspect.debugger_attached)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pydevd", introspect)
        assert seen_by_another_thread(introspect.debugger_attached)
    looks = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame: object) -> None:
            looks.append(seen_by_another_thread(introspect.debugger_attached))
            self.set_continue()

    Debugger().runcall(lambda: looks.append("body"))
    assert True in looks


def test_a_tracer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(introspect, "STATUS", status)
    for tracer in (0, 4711):
        status.write_text(f"Name:\tpython\nTracerPid:\t{tracer}\nUid:\t0\n")
        assert introspect.debugger_attached() == bool(tracer)


def test_a_stack_names_the_code_that_matters() -> None:
    frames = introspect.frames(threading.current_thread().ident or 0)
    assert introspect.stack(frames)[-1].startswith("meshtrain/job/watchdog/introspect.py:")
    assert any(
        re.match(r"job/test_introspect\.py:\d+ test_a_stack_names", line)
        for line in introspect.stack(frames)
    )
    assert len(introspect.stack(frames * 9)) == introspect.FRAMES


def test_who_meets_at_a_store_knows_whom_it_waits_for() -> None:
    store, seen = dist.HashStore(), []

    def look() -> None:
        seen.append(introspect.pending_collective(pending_waits()[threading.get_ident()], {}))
        meeting.cancel()

    meeting = Round(store, 0, 4, "round 7", meanwhile=look)
    Round(store, 1, 4, "round 7").put("here")
    with pytest.raises(CancelledError):
        meeting.gather()
    (wait,) = seen
    assert (wait.label, wait.missing) == ("the meeting 'round 7' at the store", (0, 2, 3))


def test_a_recorder_that_takes_too_long_or_fails_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    hang = threading.Event()
    for state, seconds, printed in (
        (lambda _: hang.wait(), 0.1, False),
        (lambda _: 1 // 0, 60.0, True),
    ):
        monkeypatch.setattr(introspect, "RECORDER_S", seconds)
        monkeypatch.setattr(introspect, "flight_recorder_state", state)
        assert local_status(job_of(), DeadlineClock(), None).begun == {}
        assert ("ZeroDivisionError" in capsys.readouterr().err) == printed
    hang.set()


def test_an_error_is_that_of_a_connection_to_other_ranks_by_where_it_comes_from() -> None:
    reset = "[Errno 104] Connection reset by peer"  # what reads data raises it, too
    closed = "[../gloo/transport/tcp/pair.cc:1] Connection closed by peer"
    for error, of_ranks in (
        (ConnectionResetError(reset), False),
        (RuntimeError(reset), False),
        (ValueError("NCCL"), False),
        (RuntimeError(closed), True),
        (dist.DistStoreError("wait timeout"), True),
    ):
        assert introspect.is_connection_error(raised(error)) == of_ranks, error

    class Store:
        def add(self, key: str, number: int) -> int:
            raise RuntimeError(reset)

    for store, over in (Store(), False), (dist.HashStore(), True):
        with pytest.raises(RuntimeError) as caught:
            Round(store, 0, 2, "round", lambda over=over: over).gather()
        assert introspect.is_connection_error(caught.value)


class Group:
    """What a process group is to the registry of waits."""

    group_name = "7"


GROUP: Any = Group()


def test_the_innermost_wait_for_ranks_is_where_a_rank_waits() -> None:
    groups = {"7": ("pp", (1, 3))}
    me = threading.get_ident()
    with waiting("gradients", GROUP), waiting("the next batch", resource=Resource.DATA):
        with waiting("activation", GROUP, missing=lambda: [3]):
            mine = pending_waits()[me]
        assert len(pending_waits()[me]) == 2
    assert me not in pending_waits()
    assert [wait.label for wait in mine] == ["gradients", "the next batch", "activation"]
    inner, outer = (introspect.pending_collective(waits, groups) for waits in (mine, mine[:2]))
    assert (str(inner), inner and inner.missing) == ("activation over pp", (3,))
    assert (str(outer), outer and outer.missing) == ("gradients over pp", None)
    assert introspect.pending_collective(mine, {}) is None, "not a group of this rank"


def test_an_error_tells_which_wait_it_has_ended() -> None:
    def failure_in(*waits: PendingWait) -> Failure:
        with ExitStack() as stack:
            caught = stack.enter_context(pytest.raises(RuntimeError))
            for wait in waits:
                stack.enter_context(wait)
            raise RuntimeError("Socket Timeout")
        return Failure.of(caught.value)

    failure = failure_in(waiting("gradients", GROUP), waiting("activation", GROUP))
    assert (failure.broken, failure.wait and failure.wait.label) == (True, "activation")
    failure = failure_in(waiting("the next batch", resource=Resource.DATA))
    assert (failure.broken, failure.wait) == (False, None), "what reads data fails alike"


def test_a_rank_that_waits_for_no_rank_says_for_what() -> None:
    clock = DeadlineClock()
    clock.enter_phase("step", 6)
    with waiting("the next batch", resource=Resource.DATA):
        status: RankStatus = seen_by_another_thread(lambda: local_status(job_of(), clock, None))
    assert (status.wait, status.resource) == (None, "the next batch")
    busy = RankReport(0, "a", "rank 0 on host a", 1, Reach.ANSWERS, status)
    verdict = diagnose([busy, rank(1, wait=waits(ranks=(0, 1)))], hangs=True)
    assert ": rank 0 is in step 6, waiting for the next batch; it is at " in verdict.headline


BLOCKED = """
import os, sys, threading, time
import torch, torch.distributed as dist
import meshtrain
from meshtrain.job.watchdog.deadlines import DeadlineClock
from meshtrain.job.watchdog.introspect import local_status
from meshtrain.parallel import gloo_collectives

recorder = sys.argv[1] == "on"
if not recorder:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"

def look(job, place):
    while str(wait := local_status(job, DeadlineClock(), None).wait) != place:
        time.sleep(0.01)
    print(wait, flush=True)
    job.store.set(place, "seen")

with meshtrain.start(60) as job:
    x, group = torch.ones(4), dist.group.WORLD
    calls = {
        "all_reduce 1 over all ranks" if recorder else "all_reduce over all ranks": lambda: dist.all_reduce(x),
        "recv": lambda: dist.recv(x, 1),
        "sends and receives over all ranks": lambda: gloo_collectives.all_gather(torch.empty(8), x, group),
    }
    for place, call in calls.items():
        if job.rank == 0:
            threading.Thread(target=look, args=(job, place)).start()
            call()
        else:
            job.store.wait([place])
            dist.send(x, 0) if place == "recv" else call()
"""


@pytest.mark.parametrize("recorder", ["on", "off"])
def test_where_a_rank_waits_is_known_with_the_flight_recorder_and_without(
    tmp_path: Path, recorder: str
) -> None:
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED)
    job = forked(2, script, recorder).check()
    assert len(job.out.splitlines()) == 3, "rank 0 is seen in all of its calls"
