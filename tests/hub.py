"""A server that speaks what huggingface_hub asks a hub for, with repositories of a test's own."""

import hashlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest


@dataclass
class Repo:
    """A repository: its commits, the last of which is that of `main`."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """A commit and its files; None: there is no such revision."""
        commit = list(self.commits)[-1] if revision == "main" else revision
        found = self.commits.get(commit)
        return None if found is None else (commit, found)


class Hub:
    """Repositories by their path, `org/name` or `datasets/org/name`, and what was asked for."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.asked: list[str] = []  # `GET /api/models/org/name/revision/main`
        self.is_down = False
        self.url = ""

    def push(self, path: str, files: Mapping[str, bytes | str], *, gated: bool = False) -> str:
        """A new commit of a repository."""
        content = {
            name: text.encode() if isinstance(text, str) else text for name, text in files.items()
        }
        repo = self.repos.setdefault(path, Repo())
        repo.gated = gated
        told_apart = f"{path} {len(repo.commits)} {sorted(content.items())}"
        commit = hashlib.sha1(told_apart.encode()).hexdigest()
        repo.commits[commit] = content
        return commit

    def push_folder(
        self, path: str, folder: Path, more: Mapping[str, bytes | str] | None = None
    ) -> str:
        files = {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }
        return self.push(path, {**files, **(more or {})})

    def fetched(self) -> list[str]:
        """The names of the files whose bytes were sent, in order."""
        return [
            line.rpartition("/")[2]
            for line in self.asked
            if line.startswith("GET ") and "/resolve/" in line
        ]

    def asks(self) -> list[str]:
        """What was asked of repositories as a whole."""
        kinds = ("GET /api/models/", "GET /api/datasets/")
        return [line for line in self.asked if line.startswith(kinds)]

    # What it answers ------------------------------------------------------------------------------

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        if self.is_down:
            return 503, {}, b"down"
        if path.startswith("/api/"):
            return self._about(path.removeprefix("/api/"))
        return self._file(path.removeprefix("/"))

    def _about(self, path: str) -> tuple[int, dict[str, str], bytes]:
        kind, _, rest = path.partition("/")
        prefix = "" if kind == "models" else f"{kind}/"
        words = rest.split("/")
        name, action = "/".join(words[:2]), words[2:]
        repo = self.repos.get(prefix + name)
        if repo is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revision = unquote(action[1]) if len(action) > 1 else "main"
        found = repo.files(revision)
        if found is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        commit, files = found
        if action[:1] == ["tree"]:
            entries = [self._entry(file, content) for file, content in files.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        if action[:1] == ["paths-info"]:
            entries = [self._entry(file, files[file]) for file in self.wanted if file in files]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        about = {
            "id": name,
            "sha": commit,
            "private": False,
            "downloads": 0,
            "tags": [],
            "siblings": [{"rfilename": file} for file in files],
        }
        return 200, {"Content-Type": "application/json"}, json.dumps(about).encode()

    wanted: tuple[str, ...] = ()  # of the last paths-info

    def _entry(self, file: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": file, "size": len(content), "oid": etag(content)}

    def _file(self, path: str) -> tuple[int, dict[str, str], bytes]:
        name, _, rest = path.partition("/resolve/")
        revision, _, file = rest.partition("/")
        repo = self.repos.get(name)
        if repo is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if repo.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        found = repo.files(unquote(revision))
        if found is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        commit, files = found
        headers = {"X-Repo-Commit": commit}
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", **headers}, b""
        return 200, {"ETag": f'"{etag(files[file])}"', **headers}, files[file]


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _send(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            status, headers, content = hub.answer(path)
            begin, end = self._range(len(content))
            is_part = status == 200 and (begin, end) != (0, len(content))
            self.send_response(206 if is_part else status)
            for key, value in headers.items():
                self.send_header(key, value)
            if is_part:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            if body:
                self.wfile.write(content[begin:end])

        def _range(self, size: int) -> tuple[int, int]:
            first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            return int(first or 0), min(int(last or size) + bool(last), size)

        def do_GET(self) -> None:
            self._send(body=True)

        def do_HEAD(self) -> None:
            self._send(body=False)

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            if sent.startswith("{"):
                hub.wanted = tuple(json.loads(sent).get("paths", ()))
            self._send(body=True)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def use(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets huggingface_hub of this process, and of those that it starts, ask this hub, with a cache
    of its own."""
    constants = pytest.importorskip("huggingface_hub.constants")
    from meshtrain.job.hub import ask

    ask.cache_clear()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    datasets = sys.modules.get("datasets.config")  # it has read the variables, if it is there
    if datasets is not None:
        monkeypatch.setattr(datasets, "HF_ENDPOINT", hub.url)
        monkeypatch.setattr(datasets, "HF_DATASETS_CACHE", home / "datasets")


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    from meshtrain.job.hub import ask

    ask.cache_clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
