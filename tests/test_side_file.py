"""A disk that is full, over its quota or gone for a moment ends no run for the sake of a file
beside its work."""

import errno
import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshtrain.job import signals as stopping
from meshtrain.job import storage
from meshtrain.job.storage import SideFile
from meshtrain.metrics import goodput, plot
from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.metrics.logger import MetricsFile, read
from meshtrain.run.run_folder import RunFolder
from tests.job.conftest import go, small

__all__ = ["go", "small"]  # fixtures

NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO, errno.EROFS)


class Disk:
    """In place of `os.fdopen` and what it gives: refuses to write while `number` says why, after a
    few bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number: int | None = None
        self.room = 0  # bytes that it takes all the same
        self.fdopen = os.fdopen
        monkeypatch.setattr(storage.os, "fdopen", self.opened)

    def opened(self, descriptor: int, mode: str, **more: Any) -> Any:
        disk, file = self, self.fdopen(descriptor, mode, **more)
        if mode != "r+b":
            return file

        class File:
            def write(self, data: Any) -> int:
                if disk.number is None:
                    return file.write(data)
                room, disk.room = disk.room, 0
                if room == 0:
                    raise OSError(disk.number, os.strerror(disk.number))
                return file.write(data[:room])

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return File()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


@pytest.mark.parametrize("number", NUMBERS, ids=os.strerror)
@pytest.mark.parametrize("room", [0, 5])
def test_lines_wait_for_the_disk(
    disk: Disk, path: Path, number: int, room: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = SideFile(path)
    file.append(b"first\n")
    file.replace_last(b"first, and more\n")
    disk.number, disk.room = number, room
    file.append(b"second\n")
    assert path.read_bytes() == b"first, and more\n", "half a line does not stay"
    disk.room = room
    file.append(b"third\n")
    file.replace_last(b"third, again\n")
    disk.number = None
    file.append(b"fourth\n")
    file.replace_last(b"4\n")
    file.close()
    file.append(b"opened again\n")
    assert path.read_bytes() == b"first, and more\nsecond\nthird, again\n4\nopened again\n"
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {path} cannot be written ({os.strerror(number)}); its lines are kept, and tried "
        "again",
        f"warning: {path} is written again",
    ]


def test_what_waits_is_bounded_and_the_gap_is_said(
    disk: Disk, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage, "MOST_WAITING", 3)
    file = SideFile(path)
    disk.number = errno.ENOSPC
    for i in range(8):
        file.append(b"%d\n" % i)
    disk.number = None
    file.append(b"8\n")
    assert path.read_bytes() == b"6\n7\n8\n"
    disk.number = errno.ENOSPC
    file.append(b"9\n")
    file.close()
    printed = capsys.readouterr().err
    assert "is written again; 6 lines of it are lost" in printed
    assert "lacks its last 1 lines" in printed


def test_two_writers_destroy_nothing_of_each_other(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As two jobs whose folder is not locked between their hosts."""
    first, second = SideFile(path), SideFile(path, end=None)
    first.append(b"first 1\n")
    second.append(b"second 1\n")
    first.append(b"first 2\n")
    second.replace_last(b"second 1, and more\n")
    first.append(b"first 3\n")
    first.replace_last(b"first 3, and more\n")
    assert (
        path.read_bytes() == b"first 1\nsecond 1\nfirst 2\nsecond 1, and more\nfirst 3, and more\n"
    )
    assert capsys.readouterr().err.count(f"somebody else has written to {path}") == 2, (
        "each says it once"
    )


def test_what_is_cut_off_under_a_writer_leaves_no_hole(path: Path) -> None:
    file = SideFile(path)
    file.append(b"first\n")
    os.truncate(path, 0)
    file.append(b"second\n")
    os.truncate(path, 0)
    file.replace_last(b"third\n")
    assert path.read_bytes() == b"third\n"


@pytest.mark.parametrize("change", [b"", b"first\nsomebody\n"])
def test_a_file_that_changes_while_the_disk_refuses_keeps_what_is_there(
    disk: Disk, path: Path, change: bytes
) -> None:
    file = SideFile(path)
    file.append(b"first\n")
    disk.number, disk.room = errno.ENOSPC, 3
    file.append(b"second\n")
    path.write_bytes(change)
    file.append(b"third\n")
    disk.number = None
    file.append(b"fourth\n")
    assert path.read_bytes() == change + b"second\nthird\nfourth\n"


def test_a_file_that_cannot_be_read_is_added_to(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in it is not cut off."""
    path.write_text('{"step": 1}\n')
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        file = MetricsFile(path)
        file.drop_after(1)
    file.row({"step": 2})
    file.amend(2, {"eval_loss": 1.0})
    assert read(path) == [{"step": 1}, {"step": 2, "eval_loss": 1.0}]


def refused(*arguments: Any, **more: Any) -> Any:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "somewhere")


def test_a_stop_file_may_be_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.0)
    requests = stopping.StopRequest(stopping.Signals())
    requests.watch(tmp_path, None, {})
    (tmp_path / "STOP").touch()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refused)
        assert requests.reason(1.0, 1.0) is None
    assert requests.reason(1.0, 1.0) is not None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        requests.clear()
    requests.clear()
    assert not (tmp_path / "STOP").exists()


@pytest.mark.parametrize("text", [b"", b"\0" * 80, b"[1]", b'{"step": "1"}', b"[" * 100_000])
def test_a_damaged_exit_json_is_moved_away(
    tmp_path: Path, text: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exit.json").write_bytes(text)
    folder = RunFolder(tmp_path)
    assert folder.last_exit() is None
    assert os.listdir(tmp_path) == ["exit.json.damaged"]
    assert "exit.json is damaged" in capsys.readouterr().err
    folder.write_exit("done", 0, "all steps are done", 3, kind="done")
    row = {
        "status": "done",
        "code": 0,
        "reason": "all steps are done",
        "kind": "done",
        "step": 3,
        "hosts": [],
    }
    assert folder.last_exit() == row


def test_what_is_written_anew_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("fsync"), fsync(file))[1])
    monkeypatch.setattr(
        Path, "replace", lambda *paths: (order.append("replace"), replace(*paths))[1]
    )
    RunFolder(tmp_path).write_exit("done", 0, "all steps are done", 3, kind="done")
    GoodputTracker(tmp_path, 0, 0.0)
    assert order == ["fsync", "replace"] * 2


def test_the_picture_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MetricsFile(tmp_path / "metrics.jsonl").row({"step": 1, "loss": 1.0})
    monkeypatch.setattr(plot.metrics, "read", refused)
    assert plot.plot_loss(tmp_path, "a").startswith("no loss plot: [Errno 116]")


def test_the_ledger_goes_on_and_ends_once(disk: Disk, tmp_path: Path) -> None:
    """The watchdog ends it for a rank that is stuck, which then fails on its own."""
    ledger = GoodputTracker(tmp_path, 0, 0.0)
    disk.number = errno.EDQUOT
    ledger.begin()
    ledger.saved()
    disk.number = None
    ledger.end("failed")
    ledger.saved()
    ledger.end("stopped")
    (job,), note = goodput.read(tmp_path / "goodput.jsonl")
    assert ([mark.end for mark in job.marks], note) == ([None, None, "failed"], None)


# A whole run --------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with little room in place of the run's folder."""
    place = tmp_path / "run"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", place]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def fill_up(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(descriptor, b"x" * 4096)
    os.close(descriptor)


def test_a_run_comes_to_its_end_on_a_full_disk(
    go: Callable[..., dict[str, Any]],
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its last state cannot be saved, which is said in one sentence; the end that it cannot write
    down is said, too."""
    begin = GoodputTracker.begin
    with monkeypatch.context() as patch:
        patch.setattr(
            GoodputTracker,
            "begin",
            lambda ledger: (fill_up(small_disk / "others"), begin(ledger))[1],
        )
        result = go("train.steps=8", "checkpoint.every=2")
    assert result["status"] == 1
    assert result["error"].startswith("8 steps of 8 are done and not saved: it needs ")
    printed = capsys.readouterr().err
    assert f"{small_disk}/metrics.jsonl cannot be written (No space left on device)" in printed
    assert "there is no exit.json, which would say {" in printed
    assert '"status": "failed", "code": 1' in printed
    (small_disk / "others").unlink()
    assert go("train.steps=8", "checkpoint.every=2") == {"status": 0}
    assert json.loads((small_disk / "exit.json").read_text())["status"] == "done"
    assert [row["step"] for row in read(small_disk / "metrics.jsonl")] == list(range(1, 9))


def test_a_run_without_its_small_files(
    go: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(RunFolder, "write", refused)
    assert go("train.steps=2") == {"status": 0}
    printed = capsys.readouterr().err
    for warning in (
        "config.yaml could not be written",
        "layout.txt could not be written",
        "there is no exit.json",
    ):
        assert f"warning: {warning}" in printed, printed


def test_a_line_and_its_end_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two writes another thread's line would come."""
    writes: list[str] = []

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    monkeypatch.setattr("sys.stderr", Terminal())
    storage.warn("the disk is full")
    assert writes == ["warning: the disk is full\n"]


# Files that the user has not named ----------------------------------------------------------------


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, victim: Path) -> None:
    path.mkdir()


def large(path: Path, victim: Path) -> None:
    path.write_bytes(b"x" * 101)


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        (link, "is a link"),
        (pipe, "no regular file"),
        (folder, "no regular file"),
        (large, "has 101 bytes"),
    ],
)
def test_what_others_may_have_planted_is_not_opened(
    tmp_path: Path, planted: Callable[[Path, Path], None], problem: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("all that he has")
    planted(tmp_path / "x", victim)
    with pytest.raises(OSError, match=problem):
        storage.read_guarded(tmp_path / "x", 100)
    assert victim.read_text() == "all that he has"


def test_a_file_of_another_user_is_opened_only_in_a_folder_of_that_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("his")
    assert storage.read_guarded(tmp_path / "x") == b"his"
    monkeypatch.setattr(storage.os, "geteuid", lambda: os.getuid() + 1)
    assert storage.read_guarded(tmp_path / "x") == b"his", "the folder is his, too"
    whole = os.stat

    def of_another(path: Any, **more: Any) -> Any:
        about = whole(path, **more)
        return os.stat_result([*about[:4], about.st_uid + 2, *about[5:]])

    monkeypatch.setattr(storage.os, "stat", of_another)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_uid_of_new_files", lambda folder: os.getuid() + 3)
        with pytest.raises(
            PermissionError, match=r"it belongs to \S+, who is neither this user nor the owner"
        ):
            storage.read_guarded(tmp_path / "x")
    # A file server may give what this user makes to `nobody`.
    assert storage.read_guarded(tmp_path / "x") == b"his"


def test_a_run_writes_through_no_link_and_goes_on_once_it_is_gone(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"all that he has\n")
    path.symlink_to(victim)
    file = SideFile(path)
    file.append(b"first\n")
    assert victim.read_bytes() == b"all that he has\n"
    path.unlink()
    file.append(b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"
    assert "cannot be written (it is a link, which is not followed here)" in capsys.readouterr().err


WRITTEN_BY_A_RUN = (
    "config.yaml",
    "layout.txt",
    "exit.json",
    "ranks.json",
    "timeline.json",
    "loss.png",
    ".owner",
)


def test_a_run_writes_through_no_link_in_its_folder(
    go: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Under the names of its files, and those under which it first writes them."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    run.mkdir()
    for name in WRITTEN_BY_A_RUN:
        for planted in (name, f".{name}.tmp", f"{name}.tmp"):
            (run / planted).symlink_to(victim)
    assert go("train.steps=3") == {"status": 0}
    plot.plot_loss(run, "run")
    assert victim.read_text() == "precious"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "loss.png").is_symlink() is False


def test_a_picture_of_rows_in_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert "has no steps" in plot.plot_loss(tmp_path, "run")


@pytest.mark.parametrize("way", ["removed", "renamed"])
def test_a_folder_that_goes_while_it_is_written_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    """A file server keeps what is open under another name: it is noticed as a folder that was
    renamed is."""
    path = tmp_path / "run" / "lines"
    path.parent.mkdir()
    file = SideFile(path)
    file.append(b"first\n")
    if way == "removed":
        path.unlink()
        path.parent.rmdir()
    else:
        path.parent.rename(tmp_path / "away")
        monkeypatch.setattr(storage, "LOOK_FOR_REMOVAL_S", 0.0)
    file.append(b"second\n")
    file.replace_last(b"second, and more\n")
    file.append(b"third\n")
    assert path.read_bytes() == b"second, and more\nthird\n"
    assert (
        capsys.readouterr().err.count(f"{path} was removed or renamed while this run writes to it")
        == 1
    )


def test_what_is_executed_lies_where_nobody_else_writes(tmp_path: Path) -> None:
    made = storage.make_private_folder(tmp_path / "own" / "code")
    assert made.stat().st_mode & 0o777 == 0o700
    assert storage.make_private_folder(made) == made, "a later start takes it"
    made.chmod(0o755)
    assert storage.make_private_folder(made).stat().st_mode & 0o777 == 0o700
    made.chmod(0o775)
    with pytest.raises(PermissionError, match="others may have put code there"):
        storage.make_private_folder(made)
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(NotADirectoryError, match="a link to one"):
        storage.make_private_folder(tmp_path / "link")
    (tmp_path / "way").symlink_to(tmp_path / "own")
    assert storage.make_private_folder(tmp_path / "way" / "more") == tmp_path / "own" / "more", (
        "without the link"
    )
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o2775)
    with pytest.raises(PermissionError, match="others can write to the folder above"):
        storage.make_private_folder(tmp_path / "shared" / "code")
    (tmp_path / "shared" / "mine").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="others can write to the folder above"):
        # they could exchange `mine`
        storage.make_private_folder(tmp_path / "shared" / "mine" / "code")
    assert list((tmp_path / "shared" / "mine").iterdir()) == []
