"""The doctors' rendezvous over real sockets, several nodes in one process on 127.0.0.1; who else may be at the port."""

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
from meshtrain.doctor.records import Host, Interface, PathFacts, Place, RecordError
from meshtrain.doctor.rendezvous import Board, JoinError, join_rendezvous, open_rendezvous, serves
from meshtrain.job.sockets import address_towards, call_with_timeout, listen
from tests.launching import environment, free_port

WAIT_S = 2.0  # for nodes that come, on a busy machine
ALONE_S = 0.5  # for those that do not


def place(port: int, **values: Any) -> Place:
    return replace(Place("torchrun's options", "c10d", "127.0.0.1", port, "job", 2, 2, None, "1", False), **values)


def host(port: int, **values: Any) -> Host:
    return Host("a", place(port, **values), 1, interfaces=(Interface("lo", ("127.0.0.1",)),))


def node(port: int, **values: Any) -> DoctorRun:
    """A node of a job without workers to time: with one process each they would take seconds to start."""
    return DoctorRun(place(port, **values), {}, None, (), WAIT_S)


def meet(*nodes: DoctorRun) -> list[Outcome]:
    """What each node comes to; all at once, as on several hosts."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(examine, nodes))


def ids(outcome: Outcome) -> set[str]:
    """What is wrong: what depends on this machine's load and disk is left out."""
    circumstances = {"host-busy", "little-memory", "little-disk", "transport", "not-timed", "same-host"}
    return {finding.id for finding in outcome.findings} - circumstances


def test_two_nodes_with_different_ids_learn_of_it_both() -> None:
    port = free_port()
    lead, other = meet(node(port, serves=True), node(port, id="other"))
    assert ids(lead) == ids(other) == {"id-differs"}
    assert lead.cluster is not None
    assert other.cluster is None, "the node that serves tells the story"
    assert [host.place.id for host in lead.cluster.hosts] == ["job", "other"]
    assert all(checks is not None for checks in lead.cluster.visits)
    assert {check.how for checks in lead.cluster.visits if checks for check in checks.reach} == {"open"}


def test_a_different_number_of_nodes_ends_the_waiting_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "QUIET_S", 0.3)
    port = free_port()
    lead, other = meet(*(replace(node(port, **how), wait_s=60) for how in ({"serves": True}, {"fewest": 3, "most": 3})))
    assert ids(lead) == ids(other) == {"nodes-differ"}
    assert lead.cluster is not None
    assert lead.cluster.waited < 30


def test_two_nodes_of_one_rank() -> None:
    port = free_port()
    first = node(port, backend="static", node_rank=0, serves=True, most=3, fewest=3)
    lead, *others = meet(first, *(node(port, backend="static", node_rank=1, most=3, fewest=3) for _ in range(2)))
    assert ids(lead) == ids(others[0]) == {"node-rank-twice"}


def test_who_waits_alone_says_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "PROGRESS_S", 0.1)
    port = free_port()
    (lead,) = meet(replace(node(port, serves=True), wait_s=ALONE_S))
    assert ids(lead) == {"nodes-missing", "endpoint-loopback"}
    assert lead.cluster is not None
    assert ALONE_S <= lead.cluster.waited < ALONE_S + 2
    assert f"1 of 2 nodes are at 127.0.0.1:{port}: {socket.gethostname()}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("values", "id_"),
    [
        ({"address": "no-such-host.invalid"}, "endpoint-unresolved"),
        ({"address": "127.0.0.1"}, "endpoint-loopback"),
    ],
)
def test_nobody_at_the_endpoint(values: dict[str, str], id_: str) -> None:
    (outcome,) = meet(replace(node(free_port(), **values), wait_s=ALONE_S))
    assert ids(outcome) == {id_}


def test_a_clock_that_is_ahead_is_measured() -> None:
    """Also tells that the error of the measurement is known: loopback is quick."""
    port = free_port()
    early = replace(node(port, id="other"), clock=lambda: time.time() + 100)
    lead, _ = meet(node(port, serves=True), early)
    assert ids(lead) == {"id-differs", "clock-differs"}
    assert lead.cluster is not None
    measured = lead.cluster.clocks[1]
    assert measured is not None
    assert abs(measured[0] - 100) <= measured[1] + 0.05


def test_a_node_that_comes_and_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtrain.doctor.command.CHECKS_S", 1.0)
    port = free_port()

    def silent() -> None:
        join_rendezvous(host(port), 10)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(silent)
        (lead,) = meet(node(port, serves=True))
    assert ids(lead) >= {"node-fell-silent"}


def test_a_node_that_comes_late_is_told_so() -> None:
    port = free_port()
    leader = open_rendezvous(host(port, fewest=1, most=1))
    leader.wait(0.1)
    with pytest.raises(JoinError) as failed:
        join_rendezvous(host(port), 0.5)
    leader.close()
    assert (failed.value.failure.how, failed.value.failure.detail) == (
        "left",
        "the doctors there have begun without this node",
    )


def test_one_task_of_a_node_speaks_and_the_workers_of_all_ranks_are_its() -> None:
    """Under srun every task starts a doctor; the first of each node speaks for it, and the others leave."""
    port = free_port()
    values = {"launcher": "srun", "backend": "static", "processes": "2", "fewest": 1, "most": 1}
    first = node(port, **values, serves=True, node_rank=0, ranks=(0, 1), expected=("elsewhere",))
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    first = replace(first, config=str(config), overrides=("layout={dp_shard: 3}",))  # does not fit two processes
    (lead,) = meet(first)
    assert ids(lead) == {"layout-does-not-fit"}
    assert lead.cluster is not None
    assert lead.cluster.hosts[0].ranks == (0, 1)


def test_a_leader_that_stops_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host is not gone, so that the store's connection stays; each call has a limit."""
    monkeypatch.setattr(rendezvous, "CALL_S", 1.0)
    port = free_port()
    script = (
        "import sys, time; from tests.doctor.test_rendezvous import *\n"
        f"leader = open_rendezvous(host({port})); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        member = join_rendezvous(host(port), 10)
        os.kill(process.pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(JoinError) as failed:
            member.hear("directory", 30)
        assert failed.value.failure.how == "left"
        assert time.monotonic() - start < 10
        process.kill()
        with pytest.raises(JoinError):
            member.hear("directory", 30)


# Strangers ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("speak", "detail"),
    [
        (web, "something that is not torch's store"),
        (lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"), "something that is not torch's store"),
        (lambda connection: None, "something that is not torch's store"),
        (lambda connection: connection.sendall(b"\xff" * 8), "something that is not torch's store"),
        (lambda connection: time.sleep(0.6), "something that accepts connections and says nothing"),
    ],
    ids=["web", "ssh", "hangs up", "garbage", "mute"],
)
def test_somebody_else_is_at_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, speak: Callable[[socket.socket], None], detail: str
) -> None:
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 0.2)
    with server(speak) as port, pytest.raises(JoinError) as failed:
        join_rendezvous(host(port), WAIT_S)
    assert failed.value.failure.how == "stranger"
    assert failed.value.failure.detail == detail


def test_torchs_own_store_is_told_from_others_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchrun on one node and a doctor on another: each way round."""
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 0.3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(JoinError) as failed:
        join_rendezvous(host(store.port), WAIT_S)
    assert failed.value.failure.detail == "torch's store: a job is running there"
    board = Board(store)
    board.set("leader", {"version": 99, "host": "a"})
    with pytest.raises(JoinError) as failed:
        join_rendezvous(host(store.port), WAIT_S)
    assert failed.value.failure.detail == "a doctor of another version of meshtrain"
    port = free_port()
    leader = open_rendezvous(host(port))
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
    client.set("torch.rendezvous.job", "state")  # as torchrun does
    cluster = leader.wait(0.5)
    leader.close()
    assert [peer.what for peer in cluster.strangers if "torch's store" in peer.what]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02",
        b'{"doctor": 1}\n',
        b"[" * 100 + b"\n",
        b"\x00\xce\xf7\x85\x3c\x00\xff\xff\xff\xff\xff\xff\xff\x7f",  # a store's own query, of an absurd length
    ],
)
def test_strangers_who_come_are_listed_and_hurt_nobody(data: bytes) -> None:
    port = free_port()
    leader = open_rendezvous(host(port))
    with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        cluster = leader.wait(0.3)
    leader.close()
    assert len(cluster.hosts) == 1
    assert [peer.address for peer in cluster.strangers] == ["127.0.0.2"]
    assert "no doctor" in cluster.strangers[0].what


def test_values_of_the_store_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write to the store can neither end the doctor nor make it wait."""
    port = free_port()
    leader = open_rendezvous(host(port))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    prefix = "meshtrain/doctor/0/"
    store.add(prefix + "nodes", 2**62)
    for i, value in enumerate(("{nonsense", "[" * 100000, '{"a": 1}', "7", '{"host": NaN}'), start=1):
        store.set(f"{prefix}facts/{i}", value)
    monkeypatch.setattr(rendezvous, "MOST_NODES", 16)
    cluster = leader.wait(0.5)
    assert len(cluster.hosts) == 1
    assert {peer.what.partition(" of")[0] for peer in cluster.strangers} == {"a doctor"}
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
    own = ["10.0.0.1"]
    own_names = ("node1", "localhost", "10.0.0.1", "127.0.0.1")
    for address, expected in (*((name, True) for name in own_names), ("10.0.0.2", False)):
        assert serves(place(1, address=address, serves=None), "node1", own) == expected, address
    assert serves(place(1, address="10.0.0.2", serves=True), "node1", own), "it was told"
    assert not serves(place(1, address="10.0.0.2", serves=True, node_rank=0), "node1", own), "rank 0 elsewhere"


# Ports, files, calls ------------------------------------------------------------------------------------------------


def test_a_probe_is_told_from_a_closed_port_and_from_another_hosts() -> None:
    probe_ = PortProbe("node1", lambda: time.time() - 50)
    closed = free_port()
    targets = [
        (1, "127.0.0.1", probe_.port, "node1"),
        (1, "127.0.0.1", probe_.port, "node2"),
        (1, "127.0.0.1", closed, ""),
    ]
    checks = [check.how for check in check_ports(0, targets)]
    clock = clock_offset("127.0.0.1", probe_.port, time.time)
    probe_.close()
    assert checks == ["open", 'another: "node1"', "refused"]
    assert clock is not None
    assert abs(clock[0] - 50) <= clock[1] + 0.05
    assert clock_offset("127.0.0.1", closed, time.time) is None
    with server(lambda connection: connection.sendall(b"[" * 5000)) as port:
        assert [check.how for check in check_ports(0, [(1, "127.0.0.1", port, "node1")])] == ["another"]


def test_files_left_by_others_are_seen_in_a_shared_folder_only(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "other").mkdir()
    one, two = (probe(PathFacts("train.output", str(tmp_path / "shared" / "runs" / "x"), True)) for _ in range(2))
    far = probe(PathFacts("train.output", str(tmp_path / "other"), True))
    tokens = [one.token, two.token, far.token]
    assert one.seen == str(tmp_path / "shared"), "the run's folder is not made for this"
    assert one.mib_per_s is not None
    assert (tmp_path / "shared" / one.token).stat().st_size < 100, "what was read to measure the speed is gone"
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
        "data.source=megatron", f"data.path={tmp_path}/corpus", f"data.validation={tmp_path}/held_out.bin",
        f"data.tokenizer={tmp_path}/t.json", "checkpoint.path=~/states", "train.output=runs/x", "train.export=out",
    ]  # fmt: skip
    found = {one.key: (one.path, one.writes) for one in named_paths(Config.load("configs/quickstart.yaml", keys))}
    assert found == {
        "data.path": (f"{tmp_path}/corpus.idx", False),  # and .bin
        "data.validation": (f"{tmp_path}/held_out.idx", False),  # as well
        "data.tokenizer": (f"{tmp_path}/t.json", False),
        "checkpoint.path": (str(Path.home() / "states"), True),
        "train.output": (str(Path.cwd() / "runs/x"), True),
        "train.export": (str(Path.cwd() / "out"), True),
    }


def test_a_file_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtrain.doctor.files.PROBE_S", 0.1)
    monkeypatch.setattr(Path, "exists", lambda self: time.sleep(1) or True)
    assert "does not answer" in probe(PathFacts("data.path", "/dead/server", False)).problem


def test_a_call_that_hangs_has_a_limit() -> None:
    assert call_with_timeout(1, json.loads, "[1]") == [1]
    with pytest.raises(TimeoutError):
        call_with_timeout(0.05, time.sleep, 1)
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(1, lambda: 1 // 0)


def test_interfaces_of_this_machine() -> None:
    loopback = next(one for one in facts.interfaces() if one.name == "lo")
    assert "127.0.0.1" in loopback.addresses
    with listen(0) as listener:
        assert owner_of_port(listener.getsockname()[1]).startswith("process ")
    assert address_towards("127.0.0.1") == "127.0.0.1"
