"""A file that cannot be read now, or not by every host, is not damaged: no checkpoint is set aside for it."""

import errno
import json
import os
import resource
import socket
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshtrain.run.results
import meshtrain.run.step_logger
from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint import resume
from meshtrain.checkpoint import shard_file as opened
from meshtrain.checkpoint import shard_file as shards
from meshtrain.checkpoint.directory import complete_steps
from meshtrain.checkpoint.verify import verify
from meshtrain.cli.checkpoint import _about
from meshtrain.cli.main import main
from meshtrain.data import fingerprint as files
from meshtrain.errors import MissingError, UnreadableError
from meshtrain.job import storage
from tests.checkpoint.going_on import Case, alone, small_run
from tests.launching import forked

NUMBERS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshtrain.run.step_logger, "sample_flops", lambda *_: (None, "FLOPs are not counted"))
    monkeypatch.setattr(meshtrain.run.step_logger, "peak_flops", lambda *_: (1.0, "a peak of 1 FLOP/s"))
    monkeypatch.setattr(meshtrain.run.results, "plot_loss", lambda *_: "no picture is drawn")


@pytest.fixture
def go(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Goes on with a run of 4 steps that has checkpoints of steps 2 and 4."""
    config = str(small_run(tmp_path))
    options = (f"train.output={tmp_path}/run", "data.workers=0", "checkpoint.every=2")
    assert alone(Case(config, (*options, "train.steps=4"))) == {"status": 0}
    return lambda: alone(Case(config, (*options, "train.steps=5")))


class Failing:
    """In place of a function of `os`: fails so often for one path."""

    def __init__(self, plain: Callable[..., Any], end: str, number: int, times: int) -> None:
        self.plain, self.end, self.number, self.left = plain, end, number, times

    def __call__(self, path: Any, *rest: Any, **more: Any) -> Any:
        if self.left > 0 and str(path).endswith(self.end):
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number), str(path))
        return self.plain(path, *rest, **more)


@pytest.mark.parametrize("number", [*NUMBERS, errno.ENOENT], ids=os.strerror)
def test_a_read_that_fails_for_a_while_is_tried_again(
    go: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    failing = Failing(os.open, "step_0000004/rank_00000.safetensors", number, 2)
    monkeypatch.setattr(shards.os, "open", failing)
    assert go() == {"status": 0}
    assert failing.left == 0, "it was met"
    assert complete_steps(tmp_path / "run/checkpoints") == [2, 4, 5]
    assert not list((tmp_path / "run/checkpoints").glob("*.aside-*"))


@pytest.mark.parametrize(
    ("function", "end"),
    [("open", "step_0000004/rank_00000.safetensors"), ("open", "manifest.json"), ("lstat", "step_0000004/COMPLETE")],
)
def test_a_read_that_keeps_failing_ends_the_job_and_sets_nothing_aside(
    go: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, end: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, function, Failing(getattr(os, function), end, errno.ESTALE, 1000))
        result = go()
    assert result["status"] == 1
    where = tmp_path / "run/checkpoints/step_0000004" / Path(end).name
    assert f"host here cannot read {where}: Stale file handle" in result["error"]
    assert complete_steps(tmp_path / "run/checkpoints") == [2, 4]
    assert go() == {"status": 0}
    assert complete_steps(tmp_path / "run/checkpoints") == [2, 4, 5]


def test_data_that_cannot_be_sampled_is_read_again_and_then_ends_the_job(
    go: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user has given is not to blame."""
    for times, status in ((2, 0), (1000, 1)):
        failing = Failing(open, "tokens.bin", errno.EIO, times)
        monkeypatch.setattr(files, "open", failing, raising=False)
        result = go()
        assert result["status"] == status, result
        assert failing.left < times, "it was met"
    assert "opening the data: host here cannot read " in result["error"]
    assert result["error"].endswith("tokens.bin: Input/output error")


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    go: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "scandir", Failing(os.scandir, "/checkpoints", errno.EIO, 1000))
        result = go()
    assert result["status"] == 1
    assert f"cannot read {tmp_path}/run/checkpoints: Input/output error" in result["error"]


def test_setting_aside_that_fails_is_a_sentence(
    go: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run/checkpoints/step_0000004/rank_00000.safetensors").write_bytes(b"")

    def refused(path: Path) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(resume, "set_aside", refused)
    result = go()
    assert result["status"] == 1
    assert result["error"].startswith("setting later checkpoints aside: host here: [Errno 13] Permission denied")


def test_commands_do_not_take_it_for_damage(
    go: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = tmp_path / "run/checkpoints/step_0000004"
    monkeypatch.setattr(shards.os, "open", Failing(os.open, "rank_00000.safetensors", errno.EIO, 1000))
    (problem,) = verify(checkpoint)
    assert str(problem) == "rank_00000.safetensors: cannot be read (Input/output error)"
    assert _about(checkpoint)["problem"] == "rank_00000.safetensors cannot be read (Input/output error)"
    assert main(["checkpoint", "prune", str(tmp_path / "run"), "--keep-last", "1"]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert complete_steps(tmp_path / "run/checkpoints") == [2, 4]


@pytest.mark.parametrize(("limit", "most"), [(10, 5), (100, 50), (resource.RLIM_INFINITY, 1024)])
def test_as_many_files_stay_open_as_the_limit_allows_by_then(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    """A job raises its soft limit when it starts, long after modules were imported."""
    monkeypatch.setattr(opened, "Shard", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    manifest: Any = SimpleNamespace(files=defaultdict(str))
    with opened.ShardReader(Path("/a"), manifest) as files:
        for rank in range(1100):
            files._shard(rank)
        assert len(files._open) == most


def test_patience_has_an_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tried: list[int] = []

    def read() -> None:
        tried.append(1)
        raise OSError(errno.EIO, "Input/output error", "/a")

    with pytest.raises(UnreadableError, match="cannot read /a: Input/output error"):
        storage.with_retries(read)
    assert len(tried) == 3
    assert capsys.readouterr().err.count(f"warning: on host {socket.gethostname()}: [Errno 5]") == 2

    def missing() -> None:
        tried.append(1)
        raise MissingError(Path("/a"))

    with pytest.raises(MissingError):
        storage.with_retries(missing)
    assert len(tried) == 4, "that alone is no failure"
    with pytest.raises(MissingError):
        storage.with_retries(missing, MissingError)
    assert len(tried) == 7


def test_what_one_host_alone_finds_damaged_is_not(tmp_path: Path) -> None:
    """Two ranks, each on a host of its own: see reading_cases.py."""
    config = small_run(tmp_path)
    job = forked(2, "tests/checkpoint/reading_cases.py", str(config), str(tmp_path)).check()
    first, *results = json.loads((tmp_path / "results.json").read_text())
    assert first == {"status": 0}, job.err
    for rank, how, times, result, names in results:
        case = f"rank {rank}, {how}, {times} times: {result}"
        assert not any("aside" in name for name in names), case
        if times == 1:
            assert result == {"status": 0}, case
            continue
        assert result["status"] == 1, case
        assert f"host n{rank} cannot read " in result["error"], case
        assert "step_0000004" in result["error"], case
