"""Which samples a step takes, as a function of the step alone.

The order of a run is part of the experiment and the layout is not, so it is computed, never kept: position
`p = step * global_batch + i` of the run lies in epoch `p // n_samples`, and a permutation of that epoch says which
sample stands there. The permutation is evaluated one index at a time, so a restart in step 90,000 on other machines,
or a corpus of 10^12 samples, costs no more than the first step of a small one.

Pure: no torch, no numpy, no I/O, nothing of the project's.
"""

import hashlib
import struct
from collections.abc import Iterable
from math import isqrt

# Each round mixes one half into the other. Four make a Feistel network a pseudo-random permutation (Luby and Rackoff,
# 1988); six leave room for halves of a few values, as small data sets have them.
_ROUNDS = 6
_MASK = (1 << 64) - 1


def batch_samples(seed: int, step: int, global_batch: int, n_samples: int) -> list[int]:
    """The samples of the global batch of `step` (counted from 0), in order; O(global_batch) whatever `n_samples` is.

    Every sample stands exactly once in each epoch; a batch that reaches over the end of an epoch goes on with the
    next one.

    Raises:
        ValueError: a size that is not positive, or a negative step.
    """
    return [sample for _, sample in batch_items(seed, step, global_batch, n_samples)]


def batch_items(seed: int, step: int, global_batch: int, n_samples: int) -> list[tuple[int, int]]:
    """As `batch_samples`, as pairs (epoch, sample)."""
    if global_batch < 1 or step < 0:
        raise ValueError(f"a global batch of {global_batch} samples in step {step}: expected at least 1, from 0 on")
    return items(seed, range(step * global_batch, (step + 1) * global_batch), n_samples)


def items(seed: int, positions: range, n_samples: int) -> list[tuple[int, int]]:
    """The pairs (epoch, sample) at these positions of the run: what one rank needs of a batch, and no more."""
    if n_samples < 1:
        raise ValueError(f"there are {n_samples} samples to take batches from: expected at least 1")
    found = []
    epoch, permutation = -1, None
    for position in positions:
        if permutation is None or position // n_samples != epoch:
            epoch = position // n_samples
            permutation = Permutation(n_samples, seed, epoch)
        found.append((epoch, permutation[position % n_samples]))
    return found


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
            index = self._encipher(index)
            if index < self.n:
                return index

    def _encipher(self, index: int) -> int:
        left, right = divmod(index, self.right)
        keys = self.keys
        for turn in range(0, _ROUNDS, 2):
            left = (left + mix(right, keys[turn])) % self.left
            right = (right + mix(left, keys[turn + 1])) % self.right
        return left * self.right + right


def mix(value: int, key: int) -> int:
    """A 64-bit hash of `value` under `key` (SplitMix64)."""
    value = (value * 0x9E3779B97F4A7C15 + key) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def share(count: int, parts: int, part: int) -> range:
    """The positions 0 <= i < count that belong to one of `parts` ranks: together all of them, each once.

    Sizes differ by at most one, so 512 samples on 6 ranks are 85, 85, 86, 85, 85, 86.

    Raises:
        ValueError: `part` is not one of the parts, or a count below 0.
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
    listed = list(indices)
    return hashlib.sha256(struct.pack(f"<{len(listed)}q", *listed)).hexdigest()[:16]
