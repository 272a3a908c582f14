"""Packing documents into samples: sample i is tokens i*s to i*s+s of the concatenated documents of
a split.

The concatenation is never materialized: a split is a list of runs of the token file, a sample one
or more slices of it. Runs are few where a split takes neighbouring documents, and as many as there
are documents where it picks single ones: so numpy looks up the runs of many samples at once.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from meshtrain.data.batch import IGNORE, LANGUAGE, Batch, Item, LossTargets, Samples
from meshtrain.data.tokens import Corpus, MappedArray, outside_vocabulary

if TYPE_CHECKING:
    from meshtrain.data.remote import RemoteArray


class Stream:
    """Runs (contiguous ranges) of a token file, read as one sequence of tokens."""

    def __init__(
        self, corpus: Corpus, starts: np.ndarray, lengths: np.ndarray, documents: int
    ) -> None:
        """`starts`, `lengths`: the runs, in tokens of the file; adjacent runs are merged.
        `documents`: how many documents begin in the stream."""
        starts, lengths = _merge(starts, lengths)
        self.corpus = corpus
        self.documents = documents
        self.size = int(lengths.sum())
        # Run r covers the positions [begins[r], begins[r + 1]) of the stream. There position p of
        # the stream is p + shifts[r] in the file.
        earlier = np.cumsum(lengths) - lengths
        self.begins = np.append(earlier, self.size)
        self.shifts = starts - earlier

    @classmethod
    def of(cls, corpus: Corpus, selected: np.ndarray) -> "Stream":
        """The stream of the selected documents, (D,) bool, one after the other."""
        starts = []
        lengths = []
        for piece in corpus.pieces():
            # A document may consist of several sequences.
            is_selected = np.repeat(selected[piece.documents], piece.counts)
            # Merged piece by piece: there may be many millions of documents.
            merged = _merge(piece.starts[is_selected], piece.lengths[is_selected])
            starts.append(merged[0])
            lengths.append(merged[1])
        documents = int(np.count_nonzero(selected))
        return cls(corpus, np.concatenate(starts), np.concatenate(lengths), documents)

    def __len__(self) -> int:
        return self.size

    def slice(self, start: int, stop: int) -> "Stream":
        """The positions [start, stop) of this stream as a stream."""
        # What is left of each run; of those outside, nothing.
        begins = np.clip(self.begins[:-1], start, stop)
        ends = np.clip(self.begins[1:], start, stop)
        documents, _ = self.document_begins(np.array([start]), np.array([stop]))
        return Stream(
            self.corpus,
            starts=begins + self.shifts,
            lengths=ends - begins,
            documents=len(documents),
        )

    def document_begins(
        self, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where documents begin in windows [start, stop) of this stream, ascending per window; and
        their windows."""
        # The runs that each window overlaps. The overlap of a window and a run is contiguous in the
        # file, too: [low, high) in the stream, and [low + shift, high + shift) in the file.
        run_begins = self.begins[:-1]
        first_run = np.searchsorted(run_begins, starts, "right") - 1
        end_run = np.searchsorted(run_begins, stops)
        window, run = _in_ranges(np.maximum(first_run, 0), end_run)
        low = np.maximum(starts[window], self.begins[run])
        high = np.minimum(stops[window], self.begins[run + 1])
        shift = self.shifts[run]

        # The documents that begin in each overlap, by their numbers in the file.
        first_number = self.corpus.first_from(low + shift)
        end_number = self.corpus.first_from(high + shift)
        overlap, number = _in_ranges(first_number, end_number)
        begins = self.corpus.begins(number) - shift[overlap]
        return begins, window[overlap]

    def read(self, source: "MappedArray | RemoteArray", position: int, out: np.ndarray) -> None:
        """Fills `out` from `position` of this stream on, with values of a file that has one value
        per token."""
        array = source.array
        filled = 0
        for begin, end in self.spans(position, len(out)):
            out[filled : filled + end - begin] = array[begin:end]
            filled += end - begin

    def spans(self, position: int, count: int) -> Iterator[tuple[int, int]]:
        """Where `count` positions of this stream lie in the file, as parts [begin, end)."""
        run = int(np.searchsorted(self.begins, position, "right")) - 1
        while count > 0:
            left_in_run = int(self.begins[run + 1]) - position
            take = min(left_in_run, count)
            begin = position + int(self.shifts[run])
            yield begin, begin + take
            count -= take
            position += take
            run += 1

    def targets(self) -> int:
        """The number of targets that carry a loss; the first token of the stream is not a
        target."""
        loss = self.corpus.loss
        if self.size == 0:
            return 0
        if loss is None:
            return self.size - 1
        starts = self.begins[:-1] + self.shifts
        stops = self.begins[1:] + self.shifts
        count = 0
        for start, stop in zip(starts, stops, strict=True):
            count += int(np.count_nonzero(loss.array[start:stop]))
        first_has_loss = loss.array[starts[0]] != 0
        return count - int(first_has_loss)


def _merge(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of runs, with adjacent runs merged and empty ones removed."""
    filled = lengths > 0
    starts = starts[filled]
    lengths = lengths[filled]
    if len(starts) == 0:
        return starts, lengths
    # A run that does not begin where the one before it ends begins a merged one.
    separate = np.append(True, starts[1:] != starts[:-1] + lengths[:-1])
    firsts = np.flatnonzero(separate)
    return starts[firsts], np.add.reduceat(lengths, firsts)


def _in_ranges(firsts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of all ranges [first, stop), concatenated: the index of each number's range, and
    the numbers."""
    #   [3, 5) and [7, 10)
    #   ranges          0 0 1 1 1
    #   place of all    0 1 2 3 4
    #   earlier         0   2            numbers of the ranges before
    #   numbers         3 4 7 8 9        first of the range + place - earlier
    counts = np.maximum(stops - firsts, 0)
    ranges = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(ranges))
    earlier = np.cumsum(counts) - counts
    return ranges, places + (firsts - earlier)[ranges]


class PackedTokens:
    """A microbatch of tokens in the dtype of the file: a few kB to send from a worker instead of 8
    bytes per value."""

    def __init__(
        self,
        rows: np.ndarray,
        loss: np.ndarray | None,
        begins: np.ndarray | None,
        samples: tuple[int, ...],
    ) -> None:
        self.rows = rows  # (b, s + 1)
        self.loss = loss  # (b, s) 0 where the target carries no loss, or None
        # (b, s) true where a document begins, or None: documents are not masked
        self.begins = begins
        self.samples = samples  # the data set's indices of the first rows; the others are padding

    @classmethod
    def together(cls, parts: Sequence["PackedTokens"], samples: tuple[int, ...]) -> "PackedTokens":
        """Concatenates microbatches of equal sequence length, in a dtype that holds the ids of all
        of them. `samples`: as in the constructor."""
        rows = np.concatenate([part.rows for part in parts])
        loss = None
        if any(part.loss is not None for part in parts):
            loss = np.concatenate([part.loss_or_ones() for part in parts])
        # Either all sources mask documents, or none does.
        begins = None
        if parts[0].begins is not None:
            begins = np.concatenate([part.begins for part in parts if part.begins is not None])
        return cls(rows, loss, begins, samples)

    def loss_or_ones(self) -> np.ndarray:
        """(b, s) 0 where the target carries no loss."""
        if self.loss is not None:
            return self.loss
        return np.ones((len(self.rows), self.rows.shape[1] - 1), np.uint8)

    def batch(self) -> Batch:
        tokens = self.rows[:, :-1].astype(np.int64)
        targets = self.rows[:, 1:].astype(np.int64)
        if self.loss is not None:
            targets[self.loss == 0] = IGNORE
        targets[len(self.samples) :] = IGNORE

        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        documents = None
        if self.begins is not None:
            # The number of a token's document within its sample, and its place in that document:
            #   begins     1 0 0 1 0
            #   documents  0 0 0 1 1
            #   positions  0 1 2 0 1
            documents = torch.from_numpy(np.cumsum(self.begins, axis=1) - 1)
            begin_places = np.where(self.begins, positions, 0)
            positions = positions - np.maximum.accumulate(begin_places, axis=1)

        # A copy: what numpy has broadcast cannot be written to.
        inputs = (torch.from_numpy(tokens), torch.from_numpy(np.array(positions)), documents)
        tensors = dict(zip(LANGUAGE, inputs, strict=True))
        return Batch(tensors, torch.from_numpy(targets), self.samples)

    def pin_memory(self) -> Batch:
        """Called by the DataLoader in the training process: only here does a batch become int64
        tensors, which a worker would have to send."""
        return self.batch().pin_memory()


class TokenSamples(Samples):
    """The samples of a stream: (tokens - 1) // s samples of s tokens each, with targets shifted by
    one."""

    def __init__(
        self,
        name: str,
        stream: Stream,
        *,
        seq_len: int,
        mask_documents: bool,
        n_outputs: int | None,
    ) -> None:
        self.name = name
        self.stream = stream
        self.seq_len = seq_len
        self.mask_documents = mask_documents
        self.n_outputs = n_outputs
        self.limit = stream.corpus.limit(n_outputs)
        # Only a dtype that can hold an invalid id is looked at in each microbatch.
        values = np.iinfo(stream.corpus.tokens.dtype)
        self.checked = values.min < 0 or values.max >= self.limit

    def __len__(self) -> int:
        return max(len(self.stream) - 1, 0) // self.seq_len

    def item(self, index: int, epoch: int) -> Item:
        """(tokens, positions, documents or None) and targets, (s,) int64 each. The same in every
        epoch."""
        inputs, targets = self.read([(epoch, index)], valid=1).batch()
        first_rows = tuple(None if tensor is None else tensor[0] for tensor in inputs)
        return first_rows, targets[0]

    def read(self, items: Sequence[tuple[int, int]], valid: int) -> PackedTokens:
        indices = [index for _, index in items]
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"sample {index} of {self.name}, which has {len(self)}")
        starts = np.array(indices, np.int64) * self.seq_len

        # One token more than the sequence has: the last target.
        rows = self._read_rows(self.stream.corpus.tokens, starts, self.seq_len + 1)
        self._check(rows, items)

        loss = None
        if self.stream.corpus.loss is not None:  # of the targets, one token later
            loss = self._read_rows(self.stream.corpus.loss, starts + 1, self.seq_len)

        begins = None
        if self.mask_documents:
            begins = np.zeros((len(items), self.seq_len), bool)
            places, row = self.stream.document_begins(starts, starts + self.seq_len)
            begins[row, places - starts[row]] = True
            begins[:, 0] = True  # a document that the beginning of the sample cuts
        return PackedTokens(rows, loss, begins, samples=tuple(indices[:valid]))

    def _read_rows(
        self, source: "MappedArray | RemoteArray", starts: np.ndarray, width: int
    ) -> np.ndarray:
        """(rows, width) values of the stream, a row from each of the positions `starts` on."""
        # Those of all rows at once, where the values lie elsewhere.
        spans = (self.stream.spans(int(start), width) for start in starts)
        source.bring(chain.from_iterable(spans))
        rows = np.empty((len(starts), width), source.dtype)
        for row, start in zip(rows, starts, strict=True):
            self.stream.read(source, int(start), row)
        return rows

    def loss_targets(self) -> dict[str, LossTargets]:
        return {self.name: self._targets}

    @cached_property
    def _targets(self) -> LossTargets:
        loss = self.stream.corpus.loss
        of_samples = len(self) * self.seq_len
        if loss is None:
            return LossTargets(of_samples, of_samples)
        # The stream's last tokens, which fill no sample, are targets of none.
        rest = np.empty(max(len(self.stream) - 1 - of_samples, 0), np.uint8)
        self.stream.read(loss, of_samples + 1, rest)
        with_loss = self.stream.targets() - int(np.count_nonzero(rest))
        return LossTargets(of_samples, with_loss)

    def document_lengths(self, indices: Sequence[int]) -> np.ndarray | None:
        if not self.mask_documents:
            return None
        starts = np.asarray(indices, np.int64) * self.seq_len
        ends = starts + self.seq_len
        begins, of_sample = self.stream.document_begins(starts + 1, ends)
        # Cuts of each sample: its ends, and between them where its documents begin. The distance
        # between two neighbouring cuts of one sample is a length.
        numbers = np.arange(len(starts))
        cuts = np.concatenate([starts, begins, ends])
        samples = np.concatenate([numbers, of_sample, numbers])
        order = np.lexsort((cuts, samples))  # by sample, and then by place
        distances = np.diff(cuts[order])
        within_sample = np.diff(samples[order]) == 0
        return distances[within_sample]

    def _check(self, rows: np.ndarray, items: Sequence[tuple[int, int]]) -> None:
        """Raises InputError at an invalid id, which would otherwise fail in a device-side
        assertion, naming no file."""
        if not self.checked:
            return
        # Two reductions, which make no array, tell whether to look for the place.
        all_valid = int(rows.max()) < self.limit and int(rows.min()) >= 0
        if all_valid:
            return
        wrong = (rows >= self.limit) | (rows < 0)
        row, column = np.argwhere(wrong)[0]
        _, index = items[row]
        corpus = self.stream.corpus
        place = f"{corpus.name}: sample {index} ({self.name})"
        raise outside_vocabulary(place, int(rows[row, column]), self.n_outputs, corpus.largest_id)
