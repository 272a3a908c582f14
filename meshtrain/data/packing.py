"""Packing documents into samples: sample i is tokens i*s to i*s+s of the concatenated documents of
a split.

The concatenation is never materialized: a split is a list of runs of the token file, a sample one
or more slices of it.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from meshtrain.data.batch import IGNORE, LANGUAGE, Batch, Item, LossTargets, Samples
from meshtrain.data.tokens import Corpus, MappedArray, outside_vocabulary


class Stream:
    """Runs (contiguous ranges) of a token file, read as one sequence of tokens."""

    def __init__(
        self, corpus: Corpus, starts: np.ndarray, lengths: np.ndarray, documents: int
    ) -> None:
        """`starts`, `lengths`: the runs, in tokens of the file; adjacent runs are merged.
        `documents`: how many of them begin in the stream."""
        starts, lengths = _merge(starts, lengths)
        ends = np.cumsum(lengths)
        self.corpus, self.documents = corpus, documents
        self.size = int(ends[-1]) if len(ends) else 0
        # Run r covers positions [begins[r], begins[r + 1]) of the stream; position p is p +
        # shifts[r] in the file.
        self.begins = np.append(ends - lengths, self.size)
        self.shifts = starts - self.begins[:-1]

    @classmethod
    def of(cls, corpus: Corpus, selected: np.ndarray) -> "Stream":
        """The stream of the selected documents, (D,) bool, one after the other."""
        runs = []
        for piece in corpus.pieces():
            sequences = np.repeat(selected[piece.documents], piece.counts)
            runs.append(_merge(piece.starts[sequences], piece.lengths[sequences]))
        starts, lengths = (np.concatenate(parts) for parts in zip(*runs, strict=True))
        return cls(corpus, starts, lengths, int(np.count_nonzero(selected)))

    def __len__(self) -> int:
        return self.size

    def slice(self, start: int, stop: int) -> "Stream":
        """The positions [start, stop) of this stream as a stream."""
        begins, ends = np.clip(self.begins[:-1], start, stop), np.clip(self.begins[1:], start, stop)
        return Stream(
            self.corpus,
            begins + self.shifts,
            ends - begins,
            len(self.document_begins(np.array([start]), np.array([stop]))[0]),
        )

    def document_begins(
        self, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where documents begin in windows [start, stop) of this stream, ascending per window; and
        their windows."""
        first, last = (
            np.searchsorted(self.begins[:-1], starts, "right") - 1,
            np.searchsorted(self.begins[:-1], stops),
        )
        window, run = _in_ranges(np.maximum(first, 0), last)
        low, high = starts[window], stops[window]
        low, high = np.maximum(low, self.begins[run]), np.minimum(high, self.begins[run + 1])
        shifts = self.shifts[run]
        part, number = _in_ranges(
            self.corpus.first_from(low + shifts), self.corpus.first_from(high + shifts)
        )
        return self.corpus.begins(number) - shifts[part], window[part]

    def read(self, source: MappedArray, position: int, out: np.ndarray) -> None:
        """Fills `out` from `position` of this stream on, with values of a file that has one value
        per token."""
        array, filled = source.array, 0
        run = int(np.searchsorted(self.begins, position, "right")) - 1
        while filled < len(out):
            take = min(int(self.begins[run + 1]) - position, len(out) - filled)
            offset = position + int(self.shifts[run])
            out[filled : filled + take] = array[offset : offset + take]
            filled, position, run = filled + take, position + take, run + 1

    def targets(self) -> int:
        """The number of targets that carry a loss; the first token of the stream is not a
        target."""
        loss = self.corpus.loss
        if loss is None:
            return max(self.size - 1, 0)
        runs = zip(self.begins[:-1] + self.shifts, self.begins[1:] + self.shifts, strict=True)
        count = sum(int(np.count_nonzero(loss.array[start:stop])) for start, stop in runs)
        return count - int(loss.array[self.shifts[0]] != 0) if self.size else 0


def _merge(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of runs, with adjacent runs merged and empty ones removed."""
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    firsts = np.flatnonzero(
        np.append(True, starts[1:] != starts[:-1] + lengths[:-1])[: len(starts)]
    )
    return starts[firsts], np.add.reduceat(lengths, firsts) if len(firsts) else lengths


def _in_ranges(firsts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of all ranges [first, stop), concatenated: the index of each number's range, and
    the numbers."""
    counts = np.maximum(stops - firsts, 0)
    ranges = np.repeat(np.arange(len(counts)), counts)
    return ranges, np.arange(len(ranges)) + (firsts - np.cumsum(counts) + counts)[ranges]


class PackedTokens:
    """A microbatch of tokens in the dtype of the file: a few kB to send from a worker instead of 8
    bytes per value."""

    def __init__(
        self, rows: np.ndarray, loss: np.ndarray | None, begins: np.ndarray | None, valid: int
    ) -> None:
        self.rows = rows  # (b, s + 1)
        self.loss = loss  # (b, s) 0 where the target carries no loss, or None
        # (b, s) true where a document begins, or None: documents are not masked
        self.begins = begins
        self.valid = valid  # rows from here on are padding

    @classmethod
    def together(cls, parts: Sequence["PackedTokens"], valid: int) -> "PackedTokens":
        """Concatenates microbatches of equal sequence length, in a dtype that holds the ids of all
        of them."""
        rows = np.concatenate([part.rows for part in parts])
        loss, begins = None, None
        if any(part.loss is not None for part in parts):
            all_ones = (np.ones((len(part.rows), rows.shape[1] - 1), np.uint8) for part in parts)
            loss = np.concatenate(
                [o if p.loss is None else p.loss for p, o in zip(parts, all_ones, strict=True)]
            )
        if parts[0].begins is not None:
            begins = np.concatenate([part.begins for part in parts if part.begins is not None])
        return cls(rows, loss, begins, valid)

    def batch(self) -> Batch:
        shape = (len(self.rows), self.rows.shape[1] - 1)
        tokens = self.rows[:, :-1].astype(np.int64)
        targets = self.rows[:, 1:].astype(np.int64)
        if self.loss is not None:
            targets[self.loss == 0] = IGNORE
        targets[self.valid :] = IGNORE
        positions = np.broadcast_to(np.arange(shape[1]), shape)
        documents = None
        if self.begins is not None:
            documents = torch.from_numpy(np.cumsum(self.begins, axis=1) - 1)
            positions = positions - np.maximum.accumulate(
                np.where(self.begins, positions, 0), axis=1
            )
        inputs = torch.from_numpy(tokens), torch.from_numpy(np.array(positions)), documents
        return Batch(dict(zip(LANGUAGE, inputs, strict=True)), torch.from_numpy(targets))

    def pin_memory(self) -> Batch:
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
        self.name, self.stream, self.seq_len, self.mask_documents = (
            name,
            stream,
            seq_len,
            mask_documents,
        )
        self.n_outputs = n_outputs
        self.limit = stream.corpus.limit(n_outputs)
        values = np.iinfo(stream.corpus.tokens.dtype)
        # whether the dtype can hold an invalid id at all
        self.checked = values.min < 0 or values.max >= self.limit

    def __len__(self) -> int:
        return max(len(self.stream) - 1, 0) // self.seq_len

    def item(self, index: int, epoch: int) -> Item:
        """(tokens, positions, documents or None) and targets, (s,) int64 each. The same in every
        epoch."""
        inputs, targets = self.read([(epoch, index)], 1).batch()
        return tuple(None if tensor is None else tensor[0] for tensor in inputs), targets[0]

    def read(self, items: Sequence[tuple[int, int]], valid: int) -> PackedTokens:
        stream, width = self.stream, self.seq_len
        rows = np.empty((len(items), width + 1), stream.corpus.tokens.dtype)
        loss = None if stream.corpus.loss is None else np.empty((len(items), width), np.uint8)
        begins = np.zeros((len(items), width), bool) if self.mask_documents else None
        for row, (_, index) in enumerate(items):
            if not 0 <= index < len(self):
                raise IndexError(f"sample {index} of {self.name}, which has {len(self)}")
            position = index * width
            stream.read(stream.corpus.tokens, position, rows[row])
            if loss is not None:
                assert stream.corpus.loss is not None
                stream.read(stream.corpus.loss, position + 1, loss[row])
        if begins is not None:
            starts = np.array([index * width for _, index in items], np.int64)
            places, rows_of = stream.document_begins(starts, starts + width)
            begins[rows_of, places - starts[rows_of]] = True
            begins[:, 0] = True
        self._check(rows, items)
        return PackedTokens(rows, loss, begins, valid)

    def loss_targets(self) -> dict[str, LossTargets]:
        return {self.name: self._targets}

    @cached_property
    def _targets(self) -> LossTargets:
        of_samples, loss = len(self) * self.seq_len, self.stream.corpus.loss
        if loss is None:
            return LossTargets(of_samples, of_samples)
        # The stream's last tokens, which fill no sample, are targets of none.
        rest = np.empty(max(len(self.stream) - 1 - of_samples, 0), np.uint8)
        self.stream.read(loss, of_samples + 1, rest)
        return LossTargets(of_samples, self.stream.targets() - int(np.count_nonzero(rest)))

    def document_lengths(self, indices: Sequence[int]) -> np.ndarray | None:
        if not self.mask_documents:
            return None
        starts = np.asarray(indices, np.int64) * self.seq_len
        ends = starts + self.seq_len
        places, samples = self.stream.document_begins(starts + 1, ends)
        numbers = np.arange(len(starts))
        samples, places = (
            np.concatenate([numbers, samples, numbers]),
            np.concatenate([starts, places, ends]),
        )
        order = np.lexsort((places, samples))
        return np.diff(places[order])[np.diff(samples[order]) == 0]

    def _check(self, rows: np.ndarray, items: Sequence[tuple[int, int]]) -> None:
        """Raises InputError at an invalid id, which would otherwise fail in a device-side
        assertion, naming no file."""
        if not self.checked or (int(rows.max()) < self.limit and int(rows.min()) >= 0):
            return
        row, column = np.argwhere((rows >= self.limit) | (rows < 0))[0]
        source = f"{self.stream.corpus.name}: sample {items[row][1]} ({self.name})"
        raise outside_vocabulary(
            source, int(rows[row, column]), self.n_outputs, self.stream.corpus.largest_id
        )
