"""Sources of text documents: the running Python's standard library, text files, JSONL, Parquet."""

import codecs
import gzip
import hashlib
import importlib.util
import io
import sys
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain.data.chat import LossOn
from meshtrain.data.fingerprint import files_below
from meshtrain.data.tokenizer import Tokenizer, refuse_controls
from meshtrain.data.tokens import FORMAT, Document
from meshtrain.errors import InputError, any_of, plural
from meshtrain.job.parsing import parse_json

# Folders of the standard library to skip: tests, tables, optional parts, and build outputs.
_PASSED_OVER = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "tkinter",
        "turtledemo",
        "distutils",
        "encodings",
        "pydoc_data",
        "__phello__",
        "__pycache__",
    }
)
# characters tokenized at once: several short texts, or a part of a long one
_BATCH_CHARACTERS = 1 << 20
# characters within which a tokenizer must find a cut: it takes some 150 bytes for each
_MOST_WHOLE = 1 << 26
_MOST_LINE = 1 << 28  # bytes of a line of JSONL, which is in memory about three times
LEAST_SHARD = 1 << 24  # bytes of a shard
SHARDS = 2048  # about as many at most
ROWS = 64  # rows of a Parquet file that are in memory at once
_PACKED = (".jsonl.gz", ".jsonl.zst")


class Text(NamedTuple):
    """The text of one document, or a part of it."""

    chunks: Iterable[str]  # the text in consecutive pieces; iterated once
    source: object  # the file, or the file and line, for error messages
    loss: bool = True  # whether its tokens carry a loss
    ends: bool = True  # whether it ends its document
    begins: bool = True  # whether it begins its document
    # an object with `messages`, a conversation, instead of chunks
    record: dict[str, Any] | None = None


class Piece(NamedTuple):
    """The documents of a file that begin in a range of its bytes, [begin, end), or the rows of a
    data set that has no files here."""

    path: Path
    begin: int
    end: int


class Line(NamedTuple):
    """A line of a file, counted from byte `begin`; the lines before that are counted only when this
    is printed."""

    path: Path
    begin: int
    number: int

    def __str__(self) -> str:
        lines_before = 0
        remaining = self.begin
        with open(self.path, "rb") as file:
            while remaining:
                block = file.read(min(remaining, _BATCH_CHARACTERS))
                if not block:
                    break
                lines_before += block.count(b"\n")
                remaining -= len(block)
        return f"{self.path}:{lines_before + self.number}"


class Part(NamedTuple):
    """A string to tokenize at once."""

    content: str
    start: int  # characters of the text before it
    text: Text

    @property
    def begins_document(self) -> bool:
        return self.text.begins and self.start == 0


class TextSource(ABC):
    """Where documents of text come from: their units, in order, and how to read one."""

    name: str  # for messages
    kind: str  # the format, and the field that is read

    @property
    @abstractmethod
    def about(self) -> str:
        """What is read, for people: `12 files`."""

    @abstractmethod
    def state(self) -> object:
        """What tells the text from another one, without reading it."""

    @abstractmethod
    def shards(self) -> list[list[Piece]]:
        """The units of tokenization, in order; they depend on the text alone."""

    @abstractmethod
    def read(self, piece: Piece) -> Iterator[Text]:
        """The documents of a piece. Raises InputError: malformed text; names the place."""

    @abstractmethod
    def fetch(self, say: Callable[[str], None]) -> None:
        """Brings the text to this host, if it is elsewhere. `say` gets a line now and then."""

    def key(self, tokenizer: Tokenizer, loss_on: LossOn = "all") -> str:
        """16 hex digits that identify the prepared token files, without reading the text."""
        marks = list(tokenizer.marks)
        if loss_on != "all":
            marks.append(("loss on", loss_on))
        return self._key(tokenizer, *marks)

    def earlier_key(self, tokenizer: Tokenizer) -> str:
        """The key by which older versions of meshtrain, which knew no `marks` of tokenizers, named
        these files."""
        return self._key(tokenizer)

    def _key(self, tokenizer: Tokenizer, *marks: object) -> str:
        chat = () if tokenizer.chat is None else (tokenizer.chat.digest,)
        state = self.state()
        names = (FORMAT, self.name, self.kind, tokenizer.identity, state, *chat, *marks)
        return hashlib.sha256(repr(names).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TextFiles(TextSource):
    """Text files, and how to read the documents of one."""

    name: str
    kind: str
    files: list[Path]
    reader: Callable[[Piece], Iterator[Text]]
    cut: tuple[str, ...] = ()  # suffixes of files that may be read in pieces

    @property
    def about(self) -> str:
        return plural(len(self.files), "file")

    def read(self, piece: Piece) -> Iterator[Text]:
        return self.reader(piece)

    def fetch(self, say: Callable[[str], None]) -> None:
        """They are here."""

    def state(self) -> object:
        state = []
        for path in self.files:
            about = path.stat()
            state.append((str(path), about.st_size, about.st_mtime_ns))
        return state

    def shards(self) -> list[list[Piece]]:
        sizes = [path.stat().st_size for path in self.files]
        most = max(LEAST_SHARD, sum(sizes) // SHARDS)
        shards: list[list[Piece]] = [[]]
        room = most
        for path, size in zip(self.files, sizes, strict=True):
            may_be_cut = path.name.lower().endswith(self.cut)
            step = most if may_be_cut else max(size, 1)
            for begin in range(0, max(size, 1), step):
                if room <= 0:
                    shards.append([])
                    room = most
                piece = Piece(path, begin, min(begin + step, size))
                shards[-1].append(piece)
                room -= piece.end - piece.begin
        return shards


def python_stdlib() -> TextSource:
    """The .py files of the running Python's standard library, each a document: some 8 MB on every
    machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(_modules(root))
    if not files:
        raise InputError(
            f"data.source python-stdlib: there are no .py files in {root}; use `text` with a path"
        )
    version = ".".join(map(str, sys.version_info[:3]))
    return TextFiles(f"python-stdlib {version}", "python-stdlib", files, _read_module)


def _modules(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        # Build outputs differ between machines.
        if path.name in _PASSED_OVER or path.name.startswith(("_sysconfigdata", "config-")):
            continue
        if path.suffix == ".py":
            yield path
        elif path.is_dir():
            yield from _modules(path)


def _read_module(piece: Piece) -> Iterator[Text]:
    # a few old modules declare another encoding; they are left out
    with suppress(UnicodeDecodeError):
        yield Text([piece.path.read_text("utf-8-sig")], piece.path)


def text_files(path: Path) -> TextSource:
    """A file, or a folder's .txt and .md files at any depth, sorted; each is a document. Raises
    InputError: no file."""
    return TextFiles(str(path), "text", _files(path, (".txt", ".md"), "text"), _read_text)


def jsonl_files(path: Path, field: str = "text") -> TextSource:
    """A file, or a folder's .jsonl files at any depth, sorted; each line is a document.

    A line is an object with `field`, with `prompt` (without loss) and `completion`, or with
    `messages`, of which the assistant's carry a loss. .jsonl.gz or .jsonl.zst files are read only
    where there is no .jsonl file, since they may hold the same lines. Raises InputError: no file,
    or both compressed kinds.
    """
    files = _files(path, (".jsonl", *_PACKED), "jsonl")
    plain = [file for file in files if not file.name.lower().endswith(_PACKED)]
    if plain:
        files = plain
    else:
        kinds = {file.suffix.lower() for file in files}
        if len(kinds) > 1:
            same = f"{any_of(_PACKED, 'and')} files, which may be the same lines"
            raise InputError(
                f"data.source jsonl: {path} has {same}: leave one kind in the folder (data.path)"
            )
    if any(file.suffix.lower() == ".zst" for file in files):
        _require_pyarrow(path)
    read = partial(_read_jsonl, field=field)
    return TextFiles(str(path), f"jsonl {field}", files, read, cut=(".jsonl",))


def parquet_files(path: Path, field: str = "text") -> TextSource:
    """A file, or a folder's .parquet files at any depth, sorted; each row is a document: the column
    `field`, or `prompt` (without loss) and `completion`. Raises InputError: no file, or pyarrow is
    not installed."""
    _require_pyarrow(path)
    files = _files(path, (".parquet",), "parquet")
    read = partial(_read_parquet, field=field)
    return TextFiles(str(path), f"parquet {field}", files, read, cut=(".parquet",))


def _require_pyarrow(path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"reading {path} needs the package pyarrow: pip install 'meshtrain[data]'")


def _files(path: Path, endings: tuple[str, ...], source: str) -> list[Path]:
    path = path.expanduser().absolute()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"data.source {source}: there is no file or folder {path} (data.path)")
    files = []
    for file in files_below(path):
        name = file.name[1:].lower()  # a file whose whole name is `.txt` has no ending
        if name.endswith(endings) and file.is_file():
            files.append(file)
    if not files:
        raise InputError(
            f"data.source {source}: there are no {any_of(endings)} files in {path} (data.path)"
        )
    return sorted(files)


def _read_text(piece: Piece) -> Iterator[Text]:
    if piece.end == 0:
        return
    if piece.end == len(codecs.BOM_UTF8) and piece.path.read_bytes() == codecs.BOM_UTF8:
        return
    yield Text(_decode(piece.path), piece.path)


def _decode(path: Path) -> Iterator[str]:
    """The text of a file, block by block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    with open(path, "rb") as file:
        while True:
            raw = file.read(_BATCH_CHARACTERS)
            # A character may begin in one block and end in the next.
            before = read - len(decoder.getstate()[0])
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path} is not UTF-8 text: byte {before + error.start:,} is "
                    f"0x{error.object[error.start]:02x} ({error.reason}); convert the file, for "
                    "example with iconv"
                ) from None
            if not raw:
                return
            # A byte order mark is no part of the text; it is whole within the first block.
            yield text if read else text.removeprefix("\ufeff")
            read += len(raw)


def _read_jsonl(piece: Piece, field: str) -> Iterator[Text]:
    path = piece.path
    is_packed = path.suffix.lower() in (".gz", ".zst")
    at = piece.begin
    lines = _lines(path, at)
    if at:  # a line that begins before `at` belongs to the piece before
        at += len(next(lines)) - 1
    begin = at
    number = 0
    # Offsets of decompressed lines are not offsets in the file, which is one piece then.
    while is_packed or at < piece.end:
        line = next(lines)
        if not line:
            return
        at += len(line)
        number += 1
        if line.isspace():
            continue
        source = Line(path, begin, number)
        form = _form_of_file(line[:64]) if number == 1 and begin == 0 else ""
        try:
            text = line.decode("utf-8-sig")
            del line  # may be long, and so may `text`: hold only one of them
            record = parse_json(text, most=_MOST_LINE, unique=True)
        except ValueError as error:
            raise InputError(
                f"{source}: not JSON in UTF-8 ({error}); expected one object a line{form}"
            ) from None
        del text
        if isinstance(record, list) and form:
            raise InputError(f"{source}: expected one object a line{form}")
        if _is_sharegpt(record, field):
            raise InputError(
                f"{source}: this is the form of ShareGPT (`from`, `value`): write `messages`, with "
                "`role` (user for human, assistant for gpt, or system) in place of `from`, and "
                "`content` in place of `value`"
            )
        yield from text_of_record(record, source, field)


def _form_of_file(beginning: bytes) -> str:
    """What a file is if its first line, which begins so, is no object; "" if that is not to be
    seen."""
    text = beginning.removeprefix(codecs.BOM_UTF8).strip()
    if text.startswith(b"["):
        return (
            ": the file is one JSON array; write each of its objects as a line (jq -c '.[]' FILE)"
        )
    if text == b"{":
        return ": the file's objects go over several lines; write each as one line (jq -c . FILE)"
    return ""


def _is_sharegpt(record: Any, field: str) -> bool:
    """Whether it is a conversation of another form than `messages` with `role` and `content`, and
    nothing else."""
    if not isinstance(record, dict):
        return False
    if {field, "prompt", "completion"} & set(record):
        return False
    turns = record.get("messages", record.get("conversations"))
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return False
    return {"from", "value"} <= set(turns[0])


def _lines(path: Path, begin: int) -> Iterator[bytes]:
    """The lines of a file, decompressed, from the byte before `begin` on; yields b"" at the end.

    Raises InputError: damaged content, or a line that has more than `_MOST_LINE` bytes: a small
    compressed file may hold one that is larger than the memory.
    """
    file: Any
    ending = path.suffix.lower()
    if ending == ".zst":
        import pyarrow

        file = io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    elif ending == ".gz":
        file = gzip.open(path, "rb")  # noqa: SIM115 (closed below)
    else:
        file = open(path, "rb")  # noqa: SIM115
    with file:
        if begin:
            file.seek(begin - 1)
        for number in count():
            try:
                line = [file.readline(_MOST_LINE + 1)]
            # pyarrow raises OSError and ValueError
            except (EOFError, OSError, ValueError, zlib.error) as error:
                if isinstance(error, OSError) and error.errno:  # a disk error, not damaged content
                    raise
                damage = f"truncated or damaged after line {number:,} ({error})"
                raise InputError(f"{path} is {damage}; fetch it again") from None
            if len(line[0]) > _MOST_LINE:
                raise InputError(
                    f"{path}: the line after the first {plural(number, 'line')} that were read has "
                    f"more than {_MOST_LINE:,} bytes: write each document as a line of its own"
                )
            yield line.pop()  # may be long: no reference stays here


def _read_parquet(piece: Piece, field: str) -> Iterator[Text]:
    """The rows of the row groups that begin in the piece."""
    import pyarrow
    from pyarrow import parquet

    path = piece.path
    try:
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BATCH_CHARACTERS)
        names = file.schema_arrow.names
        columns = [field] if field in names else ["prompt", "completion"]
        if not set(columns) <= set(names):
            expected = f"the column `{field}`, or `prompt` and `completion`"
            raise InputError(
                f"{path}: expected {expected}; found {', '.join(names)} (data.text_field)"
            )
        rows_before = 0
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            first_row = rows_before
            rows_before += about.num_rows
            if not piece.begin <= _offset_of(about) < piece.end:
                continue
            batches = file.iter_batches(
                ROWS, row_groups=[group], columns=columns, use_threads=False
            )
            records = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, record in enumerate(records, first_row + 1):
                yield from _from_object(record, f"{path}, row {number:,}", field)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise InputError(
            f"{path} is no Parquet file, or damaged ({error}); fetch it again"
        ) from None


def _offset_of(row_group: Any) -> int:
    """Where a row group of a Parquet file begins, in bytes."""
    first = row_group.column(0)
    if first.dictionary_page_offset:
        return min(first.data_page_offset, first.dictionary_page_offset)
    return first.data_page_offset


def text_of_record(record: Any, source: object, field: str) -> Iterator[Text]:
    """The text of an object of JSON or a row of a table: a conversation, or one text or two. Raises
    InputError: it is none of these; `source` is its place."""
    if isinstance(record, dict) and "messages" in record and field not in record:
        yield Text((), source, record=record)
    else:
        yield from _from_object(record, source, field)


def _from_object(record: Any, source: object, field: str) -> Iterator[Text]:
    is_object = isinstance(record, dict)
    keys = set(record) & {field, "prompt", "completion"} if is_object else set()
    if keys not in ({field}, {"prompt", "completion"}):
        found = f"the keys {', '.join(map(repr, record))}" if is_object else f"{record!r:.40}"
        raise InputError(
            f"{source}: expected an object with the key `{field}`, or with `prompt` and "
            f"`completion`; found {found}"
        )
    for key in keys:
        if not isinstance(record[key], str):
            raise InputError(f"{source}: `{key}` is {record[key]!r:.40}, expected a string")
        try:
            for part in _slices(record[key]):
                part.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{source}: holds half of a surrogate pair, which is no character ({error})"
            ) from None

    prompt = record.get("prompt", "")
    text = record[field if field in keys else "completion"]
    if prompt:
        yield Text(_slices(prompt), source, loss=False, ends=False)
    if prompt or text:
        yield Text(_slices(text), source, begins=not prompt)


def _slices(text: str) -> Iterator[str]:
    for start in range(0, len(text), _BATCH_CHARACTERS):
        yield text[start : start + _BATCH_CHARACTERS]


def documents(
    source: TextSource, shard: Iterable[Piece], tokenizer: Tokenizer, loss_on: LossOn = "all"
) -> Iterator[Document]:
    """The documents of a shard as tokens, each ended by the tokenizer's end-of-document token,
    without empty documents. A token that begins each is no target with a loss. `loss_on`: which
    answers of a conversation carry a loss.

    Holds no more of a long document in memory than the tokenizer needs to find a place to cut it.
    Raises InputError: a file is malformed; names the file and the place in it.
    """
    # Short texts are tokenized together; a conversation is one of its own.
    pending: list[Part] = []
    characters = 0
    for piece in shard:
        for text in source.read(piece):
            if text.record is not None:
                yield from _encode(pending, tokenizer)
                pending = []
                characters = 0
                yield _conversation(text.record, text.source, tokenizer, loss_on)
                continue
            for part in _parts(text, tokenizer):
                pending.append(part)
                characters += len(part.content)
                if characters >= _BATCH_CHARACTERS:
                    yield from _encode(pending, tokenizer)
                    pending = []
                    characters = 0
    yield from _encode(pending, tokenizer)


def _conversation(
    record: dict[str, Any], source: object, tokenizer: Tokenizer, loss_on: LossOn
) -> Document:
    if tokenizer.chat is None:
        raise InputError(
            f"{source}: `messages` need a chat template: data.tokenizer has to be a tokenizer.json "
            "with a tokenizer_config.json (`chat_template`) or a chat_template.jinja beside it"
        )
    try:
        talk = tokenizer.chat.conversation(record["messages"], record.get("tools"), loss_on)
        ids, loss = tokenizer.encode_spans(talk.text, talk.learned, talk.plain)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    learned_bytes = sum(len(talk.text[first:last].encode()) for first, last in talk.learned)

    # Templates write some of these tokens themselves: none stands there twice.
    if not _is_ended(ids, tokenizer):
        ids = np.append(ids, ids.dtype.type(tokenizer.end))
        last_loss = loss[-1] if len(loss) else np.uint8(0)
        loss = np.append(loss, last_loss)  # as the last token of the text
    if tokenizer.begin is not None:
        if ids[0] != tokenizer.begin:
            ids = np.insert(ids, 0, tokenizer.begin)
            loss = np.insert(loss, 0, 0)
        loss[0] = 0
    return Document(ids, loss, learned_bytes)


def _is_ended(ids: np.ndarray, tokenizer: Tokenizer) -> bool:
    """Whether nothing but blanks follows an end-of-document token at the end of a text."""
    places = np.flatnonzero(ids == tokenizer.end)
    if len(places) == 0:
        return False
    behind = ids[places[-1] + 1 :].tolist()
    return not tokenizer.decode(behind).strip()


def _parts(text: Text, tokenizer: Tokenizer) -> Iterator[Part]:
    """A text in parts, cut where that does not change its ids."""
    rest = ""
    start = 0
    for chunk in text.chunks:
        rest += chunk
        if len(rest) < _BATCH_CHARACTERS:
            continue
        end = tokenizer.cut(rest)
        if end:
            yield Part(rest[:end], start, text._replace(ends=False))
            rest = rest[end:]
            start += end
        elif len(rest) > _MOST_WHOLE:
            raise InputError(
                f"{text.source} has {len(rest):,} characters and more in which data.tokenizer "
                "finds no place to cut them: give shorter documents, for instance as lines of "
                "JSONL"
            )
    yield Part(rest, start, text)


def _encode(parts: Sequence[Part], tokenizer: Tokenizer) -> Iterator[Document]:
    for part in parts:
        problem = tokenizer.problem(part.content, part.start)
        if problem:
            raise InputError(f"{part.text.source} {problem}")
    encoded = tokenizer.encode_batch([part.content for part in parts])
    for part, ids in zip(parts, encoded, strict=True):
        yield _document(part, ids, tokenizer)


def _document(part: Part, ids: np.ndarray, tokenizer: Tokenizer) -> Document:
    """The tokens of a part of a document, with those that begin and end it."""
    text = part.text
    try:
        refuse_controls(tokenizer, ids)
    except InputError as error:
        raise InputError(f"{text.source} {error}") from None
    if text.ends:
        ids = np.append(ids, ids.dtype.type(tokenizer.end))

    loss = None if text.loss else np.zeros(len(ids), np.uint8)
    if tokenizer.begin is not None and part.begins_document:
        # The token that begins a document is no target.
        if loss is None:
            loss = np.ones(len(ids), np.uint8)
        ids = np.insert(ids, 0, tokenizer.begin)
        loss = np.insert(loss, 0, 0)
    text_bytes = len(part.content.encode()) if text.loss else 0
    return Document(ids, loss, text_bytes, text.ends)
