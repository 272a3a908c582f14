"""Who else runs a doctor nearby, and where it goes: nodes that were given different endpoints never meet at one.

While a node waits it calls out, once every second or two, to the networks that it is in and to the endpoint's host: a
datagram with its name and where it is going. Whoever runs a doctor hears it. Routers do not pass such calls on, so what
is heard is a help where it comes, and nothing is concluded from silence.
"""

import contextlib
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from meshtrain.operate.doctor.limited import within
from meshtrain.operate.doctor.record import Heard, Interface, Place, RecordError, from_json, to_json
from meshtrain.operate.doctor.wire import plain_address

PORT = 29389  # of no known service, below torchrun's own
EVERY_S = 1.0
MOST_BYTES = 4096
MOST_HEARD = 64


class Beacon:
    """Calls and listens while the context lasts. `heard` is who else did."""

    def __init__(self, host: str, place: Place, interfaces: Sequence[Interface]) -> None:
        self.heard: list[Heard] = []
        self._message = json.dumps(to_json(Heard(host, "", place))).encode()
        self._place = place
        self._networks = broadcast_addresses(interfaces)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Beacon":
        self._thread.start()
        return self

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._over.set()
        self._thread.join(EVERY_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:  # no IPv4: no help
            ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # several agents of one host
            ear.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            ear.bind(("", PORT))
            ear.settimeout(0.2)
            targets = [*self._networks, *self._endpoint()]
            said = 0.0
            while not self._over.is_set():
                if time.monotonic() - said > EVERY_S:
                    said = time.monotonic()
                    for address in targets:
                        with contextlib.suppress(OSError):  # a network that is down
                            ear.sendto(self._message, (address, PORT))
                self._listen(ear)

    def _endpoint(self) -> list[str]:
        try:
            found = within(2.0, socket.gethostbyname, self._place.address)
        except (OSError, UnicodeError):
            return []
        return [] if ipaddress.ip_address(found).is_loopback else [found]

    def _listen(self, ear: socket.socket) -> None:
        try:
            data, sender = ear.recvfrom(MOST_BYTES)
            one = from_json(Heard, json.loads(data))
        except (OSError, ValueError, RecursionError, RecordError):  # nobody, or no doctor
            return
        known = any((one.host, one.place) == (other.host, other.place) for other in self.heard)
        if data != self._message and not known and len(self.heard) < MOST_HEARD:
            self.heard.append(Heard(one.host, plain_address(sender[0]), one.place))


def broadcast_addresses(interfaces: Sequence[Interface]) -> list[str]:
    """The addresses at which everybody in the networks of these interfaces listens."""
    nets = [
        ipaddress.ip_interface(address).network
        for one in interfaces
        if one.up
        for address in one.addresses
        if ":" not in address
    ]
    return [str(net.broadcast_address) for net in nets if not net.is_loopback and net.prefixlen < 31]
