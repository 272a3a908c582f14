"""One rank's file: what is written is read, by any rows and by the safetensors library; what is
damaged is named."""

import json
import math
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from meshtrain.checkpoint import shard_file
from meshtrain.checkpoint.manifest import File
from meshtrain.checkpoint.shard_file import BLOCK, FORMAT, Shard, write_shard
from meshtrain.errors import DamagedError
from meshtrain.huggingface.safetensors import SIZES, Entry
from meshtrain.job.storage import fsync_file
from tests.checkpoint.by_hand import data_of, flip
from tests.properties import given, settings, st

# 8.6 MiB: 3 blocks
LARGE = np.random.default_rng(0).integers(0, 2**32, (1100, 2048), dtype=np.uint32).view(np.int32)
TENSORS = {
    "model.large": LARGE,
    "model.half": np.arange(7, dtype=np.float16),  # what follows lies at an odd place
    "optimizer.step": np.array([3.0], np.float32),
    "model.nothing": np.zeros((0, 5), np.float32),
    'model.ünicode "name"': np.arange(6, dtype=np.int64).reshape(1, 2, 3),
}
TYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64"}


def write(path: Path, tensors: dict[str, np.ndarray] = TENSORS) -> File:
    named = [
        (Entry(name, TYPES[one.dtype.name], one.shape), one.data) for name, one in tensors.items()
    ]
    return write_shard(path, named)


def read(shard: Shard, name: str, rows: slice | None = None) -> bytes:
    """Rows of an entry, or all of it."""
    entry = shard.entries.get(name, Entry(name, "F32", ()))
    rows = rows or slice(0, entry.shape[0] if entry.shape else 1)
    row = math.prod(entry.shape[1:]) * SIZES[entry.dtype]
    room = bytearray((rows.stop - rows.start) * row)
    shard.read_bytes(name, rows.start * row, memoryview(room))
    return bytes(room)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, File]:
    path = tmp_path_factory.mktemp("shard") / "rank_00000.safetensors"
    return path, write(path)


def test_it_is_a_file_of_the_safetensors_library(shard: tuple[Path, File], tmp_path: Path) -> None:
    path, file = shard
    content = path.read_bytes()
    assert file == File(len(content), f"{zlib.crc32(content):08x}")
    assert data_of(path) % 4096 == 0
    tensors = load_file(path)
    assert tensors.keys() == TENSORS.keys()
    assert all(np.array_equal(tensors[name], TENSORS[name]) for name in TENSORS)
    write(tmp_path / "empty", {})
    assert load_file(tmp_path / "empty") == {}


@settings(max_examples=15)
@given(st.sampled_from(list(TENSORS)), st.data())
def test_any_rows_are_read(shard: tuple[Path, File], name: str, data: st.DataObject) -> None:
    whole = TENSORS[name]
    start = data.draw(st.integers(0, len(whole)))
    rows = slice(start, data.draw(st.integers(start, len(whole))))
    with Shard(*shard) as opened:
        assert read(opened, name, rows) == whole[rows].tobytes()
        assert read(opened, name) == whole.tobytes()
        with pytest.raises(DamagedError, match="were to be read"):
            opened.read_bytes(name, whole.nbytes, memoryview(bytearray(1)))


def test_what_the_writer_is_given_has_to_fit(shard: tuple[Path, File], tmp_path: Path) -> None:
    data = np.zeros(4, np.float32).data
    with pytest.raises(ValueError, match="16 were given"):
        write_shard(tmp_path / "a", [(Entry("x", "F32", (5,)), data)])
    with pytest.raises(ValueError, match="one name"):
        write_shard(tmp_path / "b", [(Entry("x", "F32", (4,)), data)] * 2)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileExistsError):
        write(shard[0])


def test_a_disk_that_takes_a_little_at_a_time_gets_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_some, read_some = os.write, os.preadv
    monkeypatch.setattr(
        shard_file.os, "write", lambda file, view: write_some(file, view[:1_000_000])
    )
    file = write(tmp_path / "a")
    monkeypatch.setattr(
        shard_file.os, "preadv", lambda file, views, at: read_some(file, [views[0][:999_999]], at)
    )
    with Shard(tmp_path / "a", file) as opened:
        assert read(opened, "model.large") == LARGE.tobytes()


# Damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 5, LARGE.nbytes - 1])
def test_a_flipped_bit_is_found_by_whoever_reads_its_block(tmp_path: Path, at: int) -> None:
    path = tmp_path / "rank_00000.safetensors"
    file = write(path)
    flip(path, 8 * (data_of(path) + at) + 4)
    with Shard(path, file) as damaged:
        assert read(damaged, "model.half") == TENSORS["model.half"].tobytes()
        with pytest.raises(
            DamagedError, match=r"rank_00000.safetensors: model.large: its bytes"
        ) as caught:
            read(damaged, "model.large", slice(at // (4 * 2048), at // (4 * 2048) + 1))
        assert (caught.value.file, caught.value.tensor) == (path, "model.large")
        assert [problem.tensor for problem in damaged.verify()] == ["model.large"]
        far = 1 if at >= BLOCK else 1090
        assert read(damaged, "model.large", slice(far, far + 1)) == LARGE[far : far + 1].tobytes()


def test_every_flipped_bit_of_a_header_is_found(tmp_path: Path) -> None:
    """The data is whole, so it is the header's own sum, or its length, that tells."""
    path = tmp_path / "rank_00000.safetensors"
    file = write(path, {"a": np.zeros((4, 2), np.float32)})
    room, text = 8 * data_of(path), 8 * len(path.read_bytes()[: data_of(path)].rstrip())
    for bit in (*range(text), *range(text, room, 101)):  # what follows the text is blank
        flip(path, bit)
        with pytest.raises(DamagedError, match=r"rank_00000\.safetensors"):
            Shard(path, file).close()
        flip(path, bit)
    Shard(path, file).close()


def test_a_file_cut_short_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    file = write(path)
    with Shard(path, file) as opened:
        os.truncate(path, data_of(path) + 5 * 2**20)
        assert read(opened, "model.large", slice(0, 1)) == LARGE[:1].tobytes()
        with pytest.raises(DamagedError, match=r"model\.large: ends after"):
            read(opened, "model.large")
    with pytest.raises(DamagedError, match="were written"):
        Shard(path, file)


def test_what_is_not_there(shard: tuple[Path, File]) -> None:
    problems = r"model\.half: has 14 bytes; -?\d+ to \d+ were to be read"
    with Shard(*shard) as opened:
        with pytest.raises(DamagedError, match=r"model\.other: is not in the file"):
            read(opened, "model.other")
        for rows in (slice(0, 9), slice(-1, 2)):
            with pytest.raises(DamagedError, match=problems):
                read(opened, "model.half", rows)


def headed(header: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    header = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def made(
    shape: str = "[2]",
    dtype: str = '"F32"',
    offsets: str = "[0, 8]",
    entry: str = '"x": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}',
    sums: str = f'{{"x": ["{zlib.crc32(bytes(8)):08x}"]}}',
    format: str = FORMAT,
    block: str = str(BLOCK),
    data: int = 8,
    header: str | None = None,
    length: int | None = None,
) -> bytes:
    """A file with a tensor of two zeros, or one that differs in a part (refused_files.yaml)."""
    if header is not None:
        return headed(header, length=length)
    metadata = json.dumps({"format": format, "block": block, "crc32": sums})
    entries = (
        entry.format(shape=shape, dtype=dtype, offsets=offsets)
        if entry.startswith('"x": {{')
        else entry
    )
    return headed(f'{{"__metadata__": {metadata}{", " if entries else ""}{entries}}}', bytes(data))


def hostile_files() -> dict[str, bytes]:
    rows = yaml.safe_load(Path(__file__).with_name("refused_files.yaml").read_text())
    return {row.pop("what"): made(**row) for row in rows} | {
        "nothing": b"",
        "seven bytes": b"1234567",
        "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
        "no UTF-8": headed(b'{"\xff": 1}'),
        "deep nesting": headed("[" * 100_000),
        "deep nesting that ends": headed("[" * 900 + "]" * 900),
        "deep nesting in the sums": made(sums="[" * 100_000),
        "a size with many digits": made(f"[{'9' * 4000}]"),
        "a size with too many digits": made(f"[{'9' * 5000}]"),
        "too many dims": made(f"[2{', 1' * 64}]"),
    }


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    taken = []
    for name, content in hostile_files().items():
        path.write_bytes(content)
        for expected in (None, File(len(content), f"{zlib.crc32(content):08x}")):
            try:
                Shard(path, expected)
                taken.append(name)
            except DamagedError as error:
                if path.name not in str(error) or len(str(error)) >= 500 + len(str(path)):
                    taken.append(f"{name}: {error}")
    assert taken == []
    path.write_bytes(made())  # how they are made is not what is wrong
    with Shard(path, File(len(made()), f"{zlib.crc32(made()):08x}")) as shard:
        assert read(shard, "x") == bytes(8)


def test_a_large_header_takes_no_memory_before_it_is_known_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with a hole of a terabyte costs nothing on disk, and must not cost memory either."""
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(struct.pack("<Q", 2**40 - 8))
    os.truncate(path, 2**40)
    asked: list[int] = []
    read: Callable[..., int] = os.preadv
    monkeypatch.setattr(
        shard_file.os,
        "preadv",
        lambda file, views, at: asked.append(len(views[0])) or read(file, views, at),
    )
    with pytest.raises(DamagedError, match="its header would have"):
        Shard(path, None)
    assert asked == [8]


def test_what_was_written_leaves_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync"))
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda file, begin, size, advice: calls.append(f"{begin} {size} {advice}"),
    )
    with (tmp_path / "file").open("wb") as file:
        fsync_file(file)
    assert calls == ["fsync", f"0 0 {os.POSIX_FADV_DONTNEED}"], (
        "pages that are not on disk would stay"
    )
