"""The page's server: what it answers, and what it refuses."""

import gzip
import http.client
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from meshtrain.cli import main as cli
from meshtrain.watch.run_files import RunFiles
from meshtrain.watch.server import PAGE, PageServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    (tmp_path / "a" / "config.yaml").write_text("secret: 1\n")
    with PageServer(("127.0.0.1", 0), [RunFiles(tmp_path / name) for name in "ab"]) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: PageServer, path: str, method: str = "GET", host: str = "localhost"
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    assert "unsafe" not in answer.headers.get("Content-Security-Policy", "")
    content = answer.read()
    connection.close()
    return answer.status, content


def test_the_page_and_the_runs(server: PageServer) -> None:
    for path in PAGE:
        status, content = ask(server, path)
        assert status == 200
        assert len(content) > 100
        # nothing from the network
        assert b"http://" not in content.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in content
    assert json.loads(ask(server, "/runs")[1]) == ["a", "b"]
    assert json.loads(ask(server, "/runs/1")[1])["columns"] == {"loss": [2.5]}


@pytest.mark.parametrize(
    "path",
    ["/runs/2", "/runs/-1", "/runs/0/config.yaml", "/config.yaml", "/../a/config.yaml", "/%2e%2e/etc/passwd",
     "//etc/passwd", "/watch.py", "/page/index.html"],
)  # fmt: skip
def test_no_other_path_is_served(server: PageServer, path: str) -> None:
    status, content = ask(server, path)
    assert status == 404
    assert b"secret" not in content
    assert ask(server, path, "POST")[0] == ask(server, "/runs", "DELETE")[0] == 501, (
        "it is read-only"
    )


def test_a_page_of_another_site_is_refused(server: PageServer) -> None:
    assert ask(server, "/runs/0", host="evil.example")[0] == 403
    assert ask(server, "/runs/0", host=f"127.0.0.1:{server.server_port}")[0] == 200
    assert ask(server, "/runs", method="HEAD") == (200, b"")
    assert ask(server, "/runs", host="[::1")[0] == 400


def test_what_cannot_be_served_is_told(
    tmp_path: Path, server: PageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["watch", str(tmp_path / "no")]) == 2
    assert "is no folder: name what train.output was" in capsys.readouterr().err
    for port in (str(server.server_port), "99999"):
        assert cli.main(["watch", str(tmp_path), "--port", port]) == 2
        assert f"cannot serve on 127.0.0.1:{port}" in capsys.readouterr().err


def test_it_is_sent_compressed_and_says_nothing_of_a_page_that_goes_away(
    server: PageServer, capfd: pytest.CaptureFixture[str]
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", "/runs", headers={"Accept-Encoding": "gzip, br"})
    answer = connection.getresponse()
    assert answer.headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(answer.read())) == ["a", "b"]
    connection.close()
    for error in (ConnectionResetError(), BrokenPipeError(), ValueError("wrong")):
        with suppress(OSError, ValueError):
            try:
                raise error
            finally:
                server.handle_error(None, ("127.0.0.1", 1))
    printed = capfd.readouterr().err
    assert printed.count("Traceback") == 1
    assert "ValueError: wrong" in printed


def test_runs_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    monkeypatch.setattr(
        PageServer, "serve_forever", lambda self: served.extend(run.name for run in self.runs)
    )
    folders = [tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "other"]
    for folder in folders:
        folder.mkdir(parents=True)
    assert cli.main(["watch", *map(str, folders), "--port", "0"]) == 0
    assert served == [str(folders[0]), str(folders[1]), "other"]
