"""Which data is held out for validation: a function of the data alone, never of a run's seed."""

from typing import NamedTuple

import numpy as np

from meshtrain.data.batch import Samples, Subset
from meshtrain.data.order import mix
from meshtrain.data.packing import Stream
from meshtrain.data.tokens import PIECE, Corpus
from meshtrain.errors import InputError


class Split(NamedTuple):
    """A corpus split into training and validation."""

    train: Stream
    validation: Stream | None
    held_out: np.ndarray  # (D,) bool: the documents that the validation is taken from
    selection: str  # how the validation was chosen


class SampleSplit(NamedTuple):
    """Samples split into training and validation."""

    train: Samples
    validation: Samples | None
    selection: str  # how the validation was chosen


def held_out_mask(share: float, count: int) -> np.ndarray:
    """Which of `count` documents or samples are held out, (count,) bool: those whose hash falls
    below `share`.

    The hash depends on the position alone (SplitMix64): appending documents moves no other. If
    `share` is above 0 and `count` above 1, at least one is held out and at least one is kept.
    Raises InputError: not 0 <= `share` < 1.
    """
    _check_share(share)
    mask = np.empty(count, bool)
    # The share of 2**64, from the 53 binary digits that a float has: the same on every machine.
    limit = np.uint64(int(share * 2**53) << 11)
    # (hash, position): the first to be held out, and the last.
    lowest = (1 << 64, 0)
    highest = (-1, 0)
    for first in range(0, count, PIECE):
        positions = np.arange(first, min(first + PIECE, count), dtype=np.uint64)
        hashes = mix(positions, 0x6D657368747261)
        mask[first : first + len(hashes)] = hashes < limit
        low = int(hashes.argmin())
        high = int(hashes.argmax())
        lowest = min(lowest, (int(hashes[low]), first + low))
        highest = max(highest, (int(hashes[high]), first + high))
    if share > 0 and count > 1:
        mask[lowest[1]] = True
        mask[highest[1]] = False
    return mask


def _check_share(share: float) -> None:
    if not 0 <= share < 1:
        raise InputError(
            f"data.validation is {share}: expected a path, or a share of the documents or samples "
            "(0 or more, below 1)"
        )


def split_by_hash(corpus: Corpus, share: float) -> Split:
    """Holds out documents by a hash of their number; a single document is split near its end
    instead."""
    held_out = held_out_mask(share, corpus.documents)
    return _split(corpus, share, held_out, "chosen by a hash of the document's number")


def split_at_end(corpus: Corpus, share: float) -> Split:
    """Holds out the last documents, as is usual for token files made elsewhere."""
    _check_share(share)
    last = 0
    if share > 0:  # at least one is held out, and at least one kept
        last = min(max(1, round(share * corpus.documents)), corpus.documents - 1)
    held_out = np.repeat([False, True], [corpus.documents - last, last])
    return _split(corpus, share, held_out, "the last of the file")


def all_documents(corpus: Corpus) -> Stream:
    return Stream.of(corpus, np.ones(corpus.documents, bool))


def _split(corpus: Corpus, share: float, held_out: np.ndarray, selection: str) -> Split:
    if share > 0 and corpus.documents == 1:
        stream = all_documents(corpus)
        end = len(stream) - max(1, round(share * len(stream)))
        train = stream.slice(0, end)
        validation = stream.slice(end, len(stream))
        selection = "the end of the only document, as there is no second one to hold out"
        return Split(train, validation, np.array([True]), selection)
    if not held_out.any():
        return Split(all_documents(corpus), None, held_out, "")
    train = Stream.of(corpus, ~held_out)
    validation = Stream.of(corpus, held_out)
    return Split(train, validation, held_out, selection)


def split_samples(train: Samples, other: Samples, share: float) -> SampleSplit:
    """The samples of `train` that are not held out, and the held-out samples of `other`."""
    mask = held_out_mask(share, len(train))
    selection = "chosen by a hash of the sample's number"
    if not mask.any():
        return SampleSplit(train, None, selection)
    training = Subset(f"{train.name} (training)", train, np.flatnonzero(~mask))
    validation = Subset(f"{other.name} (validation)", other, np.flatnonzero(mask))
    return SampleSplit(training, validation, selection)


def bytes_per_target(corpus: Corpus, selected: np.ndarray) -> float | None:
    """Bytes of text per target in the selected documents, (D,) bool; None where the file does not
    say."""
    targets = Stream.of(corpus, selected).targets()
    if corpus.text_bytes is None or targets == 0:
        return None
    return float(corpus.text_bytes.array.sum(where=selected)) / targets
