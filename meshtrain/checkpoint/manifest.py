"""What a checkpoint says of itself: manifest.json, which makes sense of the files beside it.

It holds one line per tensor and one per file and nothing per tensor and rank: where a slice lies follows from the
tensor's placement and the layout (placement.py). So the manifest of a model of 405 billion parameters on 4,096 ranks
is half a megabyte. Its JSON Schema is beside this file.

Whoever reads one need not trust it. Files have the names of the layout's ranks and no others, sizes are bounded by
those of the files, and text that is printed is printable.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshtrain.checkpoint import strict
from meshtrain.checkpoint.placement import Placement, shape_of, written_part
from meshtrain.checkpoint.strict import is_count
from meshtrain.errors import DamagedError, InputError
from meshtrain.layout import Layout, LayoutError
from meshtrain.weights import SIZES, Entry, some

FORMAT = 1
MANIFEST = "manifest.json"
MAX_BYTES = 2**25  # of a manifest: ten times what 131,072 ranks need
MAX_DIMS = 64  # as in torch

_CRC32 = re.compile(r"[0-9a-f]{8}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", re.ASCII)
_FIELDS = ("step", "samples", "tokens", "written", "layout", "versions", "rng", "data", "evaluation", "books", "config")
_OBJECTS = ("versions", "rng", "data", "books", "config")


@dataclass(frozen=True)
class File:
    """Size in bytes, and the CRC-32 of all of them as 8 hexadecimal digits."""

    size: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

    Attributes:
        step: optimizer updates done.
        samples: samples used since the start of the run.
        tokens: valid target tokens of these.
        layout: that wrote it.
        tensors: name -> shape, type and placement.
        files: name -> size and checksum, one file for each rank of the layout.
        config: as resolved: section -> key -> value.
        data: what the run trains on: fingerprint and sizes.
        versions: of what wrote it.
        rng: from what the random numbers of each step follow.
        books: what the run's report needs to go on.
        evaluation: of just this step, if there was one.
        written: when, in ISO 8601, UTC.
    """

    step: int
    samples: int
    tokens: int
    layout: Layout
    tensors: Mapping[str, Placement]
    files: Mapping[str, File]
    config: Mapping[str, Any]
    data: Mapping[str, Any]
    versions: Mapping[str, str]
    rng: Mapping[str, Any]
    books: Mapping[str, Any]
    evaluation: Mapping[str, float] | None
    written: str

    @property
    def total_bytes(self) -> int:
        """Of all files with tensors."""
        return sum(file.size for file in self.files.values())

    def entries(self, rank: int) -> dict[str, Entry]:
        """What a rank's file holds: its written part of each tensor, by name."""
        parts = ((name, tensor, written_part(tensor, self.layout, rank)) for name, tensor in self.tensors.items())
        return {name: Entry(name, tensor.dtype, shape_of(part)) for name, tensor, part in parts if part is not None}

    def to_json(self) -> str:
        """The text of manifest.json, which `parse` takes.

        Raises:
            DamagedError: the manifest is none that `parse` would take.
        """
        head = {"format": FORMAT} | {name: getattr(self, name) for name in _FIELDS} | {"layout": self.layout.sizes}
        tensors = {name: _about(tensor) for name, tensor in self.tensors.items()}
        files = {name: {"size": file.size, "crc32": file.crc32} for name, file in self.files.items()}
        tables = [_table("tensors", tensors), _table("files", files)]
        text = "{\n" + ",\n".join([*(_line(name, value) for name, value in head.items()), *tables]) + "\n}\n"
        self.parse(text, Path(MANIFEST))
        return text

    @classmethod
    def parse(cls, text: str | bytes, where: Path) -> "Manifest":
        """The manifest of this text; `where` is its file, for messages.

        Raises:
            DamagedError: it is no manifest.
            InputError: a newer meshtrain has written it.
        """
        found = strict.parse(text, where)
        if not isinstance(found, dict):
            raise DamagedError(where, "is no JSON object, as a manifest is")
        if type(version := found.get("format")) is int and version > FORMAT:
            raise InputError(
                f"{where} has format {version}, and this meshtrain reads up to format {FORMAT}: use a newer one"
            )
        try:
            return _manifest(cls, found)
        except (_WrongError, LayoutError) as error:
            raise DamagedError(where, str(error)) from None


def file_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


class _WrongError(ValueError):
    """What is wrong with a manifest."""


def _about(tensor: Placement) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "shape": tensor.shape, "cuts": tensor.cuts, "stages": tensor.stages}


def _table(name: str, rows: Mapping[str, Any]) -> str:
    """An object with a line for each of its members."""
    return f"{json.dumps(name)}: {{\n" + ",\n".join(_line(key, row) for key, row in rows.items()) + "\n}"


def _line(name: str, value: Any) -> str:
    return f"{json.dumps(name)}: {strict.dumps(value)}"


# From JSON ----------------------------------------------------------------------------------------------------------


def _manifest(cls: type[Manifest], found: dict[str, Any]) -> Manifest:
    known = {"format", "tensors", "files", *_FIELDS}
    _nothing(known - found.keys(), "lacks")
    _nothing(found.keys() - known, f"holds, which format {FORMAT} does not have:")
    _expect(type(found["format"]) is int and found["format"] == FORMAT, "format", str(FORMAT), found["format"])
    for name in ("step", "samples", "tokens"):
        _expect(is_count(found[name]), name, "a count", found[name])
    for name in ("layout", "tensors", "files", *_OBJECTS):
        _expect(isinstance(found[name], dict), name, "an object", found[name])
    written = found["written"]
    _expect(isinstance(written, str) and bool(_TIME.fullmatch(written)), "written", "a time in UTC", written)
    for name, version in found["versions"].items():
        _expect(_is_word(name) and _is_word(version), f"versions.{name!a}", "a text", version)
    layout = Layout(found["layout"])
    files = _files(found["files"], layout)
    tensors = {name: _tensor(name, about, layout) for name, about in found["tensors"].items()}
    _fit(tensors, files)
    plain = {name: found[name] for name in ("step", "samples", "tokens", "written", *_OBJECTS)}
    return cls(layout=layout, tensors=tensors, files=files, evaluation=_evaluation(found["evaluation"]), **plain)


def _files(found: dict[str, Any], layout: Layout) -> dict[str, File]:
    """A file for each rank and nothing else, so that no name leads anywhere."""
    if len(found) != layout.world_size:
        raise _WrongError(f"names {len(found)} files, and its layout {layout} has {layout.world_size} ranks")
    strange = found.keys() - {file_of(rank) for rank in range(layout.world_size)}
    _nothing(strange, f"names files that are not {file_of(0)} and so on, one for each rank:")
    files = {}
    for name, about in found.items():
        good = isinstance(about, dict) and about.keys() == {"size", "crc32"} and is_count(about["size"])
        good = good and isinstance(about["crc32"], str) and bool(_CRC32.fullmatch(about["crc32"]))
        _expect(good, name, "a size and a crc32 of 8 hexadecimal digits", about)
        files[name] = File(about["size"], about["crc32"])
    return files


def _tensor(name: str, about: Any, layout: Layout) -> Placement:
    _expect(_is_word(name) and name != "__metadata__", "tensors", "names that can be printed", name)
    good = isinstance(about, dict) and about.keys() == {"dtype", "shape", "cuts", "stages"}
    _expect(good, name, "dtype, shape, cuts and stages", about)
    dtype, shape, cuts, stages = (about[key] for key in ("dtype", "shape", "cuts", "stages"))
    _expect(isinstance(dtype, str) and dtype in SIZES, name, f"one of the types {', '.join(SIZES)}", dtype)
    good = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(map(is_count, shape))
    _expect(good, name, "a shape", shape)
    _expect(is_count(math.prod(shape) * SIZES[dtype]), name, "a shape of less than 2^63 bytes", shape)
    good = isinstance(cuts, list) and all(_is_cut(each, shape, layout) for each in cuts)
    good = good and len({axis for axis, _ in cuts}) == len(cuts)
    _expect(good, name, f"cuts of its {max(1, len(shape))} dims by axes of the layout {layout}, each once", cuts)
    good = (
        isinstance(stages, list) and len(stages) > 0 and all(is_count(each, layout.size("pp") - 1) for each in stages)
    )
    good = good and all(one < next_one for one, next_one in pairwise(stages))
    _expect(good, name, f"stages from 0 to {layout.size('pp') - 1}, ascending", stages)
    return Placement(tuple(shape), dtype, tuple((axis, dim) for axis, dim in cuts), tuple(stages))


def _is_cut(found: Any, shape: list[int], layout: Layout) -> bool:
    if not isinstance(found, list) or len(found) != 2:
        return False
    axis, dim = found
    known = isinstance(axis, str) and axis in layout.axes and axis != "pp"
    return known and is_count(dim, max(1, len(shape)) - 1)


def _fit(tensors: Mapping[str, Placement], files: Mapping[str, File]) -> None:
    """Each byte of each tensor is in some file, so nobody has to make room for more than there is."""
    needed = sum(math.prod(tensor.shape) * SIZES[tensor.dtype] for tensor in tensors.values())
    there = sum(file.size for file in files.values())
    if needed > there:
        raise _WrongError(f"names tensors of {needed:,} bytes and files of {there:,} bytes")


def _evaluation(found: Any) -> dict[str, float] | None:
    good = found is None or (isinstance(found, dict) and all(map(_is_word, found)))
    good = good and all(isinstance(each, int | float) and not isinstance(each, bool) for each in (found or {}).values())
    _expect(good, "evaluation", "null, or names and numbers", found)
    return None if found is None else {name: float(each) for name, each in found.items()}


def _is_word(found: Any) -> bool:
    """Text that can be printed to a terminal without harm."""
    return isinstance(found, str) and found.isprintable() and found != ""


def _nothing(names: set[str], wrong: str) -> None:
    if names:
        raise _WrongError(f"{wrong} {some([f'{name[:80]!a}' for name in sorted(names)])}")


def _expect(good: bool, name: str, expected: str, found: Any) -> None:
    if not good:
        text = ascii(found)
        text = text if len(text) <= 80 else text[:77] + "..."
        raise _WrongError(f"{name if _is_word(name) else ascii(name)}: expected {expected}; found {text}")
