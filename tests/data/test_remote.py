"""Token files in object storage: the samples are those of the same folder on a disk, whatever the
cache holds; and a cache never gives another block than was asked for."""

import json
import os
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from meshtrain.config import Config, ConfigErrors
from meshtrain.data import Document, remote, tokens, train_batches, write
from meshtrain.data.block_cache import BlockCache
from meshtrain.errors import InputError
from meshtrain.job import storage as job_storage
from tests.data.conftest import Opener
from tests.launching import forked

URL = "memory://bucket/tokens"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """20,000 tokens of 200 documents, some without a loss; and blocks of 1 KiB."""
    monkeypatch.setattr(remote, "BLOCK", 1 << 10)
    monkeypatch.setattr(tokens, "_FIRST_LOOK_BYTES", 1 << 10)
    random = np.random.default_rng(0)
    documents = []
    for _ in range(200):
        ids = random.integers(1, 300, 100)
        documents.append(Document(ids, random.integers(0, 2, 100).astype(np.uint8), 100))
    write(tmp_path / "tokens", documents, vocab_size=300, tokenizer="mine", source="a test")
    return tmp_path / "tokens"


@pytest.fixture
def bucket(folder: Path) -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/bucket/tokens", recursive=True)
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """The spans of tokens of each request for some."""
    requests: list[list[tuple[int, int]]] = []
    ranges = remote.RemoteFolder.ranges

    def note(self: Any, name: str, spans: list[tuple[int, int]]) -> list[bytes]:
        requests.append(spans)
        return ranges(self, name, spans)

    monkeypatch.setattr(remote.RemoteFolder, "ranges", note)
    return requests


def batches(opened: Opener, path: str | Path, workers: int = 0, **keys: Any) -> list[Any]:
    """All tokens and targets of two epochs."""
    keys = {"seq_len": 32, "mask_documents": True, "validation": 0, **keys}
    data = opened(source="tokens", path=str(path), **keys)
    steps = train_batches(
        data.train,
        seed=1,
        first_step=3,
        steps=150,
        global_size=8,
        micro_size=4,
        rank=0,
        ranks=1,
        workers=workers,
    )
    microbatches = chain.from_iterable(steps)
    return [[b.inputs[0].tolist(), b.targets.tolist(), b.samples] for b in microbatches]


@pytest.mark.parametrize("cache_gib", [1.0, 7 / 2**20])
def test_samples_are_those_of_the_folder_with_any_cache(
    cache_gib: float,
    folder: Path,
    bucket: Any,
    opened: Opener,
    reads: list[list[tuple[int, int]]],
    tmp_path: Path,
) -> None:
    """A microbatch is one request; the cache has no more than its size, and if that is enough each
    block comes once."""
    expected = batches(opened, folder)
    assert batches(opened, URL, cache_gib=cache_gib) == expected
    all_blocks = -(-2 * 20_000 // 1024)
    asked = [span for spans in reads for span in spans]
    assert len(reads) <= 1 + 2 * 147, "of the beginning, and of each microbatch"
    (cached,) = (tmp_path / "cache").glob("remote-*")
    size = (cached / "blocks.bin").stat().st_size
    if cache_gib == 1.0:
        assert len(asked) == len(set(asked)) == all_blocks
        reads.clear()
        assert batches(opened, URL, cache_gib=cache_gib) == expected
        assert reads == []
    else:
        assert size <= 7 * 1024
        assert len(asked) > 2 * all_blocks
    assert not (cached / "tokens.bin").exists()


def test_workers_read_the_same(folder: Path, bucket: Any, opened: Opener) -> None:
    assert batches(opened, f"file://{folder}", workers=2, cache_gib=7 / 2**20) == batches(
        opened, folder
    )


def test_another_version_of_the_folder_has_another_cache(
    folder: Path, bucket: Any, opened: Opener, tmp_path: Path
) -> None:
    batches(opened, URL)
    shutil.rmtree(folder)
    documents = [Document(np.full(100, n % 7)) for n in range(300)]
    write(folder, documents, vocab_size=300, tokenizer="mine", source="a test")
    bucket.rm("/bucket/tokens", recursive=True)
    bucket.put(str(folder), "/bucket/tokens", recursive=True)
    assert batches(opened, URL) == batches(opened, folder)


def test_a_block_is_found_where_it_was_put_and_nowhere_else(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 4, slots=3)
    assert cache.get(0, 4) is None
    cache.put(1, b"abcd")
    other = BlockCache(tmp_path, 4, slots=3)  # of another process
    assert other.get(1, 4) == b"abcd"
    assert other.get(4, 4) is None, "it would have the same slot"
    other.put(4, b"xy")  # the last one is shorter
    assert (cache.get(4, 2), cache.get(1, 4), cache.get(0, 4)) == (b"xy", None, None)


@pytest.mark.parametrize("name", ["blocks.bin", "slots.bin"])
def test_a_block_that_is_half_written_is_missing(name: str, tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 4, slots=3)
    cache.put(1, b"abcd")
    with open(tmp_path / name, "r+b") as file:
        file.seek(5 if name == "blocks.bin" else 16 + 9)
        file.write(b"?")
    assert cache.get(1, 4) is None
    cache.put(1, b"abcd")
    assert cache.get(1, 4) == b"abcd"
    os.truncate(tmp_path / name, 6)
    assert cache.get(1, 4) is None


def test_a_full_disk_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = BlockCache(tmp_path, 4, slots=3)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    cache.put(1, b"abcd")
    cache.put(2, b"abcd")
    assert cache.get(1, 4) is None
    assert capfd.readouterr().err.count("takes no more blocks (No space left on device)") == 1


def test_a_cache_that_was_larger_gives_its_disk_back(tmp_path: Path) -> None:
    large = BlockCache(tmp_path, 4, slots=9)
    for block in range(9):
        large.put(block, b"abcd")
    small = BlockCache(tmp_path, 4, slots=2)
    assert small.get(1, 4) == b"abcd"
    assert (tmp_path / "blocks.bin").stat().st_size == 8


def refusing(error: Exception) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    return refuse


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            FileNotFoundError(),
            r"there is no memory://bucket/tokens/header.json: data.path is the URL",
        ),
        (PermissionError("AccessDenied"), r"header.json may not be read \(PermissionError: Acc"),
        (type("NoCredentialsError", (Exception,), {})("none"), r"export the credentials of"),
    ],
)
def test_what_storage_refuses_is_said_at_once(
    error: Exception,
    says: str,
    bucket: Any,
    opened: Opener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(bucket), "size", refusing(error))
    with pytest.raises(InputError, match=says):
        opened(source="tokens", path=URL, seq_len=32)


def test_what_fails_for_a_while_is_tried_again(
    folder: Path,
    bucket: Any,
    opened: Opener,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(job_storage, "PAUSES_S", (0.0, 0.0))
    data = opened(source="tokens", path=URL, seq_len=32)
    expected = opened(source="tokens", path=folder, seq_len=32).train.item(50, 0)
    cat, fails = type(bucket).cat_file, [2]

    def failing(self: Any, *arguments: Any, **options: Any) -> bytes:
        if fails[0]:
            fails[0] -= 1
            raise ConnectionError("reset")
        return cat(self, *arguments, **options)

    monkeypatch.setattr(type(bucket), "cat_file", failing)
    assert str(data.train.item(50, 0)) == str(expected)
    assert capfd.readouterr().err.count("ConnectionError: reset; tried again") == 2
    fails[0] = 3
    with pytest.raises(OSError, match=r"cannot read memory://bucket/tokens/tokens.bin: Conn"):
        data.train.item(400, 0)


def test_a_truncated_file(folder: Path, bucket: Any, opened: Opener) -> None:
    bucket.pipe_file("/bucket/tokens/tokens.bin", b"x" * 100)
    with pytest.raises(InputError, match=r"tokens.bin has 100 bytes, and by its header 40,000"):
        opened(source="tokens", path=URL, seq_len=32)


def test_only_tokens_are_read_from_storage() -> None:
    keys = ["data.source=jsonl", "data.path=s3://bucket/x.jsonl"]
    with pytest.raises(ConfigErrors, match=r"s3://bucket/x.jsonl is in object storage, from which"):
        Config.load("quickstart", keys, for_training=True)
    keys = ["data.source=tokens", "data.path=s3://bucket/x"]
    assert Config.load("quickstart", keys, for_training=True).data.path == "s3://bucket/x"


@pytest.mark.timeout(300)
def test_a_run_on_two_ranks_goes_on_as_from_a_disk(folder: Path, tmp_path: Path) -> None:
    goes_on_as_from_a_disk(f"file://{folder}", folder, tmp_path)


def goes_on_as_from_a_disk(url: str, folder: Path, tmp_path: Path) -> None:
    """Where the cache of the run is lost in between."""
    model = "{name: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 300}"
    (tmp_path / "mine.yaml").write_text(
        f"model: {model}\nbatch: {{global_size: 4, micro_size: 2}}\noptimizer: {{warmup_steps: 0, schedule: constant}}\n"
        "train: {steps: 4, sample_tokens: 0, eval_every: 0}\ndata: {source: tokens, seq_len: 16, cache: cache}\n"
    )

    def losses(run: str, path: str, *overrides: str) -> list[float]:
        options = [f"train.output={run}", f"data.path={path}", *overrides]
        forked(2, "-m", "meshtrain.train", "mine.yaml", *options, cwd=tmp_path).check()
        rows = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row)["loss"] for row in rows]

    expected = losses("disk", str(folder))
    assert losses("storage", url, "checkpoint.every=2", "train.steps=2") == expected[:2]
    shutil.rmtree(tmp_path / "cache")
    assert losses("storage", url) == expected
