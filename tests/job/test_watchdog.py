"""A rank that examines others: what it does on signals and failures, what it prints, and loops of
one's own."""

import fcntl
import json
import os
import re
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.errors import InputError, TrainingError
from meshtrain.job.exit import job_exit
from meshtrain.job.signals import SignalWakeup
from meshtrain.job.store import RemoteFailure
from meshtrain.job.watchdog import diagnose, evidence, watchdog
from meshtrain.job.watchdog.introspect import Failure
from meshtrain.job.watchdog.records import (
    FAILURE_MARK,
    Diagnosis,
    DiagnosisKind,
    FailureKind,
    RankReport,
)
from meshtrain.job.watchdog.watchdog import Watchdog, watched
from tests.job.fakes import FakeTime, job_of, raised, rank, send, waits, watchdog_of
from tests.launching import forked, root_cause, torchrun

ALL = (0, 1, 2)
ONE_IS_GONE = [rank(0), rank(1, reach="gone"), rank(2)]


# Signals ------------------------------------------------------------------------------------------


@pytest.fixture
def wakeup() -> Iterator[SignalWakeup]:
    wakeup = SignalWakeup()
    wakeup.install()
    yield wakeup
    wakeup.uninstall()


def test_a_thread_is_woken_by_signals_and_by_other_threads(wakeup: SignalWakeup) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    assert not wakeup.wait(0)
    send(signal.SIGUSR1)
    assert wakeup.wait(60) == {signal.SIGUSR1}
    assert not wakeup.wait(0), "it wakes once"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wakeup.wait, 250)
        wakeup.wake()
        assert waiting.result(60) == set(), "nobody asked this process to end"
    wakeup.uninstall()
    send(signal.SIGUSR1)
    assert not wakeup.wait(0)


def test_a_process_with_thousands_of_connections_is_woken_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of rank 0, which serves the store of a large job: its pipe has a high number."""
    pipe = os.pipe

    def high() -> tuple[int, int]:
        out, into = pipe()
        moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 1024) for end in (out, into))
        os.close(out)
        os.close(into)
        return moved

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pipe", high)
            wakeup = SignalWakeup()
        assert not wakeup.wait(0)
        wakeup.wake()
        assert wakeup.wait(60) == set()
        assert not wakeup.wait(0), "it wakes once"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_signals_to_a_child_are_its_own(wakeup: SignalWakeup) -> None:
    """SIGTERM ends it, and its own handlers are called."""
    assert wakeup.handle_sigterm()
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    other = os.fork()
    if other == 0:
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(4))
        while True:
            send(signal.SIGUSR1)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 4
    assert not wakeup.wait(0), "and this process has had none"
    assert wakeup.handles_sigterm


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watchdog, list[bool]]]:
    """The watchdog of a loop of one's own, and of each inquiry that it leads whether a rank has
    failed."""
    watch, inquiries = Watchdog(SimpleNamespace(rank=0)), []
    watch.deadlines.start_s = float("inf")
    watch._server = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(watch, "_inquire", lambda hangs, failed=False: inquiries.append(failed))
    watch._wakeup.install()
    watch.handle_sigterm()
    yield watch, inquiries
    watch.close()


def receive(watch: Watchdog, number: int) -> None:
    send(number)
    watch._signals |= watch._wakeup.wait(60)
    watch._look()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_that_the_program_handles_does_not_end_it(
    number: int, watching: tuple[Watchdog, list[bool]]
) -> None:
    watch, inquiries = watching
    signal.signal(number, lambda *_: None)
    receive(watch, number)
    assert (watch._failure, inquiries, watch._asked_to_end) == (None, [False], False)
    receive(watch, signal.SIGTERM)
    assert (watch._failure.text, inquiries, watch._asked_to_end) == (
        "ended by SIGTERM",
        [False, True],
        True,
    )
    watch.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_the_users_own_is_respected(watching: tuple[Watchdog, list[bool]]) -> None:
    watch, _ = watching
    mine = []
    signal.signal(signal.SIGTERM, lambda number, _: mine.append(number))
    assert not watch._wakeup.handle_sigterm()
    receive(watch, signal.SIGTERM)
    assert (mine, watch._failure, watch._asked_to_end) == ([signal.SIGTERM], None, False)
    watch.close()
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "nor is it taken away"


# A rank of three that examines the others ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["absent", "failed", "deadlock"])
def test_a_rank_that_is_to_blame_prints_its_own_error(kind: str) -> None:
    mine, others = (
        Diagnosis(DiagnosisKind(kind), (number,), f"it was rank {number}") for number in (2, 1)
    )
    reader, closed = (
        raised(ConnectionResetError("reset by peer")),
        raised(RuntimeError("gloo/ Connection closed")),
    )
    watch = watchdog_of(2)
    watch._decided.set()

    def failure(diagnosis: Diagnosis | None, error: Exception) -> RemoteFailure | None:
        watch.diagnosis = diagnosis
        return watch.first_failure("rank 2", error)

    assert failure(mine, reader) is None
    assert failure(mine, closed) == RemoteFailure(mine, printed=True), "a consequence"
    assert failure(None, closed) is None
    assert failure(mine, closed) is None, "it was there before"
    assert failure(others, closed) == RemoteFailure(others)


@pytest.mark.parametrize("failure", [None, Failure(FailureKind.ERROR, "the loss is gone")])
def test_an_error_of_the_watchdog_is_told_once_and_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, failure: Failure | None
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.01)
    watch, decided = watchdog_of(2), []
    watch._failure = failure

    def look() -> None:
        decided.append(watch._decided.is_set())
        if len(decided) == 3:
            watch.leave()
        raise KeyError("mine")

    monkeypatch.setattr(watch, "_look", look)
    watch._run()
    failed = failure is not None
    assert decided == [False, failed, failed], (
        "who has failed waits no longer; who has not will, should it fail later"
    )
    printed = capsys.readouterr().err
    assert printed.startswith(
        "warning: the watchdog of rank 2 on host a has failed, and goes on:\nTraceback "
    )
    assert printed.count("KeyError: 'mine'") == 1


def test_a_verdict_does_not_wait_for_a_file_system_that_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(evidence, "WRITE_S", 0.2)
    watch = watchdog_of(1, [rank(0, reach="gone"), rank(1), rank(2)])
    notified, hang = [], threading.Event()

    def lose(diagnosis: Diagnosis) -> None:
        notified.extend(watch.peers.tell.call_args_list)
        hang.wait()

    watch.on_job_lost(lose)
    verdict = watch._coordinate(hangs=False, failed=True)
    assert verdict == watch.diagnosis
    assert [told.args[0] for told in notified] == [{2}], "the others were told before"
    assert "rank 1 on host a could not write that down within 0 s" in capsys.readouterr().err
    hang.set()


def test_who_is_waited_for_in_a_save_is_told_once_and_ends_the_job_after_three_deadlines(
    clock: FakeTime, capsys: pytest.CaptureFixture
) -> None:
    meeting = waits("the meeting 'save 4' at the store", "", ALL, missing=(2,))
    here: dict[str, Any] = {"phase": "saving", "late": True, "patient": True}
    watch = watchdog_of(
        0, [rank(0, wait=meeting, **here), rank(1, wait=meeting, **here), rank(2, **here)]
    )
    watch.enter_phase("saving", 5)
    printed = []
    for deadline in (1, 2, 3):
        assert watch.diagnosis is None
        clock.now = deadline * 601
        watch._look()
        printed.append(capsys.readouterr().err)
    assert printed[:2] == [
        "waiting for rank 2 on host a (dp_shard 2): saving (step 5), for 20 s now\n",
        "",
    ]
    assert (watch.diagnosis.kind, watch.diagnosis.ranks) == ("absent", (2,))


def all_reduce(number: int) -> list[RankReport]:
    wait = waits(f"all_reduce {number}", ranks=ALL, number=number)
    return [rank(i, wait=wait, begun={"0,1,2": number}) for i in ALL]


def circle(round_number: int) -> list[RankReport]:
    """Ranks 0 and 1 wait for each other."""

    def meeting(missing: int) -> Any:
        return waits(f"the meeting 'round {round_number}'", "", (0, 1), missing=(missing,))

    return [rank(i, wait=meeting(1 - i), phase="saving", patient=True) for i in (0, 1)]


WELL = [rank(number) for number in ALL]


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (all_reduce(7), all_reduce(7), "stuck"),
        (all_reduce(7), all_reduce(8), None),
        (circle(31), circle(31), "deadlock"),
        (circle(31), circle(36), None),  # rank 0, which gathers, had not looked since rank 1 came
        (circle(31), WELL, None),
    ],
)
def test_ranks_that_wait_for_each_other_or_in_one_place_are_lost_only_if_they_stay_there(
    first: list[RankReport],
    second: list[RankReport],
    kind: str | None,
    clock: FakeTime,
    capsys: pytest.CaptureFixture,
) -> None:
    verdict = watchdog_of(0, first, second)._coordinate(hangs=True, failed=False)
    assert (verdict and verdict.kind) == kind
    printed = capsys.readouterr().err
    blamed = {
        "stuck": "all ranks wait in all_reduce 7 over dp_shard: a device ",
        "deadlock": (
            "rank 0 on host a (dp_shard 0), rank 1 on host a (dp_shard 1) wait for each other"
        ),
    }
    if kind is None:
        assert printed == ""
    else:
        assert printed.startswith(f"rank 0 on host a stops, because {blamed[kind]}")


def test_what_was_looked_into_just_now_is_not_looked_into_again(clock: FakeTime) -> None:
    """All ranks come with the same question when they have missed a deadline."""

    def verdict(seconds: float, **question: bool) -> Diagnosis | None:
        watch = watchdog_of(0, WELL, ONE_IS_GONE)
        clock.now = 0
        for _ in range(3):
            assert watch._coordinate(hangs=True, failed=False, late=True) is None
        clock.now = seconds
        return watch._coordinate(**question)

    late = {"hangs": True, "failed": False, "late": True}
    assert verdict(diagnose.FRESH_S - 1, **late) is None
    for seconds, question in (
        (diagnose.FRESH_S + 1, late),
        (0, late | {"failed": True}),  # who has failed is looked into at once
        (0, late | {"late": False}),
    ):
        diagnosis = verdict(seconds, **question)
        assert diagnosis.ranks == (1,)


def test_the_block_is_printed_by_the_leader_if_it_is_to_blame_itself(
    capsys: pytest.CaptureFixture,
) -> None:
    at: dict[str, Any] = {"wait": waits(ranks=ALL)}
    watch = watchdog_of(0, [rank(0, stack=("mine.py:3 wait",)), rank(1, **at), rank(2, **at)])
    verdict = watch._coordinate(hangs=True, failed=False)
    assert verdict.ranks == (0,)
    printed = capsys.readouterr().err
    assert printed.startswith(
        "rank 0 on host a stops, because rank 0 on host a (dp_shard 0) did not arrive at "
    )
    assert "      mine.py:3 wait\n" in printed


def test_what_takes_long_and_cannot_be_explained_is_told_once_with_all_stacks(
    clock: FakeTime, capsys: pytest.CaptureFixture
) -> None:
    watch = watchdog_of(0, [rank(i, stack=("step.py:9 update",)) for i in ALL])
    for seconds in (0, 100):
        clock.now = seconds
        assert watch._coordinate(hangs=True, failed=False, late=True) is None
    printed = capsys.readouterr().err
    assert printed.count("warning: this takes long (20 s in step 5), and no rank waits") == 1
    assert "  ranks 0-2, in step 5:\n      step.py:9 update\n" in printed


# A loop of one's own ------------------------------------------------------------------------------

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
    ("fault", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"is gone: process \d+ was killed"),
        ("raise KeyError('mine')", r"failed: KeyError: 'mine'$"),
    ],
    ids=["killed", "raises"],
)
def test_a_loop_of_ones_own_names_the_rank_too(tmp_path: Path, fault: str, reason: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(fault=fault))
    job = forked(3, script)
    assert job.status != 0
    assert job.err.count("Traceback (most recent call last)") == fault.startswith("raise"), job.err
    for other in (0, 2):
        headline = rf"^rank {other} on host \S+ stops, because rank 1 on host \S+ {reason}"
        assert re.search(headline, job.err, re.MULTILINE), job.err


def test_a_loop_of_ones_own_is_ended_by_a_signal_and_nobody_is_blamed(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    # One after the other, as a launcher does it, and the one that serves the store last.
    stop = (
        "[os.kill(pid, signal.SIGTERM) for pid in reversed(job.gather('asking', os.getpid())) if "
        "job.rank == 0]"
    )
    script.write_text(LOOP.format(fault="pass") + f"        if step == 60: {stop}\n")
    job = forked(2, script)
    assert job.status == 128 + signal.SIGTERM
    assert "stops, because" not in job.err


ASLEEP = """
import os, sys, time
from meshtrain import train

whole = train.sample_order

def asleep(*arguments):
    if os.environ["RANK"] == "1":
        time.sleep(1000)
    return whole(*arguments)

train.sample_order = asleep
sys.exit(train.main())
"""


def test_a_start_in_which_nothing_gets_on_ends_and_names_the_rank(
    small: str, tmp_path: Path
) -> None:
    script = tmp_path / "asleep.py"
    script.write_text(ASLEEP)
    job = forked(2, script, small, "train.start_timeout_s=3", f"train.output={tmp_path}/run")
    assert job.status == 1, job.err
    place = "the meeting 'comparing where tensors lie' at the store"
    assert re.search(rf"rank 1 on host \S+ \(\S+ 1\) did not arrive at {place}", job.err), job.err


def test_input_that_one_rank_refuses_ends_all_ranks_with_status_2(tmp_path: Path) -> None:
    """Whichever ends first: a script that would start the job again leaves it alone."""
    script = tmp_path / "loop.py"
    script.write_text(
        LOOP.format(fault="raise meshtrain.errors.InputError('the sizes do not fit')")
    )
    job = forked(3, script)
    assert job.status == 2, job.err
    assert job.err.count("the sizes do not fit") == 1
    assert re.search(r"^rank 1 on host \S+: the sizes do not fit$", job.err, re.MULTILINE)
    assert failures_in(job.err) == []


def test_torchruns_last_word_is_our_sentence(tmp_path: Path) -> None:
    """For what one rank refuses, and a disk that is full on one: no place in Python helps there."""
    script = tmp_path / "loop.py"
    faults = {
        "raise meshtrain.errors.InputError('the sizes do not fit')": (
            r"rank 1 on host \S+: the sizes do not fit"
        ),
        "raise OSError(28, 'No space left on device', '/data/x')":
            r"rank 1 on host \S+ failed: OSError: \[Errno 28\] No space left on device: '/data/x'",
    }  # fmt: skip
    for fault, sentence in faults.items():
        script.write_text(LOOP.format(fault=fault))
        job = torchrun(2, str(script))
        assert re.fullmatch(sentence, root_cause(job.err)), job.err
        assert job.err.count("Traceback (most recent call last)") == 1, "torchrun's own"
        assert "SIGTERM)" not in job.err, "the other rank has its own status, too"


# For programs -------------------------------------------------------------------------------------


def failures_in(text: str) -> list[dict[str, Any]]:
    return [
        json.loads(line.removeprefix(FAILURE_MARK))
        for line in text.splitlines()
        if line.startswith(FAILURE_MARK)
    ]


def test_a_failure_is_one_line_for_programs_after_the_block(capsys: pytest.CaptureFixture) -> None:
    watch = watchdog_of(0, ONE_IS_GONE)
    watch.job.failures = watch
    watch.enter_phase("step", 7)
    assert watch._coordinate(hangs=False, failed=True) is not None
    printed = capsys.readouterr().err
    assert printed.splitlines()[-1].startswith(FAILURE_MARK)
    (fields,) = failures_in(printed)
    text = fields.pop("text")
    assert fields == {"kind": "gone", "ranks": [1], "hosts": ["a"], "step": 7, "phase": "step"}
    assert text.startswith("rank 1 on host a (dp_shard 1) is gone: process 1001 was killed")


FAILED = {
    "kind": "failed",
    "ranks": [0],
    "hosts": ["a"],
    "text": "rank 0 on host a failed: KeyError: 'mine'",
}
FULL = FAILED | {
    "text": "rank 0 on host a failed: OSError: [Errno 28] No space left on device: '/x'"
}
AGREED = {"kind": "training", "ranks": [], "hosts": [], "text": "the loss is gone"}


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (KeyError("mine"), [FAILED]),
        (TrainingError("the loss is gone"), [AGREED]),
        (OSError(28, "No space left on device", "/x"), [FULL]),
        (InputError("no"), []),
    ],
)
def test_a_rank_that_fails_alone_prints_the_line_too(
    error: Exception,
    lines: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """And tells torchrun; with the stack of Python only where a program has to be mended."""
    job = job_of()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def fail() -> None:
        with watched(job) as watch, job_exit(job):
            watch.enter_phase("saving", 3)
            raise error

    with pytest.raises((SystemExit, KeyError)):
        fail()
    assert failures_in(capsys.readouterr().err) == [
        line | {"step": 3, "phase": "saving"} for line in lines
    ]
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert ("py_callstack" in told["extraInfo"]) == isinstance(error, KeyError)
    assert told["message"] in (line["text"] for line in lines) or str(error) in told["message"]
    assert int(told["extraInfo"]["timestamp"]) > 0


def test_records_come_through_json_as_they_were() -> None:
    diagnosis = Diagnosis(
        DiagnosisKind.ABSENT, (1, 2), "they did not arrive", ("more",), ("a", "b")
    )
    status = rank(
        0, wait=waits(missing=(2,)), begun={"0,1": 3}, stack=("f",), kind=FailureKind.ERROR
    ).answer
    for record in (diagnosis, status):
        assert type(record).from_json(json.loads(json.dumps(asdict(record)))) == record
