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

from meshtrain.doctor.ports import owner_of_port
from meshtrain.doctor.records import (
    ClusterFacts,
    Host,
    JoinFailure,
    Place,
    RecordError,
    from_json,
    to_json,
)
from meshtrain.errors import join_some
from meshtrain.job import sockets
from meshtrain.job.parsing import parse_json
from meshtrain.job.sockets import is_loopback
from meshtrain.job.storage import print_error

VERSION = 3
PREFIX = "meshtrain/doctor/"
# for the peer that accepted the connection to prove to be a store, and a doctor's
HANDSHAKE_S = 5.0
CALL_S = 5.0  # for one call of the store
QUIET_S = 3.0  # to wait for more nodes after one came that does not fit in
PROGRESS_S = 10.0  # between lines about missing nodes
POLL_S = 0.1
MOST_BYTES = 4 * 2**20  # of one value: the facts of a few hundred hosts
MOST_NODES = 2**14
# A doctor that is just ending or beginning looks like something else for a moment.
STRANGER_TRIES = 3

# A VALIDATE query with its magic number, then a PING, which is answered with the last four bytes
# (TCPStoreBackend.hpp). TCPStore's own constructor waits forever for a listener that sends nothing.
STORE_PING = b"\x00\xce\xf7\x85\x3c\x0dmesh"
NO_STORE = "something that is not torch's store"
OTHER_VERSION = "a doctor of another version of meshtrain"
JOB = "torch's store: a job is running there"
TORCHRUN = "a torchrun or a training, which came in the place of a doctor"

T = TypeVar("T")


class JoinError(Exception):
    """This node could not join the others; `failure` tells how it failed."""

    def __init__(self, outcome: str, detail: str = "") -> None:
        super().__init__(outcome)
        self.failure = JoinFailure(outcome, detail)


class ProgressLines:
    """Lines about a wait, one every `PROGRESS_S` seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        if time.monotonic() - self._last > PROGRESS_S:
            print_error(text)
            self._last = time.monotonic()


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
        self._hosts: dict[int, Host] = {0: host}  # by the numbers of their keys
        self._strangers: dict[int, str] = {}
        self._silent: set[int] = set()
        self.numbers: list[int] = []  # of the nodes' keys, in the order of the hosts

    def wait(self, seconds: float) -> ClusterFacts:
        """Waits for the nodes, at most so long, and gives each its ranks."""
        start = time.monotonic()
        last_arrival = start
        progress = ProgressLines()
        while not self._complete(last_arrival) and time.monotonic() < start + seconds:
            if self._welcome():
                last_arrival = time.monotonic()
            progress.say(self._who_came())
            time.sleep(POLL_S)
        # From now on who comes is told so, and waits for nobody.
        self.board.set("closed", True)
        waited_until = last_arrival if self._complete(last_arrival) else time.monotonic()

        self._hosts = _with_ranks(self._in_order())
        self.numbers = list(self._hosts)
        return ClusterFacts(
            hosts=tuple(self._hosts.values()),
            strangers=self._all_strangers(),
            waited=waited_until - start,
        )

    def _welcome(self) -> bool:
        """Reads the facts of nodes that have come since the last call, and says whether any has."""
        came = False
        # The counter is anybody's to set.
        nodes = min(self.board.add("nodes", 0), MOST_NODES)
        for number in range(1, nodes + 1):
            known = number in self._hosts or number in self._strangers
            if known or not self.board.has(f"facts/{number}"):
                continue
            try:
                self._hosts[number] = from_json(Host, self.board.read(f"facts/{number}", 0.0))
            except RecordError:
                self._strangers[number] = OTHER_VERSION
            came = True
        return came

    def _complete(self, last_arrival: float) -> bool:
        """Whether no more nodes are waited for: all have come, or enough of them, of which some do
        not fit in."""
        places = [host.place for host in self._hosts.values()]
        if len(places) >= max(place.most for place in places):
            return True
        mine = self._place
        # Nodes that are told something else will never be as many as they say.
        odd = any((place.nodes, place.id) != (mine.nodes, mine.id) for place in places)
        enough = len(places) >= min(place.fewest for place in places)
        return odd and enough and time.monotonic() - last_arrival > QUIET_S

    def _who_came(self) -> str:
        names = join_some([host.host for host in self._hosts.values()], 8)
        return (
            f"{len(self._hosts)} of {self._place.nodes} nodes are at {self._place.endpoint}: "
            f"{names}"
        )

    def _in_order(self) -> dict[int, Host]:
        """This node, then the others: by their node ranks, or as they came."""
        first, *others = self._hosts.items()
        if self._place.backend == "static":
            others.sort(key=lambda item: item[1].place.node_rank or 0)
        return dict([first, *others])

    def _all_strangers(self) -> tuple[str, ...]:
        strangers = set(self._strangers.values())
        # With torchrun's own store other keys are no surprise.
        if self._place.launcher != "torchrun":
            keys = self.board.call("list_keys")
            if any(not key.startswith(PREFIX) for key in keys):
                strangers.add(TORCHRUN)
        return tuple(sorted(strangers))

    def gather(self, phase: str, kind: type[T], own: T, seconds: float) -> list[T | None]:
        """The value that each node gives, this one's first; None for a node that gives no valid
        value in time."""
        deadline = time.monotonic() + seconds
        answers: list[T | None] = [own]
        for number in self.numbers[1:]:
            answer = None
            if number not in self._silent:
                try:
                    value = self.board.read(f"{phase}/{number}", deadline)
                    answer = from_json(kind, value, phase)
                except (TimeoutError, RecordError):
                    self._silent.add(number)
            answers.append(answer)
        return answers

    def close(self, seconds: float = 0.0) -> None:
        """Ends the store, once the others have read the last values, or after `seconds`."""
        with contextlib.suppress(JoinError):
            if seconds:
                self.gather("done", bool, True, seconds)
        self.board.store = None  # releasing it ends the server


def _with_ranks(hosts: dict[int, Host]) -> dict[int, Host]:
    """The hosts with ranks: as their launcher has assigned them, or else as torchrun would."""
    ranked = {}
    first = 0
    for number, host in hosts.items():
        ranks = host.place.ranks or tuple(range(first, first + host.processes))
        ranked[number] = replace(host, ranks=ranks)
        first += host.processes
    return ranked


class Member:
    """A node that came to the endpoint; `leader_address` is the leader's, as this node reaches
    it."""

    def __init__(self, board: Board, number: int, leader_address: str) -> None:
        self._board = board
        self.number = number
        self.leader_address = leader_address

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
    first_by_rank = place.by_options and place.node_rank == 0
    if place.serves is not None and not first_by_rank:
        return place.serves
    if place.address in ("localhost", host):
        return True
    return any(
        address in addresses or is_loopback(address) for address in sockets.resolve(place.address)
    )


def _board(place: Place, address: str, *, serve: bool) -> Board:
    from torch.distributed import TCPStore  # here, because it takes two seconds

    def store() -> Any:
        return TCPStore(
            address,
            place.port,
            is_master=serve,
            timeout=timedelta(seconds=HANDSHAKE_S),
            wait_for_workers=False,
        )

    return Board(sockets.call_with_timeout(HANDSHAKE_S + 1.0, store))


def open_rendezvous(host: Host) -> Leader:
    """Serves the endpoint. Raises JoinError: the port is taken, or may not be used."""
    place = host.place
    # torchrun's agent keeps the store that it met by, and its workers use that one.
    agents = (
        place.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    try:
        if agents:
            board = _board(place, place.address, serve=False)
        else:
            sockets.listen(place.port).close()  # whether it may be used: the store says less
            board = _board(place, "localhost", serve=True)
    except (OSError, RuntimeError) as error:  # torch's DistError is a RuntimeError
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            reason = owner_of_port(place.port)
        else:
            reason = str(error).partition("\n")[0]
        raise JoinError("taken", reason) from error
    board.set("leader", {"version": VERSION, "host": host.host})
    return Leader(board, host)


def join_rendezvous(host: Host, seconds: float) -> Member:
    """Joins at the endpoint with this host's facts. Raises JoinError: not within `seconds`, or no
    doctor is there."""
    place = host.place
    start = time.monotonic()
    deadline = start + seconds
    progress = ProgressLines()
    strangers = 0
    addresses: tuple[str, ...] = ()
    while True:
        if not addresses:  # its name may be known in a moment
            addresses = sockets.resolve(place.address)
        try:
            remaining = max(deadline - time.monotonic(), 0.5)
            return _join(host, addresses, min(sockets.CONNECT_S, remaining))
        except JoinError as error:
            failure = error.failure
            if failure.how == "stranger":
                strangers += 1
            if strangers >= STRANGER_TRIES or time.monotonic() >= deadline:
                alive = sockets.answers(addresses[0]) if failure.how == "silent" else None
                tried = time.monotonic() - start
                error.failure = replace(failure, alive=alive, addresses=addresses, seconds=tried)
                raise
        progress.say(f"no doctor at {place.endpoint} yet: {failure.how} {failure.detail}")
        time.sleep(0.25)


def _join(host: Host, addresses: Sequence[str], seconds: float) -> Member:
    place = host.place
    own_address, leader_address = _find_store(place, addresses, seconds)
    try:
        board = _board(place, leader_address, serve=False)
        leader = board.read("leader", time.monotonic() + HANDSHAKE_S)
    except TimeoutError as error:
        raise JoinError("stranger", JOB) from error
    except (RuntimeError, RecordError) as error:
        raise JoinError("stranger", NO_STORE) from error
    if not isinstance(leader, dict) or leader.get("version") != VERSION:
        raise JoinError("stranger", OTHER_VERSION)
    if board.has("closed"):
        raise JoinError("left", "the doctors there have begun without this node")

    # Over loopback no other interface shows: agents of one host meet there.
    route = leader_address if is_loopback(own_address) else own_address
    member = Member(board, board.add("nodes", 1), leader_address)
    member.give("facts", to_json(replace(host, route=route)))
    return member


def _find_store(place: Place, addresses: Sequence[str], seconds: float) -> tuple[str, str]:
    """The two addresses of a connection to the endpoint, this node's and the leader's. Raises
    JoinError: nobody is there, or nobody who speaks like torch's store."""
    if not addresses:
        raise JoinError("unresolved")
    try:
        connection = sockets.connect(addresses, place.port, seconds)
    except OSError as error:
        raise JoinError(sockets.connect_failure(error), str(error)) from error
    answer = b""
    with connection:
        own_address = sockets.plain_address(connection.getsockname()[0])
        leader_address = sockets.plain_address(connection.getpeername()[0])
        with contextlib.suppress(OSError):  # TimeoutError is one
            connection.settimeout(HANDSHAKE_S)
            connection.sendall(STORE_PING)
            answer = connection.recv(len(STORE_PING))
    if answer != STORE_PING[-4:]:
        raise JoinError("stranger", NO_STORE)
    return own_address, leader_address
