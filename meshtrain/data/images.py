"""Image classification data: scikit-learn's digits, MNIST's original files, and a folder with one
folder per class.

Augmentation is drawn from (seed, epoch, sample), so every layout sees the same images.
"""

import gzip
import hashlib
import random
import struct
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from meshtrain.data.batch import IGNORE, Batch, Item, Samples
from meshtrain.data.fingerprint import Files, data_path, files_below
from meshtrain.errors import InputError

if TYPE_CHECKING:
    from meshtrain.config import Data

_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _generator(seed: int, epoch: int, sample: int) -> random.Random:
    # a string is hashed with SHA-512, the same everywhere
    return random.Random(f"{seed} {epoch} {sample}")


@dataclass(frozen=True)
class ArrayImages(Samples):
    """Greyscale images in memory. Augmentation shifts them by up to an eighth of their size and
    never mirrors them."""

    channels: ClassVar = 1
    name: str
    pixels: np.ndarray  # (n, height, width) uint8, 0 to `white`
    labels: np.ndarray  # (n,) int64
    white: int
    mean: float
    std: float
    image_size: int
    augment_seed: int | None = None  # None: not augmented

    def __len__(self) -> int:
        return len(self.labels)

    def item(self, index: int, epoch: int) -> Item:
        """A normalised image, (1, image_size, image_size) float32, and its class."""
        (images,), targets = self.read([(epoch, index)], 1)
        return (images[0],), targets[0]

    def read(self, items: Sequence[tuple[int, int]], valid: int) -> Batch:
        indices = [index for _, index in items]
        pixels = self.pixels[indices]
        if self.augment_seed is not None:
            for row, (epoch, index) in enumerate(items):
                pixels[row] = _shift(pixels[row], _generator(self.augment_seed, epoch, index))
        images = torch.from_numpy(pixels).to(torch.float32).unsqueeze(1).div_(self.white)
        if images.shape[2:] != (self.image_size, self.image_size):
            images = F.interpolate(
                images, size=(self.image_size, self.image_size), mode="bilinear", antialias=True
            )
        targets = torch.from_numpy(self.labels[indices])
        targets[valid:] = IGNORE
        return Batch({"images": (images - self.mean) / self.std}, targets)


def _shift(image: np.ndarray, draw: random.Random) -> np.ndarray:
    reach = max(1, len(image) // 8)
    down, right = draw.randint(0, 2 * reach), draw.randint(0, 2 * reach)
    padded = np.pad(image, reach)
    return padded[down : down + image.shape[0], right : right + image.shape[1]]


@dataclass(frozen=True)
class FolderImages(Samples):
    """Colour images in files: the centre square of each; augmented, a random square, mirrored half
    of the time."""

    channels: ClassVar = 3
    name: str
    root: Path
    files: list[str]  # relative to root
    labels: list[int]
    image_size: int
    augment_seed: int | None = None  # None: not augmented

    def __len__(self) -> int:
        return len(self.files)

    def item(self, index: int, epoch: int) -> Item:
        """An image, (3, image_size, image_size) float32, normalised with ImageNet's statistics, and
        its class."""
        from PIL import Image

        path = self.root / self.files[index]
        draw = (
            _generator(self.augment_seed, epoch, index) if self.augment_seed is not None else None
        )
        try:
            with Image.open(path) as file:
                box, mirrored = _square(*file.size, draw)
                size = (self.image_size, self.image_size)
                image = np.asarray(file.convert("RGB").resize(size, Image.Resampling.BILINEAR, box))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InputError(
                f"{path} cannot be read as an image ({error}): mend or remove it"
            ) from error
        scaled = (
            np.asarray(image[:, ::-1] if mirrored else image, np.float32) / 255 - _IMAGENET_MEAN
        ) / _IMAGENET_STD
        pixels = np.ascontiguousarray(scaled.transpose(2, 0, 1), np.float32)
        return (torch.from_numpy(pixels),), torch.tensor(self.labels[index])


def _square(
    width: int, height: int, draw: random.Random | None
) -> tuple[tuple[float, float, float, float], bool]:
    """The crop box of an image, (left, top, right, bottom), and whether to mirror it."""
    side = float(min(width, height))
    if draw is None:
        left, top = (width - side) / 2, (height - side) / 2
        return (left, top, left + side, top + side), False
    side *= draw.uniform(0.7, 1)
    left, top = draw.uniform(0, width - side), draw.uniform(0, height - side)
    return (left, top, min(left + side, width), min(top + side, height)), draw.random() < 0.5


class ImageSource(NamedTuple):
    """An opened source of images, without augmentation."""

    train: "ArrayImages | FolderImages"
    # the same samples as `train` if a share of them is to be held out
    validation: "ArrayImages | FolderImages"
    classes: int
    fingerprint: str
    files: Mapping[str, Files] = {}  # keyed by a name for people


def _open_digits(config: "Data") -> ImageSource:
    """scikit-learn's digits: 1,797 images of 8 x 8, 10 classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            "data.source digits needs the package scikit-learn: pip install 'meshtrain[digits]'"
        ) from error
    if isinstance(config.validation, str):
        raise InputError(
            f"data.validation is the path {config.validation}: with data.source digits it is a "
            "share, such as 0.2"
        )
    digits = load_digits()
    pixels, labels = digits.images.astype(np.uint8), digits.target.astype(np.int64)
    images = ArrayImages("digits", pixels, labels, 16, 0.305, 0.376, config.image_size or 8)
    return _array_source(images, images)


def _open_mnist(config: "Data") -> ImageSource:
    """MNIST's original files in a folder, plain or .gz; a validation path is the folder with the
    t10k files."""
    folder = data_path(config, "the folder with MNIST's own files")
    train = _read_mnist(folder.expanduser(), "train", config.image_size)
    if not isinstance(config.validation, str):
        return _array_source(train, train)
    return _array_source(
        train, _read_mnist(Path(config.validation).expanduser(), "t10k", config.image_size)
    )


def _read_mnist(folder: Path, stem: str, image_size: int | None) -> ArrayImages:
    pixels = _read_idx(folder, f"{stem}-images-idx3-ubyte", 3)
    labels = _read_idx(folder, f"{stem}-labels-idx1-ubyte", 1)
    if len(pixels) != len(labels):
        raise InputError(
            f"{folder}: {stem} has {len(pixels):,} images and {len(labels):,} labels; the files do "
            "not belong together"
        )
    if pixels.shape[1] != pixels.shape[2]:
        raise InputError(
            f"{folder}: the images of {stem} are {pixels.shape[1]} x {pixels.shape[2]}: expected "
            "squares"
        )
    size = image_size or pixels.shape[1]
    return ArrayImages(
        f"{folder} {stem}", pixels, labels.astype(np.int64), 255, 0.1307, 0.3081, size
    )


def _read_idx(folder: Path, name: str, dims: int) -> np.ndarray:
    """Reads an idx file of bytes: two zero bytes, type (8), number of dims, each dim as big-endian
    int32, data."""
    plain, packed = folder / name, folder / f"{name}.gz"
    path = plain if plain.is_file() else packed
    if not path.is_file():
        raise InputError(
            f"there is neither {plain} nor {packed}: put MNIST's files into that folder (data.path)"
        )
    try:
        raw = path.read_bytes() if path is plain else gzip.decompress(path.read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is truncated or damaged ({error}); fetch it again") from error
    if len(raw) < 4 + 4 * dims or raw[:4] != bytes([0, 0, 8, dims]):
        raise InputError(
            f"{path} is not an idx file of bytes in {dims} dims: it begins with {raw[:4].hex(' ')}"
        )
    shape = struct.unpack(f">{dims}i", raw[4 : 4 + 4 * dims])
    expected = 4 + 4 * dims + int(np.prod(shape, dtype=np.int64))
    if len(raw) != expected:
        raise InputError(
            f"{path} is truncated or damaged: it has {len(raw):,} bytes of data, expected "
            f"{expected:,}"
        )
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)


def _array_source(train: ArrayImages, other: ArrayImages) -> ImageSource:
    sets = [train] if other is train else [train, other]
    fingerprint = " ".join(
        hashlib.sha256(x.pixels.tobytes() + x.labels.tobytes()).hexdigest() for x in sets
    )
    return ImageSource(
        train, other, max(int(x.labels.max(initial=-1)) for x in sets) + 1, fingerprint
    )


def _open_folder(config: "Data") -> ImageSource:
    """Images as folder/class/file, classes sorted by name; a validation path is a folder of the
    same form."""
    path, validation = (
        data_path(config, "a folder with one folder of images per class"),
        config.validation,
    )
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise InputError(
            "data.source images needs the package Pillow: pip install 'meshtrain[images]'"
        ) from error
    if config.image_size is None:
        raise InputError(
            "data.source images needs data.image_size: the images are resized to that many pixels "
            "squared"
        )
    train, classes = _list_images(path.expanduser(), config.image_size)
    other, files = train, {"images": _with_sizes(train)}
    if isinstance(validation, str):
        other, its_classes = _list_images(Path(validation).expanduser(), config.image_size)
        if its_classes != classes:
            raise InputError(
                f"{validation} has the classes {', '.join(its_classes)}; {path} has "
                f"{', '.join(classes)}"
            )
        files["images (validation)"] = _with_sizes(other)
    listings = (list(zip(listing.names, listing.sizes, strict=True)) for listing in files.values())
    fingerprint = " ".join(
        hashlib.sha256(repr(listing).encode()).hexdigest() for listing in listings
    )
    return ImageSource(train, other, len(classes), fingerprint, files)


SOURCES = {"digits": _open_digits, "mnist": _open_mnist, "images": _open_folder}


def _with_sizes(images: FolderImages) -> Files:
    # there may be millions
    sizes = array("q", ((images.root / file).stat().st_size for file in images.files))
    return Files(images.root, images.files, sizes)


def _list_images(root: Path, image_size: int) -> tuple[FolderImages, list[str]]:
    if not root.is_dir():
        raise InputError(
            f"there is no folder {root}: data.source images expects folder/class/file (data.path)"
        )
    classes = sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    if not classes:
        raise InputError(
            f"{root} has no folders in it: data.source images expects folder/class/file (data.path)"
        )
    files, labels = [], []
    for label, name in enumerate(classes):
        images = sorted(
            str(file.relative_to(root))
            for file in files_below(root / name)
            if file.suffix.lower() in _SUFFIXES
        )
        if not images:
            raise InputError(f"{root / name} has no images in it ({' '.join(sorted(_SUFFIXES))})")
        files.extend(images)
        labels.extend([label] * len(images))
    return FolderImages(str(root), root, files, labels, image_size), classes
