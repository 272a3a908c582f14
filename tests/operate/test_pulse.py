"""Ears: what is answered, to whom, and what silence means."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from meshtrain.operate import pulse
from meshtrain.operate.pulse import Address, Ear, SilentError, addresses_towards, ask, ask_all, state_of
from tests.launching import ROOT, environment


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear(lambda question: {"heard": question})
    yield ear
    ear.close()


def at(port: int, *ips: str) -> Address:
    return Address(0, "here", os.getpid(), port, ips or ("127.0.0.1",))


def test_a_question_is_answered(ear: Ear) -> None:
    assert ask(at(ear.port), {"ask": "state"}, ear.token) == {"heard": {"ask": "state"}}
    assert ask(at(ear.port, "::1"), {}, ear.token) == {"heard": {}}


def test_a_stranger_is_not_answered(ear: Ear) -> None:
    with pytest.raises(SilentError):
        ask(at(ear.port), {"ask": "end"}, "another job's")
    for garbage in (b"GET / HTTP/1.1\r\n", b"[1]\n", b"\xff\n", b"{\n"):
        with socket.create_connection(("127.0.0.1", ear.port), timeout=5) as connection:
            connection.sendall(garbage)
            assert connection.recv(10) == b""
    assert ask(at(ear.port), {}, ear.token) == {"heard": {}}, "and whoever comes after it is"


def test_who_has_gone_refuses(ear: Ear) -> None:
    ear.close()
    with pytest.raises(ConnectionRefusedError):
        ask(at(ear.port), {}, ear.token)


def test_the_host_itself_is_asked_without_the_network(ear: Ear) -> None:
    assert ask(at(ear.port, "192.0.2.1"), {}, ear.token, here="here") == {"heard": {}}


def test_nothing_comes_back_where_the_network_drops_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port, others = full.getsockname()[1], []
        try:
            for _ in range(8):  # when its queue is full the kernel drops what comes next
                others.append(socket.socket())
                others[-1].setblocking(False)
                others[-1].connect_ex(("127.0.0.1", port))
            with pytest.raises(TimeoutError):
                ask(at(port), {}, "")
        finally:
            for other in others:
                other.close()


STOPPED = """
import os, signal, sys
from meshtrain.operate.pulse import Ear
print(Ear(lambda question: {}).port, flush=True)
if sys.argv[1] == "fork":
    if os.fork() == 0:
        print("child", flush=True)
signal.pause()
"""


def test_a_stopped_process_is_silent_and_its_state_says_why() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED, "stop"], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
    )
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(SilentError):
            ask(at(port), {}, "", seconds=0.5)
        assert state_of(child.pid) == "T"
        assert isinstance(ask_all([at(port)], {}, "", "here", 0.5)[0], SilentError)
    finally:
        child.kill()
        child.wait()
    assert state_of(child.pid) == ""


def test_a_child_does_not_keep_the_port_of_a_process_that_is_gone() -> None:
    """As a reader of data lives on for a moment."""
    parent = subprocess.Popen(
        [sys.executable, "-c", STOPPED, "fork"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        assert parent.stdout.readline() == "child\n"
        parent.kill()
        parent.wait()
        time.sleep(0.1)
        with pytest.raises(ConnectionRefusedError):
            ask(at(port), {}, "", seconds=2)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)


def test_addresses_that_lead_to_others_come_before_loopback() -> None:
    assert addresses_towards(["localhost"])[0] in ("127.0.0.1", "::1")
    assert addresses_towards(["no.such.host.invalid"]) == ()
