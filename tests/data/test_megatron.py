"""Megatron's .bin/.idx files, written here as its `_IndexWriter` writes them."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshtrain.data import OpenData
from meshtrain.errors import InputError

Opener = Callable[..., OpenData]

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_pair(
    prefix: Path,
    sequences: list[list[int]],
    *,
    documents: list[int] | None = None,
    dtype: str = "uint16",
    version: int = 1,
    modes: bool = False,
) -> str:
    lengths = np.array([len(one) for one in sequences], "<i4")
    places = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    bounds = np.array(documents if documents is not None else range(len(sequences) + 1), "<i8")
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(one, dtype).tobytes() for one in sequences))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", version, CODES[dtype], len(sequences), len(bounds))
        + lengths.tobytes()
        + places.astype("<i8").tobytes()
        + bounds.tobytes()
        + (bytes(len(sequences)) if modes else b"")
    )
    return str(prefix)


def tokens_of(samples) -> list[int]:
    return [token for index in range(len(samples)) for token in samples.item(index, 0)[0][0].tolist()]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("modes", [False, True])
def test_reads_every_type_of_token(opened: Opener, tmp_path: Path, dtype: str, modes: bool) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2, 3], [4], [5, 6, 127]], dtype=dtype, modes=modes)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        found = opened(source="megatron", path=path, validation=0, seq_len=2, n_outputs=128)
        assert tokens_of(found.train) == [1, 2, 3, 4, 5, 6]
        assert found.train.item(2, 0)[1].tolist() == [6, 127]
    assert found.bytes_per_target is None
    assert found.tokenizer is None


def test_documents_are_runs_of_sequences(opened: Opener, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2], [3], [4, 5, 6], [7], [8, 9]], documents=[0, 2, 3, 5])
    found = opened(source="megatron", path=prefix, validation=0.3, seq_len=1, mask_documents=True)
    assert tokens_of(found.train) == [1, 2, 3, 4, 5]
    assert tokens_of(found.validation) == [7, 8]
    assert "1 document" in found.about[-1]
    assert "the last of the file" in found.about[-1]
    long = opened(source="megatron", path=prefix, validation=0, seq_len=8, mask_documents=True)
    (_, positions, documents), _ = long.train.item(0, 0)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert documents.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_a_last_document_that_was_never_ended_counts(opened: Opener, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2], [3, 4]], documents=[0])
    assert tokens_of(opened(source="megatron", path=prefix, validation=0, seq_len=1).train) == [1, 2, 3]


def test_sequences_may_lie_anywhere(opened: Opener, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2], [3, 4, 5]])
    index = tmp_path / "x.idx"
    raw = bytearray(index.read_bytes())
    raw[34:42] = np.array([3, 2], "<i4").tobytes()
    raw[42:58] = np.array([4, 0], "<i8").tobytes()
    index.write_bytes(raw)
    assert tokens_of(opened(source="megatron", path=prefix, validation=0, seq_len=2).train) == [3, 4, 5, 1]


def test_nothing_is_copied(opened: Opener, tmp_path: Path) -> None:
    """A file that is changed while it is open is read as it is now."""
    prefix = write_pair(tmp_path / "x", [[1, 2, 3]])
    found = opened(source="megatron", path=prefix, validation=0, seq_len=2)
    assert tokens_of(found.train) == [1, 2]
    with open(tmp_path / "x.bin", "r+b") as file:
        file.write(np.array([7], "<u2").tobytes())
    assert tokens_of(found.train) == [7, 2]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("name", "cut"), [("x.bin", 2), ("x.bin", 1), ("x.idx", 1), ("x.idx", 8)])
def test_finds_a_truncated_file(opened: Opener, tmp_path: Path, name: str, cut: int) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2, 3]] * 10)
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - cut)
    with pytest.raises(InputError, match=rf"{name} is truncated: it has .* expected"):
        opened(source="megatron", path=prefix)


def test_finds_a_pair_that_does_not_belong_together(opened: Opener, tmp_path: Path) -> None:
    write_pair(tmp_path / "y", [[1, 2, 3]] * 10)
    prefix = write_pair(tmp_path / "x", [[1, 2, 3]] * 9)
    (tmp_path / "y.bin").replace(tmp_path / "x.bin")
    with pytest.raises(InputError, match=r"x\.bin is too long"):
        opened(source="megatron", path=prefix)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"version": 2}, "version 2: this reads version 1"),
        ({"dtype": "float32"}, "float32 .*expected a whole number"),
        ({"documents": [0, 2, 1, 3]}, "rise from 0 to 3"),
        ({"documents": [1, 3]}, "rise from 0 to 3"),
        ({"documents": [0, 4]}, "rise from 0 to 3"),
        ({"documents": []}, "rise from 0 to 3"),
    ],
)
def test_finds_a_wrong_index(opened: Opener, tmp_path: Path, keys: dict, message: str) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2], [3], [4]], **keys)
    with pytest.raises(InputError, match=message):
        opened(source="megatron", path=prefix, seq_len=1)


@pytest.mark.parametrize("content", [b"", b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00" + bytes(40)])
def test_finds_an_index_that_is_none(opened: Opener, tmp_path: Path, content: bytes) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2]])
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(InputError, match=r"not a Megatron index"):
        opened(source="megatron", path=prefix)


def test_names_a_missing_file(opened: Opener, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.idx cannot be read .*the prefix of a \.bin"):
        opened(source="megatron", path=str(tmp_path / "none"))
    prefix = write_pair(tmp_path / "x", [[1, 2]])
    (tmp_path / "x.bin").unlink()
    with pytest.raises(InputError, match=r"there is no file .*x\.bin"):
        opened(source="megatron", path=prefix)


def test_an_id_outside_is_found_at_the_start_or_in_its_sample(opened: Opener, tmp_path: Path) -> None:
    near = write_pair(tmp_path / "near", [[1, 2, 300, 4, 5]])
    with pytest.raises(InputError, match=r"near\.bin holds the token id 300, but model\.vocab_size is 300"):
        opened(source="megatron", path=near, validation=0, seq_len=2, n_outputs=300)
    assert tokens_of(opened(source="megatron", path=near, validation=0, seq_len=2, n_outputs=301).train)

    far = write_pair(tmp_path / "far", [[1] * 3_000_000 + [300, 1]])
    found = opened(source="megatron", path=far, validation=0, seq_len=1000, n_outputs=300)
    assert found.train.item(0, 0)
    with pytest.raises(InputError, match=r"far\.bin: sample 2999 \(training\) holds the token id 300"):
        found.train.item(2999, 0)


def test_a_negative_id_is_found(opened: Opener, tmp_path: Path) -> None:
    near = write_pair(tmp_path / "near", [[1, -2, 3]], dtype="int32")
    with pytest.raises(InputError, match=r"holds the token id -2"):
        opened(source="megatron", path=near, validation=0, seq_len=1)
    far = write_pair(tmp_path / "far", [[1] * 2_000_000 + [-5, 1]], dtype="int32")
    found = opened(source="megatron", path=far, validation=0, seq_len=1000)
    with pytest.raises(InputError, match=r"sample 1999 .* holds the token id -5"):
        found.train.item(1999, 0)
