"""What is held out for validation: a function of the data alone, never of the seed of a run."""

from typing import NamedTuple

import numpy as np

from meshtrain.data.packing import Corpus, Stream
from meshtrain.errors import InputError


class Split(NamedTuple):
    """A corpus in two, and the words for it."""

    train: Stream
    validation: Stream | None
    held: np.ndarray  # (D,) bool: the documents that the validation is taken from
    how: str


def held_out(part: float, count: int) -> np.ndarray:
    """Which of `count` documents or samples are held out, (count,) bool: those whose hash falls below the share `part`.

    A hash of the position alone (SplitMix64): appending documents moves none of the others. Where there are two or
    more and `part` is above 0, at least one is held out and at least one is left.

    Raises:
        InputError: `part` is not a share.
    """
    _check_share(part)
    value = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x6D657368747261)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    chosen = value < np.uint64(int(part * 2**53) << 11)
    if part > 0 and count > 1:
        chosen[value.argmin()] = True
        chosen[value.argmax()] = False
    return chosen


def _check_share(part: float) -> None:
    if not 0 <= part < 1:
        raise InputError(
            f"data.validation is {part}: expected a path, or a share of the documents or samples (0 or more, below 1)"
        )


def split_by_hash(corpus: Corpus, part: float) -> Split:
    """Holds documents out by a hash of their number; a single document is split at its end instead."""
    _check_share(part)
    if part > 0 and corpus.documents == 1:
        return _split_tokens(corpus, part)
    return _split_documents(corpus, held_out(part, corpus.documents), "chosen by a hash of the document's number")


def split_at_end(corpus: Corpus, part: float) -> Split:
    """Holds the last documents out, as is usual for token files that come from elsewhere."""
    _check_share(part)
    if part > 0 and corpus.documents == 1:
        return _split_tokens(corpus, part)
    last = min(max(1, round(part * corpus.documents)), corpus.documents - 1) if part > 0 else 0
    return _split_documents(corpus, np.arange(corpus.documents) >= corpus.documents - last, "the last of the file")


def whole(corpus: Corpus) -> Stream:
    """All documents of a corpus."""
    return corpus.stream(np.ones(corpus.documents, bool))


def _split_documents(corpus: Corpus, chosen: np.ndarray, how: str) -> Split:
    if not chosen.any():
        return Split(whole(corpus), None, chosen, "")
    return Split(corpus.stream(~chosen), corpus.stream(chosen), chosen, how)


def _split_tokens(corpus: Corpus, part: float) -> Split:
    stream = whole(corpus)
    cut = len(stream) - max(1, round(part * len(stream)))
    how = "the end of the only document, as there is no second one to hold out"
    return Split(stream.part(0, cut), stream.part(cut, len(stream)), np.array([True]), how)


def bytes_per_target(corpus: Corpus, chosen: np.ndarray) -> float | None:
    """Bytes of text per predicted token in the chosen documents, (D,) bool; None where the token file does not say."""
    targets = corpus.stream(chosen).targets()
    if corpus.text_bytes is None or targets == 0:
        return None
    return float(corpus.text_bytes[chosen].sum()) / targets
