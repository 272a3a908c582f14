"""The safetensors format, and folders of such files in Hugging Face's layout. Does not need torch.

A file is 8 bytes with the length of its header, a JSON header (name -> dtype, shape, data offsets),
and the data (https://huggingface.co/docs/safetensors). A checkpoint's files have the same format
(checkpoint/shard_file.py).
"""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.errors import InputError, join_some
from meshtrain.job.parsing import parse_json

# Names of files in a folder.
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"  # beside a tokenizer.json
CHAT_TEMPLATE = "chat_template.jinja"  # the same
SENTENCEPIECE = "tokenizer.model"  # the one file of a tokenizer that is no text
# What a folder has of its tokenizer. The last five are of older transformers, for which a
# tokenizer.json need not be.
TOKENIZER_FILES = (
    TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE,
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", SENTENCEPIECE,
)  # fmt: skip
TEXTS = (CONFIG, INDEX, GENERATION_CONFIG, *TOKENIZER_FILES)  # all but the tensors
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's file names
METADATA = "__metadata__"  # the one key of a header that is not a tensor
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
MAX_DIMS = 64  # as in torch
FILE_BYTES = 2 * 2**30  # maximum size of an exported file, unless one tensor is larger
WRITER = "meshtrain"  # in the header of exported files, by which an earlier export is recognized
SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its name there, its dtype as safetensors names it, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


def by_numbers(name: str) -> list[tuple[int, str]]:
    """The sort key for the order of names in a file: layer 2 comes before layer 10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in name.split(".")]


def pack_header(entries: Sequence[Entry], metadata: Mapping[str, str], align: int = 8) -> bytes:
    """The length and header of a file with these tensors in order; the data begins at a multiple of
    `align` bytes."""
    about: dict[str, Any] = {METADATA: dict(metadata)}
    offset = 0
    for entry in entries:
        end = offset + entry.nbytes
        about[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    if len(about) <= len(entries):
        raise ValueError("two tensors of a file have one name")
    text = json.dumps(about, separators=(",", ":")).encode()
    # Spaces at the end of JSON mean nothing, and let the data begin where they should.
    text += b" " * (-(8 + len(text)) % align)
    return struct.pack("<Q", len(text)) + text


def header_length(prefix: bytes, file_bytes: int, most: int = MAX_HEADER) -> int:
    """Length of the header that follows the first 8 bytes of a file. Raises ValueError: an
    impossible length."""
    length = struct.unpack("<Q", prefix.ljust(8, b"\0"))[0]
    if not 2 <= length <= min(most, file_bytes - 8):
        raise ValueError(f"its header would have {length:,} bytes, and the file has {file_bytes:,}")
    return length


def parse_entry(name: str, about: Any) -> tuple[Entry, int, int] | None:
    """An entry of a header, and where its bytes begin and end in the data; None if it is not a
    valid entry."""
    try:
        entry = Entry(name, about["dtype"], tuple(about["shape"]))
        begin, end = about["data_offsets"]
        numbers = (begin, end, *entry.shape)
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            return None
        if begin > end or len(entry.shape) > MAX_DIMS:
            return None
        # Of other dtypes nobody here knows the size.
        if entry.dtype in SIZES and end - begin != entry.nbytes:
            return None
    except (KeyError, TypeError, ValueError):
        return None
    return entry, begin, end


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file. Raises InputError: it is missing, damaged, or
    truncated."""
    header, data_bytes = _read_json(path)
    entries, spans = {}, []
    for name, about in header.items():
        if name == METADATA:
            continue
        parsed = parse_entry(name, about)
        if parsed is None or parsed[2] > data_bytes:
            raise InputError(
                f"{path} is no whole safetensors file: what its header says of {name} does not fit "
                f"its {data_bytes:,} bytes of data: copy it anew"
            )
        entry, begin, end = parsed
        entries[name] = entry
        spans.append((begin, end))
    # The format allows no gaps: whatever lies in one was not written by it.
    if not _are_contiguous(spans, data_bytes):
        raise InputError(
            f"{path} is no whole safetensors file: its tensors do not lie one behind the other in "
            f"its {data_bytes:,} bytes of data: copy it anew"
        )
    return entries


def _are_contiguous(spans: Sequence[tuple[int, int]], size: int) -> bool:
    """Whether spans of bytes, (begin, end) each, cover just so many bytes, one behind the
    other."""
    covered = 0
    for begin, end in sorted(spans):
        if begin != covered:
            return False
        covered = end
    return covered == size


def _read_json(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and the number of bytes behind it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = header_length(file.read(8), size)
            header = parse_json(file.read(length), most=length)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
    except FileNotFoundError:
        raise InputError(
            f"there is no {path}: copy the folder anew, or what is missing of it"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no whole safetensors file: {error}: copy it anew") from error
    return header, size - 8 - length


def read_config(folder: Path) -> str:
    """The text of a folder's config.json. Raises InputError: it is missing, or not a JSON
    object."""
    path = folder / CONFIG
    try:
        text = path.read_text(encoding="utf-8-sig")
        is_object = isinstance(parse_json(text), dict)
    except FileNotFoundError:
        raise InputError(f"there is no {path}: {_expected_files(folder)}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not JSON: {error}: copy the file anew") from error
    if not is_object:
        raise InputError(f"{path} holds no object, as a config.json does: copy the file anew")
    return text


def stored(folder: Path) -> dict[Path, dict[str, Entry]]:
    """The tensors of a folder by file: `model.safetensors`, or the files that its index names.

    Raises InputError: there is no such file, one is damaged, or a name leads out of the folder.
    """
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: read_header(folder / SINGLE)}
    if not (folder / INDEX).is_file():
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        require_safetensors(folder, names)
    names_by_file: dict[Path, list[str]] = {}
    for name, file in _read_index(folder / INDEX).items():
        names_by_file.setdefault(folder / file, []).append(name)
    files = {}
    for path, names in names_by_file.items():
        entries = read_header(path)
        missing = [name for name in names if name not in entries]
        if missing:
            raise InputError(
                f"{path} lacks {join_some(missing)}, which {INDEX} says are in it: copy both files "
                "anew"
            )
        files[path] = {name: entries[name] for name in names}
    return files


def require_safetensors(folder: Path | str, files: Sequence[str]) -> None:
    """Raises InputError unless a folder, here or on the hub, with these files has weights that are
    read."""
    if SINGLE in files or INDEX in files:
        return
    pickled = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        raise InputError(
            f"{folder} holds its weights as {min(pickled)}, a pickle, which can run code when it "
            "is read: convert it (in transformers: from_pretrained, then save_pretrained), or get "
            "the model's safetensors files"
        )
    raise InputError(f"{folder} has neither {SINGLE} nor {INDEX}: {_expected_files(Path(folder))}")


def files_of_weights(folder: Path) -> list[str]:
    """The names of a folder's files of tensors: those in its index, which is there, or the one file
    of a folder without an index."""
    if not (folder / INDEX).is_file():
        return [SINGLE]
    return sorted(set(_read_index(folder / INDEX).values()))


def _expected_files(folder: Path) -> str:
    expected = (
        f"a Hugging Face directory has {CONFIG} and {SINGLE}, or {INDEX} and the files that it "
        "names (and a run's folder has checkpoints)"
    )
    if folder.is_dir():
        return expected
    return f"{folder} is no folder; {expected} (`hf download NAME --local-dir DIR` makes one)"


def _read_index(path: Path) -> dict[str, str]:
    """Name of a tensor -> name of the file that holds it."""
    try:
        files = dict(parse_json(path.read_bytes())["weight_map"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no index of weights ({error!r}): copy the file anew"
        ) from error
    for name, file in files.items():
        if not _is_name_of_weights(file):
            raise InputError(
                f"{path} says that {name} is in {file!r}: expected the name of a .safetensors file "
                "in the same folder"
            )
    return files


def _is_name_of_weights(file: object) -> bool:
    """Whether this names a file of weights in the same folder."""
    if not isinstance(file, str) or not file.endswith(".safetensors"):
        return False
    return Path(file).name == file and "\\" not in file


def planned_files(entries: Sequence[Entry], most: int = FILE_BYTES) -> dict[str, list[Entry]]:
    """Spreads tensors, in their order, over files of at most `most` bytes: name of the file -> its
    tensors."""
    files: list[list[Entry]] = [[]]
    nbytes = 0  # of the last file
    for entry in entries:
        if files[-1] and nbytes + entry.nbytes > most:
            files.append([])
            nbytes = 0
        files[-1].append(entry)
        nbytes += entry.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    last = len(files)
    return {
        f"model-{number:05d}-of-{last:05d}.safetensors": file
        for number, file in enumerate(files, start=1)
    }


def index(files: Mapping[str, Sequence[Entry]]) -> str:
    """The text of `model.safetensors.index.json`."""
    total = 0
    weight_map = {}
    for file, entries in files.items():
        for entry in entries:
            total += entry.nbytes
            weight_map[entry.name] = file
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(content, indent=2) + "\n"


def export_problem(folder: Path) -> str | None:
    """Why an export cannot be written to `folder`; None if it can: it is new, empty, or an earlier
    export."""
    folder = folder.absolute()
    if not folder.exists() and not folder.is_symlink():
        above = next(parent for parent in folder.parents if parent.exists())
        if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
            return None
        return (
            f"{folder} cannot be made, since {above} is no folder that may be written to: name "
            "another one"
        )
    if not folder.is_dir():
        return f"{folder} is a file: name a folder, which may be new"
    if not os.access(folder.parent, os.W_OK | os.X_OK):  # the new folder is made beside the old one
        return f"{folder.parent} may not be written to: name a folder somewhere else"
    files = sorted(folder.iterdir())
    if not files:
        return None
    foreign = [path.name for path in files if not _of_export(path)]
    if not foreign:
        if any(path.suffix == ".safetensors" for path in files):
            return None
        # Files such as a config.json alone may be anybody's.
        foreign = [path.name for path in files]
    return (
        f"{folder} holds {join_some(foreign)}, which no export has written: empty it, or name "
        "another folder"
    )


def _of_export(path: Path) -> bool:
    """Whether an export may have written a file."""
    if path.suffix != ".safetensors":
        return path.name in (CONFIG, GENERATION_CONFIG, INDEX, ADAPTER_CONFIG, *TOKENIZER_FILES)
    try:
        metadata = _read_json(path)[0].get(METADATA)
    except InputError:
        return False
    return isinstance(metadata, dict) and metadata.get("writer") == WRITER
