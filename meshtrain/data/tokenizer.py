"""Text to token ids and back: bytes, or a Hugging Face tokenizer.json."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshtrain.data.chat import ChatTemplate
from meshtrain.data.tokens import smallest_dtype
from meshtrain.errors import InputError

_LOOK, _AROUND = 4096, 256  # characters searched for a cut, and characters compared on each side of a candidate
_END_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|endofdocument|>", "<|im_end|>", "<|eot_id|>",
    "[EOS]", "[SEP]",
)  # fmt: skip


class Tokenizer(Protocol):
    """The part of a tokenizer that the rest of the project uses."""

    identity: str  # names the tokenizer and its content: equal identities give equal ids
    vocab_size: int  # ids lie in [0, vocab_size)
    end: int  # the id that ends a document
    chat: ChatTemplate | None  # how the tokenizer formats conversations; None: it has no chat template

    def problem(self, text: str, start: int) -> str | None:
        """Why `text`, from character `start` of a document on, cannot be encoded, as the end of a sentence; or None."""

    def cut(self, text: str) -> int:
        """The last place to cut `text` so that the ids of the two sides are those of the whole; 0: there is none."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """The ids of each text, in the dtype of a token file."""

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text, (n,), and a mask, (n,): 1 for ids that begin within one of these character spans, or 0."""

    def decode(self, ids: Sequence[int]) -> str: ...


def open_tokenizer(name: str) -> Tokenizer:
    """Opens `bytes` or the path of a tokenizer.json. Raises InputError: neither, or `tokenizers` is not installed."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name).expanduser())


class ByteTokenizer:
    """UTF-8 bytes as token ids; byte 0, which does not occur in text, ends a document."""

    identity = "bytes"
    vocab_size = 256
    end = 0
    chat: ChatTemplate | None = None

    def problem(self, text: str, start: int) -> str | None:
        index = text.find("\0")
        if index < 0:
            return None
        return (
            f"holds the character U+0000 at {start + index:,}, and the byte 0 ends a document with the tokenizer "
            "`bytes`: is it text at all? Otherwise remove the character, or use a tokenizer.json"
        )

    def cut(self, text: str) -> int:
        return len(text)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        return (np.frombuffer(text.encode(), np.uint8) for text in texts)

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError  # never called for a tokenizer without a chat template

    def decode(self, ids: Sequence[int]) -> str:
        """Ends of documents become blank lines; ids above 255 and bytes that are not valid UTF-8 become U+FFFD."""
        parts = (b"\n\n" if token == self.end else bytes([token]) if token < 256 else b"\xff" for token in ids)
        return b"".join(parts).decode("utf-8", "replace")


class FileTokenizer:
    """A tokenizer.json, read by Hugging Face's `tokenizers`."""

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(
                f"the tokenizer {path} cannot be read ({error.strerror}): data.tokenizer is `bytes`, or the path of a "
                "Hugging Face tokenizer.json"
            ) from error
        try:
            from tokenizers import Tokenizer as Implementation
        except ImportError as error:
            raise InputError(
                f"reading {path} needs the package tokenizers: pip install 'meshtrain[tokenizers]'"
            ) from error
        try:
            self._tokenizer: Any = Implementation.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises Exception itself
            raise InputError(f"{path} is not a Hugging Face tokenizer.json ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        end = next((ids[name] for name in _END_NAMES if name in ids), None)
        if end is None:
            raise InputError(
                f"{path} has no token to end a document with: looked for {', '.join(_END_NAMES)} among its "
                f"{len(ids):,} tokens; add one to the tokenizer"
            )
        self.end: int = end
        self.chat: ChatTemplate | None = ChatTemplate.beside(path)
        self._path, self._dtype = path, smallest_dtype(self.vocab_size)
        self.identity = f"{path.name} sha256:{hashlib.sha256(content).hexdigest()[:16]}"

    def problem(self, text: str, start: int) -> str | None:
        return None

    def cut(self, text: str) -> int:
        """Cuts between two words of the pre-tokenizer whose ids do not depend on the text beyond the cut.

        Merges never cross a word boundary, and the pre-tokenizer looks at only a few characters around one.
        """
        base = max(0, len(text) - _LOOK)
        (tail,) = self._encode([text[base:]])
        for i in range(len(tail.ids) - 1, 0, -1):
            end = base + tail.offsets[i - 1][1]
            if tail.word_ids[i] == tail.word_ids[i - 1] or not _AROUND <= end <= len(text) - _AROUND:
                continue
            sides = text[end - _AROUND : end], text[end : end + _AROUND]
            whole, left, right = (encoding.ids for encoding in self._encode(["".join(sides), *sides]))
            if whole == left + right:
                return end
        return 0

    def encode(self, text: str) -> list[int]:
        return self._encode([text])[0].ids

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        return (np.array(encoding.ids, self._dtype) for encoding in self._encode(texts))

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        (encoding,) = self._encode([text])
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        inside = [(starts >= first) & (starts < last) for first, last in spans]
        return np.array(encoding.ids, self._dtype), np.any(inside, 0).astype(np.uint8)

    def _encode(self, texts: Sequence[str]) -> list[Any]:
        try:
            return self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises Exception itself
            raise InputError(f"the tokenizer {self._path} cannot encode the text: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        ids = [token for token in ids if token < self.vocab_size]  # a model's vocabulary may be padded
        return self._tokenizer.decode(ids, skip_special_tokens=False)
