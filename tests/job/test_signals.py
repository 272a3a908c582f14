"""Stopping a run: what asks for it, how all ranks agree, what is left, and how the process ends."""

import errno
import hashlib
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

import meshtrain.run.results
import meshtrain.train
from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint.directory import complete_steps
from meshtrain.job import signals as stopping
from meshtrain.job.exit import signal_of
from meshtrain.job.signals import Signals, StopReason, StopRequest, limits
from meshtrain.metrics.logger import read
from tests.checkpoint.going_on import Case, alone, small_run
from tests.launching import MARK, ROOT, TORCHRUN, environment, wait_until_gone


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    signals = Signals.install()
    yield signals
    signals.restore()
    for number, handler in before.items():
        signal.signal(number, handler)


def text_of(reason: StopReason | None) -> str | None:
    return None if reason is None else reason.text


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_training_a_signal_ends_the_process(signals: Signals, number: int) -> None:
    with pytest.raises(SystemExit) as ended:
        send(number)
    assert ended.value.code == 128 + number
    send(number)  # nothing disturbs the way out


def test_a_warning_before_training_is_kept_and_nothing_ends(signals: Signals) -> None:
    send(signal.SIGUSR1)
    assert text_of(StopRequest(signals).reason(0, 0)) == "SIGUSR1"
    with pytest.raises(SystemExit):
        send(signal.SIGTERM)  # there is no training yet that would obey


def test_in_training_the_first_signal_is_a_request(signals: Signals) -> None:
    requests = StopRequest(signals)
    with requests.active():
        assert requests.reason(0, 0) is None
        send(signal.SIGINT)
        send(signal.SIGTERM)  # torchrun passes both on for one Ctrl-C
        assert text_of(requests.reason(0, 0)) == "SIGINT"
        assert text_of(requests.reason(0, 0)) == "SIGINT"
    with pytest.raises(SystemExit):
        send(signal.SIGTERM)


def test_a_later_signal_ends_the_process(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ONE_REQUEST_S", 0.05)
    with StopRequest(signals).active():
        send(signal.SIGUSR1)
        time.sleep(0.1)
        with pytest.raises(SystemExit) as ended:
            send(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_two_signals_of_one_request_are_one_however_late_they_are_handled(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM signals a rank, and torchrun passes the same on while the rank is in a call that takes longer."""
    monkeypatch.setattr(stopping, "ONE_REQUEST_S", 0.3)
    alarm = signal.getsignal(signal.SIGALRM)
    with StopRequest(signals).active():
        send(signal.SIGTERM)
        assert signal.getsignal(signal.SIGALRM) is not alarm
        sender = threading.Timer(0.1, send, [signal.SIGTERM])
        sender.start()
        start = time.monotonic()
        while time.monotonic() - start < 0.6:  # mostly one call, in which no handler runs
            hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)
        sender.join()
        assert signal.getsignal(signal.SIGALRM) is alarm, "the program's own again"
        with pytest.raises(SystemExit):
            send(signal.SIGTERM)


def test_a_signal_that_comes_when_all_ranks_stop_already_asks_for_what_is_done(signals: Signals) -> None:
    requests = StopRequest(signals)
    with requests.active():
        requests.mark_agreed()  # another rank had it first
    send(signal.SIGTERM)


def test_a_rank_that_stops_waits_until_its_own_agent_has_sent_the_signal_too(signals: Signals) -> None:
    requests = StopRequest(signals)
    with requests.active():
        requests.mark_agreed()
    sender = threading.Timer(0.2, send, [signal.SIGTERM])
    sender.start()
    start = time.monotonic()
    assert requests.wait_for_signal(30)
    assert 0.1 < time.monotonic() - start < 20
    assert requests.wait_for_signal(30), "it has had it"
    sender.join()
    start = time.monotonic()
    assert not StopRequest(Signals()).wait_for_signal(0.1), "nobody has sent one to all"
    assert time.monotonic() - start < 5


def test_without_signals_of_its_own_a_run_hears_none() -> None:
    before = signal.getsignal(signal.SIGTERM)
    StopRequest(Signals())
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_file_asks_until_it_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 1000.0)
    requests = StopRequest(Signals())
    requests.watch(tmp_path, None, {})
    assert requests.reason(0, 0) is None
    (tmp_path / "STOP").touch()
    assert requests.reason(0, 0) is None, "it has just looked"
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.0)
    assert text_of(requests.reason(0, 0)) == f"the file {tmp_path}/STOP"
    requests.clear()
    assert not (tmp_path / "STOP").exists()
    requests.clear()


def test_a_folder_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 asks for a stop all the same if something else does, and looks once more when the folder answers again."""
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.0)
    answers, looks = threading.Event(), list[str]()

    def taken() -> str | None:
        looks.append(threading.current_thread().name)
        assert answers.wait(60)
        return None

    requests = StopRequest(Signals())
    requests.watch(tmp_path, None, {}, taken)
    caller = threading.Thread(target=lambda: [requests.reason(0, 0) for _ in range(5)], daemon=True)
    caller.start()
    caller.join(20)
    assert not caller.is_alive()
    assert looks == ["requests"], "one look at a time"
    (tmp_path / "STOP").touch()
    answers.set()
    deadline = time.monotonic() + 60
    while requests.reason(0, 0) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert text_of(requests.reason_given) == f"the file {tmp_path}/STOP"


def test_a_look_for_which_there_is_no_thread_is_made_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.0)
    (tmp_path / "STOP").touch()
    requests = StopRequest(Signals())
    requests.watch(tmp_path, None, {})

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert requests.reason(0, 0) is None
    assert text_of(requests.reason(0, 0)) == f"the file {tmp_path}/STOP"


def test_a_rank_that_does_not_watch_sees_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "STOP").touch()
    requests = StopRequest(Signals())
    assert requests.reason(0, 0) is None
    requests.clear()
    assert (tmp_path / "STOP").exists()


def test_time_runs_out_early_enough_for_what_is_left_to_do(tmp_path: Path) -> None:
    signals = Signals()
    signals.since = time.monotonic() - 100
    for limit, step_s, save_s, asked in (
        (1000, 1, 10, False),
        (130, 1, 10, False),  # 30 s left, 3 + 12 + 5 needed
        (130, 5, 10, True),
        (130, 1, 20, True),
        (104, 0, 0, True),
        (50, 0, 0, True),
    ):
        requests = StopRequest(signals)
        requests.watch(tmp_path, limit, {})
        assert (text_of(requests.reason(step_s, save_s)) == "train.time_limit") == asked


def test_the_end_of_a_slurm_job_is_a_limit(tmp_path: Path) -> None:
    soon = str(int(time.time()) + 3)
    requests = StopRequest(Signals())
    requests.watch(tmp_path, None, {"SLURM_JOB_END_TIME": soon, "SLURM_JOB_ID": "77"})
    assert text_of(requests.reason(0, 0)) == "the end of SLURM job 77"
    for other in ({}, {"SLURM_JOB_END_TIME": "Unknown"}, {"SLURM_JOB_END_TIME": "1000000000"}):
        assert limits(None, 0.0, other) == []
    late = {"SLURM_JOB_END_TIME": str(int(time.time()) + 3600), "SLURM_JOB_ID": "7"}
    slow = late | {"SLURM_JOB_START_TIME": str(int(time.time()) + 3000)}  # by the clock of SLURM's host
    ((_, left),) = limits(None, time.monotonic() - 500, slow)
    assert 90 < left() <= 100, "a job of 600 s, of which 500 are over, whatever this host's clock says"
    assert [reason.text for reason, _ in limits(60.0, 0.0, late)] == ["train.time_limit", "the end of SLURM job 7"]


# Runs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_run(tmp_path_factory.mktemp("small")))


@pytest.fixture
def go(small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Trains in this process."""
    monkeypatch.setattr(meshtrain.run.results, "plot_loss", lambda *_: "no picture is drawn")
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.0)

    def go(*overrides: str, **case: Any) -> dict[str, Any]:
        return alone(Case(small, (f"train.output={tmp_path}/run", "data.workers=0", *overrides), **case))

    return go


def exit_of(folder: Path) -> dict[str, Any]:
    """What it says but for the times, which tests/metrics/test_goodput.py looks at."""
    found = json.loads((folder / "exit.json").read_text())
    found.pop("goodput", None)
    return found


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGUSR1", "STOP"])
def test_a_run_saves_and_stops(
    go: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """Asked in the update of step 2; the sum of step 3 tells it to all, and step 4 is not taken any more."""
    assert go(interrupt=how, at=2) == {"status": 75}
    reason = f"the file {tmp_path}/run/STOP" if how == "STOP" else how
    kind = "file" if how == "STOP" else how
    expected = {
        "status": "stopped",
        "code": 75,
        "reason": f"asked to stop by {reason}",
        "kind": kind,
        "step": 3,
        "hosts": [],
    }
    assert exit_of(tmp_path / "run") == expected
    assert complete_steps(tmp_path / "run/checkpoints") == [3]
    assert [row["step"] for row in read(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]
    assert not (tmp_path / "run/STOP").exists()
    said, spent = capsys.readouterr().out.rsplit("\nwall time ", 1)
    assert said.endswith(
        f"\nstopped after step 3 of 8: asked to stop by {reason}\n"
        f"the state is in {tmp_path}/run/checkpoints/step_0000003\nto go on, start the same command again"
    )
    assert spent.count("\n") == 1, "how the time was spent is the last word"


def test_a_run_that_was_asked_in_its_last_step_is_done(go: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert go(interrupt="SIGUSR1", at=8) == {"status": 0}
    assert exit_of(tmp_path / "run")["status"] == "done"


def test_a_run_that_was_warned_before_training_stops_as_soon_as_it_can(
    go: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = meshtrain.train.build_mesh
    monkeypatch.setattr(meshtrain.train, "build_mesh", lambda *each: send(signal.SIGUSR1) or plain(*each))
    assert go() == {"status": 75}
    assert exit_of(tmp_path / "run")["step"] == 1


def test_a_signal_before_training_ends_the_run(
    go: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meshtrain.train, "build_mesh", lambda *_: send(signal.SIGTERM))
    with pytest.raises(SystemExit):
        go()
    expected = {
        "status": "failed",
        "code": 1,
        "reason": "ended by SIGTERM",
        "kind": "ended",
        "step": 0,
        "hosts": ["here"],
    }
    assert exit_of(tmp_path / "run") == expected


def test_a_time_limit_stops_a_run(go: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    begun = time.monotonic()
    assert go("train.steps=1000000", "train.time_limit=9s", "checkpoint.every=0") == {"status": 75}
    assert time.monotonic() - begun < 9
    ended = exit_of(tmp_path / "run")
    assert (ended["reason"], ended["kind"]) == ("asked to stop by train.time_limit", "time_limit")
    assert complete_steps(tmp_path / "run/checkpoints") == [ended["step"]]


# Saves that fail ----------------------------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A disk that is full when the checkpoints of these steps are begun."""
    steps: list[int] = []
    plain = folder.begin

    def begin(where: Path, step: int) -> Path:
        if step in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(where))
        return plain(where, step)

    monkeypatch.setattr(folder, "begin", begin)
    return steps


def test_a_stop_that_cannot_save_is_a_failure(
    go: Callable[..., dict[str, Any]], tmp_path: Path, full: list[int]
) -> None:
    full.append(3)
    failed = go("checkpoint.every=2", interrupt="STOP", at=2)
    assert failed["status"] == 1
    assert "3 steps of 8 are done and not saved: " in failed["error"]
    assert "No space left on device" in failed["error"]
    assert exit_of(tmp_path / "run")["status"] == "failed"
    assert complete_steps(tmp_path / "run/checkpoints") == [2]
    assert (tmp_path / "run/STOP").exists(), "it has not been obeyed"


def test_a_run_goes_on_without_a_checkpoint_or_stops(
    go: Callable[..., dict[str, Any]], tmp_path: Path, full: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    full.append(4)
    assert go() == {"status": 0}
    assert "there is no checkpoint of step 4: " in capsys.readouterr().out
    assert complete_steps(tmp_path / "run/checkpoints") == [8]
    stopped = go(f"train.output={tmp_path}/other", "checkpoint.on_failure=stop")
    assert stopped["status"] == 1
    assert "there is no checkpoint of step 4: " in stopped["error"]
    assert exit_of(tmp_path / "other")["step"] < 8


def test_what_is_being_written_when_training_fails_is_written_to_its_end(
    go: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = folder.begin
    monkeypatch.setattr(folder, "begin", lambda *each: time.sleep(1) or plain(*each))
    assert go(interrupt="end", at=5)["status"] == 1
    assert complete_steps(tmp_path / "run/checkpoints") == [4]


def test_a_run_whose_last_state_is_not_saved_says_so_when_all_else_is_done(
    go: Callable[..., dict[str, Any]], tmp_path: Path, full: list[int]
) -> None:
    full.append(8)
    failed = go(f"train.export={tmp_path}/weights")
    assert "8 steps of 8 are done and not saved" in failed["error"]
    assert (tmp_path / "weights").exists()
    full.clear()
    assert go() == {"status": 0}
    assert complete_steps(tmp_path / "run/checkpoints") == [4, 8]


# Processes ----------------------------------------------------------------------------------------------------------

LONG = ("train.steps=1000000", "optimizer.warmup_steps=0", "data.workers=1")


def start(command: list[str], mark: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment(**{MARK: mark}), **pipes)


def wait_for(there: Callable[[], bool], job: subprocess.Popen, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def hears(process: int, number: int) -> bool:
    """Whether a process has a handler of this signal."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_warning_while_torch_is_imported_ends_with_75(small: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    job = start([sys.executable, "-m", "meshtrain.train", small, *LONG, f"train.output={output}"], "warned")
    try:
        wait_for(lambda: hears(job.pid, signal.SIGUSR1), job)
        assert "libtorch" not in Path(f"/proc/{job.pid}/maps").read_text(), "torch is still to come"
        job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=90)
        assert job.returncode == 75, out + err
        assert exit_of(output)["reason"] == "asked to stop by SIGUSR1"
        assert not wait_until_gone("warned")
    finally:
        job.kill()


def test_a_second_signal_stops_at_once(small: str, tmp_path: Path) -> None:
    """The update of step 3 takes long. The first signal asks; the second, later, does not wait for it."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time\nfrom meshtrain import trainer\nfrom meshtrain.train import main\n"
        "update = trainer.Trainer.optimizer_step\n"
        "def slow(self, number, stop_asked=False):\n"
        "    if number == 3:\n"
        "        time.sleep(60)\n"
        "    return update(self, number, stop_asked)\n"
        "trainer.Trainer.optimizer_step = slow\n"
        "sys.exit(main())\n"
    )
    output = tmp_path / "run"
    job = start([sys.executable, str(script), small, *LONG, f"train.output={output}"], "slow")
    try:
        metrics = output / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) == 2, job)
        job.send_signal(signal.SIGTERM)
        time.sleep(stopping.ONE_REQUEST_S + 0.5)
        assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=20) == 128 + signal.SIGTERM
        assert (exit_of(output)["status"], exit_of(output)["reason"]) == ("failed", "ended by SIGTERM")
        assert not wait_until_gone("slow")
    finally:
        job.kill()
        job.communicate()


def test_under_torchrun_a_stop_ends_with_0(small: str, tmp_path: Path) -> None:
    """By the file; then torchrun itself is signalled, as SLURM or a person does, and passes it on."""
    output = tmp_path / "run"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "meshtrain.train", small, *LONG]
    steps = [0]
    metrics = output / "metrics.jsonl"
    for how in ("STOP", "SIGTERM"):
        job = start([*command, f"train.output={output}"], how)
        try:
            wait_for(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > steps[-1], job)
            if how == "STOP":
                (output / "STOP").touch()
            else:
                job.terminate()
            out, err = job.communicate(timeout=60)
        finally:
            job.kill()
        ended = exit_of(output)
        assert (ended["status"], ended["code"]) == ("stopped", 75), out + err
        assert "to go on, start the same command again" in out
        assert (job.returncode == 0) == (how == "STOP"), "torchrun says that it was signalled"
        assert not wait_until_gone(how)
        steps.append(ended["step"])
    assert steps[1] < steps[2], "the second job went on from where the first one stopped"
    assert [row["step"] for row in read(metrics)] == list(range(1, steps[2] + 1))


def test_an_exit_status_above_128_is_a_signal_only_if_there_is_such_a_signal() -> None:
    names = [signal_of(SystemExit(code)) for code in (143, 130, 128, 255, 1, None, "no")]
    assert names == ["SIGTERM", "SIGINT", *[None] * 5]
    assert signal_of(KeyboardInterrupt()) == "SIGINT"
    assert signal_of(ValueError()) is None
