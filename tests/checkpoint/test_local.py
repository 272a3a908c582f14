"""Checkpoints on the hosts' own disks: a run goes on from the newest that is whole over all of
them, or is shared."""

import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import meshtrain.train
from meshtrain.checkpoint.directory import name_of
from meshtrain.checkpoint.local import LocalDisk
from meshtrain.checkpoint.resume import Resume
from meshtrain.checkpoint.state import State
from meshtrain.job.process import Job
from tests.checkpoint.by_hand import flip
from tests.checkpoint.faults import failing
from tests.checkpoint.going_on import Case, run_case
from tests.checkpoint.kill import rows

STARTS = yaml.safe_load(Path(__file__).with_name("local_starts.yaml").read_text())


@dataclass(frozen=True)
class Start:
    """A row of local_starts.yaml."""

    goes_on_from: int = 0
    local_only: bool = False
    says: Sequence[str] = ()
    fails_at: int = 0
    refused: Sequence[int] = ()
    own_full: bool = False
    harm: Sequence[tuple[str, str]] = ()


def damage(how: str, path: Path) -> None:
    if how == "delete" and path.is_dir():
        shutil.rmtree(path)
    elif how == "delete":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 9)
    else:
        flip(path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", STARTS)
def test_a_run_goes_on_from_what_is_whole(
    name: str, hosts: Job, small: Path, shared_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Full disks, a lost one, changed and cut files: no more is lost than the steps since the
    newest whole one."""
    options = ("train.steps=20", "data.workers=0", "checkpoint.every=2", "layout={dp_replicate: 2}")
    whole = Case(str(small), (*options, f"train.output={shared_path}/whole"))
    assert run_case(whole, hosts) == {"status": 0}

    own_disk = shared_path / f"disk_{hosts.rank}"
    monkeypatch.setattr(
        meshtrain.train, "LocalDisk", lambda root, *rest: LocalDisk(own_disk, *rest)
    )
    restore = Resume.restore
    begun: list[tuple[int, bool]] = []

    def restored(resume: Resume, state: State) -> None:
        restore(resume, state)
        begun.append((resume.step, resume._chosen is not None and resume._chosen.local_only))

    monkeypatch.setattr(Resume, "restore", restored)
    options += (f"train.output={shared_path}/{name}", "checkpoint.local=anywhere")
    if name == "stored":
        options += (f"checkpoint.upload=file://{shared_path}/store",)
    if name == "branch":
        options += (f"checkpoint.resume={shared_path}/whole/checkpoints/{name_of(16)}",)
    for start in [Start(**row) for row in STARTS[name]]:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            if hosts.rank == 1:
                for step in start.refused:
                    failing(
                        None,
                        patch,
                        "meshtrain.checkpoint.commit.write_shard",
                        "ENOSPC",
                        name_of(step),
                    )
                if start.own_full:
                    failing(None, patch, "meshtrain.checkpoint.local.write_shard", "ENOSPC")
            interrupt = "end" if start.fails_at else None
            result = run_case(
                Case(str(small), options, interrupt, start.fails_at, hosts.rank), hosts
            )
        for thread in threading.enumerate():
            if thread.name == "upload":
                thread.join()
        assert result["status"] == (1 if start.fails_at else 0), result
        assert begun[-1] == (start.goes_on_from, start.local_only)
        printed = "".join(hosts.gather("reading", "".join(capsys.readouterr())))
        for text in start.says:
            assert text in printed
        if hosts.rank == 0:
            for how, pattern in start.harm:
                (path,) = shared_path.glob(pattern)
                damage(how, path)
        hosts.gather("going on", None)

    expected = rows(shared_path / "whole")
    assert rows(shared_path / name) == expected[16 if name == "branch" else 0 :], (
        "no step was lost or mixed"
    )
    (disk,) = shared_path.glob("disk_0/*/rank_00000")
    assert sorted(path.name for path in disk.iterdir()) == [name_of(18), name_of(20)]
