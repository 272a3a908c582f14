"""Images: digits, MNIST's files, folders; what is augmented. What is refused is in
refusals.yaml."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.data import IGNORE
from tests.data.conftest import Opener
from tests.data.files import write_images, write_mnist


def images_of(samples, epoch: int = 0) -> torch.Tensor:
    return torch.stack([samples.item(index, epoch)[0][0] for index in range(len(samples))])


def labels_of(samples) -> list[int]:
    return [int(samples.item(index, 0)[1]) for index in range(len(samples))]


def test_digits(opened: Opener) -> None:
    pytest.importorskip("sklearn")
    data, other = (
        opened(source="digits", validation=0.2, n_outputs=10, seed=seed) for seed in (0, 1)
    )
    assert data.task == "classification"
    assert data.about[0].startswith("digits: images of 1 x 8 x 8, 10 classes")
    assert len(data.train) + len(data.validation) == 1797
    assert 0.15 < len(data.validation) / 1797 < 0.25
    images = images_of(data.train)
    assert images.dtype == torch.float32
    assert abs(float(images.mean())) < 0.05
    assert abs(float(images.std()) - 1) < 0.05
    assert set(labels_of(data.validation)) == set(range(10))
    assert torch.equal(images_of(data.validation), images_of(other.validation)), "whatever the seed"
    assert data.fingerprint == other.fingerprint


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist(opened: Opener, tmp_path: Path, suffix: str) -> None:
    pixels = write_mnist(tmp_path / "mnist", 30, suffix=suffix)
    write_mnist(tmp_path / "mnist", 7, stem="t10k", suffix=suffix)
    keys = {"source": "mnist", "path": tmp_path / "mnist"}
    data = opened(**keys, validation=str(keys["path"]), n_outputs=10)
    expected = (torch.from_numpy(pixels).float() / 255 - 0.1307) / 0.3081
    assert torch.allclose(images_of(data.train)[:, 0], expected, atol=1e-6)
    assert labels_of(data.train) == [i % 10 for i in range(30)]
    assert len(data.validation) == 7
    split = opened(**keys, validation=0.2)
    assert len(split.train) + len(split.validation) == 30
    assert images_of(opened(**keys, validation=0, image_size=16).train).shape == (30, 1, 16, 16)


def test_a_folder_of_images(opened: Opener, tmp_path: Path) -> None:
    root = write_images(tmp_path / "images", {"dog": 3, "cat": 4})
    held_out = write_images(tmp_path / "held out", {"cat": 1, "dog": 1})
    (root / "cat" / "notes.txt").touch()
    data = opened(source="images", path=root, image_size=12, validation=str(held_out), n_outputs=2)
    assert data.about[0].endswith(": images of 3 x 12 x 12, 2 classes")
    assert labels_of(data.train) == [0] * 4 + [1] * 3
    assert len(data.validation) == 2
    images = images_of(data.train)
    assert images.shape == (7, 3, 12, 12)
    assert images.dtype == torch.float32
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    right = images[0, :, 6, 10] * std + mean  # cat/1.png was the last one written, in level 1
    assert torch.allclose(right * 255, torch.full((3,), 63.0), atol=0.01)


@pytest.mark.parametrize("source", ["mnist", "images"])
def test_augmented_images_are_a_function_of_seed_epoch_and_sample(
    opened: Opener, tmp_path: Path, source: str
) -> None:
    keys: dict[str, Any] = {
        "source": source,
        "path": tmp_path / source,
        "validation": 0.3,
        "image_size": 8,
    }
    if source == "mnist":
        write_mnist(keys["path"], 40)
    else:
        write_images(keys["path"], {"a": 10, "b": 10})
    plain = opened(**keys)
    augmented, same, other = (opened(**keys, augment=True, seed=seed) for seed in (0, 0, 1))
    first = images_of(augmented.train)
    assert torch.equal(first, images_of(same.train))
    for different in (
        images_of(augmented.train, epoch=1),
        images_of(other.train),
        images_of(plain.train),
    ):
        assert not torch.equal(first, different)
    assert torch.equal(images_of(augmented.validation, epoch=1), images_of(plain.validation))
    assert labels_of(augmented.train) == labels_of(plain.train)
    batch = augmented.train.read([(1, 5), (0, 5), (0, 3)], 2)
    assert torch.equal(batch.inputs[0][0], augmented.train.item(5, 1)[0][0])
    assert torch.equal(batch.inputs[0][1], augmented.train.item(5, 0)[0][0])
    assert (batch.targets == IGNORE).tolist() == [False, False, True]
    assert IGNORE not in labels_of(augmented.train), (
        "the padding of a batch marks no label for good"
    )
    if source == "images":
        left_is_brighter = first[:, 0, 4, 0] > first[:, 0, 4, -1]
        assert 0 < int(left_is_brighter.sum()) < len(first), "some are mirrored, some are not"
