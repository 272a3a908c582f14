"""The doctors' meeting over real sockets, several nodes in one process on 127.0.0.1; who else may be at the port."""

import contextlib
import json
import socket
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
from meshtrain.operate.doctor import machine, wire
from meshtrain.operate.doctor.beacon import Beacon
from meshtrain.operate.doctor.command import Examination, Verdict, assist, examine
from meshtrain.operate.doctor.files import Named, named_paths, probe, tidy, visible
from meshtrain.operate.doctor.limited import within
from meshtrain.operate.doctor.meeting import FailedError, Hello, join_meeting, open_meeting, serves
from meshtrain.operate.doctor.ports import Door, try_ports
from meshtrain.operate.doctor.record import Place, to_json
from meshtrain.operate.doctor.wire import GoneError, Line, StrangerError, listen, recognise
from tests.launching import free_port

WAIT_S = 2.0


def place(port: int, **values: Any) -> Place:
    return replace(Place("torchrun's options", "c10d", "127.0.0.1", port, "job", 2, 2, None, "1", False), **values)


def node(port: int, **values: Any) -> Examination:
    """A node of a job without workers to time: with one process each they would take seconds to start."""
    return Examination(place(port, **values), {}, None, (), WAIT_S)


def meet(*nodes: Examination) -> list[Verdict]:
    """What each node comes to; all at once, as on several hosts."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(examine, nodes))


def ids(verdict: Verdict) -> set[str]:
    """What is wrong: what depends on this machine's load and disk is left out."""
    circumstances = {"host-busy", "little-memory", "little-disk", "transport", "not-timed", "same-host"}
    return {one.id for one in verdict.findings} - circumstances


def test_two_nodes_with_different_ids_learn_of_it_both() -> None:
    port = free_port()
    lead, other = meet(node(port, serves=True), node(port, id="other"))
    assert ids(lead) == ids(other) == {"id-differs"}
    assert lead.seen is not None
    assert other.seen is None, "the node that serves tells the story"
    assert [host.place.id for host in lead.seen.hosts] == ["job", "other"]
    assert all(visit is not None for visit in lead.seen.visits)
    assert {reach.how for visit in lead.seen.visits if visit for reach in visit.reach} == {"open"}


def test_a_different_number_of_nodes_ends_the_waiting_early() -> None:
    port = free_port()
    lead, other = meet(node(port, serves=True), node(port, fewest=3, most=3))
    assert ids(lead) == ids(other) == {"nodes-differ"}


def test_two_nodes_of_one_rank() -> None:
    port = free_port()
    first = node(port, backend="static", node_rank=0, serves=True, most=3, fewest=3)
    lead, *others = meet(first, *(node(port, backend="static", node_rank=1, most=3, fewest=3) for _ in range(2)))
    assert ids(lead) == ids(others[0]) == {"node-rank-twice"}


def test_who_waits_alone_says_who_is_missing() -> None:
    (lead,) = meet(node(free_port(), serves=True))
    assert ids(lead) == {"nodes-missing", "endpoint-loopback"}
    assert lead.seen is not None
    assert WAIT_S <= lead.seen.waited < WAIT_S + 2


@pytest.mark.parametrize(
    ("values", "id_"),
    [
        ({"address": "no-such-host.invalid"}, "endpoint-unresolved"),
        ({"address": "127.0.0.1"}, "endpoint-loopback"),
    ],
)
def test_nobody_at_the_endpoint(values: dict[str, str], id_: str) -> None:
    (found,) = meet(node(free_port(), **values))
    assert ids(found) == {id_}


def test_a_clock_that_is_ahead_is_measured() -> None:
    """Also tells that the error of the measurement is known: loopback is quick."""
    port = free_port()
    early = replace(node(port, id="other"), clock=lambda: time.time() + 100)
    lead, _ = meet(node(port, serves=True), early)
    assert ids(lead) == {"id-differs", "clock-differs"}
    assert lead.seen is not None
    measured = lead.seen.clocks[1]
    assert measured is not None
    assert abs(measured[0] - 100) <= measured[1] + 0.05


def test_a_node_that_comes_and_falls_silent() -> None:
    port = free_port()

    def silent() -> None:
        line = Line(retrying(port))
        line.send(hello(place(port)))
        line.receive(time.monotonic() + 5)  # welcome
        line.receive(time.monotonic() + 5)  # the roster
        line.close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(silent)
        (lead,) = meet(node(port, serves=True))
    assert ids(lead) >= {"node-fell-silent"}


def test_siblings_wait_for_what_there_is_to_time_and_leave_when_there_is_nothing() -> None:
    """Under srun every task starts a doctor; the first of each node speaks for it."""
    port = free_port()
    values = {"launcher": "srun", "backend": "static", "processes": "2", "fewest": 1, "most": 1}
    first = node(port, **values, serves=True, node_rank=0, rank=0, expected=("elsewhere",))
    second = node(port, **values, node_rank=0, rank=1)
    second = replace(second, variables={"SLURM_LOCALID": "1"})
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    first = replace(first, config=str(config), overrides=("layout={dp_shard: 3}",))  # does not fit two processes
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(assist, second)
        (lead,) = meet(first)
        assert other.result(10) == 0
    assert ids(lead) == {"layout-does-not-fit"}
    assert lead.seen is not None
    assert lead.seen.hosts[0].ranks == (0, 1)


# Strangers ----------------------------------------------------------------------------------------------------------


def retrying(port: int) -> socket.socket:
    """A connection to a port that is opened in a moment."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def hello(of: Place) -> dict[str, Any]:
    return to_json(Hello("node", "node9", of, 1))


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
    ("speak", "who"),
    [
        (web, "a web server"),
        (lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"), "an SSH server"),
        (lambda connection: None, "something that hangs up without a word"),
        (lambda connection: connection.sendall(b'{"doctor":99}\n'), "a doctor of another version"),
        (lambda connection: connection.sendall(b"\xff" * 8), "something that says b'\\xff"),
    ],
)
def test_who_else_is_at_the_endpoint(speak: Callable[[socket.socket], None], who: str) -> None:
    with server(speak) as port, pytest.raises(FailedError) as failed:
        join_meeting(place(port), Hello("node", "a", place(port), 1), WAIT_S)
    assert failed.value.attempt.how == "stranger"
    assert who in failed.value.attempt.detail


def test_somebody_who_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtrain.operate.doctor.meeting.WELCOME_S", 0.2)
    with server(lambda connection: time.sleep(0.6)) as port, pytest.raises(FailedError) as failed:
        join_meeting(place(port), Hello("node", "a", place(port), 1), 0.1)
    assert failed.value.attempt.how == "mute"


def test_torchs_own_store_is_told_from_others_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchrun on one node and a doctor on another: each way round."""
    monkeypatch.setattr("meshtrain.operate.doctor.meeting.WELCOME_S", 0.5)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(FailedError) as failed:
        join_meeting(place(store.port), Hello("node", "a", place(store.port), 1), WAIT_S)
    assert failed.value.attempt.detail == "torch's store: a job is running there"
    port = free_port()
    leader = open_meeting(place(port), Hello("node", "a", place(port), 1))

    def come() -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))

    thread = threading.Thread(target=come)
    thread.start()
    roster = leader.wait(1.0)
    leader.close()
    thread.join(10)
    assert [stranger.what for stranger in roster.strangers if "torch's store" in stranger.what]


@pytest.mark.parametrize(
    ("data", "who"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a web client"),
        (b"\x16\x03\x01\x02", "TLS"),
        (b'{"doctor": 1}\n', "a doctor of another version"),
        (b"{nonsense}\n", "says b'{nonsense}"),
        (b"[" * 100000 + b"\n", "says b'[[["),
        (b'{"a":' * 100000 + b"\n", "says b'{"),
    ],
)
def test_strangers_who_come_are_listed_and_hurt_nobody(data: bytes, who: str) -> None:
    port = free_port()
    leader = open_meeting(place(port), Hello("node", "a", place(port), 1))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)
        roster = leader.wait(0.3)
    leader.close()
    assert len(roster.nodes) == 1
    assert [stranger.address for stranger in roster.strangers] == ["127.0.0.1"]
    assert who in roster.strangers[0].what


def test_the_port_is_taken_and_the_one_who_has_it_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (found,) = meet(node(port, serves=True))
        assert machine.owner_of_port(port).startswith("process ")
    assert ids(found) == {"endpoint-taken"}


def test_who_serves_the_endpoint() -> None:
    own = ["10.0.0.1"]
    own_names = ("node1", "localhost", "10.0.0.1", "127.0.0.1")
    for address, expected in (*((name, True) for name in own_names), ("10.0.0.2", False)):
        assert serves(place(1, address=address, serves=None), "node1", own) == expected, address
    assert serves(place(1, address="10.0.0.2", serves=True), "node1", own), "it was told"
    assert not serves(place(1, address="10.0.0.2", serves=True, node_rank=0), "node1", own), "rank 0 elsewhere"


# Lines --------------------------------------------------------------------------------------------------------------


def test_a_line_carries_objects_in_pieces_and_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = socket.socketpair()
    one, other = Line(left), Line(right)
    one.send({"a": [1, "\n"]})
    one.send({"b": 2})
    assert other.receive(time.monotonic() + 1) == {"a": [1, "\n"]}
    assert other.receive(time.monotonic() + 1) == {"b": 2}
    with pytest.raises(TimeoutError):
        other.receive(time.monotonic() + 0.05)
    left.sendall(b'{"c"')
    with pytest.raises(TimeoutError):
        other.receive(time.monotonic() + 0.05)
    left.sendall(b": 3}\n")
    assert other.receive(time.monotonic() + 1) == {"c": 3}
    monkeypatch.setattr(wire, "MOST_BYTES", 100)
    left.sendall(b'{"d": "' + b"x" * 200)
    with pytest.raises(StrangerError, match="more than 100 bytes"):
        other.receive(time.monotonic() + 1)
    one.close()
    third, fourth = socket.socketpair()
    third.close()
    with pytest.raises(GoneError):
        Line(fourth).receive(time.monotonic() + 1)


def test_first_bytes() -> None:
    assert recognise(b"SSH-2.0") == "an SSH server"
    assert "torchrun" in recognise(b"\x00\xce\xf7\x85\x3c")
    assert "hangs up" in recognise(b"")
    assert recognise(b"220 smtp") == "something that says b'220 smtp'"


# Ports, files, calls ------------------------------------------------------------------------------------------------


def test_a_door_is_told_from_a_closed_port_and_from_another_hosts() -> None:
    door = Door("node1")
    closed = free_port()
    targets = [(1, "127.0.0.1", door.port, "node1"), (1, "127.0.0.1", door.port, "node2"), (1, "127.0.0.1", closed, "")]
    found = [reach.how for reach in try_ports(0, targets)]
    door.close()
    assert found == ["open", 'another: "node1"', "refused"]


def test_files_left_by_others_are_seen_in_a_shared_folder_only(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "other").mkdir()
    one, two = (probe(Named("train.output", str(tmp_path / "shared" / "runs" / "x"), True)) for _ in range(2))
    far = probe(Named("train.output", str(tmp_path / "other"), True))
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
    first = probe(Named("data.path", str(file), False))
    assert (first.problem, first.size) == ("", 10240000)
    assert first.mib_per_s is not None
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert probe(Named("data.path", str(file), False)).digest != first.digest
    folder.mkdir()
    (folder / "a.png").write_bytes(b"123")
    assert probe(Named("data.path", str(folder), False)).size == 3
    missing = probe(Named("data.path", str(tmp_path / "no" / "file"), False))
    assert (missing.problem, missing.seen) == ("is not there", str(tmp_path))


def test_all_paths_of_a_config_are_looked_at(tmp_path: Path) -> None:
    keys = [
        "data.source=megatron", f"data.path={tmp_path}/corpus", f"data.tokenizer={tmp_path}/t.json",
        "checkpoint.path=~/states", "train.output=runs/x", "train.export=out",
    ]  # fmt: skip
    found = {one.key: (one.path, one.writes) for one in named_paths(Config.load("configs/quickstart.yaml", keys))}
    assert found == {
        "data.path": (f"{tmp_path}/corpus.idx", False),  # and .bin
        "data.tokenizer": (f"{tmp_path}/t.json", False),
        "checkpoint.path": (str(Path.home() / "states"), True),
        "train.output": (str(Path.cwd() / "runs/x"), True),
        "train.export": (str(Path.cwd() / "out"), True),
    }


def test_a_file_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtrain.operate.doctor.files.PROBE_S", 0.1)
    monkeypatch.setattr(Path, "exists", lambda self: time.sleep(1) or True)
    assert "does not answer" in probe(Named("data.path", "/dead/server", False)).problem


def test_a_call_that_hangs_has_a_limit() -> None:
    assert within(1, json.loads, "[1]") == [1]
    with pytest.raises(TimeoutError, match="within 0 s"):
        within(0.05, time.sleep, 1)
    with pytest.raises(ZeroDivisionError):
        within(1, lambda: 1 // 0)


def test_doctors_hear_each_other() -> None:
    """Two hosts with different endpoints; here both are in the network of the loopback."""
    one, other = Beacon("node1", place(1), ()), Beacon("node2", place(2), ())
    for beacon in (one, other):
        beacon._networks = ["127.255.255.255"]
    with one, other:
        deadline = time.monotonic() + 8
        while not (one.heard and other.heard) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert [(heard.host, heard.place.port) for heard in one.heard] == [("node2", 2)]
    assert [(heard.host, heard.place.port) for heard in other.heard] == [("node1", 1)]


def test_interfaces_of_this_machine() -> None:
    loopback = next(one for one in machine.interfaces() if one.name == "lo")
    assert "127.0.0.1/8" in loopback.addresses
    assert loopback.up
    with listen(0) as listener:
        assert machine._listening(listener.getsockname()[1])
