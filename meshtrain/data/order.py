"""Sample order: which samples a step takes, as a function of the step alone, and which rank takes
which of them.

Position `p = step * global_batch + i` of the run lies in epoch `p // n_samples`, and that epoch's
permutation gives the sample at `p`. It is evaluated one index at a time, so neither a late restart
nor a large corpus costs more.

Where batches grow (`BatchSizes`), `p` counts the samples of all earlier steps; where sources are
mixed (`Mixture`), each source has positions of its own.

Pure: no torch, no numpy, no I/O, no other module of the project.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, isqrt, lcm
from typing import Any, TypeVar

Value = TypeVar("Value")

# Each round mixes one half into the other. Four rounds make a Feistel network a pseudo-random
# permutation (Luby and Rackoff, 1988); six leave a margin for the halves of small data sets, which
# have few values.
_ROUNDS = 6
_MASK = (1 << 64) - 1


def batch_samples(seed: int, step: int, global_batch: int, n_samples: int) -> list[int]:
    """The samples of the global batch of `step` (counted from 0), in order; O(global_batch)
    whatever `n_samples` is.

    Each sample comes once per epoch; a batch may span two epochs. Raises ValueError: a size below
    1, a step below 0.
    """
    if global_batch < 1 or step < 0:
        raise ValueError(
            f"a global batch of {global_batch} samples in step {step}: expected at least 1, from 0 "
            "on"
        )
    positions = range(step * global_batch, (step + 1) * global_batch)
    return [sample for _, sample in items(seed, positions, n_samples)]


def items(seed: int | str, positions: range, n_samples: int) -> list[tuple[int, int]]:
    """The pairs (epoch, sample) at these positions of the run, so that a rank computes only its
    share of a batch."""
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
    """A pseudo-random permutation of range(n), keyed by (seed, epoch) and computed per index in
    O(1) memory.

    A generalised Feistel network on Z_a x Z_b, where a = ceil(sqrt(n)) and b = ceil(n / a), with
    cycle walking over the fewer than a values beyond n: J. Black and P. Rogaway, "Ciphers with
    Arbitrary Finite Domains" (CT-RSA 2002). The round function is the finalizer of SplitMix64
    (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014):
    statistically good, not cryptographically secure.
    """

    def __init__(self, n: int, seed: int | str, epoch: int) -> None:
        self.n = n
        self.left = isqrt(n - 1) + 1
        self.right = -(-n // self.left)
        digest = hashlib.blake2b(
            f"meshtrain order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS
        ).digest()
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
        """The Feistel network without cycle walking, for an integer or a numpy array of them
        (uint64)."""
        left, right = divmod(index, self.right)
        keys = self.keys
        # hashes are reduced first: the sum would overflow 64 bits
        for turn in range(0, _ROUNDS, 2):
            left = (left + mix(right, keys[turn]) % self.left) % self.left
            right = (right + mix(left, keys[turn + 1]) % self.right) % self.right
        return left * self.right + right


def mix(value: Any, key: int) -> Any:
    """A 64-bit hash of `value`, an integer or a numpy array of them (uint64), under `key`
    (SplitMix64)."""
    value = (value * 0x9E3779B97F4A7C15 + key) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class BatchSizes:
    """The samples of each step: `((0, 64), (2000, 256))` is 64 in the first 2000 steps, and 256
    from then on."""

    # (first step, samples per step), ascending, the first from step 0
    changes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, value: int | Sequence[Sequence[int]]) -> "BatchSizes":
        """From a config's value: a number, or a list of changes."""
        return cls(
            ((0, value),) if isinstance(value, int) else tuple((step, size) for step, size in value)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.changes)

    @property
    def largest(self) -> int:
        return max(self.sizes)

    def size(self, step: int) -> int:
        """The samples of `step`, counted from 0."""
        return value_at(self.changes, step)

    def before(self, step: int) -> int:
        """The samples of all steps before `step`."""
        ends = [first for first, _ in self.changes[1:]] + [step]
        return sum(
            max(min(end, step) - first, 0) * size
            for (first, size), end in zip(self.changes, ends, strict=True)
        )

    def positions(self, step: int) -> range:
        """The positions of the run that `step` takes."""
        return range(self.before(step), self.before(step + 1))

    def steps(self, samples: int) -> int:
        """The smallest number of steps that take at least this many samples."""
        first, size = next(
            c for c in reversed(self.changes) if c[0] == 0 or self.before(c[0]) < samples
        )
        return first + -(-(samples - self.before(first)) // size)


def value_at(changes: Sequence[tuple[int, Value]], step: int) -> Value:
    """The value at `step`, from changes (first step, value), ascending from step 0."""
    return next(value for first, value in reversed(changes) if step >= first)


def changes_of(values: Sequence[Any]) -> list[tuple[int, tuple[Any, ...]]]:
    """Joins several values, each a number or a list of changes as in `BatchSizes`, into one list of
    changes."""
    lists = [value if isinstance(value, list | tuple) else ((0, value),) for value in values]
    steps = sorted({step for changes in lists for step, _ in changes})
    return [(step, tuple(value_at(own, step) for own in lists)) for step in steps]


MOST_PERIOD, MOST_SOURCES = 100_000, 256


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as the smallest integers of the same ratios, each taken as the decimal number it is
    written as.

    Raises ValueError: a weight below 0, none above 0, or a sum above `MOST_PERIOD` (the sum is the
    number of samples after which shares are exact again)."""
    parts = [Fraction(str(weight)) for weight in weights]
    if min(parts) < 0 or sum(parts) == 0:
        raise ValueError(
            f"the weights {', '.join(map(str, weights))}: expected none below 0, and one above"
        )
    scaled = [int(part * lcm(*(part.denominator for part in parts))) for part in parts]
    whole = tuple(number // gcd(*scaled) for number in scaled)
    if sum(whole) > MOST_PERIOD:
        raise ValueError(
            f"the weights {', '.join(map(str, weights))} are {':'.join(map(str, whole))}, more "
            f"than {MOST_PERIOD:,} "
            "together: give them with fewer digits"
        )
    return whole


@lru_cache(maxsize=16)
def mixture_period(weights: tuple[int, ...]) -> bytes:
    """The source of each of the first sum(weights) positions, after which the order of sources
    repeats.

    For every t, each source has its share of the first t positions, rounded up or down: the quota
    method (M. L. Balinski and H. P. Young, "The Quota Method of Apportionment", American
    Mathematical Monthly 82, 1975).
    """
    total, taken, period = sum(weights), [0] * len(weights), bytearray()
    for t in range(1, total + 1):
        eligible = [i for i, weight in enumerate(weights) if taken[i] * total < t * weight]
        chosen = min(eligible, key=lambda i: (taken[i] + 1) / weights[i])
        taken[chosen] += 1
        period.append(chosen)
    return bytes(period)


class Mixture:
    """Several sources in one run: the source of a position is a function of the position alone.

    Among the positions since the last change of weights, each source has its share to within one
    sample at any time. Each source goes through its samples in its own order, as if it were alone.
    Samples are numbered source by source.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        weights: Sequence[tuple[int, Sequence[float]]],
    ) -> None:
        """`sizes`: number of samples of each source. `weights`: (position from which they hold, a
        weight per source), ascending, the first from 0. Raises ValueError: see `whole_weights`."""
        self.names, self.sizes = tuple(names), tuple(sizes)
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._parts: list[
            tuple[int, tuple[int, ...], tuple[int, ...]]
        ] = []  # first position, taken before, weights
        for first, of_sources in weights:
            taken = self.taken(first) if self._parts else (0,) * len(sizes)
            self._parts.append((first, taken, whole_weights(of_sources)))

    def _part(self, position: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return next(part for part in reversed(self._parts) if position >= part[0])

    def taken(self, position: int) -> tuple[int, ...]:
        """The number of samples of each source before a position."""
        first, before, weights = self._part(position)
        periods, rest = divmod(position - first, sum(weights))
        period = mixture_period(weights)
        return tuple(
            count + periods * weight + period.count(i, 0, rest)
            for i, (count, weight) in enumerate(zip(before, weights, strict=True))
        )

    def sources(self, positions: range) -> list[int]:
        """The source at each of these positions."""
        parts = [(position, *self._part(position)) for position in positions]
        return [
            mixture_period(weights)[(position - first) % sum(weights)]
            for position, first, _, weights in parts
        ]

    def items(
        self,
        seed: int,
        positions: range,
        items: Callable[[str, range, int], list[tuple[int, int]]] = items,
    ) -> list[tuple[int, int]]:
        """The pairs (epoch of its source, sample) at these positions. `items`: a function like
        `order.items`."""
        first, last = self.taken(positions.start), self.taken(positions.stop)
        own = [
            iter(items(f"{seed} {name}", range(start, stop), size) if stop > start else [])
            for name, size, start, stop in zip(self.names, self.sizes, first, last, strict=True)
        ]
        pairs = [(source, *next(own[source])) for source in self.sources(positions)]
        return [(epoch, self.offsets[source] + sample) for source, epoch, sample in pairs]


def share(count: int, parts: int, part: int) -> range:
    """The positions 0 <= i < count of rank `part` out of `parts`; every position belongs to exactly
    one rank.

    Sizes differ by at most one: 512 samples on 6 ranks are 85, 85, 86, 85, 85, 86. Raises
    ValueError: no such part.
    """
    if not 0 <= part < parts or count < 0:
        raise ValueError(
            f"part {part} of {count} samples in {parts} parts: expected 0 <= part < {parts}, count "
            ">= 0"
        )
    return range(part * count // parts, (part + 1) * count // parts)


def microbatches(global_size: int, micro_size: int, parts: int) -> int:
    """How many forwards of `micro_size` samples a step of `global_size` samples takes on each of
    `parts` ranks.

    The same on every rank, as collectives require: ranks with a smaller share are filled up with
    padding.
    """
    if min(global_size, micro_size, parts) < 1:
        raise ValueError(
            f"a batch of {global_size} in microbatches of {micro_size} on {parts} ranks: all must "
            "be >= 1"
        )
    largest_share = -(-global_size // parts)
    return -(-largest_share // micro_size)


def samples_digest(indices: Iterable[int]) -> str:
    """16 hex digits that identify a batch: the start of SHA-256 over its indices as little-endian
    64-bit integers."""
    values = list(indices)
    return hashlib.sha256(struct.pack(f"<{len(values)}q", *values)).hexdigest()[:16]


@dataclass(frozen=True)
class BatchSplit:
    """A step of `global_size` samples on `data_ranks` ranks, in forwards of `micro_size`. Sizes
    need not divide."""

    global_size: int
    micro_size: int
    data_ranks: int

    @property
    def accumulation(self) -> int:
        """Forwards per step, the same on every rank."""
        return microbatches(self.global_size, self.micro_size, self.data_ranks)

    @property
    def shares(self) -> tuple[int, int]:
        """The smallest and the largest number of samples of any rank."""
        fewest, remainder = divmod(self.global_size, self.data_ranks)
        return fewest, fewest + (remainder > 0)

    @property
    def idle(self) -> float:
        """The share of the computed samples that are padding, from 0 to 1."""
        return 1 - self.global_size / (self.data_ranks * self.accumulation * self.micro_size)


def describe_ramp(sizes: BatchSizes, micro_size: int, data_ranks: int) -> list[str]:
    """`describe_batch` for each batch size, preceded by the step from which it holds if sizes
    change."""
    lines = [(first, describe_batch(size, micro_size, data_ranks)) for first, size in sizes.changes]
    return [f"from step {first + 1} on: " * (len(lines) > 1) + line for first, line in lines]


def describe_batch(global_size: int, micro_size: int, data_ranks: int) -> str:
    """One line: `global batch 512 = 8 per rank x 32 data ranks x 2 accumulation`, 8 being the
    samples of a forward.

    States the share of padding if shares are uneven or not a multiple of `micro_size`. Raises
    ValueError: a number < 1.
    """
    split = BatchSplit(global_size, micro_size, data_ranks)
    accumulation, (fewest, most) = split.accumulation, split.shares
    ranks = f"{data_ranks} data rank{'s' * (data_ranks != 1)}"
    if split.idle == 0:
        return (
            f"global batch {global_size} = {micro_size} per rank x {ranks} x {accumulation} "
            "accumulation"
        )
    samples = (
        f"{fewest} or {most} samples" if most > fewest else f"{most} sample{'s' * (most != 1)}"
    )
    return (
        f"global batch {global_size} over {ranks}: {samples} a rank, {accumulation} accumulation "
        f"of {micro_size}, "
        f"{100 * split.idle:.2g} % of the slots idle"
    )
