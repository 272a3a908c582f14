"""The rendezvous of the doctors: torch's TCPStore on the endpoint as a notice board for JSON.

The node that serves the endpoint leads: it counts the nodes, each of which sets its facts under its
own key, even if its id, count or rank differ. Each wait and each call of the store has a time
limit, and values from it are checked.
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from meshtrain.doctor import records
from meshtrain.doctor.ports import owner_of_port, peers_of_port
from meshtrain.doctor.records import ClusterFacts, Host, Place, RecordError, from_json, to_json
from meshtrain.errors import join_some
from meshtrain.job import sockets
from meshtrain.job.parsing import parse_json
from meshtrain.job.sockets import is_loopback
from meshtrain.job.storage import print_error

VERSION = 2
PREFIX = "meshtrain/doctor/"
# for the peer that accepted the connection to prove to be a store, and a doctor's
HANDSHAKE_S = 5.0
CALL_S = 5.0  # for one call of the store
QUIET_S = 3.0  # to wait for more nodes after one came that does not fit in
PROGRESS_S = 10.0  # between lines about missing nodes
POLL_S = 0.1
MOST_BYTES = 4 * 2**20  # of one value: the facts of a few hundred hosts
MOST_NODES = 2**14
MOST_UNKNOWN = 16
STRANGER_TRIES = 3  # a doctor that is just ending or beginning looks like a stranger

# A VALIDATE query with its magic number, then a PING, which is answered with the last four bytes
# (TCPStoreBackend.hpp). TCPStore's own constructor waits forever for a listener that sends nothing.
STORE_PING = b"\x00\xce\xf7\x85\x3c\x0dmesh"
NO_STORE = "something that is not torch's store"
OTHER_VERSION = "a doctor of another version of meshtrain"
LOOKS_LIKE_ONE = f"{OTHER_VERSION}, or somebody who only looks like one"
TORCHRUN = "torch's store, that is a torchrun or a training: run the doctor in its place"
UNKNOWN = "somebody who is no doctor, such as a health check"

T = TypeVar("T")


class JoinError(Exception):
    """This node could not join the others; `failure` tells how it failed."""

    def __init__(self, outcome: str, detail: str = "") -> None:
        super().__init__(outcome)
        self.failure = records.JoinFailure(outcome, detail)


def _progress(last: float, text: str) -> float:
    due = time.monotonic() - last > PROGRESS_S
    if due:
        print_error(text)
    return time.monotonic() if due else last


class Board:
    """JSON values in a store. Its methods raise JoinError if the store is gone."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._prefix = f"{PREFIX}{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            return sockets.call_with_timeout(CALL_S, getattr(self.store, method), *arguments)
        except (RuntimeError, TimeoutError) as error:  # torch's DistError is a RuntimeError
            reason = (str(error) or f"no answer within {CALL_S:.0f} s").splitlines()[0]
            raise JoinError("left", reason) from error

    def set(self, key: str, value: Any) -> None:
        self.call("set", self._prefix + key, json.dumps(value))

    def add(self, key: str, count: int) -> int:
        return int(self.call("add", self._prefix + key, count))

    def has(self, key: str) -> bool:
        return bool(self.call("check", [self._prefix + key]))

    def read(self, key: str, deadline: float) -> Any:
        """Waits for a value. Raises TimeoutError: not set by `deadline` (`time.monotonic`);
        RecordError: not JSON."""
        pause = 0.01
        while not self.has(key):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(pause)
            pause = min(1.5 * pause, POLL_S)
        data = self.call("get", self._prefix + key)
        with contextlib.suppress(ValueError):
            return parse_json(data, most=MOST_BYTES)
        raise RecordError(f"{key}: {len(data)} bytes that are no JSON, or too many")


class Leader:
    """The node that serves the endpoint."""

    def __init__(self, board: Board, host: Host) -> None:
        self.board = board
        self._place = host.place
        self._earlier = peers_of_port(host.place.port)  # connections of an earlier doctor
        self._hosts: dict[int, Host] = {0: host}  # by the numbers of their keys
        self._strangers: dict[int, records.UnknownPeer] = {}
        self._silent: set[int] = set()
        self.numbers: list[int] = []  # of the nodes' keys, in the order of the hosts

    def wait(self, seconds: float) -> ClusterFacts:
        start = last = progress = time.monotonic()
        peers: set[tuple[str, str]] = set()
        while not self._complete(last) and (now := time.monotonic()) < start + seconds:
            if self._welcome():
                last = now
            peers |= peers_of_port(self._place.port)
            names = join_some([host.host for host in self._hosts.values()], 8)
            text = (
                f"{len(self._hosts)} of {self._place.nodes} nodes are at {self._place.endpoint}: "
                f"{names}"
            )
            progress = _progress(progress, text)
            time.sleep(POLL_S)
        self.board.set("closed", True)
        waited = (last if self._complete(last) else time.monotonic()) - start
        first, *others = self._hosts.items()
        if self._place.backend == "static":
            others.sort(key=lambda item: item[1].place.node_rank or 0)
        self._hosts, end = dict([first, *others]), 0
        for (
            number,
            host,
        ) in self._hosts.items():  # ranks as the launcher has assigned them, or as torchrun would
            end += host.processes
            self._hosts[number] = replace(
                host, ranks=host.place.ranks or tuple(range(end - host.processes, end))
            )
        self.numbers = list(self._hosts)
        strangers = (*self._strangers.values(), *self._unknown_peers(peers))[:MOST_UNKNOWN]
        return ClusterFacts(tuple(self._hosts.values()), None, strangers, waited)

    def _welcome(self) -> bool:
        came = False
        for number in range(1, min(self.board.add("nodes", 0), MOST_NODES) + 1):
            if (
                number in self._hosts
                or number in self._strangers
                or not self.board.has(f"facts/{number}")
            ):
                continue
            try:
                self._hosts[number] = from_json(Host, self.board.read(f"facts/{number}", 0.0))
            except RecordError:
                self._strangers[number] = records.UnknownPeer("?", LOOKS_LIKE_ONE)
            came = True
        return came

    def _unknown_peers(self, peers: set[tuple[str, str]]) -> list[records.UnknownPeer]:
        """Peers connected to the port that are no doctors, found in the kernel's table and by
        foreign keys."""
        if self._place.launcher == "torchrun":
            return []  # the store is torchrun's own
        doctors = {*self._hosts[0].addresses, *(host.route for host in self._hosts.values())}
        unknown = sorted({address for address, _ in peers - self._earlier} - doctors)
        foreign = any(not key.startswith(PREFIX) for key in self.board.call("list_keys"))
        identity = TORCHRUN if foreign else UNKNOWN
        return [records.UnknownPeer(address, identity) for address in unknown or ["?"] * foreign]

    def _complete(self, last: float) -> bool:
        """Whether no more nodes are waited for: all have come, or enough of them, of which some do
        not fit in."""
        mine, places = self._place, [host.place for host in self._hosts.values()]
        if len(places) >= max(place.most for place in places):
            return True
        odd = any((place.nodes, place.id) != (mine.nodes, mine.id) for place in places)
        enough = len(places) >= min(place.fewest for place in places)
        return odd and enough and time.monotonic() - last > QUIET_S

    def gather(self, phase: str, kind: type[T], own: T, seconds: float) -> list[T | None]:
        """The value that each node gives, this one's first; None for a node that gives no valid
        value in time."""
        deadline, answers = time.monotonic() + seconds, list[T | None]([own])
        for number in self.numbers[1:]:
            answers.append(None)
            try:
                if number not in self._silent:
                    answers[-1] = from_json(
                        kind, self.board.read(f"{phase}/{number}", deadline), phase
                    )
            except (TimeoutError, RecordError):
                self._silent.add(number)
        return answers

    def close(self, seconds: float = 0.0) -> None:
        """Ends the store, once the others have read the last values, or after `seconds`."""
        with contextlib.suppress(JoinError):
            if seconds:
                self.gather("done", bool, True, seconds)
        self.board.store = None  # releasing it ends the server


class Member:
    """A node that came to the endpoint; `leader_address` is the leader's, as this node reaches
    it."""

    def __init__(self, board: Board, number: int, leader_address: str) -> None:
        self._board, self.number, self.leader_address = board, number, leader_address

    def give(self, phase: str, value: Any) -> None:
        self._board.set(f"{phase}/{self.number}", value)

    def hear(self, phase: str, seconds: float) -> Any:
        """A value from the leader. Raises JoinError: none comes in time, or the leader is gone."""
        try:
            return self._board.read(phase, time.monotonic() + seconds)
        except TimeoutError as error:
            raise JoinError("left", f"it said nothing for {seconds:.0f} s") from error


def serves(place: Place, host: str, addresses: Sequence[str]) -> bool:
    """Whether this node would serve the endpoint: as it was told, or because the endpoint is this
    host. Node rank 0 connects to an endpoint elsewhere, as torch's store would: the node there may
    have been given rank 0, too."""
    if place.serves is not None and not (place.by_options and place.node_rank == 0):
        return place.serves
    if place.address in ("localhost", host):
        return True
    return any(
        address in addresses or is_loopback(address) for address in sockets.resolve(place.address)
    )


def _board(place: Place, address: str, master: bool) -> Board:
    from torch.distributed import TCPStore  # here, because it takes two seconds

    limit, wait = timedelta(seconds=HANDSHAKE_S), sockets.call_with_timeout
    return Board(wait(HANDSHAKE_S + 1.0, TCPStore, address, place.port, None, master, limit, False))


def open_rendezvous(host: Host) -> Leader:
    """Serves the endpoint. Raises JoinError: the port is taken, or may not be used."""
    place = host.place
    try:
        agents = (
            place.launcher == "torchrun"
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )
        if not agents:
            sockets.listen(place.port).close()
        board = _board(place, place.address if agents else "localhost", not agents)
    except (OSError, RuntimeError) as error:  # torch's DistError is a RuntimeError
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise JoinError(
            "taken", owner_of_port(place.port) if taken else str(error).partition("\n")[0]
        ) from error
    board.set("leader", {"version": VERSION, "host": host.host})
    return Leader(board, host)


def join_rendezvous(host: Host, seconds: float) -> Member:
    """Joins at the endpoint with this host's facts. Raises JoinError: not within `seconds`, or no
    doctor is there."""
    place = host.place
    start = progress = time.monotonic()
    deadline, strangers = start + seconds, 0
    addresses: tuple[str, ...] = ()
    while True:
        addresses = addresses or sockets.resolve(place.address)
        try:
            remaining = deadline - time.monotonic()
            return _join(host, addresses, min(sockets.CONNECT_S, max(remaining, 0.5)))
        except JoinError as error:
            failure = error.failure
            strangers += failure.how == "stranger"
            if strangers >= STRANGER_TRIES or time.monotonic() >= deadline:
                alive = sockets.answers(addresses[0]) if failure.how == "silent" else None
                tried = time.monotonic() - start
                error.failure = replace(failure, alive=alive, addresses=addresses, seconds=tried)
                raise
        progress = _progress(
            progress, f"no doctor at {place.endpoint} yet: {failure.how} {failure.detail}"
        )
        time.sleep(0.25)


def _join(host: Host, addresses: Sequence[str], seconds: float) -> Member:
    place = host.place
    if not addresses:
        raise JoinError("unresolved")
    try:
        connection = sockets.connect(addresses, place.port, seconds)
    except OSError as error:
        raise JoinError(sockets.connect_failure(error), str(error)) from error
    with connection:
        address = sockets.plain_address(connection.getsockname()[0])
        leader_address = sockets.plain_address(connection.getpeername()[0])
        try:
            connection.settimeout(HANDSHAKE_S)
            connection.sendall(STORE_PING)
            answer = connection.recv(len(STORE_PING))
        except TimeoutError as error:
            raise JoinError(
                "stranger", "something that accepts connections and says nothing"
            ) from error
        except OSError:
            answer = b""
    if answer != STORE_PING[-4:]:
        raise JoinError("stranger", NO_STORE)
    try:
        board = _board(place, leader_address, False)
        leader = board.read("leader", time.monotonic() + HANDSHAKE_S)
    except TimeoutError as error:
        raise JoinError("stranger", "torch's store: a job is running there") from error
    except (RuntimeError, RecordError) as error:
        raise JoinError("stranger", NO_STORE) from error
    if not isinstance(leader, dict) or leader.get("version") != VERSION:
        raise JoinError("stranger", OTHER_VERSION)
    if board.has("closed"):
        raise JoinError("left", "the doctors there have begun without this node")
    # Over loopback no other interface shows: agents of one host meet there.
    route = leader_address if is_loopback(address) else address
    member = Member(board, board.add("nodes", 1), leader_address)
    member.give("facts", to_json(replace(host, route=route)))
    return member
