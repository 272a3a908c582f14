"""Ports: whether random ports are open between the hosts, as torchrun, gloo and NCCL need for their
connections, and which process listens on a port of this host."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from meshtrain.doctor.records import PortCheck
from meshtrain.job.parsing import parse_json
from meshtrain.job.sockets import call_with_timeout, connect, connect_failure, listen

TRY_S = 3.0
AT_ONCE = 64
ALL_PAIRS = 64  # hosts up to which each tries every other one
MOST_BYTES = 4096


class PortProbe:
    """A random open port for other hosts to try; it answers each connection with this node's name
    and the time."""

    def __init__(self, name: str, clock: Callable[[], float] = time.time) -> None:
        self._socket = listen(0)
        self.port: int = self._socket.getsockname()[1]
        self._name, self._clock = name, clock
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                answer = json.dumps({"node": self._name, "time": self._clock()}) + "\n"
                connection.sendall(answer.encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(TRY_S)


def peers_to_check(node: int, nodes: int) -> list[int]:
    """The nodes that a node tries: all others, or of many, those at power-of-two distances (O(n log
    n) in all)."""
    if nodes <= ALL_PAIRS:
        return [other for other in range(nodes) if other != node]
    distances = (2**i for i in range(nodes.bit_length()) if 2**i < nodes)
    return list(dict.fromkeys((node + distance) % nodes for distance in distances))


def check_ports(source: int, targets: Sequence[tuple[int, str, int, str]]) -> tuple[PortCheck, ...]:
    """Tries each target (node, address, port, the name that its probe must answer), many at
    once."""

    def check(target: tuple[int, str, int, str]) -> PortCheck:
        node, address, port, name = target
        outcome, message = _ask(address, port)
        if not outcome:
            answer = message.get("node")
            outcome = "open" if answer == name else f"another: {json.dumps(answer)[:60]}"
        return PortCheck(source, node, address, port, outcome)

    with ThreadPoolExecutor(min(len(targets) or 1, AT_ONCE)) as pool:
        return tuple(pool.map(check, targets))


def clock_offset(address: str, port: int, clock: Callable[[], float]) -> tuple[float, float] | None:
    """Seconds by which this host's clock is ahead of a probe's, and the error bound of that (as
    NTP, RFC 5905)."""
    best: tuple[float, float] | None = None
    for _ in range(4):
        before = clock()
        started = time.monotonic()
        _, message = _ask(address, port)
        half = (time.monotonic() - started) / 2
        there = message.get("time")
        if not isinstance(there, float):
            return best
        # Somewhere on the way the other clock said `there`: at the middle, give or take a half. The
        # quickest answer knows it best.
        if best is None or half < best[1]:
            best = (before + half - there, half)
    return best


def _ask(address: str, port: int) -> tuple[str, dict[str, Any]]:
    """What a probe answers, and why there is no answer, which is empty if there is one."""
    try:
        connection = connect([address], port, TRY_S)
    except OSError as error:
        return connect_failure(error), {}

    def answer() -> Any:
        with connection, connection.makefile("rb") as stream:
            return parse_json(stream.readline(MOST_BYTES))

    try:
        message = call_with_timeout(TRY_S, answer)
    except TimeoutError:
        return "mute", {}
    except (OSError, ValueError):
        return "another", {}
    if not isinstance(message, dict):
        return "another", {}
    return "", message


def owner_of_port(port: int) -> str:
    """The process of this host that listens on a port, in words."""
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if listens and connection.pid is not None:
            with contextlib.suppress(psutil.Error):  # it has just ended
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid} ({command[:80]})"
    return "another process, of another user"
