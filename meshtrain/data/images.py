"""Images to classify: scikit-learn's digits, MNIST's own files, and a folder with one folder per class.

Augmentation is drawn from (seed, epoch, sample), so an image looks the same to every layout, and different in the next
epoch.
"""

import gzip
import hashlib
import random
import struct
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from meshtrain.data.batch import IGNORE, Batch, Item, Samples, Subset
from meshtrain.data.files import Files, files_below
from meshtrain.data.split import held_out
from meshtrain.errors import InputError

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Augment:
    """Draws what happens to a sample."""

    seed: int

    def draw(self, epoch: int, sample: int) -> random.Random:
        return random.Random(f"{self.seed} {epoch} {sample}")  # a string is hashed with SHA-512, the same everywhere


@dataclass(frozen=True)
class ArrayImages(Samples):
    """Grey images that lie in memory. Augmented, they are moved by up to an eighth of their size; never mirrored."""

    name: str
    pixels: np.ndarray  # (n, height, width) uint8, 0 to `white`
    labels: np.ndarray  # (n,) int64
    white: int
    mean: float
    std: float
    image_size: int
    augment: Augment | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def item(self, index: int, epoch: int) -> Item:
        """An image (1, image_size, image_size) float32, normalised, and its class."""
        (images,), targets = self.read([(epoch, index)], 1)
        assert images is not None
        return (images[0],), targets[0]

    def read(self, items: Sequence[tuple[int, int]], valid: int) -> Batch:
        indices = [index for _, index in items]
        pixels = self.pixels[indices]
        if self.augment is not None:
            for row, (epoch, index) in enumerate(items):
                pixels[row] = _moved(pixels[row], self.augment.draw(epoch, index))
        images = torch.from_numpy(pixels).to(torch.float32).unsqueeze(1).div_(self.white)
        if images.shape[2:] != (self.image_size, self.image_size):
            images = F.interpolate(images, size=(self.image_size, self.image_size), mode="bilinear", antialias=True)
        targets = torch.from_numpy(self.labels[indices])
        targets[valid:] = IGNORE
        return Batch(((images - self.mean) / self.std,), targets)


def _moved(image: np.ndarray, draw: random.Random) -> np.ndarray:
    reach = max(1, len(image) // 8)
    down, right = draw.randint(0, 2 * reach), draw.randint(0, 2 * reach)
    padded = np.pad(image, reach)
    return padded[down : down + image.shape[0], right : right + image.shape[1]]


@dataclass(frozen=True)
class FolderImages(Samples):
    """Colour images in files: the middle square of each; augmented, a random square, mirrored half of the time."""

    name: str
    root: Path
    files: list[str]  # relative to root
    labels: list[int]
    image_size: int
    augment: Augment | None = None

    def __len__(self) -> int:
        return len(self.files)

    def item(self, index: int, epoch: int) -> Item:
        """An image (3, image_size, image_size) float32, normalised as ImageNet's are, and its class."""
        from PIL import Image

        path = self.root / self.files[index]
        draw = self.augment.draw(epoch, index) if self.augment is not None else None
        try:
            with Image.open(path) as file:
                box, mirrored = _square(*file.size, draw)
                size = (self.image_size, self.image_size)
                image = np.asarray(file.convert("RGB").resize(size, Image.Resampling.BILINEAR, box))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InputError(f"{path} cannot be read as an image ({error}): mend or remove it") from error
        scaled = (np.asarray(image[:, ::-1] if mirrored else image, np.float32) / 255 - _IMAGENET_MEAN) / _IMAGENET_STD
        pixels = np.ascontiguousarray(scaled.transpose(2, 0, 1), np.float32)
        return (torch.from_numpy(pixels),), torch.tensor(self.labels[index])


def _square(width: int, height: int, draw: random.Random | None) -> tuple[tuple[float, float, float, float], bool]:
    """The part of an image to use (left, top, right, bottom), and whether to mirror it."""
    side = float(min(width, height))
    if draw is None:
        left, top = (width - side) / 2, (height - side) / 2
        return (left, top, left + side, top + side), False
    side *= draw.uniform(0.7, 1)
    left, top = draw.uniform(0, width - side), draw.uniform(0, height - side)
    return (left, top, min(left + side, width), min(top + side, height)), draw.random() < 0.5


@dataclass(frozen=True)
class ImageSets:
    """What opening a source of images gives."""

    train: Samples
    validation: Samples | None
    shape: tuple[int, int, int]  # (c, height, width)
    classes: list[str]
    how: str  # how the validation was chosen
    fingerprint: str
    files: Mapping[str, Files] = field(default_factory=dict)  # by a name for people


def open_digits(image_size: int | None, part: float | str, augment: Augment | None) -> ImageSets:
    """scikit-learn's digits: 1,797 images of 8 x 8, 10 classes.

    Raises:
        InputError: scikit-learn is not installed, or `validation` is a path.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            "data.source digits needs the package scikit-learn: pip install 'meshtrain[digits]'"
        ) from error
    if isinstance(part, str):
        raise InputError(f"data.validation is the path {part}: with data.source digits it is a share, such as 0.2")
    found = load_digits()
    images = ArrayImages(
        name="digits",
        pixels=found.images.astype(np.uint8),
        labels=found.target.astype(np.int64),
        white=16,
        mean=0.305,
        std=0.376,
        image_size=image_size or 8,
    )
    return _array_sets(images, images, part, augment)


def open_mnist(path: Path, image_size: int | None, part: float | str, augment: Augment | None) -> ImageSets:
    """MNIST's own files in a folder: train-images-idx3-ubyte and train-labels-idx1-ubyte, as they are or with .gz.

    Args:
        part: a share of these to hold out, or the folder (usually the same) with the t10k files.

    Raises:
        InputError: a file is missing, truncated or not of this kind, or images and labels differ in number.
    """
    train = _read_mnist(path.expanduser(), "train", image_size)
    held = _read_mnist(Path(part).expanduser(), "t10k", image_size) if isinstance(part, str) else train
    return _array_sets(train, held, part, augment)


def _read_mnist(folder: Path, stem: str, image_size: int | None) -> ArrayImages:
    pixels = _read_idx(folder, f"{stem}-images-idx3-ubyte", 3)
    labels = _read_idx(folder, f"{stem}-labels-idx1-ubyte", 1)
    if len(pixels) != len(labels):
        raise InputError(
            f"{folder}: {stem} has {len(pixels):,} images and {len(labels):,} labels; the files do not belong together"
        )
    if pixels.shape[1] != pixels.shape[2]:
        raise InputError(f"{folder}: the images of {stem} are {pixels.shape[1]} x {pixels.shape[2]}: expected squares")
    return ArrayImages(
        name=f"{folder} {stem}",
        pixels=pixels,
        labels=labels.astype(np.int64),
        white=255,
        mean=0.1307,
        std=0.3081,
        image_size=image_size or pixels.shape[1],
    )


def _read_idx(folder: Path, name: str, dims: int) -> np.ndarray:
    """An idx file of bytes: two zero bytes, the type (8), the number of dims, each dim as big-endian int32, data."""
    plain, packed = folder / name, folder / f"{name}.gz"
    path = plain if plain.is_file() else packed
    if not path.is_file():
        raise InputError(f"there is neither {plain} nor {packed}: put MNIST's files into that folder (data.path)")
    try:
        raw = path.read_bytes() if path is plain else gzip.decompress(path.read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is truncated or damaged ({error}); fetch it again") from error
    if len(raw) < 4 + 4 * dims or raw[:4] != bytes([0, 0, 8, dims]):
        raise InputError(f"{path} is not an idx file of bytes in {dims} dims: it begins with {raw[:4].hex(' ')}")
    shape = struct.unpack(f">{dims}i", raw[4 : 4 + 4 * dims])
    expected = 4 + 4 * dims + int(np.prod(shape, dtype=np.int64))
    if len(raw) != expected:
        raise InputError(f"{path} is truncated or damaged: it has {len(raw):,} bytes of data, expected {expected:,}")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)


def _array_sets(train: ArrayImages, held: ArrayImages, part: float | str, augment: Augment | None) -> ImageSets:
    sets = [train] if held is train else [train, held]
    fingerprint = " ".join(hashlib.sha256(one.pixels.tobytes() + one.labels.tobytes()).hexdigest() for one in sets)
    classes = max(int(train.labels.max(initial=-1)), int(held.labels.max(initial=-1))) + 1
    return _sets(
        replace(train, augment=augment),
        held,
        part,
        (1, train.image_size, train.image_size),
        [str(label) for label in range(classes)],
        fingerprint,
    )


def open_folder(path: Path, image_size: int | None, part: float | str, augment: Augment | None) -> ImageSets:
    """Images as folder/class/file; classes are numbered in the order of their names.

    Args:
        part: a share of the files to hold out, or another folder with the same classes.

    Raises:
        InputError: no such folder, no classes, a class without images, other classes in the validation's folder, no
            `data.image_size`, or Pillow is not installed.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise InputError("data.source images needs the package Pillow: pip install 'meshtrain[images]'") from error
    if image_size is None:
        raise InputError("data.source images needs data.image_size: the images are resized to that many pixels squared")
    train, classes = _list_images(path.expanduser(), image_size)
    held = train
    if isinstance(part, str):
        held, others = _list_images(Path(part).expanduser(), image_size)
        if others != classes:
            raise InputError(f"{part} has the classes {', '.join(others)}; {path} has {', '.join(classes)}")
    files = {"images": _sized(train)} | ({"images (validation)": _sized(held)} if held is not train else {})
    named = (list(zip(one.names, one.sizes, strict=True)) for one in files.values())
    fingerprint = " ".join(hashlib.sha256(repr(one).encode()).hexdigest() for one in named)
    found = _sets(replace(train, augment=augment), held, part, (3, image_size, image_size), classes, fingerprint)
    return replace(found, files=files)


def _sized(images: FolderImages) -> Files:
    sizes = array("q", ((images.root / file).stat().st_size for file in images.files))  # there may be millions
    return Files(images.root, images.files, sizes)


def _list_images(root: Path, image_size: int) -> tuple[FolderImages, list[str]]:
    if not root.is_dir():
        raise InputError(f"there is no folder {root}: data.source images expects folder/class/file (data.path)")
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise InputError(f"{root} has no folders in it: data.source images expects folder/class/file (data.path)")
    files, labels = [], []
    for label, name in enumerate(classes):
        own = sorted(
            str(file.relative_to(root)) for file in files_below(root / name) if file.suffix.lower() in _SUFFIXES
        )
        if not own:
            raise InputError(f"{root / name} has no images in it ({' '.join(sorted(_SUFFIXES))})")
        files.extend(own)
        labels.extend([label] * len(own))
    return FolderImages(str(root), root, files, labels, image_size), classes


def _sets(
    train: Samples, held: Samples, part: float | str, shape: tuple[int, int, int], classes: list[str], digest: str
) -> ImageSets:
    """Splits `held` off: `train` and `held` are the same samples unless `part` is a path."""
    if isinstance(part, str):
        return ImageSets(train, held if len(held) else None, shape, classes, f"from {part}", digest)
    split, kept = split_samples(train, held, part)
    return ImageSets(split, kept, shape, classes, "chosen by a hash of the sample's number", digest)


def split_samples(train: Samples, held: Samples, part: float) -> tuple[Samples, Samples | None]:
    """The samples of `train` that are not held out, and those of `held` that are."""
    chosen = held_out(part, len(train))
    if not chosen.any():
        return train, None
    return (
        Subset(f"{train.name} (training)", train, np.flatnonzero(~chosen)),
        Subset(f"{held.name} (validation)", held, np.flatnonzero(chosen)),
    )
