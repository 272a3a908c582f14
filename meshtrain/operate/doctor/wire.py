"""JSON objects over a TCP connection, a line each, with limits of size and time; and who it is that speaks otherwise.

Nothing that comes over the network is executed or trusted: a line is parsed as JSON, and its fields are checked by
whoever asked for it. What is on the other end may be anything, so its first bytes are looked at.
"""

import errno
import json
import socket
import time
from typing import Any

MOST_BYTES = 4 * 2**20  # of one line: the facts of a few hundred hosts
SEND_S = 5.0  # a peer that does not read for so long has gone

# First bytes -> who sends such. torch's store opens with a query of type 0 and a magic number (TCPStore.cpp).
KNOWN = (
    (b"SSH-", "an SSH server"),
    (b"HTTP/", "a web server"),
    (b"GET ", "a web client, such as a browser or a health check"),
    (b"HEAD ", "a web client, such as a browser or a health check"),
    (b"POST ", "a web client"),
    (b"\x16\x03", "somebody who speaks TLS"),
    (b"\x00\xce\xf7\x85\x3c", "torch's store, that is a torchrun or a training: run the doctor in its place"),
    (b"\x00\x3c\x85\xf7\xce", "torch's store, that is a torchrun or a training: run the doctor in its place"),
)


# What torch's store answers with the last four bytes: that it is one. (A query to validate, then one of type PING.)
STORE_PING = b"\x00\xce\xf7\x85\x3c\x0dmesh"


class StrangerError(Exception):
    """Whoever is on the other end is no doctor; the text says who it seems to be."""


class GoneError(Exception):
    """The other end has closed the connection."""


def recognise(first: bytes) -> str:
    """Who begins to speak with these bytes, in words."""
    for start, who in KNOWN:
        if first.startswith(start):
            return who
    if not first:
        return "something that hangs up without a word, as torch's own store does (is a job running there?)"
    return f"something that says {first[:24]!r}"


class Line:
    """One connection. All times are of `time.monotonic`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def close(self) -> None:
        self.connection.close()

    @property
    def peer(self) -> str:
        """The other end's address."""
        return plain_address(self.connection.getpeername()[0])

    @property
    def own(self) -> str:
        """This end's address: that of the interface by which the route goes."""
        return plain_address(self.connection.getsockname()[0])

    def send(self, message: dict[str, Any]) -> None:
        """Raises GoneError if the other end is away, or does not read for `SEND_S` seconds."""
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self.connection.settimeout(SEND_S)
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise GoneError(str(error)) from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message.

        Raises:
            TimeoutError: none came before `deadline`. GoneError: the other end closed the connection.
            StrangerError: what came is no message.
        """
        while (message := self.take()) is None:
            self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
            self.read()
        return message

    def read(self) -> None:
        """Reads what is there, once."""
        try:
            data = self.connection.recv(65536)
        except TimeoutError:
            raise
        except OSError as error:
            raise GoneError(str(error)) from error
        if not data:
            raise (StrangerError(recognise(self._buffer)) if self._buffer else GoneError("it hung up"))
        self._buffer += data

    def take(self) -> dict[str, Any] | None:
        """A message that has come whole; None if there is none."""
        if self._buffer and not self._buffer.startswith(b"{"):
            # "SSH-" may come in pieces; a line that does not begin as an object will not become one.
            raise StrangerError(recognise(self._buffer))
        line, end, rest = self._buffer.partition(b"\n")
        if len(line) > MOST_BYTES:
            raise StrangerError(f"something that sends a line of more than {MOST_BYTES} bytes")
        if not end:
            return None
        self._buffer = rest
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise StrangerError(recognise(line)) from None
        if not isinstance(message, dict):
            raise StrangerError(recognise(line))
        return message


def plain_address(address: str) -> str:
    """`::ffff:10.0.0.1`, as a socket for both families has it, is 10.0.0.1; the scope of a link's address goes."""
    return address.removeprefix("::ffff:").partition("%")[0]


def listen(port: int, address: str = "") -> socket.socket:
    """A listening socket; on all interfaces and both families unless an address is given. Port 0: any.

    Raises:
        OSError: the port is taken, or may not be.
    """
    if address or not socket.has_dualstack_ipv6():
        return socket.create_server((address, port), backlog=512)
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # compiled with IPv6, and run where there is none
            return socket.create_server(("", port), backlog=512)
        raise
