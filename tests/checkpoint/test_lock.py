"""One job has a folder. Where its lock does not hold between hosts, the job that had it stops when
another takes it."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint import folder_lock
from meshtrain.checkpoint.folder_lock import TakenError, lock_folder
from meshtrain.errors import InputError
from meshtrain.job.environment import TORCHRUN, read_environment
from meshtrain.metrics.logger import read
from tests.checkpoint.faults import Run, failing, take, taken

# The lock -----------------------------------------------------------------------------------------


def test_one_process_has_a_folder(tmp_path: Path) -> None:
    place = tmp_path / "new"
    problem = f"new is in use by process {os.getpid()} on host"
    with lock_folder(place), pytest.raises(InputError, match=problem), lock_folder(place):
        pytest.fail("two have the folder")
    with lock_folder(place):
        pass


def test_a_process_that_is_killed_lets_go_though_its_child_lives_on(tmp_path: Path) -> None:
    code = (
        "import os, time\nfrom pathlib import Path\nfrom meshtrain.checkpoint.folder_lock import "
        "lock_folder\n"
        f"with lock_folder(Path({str(tmp_path)!r})):\n"
        "    if os.fork() == 0:\n"
        "        print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        try:
            with (
                pytest.raises(InputError, match=f"in use by process {other.pid}"),
                lock_folder(tmp_path),
            ):
                pytest.fail("two have the folder")
            other.kill()
            other.wait()
            with lock_folder(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("precious")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").symlink_to(tmp_path / "outside")
    with pytest.raises(InputError, match="cannot be used"), lock_folder(tmp_path / "a"):
        pass
    assert (tmp_path / "outside").read_text() == "precious"


# The owner ----------------------------------------------------------------------------------------


@pytest.fixture
def _no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host has locks of its own."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


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
def test_nothing_is_touched_in_a_folder_that_another_job_has(
    tmp_path: Path, act: Callable[[Path], Any]
) -> None:
    (tmp_path / "step_0000001").mkdir()
    (tmp_path / ".step_0000001.tmp").mkdir()
    with lock_folder(tmp_path):
        take(tmp_path)
        names = sorted(os.listdir(tmp_path))
        with pytest.raises(
            TakenError, match=r"was taken by another job meanwhile \(process 7 on host b\)"
        ):
            act(tmp_path)
        assert sorted(os.listdir(tmp_path)) == names
        (tmp_path / folder_lock.OWNER).unlink()
        folder_lock.check_owner()  # nobody has it by that
    take(tmp_path)
    folder_lock.check_owner()  # it is not this process's any more


@pytest.mark.usefixtures("_no_lock")
def test_the_second_job_has_it(tmp_path: Path) -> None:
    first = lock_folder(tmp_path)
    first.__enter__()
    token = folder_lock._OWNED[tmp_path]
    with lock_folder(tmp_path):
        folder_lock.check_owner()
        folder_lock._OWNED[tmp_path] = token  # as the first one's process has it
        assert f"the folder {tmp_path} was taken by another job meanwhile (process" in str(
            folder_lock.owner_changed()
        )
    first.__exit__(None, None, None)
    assert folder_lock.owner_changed() is None


@pytest.mark.usefixtures("_no_lock")
def test_a_job_that_lost_its_folder_and_is_started_again_does_not_take_it_back(
    tmp_path: Path,
) -> None:
    """torchrun starts the job that stopped again, and that would stop the other one, and so on."""
    many = [f"{number}" + "\N{SNOWMAN}" * 500 for number in range(20)]
    for launch, again, refused in (
        ("a", False, False),
        ("a", True, False),
        ("b", False, False),
        ("a", True, True),
        ("b", True, False),
        ("c", True, False),  # it was lost before it had the folder: nobody has taken that from it
        ("a", False, False),  # somebody has submitted it anew
        ("a", True, False),
        (None, False, False),
        ("a", True, True),
        *((launch, False, False) for launch in many),
        (many[18], True, True),
    ):
        token = (tmp_path / folder_lock.OWNER).read_bytes() if refused else b""
        refusal = pytest.raises(
            TakenError, match=r"taken by another job since this one was first started \(process"
        )
        with (
            refusal if refused else nullcontext(),
            lock_folder(tmp_path, launch=launch, again=again),
        ):
            folder_lock.check_owner()
        assert not refused or (tmp_path / folder_lock.OWNER).read_bytes() == token


def test_the_launch_is_told_from_others() -> None:
    torchrun = dict.fromkeys(TORCHRUN, "0")
    for variables, launch in (
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "7"),
        (torchrun | {"TORCHELASTIC_RUN_ID": "a b"}, "a b"),
        (
            torchrun | {"TORCHELASTIC_RUN_ID": "none"},
            None,
        ),  # as torchrun has it without --standalone and --rdzv-id
        (torchrun | {"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "7"),
    ):
        assert read_environment(variables).launch == launch


def test_a_run_whose_folder_was_taken_ends_and_leaves_it_alone(
    fresh: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a step or two, and not with its next checkpoint: what it would write besides is the
    other job's."""
    with monkeypatch.context() as patch:
        taken(fresh, patch, "meshtrain.metrics.goodput.GoodputTracker.begin")
        printed = fresh.train("train.steps=100", "checkpoint.every=50", status=1)
    assert (
        f"the folder {fresh.folder} was taken by another job meanwhile (process 7 on host b)"
        in printed
    )
    assert "there is no exit.json, which would say {" in printed
    assert read(fresh.folder / "metrics.jsonl")[-1]["step"] < 5
    assert not (fresh.folder / "exit.json").exists()
    assert fresh.steps() == []
    fresh.train("train.steps=4")
    assert json.loads((fresh.folder / "exit.json").read_text())["status"] == "done"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(
    fresh: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    failing(fresh, monkeypatch, "fcntl.flock", errno.errorcode[number])
    with lock_folder(fresh.place):
        take(fresh.place)
        with pytest.raises(TakenError):
            folder.begin(fresh.place, 1)
    warning = f"warning: the folder {fresh.place} cannot be locked ({os.strerror(number)})"
    assert warning in capsys.readouterr().err


def test_another_failure_to_lock_is_an_error(fresh: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(fresh, monkeypatch, "fcntl.flock", "EIO")
    with pytest.raises(InputError, match="cannot be locked"), lock_folder(fresh.place):
        pass


@pytest.mark.usefixtures("_no_lock")
def test_prune_takes_no_folder_from_a_job(run: Run) -> None:
    with lock_folder(run.checkpoints):
        run.command("checkpoint", "prune", run.checkpoints, "--keep-last", 1)
        folder_lock.check_owner()
    assert run.steps() == [4]
