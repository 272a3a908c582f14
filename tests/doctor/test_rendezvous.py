"""The doctors' rendezvous over real sockets, several nodes in one process on 127.0.0.1; who else
may be at the port."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshtrain.config import Config
from meshtrain.doctor import facts, rendezvous
from meshtrain.doctor.command import DoctorRun, Outcome, examine
from meshtrain.doctor.files import named_paths, probe, tidy, visible
from meshtrain.doctor.ports import PortProbe, check_ports, clock_offset, owner_of_port
from meshtrain.doctor.records import ClusterFacts, Host, Interface, PathFacts, Place, RecordError
from meshtrain.doctor.rendezvous import Board, JoinError, join_rendezvous, open_rendezvous, serves
from meshtrain.job.sockets import address_towards, call_with_timeout
from tests.launching import environment, free_port

WAIT_S = 60.0  # for nodes that come, and strangers that are recognized
ALONE_S = 0.5  # for those that do not
CONFIG = "configs/quickstart.yaml"


def place(port: int, **values: Any) -> Place:
    return replace(
        Place("torchrun's options", "c10d", "127.0.0.1", port, "job", 2, 2, None, "1", False),
        **values,
    )


def host(port: int, **values: Any) -> Host:
    return Host("a", place(port, **values), 1, interfaces=(Interface("lo", ("127.0.0.1",)),))


def node(port: int, **values: Any) -> DoctorRun:
    """A node of a job without workers to time: with one process each they would take seconds to
    start."""
    return DoctorRun(place(port, **values), {}, None, (), WAIT_S)


def meet(*nodes: DoctorRun) -> list[Outcome]:
    """What each node comes to; all at once, as on several hosts."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(examine, nodes))


def ids(outcome: Outcome) -> set[str]:
    """What is wrong: what depends on this machine's load and disk is left out."""
    circumstances = {
        "host-busy",
        "little-memory",
        "little-disk",
        "transport",
        "not-timed",
        "same-host",
    }
    return {finding.id for finding in outcome.findings} - circumstances


def cluster_of(outcome: Outcome) -> ClusterFacts:
    assert outcome.cluster is not None, "the node that serves tells the story"
    return outcome.cluster


def failure_of(join: Callable[[], object]) -> tuple[str, str]:
    """How a node fails to join, and the detail."""
    with pytest.raises(JoinError) as error:
        join()
    return error.value.failure.how, error.value.failure.detail


def test_two_nodes_with_different_ids_and_clocks_learn_of_it_both() -> None:
    """Also that the error of the measured clock is known: loopback is quick."""
    port = free_port()
    early = replace(node(port, id="other"), clock=lambda: time.time() + 100)
    lead, other = meet(node(port, serves=True), early)
    assert ids(lead) == ids(other) == {"id-differs", "clock-differs"}
    assert other.cluster is None
    cluster = cluster_of(lead)
    assert [host.place.id for host in cluster.hosts] == ["job", "other"]
    assert [[check.how for check in visit.reach] for visit in cluster.visits if visit] == [
        ["open"],
        ["open"],
    ]
    measured = cluster.clocks[1]
    assert measured is not None
    assert abs(measured[0] - 100) <= measured[1] + 0.05


def test_a_different_number_of_nodes_ends_the_waiting_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "QUIET_S", 0.3)
    port = free_port()
    nodes = node(port, serves=True), node(port, fewest=3, most=3)
    lead, other = meet(*(replace(each, wait_s=600) for each in nodes))
    assert ids(lead) == ids(other) == {"nodes-differ"}
    assert cluster_of(lead).waited < 300


def test_who_waits_alone_says_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "PROGRESS_S", 0.1)
    port = free_port()
    (lead,) = meet(replace(node(port, serves=True), wait_s=ALONE_S))
    assert ids(lead) == {"nodes-missing", "endpoint-loopback"}
    assert cluster_of(lead).waited >= ALONE_S
    assert f"1 of 2 nodes are at 127.0.0.1:{port}: {socket.gethostname()}" in capfd.readouterr().err


def test_nobody_at_the_endpoint() -> None:
    for address, id_ in (
        ("no-such-host.invalid", "endpoint-unresolved"),
        ("127.0.0.1", "endpoint-loopback"),
    ):
        (outcome,) = meet(replace(node(free_port(), address=address), wait_s=ALONE_S))
        assert ids(outcome) == {id_}


def test_a_node_that_comes_and_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtrain.doctor.command.CHECKS_S", 1.0)
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(join_rendezvous, host(port), WAIT_S)
        (lead,) = meet(node(port, serves=True))
    assert ids(lead) >= {"node-fell-silent"}


def test_a_node_that_comes_late_is_told_so() -> None:
    port = free_port()
    leader = open_rendezvous(host(port, fewest=1, most=1))
    leader.wait(0.1)
    failure = failure_of(lambda: join_rendezvous(host(port), 0.5))
    leader.close()
    assert failure == ("left", "the doctors there have begun without this node")


def test_a_leader_that_stops_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host is not gone, so that the store's connection stays; each call has a limit."""
    port = free_port()
    script = (
        "import sys, time; from tests.doctor.test_rendezvous import *\n"
        f"leader = open_rendezvous(host({port})); print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        member = join_rendezvous(host(port), WAIT_S)
        os.kill(process.pid, signal.SIGSTOP)
        monkeypatch.setattr(rendezvous, "CALL_S", ALONE_S)
        assert failure_of(lambda: member.hear("directory", 600))[0] == "left"
        process.kill()
        assert failure_of(lambda: member.hear("directory", 600))[0] == "left"


# Strangers ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(speak: Callable[[socket.socket], None]) -> Iterator[int]:
    """Somebody at a port who treats everybody who comes in one way."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    speak(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def web(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def mute(connection: socket.socket) -> None:
    """It reads until the other side gives up."""
    while connection.recv(100):
        pass


def test_somebody_else_is_at_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    no_store = "something that is not torch's store"
    with server(mute) as port, monkeypatch.context() as patch:
        patch.setattr(rendezvous, "HANDSHAKE_S", 0.2)
        assert failure_of(lambda: join_rendezvous(host(port), WAIT_S)) == ("stranger", no_store)
    for speak in (
        web,
        lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
        lambda connection: connection.sendall(b"\xff" * 8),
        lambda connection: None,  # hangs up
    ):
        with server(speak) as port:
            assert failure_of(lambda: join_rendezvous(host(port), WAIT_S)) == ("stranger", no_store)


def test_torchs_own_store_is_told_from_others_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A torchrun on one node and a doctor on another: each way round."""
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", WAIT_S)
    read = Board.read
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    training = "torch's store: a job is running there"
    with monkeypatch.context() as patch:  # no doctor is there, which would say so
        patch.setattr(
            Board, "read", lambda board, key, deadline: read(board, key, time.monotonic() + ALONE_S)
        )
        assert failure_of(lambda: join_rendezvous(host(store.port), WAIT_S)) == (
            "stranger",
            training,
        )
    Board(store).set("leader", {"version": 99, "host": "a"})
    other_version = "a doctor of another version of meshtrain"
    assert failure_of(lambda: join_rendezvous(host(store.port), WAIT_S)) == (
        "stranger",
        other_version,
    )
    port = free_port()
    leader = open_rendezvous(host(port))
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    client.set("torch.rendezvous.job", "state")  # as torchrun does
    cluster = leader.wait(0.5)
    leader.close()
    assert cluster.strangers == (rendezvous.TORCHRUN,)


def test_strangers_who_come_hurt_nobody() -> None:
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02",
        b'{"doctor": 1}\n',
        # a store's own query, of an absurd length
        b"\x00\xce\xf7\x85\x3c\x00\xff\xff\xff\xff\xff\xff\xff\x7f",
    ):
        port = free_port()
        leader = open_rendezvous(host(port))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            cluster = leader.wait(0.3)
        leader.close()
        assert len(cluster.hosts) == 1
        assert cluster.strangers == ()


def test_values_of_the_store_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write to the store can neither end the doctor nor make it wait."""
    port = free_port()
    leader = open_rendezvous(host(port))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    prefix = "meshtrain/doctor/0/"
    store.add(prefix + "nodes", 2**62)
    for i, value in enumerate(
        ("{nonsense", "[" * 100000, '{"a": 1}', "7", '{"host": NaN}'), start=1
    ):
        store.set(f"{prefix}facts/{i}", value)
    monkeypatch.setattr(rendezvous, "MOST_NODES", 16)
    cluster = leader.wait(0.5)
    assert len(cluster.hosts) == 1
    assert cluster.strangers == (rendezvous.OTHER_VERSION,)
    monkeypatch.setattr(rendezvous, "MOST_BYTES", 100)
    store.set(prefix + "big", "[" + "1," * 200 + "1]")
    with pytest.raises(RecordError, match="too many"):
        leader.board.read("big", time.monotonic() + 30)  # another connection sets it
    with pytest.raises(TimeoutError):
        leader.board.read("never", time.monotonic() + 0.05)
    leader.close()


def test_the_port_is_taken_and_the_one_who_has_it_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (outcome,) = meet(node(port, serves=True))
        assert owner_of_port(port).startswith("process ")
    assert ids(outcome) == {"endpoint-taken"}


def test_who_serves_the_endpoint() -> None:
    def is_served(address: str, **values: Any) -> bool:
        return serves(place(1, address=address, **values), "node1", ["10.0.0.1"])

    for own_name in ("node1", "localhost", "10.0.0.1", "127.0.0.1"):
        assert is_served(own_name, serves=None), own_name
    assert not is_served("10.0.0.2", serves=None)
    assert is_served("10.0.0.2", serves=True), "it was told"
    assert not is_served("10.0.0.2", serves=True, node_rank=0), "rank 0 elsewhere"


# Ports, files, calls ------------------------------------------------------------------------------


def test_a_probe_is_told_from_a_closed_port_and_from_another_hosts() -> None:
    probe_ = PortProbe("node1", lambda: time.time() - 50)
    closed = free_port()
    targets = [
        (1, "127.0.0.1", probe_.port, "node1"),
        (1, "127.0.0.1", probe_.port, "node2"),
        (1, "127.0.0.1", closed, ""),
    ]
    answers = [check.how for check in check_ports(0, targets)]
    clock = clock_offset("127.0.0.1", probe_.port, time.time)
    probe_.close()
    assert answers == ["open", 'another: "node1"', "refused"]
    assert clock is not None
    assert abs(clock[0] - 50) <= clock[1] + 0.05
    assert clock_offset("127.0.0.1", closed, time.time) is None
    with server(lambda connection: connection.sendall(b"[" * 5000)) as port:
        assert [check.how for check in check_ports(0, [(1, "127.0.0.1", port, "node1")])] == [
            "another"
        ]


def test_files_left_by_others_are_seen_in_a_shared_folder_only(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "other").mkdir()
    one, two = (
        probe(PathFacts("train.output", str(tmp_path / "shared" / "runs" / "x"), True))
        for _ in range(2)
    )
    far = probe(PathFacts("train.output", str(tmp_path / "other"), True))
    tokens = [one.token, two.token, far.token]
    assert one.seen == str(tmp_path / "shared"), "the run's folder is not made for this"
    assert one.mib_per_s is not None
    assert (tmp_path / "shared" / one.token).stat().st_size < 100, (
        "what was read to measure the speed is gone"
    )
    assert visible([one], tokens) == (tuple(sorted([one.token, two.token])), ())
    (tmp_path / "shared" / "secret").touch()
    asked = ["secret", f"{one.token}/../secret", f"../shared/{one.token}"]
    assert visible([one], asked) == ((), ()), "what others ask for is no way to look around"
    tidy([one, two, far])
    assert list(tmp_path.rglob(".meshtrain*")) == []


def test_what_is_read_is_sampled(tmp_path: Path) -> None:
    file, folder = tmp_path / "corpus.bin", tmp_path / "images"
    file.write_bytes(bytes(range(256)) * 40000)
    first = probe(PathFacts("data.path", str(file), False))
    assert (first.problem, first.size) == ("", 10240000)
    assert first.mib_per_s is not None
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert probe(PathFacts("data.path", str(file), False)).digest != first.digest
    folder.mkdir()
    (folder / "a.png").write_bytes(b"123")
    assert probe(PathFacts("data.path", str(folder), False)).size == 3
    missing = probe(PathFacts("data.path", str(tmp_path / "no" / "file"), False))
    assert (missing.problem, missing.seen) == ("is not there", str(tmp_path))


def test_all_paths_of_a_config_are_looked_at(tmp_path: Path) -> None:
    keys = [
        "data.source=megatron",
        f"data.path={tmp_path}/corpus",
        f"data.validation={tmp_path}/held_out.bin",
        f"data.tokenizer={tmp_path}/t.json",
        "checkpoint.path=~/states",
        "train.output=runs/x",
        "train.export=out",
    ]
    assert {
        each.key: (each.path, each.writes) for each in named_paths(Config.load(CONFIG, keys))
    } == {
        "data.path": (f"{tmp_path}/corpus.idx", False),  # and .bin
        "data.validation": (f"{tmp_path}/held_out.idx", False),  # as well
        "data.tokenizer": (f"{tmp_path}/t.json", False),
        "checkpoint.path": (str(Path.home() / "states"), True),
        "train.output": (str(Path.cwd() / "runs/x"), True),
        "train.export": (str(Path.cwd() / "out"), True),
    }


def test_a_call_that_hangs_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do to a file server that does not answer."""
    hangs = threading.Event()
    assert call_with_timeout(60, json.loads, "[1]") == [1]
    with pytest.raises(TimeoutError):
        call_with_timeout(0.05, hangs.wait)
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(60, lambda: 1 // 0)
    with monkeypatch.context() as patch:
        patch.setattr("meshtrain.doctor.files.PROBE_S", 0.1)
        patch.setattr(Path, "exists", lambda self: hangs.wait())
        assert "does not answer" in probe(PathFacts("data.path", "/dead/server", False)).problem
    hangs.set()


def test_interfaces_of_this_machine() -> None:
    loopback = next(each for each in facts.interfaces() if each.name == "lo")
    assert "127.0.0.1" in loopback.addresses
    assert address_towards("127.0.0.1") == "127.0.0.1"
