"""What differs between two checkpoints, whatever layouts wrote them: tensors are compared as wholes, block by block."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.checkpoint.folder import open_manifest
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.opened import Opened
from meshtrain.checkpoint.placement import Placement, overlap, pieces, shape_of, within
from meshtrain.cuts import Part
from meshtrain.weights import SIZES

BLOCK = 16 * 2**20  # bytes of a tensor that are compared at a time
STATE = ("step", "samples", "tokens", "data", "rng")  # what a run goes on from, besides the tensors
ABOUT = ("evaluation", "layout", "versions", "config")  # what tells how it came to that
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same in both.

    Attributes:
        name: of the tensor.
        what: in words.
        elements: that have other bits; None if the two cannot be compared.
        largest: difference between two elements, as far as that is a number.
        at: the index of these two.
    """

    name: str
    what: str
    elements: int | None = None
    largest: float | None = None
    at: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Difference:
    """Two checkpoints side by side.

    Attributes:
        compared: how many tensors both have.
        tensors: those that are not bit-equal, in the order of the first checkpoint's.
        state: key -> values of the rest that a run goes on from, where they differ.
        about: key -> values of what tells how it came to that, where they differ: no difference of state.
    """

    compared: int
    tensors: list[TensorDifference]
    state: dict[str, tuple[Any, Any]]
    about: dict[str, tuple[Any, Any]]

    @property
    def same(self) -> bool:
        """Whether a run goes on from both in the same way."""
        return not self.tensors and not self.state


def diff(a: Path, b: Path) -> Difference:
    """Compares two checkpoints.

    Raises:
        DamagedError: one of them is not intact where it was read.
        InputError: one of them is none.
    """
    with Opened(a, open_manifest(a)[0]) as one, Opened(b, open_manifest(b)[0]) as other:
        names = [*one.manifest.tensors, *(name for name in other.manifest.tensors if name not in one.manifest.tensors)]
        tensors = [found for name in names if (found := _tensor(name, one, other)) is not None]
        compared = sum(name in one.manifest.tensors and name in other.manifest.tensors for name in names)
        state, about = (_values(one.manifest, other.manifest, keys) for keys in (STATE, ABOUT))
        return Difference(compared, tensors, state, about)


def _tensor(name: str, one: Opened, other: Opened) -> TensorDifference | None:
    a, b = one.manifest.tensors.get(name), other.manifest.tensors.get(name)
    if a is None or b is None:
        return TensorDifference(name, f"is only in {(one if b is None else other).checkpoint}")
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return TensorDifference(name, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
    different, largest, at, values = 0, -1.0, None, (math.nan, math.nan)
    for box in _boxes(tuple(slice(0, size) for size in a.dims), SIZES[a.dtype]):
        x, y = _bits(one, name, a, box), _bits(other, name, b, box)
        where = np.flatnonzero(x != y)
        if not len(where):
            continue
        different += len(where)
        u, v = _numbers(x[where], a.dtype), _numbers(y[where], a.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(u - v)
        distance[np.isnan(distance)] = math.inf  # a NaN is farther from a number than any other number
        most = int(distance.argmax())
        if distance[most] > largest:
            largest, values = float(distance[most]), (float(u[most]), float(v[most]))
            inside = np.unravel_index(int(where[most]), shape_of(box))
            at = tuple(int(i) + each.start for i, each in zip(inside, box, strict=True))[: len(a.shape)]
    if not different:
        return None
    place = f" at {list(at)}" if at else ""
    what = f"{different:,} of {math.prod(a.dims):,} elements differ, most{place}: {values[0]!r} and {values[1]!r}"
    return TensorDifference(name, what, different, largest, at)


def _boxes(whole: Part, size: int) -> Iterator[Part]:
    """Parts of at most BLOCK bytes: rows, and where one row is larger, parts of it."""
    shape = shape_of(whole)
    nbytes = math.prod(shape) * size
    if nbytes == 0:
        return
    if nbytes <= BLOCK:
        yield whole
        return
    dim = next(index for index, n in enumerate(shape) if n > 1)
    each = max(1, shape[dim] * BLOCK // nbytes)
    for start in range(whole[dim].start, whole[dim].stop, each):
        rows = slice(start, min(start + each, whole[dim].stop))
        yield from _boxes((*whole[:dim], rows, *whole[dim + 1 :]), size)


def _bits(checkpoint: Opened, name: str, tensor: Placement, box: Part) -> np.ndarray:
    """A box of a tensor, flat, as unsigned integers.

    What a piece has of it lies in one stretch of the piece's bytes, since a box takes all of the dims after the one
    that it cuts, and one index of those before.
    """
    size = SIZES[tensor.dtype]
    found = np.empty(shape_of(box), f"<u{size}")
    for rank, piece in pieces(tensor, checkpoint.manifest.layout, box):
        shard = checkpoint.holding(name, rank, piece)
        both = overlap(piece, box)
        stretch = np.empty(shape_of(both), found.dtype)
        begin = size * int(np.ravel_multi_index([each.start for each in within(both, piece)], shape_of(piece)))
        shard.read_bytes(name, begin, stretch.data.cast("B"), begin + stretch.nbytes)
        found[within(both, box)] = stretch
    return found.reshape(-1)


def _numbers(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The values of elements given by their bits, in float64."""
    if dtype == "BF16":  # the upper half of a float32
        return (bits.astype("<u4") << 16).view("<f4").astype(np.float64)
    return bits.view(_NUMPY.get(dtype, bits.dtype.str)).astype(np.float64)


def _values(a: Manifest, b: Manifest, keys: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    one, other = (dict(_flat("", {key: _plain(manifest, key) for key in keys})) for manifest in (a, b))
    names = dict.fromkeys([*one, *other])
    return {name: (one.get(name), other.get(name)) for name in names if repr(one.get(name)) != repr(other.get(name))}


def _plain(manifest: Manifest, key: str) -> Any:
    return str(manifest.layout) if key == "layout" else getattr(manifest, key)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """`optimizer.lr` and its value, for each value in nested objects."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, each in value.items():
        yield from _flat(f"{name}.{key}" if name else str(key), each)
