"""The manifest of a checkpoint, manifest.json: one line per tensor and one per file, but none per
tensor and rank.

The location of a slice follows from the tensor's placement and the layout (placement.py), so the
manifest of 405 billion parameters on 4,096 ranks takes 0.7 megabytes. Its JSON Schema is next to
this file. Parsing does not trust it: file names must be those of the layout's ranks, file sizes
bound tensor sizes, and names must be printable.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.placement import Placement, fits, part_to_write
from meshtrain.errors import DamagedError, InputError, join_some
from meshtrain.huggingface.safetensors import MAX_DIMS, METADATA, SIZES, Entry
from meshtrain.layout import Layout, LayoutError
from meshtrain.parallel.sharding import shape_of

FORMAT = 2  # format 1 had no `experts`: every rank had all of them
MANIFEST = "manifest.json"
MAX_BYTES = 2**25  # the limit of a manifest: ten times what 131,072 ranks need

_CRC32 = re.compile(r"[0-9a-f]{8}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", re.ASCII)
_FIELDS = (
    "step",
    "samples",
    "tokens",
    "written",
    "layout",
    "versions",
    "rng",
    "data",
    "evaluation",
    "books",
    "config",
)
_OBJECTS = ("versions", "rng", "data", "books", "config")
_ATTRIBUTES = {"books": "counters"}  # name in the file -> attribute of Manifest, where they differ


@dataclass(frozen=True)
class File:
    """A file's size in bytes, and its CRC-32 as 8 hexadecimal digits."""

    size: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int  # optimizer updates done
    layout: Layout  # the layout that wrote it
    tensors: Mapping[str, Placement]  # name -> shape, dtype and placement
    files: Mapping[str, File]  # name -> size and checksum, one file for each rank of the layout
    written: str  # time of writing, ISO 8601, UTC
    samples: int  # samples used since the start of the run
    tokens: int  # valid target tokens of these samples
    config: Mapping[str, Any]  # the resolved config: section -> key -> value
    data: Mapping[str, Any]  # fingerprint and sizes of the data
    versions: Mapping[str, str]  # versions of the software that wrote it
    rng: Mapping[str, Any]  # the values from which each step's random numbers follow
    counters: Mapping[str, Any]  # state of the step logger; `books` in the file
    evaluation: Mapping[str, float] | None  # the evaluation of exactly this step, if there was one

    @property
    def total_bytes(self) -> int:
        """Bytes of all files with tensors."""
        return sum(file.size for file in self.files.values())

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the config; {} if there is none, as a manifest is not trusted."""
        section = self.config.get(name)
        return section if isinstance(section, Mapping) else {}

    def entries(self, rank: int) -> dict[str, Entry]:
        """The contents of a rank's file: the part it wrote of each tensor, by name."""
        parts = (
            (name, tensor, part_to_write(tensor, self.layout, rank))
            for name, tensor in self.tensors.items()
        )
        return {
            name: Entry(name, tensor.dtype, shape_of(part))
            for name, tensor, part in parts
            if part is not None
        }

    def to_json(self) -> str:
        """The text of manifest.json. Raises DamagedError: `parse` would not accept it."""
        fields = {name: getattr(self, _ATTRIBUTES.get(name, name)) for name in _FIELDS}
        head = (
            {"format": FORMAT}
            | fields
            | {"layout": self.layout.sizes, "experts": self.layout.experts}
        )
        tensors = {name: _about(tensor) for name, tensor in self.tensors.items()}
        files = {
            name: {"size": file.size, "crc32": file.crc32} for name, file in self.files.items()
        }
        tables = [_table("tensors", tensors), _table("files", files)]
        text = (
            "{\n"
            + ",\n".join([*(_line(name, value) for name, value in head.items()), *tables])
            + "\n}\n"
        )
        self.parse(text, Path(MANIFEST))
        return text

    @classmethod
    def parse(cls, text: str | bytes, path: Path) -> "Manifest":
        """The manifest in the text of `path`. Raises DamagedError: it is not one; InputError: of a
        newer meshtrain."""
        fields = parse_json(text, path)
        if not isinstance(fields, dict):
            raise DamagedError(path, "is no JSON object, as a manifest is")
        if type(version := fields.get("format")) is int and version > FORMAT:
            raise InputError(
                f"{path} has format {version}, and this meshtrain reads up to format {FORMAT}: use "
                "a newer one"
            )
        try:
            return _parse(cls, fields)
        except (_WrongError, LayoutError) as error:
            raise DamagedError(path, str(error)) from None


def file_of(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


class _WrongError(ValueError):
    """A fault in a manifest; the message says what it is."""


def _about(tensor: Placement) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "cuts": tensor.cuts,
        "stages": tensor.stages,
    }


def _table(name: str, rows: Mapping[str, Any]) -> str:
    return (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(_line(key, row) for key, row in rows.items())
        + "\n}"
    )


def _line(name: str, value: Any) -> str:
    return f"{json.dumps(name)}: {dumps(value)}"


def _parse(cls: type[Manifest], fields: dict[str, Any]) -> Manifest:
    version = fields.get("format", FORMAT)
    _expect(type(version) is int and 1 <= version <= FORMAT, "format", f"1 or {FORMAT}", version)
    known = {"format", "tensors", "files", *_FIELDS} | ({"experts"} if version != 1 else set())
    _expect_none(known - fields.keys(), "lacks")
    _expect_none(fields.keys() - known, f"holds, which format {version} does not have:")
    for name in ("step", "samples", "tokens", *({"experts"} & known)):
        _expect(is_count(fields[name]), name, "a count", fields[name])
    for name in ("layout", "tensors", "files", *_OBJECTS):
        _expect(isinstance(fields[name], dict), name, "an object", fields[name])
    written = fields["written"]
    _expect(
        isinstance(written, str) and bool(_TIME.fullmatch(written)),
        "written",
        "a time in UTC",
        written,
    )
    for name, version in fields["versions"].items():
        _expect(_is_word(name) and _is_word(version), f"versions.{name!a}", "a text", version)
    layout = Layout(fields["layout"]).with_experts(fields.get("experts", 1))
    files = _parse_files(fields["files"], layout)
    tensors = {
        name: _parse_tensor(name, about, layout) for name, about in fields["tensors"].items()
    }
    needed = sum(Entry(name, tensor.dtype, tensor.shape).nbytes for name, tensor in tensors.items())
    stored = sum(file.size for file in files.values())
    if needed > stored:  # so that no reader allocates more memory than the files have bytes
        raise _WrongError(f"names tensors of {needed:,} bytes and files of {stored:,} bytes")
    evaluation = fields["evaluation"]
    good = evaluation is None or (isinstance(evaluation, dict) and all(map(_is_word, evaluation)))
    good = good and all(type(number) in (int, float) for number in (evaluation or {}).values())
    _expect(good, "evaluation", "null, or names and numbers", evaluation)
    evaluation = (
        None if evaluation is None else {name: float(value) for name, value in evaluation.items()}
    )
    plain = {
        _ATTRIBUTES.get(name, name): fields[name]
        for name in ("step", "samples", "tokens", "written", *_OBJECTS)
    }
    return cls(layout=layout, tensors=tensors, files=files, evaluation=evaluation, **plain)


def _parse_files(rows: dict[str, Any], layout: Layout) -> dict[str, File]:
    """One file for each rank and no other, so that no name can lead out of the folder."""
    if len(rows) != layout.world_size:
        raise _WrongError(
            f"names {len(rows)} files, and its layout {layout} has {layout.world_size} ranks"
        )
    foreign = rows.keys() - {file_of(rank) for rank in range(layout.world_size)}
    _expect_none(foreign, f"names files that are not {file_of(0)} and so on, one for each rank:")
    files = {}
    for name, about in rows.items():
        good = (
            isinstance(about, dict)
            and about.keys() == {"size", "crc32"}
            and is_count(about["size"])
        )
        good = good and isinstance(about["crc32"], str) and bool(_CRC32.fullmatch(about["crc32"]))
        _expect(good, name, "a size and a crc32 of 8 hexadecimal digits", about)
        files[name] = File(about["size"], about["crc32"])
    return files


def _parse_tensor(name: str, about: Any, layout: Layout) -> Placement:
    _expect(_is_word(name) and name != METADATA, "tensors", "names that can be printed", name)
    good = isinstance(about, dict) and about.keys() == {"dtype", "shape", "cuts", "stages"}
    _expect(good, name, "dtype, shape, cuts and stages", about)
    dtype, shape, cuts, stages = (about[key] for key in ("dtype", "shape", "cuts", "stages"))
    _expect(
        isinstance(dtype, str) and dtype in SIZES,
        name,
        f"one of the types {', '.join(SIZES)}",
        dtype,
    )
    good = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(map(is_count, shape))
    _expect(good, name, "a shape", shape)
    _expect(
        is_count(math.prod(shape) * SIZES[dtype]), name, "a shape of less than 2^63 bytes", shape
    )
    good = isinstance(cuts, list) and all(isinstance(cut, list) and len(cut) == 2 for cut in cuts)
    good = good and all(
        isinstance(axis, str) and is_count(dim, max(1, len(shape)) - 1) for axis, dim in cuts
    )
    good = good and fits(Placement((), dtype, tuple((axis, dim) for axis, dim in cuts)), layout)
    _expect(
        good,
        name,
        f"cuts of its {max(1, len(shape))} dims by axes of the layout {layout}, each once",
        cuts,
    )
    last = layout.size("pp") - 1
    good = (
        isinstance(stages, list)
        and len(stages) > 0
        and all(is_count(stage, last) for stage in stages)
    )
    good = good and all(stage < following for stage, following in pairwise(stages))
    _expect(good, name, f"stages from 0 to {last}, ascending", stages)
    return Placement(tuple(shape), dtype, tuple((axis, dim) for axis, dim in cuts), tuple(stages))


def _is_word(value: Any) -> bool:
    """Whether a value is non-empty text that is safe to print to a terminal."""
    return isinstance(value, str) and value.isprintable() and value != ""


def _expect_none(names: set[str], problem: str) -> None:
    if names:
        raise _WrongError(f"{problem} {join_some([f'{name[:80]!a}' for name in sorted(names)])}")


def _expect(good: bool, name: str, expected: str, value: Any) -> None:
    if not good:
        text = ascii(value)
        text = text if len(text) <= 80 else text[:77] + "..."
        raise _WrongError(
            f"{name if _is_word(name) else ascii(name)}: expected {expected}; found {text}"
        )


MAX_DEPTH = 50  # nesting depth of JSON; so recursion over a parsed value is safe


def parse_json(text: str | bytes, path: Path) -> Any:
    """The value of a text written by `dumps`. Raises DamagedError, naming `path`: it is no such
    text."""
    try:
        text = text if isinstance(text, str) else text.decode()
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise DamagedError(
            path, f"is no JSON as meshtrain writes it ({error})" if text else "is empty"
        ) from None
    if not _is_shallow(value, MAX_DEPTH):
        raise DamagedError(path, f"nests values more than {MAX_DEPTH} deep")
    return value


def dumps(value: Any) -> str:
    """JSON on one line. JSON has no infinity (of a config) and no NaN (of a loss): they become
    `$float` objects."""
    return json.dumps(_with_floats(value), separators=(",", ":"), allow_nan=False)


def is_count(value: object, most: int = 2**63 - 1) -> bool:
    """Whether this is an integer from 0 to `most`, and not a bool."""
    return type(value) is int and 0 <= value <= most


def _with_floats(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, Mapping):
        return {key: _with_floats(member) for key, member in value.items()}
    return [_with_floats(member) for member in value] if isinstance(value, list | tuple) else value


def _is_shallow(value: Any, depth: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(
        _is_shallow(member, depth - 1) for member in inside if isinstance(member, dict | list)
    )


def _object(pairs: list[tuple[str, Any]]) -> Any:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)[:80]!r} stands twice in an object")
    if len(pairs) == 1 and value.get("$float") in ("inf", "-inf", "nan"):
        return float(value["$float"])
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number
