"""Files that hosts compare by samples of what they hold, and ids that only damage explains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from meshtrain.data import fingerprint
from meshtrain.data.fingerprint import SAMPLE_BYTES, SAMPLES, Files, sampled_digest
from meshtrain.errors import InputError
from tests.data.conftest import Opener
from tests.data.files import write_images, write_mnist, write_pair, write_tokens

SIZE = 16 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of which a quarter is read."""
    path = tmp_path_factory.mktemp("digest") / "tokens.bin"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


def zeroed(path: Path, start: int, stop: int) -> str:
    """The digest of a file while these of its bytes are zeros."""
    with open(path, "r+b") as file:
        file.seek(start)
        content = file.read(stop - start)
        file.seek(start)
        file.write(bytes(stop - start))
        file.flush()
        try:
            return sampled_digest(Files.of(path, SIZE), "seed")
        finally:
            file.seek(start)
            file.write(content)


def test_a_zeroed_run_of_a_32nd_is_found_wherever_it_lies(large: Path) -> None:
    whole = sampled_digest(Files.of(large, SIZE), "seed")
    length = SIZE // 32
    for start in [*range(0, SIZE - length, length // 3), SIZE - length]:
        assert zeroed(large, start, start + length) != whole, start
    assert zeroed(large, SIZE - 1, SIZE) != whole, "the end is always read"
    assert zeroed(large, 0, 1) != whole, "so is the beginning"
    assert sampled_digest(Files.of(large, SIZE), "seed") == whole


def test_the_seed_tells_the_places_and_no_more_than_4_mib_are_read(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Mock(side_effect=open)
    monkeypatch.setattr(fingerprint, "open", counting, raising=False)
    digest = sampled_digest(Files.of(large, SIZE), "one")
    assert counting.call_count == SAMPLES
    assert sampled_digest(Files.of(large, SIZE), "other") != digest
    assert SAMPLES * SAMPLE_BYTES == 4 << 20


def test_small_files_are_read_whole_and_samples_go_on_in_the_next_file(tmp_path: Path) -> None:
    sizes = [100_000, 0, 7, 70_000]
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(b"x" * size)
    files = Files(tmp_path, [str(number) for number in range(4)], sizes)
    whole = sampled_digest(files)
    for number, place in ((0, 0), (0, 99_999), (2, 3), (3, 69_999)):
        path = tmp_path / str(number)
        raw = path.read_bytes()
        path.write_bytes(raw[:place] + b"y" + raw[place + 1 :])
        assert sampled_digest(files) != whole, (number, place)
        path.write_bytes(raw)
    assert sampled_digest(files) == whole
    assert sampled_digest(Files(tmp_path, [], [])) != whole


# What a source compares


def tokens(folder: Path, zeros: int = 0) -> dict[str, Any]:
    write_tokens(folder, np.random.default_rng(0).integers(1, 200, 20_000))
    values = np.fromfile(folder / "tokens.bin", "<u2")
    values[len(values) - zeros // 2 :] = 0
    values.tofile(folder / "tokens.bin")
    return {"source": "tokens", "path": str(folder)}


def megatron(folder: Path, zeros: int = 0) -> dict[str, Any]:
    folder.mkdir()
    prefix = write_pair(folder / "x", [list(range(1, 100))] * 30_000)
    with open(
        f"{prefix}.bin", "r+b"
    ) as file:  # in the middle: the ends are a part of the fingerprint
        file.seek(3_000_000 - zeros)
        file.write(bytes(zeros))
    return {"source": "megatron", "path": prefix}


def mnist(folder: Path, zeros: int = 0) -> dict[str, Any]:
    """The validation of another host is another one of the same length."""
    write_mnist(folder, 20)
    write_mnist(folder, 10, stem="t10k")
    if zeros:
        (folder / "t10k-labels-idx1-ubyte").write_bytes(
            bytes([0, 0, 8, 1, 0, 0, 0, 10]) + bytes(10)
        )
    return {"source": "mnist", "path": str(folder), "validation": str(folder)}


def images(folder: Path, zeros: int = 0) -> dict[str, Any]:
    pytest.importorskip("PIL")
    write_images(folder / "train", {"a": 3, "b": 3})
    write_images(folder / "held", {"a": 2, "b": 2})
    if zeros:
        path = next((folder / "held" / "b").iterdir())
        path.write_bytes(bytes(path.stat().st_size))
    held = str(folder / "held")
    return {"source": "images", "path": str(folder / "train"), "validation": held, "image_size": 8}


@pytest.mark.parametrize("make", [tokens, megatron, mnist, images], ids=lambda make: make.__name__)
def test_hosts_with_damaged_copies_do_not_look_alike(
    opened: Opener, tmp_path: Path, make: Callable
) -> None:
    copies = []
    for name, zeros in (("a", 0), ("b", 0), ("c", 10_000)):
        data = opened(**({"seq_len": 8} | make(tmp_path / name, zeros=zeros)))
        copies.append((data.identity, data.sampled()))
    assert copies[0] == copies[1] != copies[2]


# Ids


def test_an_id_that_only_damage_explains_is_an_input_error(opened: Opener, tmp_path: Path) -> None:
    keys = tokens(tmp_path / "a") | {"seq_len": 100, "validation": 0}
    samples = opened(**keys, n_outputs=300).train
    ids = np.fromfile(tmp_path / "a" / "tokens.bin", "<u2")
    ids[15_150] = 65_535
    ids.tofile(tmp_path / "a" / "tokens.bin")
    for n_outputs in (300, None):
        with pytest.raises(
            InputError,
            match=r"holds the token id 65535, and its header says that 199 is the largest",
        ):
            opened(**keys, n_outputs=n_outputs)  # the beginning of the file is looked at
    samples.read([(0, 150)], 1)
    with pytest.raises(InputError, match=r"sample 151 .* 65535, and its header says"):
        samples.read([(0, 3), (0, 151)], 2)
