"""Where documents of text come from: the running Python's standard library, text files, JSONL."""

import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain.data.tokenizer import Tokenizer
from meshtrain.data.tokens import FORMAT, Document
from meshtrain.errors import InputError

# Parts of the standard library that are not the prose of programs: tests, tables, what is not always installed, and
# what a build writes (it differs from machine to machine).
_PASSED_OVER = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "distutils"}
    | {"encodings", "pydoc_data", "__phello__", "__pycache__"}
)
_BATCH_CHARACTERS = 1_000_000  # a tokenizer works on several texts at once


class Text(NamedTuple):
    """The text of one document."""

    prompt: str  # carries no loss
    text: str
    text_bytes: int  # of `text` in UTF-8
    where: str  # for messages: the file, or the file and line


class TextSource(NamedTuple):
    """Files of text and how to read documents out of one."""

    name: str  # for messages
    files: list[Path]
    read: Callable[[Path], Iterator[Text]]

    def key(self, tokenizer: Tokenizer) -> str:
        """Names what preparing would give, without reading the files: 16 hex digits."""
        state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        return hashlib.sha256(repr((FORMAT, self.name, tokenizer.identity, state)).encode()).hexdigest()[:16]


def python_stdlib() -> TextSource:
    """The .py files of the running Python's own standard library, each a document: some 8 MB on every machine.

    Raises:
        InputError: this Python keeps its library in no folder.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(_modules(root))
    if not files:
        raise InputError(f"data.source python-stdlib: there are no .py files in {root}; use `text` with a path")
    version = ".".join(map(str, sys.version_info[:3]))
    return TextSource(f"python-stdlib {version}", files, _read_module)


def _modules(folder: Path) -> Iterator[Path]:
    for found in folder.iterdir():
        if found.suffix == ".py" and not found.name.startswith("_sysconfigdata"):
            yield found
        elif found.is_dir() and found.name not in _PASSED_OVER and not found.name.startswith("config-"):
            yield from _modules(found)


def _read_module(path: Path) -> Iterator[Text]:
    raw = path.read_bytes()
    try:
        yield Text("", raw.decode("utf-8"), len(raw), str(path))
    except UnicodeDecodeError:
        return  # a few old modules declare another encoding; the corpus is what is UTF-8


def text_files(path: Path) -> TextSource:
    """A file, or a folder's .txt and .md files at any depth, sorted; each file is a document.

    Raises:
        InputError: nothing there.
    """
    return TextSource(str(path), _files(path, (".txt", ".md"), "text"), _read_text)


def jsonl_files(path: Path) -> TextSource:
    """A file, or a folder's .jsonl files at any depth, sorted; each line is a document.

    A line is an object with `text`, or with `prompt` and `completion`, of which the prompt carries no loss. Other keys
    are passed over.
    """
    return TextSource(str(path), _files(path, (".jsonl",), "jsonl"), _read_jsonl)


def _files(path: Path, suffixes: tuple[str, ...], source: str) -> list[Path]:
    path = path.expanduser().absolute()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"data.source {source}: there is no file or folder {path} (data.path)")
    files = sorted(found for found in path.rglob("*") if found.suffix.lower() in suffixes and found.is_file())
    if not files:
        raise InputError(f"data.source {source}: there are no {' or '.join(suffixes)} files in {path} (data.path)")
    return files


def _read_text(path: Path) -> Iterator[Text]:
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: byte {error.start:,} is 0x{raw[error.start]:02x} ({error.reason}); "
            "convert the file, for example with iconv"
        ) from None
    yield Text("", text, len(raw), str(path))


def _read_jsonl(path: Path) -> Iterator[Text]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse_line(line, f"{path}:{number}")


def _parse_line(line: bytes, where: str) -> Text:
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON in UTF-8 ({error}); expected one object a line") from None
    keys = set(found) & {"text", "prompt", "completion"} if isinstance(found, dict) else set()
    if keys not in ({"text"}, {"prompt", "completion"}):
        raise InputError(
            f"{where}: expected an object with the key `text`, or with `prompt` and `completion`; "
            + (f"found the keys {', '.join(map(repr, found))}" if isinstance(found, dict) else f"found {found!r:.40}")
        )
    for key in keys:
        if not isinstance(found[key], str):
            raise InputError(f"{where}: `{key}` is {found[key]!r:.40}, expected a string")
    text = found.get("text", found.get("completion"))
    try:
        size = len(text.encode())
        found.get("prompt", "").encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: holds half of a surrogate pair, which is no character ({error})") from None
    return Text(found.get("prompt", ""), text, size, where)


def documents(source: TextSource, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of a source as tokens, each ended by the tokenizer's end-of-document token; empty ones left out.

    Raises:
        InputError: a file that cannot be read as what it should be, with its name and the place in it.
    """
    waiting: list[Text] = []
    size = 0
    for path in source.files:
        for text in source.read(path):
            if not text.text and not text.prompt:
                continue
            waiting.append(text)
            size += len(text.text)
            if size >= _BATCH_CHARACTERS:
                yield from _encoded(waiting, tokenizer)
                waiting, size = [], 0
    yield from _encoded(waiting, tokenizer)


def _encoded(texts: Sequence[Text], tokenizer: Tokenizer) -> Iterator[Document]:
    for one in texts:
        refusal = tokenizer.refuses(one.prompt) or tokenizer.refuses(one.text)
        if refusal:
            raise InputError(f"{one.where} {refusal}")
    prompts = tokenizer.encode_batch([one.prompt for one in texts])
    bodies = tokenizer.encode_batch([one.text for one in texts])
    for one, prompt, body in zip(texts, prompts, bodies, strict=True):
        ids = np.concatenate([prompt, body, [tokenizer.end]]).astype(np.int64)
        loss = None
        if one.prompt:
            loss = np.ones(len(ids), np.uint8)
            loss[: len(prompt)] = 0
        yield Document(ids, loss, one.text_bytes)
