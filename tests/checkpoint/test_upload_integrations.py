"""Uploads to a real S3 server (moto's) by s3fs, and to a real GCS server (gcp-storage-emulator's) by
gcsfs. `make test-integrations`."""

import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from meshtrain.checkpoint.directory import name_of
from meshtrain.checkpoint.retention import Retention
from meshtrain.checkpoint.upload import Uploads
from meshtrain.checkpoint.verify import verify
from meshtrain.job import object_storage
from tests.checkpoint.conftest import Train
from tests.checkpoint.faults import SHARD, Run
from tests.object_servers import SERVERS, Server, s3_server

pytestmark = pytest.mark.integrations
URL = "s3://bucket/prefix"


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with SERVERS[request.param](monkeypatch) as server:
        yield server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """For tests that set how s3fs tries again."""
    with s3_server(monkeypatch) as server:
        yield server


def test_a_run_goes_on_from_storage(server: Server, train: Train, fresh: Run) -> None:
    """Its folder is lost, and of the newest checkpoint in the bucket a file was exchanged."""
    url = f"{server.scheme}://bucket/prefix"
    train("run", url=url, interrupt="end", at=7, status=1)
    uploads = Uploads(url, Retention())
    assert uploads.steps() == [2, 4, 6]
    server.put(f"prefix/{name_of(6)}/{SHARD}", b"something else")
    shutil.rmtree(fresh.checkpoints)
    printed = train("run", url=url)
    assert f"{url}/step_0000006 is passed over" in printed
    assert f"step_0000004 was brought from {url}" in printed
    assert fresh.rows() == fresh.undisturbed()
    assert uploads.steps() == [4, 6, 8]
    assert verify(uploads.fetch(8, fresh.place / "back")) == []


def test_a_bucket_that_is_not_there_costs_lines(server: Server, train: Train, fresh: Run) -> None:
    url = f"{server.scheme}://another/prefix"
    printed = train("run", url=url)
    assert f"warning: the upload to {url} failed: FileNotFoundError" in printed
    assert not verify(fresh.checkpoints / name_of(8))


class Refusing(BaseHTTPRequestHandler):
    """Hands requests on to a server, but for those that write as long as it refuses."""

    # so that it answers `Expect: 100-continue`, which clients wait for
    protocol_version = "HTTP/1.1"
    behind = ""  # the address of the server
    how: int | None = (
        # the status with which it refuses; 0: it does not answer; 100: it never lets a client go on
        None
    )
    refused = 0

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if Refusing.how is not None and self.command in ("PUT", "POST"):
            Refusing.refused += 1
            if Refusing.how == 0:
                time.sleep(3)  # longer than the client waits
            self._answer(Refusing.how or 503, [], b"")
            return
        connection = HTTPConnection(Refusing.behind, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        self._answer(answer.status, answer.getheaders(), answer.read())
        connection.close()

    def handle_expect_100(self) -> bool:
        if Refusing.how != 100:
            return super().handle_expect_100()
        Refusing.refused += 1
        while Refusing.how == 100:
            time.sleep(0.1)
        return False

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        with suppress(OSError):  # the client has gone
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in (
                    "content-length",
                    "transfer-encoding",
                    "connection",
                    "date",
                    "server",
                ):
                    self.send_header(name, value)
            length = {name.lower(): value for name, value in headers}.get("content-length")
            self.send_header(
                "Content-Length", length if self.command == "HEAD" and length else str(len(body))
            )
            self.end_headers()
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing(s3: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Refusing]]:
    """Between the run and the server; the client is impatient."""
    fsspec = pytest.importorskip("fsspec.config")
    how = {"read_timeout": 1, "connect_timeout": 1, "retries": {"total_max_attempts": 1}}
    monkeypatch.setitem(fsspec.conf, "s3", {"config_kwargs": how})
    monkeypatch.setattr(Refusing, "behind", s3.address.removeprefix("http://"))
    monkeypatch.setattr(Refusing, "how", None)
    monkeypatch.setattr(Refusing, "refused", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield Refusing
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("how", [403, 500, 0, 100])
def test_a_server_that_refuses_or_does_not_answer(
    how: int, refusing: type[Refusing], train: Train, fresh: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is as without it, one line says so, and when the server is well again all comes with
    the next."""
    import s3fs.core

    monkeypatch.setattr(s3fs.core.S3FileSystem, "retries", 1)
    for limit in ("ANSWER_S", "SILENCE_S"):
        monkeypatch.setattr(object_storage, limit, 5.0)  # of 100 the client waits for ever
    url = f"{URL}_{how}"
    refusing.how = how
    printed = train("run", url=url)
    assert refusing.refused >= 1
    assert printed.count(f"warning: the upload to {url} failed") == 1, printed
    assert printed.count(f"warning: {url} lacks checkpoints of this run") == 1, printed
    assert fresh.steps()[-3:] == [4, 6, 8], "one more where it was being read"
    uploads = Uploads(url, Retention())
    for _ in range(2):
        before = refusing.refused
        uploads.offer(fresh.checkpoints)
        assert uploads.wait()
        assert refusing.refused > before, "it was not tried again"
    assert [f"the upload to {url} failed" in note for note in uploads.notes] == [True]
    assert uploads.steps() == []
    refusing.how = None
    assert not re.search(f"warning: .*{url}", train("run", url=url, steps=10))
    uploads = Uploads(url, Retention())
    assert uploads.steps() == [6, 8, 10]
    assert verify(uploads.fetch(10, fresh.place / "back")) == []


@pytest.mark.usefixtures("s3")
def test_a_server_that_is_gone(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint of its own a run would begin anew, which nobody wants."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    refused = train("run", url="s3://elsewhere/prefix", status=2)
    assert "s3://elsewhere/prefix cannot be asked for checkpoints" in refused
