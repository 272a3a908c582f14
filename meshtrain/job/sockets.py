"""Calls and sockets with a time limit, and under which addresses hosts reach each other."""

import errno
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

CONNECT_S = 4.0  # for one attempt to connect
LOOK_UP_S = 5.0  # for a name to be resolved
OTHER_PORTS = (22, 111, 9)  # closed or open, a host that is up answers on one of them, unless everything is dropped


def call_with_timeout(seconds: float, call: Callable[..., T], *arguments: Any) -> T:
    """What the call returns, or raises; TimeoutError if it takes longer, which leaves it behind in its thread."""
    return in_thread(call, *arguments).result(seconds)


def in_thread(call: Callable[..., T], *arguments: Any) -> Future[T]:
    """What comes of a call in a thread of its own, which does not hold up the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def connect(addresses: Sequence[str], port: int, seconds: float) -> socket.socket:
    """A connection to the first of the addresses that takes one. Raises the OSError of the last."""
    last: OSError = OSError(errno.EDESTADDRREQ, "no address")
    for address in addresses[:4]:
        try:
            return socket.create_connection((address, port), timeout=seconds)
        except OSError as error:
            last = error
    raise last


def connect_failure(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "silent"
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    return "unreachable"  # no route, no such host in the network, a policy that forbids it


def answers(address: str) -> bool:
    """Whether a host answers on any of a few ports, with a refusal too."""
    for port in OTHER_PORTS:
        try:
            connect([address], port, 1.5).close()
            return True
        except OSError as error:
            if connect_failure(error) == "refused":
                return True
    return False


def resolve(name: str, seconds: float = LOOK_UP_S) -> tuple[str, ...]:
    """The addresses of a name, as this host resolves it; none if it does not, or not in time."""
    try:
        rows = call_with_timeout(seconds, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # TimeoutError is an OSError too
        return ()
    return tuple(dict.fromkeys(plain_address(str(row[4][0])) for row in rows))


def address_towards(other: str) -> str:
    """This host's address on the route to another one, given by name or address; empty where there is no route."""
    try:
        family, *_, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
            datagrams.connect(address)  # sends nothing
            return str(datagrams.getsockname()[0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def plain_address(address: str) -> str:
    """`::ffff:10.0.0.1`, as a socket for both families has it, is 10.0.0.1; the scope of a link's address goes."""
    return address.removeprefix("::ffff:").partition("%")[0]


def listen(port: int) -> socket.socket:
    """A listening socket on all interfaces, for both families where there are both. Port 0: any. Raises OSError."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # built with IPv6, and run where there is none
            raise
    return socket.create_server(("", port), backlog=1024)
