"""Stopping a run: what asks for it, how all ranks agree, and what is left."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import meshtrain.train
from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint.directory import complete_steps
from meshtrain.job import signals as stopping
from meshtrain.job.exit import signal_of
from meshtrain.job.signals import Signals, StopRequest, limits
from meshtrain.metrics.logger import read
from tests.job.fakes import START, FakeTime, send
from tests.launching import ROOT, environment


@pytest.fixture(autouse=True)
def _a_look_at_the_folder_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ANSWERS_S", 60.0)


@pytest.fixture
def signals() -> Iterator[Signals]:
    signals = Signals.install()
    yield signals
    signals.restore()


def text_of(requests: StopRequest, step_s: float = 0.0, save_s: float = 0.0) -> str | None:
    reason = requests.reason(step_s, save_s)
    return None if reason is None else reason.text


def ends(number: int) -> None:
    with pytest.raises(SystemExit) as ended:
        send(number)
    assert ended.value.code == 128 + number


def test_before_training_a_signal_ends_the_process_and_a_warning_is_kept(signals: Signals) -> None:
    send(signal.SIGUSR1)
    assert text_of(StopRequest(signals)) == "SIGUSR1"
    ends(signal.SIGTERM)  # there is no training yet that would obey
    send(signal.SIGTERM)  # nothing disturbs the way out


def test_a_closed_terminal_asks_for_a_save_unless_the_run_was_started_to_outlive_it(
    signals: Signals,
) -> None:
    """`nohup` ignores SIGHUP before the program begins."""
    requests = StopRequest(signals)
    with requests.active():
        send(signal.SIGHUP)
        assert text_of(requests) == "SIGHUP"
    signals.restore()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    requests = StopRequest(Signals.install())
    with requests.active():
        send(signal.SIGHUP)
        assert text_of(requests) is None
        send(signal.SIGTERM)
        assert text_of(requests) == "SIGTERM"
    requests.signals.restore()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_lines_for_a_terminal_that_is_gone_are_no_errors() -> None:
    """A save prints where it is; stdout and stderr that are files stay."""
    script = """
import os, pty, sys
from meshtrain.job.signals import mute_closed_outputs
master, terminal = pty.openpty()
os.dup2(terminal, 1)
os.close(master)
os.close(terminal)
mute_closed_outputs()
print("saved", flush=True)
print("said", file=sys.stderr)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False
    )
    assert (done.returncode, done.stderr) == (0, "said\n")


def test_in_training_the_first_signal_is_a_request_and_a_later_one_ends_the_process(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM signals a rank, and torchrun passes the same on while the rank is in a call that takes
    long."""
    monkeypatch.setattr(stopping, "ONE_REQUEST_S", 1000.0)
    alarm = signal.getsignal(signal.SIGALRM)
    requests = StopRequest(signals)
    with requests.active():
        assert text_of(requests) is None
        send(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, (
            "the kernel drops it: handlers run much later"
        )
        send(signal.SIGTERM)  # torchrun passes both on for one Ctrl-C
        signals._handle(signal.SIGTERM, None)  # one that came before that, and is handled only now
        assert text_of(requests) == text_of(requests) == "SIGINT"
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        monkeypatch.setattr(stopping, "ONE_REQUEST_S", 0.0)
        send(signal.SIGALRM)  # as the timer does
        assert signal.getsignal(signal.SIGALRM) is alarm, "the program's own again"
        ends(signal.SIGTERM)


def test_after_training_a_signal_ends_the_process(signals: Signals) -> None:
    with StopRequest(signals).active():
        pass
    ends(signal.SIGINT)


def test_a_rank_that_stops_waits_until_its_own_agent_has_sent_the_signal_too(
    signals: Signals,
) -> None:
    """It asks for what all ranks, another one of which had it first, do already."""
    requests = StopRequest(signals)
    with requests.active():
        requests.mark_agreed()
    sender = threading.Timer(0.2, send, [signal.SIGTERM])
    sender.start()
    assert requests.wait_for_signal(60)
    assert requests.wait_for_signal(0), "it has had it"
    sender.join()
    assert not StopRequest(Signals()).wait_for_signal(0.1), "nobody has sent one to all"


def test_an_exit_status_above_128_is_a_signal_only_if_there_is_such_a_signal() -> None:
    names = [signal_of(SystemExit(code)) for code in (143, 130, 128, 255, 1, None, "no")]
    assert names == ["SIGTERM", "SIGINT", *[None] * 5]
    assert signal_of(KeyboardInterrupt()) == "SIGINT"
    assert signal_of(ValueError()) is None


# The run's folder, and time -----------------------------------------------------------------------


def watching(folder: Path, *more: Any, since: float = 0.0) -> StopRequest:
    signals = Signals()
    signals.since = since
    requests = StopRequest(signals)
    requests.watch(folder, *(more or (None, {})))
    return requests


def test_the_file_asks_a_rank_that_watches_until_it_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 1000.0)
    requests, another = watching(tmp_path), StopRequest(Signals())
    assert text_of(requests) is None
    (tmp_path / "STOP").touch()
    assert text_of(requests) is None, "it has just looked"
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.0)
    assert text_of(requests) == f"the file {tmp_path}/STOP"
    assert text_of(another) is None
    another.clear()
    assert (tmp_path / "STOP").exists()
    for _ in range(2):
        requests.clear()
        assert not (tmp_path / "STOP").exists()


def test_a_folder_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 asks for a stop all the same if something else does, and looks once more when the
    folder answers again."""
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(stopping, "ANSWERS_S", 0.01)
    answers, looks = threading.Event(), []

    def taken() -> None:
        looks.append(threading.current_thread().name)
        answers.wait()

    requests = watching(tmp_path, None, {}, taken)
    for _ in range(5):
        assert text_of(requests) is None
    assert looks == ["requests"], "one look at a time"
    (tmp_path / "STOP").touch()
    answers.set()
    deadline = time.monotonic() + 60
    while requests.reason(0, 0) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert text_of(requests) == f"the file {tmp_path}/STOP"


def test_a_look_for_which_there_is_no_thread_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.0)
    (tmp_path / "STOP").touch()
    requests = watching(tmp_path)

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert text_of(requests) is None
    assert text_of(requests) == f"the file {tmp_path}/STOP"


@pytest.mark.parametrize(
    ("limit", "step_s", "save_s", "asked"),
    [
        (1000, 1, 10, False),
        (130, 1, 10, False),  # 30 s left, 3 + 12 + 5 needed
        (130, 5, 10, True),
        (130, 1, 20, True),
        (104, 0, 0, True),
        (50, 0, 0, True),
    ],
)
def test_time_runs_out_early_enough_for_what_is_left_to_do(
    limit: float, step_s: float, save_s: float, asked: bool, tmp_path: Path, clock: FakeTime
) -> None:
    requests = watching(tmp_path, limit, {}, since=-100)
    assert text_of(requests, step_s, save_s) == ("train.time_limit" if asked else None)


def test_the_end_of_a_slurm_job_is_a_limit(tmp_path: Path, clock: FakeTime) -> None:
    job = {"SLURM_JOB_ID": "77"}
    soon = job | {"SLURM_JOB_END_TIME": str(START + 3)}
    assert text_of(watching(tmp_path, None, soon)) == "the end of SLURM job 77"
    for other in ({}, {"SLURM_JOB_END_TIME": "Unknown"}, {"SLURM_JOB_END_TIME": "1000000000"}):
        assert limits(None, 0.0, other) == []
    late = job | {"SLURM_JOB_END_TIME": str(START + 3600)}
    assert [seconds() for _, seconds in limits(60.0, 0.0, late)] == [60, 3600]
    by_its_own_clock = late | {"SLURM_JOB_START_TIME": str(START + 3000)}
    ((_, seconds),) = limits(None, -500, by_its_own_clock)
    assert seconds() == 100, (
        "a job of 600 s, of which 500 are over, whatever this host's clock says"
    )


# Runs ---------------------------------------------------------------------------------------------


Go = Callable[..., dict[str, Any]]


def exit_of(folder: Path) -> dict[str, Any]:
    """What it says but for the times, which tests/metrics/test_goodput.py looks at."""
    ended = json.loads((folder / "exit.json").read_text())
    ended.pop("goodput", None)
    return ended


@pytest.mark.parametrize(
    ("how", "kind"), [("SIGUSR1", "SIGUSR1"), ("SIGHUP", "SIGHUP"), ("STOP", "file")]
)
def test_a_run_saves_and_stops(
    go: Go, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, kind: str
) -> None:
    """Asked in the update of step 2; the sum of step 3 tells it to all, and step 4 is not taken any
    more."""
    assert go(interrupt=how, at=2) == {"status": 75}
    cause = f"the file {tmp_path}/run/STOP" if how == "STOP" else how
    reason = f"asked to stop by {cause}"
    ended = {
        "status": "stopped",
        "code": 75,
        "reason": reason,
        "kind": kind,
        "step": 3,
        "hosts": [],
    }
    assert exit_of(tmp_path / "run") == ended
    assert complete_steps(tmp_path / "run/checkpoints") == [3]
    assert [row["step"] for row in read(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]
    assert not (tmp_path / "run/STOP").exists()
    printed, spent = capsys.readouterr().out.rsplit("\nwall time ", 1)
    assert printed.endswith(
        f"\nstopped after step 3 of 8: {reason}\n"
        f"the state is in {tmp_path}/run/checkpoints/step_0000003\nto go on, start the same "
        "command again"
    )
    assert spent.count("\n") == 1, "how the time was spent is the last word"


def test_a_run_that_was_asked_in_its_last_step_is_done(go: Go, tmp_path: Path) -> None:
    assert go(interrupt="SIGUSR1", at=8) == {"status": 0}
    assert exit_of(tmp_path / "run")["status"] == "done"


def test_a_time_limit_stops_a_run(go: Go, tmp_path: Path) -> None:
    """It is over when training begins."""
    assert go("train.time_limit=1s", "checkpoint.every=0") == {"status": 75}
    ended = exit_of(tmp_path / "run")
    assert (ended["reason"], ended["kind"]) == ("asked to stop by train.time_limit", "time_limit")
    assert complete_steps(tmp_path / "run/checkpoints") == [ended["step"]] == [1]


def test_a_signal_before_training_ends_the_run(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meshtrain.train, "build_mesh", lambda *_: send(signal.SIGTERM))
    with pytest.raises(SystemExit):
        go()
    ended = exit_of(tmp_path / "run")
    assert ended.pop("hosts") == ["here"]
    assert ended == {
        "status": "failed",
        "code": 1,
        "reason": "ended by SIGTERM",
        "kind": "ended",
        "step": 0,
    }


# Saves that fail ----------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A disk that is full when the checkpoints of these steps are begun."""
    steps = []
    plain = folder.begin

    def begin(where: Path, step: int) -> Path:
        if step in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(where))
        return plain(where, step)

    monkeypatch.setattr(folder, "begin", begin)
    return steps


def test_a_stop_that_cannot_save_is_a_failure(go: Go, tmp_path: Path, full: list[int]) -> None:
    full.append(3)
    failed = go("checkpoint.every=2", interrupt="STOP", at=2)
    assert failed["status"] == 1
    assert "3 steps of 8 are done and not saved: " in failed["error"]
    assert "No space left on device" in failed["error"]
    assert exit_of(tmp_path / "run")["status"] == "failed"
    assert complete_steps(tmp_path / "run/checkpoints") == [2]
    assert (tmp_path / "run/STOP").exists(), "it has not been obeyed"


def test_a_run_goes_on_without_a_checkpoint(
    go: Go, tmp_path: Path, full: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    full.append(4)
    assert go() == {"status": 0}
    assert "there is no checkpoint of step 4: " in capsys.readouterr().out
    assert complete_steps(tmp_path / "run/checkpoints") == [8]


def test_what_is_being_written_when_training_fails_is_written_to_its_end(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = folder.begin
    monkeypatch.setattr(folder, "begin", lambda *each: time.sleep(1) or plain(*each))
    assert go(interrupt="end", at=5)["status"] == 1
    assert complete_steps(tmp_path / "run/checkpoints") == [4]


def test_a_run_whose_last_state_is_not_saved_says_so_when_all_else_is_done(
    go: Go, tmp_path: Path, full: list[int]
) -> None:
    full.append(8)
    failed = go(f"train.export={tmp_path}/weights")
    assert "8 steps of 8 are done and not saved" in failed["error"]
    assert (tmp_path / "weights").exists()
    full.clear()
    assert go() == {"status": 0}
    assert complete_steps(tmp_path / "run/checkpoints") == [4, 8]
