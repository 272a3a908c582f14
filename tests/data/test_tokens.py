"""Token files: what is written is read, and preparation happens once. Damaged files are in
refusals.yaml."""

import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import struct
import time
import tracemalloc
from dataclasses import asdict
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtrain.data import cache
from meshtrain.data.cache import cache_folder, prepare_once
from meshtrain.data.tokens import (
    Document,
    Header,
    open_tokens,
    read_documents,
    smallest_dtype,
)
from meshtrain.errors import InputError
from meshtrain.job import pending
from tests.data.conftest import Opener
from tests.data.files import write_tokens

FORK = multiprocessing.get_context("fork")
DOCUMENTS = (
    Document(np.array([5, 6, 299]), text_bytes=11),
    Document(np.array([], int)),
    Document(np.array([1, 2, 3, 4]), np.array([0, 0, 1, 1]), text_bytes=7),
)


@pytest.mark.parametrize("source", ["tokens", "megatron"])
def test_memory_does_not_grow_with_documents(opened: Opener, tmp_path: Path, source: str) -> None:
    """Of 3 million documents a rank keeps nothing, and no array of 8 bytes for each is made on the
    way."""
    documents, size = 3_000_000, 4
    (tmp_path / "tokens.bin").write_bytes(bytes(range(1, size + 1)) * documents)
    offsets = np.arange(0, documents * size + 1, size, "<i8")
    if source == "tokens":
        offsets.tofile(tmp_path / "documents.bin")
        header = Header(
            1, "uint8", documents * size, documents, size, None, False, "a name", "bytes", "a test"
        )
        (tmp_path / "header.json").write_text(json.dumps(asdict(header)))
    else:
        places = [
            np.full(documents, size, "<i4"),
            offsets[:-1],
            np.arange(documents + 1, dtype="<i8"),
        ]
        about = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 1, documents, documents + 1)
        (tmp_path / "tokens.idx").write_bytes(about + b"".join(array.tobytes() for array in places))
    path = tmp_path / "tokens" if source == "megatron" else tmp_path
    tracemalloc.start()
    try:
        data = opened(
            source=source, path=path, validation=0.1, seq_len=size + 2, mask_documents=True
        )
        inputs, _ = data.train.item(1000, 0)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert inputs[2].tolist() == [0, 0, 0, 0, 1, 1]
    assert after < documents
    assert peak < 4 * documents
    assert len(pickle.dumps(data)) < 10_000, "workers map the files themselves"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    corpus = open_tokens(write_tokens(tmp_path / "a", *DOCUMENTS))
    assert corpus.tokens.array.tolist() == [5, 6, 299, 1, 2, 3, 4]
    assert corpus.tokens.array.dtype == np.uint16
    piece = corpus.piece(0, 2)
    assert [*piece.starts, *piece.lengths] == [0, 3, 3, 4]
    assert corpus.loss.array.tolist() == [1, 1, 1, 0, 0, 1, 1]
    assert corpus.text_bytes.array.tolist() == [11, 7]
    assert (corpus.tokens.count, corpus.documents, corpus.largest_id) == (7, 2, 299)
    header = json.loads((tmp_path / "a" / "header.json").read_text())
    assert [header[key] for key in ("tokens", "documents", "largest_id", "text_bytes")] == [
        7,
        2,
        299,
        18,
    ]
    plain = open_tokens(write_tokens(tmp_path / "b", [1, 2]))
    assert (plain.loss, plain.text_bytes) == (None, None), "files that say nothing are not written"
    names = {path.name: {file.name for file in path.iterdir()} for path in tmp_path.iterdir()}
    least = {"checksums.json", "documents.bin", "header.json", "tokens.bin"}
    assert names == {"a": least | {"bytes.bin", "loss.bin"}, "b": least}


def test_smallest_dtype_holds_every_id() -> None:
    sizes = {
        1: "uint8",
        256: "uint8",
        257: "uint16",
        65536: "uint16",
        65537: "uint32",
        2**32: "uint32",
    }
    assert {size: smallest_dtype(size) for size in sizes} == sizes


def test_the_fingerprint_names_the_content(tmp_path: Path) -> None:
    """Checkpoints have it, so it stays: a run would not go on with data that seem to be other
    ones."""
    contents = (
        DOCUMENTS,
        ([5, 6, 299, 1, 2, 3, 4],),
        ([5, 6, 299], [1, 2, 3, 4]),
        ([5, 6, 298], [1, 2, 3, 4]),
        DOCUMENTS,
    )
    fingerprints = [
        open_tokens(write_tokens(tmp_path / str(number), *documents)).fingerprint
        for number, documents in enumerate(contents)
    ]
    assert len(set(fingerprints)) == 4
    assert (
        fingerprints[0]
        == fingerprints[4]
        == "6bcd73ad36e50109306091e821e70c1fd82a7ef780c9ffe2bb10b748b8d462c5"
    )


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[1, 300]], "document 0 of a test holds the token id 300; expected 0 to 299"),
        ([[-1, 4]], "document 0 of a test holds the token id -1; expected 0 to 299"),
        ([], "holds no text"),
        ([Document(np.array([1]), ends=False)], "does not end"),
    ],
)
def test_refuses_to_write(tmp_path: Path, documents: list, message: str) -> None:
    with pytest.raises((InputError, ValueError), match=message):
        write_tokens(tmp_path / "a", *documents)
    assert list(tmp_path.iterdir()) == []


def test_a_header_is_a_file(tmp_path: Path) -> None:
    """In a cache others may be able to write: what lies there under a name that nobody has given is
    not followed."""
    folder = write_tokens(tmp_path / "a", [1, 2])
    header = folder / "header.json"
    header.rename(tmp_path / "elsewhere.json")
    header.symlink_to(tmp_path / "elsewhere.json")
    assert open_tokens(folder).tokens.count == 2, "a user may name a folder of links"
    with pytest.raises(OSError, match="it is a link, which is not followed here"):
        open_tokens(folder, cached=True)
    with pytest.raises(OSError, match="it is a link"):
        list(read_documents(folder))
    header.unlink()
    os.mkfifo(header)  # to open it would wait for a writer
    with pytest.raises(InputError, match=r"header\.json is not a header.*: it is no file"):
        open_tokens(folder)
    with pytest.raises(OSError, match="it is no regular file"):
        open_tokens(folder, cached=True)


# Preparation


def prepare_logged(folder: Path, log: Path, end: Event | None = None) -> None:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    if end is not None:
        end.wait()
    write_tokens(folder, [1, 2, 3])


def take_part(
    folder: Path, log: Path, lines: "multiprocessing.Queue[tuple[int, str]]", end: Event | None
) -> None:
    cache._SAY_EVERY_S = 0.1
    prepare_once(
        folder,
        lambda: prepare_logged(folder, log, end),
        lambda line: lines.put((os.getpid(), line)),
    )
    assert open_tokens(folder).tokens.count == 3


def test_one_of_several_processes_prepares_while_the_others_say_that_they_wait(
    tmp_path: Path,
) -> None:
    folder, log, lines, end = tmp_path / "cache" / "x", tmp_path / "log", FORK.Queue(), FORK.Event()
    processes = [FORK.Process(target=take_part, args=(folder, log, lines, end)) for _ in range(5)]
    for process in processes:
        process.start()
    waiting = {}
    while len(waiting) < 4:
        pid, line = lines.get(timeout=60)
        if "another process begins to prepare it" not in line:
            waiting[pid] = line
    end.set()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 5
    (preparer,) = log.read_text().split()
    expected = f"waiting for {folder}: process {preparer} on {os.uname().nodename} has been"
    assert all(expected in line for line in waiting.values())
    assert sorted(path.name for path in folder.parent.iterdir()) == [".x.lock", "x"]


def test_another_takes_over_from_a_killed_preparer_and_cleans_up(tmp_path: Path) -> None:
    folder, log, lines = tmp_path / "cache" / "x", tmp_path / "log", FORK.Queue()
    killed = FORK.Process(target=take_part, args=(folder, log, lines, FORK.Event()))
    killed.start()
    while not log.exists():
        time.sleep(0.02)
    half = folder.parent / f".x.{os.uname().nodename}.{killed.pid}.tmp"  # what `write` makes first
    half.mkdir()
    (half / "tokens.bin").write_bytes(b"half")
    heir = FORK.Process(target=take_part, args=(folder, log, lines, None))
    heir.start()
    assert f"process {killed.pid} on" in lines.get(timeout=60)[1]
    os.kill(killed.pid, signal.SIGKILL)
    heir.join(60)
    killed.join(60)
    assert heir.exitcode == 0
    assert log.read_text().split() == [str(killed.pid), str(heir.pid)]
    assert sorted(path.name for path in folder.parent.iterdir()) == [".x.lock", "x"]


def test_one_that_does_not_wait_leaves_it_to_the_other(tmp_path: Path) -> None:
    with open(tmp_path / ".x.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare_once(tmp_path / "x", lambda: pytest.fail("prepared twice"), print, wait=False)
    prepare_once(tmp_path / "x", lambda: write_tokens(tmp_path / "x", [1]), print, wait=False)
    assert (tmp_path / "x").is_dir()


def test_leaves_the_fresh_work_of_another_host_alone(tmp_path: Path) -> None:
    fresh, stale = tmp_path / ".x.elsewhere.1.tmp", tmp_path / ".x.elsewhere.2.tmp"
    for folder, age in ((fresh, 0), (stale, 7200)):
        folder.mkdir()
        (folder / "tokens.bin").touch()
        os.utime(folder / "tokens.bin", (time.time() - age,) * 2)
    prepare_once(tmp_path / "x", lambda: write_tokens(tmp_path / "x", [1]), print)
    assert fresh.exists()
    assert not stale.exists()


def test_a_failed_preparation_is_everyones_to_see_and_to_try_again(tmp_path: Path) -> None:
    def fail() -> None:
        raise InputError("no such text")

    for _ in range(2):
        with pytest.raises(InputError, match=r"no such text"):
            prepare_once(tmp_path / "x", fail, print)
    prepare_once(tmp_path / "x", lambda: write_tokens(tmp_path / "x", [1]), print)
    prepare_once(tmp_path / "x", fail, print)  # not called: the folder is there


def test_a_full_disk_of_the_cache_is_named(tmp_path: Path) -> None:
    """Without the name of a file a job takes the error for a fault of its own."""

    def fill() -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    with pytest.raises(OSError, match=r"No space left on device: '.*/x'"):
        prepare_once(tmp_path / "x", fill, print)


def test_a_lock_is_no_way_to_empty_another_file(tmp_path: Path) -> None:
    """In a folder that a group shares, anybody can compute the name of the lock, and put a link
    there."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".x.lock").symlink_to("victim")
    with pytest.raises(
        InputError, match=r"cache .* cannot be written \(.*/\.x\.lock: it is a link"
    ):
        prepare_once(tmp_path / "x", lambda: write_tokens(tmp_path / "x", [1]), print)
    assert (tmp_path / "victim").read_text() == "precious"
    (tmp_path / ".y.lock").hardlink_to(tmp_path / "victim")
    prepare_once(tmp_path / "y", lambda: write_tokens(tmp_path / "y", [1]), print)
    assert (tmp_path / "victim").read_text() == "precious"


def test_the_lock_of_another_user_keeps_nobody_from_preparing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He may have failed, and nobody else can write to his lock. His work in progress is his."""
    theirs, half = tmp_path / ".x.lock", tmp_path / f".x.{os.uname().nodename}.1.tmp"
    theirs.touch()
    half.mkdir()
    os.utime(half, (time.time(), time.time()))
    guarded, lstat = cache.open_guarded, Path.lstat

    def open_mine(path: Path, *more: Any, **words: Any) -> int:
        if path == theirs:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return guarded(path, *more, **words)

    def of_another(path: Path) -> os.stat_result:
        about = lstat(path)
        return os.stat_result([*about[:4], about.st_uid + (path == half), *about[5:]])

    monkeypatch.setattr(cache, "open_guarded", open_mine)
    monkeypatch.setattr(Path, "lstat", of_another)
    prepare_once(tmp_path / "x", lambda: write_tokens(tmp_path / "x", [1]), print)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [".x.lock", f".x.{os.geteuid()}.lock", half.name, "x"]
    )


def test_a_full_disk_has_no_room_for_the_name_of_who_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails is then the work itself, whose error names a file."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/x'"):
        prepare_once(tmp_path / "x", full, print)


def test_who_waits_for_one_that_gets_on_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start has a time limit for what does not."""
    folder, half, advances = tmp_path / "x", tmp_path / ".x.elsewhere.7.tmp", []
    half.mkdir()

    def say(_: str) -> None:
        advances.append(pending.advances())
        if len(advances) in (2, 3):
            (half / f"tokens.{len(advances)}").touch()
            os.utime(half / f"tokens.{len(advances)}", (2e9 + len(advances),) * 2)
        if len(advances) == 7:
            folder.mkdir()

    monkeypatch.setattr(cache, "_SAY_EVERY_S", 0.0)
    monkeypatch.setattr(cache, "_LONGEST_POLL_S", 0.001)
    with open(tmp_path / ".x.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare_once(folder, lambda: pytest.fail("prepared twice"), say)
    got_on = [after - before for before, after in itertools.pairwise(advances)]
    assert got_on == [1, 1, 1, 0, 0, 0], (
        "from the first look, and whenever something was written since"
    )


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cache .* cannot be written .*data\.cache"):
        prepare_once(tmp_path / "file" / "x", lambda: None, print)


@pytest.mark.parametrize("moment", ["the work", "the lock"])
def test_a_host_that_was_first_in_spite_of_the_lock_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It makes the folder while this process prepares it, or between its look and its lock."""

    def other_host(*_: object) -> bool:
        write_tokens(tmp_path / "x", [1])
        return True

    def prepare() -> None:
        assert moment == "the work", "prepared again"
        other_host()
        other_host()  # finds the folder of the other

    if moment == "the lock":
        monkeypatch.setattr(cache, "_try_lock", other_host)
    assert open_tokens(prepare_once(tmp_path / "x", prepare, print)).tokens.count == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.lock", "x"]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(None) == Path("/home/someone/.cache/meshtrain")
    assert cache_folder("~/here") == Path("/home/someone/here")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder(None) == Path("/cache/meshtrain")
