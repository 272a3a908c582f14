"""One rank's file: what is written is read, by any rows and by the safetensors library; what is damaged is named."""

import json
import math
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshtrain.checkpoint import shard_file
from meshtrain.checkpoint.manifest import File
from meshtrain.checkpoint.shard_file import BLOCK, FORMAT, Shard, write_shard
from meshtrain.errors import DamagedError
from meshtrain.huggingface.safetensors import SIZES, Entry
from meshtrain.job.storage import fsync_file
from tests.properties import given, settings, st

LARGE = np.random.default_rng(0).integers(0, 2**32, (1100, 2048), dtype=np.uint32).view(np.int32)  # 8.6 MiB: 3 blocks
TENSORS = {
    "model.large": LARGE,
    "model.half": np.arange(7, dtype=np.float16),  # what follows lies at an odd place
    "optimizer.step": np.array([3.0], np.float32),
    "model.nothing": np.zeros((0, 5), np.float32),
    'model.ünicode "name"': np.arange(6, dtype=np.int64).reshape(1, 2, 3),
}
TYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64"}


def write(path: Path, tensors: dict[str, np.ndarray] = TENSORS) -> File:
    named = [(Entry(name, TYPES[one.dtype.name], one.shape), one.data) for name, one in tensors.items()]
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


def test_size_and_checksum_are_those_of_the_file(shard: tuple[Path, File]) -> None:
    path, file = shard
    text = path.read_bytes()
    assert file == File(len(text), f"{zlib.crc32(text):08x}")
    assert data_of(path) % 4096 == 0


def test_the_safetensors_library_reads_it(shard: tuple[Path, File], tmp_path: Path) -> None:
    found = load_file(shard[0])
    assert found.keys() == TENSORS.keys()
    assert all(np.array_equal(found[name], TENSORS[name]) for name in TENSORS)
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


def test_only_the_blocks_that_are_needed_are_read(shard: tuple[Path, File], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    preadv = os.preadv

    def counted(file: int, views: list[memoryview], at: int) -> int:
        seen.append(len(views[0]))
        return preadv(file, views, at)

    with Shard(*shard) as opened:
        monkeypatch.setattr(shard_file.os, "preadv", counted)
        read(opened, "model.large", slice(0, 3))
        read(opened, "model.large", slice(511, 513))
    assert seen == [BLOCK, BLOCK, BLOCK]


def test_a_file_is_never_overwritten(shard: tuple[Path, File]) -> None:
    with pytest.raises(FileExistsError):
        write(shard[0])


def test_what_the_writer_is_given_has_to_fit(tmp_path: Path) -> None:
    data = np.zeros(4, np.float32).data
    with pytest.raises(ValueError, match="16 were given"):
        write_shard(tmp_path / "a", [(Entry("x", "F32", (5,)), data)])
    with pytest.raises(ValueError, match="one name"):
        write_shard(tmp_path / "b", [(Entry("x", "F32", (4,)), data)] * 2)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_refuses_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, view: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_file.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a")


def test_a_disk_that_takes_a_little_at_a_time_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_some, read_some = os.write, os.preadv
    monkeypatch.setattr(shard_file.os, "write", lambda file, view: write_some(file, view[:1_000_000]))
    file = write(tmp_path / "a")
    monkeypatch.setattr(shard_file.os, "preadv", lambda file, views, at: read_some(file, [views[0][:999_999]], at))
    with Shard(tmp_path / "a", file) as opened:
        assert read(opened, "model.large") == LARGE.tobytes()


# Damage -------------------------------------------------------------------------------------------------------------


def data_of(path: Path) -> int:
    """Where the tensors' bytes begin."""
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 5, LARGE.nbytes - 1])
def test_a_flipped_bit_is_found_by_whoever_reads_its_block(tmp_path: Path, at: int) -> None:
    path = tmp_path / "rank_00000.safetensors"
    file = write(path)
    with path.open("r+b") as opened:
        flip(opened.fileno(), 8 * (data_of(path) + at) + 4)
    with Shard(path, file) as damaged:
        assert read(damaged, "model.half") == TENSORS["model.half"].tobytes()
        with pytest.raises(DamagedError, match=r"rank_00000.safetensors: model.large: its bytes") as caught:
            read(damaged, "model.large", slice(at // (4 * 2048), at // (4 * 2048) + 1))
        assert (caught.value.file, caught.value.tensor) == (path, "model.large")
        assert [problem.tensor for problem in damaged.verify()] == ["model.large"]
        far = 1 if at >= BLOCK else 1090
        assert read(damaged, "model.large", slice(far, far + 1)) == LARGE[far : far + 1].tobytes()


def test_every_flipped_bit_of_a_header_is_found(tmp_path: Path) -> None:
    """The data is whole, so it is the header's own sum, or its length, that tells."""
    path = tmp_path / "rank_00000.safetensors"
    file = write(path, {"a": np.zeros((4, 2), np.float32)})
    with path.open("r+b") as opened:
        room, text = 8 * data_of(path), 8 * len(path.read_bytes()[: data_of(path)].rstrip())
        for bit in (*range(text), *range(text, room, 101)):  # what follows the text is blank
            flip(opened.fileno(), bit)
            with pytest.raises(DamagedError, match=r"rank_00000\.safetensors"):
                Shard(path, file).close()
            flip(opened.fileno(), bit)
    Shard(path, file).close()


def flip(file: int, bit: int) -> None:
    os.pwrite(file, bytes([os.pread(file, 1, bit // 8)[0] ^ 1 << bit % 8]), bit // 8)


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
    with Shard(*shard) as opened:
        with pytest.raises(DamagedError, match=r"model\.other: is not in the file"):
            read(opened, "model.other")
        for rows in (slice(0, 9), slice(-1, 2)):
            with pytest.raises(DamagedError, match=r"model\.half: has 14 bytes; -?\d+ to \d+ were to be read"):
                read(opened, "model.half", rows)


def test_no_link_is_followed_and_no_pipe_waited_for(shard: tuple[Path, File], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(shard[0])
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, what in {"link": "is a link", "pipe": "no file", "folder": "no file", "nothing": "is missing"}.items():
        with pytest.raises(DamagedError, match=what):
            Shard(tmp_path / name, shard[1])


def headed(text: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def about(entries: str = "", sums: str = "{}", fmt: str = FORMAT, block: str = str(BLOCK)) -> str:
    metadata = json.dumps({"format": fmt, "block": block, "crc32": sums})
    return f'{{"__metadata__": {metadata}{", " if entries else ""}{entries}}}'


def entry(shape: str = "[2]", dtype: str = '"F32"', offsets: str = "[0, 8]", more: str = "") -> str:
    return f'"x": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}{more}}}'


ONE = '{"x": ["00000000"]}'
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "a header of 2^60 bytes": headed("{}", length=2**60),
    "a header longer than the file": headed("{}", length=3),
    "a header of 2^64 - 1 bytes": headed("{}", length=2**64 - 1),
    "a header of one byte": headed("{", length=1),
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
    "no JSON": headed("{x}"),
    "no UTF-8": headed(b'{"\xff": 1}'),
    "a list": headed("[]"),
    "another file": headed('{"__metadata__": {"format": "pt"}}'),
    "no metadata": headed("{}"),
    "metadata that is a text": headed('{"__metadata__": "format"}'),
    "another format": headed(about(fmt="meshtrain checkpoint 2")),
    "another block": headed(about(block=str(2**60))),
    "deep nesting": headed("[" * 100_000),
    "deep nesting that ends": headed("[" * 900 + "]" * 900),
    "deep nesting in the sums": headed(about(sums="[" * 100_000)),
    "sums that are a list": headed(about(sums="[]")),
    "no sums of a tensor": headed(about(entry()), bytes(8)),
    "sums of no tensor": headed(about(sums=ONE)),
    "too many sums": headed(about(entry(), '{"x": ["00000000", "00000000"]}'), bytes(8)),
    "a sum that is a number": headed(about(entry(), '{"x": [0]}'), bytes(8)),
    "a sum that is none": headed(about(entry(), '{"x": ["0000000g"]}'), bytes(8)),
    "a sum in other digits": headed(about(entry(), '{"x": ["٠٠٠٠٠٠٠٠"]}'), bytes(8)),
    "a name twice": headed(about(f"{entry()}, {entry(offsets='[8, 16]')}", ONE), bytes(16)),
    "a negative shape": headed(about(entry("[-2]"), ONE), bytes(8)),
    "two negative sizes": headed(about(entry("[-1, -2]"), ONE), bytes(8)),
    "a shape that overflows": headed(about(entry(f"[{2**32}, {2**32}, 2]"), ONE), bytes(8)),
    "a size with many digits": headed(about(entry(f"[{'9' * 4000}]"), ONE), bytes(8)),
    "a size with too many digits": headed(about(entry(f"[{'9' * 5000}]"), ONE), bytes(8)),
    "a shape of true": headed(about(entry("[2, true]"), ONE), bytes(8)),
    "a shape of NaN": headed(about(entry("[NaN]"), ONE), bytes(8)),
    "a shape of 1e999": headed(about(entry("[1e999]"), ONE), bytes(8)),
    "a shape of floats": headed(about(entry("[2.0]"), ONE), bytes(8)),
    "a shape that is none": headed(about(entry("2"), ONE), bytes(8)),
    "too many dims": headed(about(entry(f"[2{', 1' * 64}]"), ONE), bytes(8)),
    "an unknown type": headed(about(entry(dtype='"F8"'), ONE), bytes(8)),
    "a type that is a list": headed(about(entry(dtype='["F32"]'), ONE), bytes(8)),
    "more keys": headed(about(entry(more=', "stride": 1'), ONE), bytes(8)),
    "a gap": headed(about(entry(offsets="[8, 16]"), ONE), bytes(16)),
    "offsets of nothing": headed(about(entry(offsets="[0]"), ONE), bytes(8)),
    "data that is too short": headed(about(entry(), ONE), bytes(7)),
    "data that is too long": headed(about(entry(), ONE), bytes(9)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(HOSTILE[name])
    for expected in (None, File(len(HOSTILE[name]), f"{zlib.crc32(HOSTILE[name]):08x}")):
        with pytest.raises(DamagedError, match=r"rank_00000\.safetensors") as caught:
            Shard(path, expected)
        assert len(str(caught.value)) < 500 + len(str(path))


def test_a_file_made_by_hand_as_these_is_taken_if_nothing_is_wrong(tmp_path: Path) -> None:
    text = headed(about(entry(), f'{{"x": ["{zlib.crc32(bytes(8)):08x}"]}}'), bytes(8))
    (tmp_path / "a").write_bytes(text)
    with Shard(tmp_path / "a", File(len(text), f"{zlib.crc32(text):08x}")) as opened:
        assert read(opened, "x") == bytes(8)


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
        shard_file.os, "preadv", lambda file, views, at: asked.append(len(views[0])) or read(file, views, at)
    )
    with pytest.raises(DamagedError, match="its header would have"):
        Shard(path, None)
    assert asked == [8]


def test_what_was_written_leaves_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync"))
    monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, size, advice: calls.append(f"{begin} {size} {advice}"))
    with (tmp_path / "file").open("wb") as file:
        fsync_file(file)
    assert calls == ["fsync", f"0 0 {os.POSIX_FADV_DONTNEED}"], "pages that are not on disk would stay"
