"""Is any other port open between the hosts: torchrun, gloo and NCCL choose ports at random for their connections."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from meshtrain.operate.doctor.dial import connect, how_it_failed
from meshtrain.operate.doctor.record import Reach
from meshtrain.operate.doctor.wire import GoneError, Line, StrangerError, listen

TRY_S = 3.0
AT_ONCE = 64
ALL_PAIRS = 64  # hosts up to which each tries every other one


class Door:
    """A random port that is open while the others try it; it tells whoever comes which node's it is."""

    def __init__(self, name: str) -> None:
        self._socket = listen(0)
        self.port: int = self._socket.getsockname()[1]
        self._name = name
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed: the end
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(GoneError):
                    Line(connection).send({"door": self._name})

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(TRY_S)


def whom_to_try(node: int, nodes: int) -> list[int]:
    """The nodes that a node tries: all others, or of many those at distances of powers of two (O(n log n) in all)."""
    if nodes <= ALL_PAIRS:
        return [other for other in range(nodes) if other != node]
    distances = (2**i for i in range(nodes.bit_length()) if 2**i < nodes)
    return list(dict.fromkeys((node + distance) % nodes for distance in distances))


def try_ports(source: int, targets: Sequence[tuple[int, str, int, str]]) -> tuple[Reach, ...]:
    """Tries (node, address, port, the name that its door tells), many at once."""
    if not targets:
        return ()
    with ThreadPoolExecutor(min(len(targets), AT_ONCE)) as pool:
        return tuple(pool.map(lambda target: _try(source, *target), targets))


def _try(source: int, target: int, address: str, port: int, name: str) -> Reach:
    def reach(how: str) -> Reach:
        return Reach(source, target, address, port, how)

    try:
        line = Line(connect([address], port, TRY_S))
    except OSError as error:
        return reach(how_it_failed(error))
    try:
        found = line.receive(time.monotonic() + TRY_S).get("door")
    except TimeoutError:
        return reach("mute")
    except (GoneError, StrangerError):
        return reach("another")
    finally:
        line.close()
    return reach("open" if found == name else f"another: {json.dumps(found)[:60]}")
