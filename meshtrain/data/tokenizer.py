"""Text to token ids and back: bytes, or a Hugging Face tokenizer.json."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshtrain.data.chat import CONFIG, JINJA, ChatTemplate, Span, Spelling, tokenizer_config
from meshtrain.data.tokens import smallest_dtype
from meshtrain.errors import InputError, join_some
from meshtrain.job.hub import ask, hub_name, local_path

FILE = "tokenizer.json"
_LOOK = 4096  # characters searched for a cut
_AROUND = 256  # characters compared on each side of a candidate
END_NAMES = (  # ends of documents, where neither data.end_token nor tokenizer_config.json names one
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|endofdocument|>",
    "<|im_end|>",
    "<|eot_id|>",
    "[EOS]",
    "[SEP]",
)
_CUT = "\ue000cut\ue000"  # an added token of one's own, which no text has


class Tokenizer(Protocol):
    """The part of a tokenizer that the rest of the project uses."""

    identity: str  # names the tokenizer and its content: equal identities give equal ids
    vocab_size: int  # ids lie in [0, vocab_size)
    begin: int | None  # the id that begins a document; None: a document begins with its text
    end: int  # the id that ends a document
    stops: frozenset[int]  # ids after which a generated text is over
    # how the tokenizer formats conversations; None: it has no chat template
    chat: ChatTemplate | None
    about: str | None  # which tokens begin and end a document, for people; None: always the same
    # a control token that documents so far have spelled, and that is text in them; None: none has
    spelled: str | None
    # what, besides `identity`, makes other ids than older versions of meshtrain did
    marks: tuple[object, ...]

    def problem(self, text: str, start: int) -> str | None:
        """Why `text`, from character `start` of a document on, cannot be encoded, as the end of a
        sentence; or None."""

    def cut(self, text: str) -> int:
        """The last place to cut `text` so that the ids of the two sides are those of the whole; 0:
        there is none."""

    def encode(self, text: str, *, plain: bool = False) -> list[int]:
        """The ids of a text without a begin and an end. Where it spells a control token, it has
        that token; `plain`: it has the characters, as in documents."""

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """The plain ids of each text, in the dtype of a token file."""

    def encode_spans(
        self, text: str, spans: Sequence[Span], plain: Sequence[Span] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text, (n,), and a mask, (n,): 1 for ids of characters in one of these spans,
        or 0. Control tokens that the text spells are tokens, but not in the spans `plain`."""

    def controls(self, ids: np.ndarray) -> np.ndarray:
        """Which ids are those of control tokens, (n,) bool."""

    def decode(self, ids: Sequence[int]) -> str: ...


def open_tokenizer(
    name: str, begin_token: str | None = None, end_token: str | None = None
) -> Tokenizer:
    """Opens `bytes` or the path of a tokenizer.json. Raises InputError: neither, `tokenizers` is
    not installed, or it has no such token.

    Args:
        begin_token: `auto` (what tokenizer_config.json names as `bos_token`) or the token that
            begins a document.
        end_token: the token that ends a document; None: what tokenizer_config.json names as
            `eos_token`, or the first of `END_NAMES` that there is.
    """
    if name != "bytes":
        return FileTokenizer(_fetched(name), begin_token, end_token)
    for key, value in (("begin_token", begin_token), ("end_token", end_token)):
        if value is not None:
            raise InputError(
                f"data.{key} is {value!r}, and the tokenizer `bytes` has no such tokens: leave it "
                "out"
            )
    return ByteTokenizer()


def local_tokenizer(name: str) -> Path:
    """The tokenizer.json of a path, or of a model of the hub in the cache, where it need not be."""
    path = local_path(name)
    return path if hub_name(name) is None else path / FILE


def _fetched(name: str) -> Path:
    """As `local_tokenizer`; a model of the hub that is not in the cache is fetched. Raises
    InputError: it cannot be."""
    on_hub = hub_name(name)
    path = local_tokenizer(name)
    if on_hub is None or path.is_file():
        return path
    answer = ask(on_hub, (FILE, CONFIG, JINJA))
    if not answer.problem and FILE not in answer.files:
        raise InputError(f"data.tokenizer: {name} has no {FILE}")
    if answer.problem:
        raise InputError(f"data.tokenizer: {answer.problem}")
    return local_tokenizer(f"{on_hub.repo}@{answer.commit}")


def end_name(ids: Mapping[str, int], eos: str | None, end_token: str | None = None) -> str | None:
    """Which of a tokenizer's tokens ends a document. `eos`: what tokenizer_config.json names;
    `end_token`: the key."""
    candidates = (eos, *END_NAMES) if end_token is None else (end_token,)
    for name in candidates:
        if name in ids:
            return name
    return None


def refuse_controls(tokenizer: Tokenizer, ids: np.ndarray) -> None:
    """Raises InputError, the reason as the end of a sentence: control tokens are among the ids of
    plain text."""
    is_control = tokenizer.controls(ids)
    if is_control.any():
        token = tokenizer.decode(ids[is_control][:1].tolist())
        raise InputError(
            f"spells the control token {token}, which this data.tokenizer does not tell from text: "
            "take it out of the text, or use a tokenizer whose `added_tokens` have it as `special`"
        )


class ByteTokenizer:
    """UTF-8 bytes as token ids; byte 0, which does not occur in text, ends a document."""

    identity = "bytes"
    vocab_size = 256
    begin: int | None = None
    end = 0
    stops = frozenset({0})
    chat: ChatTemplate | None = None
    about: str | None = None
    spelled: str | None = None
    marks: tuple[object, ...] = ()

    def problem(self, text: str, start: int) -> str | None:
        index = text.find("\0")
        if index < 0:
            return None
        return (
            f"holds the character U+0000 at {start + index:,}, and the byte 0 ends a document with "
            "the tokenizer `bytes`: is it text at all? Otherwise remove the character, or use a "
            "tokenizer.json"
        )

    def cut(self, text: str) -> int:
        return len(text)

    def encode(self, text: str, *, plain: bool = False) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        return (np.frombuffer(text.encode(), np.uint8) for text in texts)

    def encode_spans(
        self, text: str, spans: Sequence[Span], plain: Sequence[Span] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError  # never called for a tokenizer without a chat template

    def controls(self, ids: np.ndarray) -> np.ndarray:
        return ids == self.end

    def decode(self, ids: Sequence[int]) -> str:
        """Ends of documents become blank lines; ids above 255 and bytes that are not valid UTF-8
        become U+FFFD."""
        text = bytearray()
        for token in ids:
            if token == self.end:
                text += b"\n\n"
            elif token < self.vocab_size:
                text.append(token)
            else:
                text += b"\xff"  # no UTF-8
        return text.decode("utf-8", "replace")


class FileTokenizer:
    """A tokenizer.json, read by Hugging Face's `tokenizers`."""

    def __init__(
        self, path: Path, begin_token: str | None = None, end_token: str | None = None
    ) -> None:
        self._path = path
        content = self._read()
        self._tokenizer = self._open(content)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        self._dtype = smallest_dtype(self.vocab_size)
        self.identity = f"{path.name} sha256:{hashlib.sha256(content).hexdigest()[:16]}"

        # The tokens between documents.
        _, named = tokenizer_config(path)
        begin = self._begin_name(ids, named, begin_token)
        end = self._end_name(ids, named, end_token)
        self.begin: int | None = None if begin is None else ids[begin]
        self.end: int = ids[end]
        eos = ids.get(named.get("eos_token", end), self.end)
        self.stops = frozenset({self.end, eos})
        starts = "" if begin is None else f"begin with {begin} (id {self.begin}) and "
        self.about: str | None = f"documents {starts}end with {end} (id {self.end})"

        # The control tokens, which text may spell, but does not have.
        control = self._special_tokens()
        for name in (begin, end):
            if name is not None:
                control[name] = ids[name]
        self.chat: ChatTemplate | None = ChatTemplate.beside(path, tuple(control))
        self._control_ids = frozenset(control.values())
        self._spelling = Spelling(tuple(control)).pattern
        self.spelled: str | None = None
        self._controls = np.zeros(self.vocab_size, bool)
        self._controls[sorted(self._control_ids - self._unknown_ids(ids, named))] = True

        self.marks = tuple(self._marks(end_is_usual=end == end_name(ids, None)))

    def _marks(self, *, end_is_usual: bool) -> Iterator[object]:
        if self.begin is not None:
            yield "begin", self.begin
        if not end_is_usual:
            yield "end", self.end
        if self._special_tokens() or self.chat is not None:
            yield "control tokens in text are text"

    def _special_tokens(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError as error:
            raise InputError(
                f"the tokenizer {self._path} cannot be read ({error.strerror}): data.tokenizer is "
                "`bytes`, or the path of a Hugging Face tokenizer.json"
            ) from error

    def _open(self, content: bytes) -> Any:
        """The library's tokenizer, which adds nothing to a text."""
        try:
            from tokenizers import Tokenizer as Implementation
            from tokenizers.processors import TemplateProcessing
        except ImportError as error:
            raise InputError(
                f"reading {self._path} needs the package tokenizers: pip install "
                "'meshtrain[tokenizers]'"
            ) from error
        try:
            tokenizer = Implementation.from_str(content.decode("utf-8-sig"))
        except Exception as error:  # the library raises Exception itself
            raise InputError(
                f"{self._path} is not a Hugging Face tokenizer.json ({error})"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # All that the file's own would still do is to leave blanks out of the offsets.
        tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        return tokenizer

    def _unknown_ids(self, ids: Mapping[str, int], named: Mapping[str, str]) -> set[int]:
        """The tokens of what is unknown, which text may have; but not, as GPT-2's is the same, one
        that begins or ends a document."""
        names = (named.get("unk_token", ""), "<unk>", "[UNK]")
        unknown = {ids[name] for name in names if name in ids}
        return unknown - {self.begin, self.end}

    def _begin_name(
        self, ids: Mapping[str, int], named: Mapping[str, str], begin_token: str | None
    ) -> str | None:
        if begin_token is None:
            return None
        if begin_token != "auto":
            return self._known("data.begin_token", begin_token, ids)
        if "bos_token" not in named:
            raise InputError(
                f"data.begin_token is auto, and no {CONFIG} beside {self._path} names a "
                "`bos_token`: name the token that begins a document, or leave the key out"
            )
        return self._known(f"the `bos_token` of {CONFIG}", named["bos_token"], ids)

    def _end_name(
        self, ids: Mapping[str, int], named: Mapping[str, str], end_token: str | None
    ) -> str:
        if end_token is not None:
            return self._known("data.end_token", end_token, ids)
        end = end_name(ids, named.get("eos_token"))
        if end is None:
            raise InputError(
                f"{self._path} has no token to end a document with: no {CONFIG} beside it names an "
                f"`eos_token` that it has, and {', '.join(END_NAMES)} are not among its "
                f"{len(ids):,} tokens; name one of them in data.end_token"
            )
        return end

    def _known(self, key: str, name: str, ids: Mapping[str, int]) -> str:
        if name not in ids:
            added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            tokens = f"which has {len(ids):,} tokens"
            if added:
                tokens = f"whose added tokens are {join_some(added)}"
            raise InputError(f"{key} is {name!r}, which is no token of {self._path}, {tokens}")
        return name

    def problem(self, text: str, start: int) -> str | None:
        return None

    def cut(self, text: str) -> int:
        """Cuts between two words of the pre-tokenizer whose ids do not depend on the text beyond
        the cut.

        Merges never cross a word boundary, and the pre-tokenizer looks at only a few characters
        around one.
        """
        base = max(0, len(text) - _LOOK)
        (tail,) = self._encode([text[base:]], plain=True)
        for i in range(len(tail.ids) - 1, 0, -1):
            if tail.word_ids[i] == tail.word_ids[i - 1]:
                continue
            end = base + tail.offsets[i - 1][1]
            if not _AROUND <= end <= len(text) - _AROUND:
                continue
            before = text[end - _AROUND : end]
            behind = text[end : end + _AROUND]
            whole, left, right = self._encode([before + behind, before, behind], plain=True)
            if whole.ids == left.ids + right.ids:
                return end
        return 0

    def encode(self, text: str, *, plain: bool = False) -> list[int]:
        return self._encode([text], plain=plain)[0].ids

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        if self.spelled is None:
            self.spelled = self._first_spelled(texts)
        encoded = self._encode(texts, plain=True)
        return (np.array(encoding.ids, self._dtype) for encoding in encoded)

    def _first_spelled(self, texts: Sequence[str]) -> str | None:
        for text in texts:
            found = self._spelling.search(text)
            if found is not None:
                return found[0]
        return None

    def encode_spans(
        self, text: str, spans: Sequence[Span], plain: Sequence[Span] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = self._encode_partly_plain(text, plain)
        pairs = np.array(offsets, np.int64).reshape(-1, 2)
        starts = pairs[:, 0]
        ends = pairs[:, 1]
        loss = np.zeros(len(ids), np.uint8)
        for first, last in spans:
            # A token across the beginning is learned for the answer's part of it. An empty one
            # belongs to what follows.
            begins_inside = starts >= first
            reaches_inside = ends > first
            loss[(begins_inside | reaches_inside) & (starts < last)] = 1
        return np.array(ids, self._dtype), loss

    def _encode_partly_plain(
        self, text: str, plain: Sequence[Span]
    ) -> tuple[list[int], list[Span]]:
        """The ids and offsets of a text that spells control tokens in the spans `plain`, where they
        are characters."""
        (encoding,) = self._encode([text], plain=False)
        if not plain:
            return encoding.ids, encoding.offsets
        ids: list[int] = []
        offsets: list[Span] = []
        place = 0
        for token, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            if token not in self._control_ids:
                continue
            if any(first < end and begin < last for begin, end in plain):
                continue
            # What lies between two control tokens is encoded as plain text.
            self._add_plain(text, place, first, ids, offsets)
            ids.append(token)
            offsets.append((first, last))
            place = last
        self._add_plain(text, place, len(text), ids, offsets)
        return ids, offsets

    def _add_plain(
        self, text: str, first: int, last: int, ids: list[int], offsets: list[Span]
    ) -> None:
        """Adds the plain ids of text[first:last], which is the whole text's beginning or follows an
        added token."""
        if first == last:
            return
        lead = _CUT if first else ""
        try:
            encoding = self._cutting.encode(lead + text[first:last], add_special_tokens=False)
        except Exception as error:  # the library raises Exception itself
            raise self._cannot_encode(error) from error
        of_lead = 1 if lead else 0
        plain_ids = encoding.ids[of_lead:]
        refuse_controls(self, np.array(plain_ids, np.int64))
        ids += plain_ids
        shift = first - len(lead)
        offsets += [(begin + shift, end + shift) for begin, end in encoding.offsets[of_lead:]]

    @cached_property
    def _cutting(self) -> Any:
        """A tokenizer of plain text with a token of one's own: what follows it is encoded as behind
        any added token."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Implementation

        tokenizer = Implementation.from_str(self._tokenizer.to_str())
        tokenizer.add_tokens([AddedToken(_CUT, normalized=False, special=False)])
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _encode(self, texts: Sequence[str], *, plain: bool) -> list[Any]:
        try:
            self._tokenizer.encode_special_tokens = plain
            return self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises Exception itself
            raise self._cannot_encode(error) from error

    def _cannot_encode(self, error: Exception) -> InputError:
        return InputError(f"the tokenizer {self._path} cannot encode the text: {error}")

    def controls(self, ids: np.ndarray) -> np.ndarray:
        return self._controls[ids]

    def decode(self, ids: Sequence[int]) -> str:
        # a model's vocabulary may be padded
        ids = [token for token in ids if token < self.vocab_size]
        return self._tokenizer.decode(ids, skip_special_tokens=False)
