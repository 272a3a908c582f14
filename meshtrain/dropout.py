"""Dropout with the same masks on every layout.

Whether an element is dropped is a function of (seed, the module's full name, step, position of its
sample in the global batch, position in the sample), computed on the rank that holds the element.
There is no generator and no state: any layout, microbatch size, recomputed block and compiled block
drops the same elements, on a CPU and on a GPU. For a probability of attention the position in the
sample is (head, position of the query, position of the key).
"""

import hashlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SequencePart(NamedTuple):
    """Which positions of a sequence a rank holds: two chunks over `cp` (`data/sequence.py`), and a
    contiguous part of these over `tp` with sequence parallelism. Size 1 and index 0 where an axis
    does not split the sequence."""

    tp: int = 1
    tp_index: int = 0
    cp: int = 1
    cp_index: int = 0

    def positions(self, rows: int, device: torch.device) -> Tensor:
        """(rows,): the positions of this rank's rows in the sequence. In torch operations, because
        it is compiled."""
        own = torch.arange(rows, device=device) + self.tp_index * rows
        # Of the 2 cp chunks, rank i of cp has number i and then number 2 cp - 1 - i.
        chunk = rows * self.tp // 2
        chunks_before = torch.where(own < chunk, self.cp_index, 2 * self.cp - 2 - self.cp_index)
        return own + chunk * chunks_before


class Dropout(nn.Module):
    """Sets elements to 0 with probability p and multiplies the others by 1 / (1 - p), in training
    only.

    In a plain model it acts as `nn.Dropout`. After `bind_dropout` (which `parallelize` calls) its
    masks are those of the run, and `set_dropout` selects them before each forward.

    For the residual stream, of which every rank has whole samples or a part of each sequence
    (`SequencePart`). Not for features between a colwise and a rowwise layer, where every rank of
    `tp` would apply the same mask to its own features, unless `columns` says which they are. A
    module used in two places drops the same elements in both.

    Of the probabilities inside attention it is not called, but given to
    `meshtrain.attention.attention` as `dropout`.
    """

    def __init__(self, p: float, heads: int | None = None) -> None:
        """`heads`: for attention, the number of query heads of the whole layer, on all ranks of
        `tp` together. Raises ValueError: p is not in [0, 1)."""
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout with probability {p}: expected 0 <= p < 1")
        self.p = p
        self.heads = heads
        self.bound = False
        self.part = SequencePart()
        self.tp_index = 0  # of this rank, by which its heads are counted
        # number of all features, and this rank's; None: has all
        self.columns: tuple[int, slice] | None = None
        # (b), one hash per sample of the microbatch. A tensor but not a buffer: the compiler takes
        # it as an input, so that neither a new step nor another layer recompiles, and checkpoints
        # and FSDP do not handle it.
        self.keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: (b, s, ...), or any (b, ...) where a rank has whole sequences. A second dim of 1
        stands for the whole sequence, as where whole samples are dropped, (b, 1, 1), and not for a
        part of it.

        Raises RuntimeError: `set_dropout` was not called for these samples, or parts of sequences
        are not (b, s, d).
        """
        if self.p == 0 or not self.training:
            return x
        if not self.bound:
            return F.dropout(x, self.p)
        keys = self.keys_of(len(x))
        if x.dim() < 3 and self.part != SequencePart():
            raise RuntimeError(
                f"dropout of {tuple(x.shape)} on a part of each sequence: expected (b, s, d)"
            )
        shape = x.shape
        rows = x.shape[1] if x.dim() > 2 else 1
        # One row stands for the whole sequence.
        part = self.part if rows > 1 else SequencePart()
        if self.columns is not None:
            # Between parallel layers all ranks of tp have the same positions, and other features.
            width, own = self.columns
            part = part._replace(tp=1, tp_index=0)
            shape = torch.Size((*x.shape[:-1], width))
        mask = keep_mask(keys.to(x.device), shape, part.positions(rows, x.device), self.p)
        if self.columns is not None:
            mask = mask[..., own]
        return torch.where(mask, x * (1 / (1 - self.p)), 0)

    def keys_of(self, samples: int) -> Tensor:
        """(b,) int64: the hashes of a batch of this many samples. Raises RuntimeError: they were
        not set for as many."""
        if self.keys is None or self.keys.shape[0] != samples:
            count = 0 if self.keys is None else self.keys.shape[0]
            raise RuntimeError(
                f"dropout of a batch of {samples} samples, but set_dropout told of {count}: "
                "call set_dropout(model, seed=..., step=..., samples=...) before each forward in "
                "training"
            )
        return self.keys

    def first_head(self, own: int) -> int:
        """The index, in the whole layer, of the first of this rank's `own` query heads. Raises
        ValueError: the module does not know how many heads there are, or these are no share of
        them."""
        if self.heads is None or self.heads % own:
            raise ValueError(
                f"dropout inside attention, of {own} query heads here: expected "
                "meshtrain.dropout.Dropout(p, heads=the number of query heads of the whole layer), "
                f"and got heads={self.heads}"
            )
        return 0 if own == self.heads else self.tp_index * own

    def keep_pairs(self, b: int, h: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Which probabilities (b, h, s, t) of this rank's h query heads to keep: see
        `keep_pairs`."""
        first = self.first_head(h)
        if not self.bound:
            shape = b, h, queries.shape[-1], keys.shape[-1]
            return torch.rand(shape, device=queries.device) >= self.p
        seeds = head_keys(self.keys_of(b).to(queries.device), first, h)
        return keep_pairs(seeds, queries, keys, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def bind_dropout(model: nn.Module, part: SequencePart | None = None, tp_index: int = 0) -> None:
    """Makes every `Dropout` of a model use the masks that `set_dropout` selects.

    Args:
        model: the whole model, whose module names determine the masks; on any device, meta
            included.
        part: the part of each sequence that this rank has; None: all of it.
        tp_index: this rank's index on `tp`, over which heads of attention are split.
    """
    dropouts: dict[str, Dropout] = {}
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.bound = True
            module.part = part or SequencePart()
            module.tp_index = tp_index
            dropouts[name] = module
    # a plain attribute, not a submodule
    model.dropout_masks = _DropoutKeys(dropouts)  # type: ignore[assignment]


def set_dropout(model: nn.Module, *, seed: int, step: int, samples: range) -> None:
    """Selects the dropout masks of the next forward. Call it before each forward in a training loop
    of your own.

    Where backward recomputes blocks (`recompute`), the selection must last until that backward is
    done: a loop that runs several forwards before their backwards calls this again before each
    backward. Nothing waits for the device.

    Args:
        model: the whole model, parallelized or plain.
        step: any number that no other step of the run has.
        samples: the positions of the rows of the forward in the global batch; padding continues
            after the last one.
    """
    masks = getattr(model, "dropout_masks", None)
    if masks is None:
        bind_dropout(model)
        masks = model.dropout_masks
    assert isinstance(masks, _DropoutKeys)
    if masks.needed():
        first = next(model.parameters(), None)
        device = torch.device("cpu")
        if first is not None:
            device = first.device
        masks.set(seed, step, samples, device)


class _DropoutKeys:
    """The keys of a model's n dropouts: a new table (n, b) per forward, because a compiled block
    may hold its row."""

    def __init__(self, dropouts: dict[str, Dropout]) -> None:
        self._dropouts = list(dropouts.values())
        self._hashes = [hash64(f"meshtrain dropout {name}") for name in dropouts]
        self._of_names: Tensor | None = None  # (n,), these hashes on the device

    def needed(self) -> bool:
        """Whether any of them drops something."""
        return any(dropout.p > 0 for dropout in self._dropouts)

    def set(self, seed: int, step: int, samples: range, device: torch.device) -> None:
        """key = hash(name) xor hash(seed, step, sample), of each dropout and sample."""
        if self._of_names is None or self._of_names.device != device:
            self._of_names = torch.tensor(self._hashes, dtype=torch.int64, device=device)

        hashes = [hash64(f"meshtrain dropout {seed} {step} {sample}") for sample in samples]
        # From pinned memory the copy does not block.
        is_cuda = device.type == "cuda"
        on_host = torch.tensor(hashes, dtype=torch.int64, pin_memory=is_cuda)
        of_samples = on_host.to(device, non_blocking=True)  # (b,)

        table = self._of_names[:, None] ^ of_samples  # (n, b)
        for dropout, keys in zip(self._dropouts, table, strict=True):
            dropout.keys = keys


def keep_mask(keys: Tensor, shape: torch.Size, positions: Tensor, p: float) -> Tensor:
    """The elements to keep, as booleans of `shape` (b, ..., d): each with probability 1 - p, to a
    precision of 2^-32.

    Rows of d elements are numbered consecutively within the sample; `positions` (s,) are those of
    the second dim. SplitMix64, seeded with each sample's key (b) int64, gives 64 bits for every two
    elements of a row, 32 for each.
    """
    b = shape[0]
    width = shape[-1] if len(shape) > 1 else 1
    rows = shape[1:-1].numel()
    words = (width + 1) // 2  # of 64 bits, per row
    per_position = rows // len(positions) * words
    inner = torch.arange(per_position, device=keys.device)
    numbers = (positions[:, None] * per_position + inner).flatten()
    bits = mix(mix(keys)[:, None] + numbers * GAMMA).view(b, rows, words, 1)
    # Not `view(torch.int32)`: torch 2.13 compiles it with the slice to CPU code that writes out of
    # bounds.
    halves = torch.cat((bits, bits >> 32), dim=-1) & (2**32 - 1)
    return (halves >= round(p * 2**32)).flatten(2)[..., :width].reshape(shape)


def head_keys(keys: Tensor, first: int, count: int) -> Tensor:
    """(b, h) int64: a key for each head of each sample, of the heads from `first` on, as they are
    counted in the whole layer. `keys`: (b,) int64, those of the samples."""
    heads = torch.arange(first, first + count, device=keys.device)
    return mix(mix(keys)[:, None] + heads * GAMMA)


def keep_pairs(keys: Tensor, queries: Tensor, keys_at: Tensor, p: float) -> Tensor:
    """The pairs of a query and a key to keep, (b, h, s, t) bool: each with probability 1 - p, to a
    precision of 2^-32.

    A function of the head's key and of the two positions, so any part of the pairs can be asked
    for. SplitMix64, seeded with the head's key, gives the bits of pair number 2^32 query + key.

    Args:
        keys: (b, h) int64, from `head_keys`.
        queries, keys_at: (1 or b, s) and (1 or b, t) int64: positions in the sequence, below 2^31.
    """
    pairs = queries[:, None, :, None] * 2**32 + keys_at[:, None, None, :]
    bits = mix(keys[:, :, None, None] + pairs * GAMMA)
    return (bits & (2**32 - 1)) >= round(p * 2**32)


def hash64(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


# SplitMix64's increment and the multipliers of its finalizer, as int64: torch has no arithmetic on
# unsigned ones.
GAMMA, _MIX_1, _MIX_2 = (
    bits - 2**64 for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", OOPSLA 2014) of each int64: products wrap around, and a mask makes the shifts
    logical."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))
