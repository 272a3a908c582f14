"""A file that cannot be read now, or not by every host, is not damaged (what a run does then: test_faults.py)."""

import errno
import json
import resource
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.checkpoint import shard_file
from meshtrain.checkpoint.shard_file import ShardReader
from meshtrain.errors import MissingError, UnreadableError
from meshtrain.job import storage
from tests.checkpoint.faults import SHARD, Run, failing
from tests.checkpoint.going_on import small_run
from tests.launching import forked


def test_commands_do_not_take_it_for_damage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(run, monkeypatch, "os.open", "EIO", SHARD)
    problem = f"{SHARD}: cannot be read (Input/output error)"
    assert problem in run.command("checkpoint", "verify", run.newest, status=1)
    assert problem.replace(":", "") in run.command("checkpoint", "ls", run.folder)
    assert "cannot read" in run.command("checkpoint", "prune", run.folder, "--keep-last", 1, status=2)
    assert run.steps() == [2, 4]


@pytest.mark.parametrize(("limit", "most"), [(10, 5), (100, 50), (resource.RLIM_INFINITY, 1024)])
def test_as_many_files_stay_open_as_the_limit_allows_by_then(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    """A job raises its soft limit when it starts, long after modules were imported."""
    monkeypatch.setattr(shard_file, "Shard", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    manifest: Any = SimpleNamespace(files=defaultdict(str))
    with ShardReader(Path("/a"), manifest) as reader:
        for rank in range(1100):
            reader._shard(rank)
        assert len(reader._open) == most


@pytest.mark.parametrize(
    ("error", "retried", "raised", "attempts"),
    [
        (OSError(errno.EIO, "Input/output error", "/a"), (), UnreadableError, 3),
        (MissingError(Path("/a")), (), MissingError, 1),  # that alone is no failure
        (MissingError(Path("/a")), (MissingError,), MissingError, 3),
    ],
)
def test_patience_has_an_end(
    capsys: pytest.CaptureFixture[str], error: Exception, retried: tuple, raised: type[Exception], attempts: int
) -> None:
    tried: list[bool] = []

    def read() -> None:
        tried.append(True)
        raise error

    with pytest.raises(raised):
        storage.with_retries(read, *retried)
    assert len(tried) == attempts
    assert capsys.readouterr().err.count("tried again") == attempts - 1


def test_what_one_host_alone_finds_damaged_is_not(tmp_path: Path) -> None:
    """Two ranks, each on a host of its own: see reading_cases.py."""
    config = small_run(tmp_path)
    job = forked(2, "tests/checkpoint/reading_cases.py", str(config), str(tmp_path)).check()
    first, *results = json.loads((tmp_path / "results.json").read_text())
    assert first == {"status": 0}, job.err
    for rank, fault, times, result, names in results:
        case = f"rank {rank}, {fault}, {times} times: {result}"
        assert not any("aside" in name for name in names), case
        if times == 1:
            assert result == {"status": 0}, case
            continue
        assert result["status"] == 1, case
        assert f"host n{rank} cannot read " in result["error"], case
        assert "step_0000004" in result["error"], case
