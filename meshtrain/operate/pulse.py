"""How ranks look after each other when something is wrong: each has an ear, and answers questions about itself.

Nothing is sent while all is well. The ear does not go by way of rank 0, nor by the job's store, which may be what was
lost: the ranks know each other's addresses from the start. A question is one line of JSON on a connection of its own,
and so is the answer; whoever does not know the job's token is not answered.
"""

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

CONNECT_S = 3.0
ANSWER_S = 4.0  # a healthy rank needs a few milliseconds; on a host with far too many processes it may be seconds
AT_ONCE = 64  # ranks that are asked at the same time
LINE = 2**20  # bytes of a question or an answer

Answer = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Address:
    """Where a rank listens.

    Attributes:
        ips: of its host, the likeliest first.
    """

    rank: int
    host: str
    pid: int
    port: int
    ips: tuple[str, ...]


class SilentError(OSError):
    """Somebody took the connection and did not answer."""


class Ear:
    """Answers questions in threads of its own."""

    def __init__(self, answer: Answer) -> None:
        """
        Args:
            answer: to a question; called by several threads.
        """
        self.token = secrets.token_hex(16)  # until the job has agreed on one
        self._answer = answer
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listening = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
        self.port: int = self._listening.getsockname()[1]
        close_in_children(self._listening)
        threading.Thread(target=self._listen, name="ear", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # it is closed
                return
            threading.Thread(target=self._hear, args=(connection,), name="answer", daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):  # whoever asked has gone, or does not speak our language
            connection.settimeout(ANSWER_S)
            with connection.makefile("rb") as file:
                question = json.loads(file.readline(LINE))
            if isinstance(question, dict) and secrets.compare_digest(str(question.pop("token", "")), self.token):
                connection.sendall(json.dumps(self._answer(question)).encode() + b"\n")

    def close(self) -> None:
        """From now on whoever asks is told that nobody is here."""
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
        here: this host's name.

    Raises:
        ConnectionRefusedError: nobody listens there: the process is gone. SilentError: no answer, or not in time.
            OSError: nothing came back from the host.
    """
    problem: OSError = OSError(f"no address of {to.host} is known")
    for ip in ("127.0.0.1", *to.ips) if to.host == here else to.ips:
        try:
            with socket.create_connection((ip, to.port), timeout=CONNECT_S) as connection:
                return _exchange(connection, {**question, "token": token}, seconds)
        except OSError as error:
            problem = error
            if isinstance(error, ConnectionRefusedError | SilentError):
                break
    raise problem


def _exchange(connection: socket.socket, question: Mapping[str, Any], seconds: float) -> Any:
    connection.settimeout(seconds)
    try:
        connection.sendall(json.dumps(question).encode() + b"\n")
        with connection.makefile("rb") as file:
            line = file.readline(LINE)
    except ConnectionResetError as error:  # it died with the question in its hands
        raise ConnectionRefusedError(str(error)) from error
    except TimeoutError as error:
        raise SilentError(str(error)) from error
    if not line:
        raise SilentError("it does not answer such questions, or not yet")
    return json.loads(line)


def ask_all(
    some: Iterable[Address], question: Mapping[str, Any], token: str, here: str, seconds: float = ANSWER_S
) -> list[Any]:
    """The answers of several ranks in their order, or the OSError in place of one."""

    def one(to: Address) -> Any:
        try:
            return ask(to, question, token, here=here, seconds=seconds)
        except OSError as error:
            return error

    every = list(some)
    with ThreadPoolExecutor(max(1, min(AT_ONCE, len(every)))) as pool:
        return list(pool.map(one, every))


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
