"""How ranks look after each other when something is wrong: each has an ear, and answers questions about itself.

Nothing is sent while all is well. The ear does not go by way of rank 0, nor by the job's store, which may be what was
lost: the ranks know each other's addresses from the start. A question is one line of JSON on a connection of its own,
and so is the answer; whoever does not know the job's token is not answered.
"""

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

CONNECT_S = 3.0
ANSWER_S = 4.0  # a healthy rank needs a few milliseconds; on a host with far too many processes it may be seconds
AT_ONCE = 64  # ranks that are asked at the same time
READERS = 256  # questions that are read at the same time
PAUSE_S = 0.1  # where the system has run out of something
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)  # of this process or its host
EXHAUSTED_S = 30.0  # for which it waits for others to give back what it has run out of
ANSWERED = "answered"  # by which an answer is known: another program may have got the port of a rank that is gone
LINE, READ = 2**20, 2**16  # bytes of a question or an answer, and how many are read at a time
BOOT = "/proc/sys/kernel/random/boot_id"

Answer = Callable[[dict[str, Any]], dict[str, Any] | None]


@dataclass(frozen=True)
class Address:
    """Where a rank listens.

    Attributes:
        ips: of its host, the likeliest first.
        net, pids: see `Place`.
    """

    rank: int
    host: str
    pid: int
    port: int
    ips: tuple[str, ...]
    net: str
    pids: str


@dataclass(frozen=True)
class Place:
    """Where a process is. Hosts may have the same name (cloned images, containers), and one host several of these.

    Attributes:
        net: the network; processes of the same one reach each other by loopback.
        pids: the numbering of processes; a number means nothing in another.
    """

    net: str
    pids: str


def place(host: str) -> Place:
    """Of this process; `host`, its name, is what is left where the system does not tell more."""
    kernel = host
    with suppress(OSError), open(BOOT) as file:
        kernel = file.read().strip()
    names = []
    for kind in ("net", "pid"):
        names.append(kernel)
        with suppress(OSError):
            names[-1] += f" {os.stat(f'/proc/self/ns/{kind}').st_ino}"
    return Place(*names)


class SilentError(OSError):
    """Somebody took the connection and did not answer."""


class ExhaustedError(RuntimeError):
    """This process has no descriptor or memory left to ask with: that says nothing of whom it wanted to ask."""


class Ear:
    """Answers questions in threads of its own."""

    def __init__(self, answer: Answer) -> None:
        """
        Args:
            answer: to a question, or None, and it stays without one; called by several threads.
        """
        self.token = secrets.token_hex(16)  # until the job has agreed on one
        self._answer = answer
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listening = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
        self.port: int = self._listening.getsockname()[1]
        close_in_children(self._listening)
        self._closed, self._readers = threading.Event(), threading.Semaphore(READERS)
        threading.Thread(target=self._listen, name="ear", daemon=True).start()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:  # it is closed; or there are too many files, or the other has given up
                self._closed.wait(PAUSE_S)
                continue
            self._readers.acquire()
            while not self._closed.is_set():
                try:
                    threading.Thread(target=self._hear, args=(connection,), name="answer", daemon=True).start()
                    break
                except RuntimeError:  # there are too many threads
                    self._closed.wait(PAUSE_S)

    def _hear(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # whoever asked has gone
            question = self._read(connection)
            if question is not None and (answer := self._answer(question)) is not None:
                connection.settimeout(ANSWER_S)
                connection.sendall(json.dumps({ANSWERED: answer}).encode() + b"\n")

    def _read(self, connection: socket.socket) -> dict[str, Any] | None:
        """The question, if it comes from this job.

        Strangers hold no more than READERS threads. A question of the job may take long to answer, and holds up nobody
        else's: of these there are only as many as ranks ask.
        """
        try:
            question = json.loads(_line(connection, ANSWER_S))
        except (ValueError, RecursionError):  # it does not speak our language
            return None
        finally:
            self._readers.release()
        if not isinstance(question, dict):
            return None
        token = str(question.pop("token", "")).encode(errors="replace")
        return question if secrets.compare_digest(token, self.token.encode()) else None

    def close(self) -> None:
        """From now on whoever asks is told that nobody is here."""
        self._closed.set()
        with suppress(OSError):  # closed before
            self._listening.shutdown(socket.SHUT_RDWR)  # the thread that listens would keep it open
        self._listening.close()


def close_in_children(listening: socket.socket) -> None:
    """Processes that this one forks (readers of data) do not keep a port open when it is gone."""
    weak = ref(listening)

    def close() -> None:
        inherited = weak()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)


def ask(to: Address, question: Mapping[str, Any], token: str, *, seconds: float = ANSWER_S, here: str = "") -> Any:
    """A rank's answer.

    Args:
        here: this process's network (`Place.net`).

    Raises:
        ConnectionRefusedError: nobody listens there: the process is gone. SilentError: no answer, or not in time.
            OSError: nothing came back from the host. ExhaustedError: it could not be asked.
    """
    problem: OSError | None = None
    for ip in ("127.0.0.1", *to.ips) if to.net == here else to.ips:
        try:
            with _connect(ip, to.port) as connection:
                return _exchange(connection, {**question, "token": token}, seconds)
        except SilentError:
            raise
        except OSError as error:
            # The same address may be another host's elsewhere: who refuses is the rank's host only if all do.
            if problem is None or isinstance(problem, ConnectionRefusedError):
                problem = error
    raise problem or OSError(f"no address of {to.host} is known")


def _connect(ip: str, port: int) -> socket.socket:
    """A connection to a numeric address: `getaddrinfo` would open files. What this process lacks is waited for."""
    deadline = time.monotonic() + EXHAUSTED_S
    while True:
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
            try:
                connection.settimeout(CONNECT_S)
                connection.connect((ip, port))
            except BaseException:
                connection.close()
                raise
            return connection
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            if time.monotonic() > deadline:
                raise ExhaustedError(f"this process could not connect to another rank: {error.strerror}") from error
            time.sleep(PAUSE_S)


def _exchange(connection: socket.socket, question: Mapping[str, Any], seconds: float) -> Any:
    connection.settimeout(seconds)
    try:
        connection.sendall(json.dumps(question).encode() + b"\n")
        line = _line(connection, seconds)
    except ConnectionError as error:  # it died with the question in its hands
        raise ConnectionRefusedError(str(error)) from error
    except TimeoutError as error:
        raise SilentError(str(error)) from error
    if not line:
        raise SilentError("it does not answer such questions, or not yet")
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get(ANSWERED), dict):
        raise ConnectionRefusedError("another program listens there now")
    return answer[ANSWERED]


def _line(connection: socket.socket, seconds: float) -> bytes:
    """What comes until the line ends, or the other has no more to say.

    Raises:
        TimeoutError: it has not come in so long, all in all.
    """
    deadline, line = time.monotonic() + seconds, bytearray()
    while b"\n" not in line[-READ:] and len(line) < LINE:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        some = connection.recv(READ)
        if not some:
            break
        line += some
    return bytes(line.partition(b"\n")[0])


def ask_all(
    some: Iterable[Address], question: Mapping[str, Any], token: str, here: str, seconds: float = ANSWER_S
) -> list[Any]:
    """The answers of several ranks in their order, or the OSError in place of one.

    If they are more than can be asked at the same time, the first of each host says whether it can be reached; if two
    cannot be, no more of its ranks are asked.
    """

    def one(to: Address) -> Any:
        try:
            return ask(to, question, token, here=here, seconds=seconds)
        except OSError as error:
            return error

    def of_host(every: list[Address]) -> list[Any]:
        found = [one(every[0])]
        if unreachable(found[0]) and len(every) > 1:
            found.append(one(every[1]))
            if unreachable(found[1]):
                return found + [found[1]] * (len(every) - 2)
        return found + list(pool.map(one, every[len(found) :]))

    every = list(some)
    with ThreadPoolExecutor(max(1, min(AT_ONCE, len(every)))) as pool:
        if len(every) <= AT_ONCE:
            return list(pool.map(one, every))
        hosts: dict[str, list[Address]] = {}
        for to in every:
            hosts.setdefault(to.net, []).append(to)
        with ThreadPoolExecutor(min(AT_ONCE, len(hosts))) as firsts:
            answers = {net: iter(found) for net, found in zip(hosts, firsts.map(of_host, hosts.values()), strict=True)}
        return [next(answers[to.net]) for to in every]


def unreachable(answer: Any) -> bool:
    """Whether nothing came back from the host."""
    return isinstance(answer, OSError) and not isinstance(answer, ConnectionRefusedError | SilentError)


def addresses_towards(others: Sequence[str]) -> tuple[str, ...]:
    """Under which addresses others reach this host: those from which it reaches them. Loopback last."""
    found: dict[str, None] = {}
    for other in others:
        try:
            family = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
                probe.connect(family[4])  # sends nothing
                found[str(probe.getsockname()[0])] = None
        except OSError:  # there is no route to it
            continue
    return tuple(sorted(found, key=loopback))


def loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def state_of(pid: int) -> str:
    """The state of a process of this host, as Linux has it: R, S, D, T (stopped), Z; "" if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
