"""Order of the samples: which ones a step takes, as a function of the step alone, and which rank has which.

Position `p = step * global_batch + i` of the run lies in epoch `p // n_samples`, and a permutation of that epoch says
which sample stands there. It is evaluated one index at a time, so neither a late restart nor a large corpus costs more.

Pure: no torch, no numpy, no I/O, nothing of the project's.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt
from typing import Any

# Each round mixes one half into the other. Four make a Feistel network a pseudo-random permutation (Luby and Rackoff,
# 1988); six leave room for halves of a few values, as small data sets have them.
_ROUNDS = 6
_MASK = (1 << 64) - 1


def batch_samples(seed: int, step: int, global_batch: int, n_samples: int) -> list[int]:
    """The samples of the global batch of `step` (counted from 0), in order; O(global_batch) whatever `n_samples` is.

    Each sample comes once an epoch; a batch may reach into the next. ValueError: a size below 1, or a step below 0.
    """
    if global_batch < 1 or step < 0:
        raise ValueError(f"a global batch of {global_batch} samples in step {step}: expected at least 1, from 0 on")
    positions = range(step * global_batch, (step + 1) * global_batch)
    return [sample for _, sample in items(seed, positions, n_samples)]


def items(seed: int, positions: range, n_samples: int) -> list[tuple[int, int]]:
    """The pairs (epoch, sample) at these positions of the run: what one rank needs of a batch, and no more."""
    if n_samples < 1:
        raise ValueError(f"there are {n_samples} samples to take batches from: expected at least 1")
    pairs = []
    epoch, permutation = -1, None
    for position in positions:
        if permutation is None or position // n_samples != epoch:
            epoch = position // n_samples
            permutation = Permutation(n_samples, seed, epoch)
        pairs.append((epoch, permutation[position % n_samples]))
    return pairs


class Permutation:
    """A pseudo-random permutation of range(n), drawn by (seed, epoch) and computed per index in O(1) memory.

    A generalised Feistel network on Z_a x Z_b, where a * b is the smallest such product of two near-equal factors that
    holds n, with cycle walking over the less than a values beyond n: J. Black and P. Rogaway, "Ciphers with Arbitrary
    Finite Domains" (CT-RSA 2002). The round function is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast
    Splittable Pseudorandom Number Generators", OOPSLA 2014): good statistics, no claim to secrecy.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        self.left = isqrt(n - 1) + 1
        self.right = -(-n // self.left)
        digest = hashlib.blake2b(f"meshtrain order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self.keys = struct.unpack(f"<{_ROUNDS}Q", digest)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(f"index {index} of a permutation of {self.n}")
        while True:
            index = self.encipher(index)
            if index < self.n:
                return index

    def encipher(self, index: Any) -> Any:
        """The network alone, of an integer or of a numpy array of them (uint64)."""
        left, right = divmod(index, self.right)
        keys = self.keys
        for turn in range(0, _ROUNDS, 2):  # hashes are reduced first: in 64 bits the sum would not fit
            left = (left + mix(right, keys[turn]) % self.left) % self.left
            right = (right + mix(left, keys[turn + 1]) % self.right) % self.right
        return left * self.right + right


def mix(value: Any, key: int) -> Any:
    """A 64-bit hash of `value`, an integer or a numpy array of them (uint64), under `key` (SplitMix64)."""
    value = (value * 0x9E3779B97F4A7C15 + key) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def share(count: int, parts: int, part: int) -> range:
    """The positions 0 <= i < count that belong to one of `parts` ranks: together all of them, each once.

    Sizes differ by at most one: 512 samples on 6 ranks are 85, 85, 86, 85, 85, 86. ValueError: no such part.
    """
    if not 0 <= part < parts or count < 0:
        raise ValueError(f"part {part} of {count} samples in {parts} parts: expected 0 <= part < {parts}, count >= 0")
    return range(part * count // parts, (part + 1) * count // parts)


def microbatches(global_size: int, micro_size: int, parts: int) -> int:
    """How many forwards of `micro_size` samples a step of `global_size` samples takes on each of `parts` ranks.

    The same on every rank, as collectives need it: ranks with a smaller share fill up with padding.
    """
    if min(global_size, micro_size, parts) < 1:
        raise ValueError(f"a batch of {global_size} in microbatches of {micro_size} on {parts} ranks: all must be >= 1")
    largest_share = -(-global_size // parts)
    return -(-largest_share // micro_size)


def samples_digest(indices: Iterable[int]) -> str:
    """16 hex digits that name a batch: the start of SHA-256 over the indices as little-endian 64-bit integers."""
    values = list(indices)
    return hashlib.sha256(struct.pack(f"<{len(values)}q", *values)).hexdigest()[:16]


@dataclass(frozen=True)
class BatchSplit:
    """A step of `global_size` samples on `data_ranks` ranks, in forwards of `micro_size`. Nothing has to divide."""

    global_size: int
    micro_size: int
    data_ranks: int

    @property
    def accumulation(self) -> int:
        """Forwards per step, the same on every rank."""
        return microbatches(self.global_size, self.micro_size, self.data_ranks)

    @property
    def shares(self) -> tuple[int, int]:
        """The samples of the rank with the fewest and of the rank with the most."""
        fewest, remainder = divmod(self.global_size, self.data_ranks)
        return fewest, fewest + (remainder > 0)

    @property
    def idle(self) -> float:
        """The share of the computed samples that are padding, from 0 to 1."""
        return 1 - self.global_size / (self.data_ranks * self.accumulation * self.micro_size)


def describe_batch(global_size: int, micro_size: int, data_ranks: int) -> str:
    """One line: `global batch 512 = 8 per rank x 32 data ranks x 2 accumulation`, 8 being the samples of a forward.

    Where shares are uneven, or no multiple of `micro_size`, it says how much is padding. ValueError: a number below 1.
    """
    split = BatchSplit(global_size, micro_size, data_ranks)
    accumulation, (fewest, most) = split.accumulation, split.shares
    ranks = f"{data_ranks} data rank{'s' * (data_ranks != 1)}"
    if split.idle == 0:
        return f"global batch {global_size} = {micro_size} per rank x {ranks} x {accumulation} accumulation"
    samples = f"{fewest} or {most} samples" if most > fewest else f"{most} sample{'s' * (most != 1)}"
    return (
        f"global batch {global_size} over {ranks}: {samples} a rank, {accumulation} accumulation of {micro_size}, "
        f"{100 * split.idle:.2g} % of the slots idle"
    )
