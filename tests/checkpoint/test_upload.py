"""Uploads: what is in storage is whole, a refusing storage costs nothing, and a run goes on from
there to the bit."""

import asyncio
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from meshtrain.checkpoint.directory import COMPLETE, complete_steps, name_of
from meshtrain.checkpoint.retention import Retention
from meshtrain.checkpoint.upload import Uploads
from meshtrain.checkpoint.verify import verify
from meshtrain.errors import InputError
from meshtrain.job import object_storage
from meshtrain.job.object_storage import ObjectStorage
from tests.checkpoint.conftest import MEMORY as URL
from tests.checkpoint.conftest import Train
from tests.checkpoint.faults import SHARD, Run, failing


@pytest.fixture(autouse=True)
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    storage = fsspec.filesystem("memory")
    yield storage
    monkeypatch.undo()
    storage.store.clear()
    storage.pseudo_dirs[:] = [""]


def uploaded(url: str = URL) -> list[int]:
    return Uploads(url, Retention()).steps()


def test_a_run_goes_on_elsewhere_from_what_was_uploaded(
    train: Train, fresh: Run, storage: Any
) -> None:
    train("run", interrupt="end", at=7, status=1)
    assert uploaded() == [2, 4, 6]
    # Of step 6 a byte is another one; a further one lacks COMPLETE: half of it was uploaded.
    with storage.open(f"/bucket/prefix/step_0000006/{SHARD}", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    storage.copy(
        "/bucket/prefix/step_0000004/manifest.json", "/bucket/prefix/step_0000009/manifest.json"
    )
    shutil.move(fresh.checkpoints, fresh.place / "lost")
    printed = train("run")
    assert f"{URL}/step_0000006 is passed over" in printed
    assert f"step_0000004 was brought from {URL}" in printed
    assert fresh.rows() == fresh.undisturbed()
    assert uploaded() == [4, 6, 8], "as many stay as in the folder"
    uploads = Uploads(URL, Retention())
    for step in uploaded():
        assert verify(uploads.fetch(step, fresh.place / "back")) == []
    assert complete_steps(fresh.place / "back") == [4, 6, 8]
    whole = fresh.config.parent / "8 steps/checkpoints" / name_of(8) / SHARD
    assert (fresh.checkpoints / name_of(8) / SHARD).read_bytes() == whole.read_bytes()


def test_storage_that_refuses_costs_a_line(
    train: Train, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses in the middle of the first two; with the third all are there."""
    put, targets = type(storage).put_file, []

    def refuse(self: Any, source: str, target: str, *rest: Any, **options: Any) -> None:
        targets.append(target)
        if (
            target.endswith("manifest.json")
            and ("0000002" in target or "0000004" in target)
            and len(targets) < 5
        ):
            raise PermissionError("AccessDenied")
        put(self, source, target, *rest, **options)

    monkeypatch.setattr(type(storage), "put_file", refuse)
    printed = train("run", steps=6)
    assert (
        f"warning: the upload to {URL} failed: PermissionError: AccessDenied; it is tried again"
        in printed
    )
    assert uploaded() == [2, 4, 6], targets


def test_a_storage_that_stays_away_is_said_once(
    train: Train, fresh: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint is a try, and the end a last one; the run has all its checkpoints in its
    folder."""
    with monkeypatch.context() as patch:
        tries = failing(fresh, patch, "meshtrain.checkpoint.upload.read_manifest", "TimeoutError")
        printed = train("run")
    assert printed.count(f"warning: the upload to {URL} failed: TimeoutError: TimeoutError") == 1
    assert (
        printed.count(f"warning: {URL} lacks checkpoints of this run: TimeoutError: TimeoutError")
        == 1
    )
    assert tries[-1].endswith(name_of(8))
    assert len(tries) >= 2, "the end tries again"
    assert fresh.steps() == [4, 6, 8]
    assert uploaded() == []
    train("run", steps=10)
    assert uploaded() == [6, 8, 10], "what was missing came with the next"


def test_an_upload_without_a_thread_is_tried_again_with_the_next_checkpoint(
    train: Train, fresh: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing(fresh, patch, "threading.Thread.start", "RuntimeError", "Thread(upload", 1)
        printed = train("run")
    assert printed.count(f"warning: the upload to {URL} failed: NoThreadError: RuntimeError") == 1
    assert "lacks checkpoints of this run" not in printed
    assert uploaded() == [4, 6, 8]


def test_what_cannot_be_read_for_the_moment_is_not_given_up(
    train: Train, fresh: Run, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is in storage alone, and storage does not hand it out: an older one would lose
    the steps between."""
    train("run", interrupt="end", at=7, status=1)
    shutil.rmtree(fresh.checkpoints / name_of(6))
    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "get_file", lambda *_, **__: 1 / 0)
        failed = train("run", status=1)  # no wrong input: a launcher starts it again
    assert f"cannot read {URL}/step_0000006: ZeroDivisionError" in failed
    assert uploaded() == [2, 4, 6]
    assert fresh.steps() == [2, 4]
    train("run")
    assert fresh.rows() == fresh.undisturbed()


def test_steps_that_are_made_again(train: Train, fresh: Run, storage: Any) -> None:
    """A run that went back does not go on from what it has left, nor when it is started again
    before its next checkpoint: that is set aside, or replaced."""
    train("run")
    back = f"checkpoint.resume={fresh.newest}"
    other = (back, "optimizer.lr=1e-3")
    train("run", *other, interrupt="end", at=5, status=1)
    assert uploaded() == [4]
    train("run", *other, interrupt="end", at=5, again=True, status=1)
    assert [row[0] for row in fresh.rows()] == [1, 2, 3, 4]
    train("run", back, interrupt="end", at=7, status=1)
    assert uploaded() == [4, 6]
    assert storage.exists(f"/bucket/prefix/step_0000008/{COMPLETE}.aside"), "nothing is deleted"
    second_time = (fresh.checkpoints / name_of(6) / COMPLETE).read_bytes()
    assert storage.cat_file(f"/bucket/prefix/step_0000006/{COMPLETE}") == second_time


def test_what_cannot_be_used_is_refused_at_once(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert "pip install 'meshtrain[s3]'" in train("run", url="s3://bucket/prefix", status=2)
    with pytest.raises(InputError, match="expected such as s3://bucket/prefix"):
        Uploads("nothing://bucket", Retention())
    monkeypatch.setattr(Uploads, "steps", lambda self: 1 / 0)
    assert "cannot be asked for checkpoints (ZeroDivisionError" in train("run", status=2)


def test_a_checkpoint_that_storage_has_in_part_stops_no_upload(
    train: Train, fresh: Run, storage: Any
) -> None:
    """A bucket deletes what is old object by object; the evaluation of each is asked for the best
    one."""
    best = ("checkpoint.keep_best=true", "train.eval_every=2", "data.validation=0.1")
    train("run", *best, steps=4)
    shutil.rmtree(fresh.checkpoints / name_of(2))
    storage.rm_file("/bucket/prefix/step_0000002/manifest.json")
    assert "failed" not in train("run", *best, steps=6)
    assert 6 in uploaded()


def test_a_run_neither_takes_nor_replaces_checkpoints_of_another_one(
    train: Train, fresh: Run
) -> None:
    train("run", steps=4)
    refused = train("fresh", "checkpoint.resume=none", status=2)
    assert f"{URL} holds step_0000004 of a run already" in refused
    train("other", "checkpoint.resume=none", steps=2, url="memory://other")
    assert uploaded("memory://other") == [2]
    folder = fresh.place / "other/checkpoints"
    refused = train("other", "optimizer.lr=1e-3", status=2)
    assert f"{URL} holds step_0000004 of another run than {folder}: name a prefix" in refused
    train("third", f"checkpoint.resume={fresh.checkpoints / name_of(2)}", status=2)
    # of two runs that begin at once the second finds it when it uploads
    uploads = Uploads(URL, Retention())
    uploads.offer(folder)
    assert uploads.wait()
    assert "of another run" in str(uploads.problem)
    assert uploaded() == [2, 4]


@pytest.mark.parametrize("scheme", ["file://", ""])
def test_a_folder_is_storage_too(train: Train, tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}{tmp_path}/store"
    train("run", steps=4, url=url)
    assert uploaded(url) == [2, 4]
    assert not verify(tmp_path / "store" / name_of(4))


# A server that does not answer --------------------------------------------------------------------


class Mute(AsyncFileSystemWrapper):
    """Storage in memory whose client is asynchronous, and waits for ever where the server does not
    answer."""

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
    monkeypatch.setattr(
        fsspec.core, "url_to_fs", lambda *_, **__: (Mute(storage, asynchronous=False), "/bucket")
    )
    monkeypatch.setattr(object_storage, "ANSWER_S", 2.0)
    monkeypatch.setattr(object_storage, "SILENCE_S", 2.0)
    monkeypatch.setattr(Mute, "mute", None)
    monkeypatch.setattr(Mute, "cancelled", [])
    return Mute


@pytest.mark.slow
def test_a_server_that_never_answers(train: Train, fresh: Run, mute: type[Mute]) -> None:
    """Each call is given up and cancelled, the run ends and says so, and its checkpoints are in its
    folder."""
    mute.mute = "put_file"
    printed = train("run")
    assert (
        printed.count(f"warning: the upload to {URL} failed: TimeoutError: no answer for 2 s") == 1
    ), printed
    assert (
        printed.count(
            f"warning: {URL} lacks checkpoints of this run: TimeoutError: no answer for 2 s"
        )
        == 1
    )
    assert "/bucket/step_0000008/manifest.json" in mute.cancelled, "no connection is left behind"
    assert fresh.steps()[-2:] == [6, 8]
    mute.mute = "ls"
    printed = train("run", steps=9)
    assert (
        f"warning: {URL} cannot be asked for checkpoints (TimeoutError: no answer for 2 s)"
        in printed
    )
    assert "step_0000008" in printed, "it goes on from there"


@pytest.mark.usefixtures("mute")
def test_a_server_that_is_slow(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight files one after another take longer than a silence may last, each of them less."""
    names = list("abcdefgh")
    for name in names:
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(object_storage, "AT_ONCE", 1)
    ObjectStorage(URL, key="checkpoint.upload").put_files(
        [(tmp_path / name, name) for name in names]
    )
    assert [storage.cat_file(f"/bucket/{name}") for name in names] == [
        name.encode() for name in names
    ]
