"""Token files: what is written is read, damage is found, and preparation happens once."""

import fcntl
import json
import multiprocessing
import os
import pickle
import signal
import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest

from meshtrain.data import OpenData, cache
from meshtrain.data.cache import cache_folder, prepare_once
from meshtrain.data.tokens import Document, Header, open_tokens, smallest_dtype, write
from meshtrain.errors import InputError

FORK = multiprocessing.get_context("fork")


def make(folder: Path, documents: list[Document], vocab_size: int = 300) -> Path:
    write(folder, documents, vocab_size=vocab_size, tokenizer="made up", source="a test")
    return folder


def some(folder: Path) -> Path:
    first = Document(np.array([5, 6, 299]), text_bytes=11)
    second = Document(np.array([1, 2, 3, 4]), np.array([0, 0, 1, 1]), text_bytes=7)
    return make(folder, [first, Document(np.array([], int)), second])


@pytest.mark.parametrize("source", ["tokens", "megatron"])
def test_memory_does_not_grow_with_documents(opened: Callable[..., OpenData], tmp_path: Path, source: str) -> None:
    """Of 3 million documents a rank keeps nothing, and no array of 8 bytes for each is made on the way."""
    documents, size = 3_000_000, 4
    (tmp_path / "tokens.bin").write_bytes(bytes(range(1, size + 1)) * documents)
    offsets = np.arange(0, documents * size + 1, size, "<i8")
    if source == "tokens":
        offsets.tofile(tmp_path / "documents.bin")
        header = Header(1, "uint8", documents * size, documents, size, None, False, "a name", "bytes", "a test")
        (tmp_path / "header.json").write_text(json.dumps(asdict(header)))
    else:
        places = [np.full(documents, size, "<i4"), offsets[:-1], np.arange(documents + 1, dtype="<i8")]
        about = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 1, documents, documents + 1)
        (tmp_path / "tokens.idx").write_bytes(about + b"".join(array.tobytes() for array in places))
    path = str(tmp_path / "tokens" if source == "megatron" else tmp_path)
    tracemalloc.start()
    try:
        data = opened(source=source, path=path, validation=0.1, seq_len=size + 2, mask_documents=True)
        inputs, _ = data.train.item(1000, 0)
        after, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert inputs[2].tolist() == [0, 0, 0, 0, 1, 1]
    assert after < documents
    assert most < 4 * documents
    assert len(pickle.dumps(data)) < 10_000, "workers map the files themselves"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = open_tokens(some(tmp_path / "a"))
    assert found.tokens.array.tolist() == [5, 6, 299, 1, 2, 3, 4]
    assert found.tokens.array.dtype == np.uint16
    whole = found.piece(0, 2)
    assert [*whole.starts, *whole.lengths] == [0, 3, 3, 4]
    assert found.loss is not None
    assert found.loss.array.tolist() == [1, 1, 1, 0, 0, 1, 1]
    assert found.text_bytes is not None
    assert found.text_bytes.array.tolist() == [11, 7]
    assert (found.tokens.count, found.documents, found.largest_id) == (7, 2, 299)
    header = json.loads((tmp_path / "a" / "header.json").read_text())
    assert [header[key] for key in ("tokens", "documents", "largest_id", "text_bytes")] == [7, 2, 299, 18]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "bytes.bin",
        "checksums.json",
        "documents.bin",
        "header.json",
        "loss.bin",
        "tokens.bin",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_files_that_say_nothing_are_not_written(tmp_path: Path) -> None:
    found = open_tokens(make(tmp_path / "a", [Document(np.array([1, 2]))]))
    assert found.loss is None
    assert found.text_bytes is None
    assert json.loads((tmp_path / "a" / "header.json").read_text())["text_bytes"] is None
    assert not (tmp_path / "a" / "loss.bin").exists()


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (2**32, "uint32")],
)
def test_smallest_dtype_holds_every_id(vocab_size: int, name: str) -> None:
    assert smallest_dtype(vocab_size) == name


def test_the_fingerprint_names_the_content(tmp_path: Path) -> None:
    one, same = some(tmp_path / "a"), some(tmp_path / "b")
    others = [
        make(tmp_path / "c", [Document(np.array([5, 6, 299, 1, 2, 3, 4]))]),
        make(tmp_path / "d", [Document(np.array([5, 6, 299])), Document(np.array([1, 2, 3, 4]))]),
        make(tmp_path / "e", [Document(np.array([5, 6, 298])), Document(np.array([1, 2, 3, 4]))]),
    ]
    fingerprints = [open_tokens(folder).fingerprint for folder in [one, *others]]
    assert len(set(fingerprints)) == 4
    assert open_tokens(same).fingerprint == fingerprints[0]


@pytest.mark.parametrize(("ids", "found"), [([1, 300], "300"), ([-1, 4], "-1")])
def test_refuses_to_write_an_id_outside(tmp_path: Path, ids: list[int], found: str) -> None:
    with pytest.raises(InputError, match=rf"document 0 of a test holds the token id {found}; expected 0 to 299"):
        make(tmp_path / "a", [Document(np.array(ids))])
    assert list(tmp_path.iterdir()) == []


def test_refuses_to_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no text"):
        make(tmp_path / "a", [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "bytes.bin", "loss.bin"])
def test_finds_a_truncated_file(tmp_path: Path, name: str) -> None:
    path = some(tmp_path / "a") / name
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(InputError, match=rf"{name} is truncated: it has {size - 1} bytes, expected {size}"):
        open_tokens(tmp_path / "a")
    path.write_bytes(b"x" * (size + 1))
    with pytest.raises(InputError, match=r"too long"):
        open_tokens(tmp_path / "a")
    path.unlink()
    with pytest.raises(InputError, match=rf"there is no file .*{name}"):
        open_tokens(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, and this meshtrain reads up to 1"),
        ({"format": None}, "has no `format`"),
        ({"dtype": "object"}, "damaged .*dtype"),
        ({"tokens": "7"}, "damaged .*tokens"),
        ({"documents": True}, "damaged .*documents"),
        ({"fingerprint": None}, "damaged .*fingerprint"),
        ({"tokens": 0}, "damaged"),
    ],
)
def test_finds_a_damaged_header(tmp_path: Path, change: dict, message: str) -> None:
    path = some(tmp_path / "a") / "header.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        open_tokens(tmp_path / "a")


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x80\x81"])
def test_finds_a_header_that_is_none(tmp_path: Path, content: str) -> None:
    (some(tmp_path / "a") / "header.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"not JSON|no `format`"):
        open_tokens(tmp_path / "a")


def test_finds_damaged_offsets(tmp_path: Path) -> None:
    (some(tmp_path / "a") / "documents.bin").write_bytes(np.array([0, 8, 7], "<i8").tobytes())
    with pytest.raises(InputError, match=r"offsets that rise from 0 to 7"):
        open_tokens(tmp_path / "a")


def test_refuses_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a folder of prepared tokens"):
        open_tokens(tmp_path / "nowhere")


def test_an_opened_file_travels_as_its_path(tmp_path: Path) -> None:
    found = open_tokens(make(tmp_path / "a", [Document(np.arange(250).repeat(1000))]))
    assert len(found.tokens.array) == 250_000
    sent = pickle.dumps(found.tokens)
    assert len(sent) < 2000
    assert (pickle.loads(sent).array == found.tokens.array).all()


# Preparation


def prepare_slowly(folder: Path, log: Path, end: Event | None = None) -> None:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    if end is not None:
        end.wait()
    make(folder, [Document(np.array([1, 2, 3]))])


def take_part(folder: Path, log: Path, lines: "multiprocessing.Queue[tuple[int, str]]", end: Event | None) -> None:
    cache._SAY_EVERY_S = 0.1
    prepare_once(folder, lambda: prepare_slowly(folder, log, end), lambda line: lines.put((os.getpid(), line)))
    assert open_tokens(folder).tokens.count == 3


def test_one_of_several_processes_prepares_while_the_others_say_that_they_wait(tmp_path: Path) -> None:
    folder, log, lines, end = tmp_path / "cache" / "x", tmp_path / "log", FORK.Queue(), FORK.Event()
    processes = [FORK.Process(target=take_part, args=(folder, log, lines, end)) for _ in range(5)]
    for process in processes:
        process.start()
    waiting = {}
    while len(waiting) < 4:
        pid, line = lines.get(timeout=30)
        if "another process begins to prepare it" not in line:
            waiting[pid] = line
    end.set()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 5
    pids = log.read_text().split()
    assert len(pids) == 1
    said = f"waiting for {folder}: process {pids[0]} on {os.uname().nodename} has been"
    assert all(said in line for line in waiting.values())
    assert sorted(path.name for path in folder.parent.iterdir()) == [".x.lock", "x"]


def test_one_that_does_not_wait_leaves_it_to_the_other(tmp_path: Path) -> None:
    with open(tmp_path / ".x.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare_once(tmp_path / "x", lambda: pytest.fail("prepared twice"), print, wait=False)
    prepare_once(tmp_path / "x", lambda: prepare_slowly(tmp_path / "x", tmp_path / "log"), print, wait=False)
    assert (tmp_path / "x").is_dir()


def test_the_fingerprint_of_a_corpus_stays(tmp_path: Path) -> None:
    """Checkpoints have it: a run would not go on with data that seem to be other ones."""
    assert (
        open_tokens(some(tmp_path / "a")).fingerprint
        == "6bcd73ad36e50109306091e821e70c1fd82a7ef780c9ffe2bb10b748b8d462c5"
    )


def test_another_takes_over_from_a_killed_preparer_and_cleans_up(tmp_path: Path) -> None:
    folder, log, lines = tmp_path / "cache" / "x", tmp_path / "log", FORK.Queue()
    doomed = FORK.Process(target=take_part, args=(folder, log, lines, FORK.Event()))
    doomed.start()
    while not log.exists():
        time.sleep(0.02)
    left = folder.parent / f".x.{os.uname().nodename}.{doomed.pid}.tmp"  # what `write` makes first
    left.mkdir()
    (left / "tokens.bin").write_bytes(b"half")
    heir = FORK.Process(target=take_part, args=(folder, log, lines, None))
    heir.start()
    assert f"process {doomed.pid} on" in lines.get(timeout=60)[1]
    os.kill(doomed.pid, signal.SIGKILL)
    heir.join(30)
    doomed.join(30)
    assert heir.exitcode == 0
    assert log.read_text().split() == [str(doomed.pid), str(heir.pid)]
    assert sorted(path.name for path in folder.parent.iterdir()) == [".x.lock", "x"]


def test_leaves_the_fresh_work_of_another_host_alone(tmp_path: Path) -> None:
    fresh, stale = tmp_path / ".x.elsewhere.1.tmp", tmp_path / ".x.elsewhere.2.tmp"
    for folder, age in ((fresh, 0), (stale, 7200)):
        folder.mkdir()
        (folder / "tokens.bin").touch()
        os.utime(folder / "tokens.bin", (time.time() - age,) * 2)
    prepare_once(tmp_path / "x", lambda: prepare_slowly(tmp_path / "x", tmp_path / "log"), print)
    assert fresh.exists()
    assert not stale.exists()


def test_a_failed_preparation_is_everyones_to_see_and_to_try_again(tmp_path: Path) -> None:
    def fail() -> None:
        raise InputError("no such text")

    for _ in range(2):
        with pytest.raises(InputError, match=r"no such text"):
            prepare_once(tmp_path / "x", fail, print)
    prepare_once(tmp_path / "x", lambda: prepare_slowly(tmp_path / "x", tmp_path / "log"), print)
    prepare_once(tmp_path / "x", fail, print)  # not called: the folder is there


def test_a_full_disk_of_the_cache_is_named(tmp_path: Path) -> None:
    """Without the name of a file a job takes the error for a fault of its own."""

    def fill() -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    with pytest.raises(OSError, match=r"No space left on device: '.*/x'"):
        prepare_once(tmp_path / "x", fill, print)


def test_a_host_that_was_first_in_spite_of_the_lock_is_no_error(tmp_path: Path) -> None:
    def twice() -> None:
        some(tmp_path / "x")
        some(tmp_path / "x")  # finds the folder of the other

    assert open_tokens(prepare_once(tmp_path / "x", twice, print)).tokens.count == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.lock", "x"]


def test_a_folder_made_between_the_look_and_the_lock_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock_too_late(_: object) -> bool:
        some(tmp_path / "x")
        return True

    monkeypatch.setattr(cache, "_try_lock", lock_too_late)
    prepare_once(tmp_path / "x", lambda: pytest.fail("prepared again"), print)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cache .* cannot be written .*data\.cache"):
        prepare_once(tmp_path / "file" / "x", lambda: None, print)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(None) == Path("/home/someone/.cache/meshtrain")
    assert cache_folder("~/here") == Path("/home/someone/here")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder(None) == Path("/cache/meshtrain")
