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
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.json_text import dumps, is_count, parse_json
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
        entries = {}
        for name, tensor in self.tensors.items():
            part = part_to_write(tensor, self.layout, rank)
            if part is not None:
                entries[name] = Entry(name, tensor.dtype, shape_of(part))
        return entries

    def to_json(self) -> str:
        """The text of manifest.json. Raises DamagedError: `parse` would not accept it."""
        head = {
            "format": FORMAT,
            "step": self.step,
            "samples": self.samples,
            "tokens": self.tokens,
            "written": self.written,
            "layout": self.layout.sizes,
            "versions": self.versions,
            "rng": self.rng,
            "data": self.data,
            "evaluation": self.evaluation,
            "books": self.counters,
            "config": self.config,
            "experts": self.layout.experts,
        }
        members = [_member(name, value) for name, value in head.items()]
        members.append(_table("tensors", {name: _row(t) for name, t in self.tensors.items()}))
        members.append(_table("files", {name: asdict(file) for name, file in self.files.items()}))
        text = "{\n" + ",\n".join(members) + "\n}\n"
        # What no reader would take is an error now, and not when the run has to resume from it.
        self.parse(text, Path(MANIFEST))
        return text

    @classmethod
    def parse(cls, text: str | bytes, path: Path) -> "Manifest":
        """The manifest in the text of `path`. Raises DamagedError: it is not one; InputError: of a
        newer meshtrain."""
        fields = parse_json(text, path)
        if not isinstance(fields, dict):
            raise DamagedError(path, "is no JSON object, as a manifest is")
        version = fields.get("format")
        if type(version) is int and version > FORMAT:
            raise InputError(
                f"{path} has format {version}, and this meshtrain reads up to format {FORMAT}: use "
                "a newer one"
            )
        try:
            return _parse(fields)
        except (_WrongError, LayoutError) as error:
            raise DamagedError(path, str(error)) from None


def file_of(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


# Writing ------------------------------------------------------------------------------------------


def _row(tensor: Placement) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "cuts": tensor.cuts,
        "stages": tensor.stages,
    }


def _table(name: str, rows: Mapping[str, Any]) -> str:
    """A member of the manifest that has a line for each of its own."""
    lines = ",\n".join(_member(key, row) for key, row in rows.items())
    return f"{json.dumps(name)}: {{\n{lines}\n}}"


def _member(name: str, value: Any) -> str:
    return f"{json.dumps(name)}: {dumps(value)}"


# Reading ------------------------------------------------------------------------------------------


class _WrongError(ValueError):
    """A fault in a manifest; the message says what it is."""


@dataclass(frozen=True)
class _Rule:
    """What the value of a field has to be."""

    words: str
    holds: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> None:
        if not self.holds(value):
            raise _wrong(name, self.words, value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_word(value: Any) -> bool:
    """Whether a value is non-empty text that is safe to print to a terminal."""
    return isinstance(value, str) and value.isprintable() and value != ""


def _is_time(value: Any) -> bool:
    return isinstance(value, str) and _TIME.fullmatch(value) is not None


def _is_crc32(value: Any) -> bool:
    return isinstance(value, str) and _CRC32.fullmatch(value) is not None


def _is_evaluation(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict):
        return False
    return all(_is_word(name) and type(x) in (int, float) for name, x in value.items())


_COUNT = _Rule("a count", is_count)
_OBJECT = _Rule("an object", _is_object)
_TEXT = _Rule("a text", _is_word)
_DTYPE = _Rule(
    f"one of the types {', '.join(SIZES)}", lambda value: isinstance(value, str) and value in SIZES
)

_RULES: Mapping[str, _Rule] = {
    "step": _COUNT,
    "samples": _COUNT,
    "tokens": _COUNT,
    "experts": _COUNT,
    "layout": _OBJECT,
    "tensors": _OBJECT,
    "files": _OBJECT,
    "versions": _OBJECT,
    "rng": _OBJECT,
    "data": _OBJECT,
    "books": _OBJECT,
    "config": _OBJECT,
    "written": _Rule("a time in UTC", _is_time),
    "evaluation": _Rule("null, or names and numbers", _is_evaluation),
}


def _parse(fields: dict[str, Any]) -> Manifest:
    version = fields.get("format", FORMAT)
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise _wrong("format", f"1 or {FORMAT}", version)
    rules = {name: rule for name, rule in _RULES.items() if name != "experts" or version > 1}
    known = {"format", *rules}
    _refuse(known - fields.keys(), "lacks")
    _refuse(fields.keys() - known, f"holds, which format {version} does not have:")
    for name, rule in rules.items():
        rule.check(name, fields[name])
    for name, text in fields["versions"].items():
        label = f"versions.{name!a}"
        _TEXT.check(label, name)
        _TEXT.check(label, text)

    layout = Layout(fields["layout"]).with_experts(fields.get("experts", 1))
    files = _parse_files(fields["files"], layout)
    tensors = {name: _parse_tensor(name, row, layout) for name, row in fields["tensors"].items()}
    _require_room(tensors, files)
    evaluation = fields["evaluation"]
    if evaluation is not None:
        evaluation = {name: float(value) for name, value in evaluation.items()}
    return Manifest(
        step=fields["step"],
        layout=layout,
        tensors=tensors,
        files=files,
        written=fields["written"],
        samples=fields["samples"],
        tokens=fields["tokens"],
        config=fields["config"],
        data=fields["data"],
        versions=fields["versions"],
        rng=fields["rng"],
        counters=fields["books"],
        evaluation=evaluation,
    )


def _parse_files(rows: dict[str, Any], layout: Layout) -> dict[str, File]:
    """One file for each rank and no other, so that no name can lead out of the folder."""
    # Compared first: a hostile layout may have more ranks than there is memory for names.
    if len(rows) != layout.world_size:
        raise _WrongError(
            f"names {len(rows)} files, and its layout {layout} has {layout.world_size} ranks"
        )
    foreign = rows.keys() - {file_of(rank) for rank in range(layout.world_size)}
    _refuse(foreign, f"names files that are not {file_of(0)} and so on, one for each rank:")
    files = {}
    for name, row in rows.items():
        is_whole = _is_object(row) and row.keys() == {"size", "crc32"}
        if not is_whole or not is_count(row["size"]) or not _is_crc32(row["crc32"]):
            raise _wrong(name, "a size and a crc32 of 8 hexadecimal digits", row)
        files[name] = File(row["size"], row["crc32"])
    return files


def _parse_tensor(name: str, row: Any, layout: Layout) -> Placement:
    if not _is_word(name) or name == METADATA:
        raise _wrong("tensors", "names that can be printed", name)
    if not _is_object(row) or row.keys() != {"dtype", "shape", "cuts", "stages"}:
        raise _wrong(name, "dtype, shape, cuts and stages", row)
    dtype = row["dtype"]
    _DTYPE.check(name, dtype)
    shape = _parse_shape(name, row["shape"], dtype)
    cuts = _parse_cuts(name, row["cuts"], shape, layout)
    stages = _parse_stages(name, row["stages"], layout)
    return Placement(shape, dtype, cuts, stages)


def _parse_shape(name: str, sizes: Any, dtype: str) -> tuple[int, ...]:
    if not isinstance(sizes, list) or len(sizes) > MAX_DIMS or not all(map(is_count, sizes)):
        raise _wrong(name, "a shape", sizes)
    if not is_count(math.prod(sizes) * SIZES[dtype]):
        raise _wrong(name, "a shape of less than 2^63 bytes", sizes)
    return tuple(sizes)


def _parse_cuts(
    name: str, pairs: Any, shape: tuple[int, ...], layout: Layout
) -> tuple[tuple[str, int], ...]:
    dims = max(1, len(shape))  # a scalar counts as one dim
    cuts = _cuts_in(pairs, dims)
    if cuts is None or not fits(Placement(shape, "U8", cuts), layout):
        raise _wrong(
            name, f"cuts of its {dims} dims by axes of the layout {layout}, each once", pairs
        )
    return cuts


def _cuts_in(pairs: Any, dims: int) -> tuple[tuple[str, int], ...] | None:
    """The pairs of an axis and one of so many dims; None if they are something else."""
    if not isinstance(pairs, list):
        return None
    cuts = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            return None
        axis, dim = pair
        if not isinstance(axis, str) or not is_count(dim, dims - 1):
            return None
        cuts.append((axis, dim))
    return tuple(cuts)


def _parse_stages(name: str, stages: Any, layout: Layout) -> tuple[int, ...]:
    last = layout.size("pp") - 1
    if not _is_ascending(stages, last):
        raise _wrong(name, f"stages from 0 to {last}, ascending", stages)
    return tuple(stages)


def _is_ascending(numbers: Any, most: int) -> bool:
    """Whether these are one or more integers from 0 to `most` in ascending order."""
    if not isinstance(numbers, list) or not numbers:
        return False
    if not all(is_count(number, most) for number in numbers):
        return False
    return all(number < following for number, following in pairwise(numbers))


def _require_room(tensors: Mapping[str, Placement], files: Mapping[str, File]) -> None:
    """The files bound the tensors, so that no reader allocates more memory than files have
    bytes."""
    needed = sum(Entry(name, tensor.dtype, tensor.shape).nbytes for name, tensor in tensors.items())
    stored = sum(file.size for file in files.values())
    if needed > stored:
        raise _WrongError(f"names tensors of {needed:,} bytes and files of {stored:,} bytes")


def _refuse(names: Collection[str], problem: str) -> None:
    """Raises an error that lists the names, if there are any."""
    if names:
        raise _WrongError(f"{problem} {join_some([f'{name[:80]!a}' for name in sorted(names)])}")


def _wrong(name: str, expected: str, value: Any) -> _WrongError:
    """The error of a field, safe to print whatever the file has there."""
    label = name if _is_word(name) else ascii(name)
    text = ascii(value)
    if len(text) > 80:
        text = text[:77] + "..."
    return _WrongError(f"{label}: expected {expected}; found {text}")
