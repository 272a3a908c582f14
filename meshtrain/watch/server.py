"""The server of the page: a few fixed addresses, read-only, for this host alone unless it is asked
for more."""

import gzip
import json
import socket
import sys
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from meshtrain.watch.run_files import RunFiles

PAGE = {
    "/": ("index.html", "text/html"),
    "/watch.css": ("watch.css", "text/css"),
    "/watch.js": ("watch.js", "text/javascript"),
    "/watch.svg": ("watch.svg", "image/svg+xml"),
}
POINTS = 600  # of a curve
LOCAL = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class PageServer(ThreadingHTTPServer):
    """Serves the page at `url`, and of run number i what it shows at /runs/i. OSError: the address
    is taken."""

    daemon_threads = True
    address_family = socket.AF_INET

    def __init__(self, address: tuple[str, int], runs: Sequence[RunFiles]) -> None:
        self.runs = runs
        self.lock = Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # a page that was closed while it was answered
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        if ":" in host:  # IPv6
            host = f"[{host}]"
        return f"http://{host}:{self.server_port}/"

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Media type and content; None: there is no such page."""
        if path in PAGE:
            name, kind = PAGE[path]
            page = files("meshtrain.watch").joinpath("page", name)
            return f"{kind}; charset=utf-8", page.read_bytes()
        if path == "/runs":
            return _json([run.name for run in self.runs])
        for number, run in enumerate(self.runs):
            if path == f"/runs/{number}":
                with self.lock:  # each request reads on in the run's files
                    return _json(run.page_data(POINTS))
        return None


def _json(content: Any) -> tuple[str, bytes]:
    return "application/json", json.dumps(content, allow_nan=False, default=str).encode()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    # seconds after which a connection that asks nothing is closed: each has a thread
    timeout = 60.0

    def do_GET(self) -> None:
        # A page of another site, whose name was made to lead here, is not this host's.
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            path = urlsplit(self.path).path
        except ValueError:
            return self._send(HTTPStatus.BAD_REQUEST, "text/plain", b"this is no address\n")
        if self.server.server_address[0] in LOCAL and host not in LOCAL:
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"open it as http://localhost\n")
        answer = self.server.answer(path)
        if answer is None:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n")
        return self._send(HTTPStatus.OK, *answer)

    do_HEAD = do_GET  # noqa: N815

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        headers = {**HEADERS, "Content-Type": kind}
        if "gzip" in self.headers.get("Accept-Encoding", ""):  # it may go over a slow ssh
            headers["Content-Encoding"] = "gzip"
            content = gzip.compress(content, 1)
        headers["Content-Length"] = str(len(content))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # a line for each request every two seconds tells nobody anything
