"""A file that cannot be read now, or not by every host, is not damaged (what a run does then:
test_faults.py)."""

import errno
import os
import resource
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.checkpoint import shard_file
from meshtrain.checkpoint.manifest import file_of
from meshtrain.checkpoint.shard_file import ShardReader
from meshtrain.errors import MissingError, UnreadableError
from meshtrain.job import storage
from meshtrain.job.process import Job
from tests.checkpoint.faults import NEWER, SHARD, Run, failing
from tests.checkpoint.going_on import Case, run_case


def test_commands_do_not_take_it_for_damage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(run, monkeypatch, "os.open", "EIO", SHARD)
    problem = f"{SHARD}: cannot be read (Input/output error)"
    assert problem in run.command("checkpoint", "verify", run.newest, status=1)
    assert problem.replace(":", "") in run.command("checkpoint", "ls", run.folder)
    assert "cannot read" in run.command(
        "checkpoint", "prune", run.folder, "--keep-last", 1, status=2
    )
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
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    retried: tuple,
    raised: type[Exception],
    attempts: int,
) -> None:
    tried: list[bool] = []

    def read() -> None:
        tried.append(True)
        raise error

    with pytest.raises(raised):
        storage.with_retries(read, *retried)
    assert len(tried) == attempts
    assert capsys.readouterr().err.count("tried again") == attempts - 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("rank", "error", "file", "times"),
    [
        (0, "ESTALE", file_of(0), 99),
        (0, "ENOENT", file_of(0), 99),
        (0, "other bits", file_of(0), 99),
        (1, "ESTALE", file_of(1), 1),
        (1, "ESTALE", file_of(1), 99),
        (1, "ENOENT", file_of(1), 1),
        (1, "ENOENT", file_of(1), 99),
        (1, "EIO", "manifest.json", 99),
        (1, "other bits", file_of(1), 99),
    ],
)
def test_what_one_host_alone_finds_damaged_is_not(
    hosts: Job,
    small: Path,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    error: str,
    file: str,
    times: int,
) -> None:
    """It reads once more; then the run ends and names it. Nothing is set aside."""
    options = (
        f"train.output={shared_path}/run",
        "data.workers=0",
        "checkpoint.every=2",
        "layout={dp_shard: 2}",
    )
    assert run_case(Case(str(small), (*options, "train.steps=4")), hosts) == {"status": 0}
    if hosts.rank == rank and error == "other bits":
        misread(monkeypatch)
    elif hosts.rank == rank:
        failing(None, monkeypatch, "os.open", error, f"{NEWER}/{file}", times)
    result = run_case(Case(str(small), (*options, "train.steps=5")), hosts)
    assert not list((shared_path / "run/checkpoints").glob("*aside*"))
    if times == 1:
        assert result == {"status": 0}
        return
    assert result["status"] == 1
    assert f"host n{rank} cannot read " in result["error"]
    assert NEWER in result["error"]


def misread(patch: pytest.MonkeyPatch) -> None:
    plain = os.preadv

    def read(descriptor: int, buffers: list[memoryview], at: int) -> int:
        count = plain(descriptor, buffers, at)
        if NEWER in os.readlink(f"/proc/self/fd/{descriptor}") and at > 4096:
            buffers[0][0] ^= 1
        return count

    patch.setattr(os, "preadv", read)
