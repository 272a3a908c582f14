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
    from meshtrain.config.schema import DataSection

_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
)
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


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
        pixels = self.pixels[indices]  # a copy, so that shifts leave the originals alone

        if self.augment_seed is not None:
            for row, (epoch, index) in enumerate(items):
                pixels[row] = _shift(pixels[row], _generator(self.augment_seed, epoch, index))

        images = torch.from_numpy(pixels).to(torch.float32)
        images = images.unsqueeze(1).div_(self.white)  # (b, 1, height, width), 0 to 1
        size = (self.image_size, self.image_size)
        if images.shape[2:] != size:
            images = F.interpolate(images, size=size, mode="bilinear", antialias=True)
        images = (images - self.mean) / self.std

        targets = torch.from_numpy(self.labels[indices])  # also a copy
        targets[valid:] = IGNORE
        return Batch({"images": images}, targets, samples=tuple(indices[:valid]))


def _shift(image: np.ndarray, draw: random.Random) -> np.ndarray:
    """The image (height, width), moved by up to an eighth of its height in both directions; what
    comes in is 0."""
    reach = max(1, len(image) // 8)
    down = draw.randint(0, 2 * reach)
    right = draw.randint(0, 2 * reach)
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
        draw = None
        if self.augment_seed is not None:
            draw = _generator(self.augment_seed, epoch, index)
        size = (self.image_size, self.image_size)
        try:
            with Image.open(path) as file:
                width, height = file.size
                box, mirrored = _square(width, height, draw)
                resized = file.convert("RGB").resize(size, Image.Resampling.BILINEAR, box)
                image = np.asarray(resized)  # (height, width, 3) uint8
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InputError(
                f"{path} cannot be read as an image ({error}): mend or remove it"
            ) from error
        if mirrored:
            image = image[:, ::-1]
        normalised = (np.asarray(image, np.float32) / 255 - _IMAGENET_MEAN) / _IMAGENET_STD
        pixels = np.ascontiguousarray(normalised.transpose(2, 0, 1), np.float32)
        return (torch.from_numpy(pixels),), torch.tensor(self.labels[index])


def _square(
    width: int, height: int, draw: random.Random | None
) -> tuple[tuple[float, float, float, float], bool]:
    """The crop box of an image, (left, top, right, bottom), and whether to mirror it."""
    side = float(min(width, height))
    if draw is None:
        left = (width - side) / 2
        top = (height - side) / 2
        return (left, top, left + side, top + side), False
    side *= draw.uniform(0.7, 1)
    left = draw.uniform(0, width - side)
    top = draw.uniform(0, height - side)
    # Rounding may bring the sums above the size.
    box = (left, top, min(left + side, width), min(top + side, height))
    return box, draw.random() < 0.5


class ImageSource(NamedTuple):
    """An opened source of images, without augmentation."""

    train: "ArrayImages | FolderImages"
    # the same samples as `train` if a share of them is to be held out
    validation: "ArrayImages | FolderImages"
    classes: int
    fingerprint: str
    files: Mapping[str, Files] = {}  # keyed by a name for people


def _open_digits(config: "DataSection") -> ImageSource:
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
    images = ArrayImages(
        "digits",
        pixels=digits.images.astype(np.uint8),
        labels=digits.target.astype(np.int64),
        white=16,
        # of all its pixels, from 0 to 1
        mean=0.305,
        std=0.376,
        image_size=config.image_size or 8,
    )
    return _array_source(images, images)


def _open_mnist(config: "DataSection") -> ImageSource:
    """MNIST's original files in a folder, plain or .gz; a validation path is the folder with the
    t10k files."""
    folder = data_path(config, "the folder with MNIST's own files")
    train = _read_mnist(folder.expanduser(), "train", config.image_size)
    if not isinstance(config.validation, str):
        return _array_source(train, train)
    test = _read_mnist(Path(config.validation).expanduser(), "t10k", config.image_size)
    return _array_source(train, test)


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
    return ArrayImages(
        f"{folder} {stem}",
        pixels=pixels,
        labels=labels.astype(np.int64),
        white=255,
        # of its training images, as everybody uses them
        mean=0.1307,
        std=0.3081,
        image_size=image_size or pixels.shape[1],
    )


def _read_idx(folder: Path, name: str, dims: int) -> np.ndarray:
    """Reads an idx file of bytes: two zero bytes, type (8), number of dims, each dim as big-endian
    int32, data."""
    plain = folder / name
    packed = folder / f"{name}.gz"
    path = plain if plain.is_file() else packed
    if not path.is_file():
        raise InputError(
            f"there is neither {plain} nor {packed}: put MNIST's files into that folder (data.path)"
        )
    try:
        raw = path.read_bytes()
        if path is packed:
            raw = gzip.decompress(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is truncated or damaged ({error}); fetch it again") from error
    header = 4 + 4 * dims  # bytes
    if len(raw) < header or raw[:4] != bytes([0, 0, 8, dims]):
        raise InputError(
            f"{path} is not an idx file of bytes in {dims} dims: it begins with {raw[:4].hex(' ')}"
        )
    shape = struct.unpack(f">{dims}i", raw[4:header])
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(raw) != expected:
        raise InputError(
            f"{path} is truncated or damaged: it has {len(raw):,} bytes of data, expected "
            f"{expected:,}"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _array_source(train: ArrayImages, other: ArrayImages) -> ImageSource:
    """`other`: of the validation; `train` itself, if a share of it is held out."""
    sets = [train] if other is train else [train, other]
    digests = []
    largest = -1
    for images in sets:
        content = images.pixels.tobytes() + images.labels.tobytes()
        digests.append(hashlib.sha256(content).hexdigest())
        largest = max(largest, int(images.labels.max(initial=-1)))
    classes = largest + 1  # labels count from 0
    return ImageSource(train, other, classes, fingerprint=" ".join(digests))


def _open_folder(config: "DataSection") -> ImageSource:
    """Images as folder/class/file, classes sorted by name; a validation path is a folder of the
    same form."""
    path = data_path(config, "a folder with one folder of images per class")
    validation = config.validation
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
    other = train
    files = {"images": _with_sizes(train)}
    if isinstance(validation, str):
        other, its_classes = _list_images(Path(validation).expanduser(), config.image_size)
        if its_classes != classes:
            raise InputError(
                f"{validation} has the classes {', '.join(its_classes)}; {path} has "
                f"{', '.join(classes)}"
            )
        files["images (validation)"] = _with_sizes(other)
    digests = []
    for listing in files.values():
        names_and_sizes = list(zip(listing.names, listing.sizes, strict=True))
        digests.append(hashlib.sha256(repr(names_and_sizes).encode()).hexdigest())
    return ImageSource(train, other, len(classes), " ".join(digests), files)


SOURCES = {"digits": _open_digits, "mnist": _open_mnist, "images": _open_folder}


def _with_sizes(images: FolderImages) -> Files:
    sizes = array("q")  # there may be millions: 8 bytes each instead of an object
    for file in images.files:
        sizes.append((images.root / file).stat().st_size)
    return Files(images.root, images.files, sizes)


def _list_images(root: Path, image_size: int) -> tuple[FolderImages, list[str]]:
    if not root.is_dir():
        raise InputError(
            f"there is no folder {root}: data.source images expects folder/class/file (data.path)"
        )
    folders = [entry.name for entry in root.iterdir() if entry.is_dir()]
    classes = sorted(name for name in folders if not name.startswith("."))
    if not classes:
        raise InputError(
            f"{root} has no folders in it: data.source images expects folder/class/file (data.path)"
        )
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = [file for file in files_below(root / name) if file.suffix.lower() in _SUFFIXES]
        if not images:
            raise InputError(f"{root / name} has no images in it ({' '.join(sorted(_SUFFIXES))})")
        files += sorted(str(file.relative_to(root)) for file in images)
        labels += [label] * len(images)
    return FolderImages(str(root), root, files, labels, image_size), classes
