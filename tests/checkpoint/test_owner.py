"""Where the lock of a folder does not hold between hosts, the job that had it stops when another one has taken it."""

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshtrain.run.results
import meshtrain.run.step_logger
import meshtrain.train
from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint.directory import TakenError, complete_steps, lock_folder
from meshtrain.checkpoint.save import Saver
from meshtrain.cli.main import main
from meshtrain.errors import InputError
from meshtrain.job import signals as stopping
from meshtrain.job.environment import TORCHRUN, read_environment
from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.metrics.logger import read
from tests.checkpoint.going_on import Case, alone, small_run
from tests.checkpoint.known import ABOUT, fill, on
from tests.checkpoint.known import alone as job_alone

OTHER = b"0123 process 7 on host b\n"


@pytest.fixture
def _no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host has locks of its own."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


def take(place: Path) -> None:
    """As a job on another host does."""
    (place / "other").write_bytes(OTHER)
    (place / "other").replace(place / folder.OWNER)


@pytest.mark.parametrize(
    "act",
    [
        lambda place: folder.begin(place, 2),
        lambda place: folder.finish(place, 1, ""),
        folder.clear_unfinished,
        lambda place: folder.remove(place / "step_0000001"),
        lambda place: folder.set_aside(place / "step_0000001"),
    ],
)
def test_nothing_is_touched_in_a_folder_that_another_job_has(tmp_path: Path, act: Callable[[Path], Any]) -> None:
    (tmp_path / "step_0000001").mkdir()
    (tmp_path / ".step_0000001.tmp").mkdir()
    with lock_folder(tmp_path):
        take(tmp_path)
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(TakenError, match=r"was taken by another job meanwhile \(process 7 on host b\)"):
            act(tmp_path)
        assert sorted(os.listdir(tmp_path)) == before
        (tmp_path / folder.OWNER).unlink()
        folder.check_owner()  # nobody has it by that
    take(tmp_path)
    folder.check_owner()  # it is not this process's any more


@pytest.mark.usefixtures("_no_lock")
def test_the_second_job_has_it(tmp_path: Path) -> None:
    first = lock_folder(tmp_path)
    first.__enter__()
    token = folder._OWNED[tmp_path]
    with lock_folder(tmp_path):
        folder.check_owner()
        folder._OWNED[tmp_path] = token  # as the first one's process has it
        assert str(folder.owner_changed()).startswith(
            f"the folder {tmp_path} was taken by another job meanwhile (process"
        )
    first.__exit__(None, None, None)
    assert folder.owner_changed() is None


@pytest.mark.usefixtures("_no_lock")
def test_a_job_that_lost_its_folder_and_is_started_again_does_not_take_it_back(tmp_path: Path) -> None:
    """torchrun starts the job that stopped again, and that would stop the other one, and so on."""
    with lock_folder(tmp_path, launch="a"):
        pass
    with lock_folder(tmp_path, launch="a", again=True):
        folder.check_owner()
    with lock_folder(tmp_path, launch="b"):
        token = (tmp_path / folder.OWNER).read_bytes()
        since = pytest.raises(TakenError, match=r"taken by another job since this one was first started \(process")
        with since, lock_folder(tmp_path, launch="a", again=True):
            pass
        assert (tmp_path / folder.OWNER).read_bytes() == token
    with lock_folder(tmp_path, launch="b", again=True), lock_folder(tmp_path, launch="c", again=True):
        pass  # it was lost before it had the folder: nobody has taken that from it
    with lock_folder(tmp_path, launch="a"):
        pass  # somebody has submitted it anew
    with lock_folder(tmp_path, launch="a", again=True):
        folder.check_owner()
    with lock_folder(tmp_path), pytest.raises(TakenError), lock_folder(tmp_path, launch="a", again=True):
        pass
    for i in range(20):
        with lock_folder(tmp_path, launch=f"{i}" + "\N{SNOWMAN}" * 500):
            folder.check_owner()
    with pytest.raises(TakenError), lock_folder(tmp_path, launch="18" + "\N{SNOWMAN}" * 500, again=True):
        pass


def test_the_launch_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = dict.fromkeys(TORCHRUN, "0")
    for variables, launch in (
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "7"),
        (torchrun | {"TORCHELASTIC_RUN_ID": "a b"}, "a b"),
        (torchrun | {"TORCHELASTIC_RUN_ID": "none"}, None),  # as torchrun has it without --standalone and --rdzv-id
        (torchrun | {"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "7"),
    ):
        assert read_environment(variables).launch == launch


def test_a_saver_stops_the_run(tmp_path: Path) -> None:
    state = on(job_alone(), {})
    fill(state)
    one = Saver(state, tmp_path, job_alone(), on_failure="continue")
    with lock_folder(tmp_path):
        one.save(1, ABOUT, wait=True)
        take(tmp_path)
        one.save(2, ABOUT, wait=True)
    assert "was taken by another job meanwhile" in str(one.wants_stop)
    assert complete_steps(tmp_path) == [1]
    one.close()


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(meshtrain.run.step_logger, "sample_flops", lambda *_: (None, "FLOPs are not counted"))
    monkeypatch.setattr(meshtrain.run.step_logger, "peak_flops", lambda *_: (1.0, "a peak of 1 FLOP/s"))
    monkeypatch.setattr(meshtrain.run.results, "plot_loss", lambda *_: "no picture is drawn")
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.0)
    config = str(small_run(tmp_path))
    return lambda *overrides: alone(Case(config, (f"train.output={tmp_path}/run", "data.workers=0", *overrides)))


def test_a_run_whose_folder_was_taken_ends_and_leaves_it_alone(
    go: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Within a step or two, and not with its next checkpoint: what it would write besides is the other job's."""
    begin = GoodputTracker.begin
    with monkeypatch.context() as patch:
        patch.setattr(GoodputTracker, "begin", lambda ledger: (take(tmp_path / "run"), begin(ledger))[1])
        result = go("train.steps=100", "checkpoint.every=50")
    assert result["status"] == 1
    assert f"the folder {tmp_path}/run was taken by another job meanwhile (process 7 on host b)" in result["error"]
    assert read(tmp_path / "run/metrics.jsonl")[-1]["step"] < 5
    assert not (tmp_path / "run/exit.json").exists()
    assert complete_steps(tmp_path / "run/checkpoints") == []
    assert "there is no exit.json, which would say {" in capsys.readouterr().err
    assert go("train.steps=4") == {"status": 0}
    assert json.loads((tmp_path / "run/exit.json").read_text())["status"] == "done"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with lock_folder(tmp_path):
        folder.check_owner()
        take(tmp_path)
        with pytest.raises(TakenError):
            folder.begin(tmp_path, 1)
    told = capsys.readouterr().err
    assert f"warning: the folder {tmp_path} cannot be locked ({os.strerror(number)})" in told


def test_another_failure_to_lock_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(InputError, match="cannot be locked"), lock_folder(tmp_path):
        pass


@pytest.mark.usefixtures("_no_lock")
def test_prune_takes_no_folder_from_a_job(go: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert go("checkpoint.every=2") == {"status": 0}
    place = tmp_path / "run/checkpoints"
    with lock_folder(place):
        assert main(["checkpoint", "prune", str(place), "--keep-last", "1"]) == 0
        folder.check_owner()
    assert complete_steps(place) == [8]
