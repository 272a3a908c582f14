"""Reaching another host: names to addresses, a connection, and in one word why there is none."""

import errno
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from meshtrain.operate.doctor.limited import within
from meshtrain.operate.doctor.wire import STORE_PING

CONNECT_S = 4.0  # for one attempt to connect
LOOK_UP_S = 5.0  # for a name to be resolved
OTHER_PORTS = (22, 111, 9)  # closed or open, a host that is up answers on one of them, unless everything is dropped


def is_store(addresses: Sequence[str], port: int) -> bool:
    """Whether it is torch's store that listens there: it waits in silence for a query that it knows."""
    try:
        with connect(addresses, port, CONNECT_S) as connection:
            connection.sendall(STORE_PING)
            return connection.recv(4) == STORE_PING[-4:]
    except OSError:
        return False


def connect(addresses: Sequence[str], port: int, seconds: float) -> socket.socket:
    """A connection to the first of the addresses that takes one. Raises the OSError of the last."""
    last: OSError = OSError(errno.EDESTADDRREQ, "no address")
    for address in addresses[:4]:
        try:
            return socket.create_connection((address, port), timeout=seconds)
        except OSError as error:
            last = error
    raise last


def how_it_failed(error: OSError) -> str:
    """A failure to connect in one word."""
    if isinstance(error, TimeoutError):
        return "silent"
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    return "unreachable"  # no route, no such host in the network, a policy that forbids it


def answers(address: str) -> bool:
    """Whether a host is there at all: an answer on any of a few ports, a refusal too."""

    def one(port: int) -> bool:
        try:
            connect([address], port, 1.5).close()
        except OSError as error:
            return how_it_failed(error) == "refused"
        return True

    with ThreadPoolExecutor(len(OTHER_PORTS)) as pool:
        return any(pool.map(one, OTHER_PORTS))


def resolve(name: str, seconds: float = LOOK_UP_S) -> tuple[str, ...]:
    """The addresses of a name, as this host resolves it; none if it does not, or not in time."""
    try:
        found = within(seconds, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # TimeoutError is an OSError too
        return ()
    return tuple(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found))
