"""The nodes meet at the endpoint: one serves it, the others come to it and tell what they know.

It is what torchrun does when it starts, in the open: the same endpoint, the same question who serves it, but whoever
comes is listened to, also with another id, count or rank, and everybody learns what went wrong. The one that serves
leads: it gathers what the others give, and tells all what follows from it.
"""

import contextlib
import errno
import ipaddress
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshtrain.operate.doctor.dial import CONNECT_S, answers, connect, how_it_failed, is_store, resolve
from meshtrain.operate.doctor.machine import owner_of_port
from meshtrain.operate.doctor.record import Attempt, Place, RecordError, Stranger, from_json, to_json
from meshtrain.operate.doctor.wire import GoneError, Line, StrangerError, listen

VERSION = 1
WELCOME_S = 5.0  # for the first word of whoever accepted the connection
QUIET_S = 3.0  # after somebody came who does not fit in, for more to come
PING_S = 1.0
MOST_STRANGERS = 16


@dataclass(frozen=True)
class Hello:
    """What a process says when it comes. `role` is "node", or "sibling" for another process of the same node."""

    role: str
    host: str
    place: Place
    processes: int
    doctor: int = VERSION


@dataclass(frozen=True)
class Roster:
    """Who came. `ranks[i]` are the ranks of the processes of node i."""

    nodes: tuple[Hello, ...]
    ranks: tuple[tuple[int, ...], ...]
    waited: float
    strangers: tuple[Stranger, ...] = ()
    you: int = 0


class FailedError(Exception):
    """This node did not get to the others; `attempt` says how that went."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt.how)
        self.attempt = attempt


class Leader:
    """The node that serves the endpoint."""

    def __init__(self, listener: socket.socket, hello: Hello, clock: Callable[[], float] = time.time) -> None:
        self._listener = listener
        self._hello = hello
        self._clock = clock
        self._nodes: list[tuple[Hello, Line | None]] = [(hello, None)]
        self._siblings: list[tuple[Hello, Line]] = []
        self._strangers: list[Stranger] = []

    def wait(self, seconds: float) -> Roster:
        """Waits until all have come, no longer than `seconds`, and tells everybody who did."""
        start = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            pending: dict[int, Line] = {}
            last = start
            while not self._complete(last) and (left := start + seconds - time.monotonic()) > 0:
                for key, _ in selector.select(min(left, 0.5)):
                    if key.fileobj is self._listener:
                        self._accept(selector, pending)
                    elif self._heard(pending[key.fd]):
                        selector.unregister(key.fd)
                        del pending[key.fd]
                        last = time.monotonic()
            for line in pending.values():
                self._strange(line, "something that connects and says nothing")
        nodes = self._nodes
        if self._hello.place.backend == "static":
            nodes = [nodes[0], *sorted(nodes[1:], key=lambda one: one[0].place.node_rank or 0)]
        self._nodes = nodes
        waited = (last if self._complete(last) else time.monotonic()) - start
        roster = Roster(tuple(hello for hello, _ in nodes), self._ranks(), waited, tuple(self._strangers))
        for i, member in enumerate(self._lines):
            self._send(member, to_json(replace(roster, you=i)))
        return roster

    @property
    def own_addresses(self) -> list[str]:
        """By which of this host's addresses the others came."""
        return list(dict.fromkeys(line.own for line in self._lines if line is not None))

    @property
    def addresses(self) -> list[str]:
        """From which address each node came; empty for this one."""
        return ["" if line is None else line.peer for line in self._lines]

    @property
    def _lines(self) -> list[Line | None]:
        return [line for _, line in self._nodes]

    def _accept(self, selector: selectors.BaseSelector, pending: dict[int, Line]) -> None:
        connection, _ = self._listener.accept()
        line = Line(connection)
        pending[line.fileno()] = line
        selector.register(connection, selectors.EVENT_READ)

    def _heard(self, line: Line) -> bool:
        """Reads from somebody new; returns whether it is settled who that is."""
        try:
            line.connection.settimeout(WELCOME_S)
            line.read()
            message = line.take()
            if message is None:
                return False
            hello = from_json(Hello, message, "hello")
            line.send({"doctor": VERSION, "host": self._hello.host})
        except StrangerError as stranger:
            self._strange(line, str(stranger))
        except RecordError:
            self._strange(line, "a doctor of another version of meshtrain, or somebody who only looks like one")
        except GoneError:
            self._strange(line, "something that connects and hangs up, such as a health check")
        else:
            if hello.role == "node":
                self._nodes.append((hello, line))
            else:
                self._siblings.append((hello, line))
        return True

    def _strange(self, line: Line, what: str) -> None:
        with contextlib.suppress(OSError):  # its address is gone with it
            stranger = Stranger(line.peer, what)
            if stranger not in self._strangers and len(self._strangers) < MOST_STRANGERS:
                self._strangers.append(stranger)
        line.close()

    def _complete(self, last: float) -> bool:
        """Whether there is nobody to wait for any more: all have come, or enough of which some do not fit in."""
        mine, places = self._hello.place, [hello.place for hello, _ in self._nodes]
        processes = sum(hello.processes for hello, _ in self._nodes)
        if mine.rank is not None and len(self._nodes) + len(self._siblings) < processes:
            return False
        if len(places) >= max(place.most for place in places):
            return True
        odd = any((place.nodes, place.id) != (mine.nodes, mine.id) for place in places)
        enough = len(places) >= min(place.fewest for place in places)
        return odd and enough and time.monotonic() - last > QUIET_S

    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        """As the launcher has numbered the processes, or as torchrun would: node by node."""
        if self._hello.place.rank is None:
            counts = [hello.processes for hello, _ in self._nodes]
            starts = [sum(counts[:i]) for i in range(len(counts))]
            return tuple(tuple(range(start, start + n)) for start, n in zip(starts, counts, strict=True))
        everybody = [hello.place for hello, _ in [*self._nodes, *self._siblings]]
        of_node = [
            sorted(place.rank or 0 for place in everybody if place.node_rank == hello.place.node_rank)
            for hello, _ in self._nodes
        ]
        return tuple(map(tuple, of_node))

    def gather(self, own: Any, seconds: float) -> list[Any]:
        """What each node gives, this one's first; None for a node that gives nothing in this time."""
        deadline = time.monotonic() + seconds
        return [own, *(self._receive(i, deadline) for i in range(1, len(self._nodes)))]

    def gather_siblings(self, seconds: float) -> list[Any]:
        """What the other processes of all nodes give."""
        deadline = time.monotonic() + seconds
        found = []
        for _, line in self._siblings:
            with contextlib.suppress(GoneError, StrangerError, TimeoutError):  # then there is nothing of it
                found.append(line.receive(deadline).get("value"))
        return found

    def _receive(self, node: int, deadline: float) -> Any:
        hello, line = self._nodes[node]
        if line is None:
            return None
        try:
            return line.receive(deadline).get("value")
        except (GoneError, StrangerError, TimeoutError):
            line.close()
            self._nodes[node] = (hello, None)
            return None

    def tell(self, value: Any) -> None:
        """Tells all nodes."""
        for line in self._lines:
            self._send(line, {"value": value})

    def tell_siblings(self, value: Any) -> None:
        """Tells the other processes of all nodes."""
        for _, line in self._siblings:
            self._send(line, {"value": value})

    def _send(self, line: Line | None, message: dict[str, Any]) -> None:
        if line is not None:
            with contextlib.suppress(GoneError):  # it shows when it gives nothing any more
                line.send(message)

    def clocks(self) -> list[tuple[float, float] | None]:
        """By how many seconds each node's clock is ahead of this one's, and how wrong that may be.

        A node answers a ping with its time; what lies between is the journey there and back, of which the quickest of
        a few tells most (as NTP does it, RFC 5905).
        """
        return [(0.0, 0.0), *(None if line is None else self._offset(line) for line in self._lines[1:])]

    def _offset(self, line: Line) -> tuple[float, float] | None:
        best: tuple[float, float] | None = None
        try:
            for _ in range(4):
                started, before = self._clock(), time.monotonic()
                line.send({"ping": True})
                theirs = line.receive(before + PING_S)["time"]
                took = time.monotonic() - before
                if best is None or took / 2 < best[1]:
                    best = (float(theirs) - started - took / 2, took / 2)
        except (GoneError, StrangerError, TimeoutError, KeyError, TypeError, ValueError):
            return best
        return best

    def close(self) -> None:
        for line in [*self._lines, *(line for _, line in self._siblings)]:
            if line is not None:
                line.close()
        self._listener.close()


class Member:
    """A node, or a sibling, that came to the endpoint."""

    def __init__(self, line: Line, clock: Callable[[], float] = time.time) -> None:
        self._line = line
        self._clock = clock

    @property
    def own_address(self) -> str:
        return self._line.own

    @property
    def leader_address(self) -> str:
        return self._line.peer

    def give(self, value: Any) -> None:
        """Raises FailedError if the node that serves the endpoint has gone."""
        try:
            self._line.send({"value": value})
        except GoneError as error:
            raise FailedError(Attempt("left", str(error))) from error

    def hear(self, seconds: float) -> Any:
        """What the leader tells; answers its pings meanwhile. Raises FailedError if nothing comes in this time."""
        return self._hear(seconds).get("value")

    def roster(self, seconds: float) -> Roster:
        """Who came."""
        try:
            return from_json(Roster, self._hear(seconds), "roster")
        except RecordError as error:
            raise FailedError(Attempt("stranger", f"a doctor of another version of meshtrain ({error})")) from error

    def _hear(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        try:
            while "ping" in (message := self._line.receive(deadline)):
                self._line.send({"time": self._clock()})
        except TimeoutError as error:
            raise FailedError(Attempt("left", f"it said nothing for {seconds:.0f} s")) from error
        except (GoneError, StrangerError) as error:
            raise FailedError(Attempt("left", str(error))) from error
        return message

    def close(self) -> None:
        self._line.close()


def serves(place: Place, host: str, addresses: Sequence[str]) -> bool:
    """Whether this node would serve the endpoint: as it was told, or because the endpoint is this host.

    Node rank 0 serves if the endpoint is its host too. Otherwise it goes there, as torch's store would from it: who is
    there may have been given rank 0 as well.
    """
    numbered = place.launcher == "torchrun's options" and place.node_rank == 0
    if place.serves is not None and not numbered:
        return place.serves
    if place.address in ("localhost", host):
        return True
    found = resolve(place.address)
    return any(address in addresses or ipaddress.ip_address(address).is_loopback for address in found)


def open_meeting(place: Place, hello: Hello, clock: Callable[[], float] = time.time) -> Leader:
    """Serves the endpoint.

    Raises:
        FailedError: the port is taken, or may not be used.
    """
    try:
        return Leader(listen(place.port), hello, clock)
    except OSError as error:
        who = owner_of_port(place.port) if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise FailedError(Attempt("taken", who)) from error


def join_meeting(place: Place, hello: Hello, seconds: float, clock: Callable[[], float] = time.time) -> Member:
    """Comes to the endpoint, which may be opened later than this is called.

    Raises:
        FailedError: not within `seconds`, or somebody else is there.
    """
    start = time.monotonic()
    deadline, hung_up = start + seconds, 0
    addresses: tuple[str, ...] = ()
    while True:
        addresses = addresses or resolve(place.address)
        attempt = Attempt("unresolved")
        if addresses:
            try:
                return _come(place, addresses, hello, clock, min(CONNECT_S, max(deadline - time.monotonic(), 0.5)))
            except FailedError as failed:
                attempt = failed.attempt
        hung_up += attempt.how == "hung up"
        settled = attempt.how == "stranger" or hung_up >= 3
        if settled or time.monotonic() >= deadline:
            how = "stranger" if attempt.how == "hung up" else attempt.how
            alive = answers(addresses[0]) if how == "silent" else None
            raise FailedError(
                replace(attempt, how=how, alive=alive, addresses=addresses, seconds=time.monotonic() - start)
            )
        time.sleep(0.25)


def _come(place: Place, addresses: Sequence[str], hello: Hello, clock: Callable[[], float], seconds: float) -> Member:
    try:
        connection = connect(addresses, place.port, seconds)
    except OSError as error:
        raise FailedError(Attempt(how_it_failed(error), str(error))) from error
    line = Line(connection)
    try:
        line.send(to_json(hello))
        answer = line.receive(time.monotonic() + WELCOME_S)
        if answer.get("doctor") == VERSION:
            return Member(line, clock)
        attempt = Attempt("stranger", "a doctor of another version of meshtrain")
    except TimeoutError:
        line.close()
        job = is_store(addresses, place.port)
        attempt = Attempt("stranger", "torch's store: a job is running there") if job else Attempt("mute")
    except StrangerError as stranger:
        attempt = Attempt("stranger", str(stranger))
    except GoneError:
        attempt = Attempt("hung up", "something that hangs up without a word, as torch's own store does")
    line.close()
    raise FailedError(attempt)
