"""Threads are started where the system has some, and their lack is an error of the machine."""

import threading
from pathlib import Path

import pytest

from meshtrain.job.threads import NoThreadError, start_thread
from tests.job.fakes import rank, watchdog_of


@pytest.fixture
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_a_thread_runs_under_its_name_and_keeps_no_process_alive() -> None:
    seen = []
    thread = start_thread(
        lambda value: seen.append((value, threading.current_thread())), 7, name="x"
    )
    thread.join()
    assert seen == [(7, thread)]
    assert (thread.name, thread.daemon) == ("x", True)


@pytest.mark.usefixtures("_no_threads")
def test_the_lack_of_threads_is_no_error_of_the_program() -> None:
    with pytest.raises(NoThreadError, match="can't start new thread") as caught:
        start_thread(print, name="x")
    assert isinstance(caught.value, OSError)


@pytest.mark.usefixtures("_no_threads")
def test_a_job_that_is_lost_ends_where_there_is_no_thread_for_its_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    watch = watchdog_of(1, [rank(0, reach="gone"), rank(1), rank(2)])
    watch.on_job_lost(lambda diagnosis: None, tmp_path / "failures")
    told = {
        "kind": "gone",
        "ranks": [0],
        "headline": "rank 0 is gone",
        "details": [],
        "hosts": ["a"],
        "evidence": "step_0000005",
    }
    watch._learn(told)
    assert watch.diagnosis is not None
    assert watch._decided.is_set(), "nobody waits for evidence that is not written"
    assert "can't start new thread" in capsys.readouterr().err
