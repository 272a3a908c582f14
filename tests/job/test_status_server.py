"""Servers of status: what is answered, to whom, and what silence means."""

import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest

from meshtrain.job.watchdog import status_server, watchdog
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
from tests.job.fakes import job_of
from tests.launching import ROOT, environment


@pytest.fixture
def server() -> Iterator[StatusServer]:
    server = StatusServer(lambda question: {"heard": question})
    yield server
    server.close()


def at(port: int, *ips: str) -> Address:
    return Address(0, "host", os.getpid(), port, ips or ("127.0.0.1",), "here", "these")


# Questions and answers ----------------------------------------------------------------------------


def test_a_question_is_answered_until_the_rank_has_gone(server: StatusServer) -> None:
    assert ask(at(server.port), {"ask": "state"}, server.token) == {"heard": {"ask": "state"}}
    with pytest.raises(NoReplyError):
        ask(at(server.port), {"ask": "end"}, "another job's")
    server.close()
    with pytest.raises(ConnectionRefusedError):
        ask(at(server.port), {}, server.token)


def test_a_stranger_is_not_answered(server: StatusServer) -> None:
    strange = '{"token": "\u00fc"}\n'.encode(), b'{"token": "\\ud800"}\n', b"[" * 100_000 + b"\n"
    for garbage in (b"GET / HTTP/1.1\r\n", b"[1]\n", b"\xff\n", b"{\n", *strange):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(garbage)
            assert connection.recv(10) == b""
    assert ask(at(server.port), {}, server.token) == {"heard": {}}, "and whoever comes after it is"


def test_only_the_same_network_is_asked_by_loopback(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host of the same name may be another."""
    connect, asked = status_server._connect, []
    monkeypatch.setattr(
        status_server, "_connect", lambda ip, port: asked.append(ip) or connect(ip, port)
    )
    ask(at(server.port, "::1"), {}, server.token, net="host")
    assert asked == ["::1"]
    ask(at(server.port, "192.0.2.1"), {}, server.token, net="here")
    assert asked == ["::1", "127.0.0.1"]


def test_who_refuses_is_gone_only_if_no_address_leads_to_him(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n", b"[1]\n", b'{"error": "who"}\n', b'{"answered": 1}\n'],
)
def test_another_program_on_the_port_of_a_rank_is_not_that_rank(answer: bytes) -> None:
    def serve() -> None:
        connection, _ = taken.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ConnectionRefusedError):
            ask(at(taken.getsockname()[1]), {}, "", seconds=60)


def test_strangers_hold_few_threads_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says a byte now and then, too."""
    monkeypatch.setattr(status_server, "ANSWER_S", 1.0)
    monkeypatch.setattr(status_server, "READERS", 2)
    read_line, reading, most, over = status_server._read_line, [], [], threading.Event()

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
        assert ask(at(server.port), {}, server.token, seconds=60) == {}
        assert max(most) == 2
    finally:
        over.set()
        talking.join()
        for stranger in strangers:
            stranger.close()
        server.close()


def test_an_error_in_an_answer_is_told_once(capsys: pytest.CaptureFixture) -> None:
    broken = StatusServer(Watchdog(job_of(1))._answer)
    try:
        for _ in range(3):
            with pytest.raises(NoReplyError):
                ask(at(broken.port), {"ask": "look", "rank": 99}, broken.token)
        assert capsys.readouterr().err.count("Traceback") == 1
    finally:
        broken.close()


# What runs out ------------------------------------------------------------------------------------


def failing_first(call: Callable[..., Any], error: Exception, times: int) -> Mock:
    """The call, which raises an error the first times."""
    return Mock(wraps=call, side_effect=itertools.chain([error] * times, itertools.repeat(DEFAULT)))


def test_a_server_outlives_what_the_system_runs_out_of(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = server._listening
    accept = failing_first(listening.accept, OSError(errno.EMFILE, "Too many open files"), 2)
    others = {"shutdown": listening.shutdown, "close": listening.close}
    monkeypatch.setattr(server, "_listening", SimpleNamespace(accept=accept, **others))
    start = threading.Thread.start
    lacking = failing_first(start, RuntimeError("can't start new thread"), 2)
    monkeypatch.setattr(
        threading.Thread,
        "start",
        lambda thread: (lacking if thread.name == "answer" else start)(thread),
    )
    for _ in range(2):  # the first one is accepted by the socket that the server had
        assert ask(at(server.port), {}, server.token, seconds=60) == {"heard": {}}
    assert min(accept.call_count, lacking.call_count) > 2, "all of it has happened"


def test_what_this_process_lacks_is_waited_for_and_says_nothing_of_others(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, error = socket.socket, OSError(errno.EMFILE, "Too many open files")
    lacking = failing_first(real, error, 3)

    def connect(*arguments: Any, fileno: int | None = None) -> socket.socket:
        # None: not the server's
        return lacking(*arguments) if fileno is None else real(*arguments, fileno=fileno)

    monkeypatch.setattr(status_server, "PAUSE_S", 0.01)
    monkeypatch.setattr(status_server.socket, "socket", connect)
    assert ask(at(server.port), {}, server.token) == {"heard": {}}
    lacking.side_effect = error
    monkeypatch.setattr(status_server, "EXHAUSTED_S", 0.1)
    with pytest.raises(status_server.ExhaustedError):
        ask_all([at(server.port)], {}, server.token, "")


def test_a_leader_that_many_ask_at_once_keeps_descriptors_for_its_own_questions(
    monkeypatch: pytest.MonkeyPatch, server: StatusServer
) -> None:
    """Whoever finds no place among those that wait for its diagnosis comes again later."""
    monkeypatch.setattr(watchdog, "MOST_WAITERS", 0)
    monkeypatch.setattr(watchdog, "AGAIN_S", 0.01)
    question = {"ask": "coordinate", "hangs": False, "failed": True, "late": False}
    leader, other = (Watchdog(job_of(rank)) for rank in range(2))
    assert leader._answer(dict(question)) == {"later": True}
    diagnosis = {
        "kind": "gone",
        "ranks": [7],
        "headline": "",
        "details": [],
        "hosts": [],
        "evidence": "",
    }
    answers: list[dict[str, Any]] = [{"later": True}, {"later": True}, {"diagnosis": diagnosis}]
    other._peers = SimpleNamespace(ask=lambda *_: answers.pop(0))
    assert other._ask_for_diagnosis(at(server.port), question)
    assert other.diagnosis.ranks == (7,)


# Many ranks ---------------------------------------------------------------------------------------


def several(hosts: int, each: int) -> list[Address]:
    return [
        Address(rank, "same", rank, 1, ("a",), f"net {rank // each}", f"pids {rank // each}")
        for rank in range(hosts * each)
    ]


def peers_of(rank: int, server: StatusServer, hosts: int, each: int) -> Peers:
    return Peers(job_of(rank), server, several(hosts, each))


@pytest.mark.skipif(
    not os.path.exists("/proc/self/stat"), reason="processes are looked up in /proc"
)
def test_a_process_of_this_host_that_is_gone_is_not_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host is this one, and was reached: whatever came back from a port that was just being
    closed."""
    places = [("net 0", "pids 0"), ("net 0", "pids 0"), ("net 1", "pids 1")]
    pids = [os.getpid(), 2**22 + 1, 2**22 + 1]  # the second number is beyond the largest process id
    addresses = [
        Address(rank, "same", pids[rank], 1, ("a",), *place) for rank, place in enumerate(places)
    ]
    peers = Peers(job_of(0), SimpleNamespace(token="t"), addresses)
    no_route = OSError(errno.EHOSTUNREACH, "No route to host")
    monkeypatch.setattr(peers, "_ask_all", lambda ranks, question: [no_route for _ in ranks])
    assert [report.reach for report in peers.examine()] == ["unreachable", "gone", "unreachable"]
    peers.close()


def test_a_place_is_not_known_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert namespace_ids("one") == namespace_ids("another") or not os.path.exists(
        status_server.BOOT
    )
    assert len(set(namespace_ids("one"))) == 2 or not os.path.exists("/proc/self/ns/net")
    monkeypatch.setattr(status_server, "BOOT", "/no/such/file")
    assert namespace_ids("one")[0] != namespace_ids("another")[0]


def test_hosts_that_are_lost_are_not_asked_rank_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first host nobody is reached, of the second all but its first rank; the third
    refuses."""

    def fake(to: Address, *_: object, **__: object) -> dict[str, int]:
        asked.append(to.rank)
        if to.rank <= 40:
            raise TimeoutError("timed out")
        if to.rank >= 80:
            raise ConnectionRefusedError
        return {"rank": to.rank}

    asked = []
    monkeypatch.setattr(status_server, "ask", fake)
    answers = ask_all(several(3, 40), {}, "", "")
    assert sorted(asked) == [0, 1, *range(40, 120)]
    assert [status_server.unreachable(answer) for answer in answers] == [True] * 41 + [False] * 79
    assert answers[41:80] == [{"rank": rank} for rank in range(41, 80)]
    assert all(isinstance(answer, ConnectionRefusedError) for answer in answers[80:])


def test_processes_of_a_host_with_the_same_name_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, server: StatusServer
) -> None:
    killed = []
    monkeypatch.setattr(status_server, "process_state", lambda pid: "T")
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    peers = peers_of(2, server, 2, 2)
    for rank in range(4):
        peers.kill(rank)
    assert killed == [2, 3]
    assert [peers.state(rank) for rank in range(4)] == ["", "", "T", "T"]


def test_who_did_not_hear_is_told_again_and_the_lowest_that_lives_is_found_soon(
    monkeypatch: pytest.MonkeyPatch, server: StatusServer
) -> None:
    def fake(addresses: Sequence[Address], *_: object) -> list[Any]:
        rounds.append([to.rank for to in addresses])
        return [{} if to.rank in alive else TimeoutError() for to in addresses]

    rounds = []
    monkeypatch.setattr(status_server, "ask_all", fake)
    alive = [1, 3]
    peers_of(0, server, 2, 2).tell({1, 2, 3}, {"ask": "end"})
    assert rounds == [[1, 2, 3], [2]]
    rounds.clear()
    alive = [290]
    assert [to.rank for to in peers_of(300, server, 50, 8).alive_from_rank_0()] == [290, 300]
    assert [len(ranks) for ranks in rounds] == [16, 64, 220]


def test_one_rank_of_each_host_asks_the_leader(
    monkeypatch: pytest.MonkeyPatch, server: StatusServer
) -> None:
    """And the others of its host ask that one."""

    def fake(to: Address, question: dict[str, Any], *_: object, **__: object) -> dict[str, Any]:
        if question["ask"] == "here":
            return {}
        asked.append((question["ask"], to.rank))
        return {"diagnosis": None}

    def watchdog_of(rank: int) -> Watchdog:
        watch = Watchdog(job_of(rank))
        watch._peers = peers_of(rank, server, 4, 8)
        return watch

    asked = []
    monkeypatch.setattr(status_server, "ask", fake)
    for rank in range(8, 16):
        watchdog_of(rank)._inquire(hangs=True)
    assert asked == [("coordinate", 0)] + [("inquire", 8)] * 7
    question = {"ask": "inquire", "hangs": True, "failed": False, "late": False}
    assert watchdog_of(8)._answer(question) == {"diagnosis": None}
    assert asked[-1] == ("coordinate", 0)


# Silence ------------------------------------------------------------------------------------------


def test_nothing_comes_back_where_the_network_drops_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


SERVES = """
import os, signal, sys
from meshtrain.job.watchdog.status_server import StatusServer
print(StatusServer(lambda question: {}).port, flush=True)
if os.fork() == 0:
    print("child", flush=True)
signal.pause()
"""


def test_a_stopped_process_is_silent_and_one_that_is_gone_refuses_though_its_child_lives_on() -> (
    None
):
    """As a reader of data lives on for a moment."""
    command = [sys.executable, "-c", SERVES]
    parent = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    try:
        port = int(parent.stdout.readline())
        assert parent.stdout.readline() == "child\n"
        parent.send_signal(signal.SIGSTOP)
        with pytest.raises(NoReplyError):
            ask(at(port), {}, "", seconds=0.5)
        assert process_state(parent.pid) == "T"
        assert isinstance(ask_all([at(port)], {}, "", "here", 0.5)[0], NoReplyError)
        parent.kill()
        parent.wait()
        assert process_state(parent.pid) == ""
        with pytest.raises(ConnectionRefusedError):
            ask(at(port), {}, "", seconds=60)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)


def test_addresses_that_lead_to_others_come_before_loopback() -> None:
    assert addresses_towards(["localhost"])[0] in ("127.0.0.1", "::1")
    assert addresses_towards(["no.such.host.invalid"]) == ()
