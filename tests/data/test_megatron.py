"""Megatron's .bin/.idx files, read in place; damaged ones are in refusals.yaml."""

from pathlib import Path

import numpy as np
import pytest

from meshtrain.errors import InputError
from tests.data.conftest import Opener
from tests.data.files import write_pair
from tests.data.test_text import read_all


@pytest.mark.parametrize("modes", [False, True])
def test_reads_every_type_of_token(opened: Opener, tmp_path: Path, modes: bool) -> None:
    for dtype in ("uint8", "int8", "int16", "int32", "int64", "uint16"):
        prefix = write_pair(
            tmp_path / dtype, [[1, 2, 3], [4], [5, 6, 127]], dtype=dtype, modes=modes
        )
        for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
            data = opened(source="megatron", path=path, validation=0, seq_len=2, n_outputs=128)
            assert read_all(data.train) == ([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 127])
    assert data.bytes_per_target is None
    assert data.tokenizer is None


def test_documents_are_runs_of_sequences(opened: Opener, tmp_path: Path) -> None:
    prefix = write_pair(
        tmp_path / "x", [[1, 2], [3], [4, 5, 6], [7], [8, 9]], documents=[0, 2, 3, 5]
    )
    data = opened(source="megatron", path=prefix, validation=0.3, seq_len=1, mask_documents=True)
    assert read_all(data.train)[0] == [1, 2, 3, 4, 5]
    assert read_all(data.validation)[0] == [7, 8]
    assert "1 document" in data.about[-1]
    assert "the last of the file" in data.about[-1]
    whole = opened(source="megatron", path=prefix, validation=0, seq_len=8, mask_documents=True)
    (_, positions, documents), _ = whole.train.item(0, 0)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert documents.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_sequences_in_no_document_are_refused_as_in_megatron(
    opened: Opener, tmp_path: Path
) -> None:
    """As one document they would be the validation, and tokens of different documents would see
    each other."""
    sequences = [[1, 2, 3] for _ in range(40)]
    merged = write_pair(tmp_path / "merged", sequences, documents=list(range(21)))
    with pytest.raises(
        InputError, match=r"merged\.idx: its documents leave out the last 20 sequences of 40"
    ):
        opened(source="megatron", path=merged, validation=0.1, seq_len=2)
    never_ended = write_pair(tmp_path / "open", [[1, 2], [3, 4]], documents=[0, 1])
    with pytest.raises(InputError, match="leave out the last 1 sequence of 2"):
        opened(source="megatron", path=never_ended, validation=0, seq_len=1)
    whole = opened(
        source="megatron", path=write_pair(tmp_path / "whole", sequences), validation=0.1, seq_len=2
    )
    assert (len(whole.train), len(whole.validation)) == (53, 5)


def test_sequences_may_lie_anywhere(opened: Opener, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2], [3, 4, 5]])
    raw = bytearray((tmp_path / "x.idx").read_bytes())
    raw[34:42] = np.array([3, 2], "<i4").tobytes()
    raw[42:58] = np.array([4, 0], "<i8").tobytes()
    (tmp_path / "x.idx").write_bytes(raw)
    assert read_all(opened(source="megatron", path=prefix, validation=0, seq_len=2).train)[0] == [
        3,
        4,
        5,
        1,
    ]


def test_nothing_is_copied(opened: Opener, tmp_path: Path) -> None:
    """A file that is changed while it is open is read as it is now."""
    prefix = write_pair(tmp_path / "x", [[1, 2, 3]])
    data = opened(source="megatron", path=prefix, validation=0, seq_len=2)
    with open(tmp_path / "x.bin", "r+b") as file:
        file.write(np.array([7], "<u2").tobytes())
    assert read_all(data.train)[0] == [7, 2]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("token", [300, -2])
def test_an_id_outside_is_found_at_the_start_or_in_its_sample(
    opened: Opener, tmp_path: Path, token: int
) -> None:
    keys = {"source": "megatron", "validation": 0, "seq_len": 1000, "n_outputs": 300}
    near = write_pair(tmp_path / "near", [[1, token, *[1] * 1000]], dtype="int32")
    with pytest.raises(InputError, match=rf"near\.bin holds the token id {token}"):
        opened(**keys, path=near)
    far = write_pair(tmp_path / "far", [[1] * 2_000_000 + [token, 1]], dtype="int32")
    samples = opened(**keys, path=far).train
    samples.item(0, 0)
    with pytest.raises(
        InputError, match=rf"far\.bin: sample 1999 \(training\) holds the token id {token}"
    ):
        samples.item(1999, 0)
