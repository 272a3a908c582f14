"""Folders of weights as Hugging Face lays them out, without torch: what tensors lie where, and what to write.

A safetensors file is 8 bytes with the length of its header, a JSON header (name -> dtype, shape, where its bytes lie),
and the bytes (https://huggingface.co/docs/safetensors). So what is in a folder is known without reading a weight, and
the header of a file that is to be written is known before there is one.
"""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.errors import InputError

CONFIG, SINGLE, INDEX, TOKENIZER = "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
FILE_BYTES = 2 * 2**30  # of an exported file, unless one tensor is larger
WRITER = "meshtrain"  # in the header of what we write, by which an earlier export is known
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its name there, its type in safetensors' words, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


# Reading ------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> str:
    """The text of a folder's config.json, which is a JSON object.

    Raises:
        InputError: there is no such file, or it is something else.
    """
    path = folder / CONFIG
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except FileNotFoundError:
        raise InputError(f"there is no {path}: {_needed(folder)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}: copy the file anew") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no object, as a config.json does: copy the file anew")
    return text


def stored(folder: Path) -> dict[Path, dict[str, Entry]]:
    """The tensors of a folder by file: of `model.safetensors`, or of the files that its index names.

    Raises:
        InputError: there is no such file, or one that is broken or leads out of the folder.
    """
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: read_header(folder / SINGLE)}
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickled:
            raise InputError(
                f"{folder} holds its weights as {pickled[0]}, a pickle, which can run code when it is read: convert it "
                "(in transformers: from_pretrained, then save_pretrained), or get the model's safetensors files"
            )
        raise InputError(f"{folder} has neither {SINGLE} nor {INDEX}: {_needed(folder)}")
    wanted: dict[Path, list[str]] = {}
    for name, file in _read_index(folder / INDEX).items():
        wanted.setdefault(folder / file, []).append(name)
    found = {}
    for path, names in wanted.items():
        entries = read_header(path)
        missing = [name for name in names if name not in entries]
        if missing:
            raise InputError(f"{path} lacks {some(missing)}, which {INDEX} says are in it: copy both files anew")
        found[path] = {name: entries[name] for name in names}
    return found


def _needed(folder: Path) -> str:
    what = f"a Hugging Face directory has {CONFIG} and {SINGLE}, or {INDEX} and the files that it names (and a run's "
    what += "folder has checkpoints)"
    return what if folder.is_dir() else f"{folder} is no folder; {what} (`hf download NAME --local-dir DIR` makes one)"


def _read_index(path: Path) -> dict[str, str]:
    """Name of a tensor -> name of the file that it is in."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = dict(found.items())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no index of weights ({error!r}): copy the file anew") from error
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise InputError(
                f"{path} says that {name} is in {file!r}: expected the name of a .safetensors file in the same folder"
            )
    return files


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file.

    Raises:
        InputError: the file is missing, broken, or cut short.
    """
    found, data = _read_header(path)
    return _entries(path, found, data)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON of a file's header, and how many bytes of data follow."""
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
            size = os.fstat(file.fileno()).st_size
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ValueError(f"its header would have {length:,} bytes, and the file has {size:,}")
            found = json.loads(file.read(length))
        if not isinstance(found, dict):
            raise ValueError("its header is no JSON object")
    except FileNotFoundError:
        raise InputError(f"there is no {path}: copy the folder anew, or what is missing of it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is no whole safetensors file: {error}: copy it anew") from error
    return found, size - 8 - length


def _entries(path: Path, about_all: dict[str, Any], data: int) -> dict[str, Entry]:
    found = {}
    for name, about in about_all.items():
        if name == "__metadata__":
            continue
        try:
            entry = Entry(name, about["dtype"], tuple(about["shape"]))
            begin, end = about["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (begin, end, *entry.shape)) and begin <= end <= data
            whole = whole and (entry.dtype not in SIZES or end - begin == entry.nbytes)
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise InputError(
                f"{path} is no whole safetensors file: what its header says of {name} does not fit its {data:,} bytes "
                "of data: copy it anew"
            )
        found[name] = entry
    return found


def some(names: Sequence[str], most: int = 4) -> str:
    """`a, b, c, d and 12 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# Writing ------------------------------------------------------------------------------------------------------------


def by_numbers(name: str) -> list[tuple[int, str]]:
    """The key by which names are sorted into the order of a file: layer 2 comes before layer 10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in name.split(".")]


def planned_files(entries: Sequence[Entry], most: int = FILE_BYTES) -> dict[str, list[Entry]]:
    """Spreads tensors, in their order, over files of at most `most` bytes: name of the file -> its tensors."""
    files: list[list[Entry]] = [[]]
    for entry in entries:
        if files[-1] and sum(one.nbytes for one in files[-1]) + entry.nbytes > most:
            files.append([])
        files[-1].append(entry)
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": file for n, file in enumerate(files, 1)}


def header(entries: Sequence[Entry]) -> bytes:
    """What a file with these tensors, one after the other, begins with."""
    about: dict[str, Any] = {"__metadata__": {"format": "pt", "writer": WRITER}}
    at = 0
    for entry in entries:
        about[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def index(files: Mapping[str, Sequence[Entry]]) -> str:
    """The text of `model.safetensors.index.json`."""
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    where = {entry.name: file for file, entries in files.items() for entry in entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"


def export_problem(folder: Path) -> str | None:
    """Why an export cannot go there; None if it can: nothing is there, an empty folder, or an earlier export."""
    folder = folder.absolute()
    above = next(parent for parent in folder.parents if parent.exists())
    if not folder.exists() and not folder.is_symlink():
        if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
            return None
        return f"{folder} cannot be made, since {above} is no folder that may be written to: name another one"
    if not folder.is_dir():
        return f"{folder} is a file: name a folder, which may be new"
    if not os.access(folder.parent, os.W_OK | os.X_OK):  # the new folder is made beside the old one
        return f"{folder.parent} may not be written to: name a folder somewhere else"
    inside = sorted(folder.iterdir())
    strange = [path.name for path in inside if not _of_export(path)]
    if not inside or (not strange and any(path.suffix == ".safetensors" for path in inside)):
        return None
    strange = strange or [path.name for path in inside]
    return f"{folder} holds {some(strange)}, which no export has written: empty it, or name another folder"


def _of_export(path: Path) -> bool:
    """Whether an earlier export wrote this file."""
    if path.suffix != ".safetensors":
        return path.name in (CONFIG, INDEX, TOKENIZER)
    try:
        about = _read_header(path)[0].get("__metadata__")
    except InputError:
        return False
    return isinstance(about, dict) and about.get("writer") == WRITER
