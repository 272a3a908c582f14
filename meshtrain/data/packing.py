"""Documents packed into samples: sample i is tokens i*s to i*s+s of the concatenated documents of a split.

The concatenation is never made. A split is a list of runs of the token file, and a sample is one slice of it, or a few
where it reaches over the end of a run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshtrain.data.batch import IGNORE, Batch, Item, Samples
from meshtrain.data.files import Files
from meshtrain.data.tokens import MappedArray, TokenFolder
from meshtrain.errors import InputError

_FIRST_LOOK_BYTES = 4 << 20  # of a file that does not say its largest id


@dataclass(frozen=True)
class Corpus:
    """A token file and where its documents lie: D documents of S sequences, each of which is contiguous in the file."""

    name: str
    tokens: MappedArray
    loss: MappedArray | None  # 0 where a token, as a target, carries no loss
    starts: np.ndarray  # (S,) where each sequence begins in the file, in tokens
    lengths: np.ndarray  # (S,) in tokens
    bounds: np.ndarray  # (D + 1,) document d is sequences bounds[d] to bounds[d + 1]
    text_bytes: np.ndarray | None  # (D,) bytes of text that the tokens with a loss stand for
    largest_id: int | None  # None: the file does not say
    fingerprint: str
    files: tuple[Files, ...] = ()  # one each

    @property
    def documents(self) -> int:
        return len(self.bounds) - 1

    @classmethod
    def of_folder(cls, folder: TokenFolder) -> "Corpus":
        offsets = folder.documents
        return cls(
            name=str(folder.path),
            tokens=folder.tokens,
            loss=folder.loss,
            starts=offsets[:-1],
            lengths=np.diff(offsets),
            bounds=np.arange(len(offsets)),
            text_bytes=folder.text_bytes,
            largest_id=folder.header.largest_id,
            fingerprint=folder.header.fingerprint,
            files=folder.files,
        )

    def check_ids(self, n_outputs: int | None) -> None:
        """Raises InputError if the file has an id outside the vocabulary, as far as its header or beginning shows."""
        if n_outputs is not None and self.largest_id is not None and self.largest_id >= n_outputs:
            raise _outside(self.name, self.largest_id, n_outputs, None)
        first = self.tokens.array[: _FIRST_LOOK_BYTES // self.tokens.dtype.itemsize]
        for found in (int(first.max()), int(first.min())):
            if found < 0 or found >= self.limit(n_outputs):
                raise _outside(self.name, found, n_outputs, self.largest_id)

    def limit(self, n_outputs: int | None) -> float:
        """Ids of whole files lie below it: the vocabulary's size, or less where the header knows better."""
        known = math.inf if self.largest_id is None else self.largest_id + 1
        return known if n_outputs is None else min(known, n_outputs)

    def stream(self, chosen: np.ndarray) -> "Stream":
        """The chosen documents, (D,) bool, one after the other."""
        sequences = np.repeat(chosen, np.diff(self.bounds))
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        sizes = np.diff(ends[self.bounds])[chosen]
        return Stream(self, self.starts[sequences], self.lengths[sequences], np.cumsum(sizes) - sizes)


def _outside(where: str, found: int, n_outputs: int | None, largest_id: int | None) -> InputError:
    if largest_id is not None and found > largest_id:
        return InputError(
            f"{where} holds the token id {found}, and its header says that {largest_id} is the largest: the file is "
            "damaged; copy or prepare it anew"
        )
    if found < 0:
        return InputError(f"{where} holds the token id {found}: expected ids from 0 on; is the file what it should be?")
    return InputError(
        f"{where} holds the token id {found}, but model.vocab_size is {n_outputs}: set it to at least {found + 1}, or "
        "use the tokenizer that the model was made for"
    )


class Stream:
    """Runs of a token file read as one sequence of tokens."""

    def __init__(self, corpus: Corpus, starts: np.ndarray, lengths: np.ndarray, documents: np.ndarray) -> None:
        """
        Args:
            starts, lengths: the runs, in tokens of the file; neighbours that touch are merged.
            documents: where documents begin, ascending, counted in this stream.
        """
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        opens = np.ones(len(starts), bool)  # where a run begins that does not go on from the one before
        opens[1:] = starts[1:] != starts[:-1] + lengths[:-1]
        self.corpus = corpus
        self.documents = documents
        ends = np.cumsum(lengths)
        self.size = int(ends[-1]) if len(ends) else 0
        # Run r covers the positions [begins[r], begins[r + 1]) of the stream; position p of it is p + shifts[r] in the
        # file.
        self.begins = np.append((ends - lengths)[opens], self.size)
        self.shifts = starts[opens] - self.begins[:-1]

    def __len__(self) -> int:
        return self.size

    def part(self, start: int, stop: int) -> "Stream":
        """The positions [start, stop) of this stream as a stream."""
        begins, ends = np.clip(self.begins[:-1], start, stop), np.clip(self.begins[1:], start, stop)
        inside = (self.documents >= start) & (self.documents < stop)
        return Stream(self.corpus, begins + self.shifts, ends - begins, self.documents[inside] - start)

    def read(self, source: MappedArray, position: int, out: np.ndarray) -> None:
        """Fills `out` with what stands at `position` and after it in a file that is parallel to the tokens."""
        array, filled = source.array, 0
        run = int(np.searchsorted(self.begins, position, "right")) - 1
        while filled < len(out):
            take = min(int(self.begins[run + 1]) - position, len(out) - filled)
            place = position + int(self.shifts[run])
            out[filled : filled + take] = array[place : place + take]
            filled, position, run = filled + take, position + take, run + 1

    def targets(self) -> int:
        """How many tokens carry a loss as targets; the first of the stream is no target."""
        loss = self.corpus.loss
        if loss is None:
            return max(self.size - 1, 0)
        runs = zip(self.begins[:-1] + self.shifts, self.begins[1:] + self.shifts, strict=True)
        carried = sum(int(np.count_nonzero(loss.array[start:stop])) for start, stop in runs)
        return carried - int(loss.array[self.shifts[0]] != 0) if self.size else 0


class PackedTokens:
    """A microbatch of tokens in the type of the file: a few kB to send from a worker instead of 8 bytes a value."""

    def __init__(self, rows: np.ndarray, loss: np.ndarray | None, begins: np.ndarray | None, valid: int) -> None:
        self.rows = rows  # (b, s + 1)
        self.loss = loss  # (b, s) 0 where the target carries no loss, or None
        self.begins = begins  # (b, s) true where a document begins, or None: no masks
        self.valid = valid  # rows from here on are padding

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
            positions = positions - np.maximum.accumulate(np.where(self.begins, positions, 0), axis=1)
        inputs = (torch.from_numpy(tokens), torch.from_numpy(np.array(positions)), documents)
        return Batch(inputs, torch.from_numpy(targets))

    def pin_memory(self) -> Batch:
        """The batch in pinned memory; torch's DataLoader calls this in its pinning thread."""
        inputs, targets = self.batch()
        pinned = tuple(None if tensor is None else tensor.pin_memory() for tensor in inputs)
        return Batch(pinned, targets.pin_memory())


class TokenSamples(Samples):
    """The samples of a stream: (tokens - 1) // s of s tokens each, with the targets shifted by one."""

    def __init__(self, name: str, stream: Stream, *, seq_len: int, mask_documents: bool, n_outputs: int | None) -> None:
        self.name, self.stream, self.seq_len, self.mask_documents = name, stream, seq_len, mask_documents
        self.n_outputs = n_outputs
        self.limit = stream.corpus.limit(n_outputs)
        held = np.iinfo(stream.corpus.tokens.dtype)
        self.checked = held.min < 0 or held.max >= self.limit  # whether the type of the file holds wrong ids at all

    def __len__(self) -> int:
        return max(len(self.stream) - 1, 0) // self.seq_len

    def item(self, index: int, epoch: int) -> Item:
        """Tokens, positions and documents (or None), and targets: (s,) int64 each. The same in every epoch."""
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
                first, last = np.searchsorted(stream.documents, (position, position + width))
                begins[row, stream.documents[first:last] - position] = True
                begins[row, 0] = True
        self._check(rows, items)
        return PackedTokens(rows, loss, begins, valid)

    def _check(self, rows: np.ndarray, items: Sequence[tuple[int, int]]) -> None:
        """A wrong id would end in an assertion on the device, which names no file."""
        if not self.checked or (int(rows.max()) < self.limit and int(rows.min()) >= 0):
            return
        row, column = np.argwhere((rows >= self.limit) | (rows < 0))[0]
        where = f"{self.stream.corpus.name}: sample {items[row][1]} ({self.name})"
        raise _outside(where, int(rows[row, column]), self.n_outputs, self.stream.corpus.largest_id)
