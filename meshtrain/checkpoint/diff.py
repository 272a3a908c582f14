"""Diff of two checkpoints written by any layouts: whole tensors are compared, block by block,
without torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.checkpoint.directory import open_manifest
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.placement import Placement, pieces
from meshtrain.checkpoint.shard_file import ShardReader
from meshtrain.errors import flat_items
from meshtrain.huggingface.safetensors import SIZES
from meshtrain.parallel.sharding import Part, overlap, shape_of, within

BLOCK = 16 * 2**20  # bytes of a tensor that are compared at a time
STATE = ("step", "samples", "tokens", "data", "rng")  # the state of a run besides its tensors
ABOUT = ("evaluation", "layout", "experts", "versions", "config")  # how that state was reached
_NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
}


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same in both checkpoints."""

    name: str
    what: str  # the difference in words
    # number of elements whose bits differ; None: the tensors cannot be compared
    elements: int | None = None
    # the largest difference between two elements; inf if one of them is NaN
    largest: float | None = None
    at: tuple[int, ...] | None = None  # the index of that largest difference


@dataclass(frozen=True)
class Difference:
    """The differences between two checkpoints; `state` and `about` are key -> both values, where
    they differ."""

    compared: int  # number of tensors that both have
    # tensors that are not bit-equal, in the order of the first checkpoint
    tensors: list[TensorDifference]
    state: dict[str, tuple[Any, Any]]  # differences in the rest of the state
    about: dict[str, tuple[Any, Any]]  # differences in how the state was reached

    @property
    def same(self) -> bool:
        """Whether a run continues identically from either."""
        return not self.tensors and not self.state


def diff(a: Path, b: Path) -> Difference:
    """Compares two checkpoints. Raises DamagedError: one is damaged where it was read; InputError:
    not a checkpoint."""
    with (
        ShardReader(a, open_manifest(a)[0]) as first,
        ShardReader(b, open_manifest(b)[0]) as second,
    ):
        names = dict.fromkeys([*first.manifest.tensors, *second.manifest.tensors])
        tensors = [
            difference
            for name in names
            if (difference := _compare(name, first, second)) is not None
        ]
        compared = len(first.manifest.tensors.keys() & second.manifest.tensors.keys())
        state, about = (_values(first.manifest, second.manifest, keys) for keys in (STATE, ABOUT))
        return Difference(compared, tensors, state, about)


def _compare(name: str, first: ShardReader, second: ShardReader) -> TensorDifference | None:
    a, b = first.manifest.tensors.get(name), second.manifest.tensors.get(name)
    if a is None or b is None:
        return TensorDifference(name, f"is only in {(first if b is None else second).checkpoint}")
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return TensorDifference(name, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
    different, largest, at, values = 0, -1.0, None, (math.nan, math.nan)
    for box in _boxes(tuple(slice(0, size) for size in a.dims), SIZES[a.dtype]):
        x, y = _bits(first, name, a, box), _bits(second, name, b, box)
        differing = np.flatnonzero(x != y)
        if not len(differing):
            continue
        different += len(differing)
        u, v = _numbers(x[differing], a.dtype), _numbers(y[differing], a.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(u - v)
        # a NaN is farther from a number than any other number
        distance[np.isnan(distance)] = math.inf
        most = int(distance.argmax())
        if distance[most] > largest:
            largest, values = float(distance[most]), (float(u[most]), float(v[most]))
            inside = np.unravel_index(int(differing[most]), shape_of(box))
            at = tuple(int(i) + span.start for i, span in zip(inside, box, strict=True))[
                : len(a.shape)
            ]
    if not different:
        return None
    place = f" at {list(at)}" if at else ""
    text = (
        f"{different:,} of {math.prod(a.dims):,} elements differ, most{place}: {values[0]!r} and "
        f"{values[1]!r}"
    )
    return TensorDifference(name, text, different, largest, at)


def _boxes(whole: Part, size: int) -> Iterator[Part]:
    """Boxes of at most BLOCK bytes: rows, or parts of a row if one row is larger."""
    shape = shape_of(whole)
    nbytes = math.prod(shape) * size
    if nbytes == 0:
        return
    if nbytes <= BLOCK:
        yield whole
        return
    dim = next(index for index, n in enumerate(shape) if n > 1)
    step = max(1, shape[dim] * BLOCK // nbytes)
    for start in range(whole[dim].start, whole[dim].stop, step):
        rows = slice(start, min(start + step, whole[dim].stop))
        yield from _boxes((*whole[:dim], rows, *whole[dim + 1 :]), size)


def _bits(checkpoint: ShardReader, name: str, tensor: Placement, box: Part) -> np.ndarray:
    """A box of a tensor, flat, as unsigned integers.

    A box spans all dims after the one it cuts and one index of the dims before: it is contiguous
    within each piece.
    """
    size = SIZES[tensor.dtype]
    bits = np.empty(shape_of(box), f"<u{size}")
    for rank, piece in pieces(tensor, checkpoint.manifest.layout, box):
        shard = checkpoint.shard_with(name, rank, piece)
        both = overlap(piece, box)
        stretch = np.empty(shape_of(both), bits.dtype)
        begin = size * int(
            np.ravel_multi_index([span.start for span in within(both, piece)], shape_of(piece))
        )
        shard.read_bytes(name, begin, stretch.data.cast("B"))
        bits[within(both, box)] = stretch
    return bits.reshape(-1)


def _numbers(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The values in float64 of elements given by their bits."""
    if dtype == "BF16":  # the upper half of a float32
        return (bits.astype("<u4") << 16).view("<f4").astype(np.float64)
    return bits.view(_NUMPY.get(dtype, bits.dtype.str)).astype(np.float64)


def _values(a: Manifest, b: Manifest, keys: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    fields = [vars(x) | {"layout": str(x.layout), "experts": x.layout.experts} for x in (a, b)]
    of_a, of_b = (dict(flat_items({key: field[key] for key in keys})) for field in fields)
    pairs = {name: (of_a.get(name), of_b.get(name)) for name in dict.fromkeys([*of_a, *of_b])}
    # by repr, so that NaN equals NaN
    return {name: (x, y) for name, (x, y) in pairs.items() if repr(x) != repr(y)}
