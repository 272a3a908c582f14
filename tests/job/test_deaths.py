"""How a process ended, as its neighbours see it until its launcher has been told."""

import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from meshtrain.job.watchdog import deaths
from meshtrain.job.watchdog.deaths import Deaths, end_of_process


def killed_by(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    os.close(ends[0])


@pytest.mark.parametrize(
    ("end", "seen"),
    [
        (killed_by(signal.SIGKILL), "SIGKILL"),
        (killed_by(signal.SIGBUS), "SIGBUS"),
        (lambda: os._exit(3), "status 3"),
        (lambda: os._exit(0), None),
    ],
    ids=["SIGKILL", "SIGBUS", "status 3", "status 0"],
)
def test_the_end_of_a_process_is_seen_and_remembered(
    end: Callable[[], None], seen: str | None, pipe: tuple[int, int]
) -> None:
    wait, go = pipe
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(wait, 1)
        faulthandler.disable()  # it would print the stack of the tests
        end()
    neighbours = Deaths({1: pid, 2: os.getpid()})
    os.close(go)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert neighbours.end_of(1) == seen
    os.waitpid(pid, 0)
    assert neighbours.end_of(1) == seen, "its launcher has been told meanwhile"
    assert end_of_process(pid) is None
    neighbours.close()
    neighbours.close()


def test_a_child_that_has_inherited_its_pipe_does_not_keep_it_from_closing(
    pipe: tuple[int, int],
) -> None:
    wait, go = pipe
    neighbours = Deaths({1: os.getpid()})
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(wait, 1)
        os._exit(0)
    closing = threading.Thread(target=neighbours.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    os.close(go)
    os.waitpid(pid, 0)


def test_who_lives_or_is_not_watched_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "SEEN_S", 0.01)
    neighbours = Deaths({1: os.getpid(), 2: 2**22 + 1})  # beyond the largest process id
    assert [neighbours.end_of(rank) for rank in (1, 2, 3)] == [None, None, None]
    assert end_of_process(os.getpid()) is None
    before = len(os.listdir("/proc/self/fd"))
    neighbours.close()
    assert len(os.listdir("/proc/self/fd")) == before - 3, (
        "the pipe, and the descriptor of a process"
    )
