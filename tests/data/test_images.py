"""Images: digits, MNIST's files, folders; what is augmented, and what is refused."""

import gzip
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from meshtrain.data import IGNORE, OpenData
from meshtrain.errors import InputError

Opener = Callable[..., OpenData]


def images_of(samples, epoch: int = 0) -> torch.Tensor:
    return torch.stack([samples.item(index, epoch)[0][0] for index in range(len(samples))])


def labels_of(samples) -> list[int]:
    return [int(samples.item(index, 0)[1]) for index in range(len(samples))]


def write_idx(path: Path, values: np.ndarray) -> None:
    raw = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_mnist(folder: Path, n: int, *, stem: str = "train", suffix: str = "", size: int = 8) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    pixels = np.random.default_rng(n).integers(0, 256, (n, size, size), np.uint8)
    write_idx(folder / f"{stem}-images-idx3-ubyte{suffix}", pixels)
    write_idx(folder / f"{stem}-labels-idx1-ubyte{suffix}", np.arange(n, dtype=np.uint8) % 10)
    return pixels


# Digits


def test_digits(opened: Opener) -> None:
    pytest.importorskip("sklearn")
    found = opened(source="digits", validation=0.2, n_outputs=10)
    assert found.task == "classification"
    assert found.about[0].startswith("digits: images of 1 x 8 x 8, 10 classes")
    assert len(found.train) + len(found.validation) == 1797
    assert 0.15 < len(found.validation) / 1797 < 0.25
    images = images_of(found.train)
    assert images.dtype == torch.float32
    assert abs(float(images.mean())) < 0.05
    assert abs(float(images.std()) - 1) < 0.05
    assert set(labels_of(found.validation)) == set(range(10))
    with pytest.raises(InputError, match=r"10 classes .*model.num_classes is 9: set it to 10"):
        opened(source="digits", n_outputs=9)


def test_digits_do_not_move_with_the_seed(opened: Opener) -> None:
    pytest.importorskip("sklearn")
    one, other = (opened(source="digits", validation=0.2, seed=seed) for seed in (0, 1))
    assert torch.equal(images_of(one.validation), images_of(other.validation))
    assert one.fingerprint == other.fingerprint


def test_digits_without_scikit_learn(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"pip install 'meshtrain\[digits\]'"):
        opened(source="digits")


def test_digits_have_no_path_for_validation(opened: Opener) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(InputError, match=r"with data.source digits it is a share"):
        opened(source="digits", validation="/somewhere")


# MNIST


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist(opened: Opener, tmp_path: Path, suffix: str) -> None:
    pixels = write_mnist(tmp_path / "mnist", 30, suffix=suffix)
    held = write_mnist(tmp_path / "mnist", 7, stem="t10k", suffix=suffix)
    folder = str(tmp_path / "mnist")
    found = opened(source="mnist", path=folder, validation=folder, n_outputs=10)
    expected = (torch.from_numpy(pixels).float() / 255 - 0.1307) / 0.3081
    assert torch.allclose(images_of(found.train)[:, 0], expected, atol=1e-6)
    assert labels_of(found.train) == [i % 10 for i in range(30)]
    assert len(found.validation) == len(held) == 7
    share = opened(source="mnist", path=folder, validation=0.2)
    assert len(share.train) + len(share.validation) == 30
    resized = opened(source="mnist", path=folder, validation=0, image_size=16)
    assert images_of(resized.train).shape == (30, 1, 16, 16)


def test_mnist_files_that_are_wrong(opened: Opener, tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    with pytest.raises(InputError, match=r"there is neither .*train-images"):
        opened(source="mnist", path=str(folder))
    write_mnist(folder, 30)
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte"
    whole = images.read_bytes()
    images.write_bytes(whole[:-5])
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte is truncated or damaged: it has 1,931 bytes"):
        opened(source="mnist", path=str(folder))
    images.write_bytes(labels.read_bytes() + bytes(20))
    with pytest.raises(InputError, match=r"is not an idx file of bytes in 3 dims"):
        opened(source="mnist", path=str(folder))
    images.unlink()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(InputError, match=r"\.gz is truncated or damaged"):
        opened(source="mnist", path=str(folder))
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"not gzip at all")
    with pytest.raises(InputError, match=r"\.gz is truncated or damaged"):
        opened(source="mnist", path=str(folder))
    images.write_bytes(whole)
    write_idx(labels, np.zeros(29, np.uint8))
    with pytest.raises(InputError, match=r"30 images and 29 labels"):
        opened(source="mnist", path=str(folder))


def test_moved_images_are_a_function_of_seed_epoch_and_sample(opened: Opener, tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", 40)
    keys = {"source": "mnist", "path": str(tmp_path / "mnist"), "validation": 0.2}
    plain = opened(**keys)
    one, same, other = (opened(**keys, augment=True, seed=seed) for seed in (0, 0, 1))
    first = images_of(one.train)
    assert torch.equal(first, images_of(same.train))
    assert not torch.equal(first, images_of(one.train, epoch=1))
    assert not torch.equal(first, images_of(other.train))
    assert not torch.equal(first, images_of(plain.train))
    assert torch.equal(images_of(one.validation, epoch=1), images_of(plain.validation))
    assert one.train.read([(0, 1), (0, 2), (0, 3)], 1).targets[1:].tolist() == [IGNORE, IGNORE]
    assert labels_of(one.train)[1:4] == labels_of(plain.train)[1:4] != [IGNORE] * 3
    batch = one.train.read([(1, 5), (0, 5)], 2)
    assert torch.equal(batch.inputs[0][0], one.train.item(5, 1)[0][0])
    assert torch.equal(batch.inputs[0][1], one.train.item(5, 0)[0][0])


# Folders


def write_folder(root: Path, classes: dict[str, int], size: tuple[int, int] = (40, 24)) -> Path:
    image = pytest.importorskip("PIL.Image")
    for level, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.full((size[1], size[0], 3), 60 * level + number, np.uint8)
            pixels[:, : size[0] // 2] += 40
            image.fromarray(pixels).save(root / name / f"{count - number}.png")
    return root


def test_a_folder_of_images(opened: Opener, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "images", {"dog": 3, "cat": 4})
    (root / "cat" / "notes.txt").touch()
    found = opened(source="images", path=str(root), image_size=12, validation=0, n_outputs=2)
    assert found.about[0].endswith(": images of 3 x 12 x 12, 2 classes")
    assert labels_of(found.train) == [0] * 4 + [1] * 3
    images = images_of(found.train)
    assert images.shape == (7, 3, 12, 12)
    assert images.dtype == torch.float32
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    right = images[0, :, 6, 10] * std + mean  # cat/1.png was the last one written, in level 1
    assert torch.allclose(right * 255, torch.full((3,), 63.0), atol=0.01)


def test_augmented_images_are_a_function_of_seed_epoch_and_sample(opened: Opener, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "images", {"a": 10, "b": 10})
    keys = {"source": "images", "path": str(root), "image_size": 16, "validation": 0.3}
    plain = opened(**keys)
    one, same, other = (opened(**keys, augment=True, seed=seed) for seed in (0, 0, 1))
    first = images_of(one.train)
    assert torch.equal(first, images_of(same.train))
    assert not torch.equal(first, images_of(one.train, epoch=1))
    assert not torch.equal(first, images_of(other.train))
    assert torch.equal(images_of(one.validation, epoch=1), images_of(plain.validation))
    left_is_brighter = first[:, 0, 8, 0] > first[:, 0, 8, -1]
    assert 0 < int(left_is_brighter.sum()) < len(first)  # some are mirrored, some are not


def test_another_folder_for_validation(opened: Opener, tmp_path: Path) -> None:
    train = write_folder(tmp_path / "train", {"a": 3, "b": 2})
    held = write_folder(tmp_path / "held", {"a": 1, "b": 1})
    keys = {"source": "images", "path": str(train), "image_size": 8}
    found = opened(**keys, validation=str(held))
    assert (len(found.train), len(found.validation)) == (5, 2)
    other = write_folder(tmp_path / "other", {"a": 1, "c": 1})
    with pytest.raises(InputError, match=r"has the classes a, c; .* has a, b"):
        opened(**keys, validation=str(other))


def test_folders_that_are_wrong(opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path / "images", {"a": 2, "b": 1})
    keys = {"source": "images", "path": str(root), "image_size": 8, "validation": 0}
    with pytest.raises(InputError, match=r"needs data.image_size"):
        opened(**(keys | {"image_size": None}))
    with pytest.raises(InputError, match=r"there is no folder"):
        opened(**(keys | {"path": str(tmp_path / "none")}))
    with pytest.raises(InputError, match=r"has no folders in it"):
        opened(**(keys | {"path": str(root / "a")}))
    with pytest.raises(InputError, match=r"2 classes .*model.num_classes is 1"):
        opened(**keys, n_outputs=1)
    (root / "b" / "1.png").write_bytes((root / "a" / "1.png").read_bytes()[:60])
    with pytest.raises(InputError, match=r"b/1\.png cannot be read as an image"):
        opened(**keys).train.item(2, 0)
    (root / "b" / "1.png").unlink()
    with pytest.raises(InputError, match=r"b has no images in it"):
        opened(**keys)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install 'meshtrain\[images\]'"):
        opened(**keys)


def test_a_split_that_leaves_nothing_is_refused(opened: Opener, tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", 1)
    with pytest.raises(InputError, match=r"gives 1 samples to train on and 0 for validation"):
        opened(source="mnist", path=str(tmp_path / "mnist"), validation=0.5)
