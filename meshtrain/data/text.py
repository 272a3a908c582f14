"""Where documents of text come from: the running Python's standard library, text files, JSONL."""

import codecs
import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain.data.fingerprint import files_below
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.data.tokens import FORMAT, Document
from meshtrain.errors import InputError

# Of the standard library: tests, tables, what is not always installed, and what a build writes.
_PASSED_OVER = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "distutils"}
    | {"encodings", "pydoc_data", "__phello__", "__pycache__"}
)
_BATCH_CHARACTERS = 1 << 20  # a tokenizer works on several texts at once, and on no more of a long one
_MOST_WHOLE = 1 << 26  # characters in which a tokenizer must find a place to cut: it takes some 150 bytes for each


class Text(NamedTuple):
    """The text of one document, or a part of it."""

    chunks: Iterable[str]  # one after the other; gone through once
    source: str  # for messages: the file, or the file and line
    loss: bool = True  # whether its tokens carry one
    ends: bool = True  # whether the document ends with it


Part = tuple[str, int, Text]  # what a tokenizer gets at once, the characters before it, and the Text that it is of


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
    """The .py files of the running Python's own standard library, each a document: some 8 MB on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(_modules(root))
    if not files:
        raise InputError(f"data.source python-stdlib: there are no .py files in {root}; use `text` with a path")
    version = ".".join(map(str, sys.version_info[:3]))
    return TextSource(f"python-stdlib {version}", files, _read_module)


def _modules(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            yield path
        elif path.is_dir() and path.name not in _PASSED_OVER and not path.name.startswith("config-"):
            yield from _modules(path)


def _read_module(path: Path) -> Iterator[Text]:
    with suppress(UnicodeDecodeError):  # a few old modules declare another encoding; the corpus is what is UTF-8
        yield Text([path.read_text("utf-8")], str(path))


def text_files(path: Path) -> TextSource:
    """A file, or a folder's .txt and .md files at any depth, sorted; each is a document. Raises InputError: none."""
    return TextSource(str(path), _files(path, (".txt", ".md"), "text"), _read_text)


def jsonl_files(path: Path) -> TextSource:
    """A file, or a folder's .jsonl files at any depth, sorted; each line is a document.

    A line is an object with `text`, or with `prompt` (without loss) and `completion`; other keys are passed over.
    """
    return TextSource(str(path), _files(path, (".jsonl",), "jsonl"), _read_jsonl)


def _files(path: Path, suffixes: tuple[str, ...], source: str) -> list[Path]:
    path = path.expanduser().absolute()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"data.source {source}: there is no file or folder {path} (data.path)")
    files = sorted(file for file in files_below(path) if file.suffix.lower() in suffixes and file.is_file())
    if not files:
        raise InputError(f"data.source {source}: there are no {' or '.join(suffixes)} files in {path} (data.path)")
    return files


def _read_text(path: Path) -> Iterator[Text]:
    if path.stat().st_size:
        yield Text(_decode(path), str(path))


def _decode(path: Path) -> Iterator[str]:
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    with open(path, "rb") as file:
        while True:
            raw = file.read(_BATCH_CHARACTERS)
            before = read - len(decoder.getstate()[0])  # a character may begin in one piece and end in the next
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path} is not UTF-8 text: byte {before + error.start:,} is 0x{error.object[error.start]:02x} "
                    f"({error.reason}); convert the file, for example with iconv"
                ) from None
            if not raw:
                return
            read += len(raw)
            yield text


def _read_jsonl(path: Path) -> Iterator[Text]:
    number = 0
    with open(path, "rb") as file:
        while line := file.readline():
            number += 1
            if not line.isspace():
                source = f"{path}:{number}"
                try:
                    text = line.decode("utf-8-sig")
                    del line  # which may be long, as what comes of it
                    record = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{source}: not JSON in UTF-8 ({error}); expected one object a line") from None
                del text
                yield from _from_object(record, source)


def _from_object(record: Any, source: str) -> Iterator[Text]:
    keys = set(record) & {"text", "prompt", "completion"} if isinstance(record, dict) else set()
    if keys not in ({"text"}, {"prompt", "completion"}):
        instead = f"the keys {', '.join(map(repr, record))}" if isinstance(record, dict) else f"{record!r:.40}"
        raise InputError(
            f"{source}: expected an object with the key `text`, or with `prompt` and `completion`; found {instead}"
        )
    for key in keys:
        if not isinstance(record[key], str):
            raise InputError(f"{source}: `{key}` is {record[key]!r:.40}, expected a string")
        try:
            for part in _slices(record[key]):
                part.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{source}: holds half of a surrogate pair, which is no character ({error})") from None
    prompt, text = record.get("prompt", ""), record["text" if "text" in record else "completion"]
    if prompt:
        yield Text(_slices(prompt), source, loss=False, ends=False)
    if prompt or text:
        yield Text(_slices(text), source)


def _slices(text: str) -> Iterator[str]:
    return (text[start : start + _BATCH_CHARACTERS] for start in range(0, len(text), _BATCH_CHARACTERS))


def documents(source: TextSource, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of a source as tokens, each ended by the tokenizer's end-of-document token; empty ones left out.

    Of a long document no more is in memory at once than the tokenizer needs to find a place where it can be cut.
    InputError: a file is not what it should be; names it and the place in it.
    """
    waiting: list[Part] = []
    size = 0
    for path in source.files:
        for text in source.read(path):
            for part in _parts(text, tokenizer):
                waiting.append(part)
                size += len(part[0])
                if size >= _BATCH_CHARACTERS:
                    yield from _encode(waiting, tokenizer)
                    waiting, size = [], 0
    yield from _encode(waiting, tokenizer)


def _parts(text: Text, tokenizer: Tokenizer) -> Iterator[Part]:
    rest, start = "", 0
    for chunk in text.chunks:
        rest += chunk
        if len(rest) >= _BATCH_CHARACTERS:
            end = tokenizer.cut(rest)
            if end:
                yield rest[:end], start, text._replace(ends=False)
                rest, start = rest[end:], start + end
            elif len(rest) > _MOST_WHOLE:
                raise InputError(
                    f"{text.source} has {len(rest):,} characters and more in which data.tokenizer finds no place to "
                    "cut them: give shorter documents, for instance as lines of JSONL"
                )
    yield rest, start, text


def _encode(parts: Sequence[Part], tokenizer: Tokenizer) -> Iterator[Document]:
    for content, start, text in parts:
        problem = tokenizer.problem(content, start)
        if problem:
            raise InputError(f"{text.source} {problem}")
    for (content, _, text), ids in zip(parts, tokenizer.encode_batch([part[0] for part in parts]), strict=True):
        ids = np.append(ids, ids.dtype.type(tokenizer.end)) if text.ends else ids
        loss = None if text.loss else np.zeros(len(ids), np.uint8)
        yield Document(ids, loss, len(content.encode()) if text.loss else 0, text.ends)
