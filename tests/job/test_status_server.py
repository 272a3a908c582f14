"""Servers of status: what is answered, to whom, and what silence means."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.job.watchdog import status_server
from meshtrain.job.watchdog.records import RankStatus
from meshtrain.job.watchdog.status_server import (
    Address,
    NoReplyError,
    Peers,
    StatusServer,
    addresses_towards,
    ask,
    ask_all,
    namespace_ids,
    process_state,
)
from meshtrain.job.watchdog.watchdog import Watchdog
from tests.launching import ROOT, environment


@pytest.fixture
def server() -> Iterator[StatusServer]:
    server = StatusServer(lambda question: {"heard": question})
    yield server
    server.close()


def at(port: int, *ips: str) -> Address:
    return Address(0, "host", os.getpid(), port, ips or ("127.0.0.1",), "here", "these")


def test_a_question_is_answered(server: StatusServer) -> None:
    assert ask(at(server.port), {"ask": "state"}, server.token) == {"heard": {"ask": "state"}}
    assert ask(at(server.port, "::1"), {}, server.token) == {"heard": {}}


def test_a_stranger_is_not_answered(server: StatusServer) -> None:
    with pytest.raises(NoReplyError):
        ask(at(server.port), {"ask": "end"}, "another job's")
    strange = '{"token": "\u00fc"}\n'.encode(), b'{"token": "\\ud800"}\n', b"[" * 100_000 + b"\n"
    for garbage in (b"GET / HTTP/1.1\r\n", b"[1]\n", b"\xff\n", b"{\n", *strange):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(garbage)
            assert connection.recv(10) == b""
    assert ask(at(server.port), {}, server.token) == {"heard": {}}, "and whoever comes after it is"


def test_who_has_gone_refuses(server: StatusServer) -> None:
    server.close()
    with pytest.raises(ConnectionRefusedError):
        ask(at(server.port), {}, server.token)


def test_the_host_itself_is_asked_without_the_network(server: StatusServer) -> None:
    assert ask(at(server.port, "192.0.2.1"), {}, server.token, net="here") == {"heard": {}}


def test_only_the_same_network_is_asked_by_loopback(server: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of the same name may be another."""

    def connect(ip: str, port: int) -> socket.socket:
        asked.append(ip)
        return real(ip, port)

    asked: list[str] = []
    real = status_server._connect
    monkeypatch.setattr(status_server, "_connect", connect)
    ask(at(server.port, "::1"), {}, server.token, net="host")
    assert asked == ["::1"]
    ask(at(server.port, "::1"), {}, server.token, net="here")
    assert asked == ["::1", "127.0.0.1"]


def test_who_refuses_is_gone_only_if_no_address_leads_to_him(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(ip: str, port: int) -> socket.socket:
        if ip == "lost":
            raise TimeoutError("timed out")
        return real(ip, port)

    real = status_server._connect
    monkeypatch.setattr(status_server, "_connect", connect)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # nobody listens there on ::1
        other = StatusServer(lambda question: {})
        other.close()
        for ips in (("lost", "::1"), ("::1", "lost")):
            with pytest.raises(TimeoutError):
                ask(at(port, *ips), {}, "")
        with pytest.raises(ConnectionRefusedError):
            ask(at(other.port, "::1", "127.0.0.1"), {}, "")
        with pytest.raises(NoReplyError):
            ask(at(port, "::1", "127.0.0.1"), {}, "", seconds=0.1)


@pytest.mark.parametrize(
    "says", [b"HTTP/1.1 400 Bad Request\r\n", b"[1]\n", b'{"error": "who"}\n', b'{"answered": 1}\n']
)
def test_another_program_on_the_port_of_a_rank_is_not_that_rank(says: bytes) -> None:
    def serve() -> None:
        connection, _ = taken.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ConnectionRefusedError):
            ask(at(taken.getsockname()[1]), {}, "")


def test_a_server_outlives_what_the_system_runs_out_of(server: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    exhausted = Exhausted(server._listening)
    monkeypatch.setattr(server, "_listening", exhausted)
    assert ask(at(server.port), {}, server.token) == {"heard": {}}, "accepted by the socket that it had"
    start, left = threading.Thread.start, [2]

    def fails(thread: threading.Thread) -> None:
        if thread.name == "answer" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    assert ask(at(server.port), {}, server.token) == {"heard": {}}
    assert (left, exhausted.left) == ([0], 0), "all of it has happened"


class Exhausted:
    """A socket that fails at first."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening, self.left = listening, 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.left:
            self.left -= 1
            raise OSError(24, "Too many open files")
        return self._listening.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._listening, name)


def test_strangers_hold_few_threads_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says a byte now and then, too."""
    monkeypatch.setattr(status_server, "ANSWER_S", 0.6)
    monkeypatch.setattr(status_server, "READERS", 2)
    read_line, reading, most, over = status_server._read_line, list[None](), list[int](), threading.Event()

    def count(connection: socket.socket, seconds: float) -> bytes:
        if threading.current_thread().name != "answer":
            return read_line(connection, seconds)  # of the one that asks
        reading.append(None)
        most.append(len(reading))
        try:
            return read_line(connection, seconds)
        finally:
            reading.pop()

    monkeypatch.setattr(status_server, "_read_line", count)
    server = StatusServer(lambda question: {})
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]

    def talk() -> None:
        while not over.wait(0.1):
            for stranger in strangers:
                with suppress(OSError):  # it was not listened to any longer
                    stranger.sendall(b"x")

    talking = threading.Thread(target=talk)
    talking.start()
    try:
        assert ask(at(server.port), {}, server.token, seconds=10) == {}
        assert max(most) == 2
    finally:
        over.set()
        talking.join()
        for stranger in strangers:
            stranger.close()
        server.close()


def test_a_place_is_not_known_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert namespace_ids("one") == namespace_ids("another") or not os.path.exists(status_server.BOOT)
    assert len(set(namespace_ids("one"))) == 2 or not os.path.exists("/proc/self/ns/net")
    monkeypatch.setattr(status_server, "BOOT", "/no/such/file")
    assert namespace_ids("one")[0] != namespace_ids("another")[0]


def several(hosts: int, each: int) -> list[Address]:
    return [
        Address(rank, "same", rank, 1, ("a",), f"net {rank // each}", f"pids {rank // each}")
        for rank in range(hosts * each)
    ]


def test_hosts_that_are_lost_are_not_asked_rank_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first host nobody is reached, of the second all but its first rank; the third refuses."""

    def fake(to: Address, *_: object, **__: object) -> dict[str, int]:
        asked.append(to.rank)
        if to.rank <= 40:
            raise TimeoutError("timed out")
        if to.rank >= 80:
            raise ConnectionRefusedError
        return {"rank": to.rank}

    asked: list[int] = []
    monkeypatch.setattr(status_server, "ask", fake)
    answers = ask_all(several(3, 40), {}, "", "")
    assert sorted(asked) == [0, 1, *range(40, 120)]
    assert [status_server.unreachable(answer) for answer in answers] == [True] * 41 + [False] * 79
    assert answers[41:80] == [{"rank": rank} for rank in range(41, 80)]
    assert all(isinstance(answer, ConnectionRefusedError) for answer in answers[80:])


class Fake:
    """A job of which this process is some rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.host = rank, "same"


def test_processes_of_a_host_with_the_same_name_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, server: StatusServer
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(status_server, "process_state", lambda pid: "T")
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    known = Peers(Fake(2), server, several(2, 2))  # type: ignore[arg-type]
    for rank in range(4):
        known.kill(rank)
    assert killed == [2, 3]
    assert [known.state(rank) for rank in range(4)] == ["", "", "T", "T"]


def test_who_did_not_hear_is_told_again(monkeypatch: pytest.MonkeyPatch, server: StatusServer) -> None:
    def fake(some: Sequence[Address], *_: object) -> list[Any]:
        told.append([to.rank for to in some])
        return [NoReplyError() if to.rank == 2 else {} for to in some]

    told: list[list[int]] = []
    monkeypatch.setattr(status_server, "ask_all", fake)
    Peers(Fake(0), server, several(2, 2)).tell({1, 2, 3}, {"ask": "end"})  # type: ignore[arg-type]
    assert told == [[1, 2, 3], [2]]


def test_the_lowest_that_lives_is_found_soon(monkeypatch: pytest.MonkeyPatch, server: StatusServer) -> None:
    def fake(some: Sequence[Address], *_: object) -> list[Any]:
        rounds.append(len(some))
        return [{} if to.rank == 290 else TimeoutError() for to in some]

    rounds: list[int] = []
    monkeypatch.setattr(status_server, "ask_all", fake)
    lowest = Peers(Fake(300), server, several(50, 8)).alive_from_rank_0()  # type: ignore[arg-type]
    assert [to.rank for to in lowest] == [290, 300]
    assert rounds == [16, 64, 220]


def test_nothing_comes_back_where_the_network_drops_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "CONNECT_S", 0.5)
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
from meshtrain.job.watchdog.status_server import StatusServer
print(StatusServer(lambda question: {}).port, flush=True)
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
        with pytest.raises(NoReplyError):
            ask(at(port), {}, "", seconds=0.5)
        assert process_state(child.pid) == "T"
        assert isinstance(ask_all([at(port)], {}, "", "here", 0.5)[0], NoReplyError)
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) == ""


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


# Descriptors --------------------------------------------------------------------------------------------------------

DESCRIPTORS = 256
LEADER = f"""
import json, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
import torch
from meshtrain.job.environment import Environment
from meshtrain.job.watchdog.diagnose import Coordinator
from meshtrain.job.watchdog.status_server import Address, Peers, StatusServer
from meshtrain.job.watchdog.watchdog import Watchdog
from meshtrain.job.process import Job
world, token, alive, dead = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
watch = Watchdog(Job(Environment("none", 0, world, 0, "a", None), torch.device("cpu"), None))
server = watch._server = StatusServer(watch._answer)
server.token = token
ports = {{0: server.port, 7: dead}}
addresses = [Address(i, "a" if i == 0 else "b", 1, ports.get(i, alive), ("127.0.0.1",), str(i > 0), str(i > 0))
             for i in range(world)]
watch._peers = Peers(watch.job, server, addresses)
watch._coordinator = Coordinator(watch._peers, watch._clock, watch._closed)
print(server.port, flush=True)
sys.stdin.read()
"""


def test_a_leader_with_few_descriptors_decides_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ask at once, more than it has descriptors for; rank 7 is gone, and nobody else is blamed."""

    def connect(ip: str, port: int) -> socket.socket:
        connection = real(ip, port)
        asking.append(port)
        if len(asking) == world - 1:
            all_ask.set()
        return connection

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question["ask"] != "state":
            return {}
        all_ask.wait(3)
        time.sleep(0.5)  # for the leader to accept them
        return state

    real, asking, all_ask = status_server._connect, list[int](), threading.Event()
    monkeypatch.setattr(status_server, "_connect", connect)
    world = DESCRIPTORS + 44
    state = asdict(RankStatus("step", 5, 20.0))
    others = StatusServer(answer)
    gone = StatusServer(lambda question: {})
    gone.close()
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(world), others.token, str(others.port), str(gone.port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(),
    )  # fmt: skip
    try:
        assert leader.stdout is not None
        to = at(int(leader.stdout.readline()))
        watch = Watchdog(SimpleNamespace(rank=1))  # type: ignore[arg-type]
        watch._peers = Peers(SimpleNamespace(rank=0), others, [to])  # type: ignore[arg-type]
        question = {"ask": "coordinate", "hangs": False, "failed": True, "late": False}
        with ThreadPoolExecutor(world - 1) as pool:
            heard = list(pool.map(lambda _: watch._ask_for_diagnosis(to, question), range(world - 1)))
        assert watch.diagnosis is not None
        assert (watch.diagnosis.kind, watch.diagnosis.ranks) == ("gone", (7,))
        assert all(heard)
        _, told = leader.communicate()
        assert told.startswith("rank 0 on host a stops, because rank 7 on host b is gone: ")
        assert told.count("Traceback") == 0
    finally:
        leader.kill()
        leader.wait()
        others.close()


def test_what_this_process_lacks_is_waited_for_and_says_nothing_of_others(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*arguments: Any, fileno: int | None = None) -> socket.socket:
        left[0] -= fileno is None  # what the server accepts is not meant
        if left[0] >= 0 and fileno is None:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*arguments, fileno=fileno)

    real, left = socket.socket, [3]
    monkeypatch.setattr(status_server, "PAUSE_S", 0.01)
    monkeypatch.setattr(status_server.socket, "socket", lacking)
    assert ask(at(server.port), {}, server.token) == {"heard": {}}
    left[0] = 10**9
    monkeypatch.setattr(status_server, "EXHAUSTED_S", 0.1)
    with pytest.raises(status_server.ExhaustedError):
        ask_all([at(server.port)], {}, server.token, "")


def test_one_rank_of_each_host_asks_the_leader(monkeypatch: pytest.MonkeyPatch, server: StatusServer) -> None:
    """And the others of its host ask that one."""

    def fake(to: Address, question: dict[str, Any], *_: object, **__: object) -> dict[str, Any]:
        if question["ask"] == "here":
            return {}
        asked.append((question["ask"], to.rank))
        return {"diagnosis": None}

    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(status_server, "ask", fake)
    for rank in range(8, 16):
        watch = Watchdog(Fake(rank))  # type: ignore[arg-type]
        watch._peers = Peers(Fake(rank), server, several(4, 8))  # type: ignore[arg-type]
        watch._inquire(hangs=True)
    assert asked == [("coordinate", 0)] + [("inquire", 8)] * 7
    watch = Watchdog(Fake(8))  # type: ignore[arg-type]
    watch._peers = Peers(Fake(8), server, several(4, 8))  # type: ignore[arg-type]
    assert watch._answer({"ask": "inquire", "hangs": True, "failed": False, "late": False}) == {"diagnosis": None}
    assert asked[-1] == ("coordinate", 0)


def test_an_error_in_an_answer_is_told_once(server: StatusServer, capsys: pytest.CaptureFixture) -> None:
    watch = Watchdog(Fake(1))  # type: ignore[arg-type]
    broken = StatusServer(watch._answer)
    try:
        for _ in range(3):
            with pytest.raises(NoReplyError):
                ask(at(broken.port), {"ask": "look", "rank": 99}, broken.token)
        assert capsys.readouterr().err.count("Traceback") == 1
    finally:
        broken.close()
