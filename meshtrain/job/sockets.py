"""Calls and sockets with a time limit, and the addresses at which hosts reach each other."""

import errno
import ipaddress
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from meshtrain.job.threads import start_thread

T = TypeVar("T")

CONNECT_S = 4.0  # for one attempt to connect
LOOK_UP_S = 5.0  # for a name to be resolved
# open or closed, a host that is up answers on one of them, unless a firewall drops all
OTHER_PORTS = (22, 111, 9)


def call_with_timeout(seconds: float, call: Callable[..., T], *arguments: Any) -> T:
    """Returns or raises what the call does. Raises TimeoutError: it takes longer, and is left
    running in its thread."""
    return in_thread(call, *arguments).result(seconds)


def in_thread(call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Runs a call in a thread of its own, which does not delay the exit of the process. Raises
    NoThreadError."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    start_thread(run, name=getattr(call, "__name__", "call"))
    return future


def connect(addresses: Sequence[str], port: int, seconds: float) -> socket.socket:
    """A connection to the first of the addresses that accepts one. Raises the OSError of the last
    one tried."""
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
    """Whether a host answers on any of a few ports; a refusal counts as an answer."""
    for port in OTHER_PORTS:
        # A refusal comes from the host itself; silence may be a firewall's, or that of a dead host.
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
        rows = call_with_timeout(
            seconds, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        )
    except (OSError, UnicodeError):  # TimeoutError is an OSError too
        return ()
    addresses = [plain_address(str(address[0])) for *_, address in rows]
    return tuple(dict.fromkeys(addresses))


def address_towards(other: str) -> str:
    """This host's address on the route to another one, given by name or address; empty where there
    is no route."""
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
    """An address without the IPv4-mapped prefix of dual-stack sockets (`::ffff:10.0.0.1`) and
    without an IPv6 scope."""
    return address.removeprefix("::ffff:").partition("%")[0]


def listen(port: int) -> socket.socket:
    """A listening socket on all interfaces, dual-stack where there is IPv6. Port 0: any free one.
    Raises OSError."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
    except OSError as error:
        # built with IPv6, and run where there is none
        if error.errno not in (
            errno.EAFNOSUPPORT,
            errno.EADDRNOTAVAIL,
        ):
            raise
    return socket.create_server(("", port), backlog=1024)
