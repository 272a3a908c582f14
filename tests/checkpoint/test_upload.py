"""Uploads: what is in storage is whole, a refusing storage costs nothing, and a run goes on from there to the bit."""

import asyncio
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from meshtrain.checkpoint import upload
from meshtrain.checkpoint.directory import complete_steps, name_of
from meshtrain.checkpoint.retention import Retention
from meshtrain.checkpoint.upload import Uploads
from meshtrain.checkpoint.verify import verify
from meshtrain.errors import InputError
from tests.checkpoint.going_on import Case, alone, faster, small_run
from tests.checkpoint.kill import rows

URL = "memory://bucket/prefix"


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    storage = fsspec.filesystem("memory")
    yield storage
    monkeypatch.undo()
    storage.store.clear()
    storage.pseudo_dirs[:] = [""]


@pytest.fixture
def run(tmp_path: Path, storage: Any) -> Any:
    faster()
    config = str(small_run(tmp_path))

    def train(folder: str, *more: str, steps: int = 8, url: str = URL, **how: Any) -> dict[str, Any]:
        options = (f"train.steps={steps}", "checkpoint.every=2", "data.workers=0", f"train.output={tmp_path / folder}")
        done = alone(Case(config, (*options, f"checkpoint.upload={url}", *more), **how))
        for thread in threading.enumerate():  # of a run that was interrupted
            if thread.name == "upload":
                thread.join()
        return done

    return train


def uploaded(url: str = URL) -> list[int]:
    return Uploads(url, Retention()).steps()


def test_a_run_goes_on_elsewhere_from_what_was_uploaded(
    run: Any, storage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("whole", url="memory://whole") == {"status": 0}
    assert uploaded("memory://whole") == [4, 6, 8], "as many stay as in the folder"
    assert run("run", interrupt="end", at=7)["status"] == 1
    assert uploaded() == [2, 4, 6]
    # Of step 6 a byte is another one; a further one lacks COMPLETE: half of it was uploaded.
    with storage.open("/bucket/prefix/step_0000006/rank_00000.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    storage.copy("/bucket/prefix/step_0000004/manifest.json", "/bucket/prefix/step_0000009/manifest.json")
    shutil.move(tmp_path / "run" / "checkpoints", tmp_path / "lost")
    capsys.readouterr()
    assert run("run") == {"status": 0}
    out = capsys.readouterr().out
    assert f"{URL}/step_0000006 is passed over" in out
    assert f"step_0000004 was brought from {URL}" in out
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    for step in uploaded():
        uploads = Uploads(URL, Retention())
        assert verify(uploads.fetch(step, tmp_path / "back")) == []
    assert complete_steps(tmp_path / "back") == [4, 6, 8]
    same = [(tmp_path / folder / "checkpoints" / name_of(8)).glob("*.safetensors") for folder in ("run", "whole")]
    assert [file.read_bytes() for file in same[0]] == [file.read_bytes() for file in same[1]]


def test_storage_that_refuses_costs_a_line(
    run: Any, storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It refuses in the middle of the first two; with the third all are there."""
    put, calls = type(storage).put_file, []

    def refuse(self: Any, source: str, target: str, *rest: Any, **options: Any) -> None:
        calls.append(target)
        if target.endswith("manifest.json") and ("0000002" in target or "0000004" in target) and len(calls) < 5:
            raise PermissionError("AccessDenied")
        put(self, source, target, *rest, **options)

    monkeypatch.setattr(type(storage), "put_file", refuse)
    assert run("run", steps=6) == {"status": 0}
    out = capsys.readouterr().out
    assert f"warning: the upload to {URL} failed: PermissionError: AccessDenied; it is tried again" in out
    assert uploaded() == [2, 4, 6], calls


def test_a_storage_that_stays_away_is_said_once(
    run: Any, storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each checkpoint is a try, and the end a last one; the run has all its checkpoints in its folder."""
    tried: list[int] = []

    def away(self: Uploads, checkpoint: Path, step: int, is_there: bool) -> None:
        tried.append(step)
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Uploads, "_upload", away)
        assert run("run") == {"status": 0}
    out = capsys.readouterr().out
    assert out.count(f"warning: the upload to {URL} failed: TimeoutError: no answer") == 1
    assert out.count(f"warning: {URL} lacks checkpoints of this run: TimeoutError: no answer") == 1
    assert tried[-1] == 8
    assert len(tried) >= 2, "the end tries again"
    assert complete_steps(tmp_path / "run" / "checkpoints") == [4, 6, 8]
    assert uploaded() == []
    assert run("run", steps=10) == {"status": 0}
    assert uploaded() == [6, 8, 10], "what was missing came with the next"


def test_what_cannot_be_read_for_the_moment_is_not_given_up(
    run: Any, storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is in storage alone, and storage does not hand it out: an older one would lose the steps between."""
    assert run("run", interrupt="end", at=7)["status"] == 1
    assert uploaded() == [2, 4, 6]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / name_of(6))
    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "get_file", lambda *_, **__: 1 / 0)
        failed = run("run")
    assert failed["status"] == 1, "no wrong input: a launcher starts it again"
    assert f"cannot read {URL}/step_0000006: ZeroDivisionError" in failed["error"]
    assert uploaded() == [2, 4, 6]
    assert complete_steps(tmp_path / "run" / "checkpoints") == [2, 4]
    assert run("run") == {"status": 0}
    assert run("whole", url="memory://whole") == {"status": 0}
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_a_run_that_went_back_is_not_brought_forward_again(run: Any, storage: Any, tmp_path: Path) -> None:
    """It goes back and fails before its next checkpoint; the launcher starts it again."""
    assert run("run") == {"status": 0}
    back = f"checkpoint.resume={tmp_path}/run/checkpoints/step_0000004"
    assert run("run", back, "optimizer.lr=1e-3", interrupt="end", at=5)["status"] == 1
    assert uploaded() == [4]
    assert run("run", back, "optimizer.lr=1e-3", interrupt="end", at=5, again=True)["status"] == 1
    assert [row[0] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def test_steps_that_are_made_again(run: Any, storage: Any, tmp_path: Path) -> None:
    """A run that went back does not go on from what it has left: that is set aside, or replaced."""
    assert run("run") == {"status": 0}
    back = f"checkpoint.resume={tmp_path}/run/checkpoints/step_0000004"
    assert run("run", back, interrupt="end", at=7)["status"] == 1
    assert uploaded() == [4, 6]
    assert storage.exists("/bucket/prefix/step_0000008/COMPLETE.aside"), "nothing is deleted"
    there = storage.cat_file("/bucket/prefix/step_0000006/COMPLETE")
    assert there == (tmp_path / "run" / "checkpoints" / name_of(6) / "COMPLETE").read_bytes(), "of the second time"


def test_what_cannot_be_used_is_refused_at_once(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert "pip install 'meshtrain[s3]'" in run("run", url="s3://bucket/prefix")["error"]
    with pytest.raises(InputError, match="expected such as s3://bucket/prefix"):
        Uploads("nothing://bucket", Retention())
    monkeypatch.setattr(Uploads, "steps", lambda self: 1 / 0)
    refused = run("run")
    assert refused["status"] == 2
    assert "cannot be asked for checkpoints (ZeroDivisionError" in refused["error"]


class Mute(AsyncFileSystemWrapper):
    """Storage in memory whose client is asynchronous, and waits for ever where the server does not answer."""

    mute: str | None = None  # the method
    cancelled: ClassVar[list[str]] = []

    def _wrap_all_sync_methods(self) -> None:
        super()._wrap_all_sync_methods()
        self._ls = self._answered("ls", self._ls)
        self._put_file = self._answered("put_file", self._put_file)

    def _answered(self, name: str, method: Any) -> Any:
        async def call(*arguments: Any, **options: Any) -> Any:
            try:
                await asyncio.sleep(3600 if Mute.mute == name else 0.4)
            except asyncio.CancelledError:
                Mute.cancelled.append(arguments[-1])
                raise
            return await method(*arguments, **options)

        return call


@pytest.fixture
def mute(storage: Any, monkeypatch: pytest.MonkeyPatch) -> type[Mute]:
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *_, **__: (Mute(storage, asynchronous=False), "/bucket"))
    monkeypatch.setattr(upload, "ANSWER_S", 2.0)
    monkeypatch.setattr(upload, "SILENCE_S", 2.0)
    monkeypatch.setattr(Mute, "mute", None)
    monkeypatch.setattr(Mute, "cancelled", [])
    return Mute


def test_a_server_that_never_answers(
    run: Any, storage: Any, tmp_path: Path, mute: type[Mute], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each call is given up and cancelled, the run ends and says so, and its checkpoints are in its folder."""
    mute.mute = "put_file"
    assert run("run") == {"status": 0}
    out = capsys.readouterr().out
    assert out.count(f"warning: the upload to {URL} failed: TimeoutError: no answer for 2 s") == 1, out
    assert out.count(f"warning: {URL} lacks checkpoints of this run: TimeoutError: no answer for 2 s") == 1
    assert "/bucket/step_0000008/manifest.json" in mute.cancelled, "no connection is left behind"
    assert complete_steps(tmp_path / "run" / "checkpoints")[-2:] == [6, 8]
    mute.mute = "ls"
    assert run("run", steps=9) == {"status": 0}
    out = capsys.readouterr().out
    assert f"warning: {URL} cannot be asked for checkpoints (TimeoutError: no answer for 2 s)" in out
    assert "step_0000008" in out, "it goes on from there"


@pytest.mark.usefixtures("mute")
def test_a_server_that_is_slow(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight files one after another take longer than a silence may last, each of them less."""
    names = list("abcdefgh")
    for name in names:
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(upload, "AT_ONCE", 1)
    Uploads(URL, Retention())._transfer("put_file", [(str(tmp_path / name), f"/bucket/{name}") for name in names])
    assert [storage.cat_file(f"/bucket/{name}") for name in names] == [name.encode() for name in names]


def test_a_checkpoint_that_storage_has_in_part_stops_no_upload(
    run: Any, storage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bucket deletes what is old object by object; the evaluation of each is asked for the best one."""
    best = ("checkpoint.keep_best=true", "train.eval_every=2", "data.validation=0.1")
    assert run("run", *best, steps=4) == {"status": 0}
    shutil.rmtree(tmp_path / "run" / "checkpoints" / name_of(2))
    storage.rm_file("/bucket/prefix/step_0000002/manifest.json")
    assert run("run", *best, steps=6) == {"status": 0}
    assert 6 in uploaded()
    assert "failed" not in capsys.readouterr().out


def test_a_run_that_begins_anew_replaces_no_other_run(run: Any, tmp_path: Path) -> None:
    assert run("run", steps=4) == {"status": 0}
    refused = run("other", "checkpoint.resume=none", steps=4)
    assert refused["status"] == 2
    assert f"{URL} holds step_0000004 of a run already" in refused["error"]
    assert run("other", "checkpoint.resume=none", steps=4, url="memory://other") == {"status": 0}
    assert uploaded("memory://other") == [2, 4]


def test_a_run_neither_takes_nor_replaces_checkpoints_of_another_one(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", steps=4) == {"status": 0}
    assert run("other", steps=2, url="memory://other") == {"status": 0}
    refused = run("other", "optimizer.lr=1e-3")
    assert refused["status"] == 2
    assert (
        f"{URL} holds step_0000004 of another run than {tmp_path}/other/checkpoints: name a prefix" in refused["error"]
    )
    begun = f"checkpoint.resume={tmp_path}/run/checkpoints/step_0000002"
    assert run("third", begun)["status"] == 2
    assert uploaded() == [2, 4]
    folder = tmp_path / "other" / "checkpoints"
    storage = Uploads(URL, Retention())  # of two runs that begin at once the second finds it when it uploads
    storage.offer(folder)
    assert storage.wait()
    assert "of another run" in str(storage.problem)
    assert uploaded() == [2, 4]


@pytest.mark.parametrize("scheme", ["file://", ""])
def test_a_folder_is_storage_too(run: Any, tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}{tmp_path}/store"
    assert run("run", steps=4, url=url) == {"status": 0}
    assert uploaded(url) == [2, 4]
    assert not verify(tmp_path / "store" / name_of(4))
