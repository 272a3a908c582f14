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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, isqrt, lcm
from typing import Any, NamedTuple, TypeVar

Value = TypeVar("Value")
# A function like `items`: (seed, positions, number of samples) -> pairs (epoch, sample).
Items = Callable[[int | str, range, int], list[tuple[int, int]]]

# Each round mixes one half into the other. Four rounds make a Feistel network a pseudo-random
# permutation (Luby and Rackoff, 1988); six leave a margin for the halves of small data sets, which
# have few values.
_ROUNDS = 6
_MASK = (1 << 64) - 1


def items(seed: int | str, positions: range, n_samples: int) -> list[tuple[int, int]]:
    """The pairs (epoch, sample) at these positions of a run with one source, so that a rank
    computes only its share of a batch."""
    if n_samples < 1:
        raise ValueError(f"there are {n_samples} samples to take batches from: expected at least 1")
    pairs = []
    epoch = -1
    permutation = None
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
        if isinstance(value, int):
            return cls(((0, value),))
        return cls(tuple((step, size) for step, size in value))

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
        samples = 0
        for (first, size), end in zip(self.changes, ends, strict=True):
            steps = max(min(end, step) - first, 0)
            samples += steps * size
        return samples

    def positions(self, step: int) -> range:
        """The positions of the run that `step` takes."""
        return range(self.before(step), self.before(step + 1))

    def steps(self, samples: int) -> int:
        """The smallest number of steps that take at least this many samples."""
        # The last change that is reached before so many samples are taken.
        reached = [
            change for change in self.changes if change[0] == 0 or self.before(change[0]) < samples
        ]
        first, size = reached[-1]
        return first + -(-(samples - self.before(first)) // size)


def value_at(changes: Sequence[tuple[int, Value]], step: int) -> Value:
    """The value at `step`, from changes (first step, value), ascending from step 0."""
    return next(value for first, value in reversed(changes) if step >= first)


def changes_of(values: Sequence[Any]) -> list[tuple[int, tuple[Any, ...]]]:
    """Joins several values, each a number or a list of changes as in `BatchSizes`, into one list of
    changes."""
    lists = [value if isinstance(value, list | tuple) else ((0, value),) for value in values]
    steps = set()
    for changes in lists:
        steps |= {step for step, _ in changes}
    return [(step, tuple(value_at(own, step) for own in lists)) for step in sorted(steps)]


MOST_PERIOD = 100_000
MOST_SOURCES = 256


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
    denominator = lcm(*[part.denominator for part in parts])
    scaled = [int(part * denominator) for part in parts]
    divisor = gcd(*scaled)
    whole = tuple(number // divisor for number in scaled)
    if sum(whole) > MOST_PERIOD:
        raise ValueError(
            f"the weights {', '.join(map(str, weights))} are {':'.join(map(str, whole))}, more "
            f"than {MOST_PERIOD:,} together: give them with fewer digits"
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
    total = sum(weights)
    taken = [0] * len(weights)
    period = bytearray()
    for t in range(1, total + 1):
        # Those that one more sample would not bring above their share of t, rounded up.
        eligible = [i for i, weight in enumerate(weights) if taken[i] * total < t * weight]
        chosen = min(eligible, key=lambda i: (taken[i] + 1) / weights[i])
        taken[chosen] += 1
        period.append(chosen)
    return bytes(period)


class _Part(NamedTuple):
    """A part of the run in which the weights of a mixture stay the same."""

    first: int  # position
    taken: tuple[int, ...]  # samples of each source before it
    weights: tuple[int, ...]

    def source(self, position: int) -> int:
        period = mixture_period(self.weights)
        return period[(position - self.first) % len(period)]


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
        self.names = tuple(names)
        self.sizes = tuple(sizes)
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._parts: list[_Part] = []
        for first, of_sources in weights:
            taken = self.taken(first) if self._parts else (0,) * len(sizes)
            self._parts.append(_Part(first, taken, whole_weights(of_sources)))

    def _part(self, position: int) -> _Part:
        return next(part for part in reversed(self._parts) if position >= part.first)

    def taken(self, position: int) -> tuple[int, ...]:
        """The number of samples of each source before a position."""
        part = self._part(position)
        period = mixture_period(part.weights)
        # Whole periods have each source as often as its weight says; the rest is counted.
        periods, rest = divmod(position - part.first, len(period))
        counts = []
        for source, weight in enumerate(part.weights):
            since = periods * weight + period.count(source, 0, rest)
            counts.append(part.taken[source] + since)
        return tuple(counts)

    def sources(self, positions: range) -> list[int]:
        """The source at each of these positions."""
        return [self._part(position).source(position) for position in positions]

    def items(self, seed: int, positions: range, compute: Items = items) -> list[tuple[int, int]]:
        """The pairs (epoch of its source, sample) at these positions. `compute`: `items`, or a
        function that gives the same."""
        # Each source goes through its own samples in its own order: what of them lies here.
        first = self.taken(positions.start)
        last = self.taken(positions.stop)
        of_source: list[Iterator[tuple[int, int]]] = []
        for source, name in enumerate(self.names):
            own = range(first[source], last[source])
            pairs = compute(f"{seed} {name}", own, self.sizes[source]) if own else []
            of_source.append(iter(pairs))

        mixed = []
        for source in self.sources(positions):
            epoch, sample = next(of_source[source])
            mixed.append((epoch, self.offsets[source] + sample))
        return mixed


@dataclass(frozen=True)
class SampleOrder:
    """Which samples each step of a run takes. Steps are counted from 0."""

    seed: int
    sizes: BatchSizes
    samples: int  # of all sources together
    mixture: Mixture | None = None
    # how the pairs of one source are computed: by Python, or by numpy (`order_numpy.run_order`)
    compute: Items = items

    def items(self, positions: range) -> list[tuple[int, int]]:
        """The pairs (epoch, sample) at these positions of the run."""
        if self.mixture is None:
            return self.compute(self.seed, positions, self.samples)
        return self.mixture.items(self.seed, positions, self.compute)

    def of_step(self, step: int) -> list[tuple[int, int]]:
        """The pairs (epoch, sample) of the global batch of a step."""
        return self.items(self.sizes.positions(step))

    def epoch(self, step: int) -> int:
        """Full passes taken before this step: samples taken // number of samples."""
        return self.sizes.before(step) // self.samples


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
    order = SampleOrder(seed, BatchSizes.of(global_batch), n_samples)
    return [sample for _, sample in order.of_step(step)]


def share(count: int, parts: int, part: int) -> range:
    """The positions 0 <= i < count of rank `part` out of `parts`; every position belongs to exactly
    one rank.

    Sizes differ by at most one: 512 samples on 6 ranks are 85, 85, 86, 85, 85, 86. Raises
    ValueError: no such part.
    """
    if not 0 <= part < parts or count < 0:
        raise ValueError(
            f"part {part} of {count} samples in {parts} parts: expected 0 <= part < {parts}, "
            "count >= 0"
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
        most = fewest + 1 if remainder else fewest
        return fewest, most

    @property
    def idle(self) -> float:
        """The share of the computed samples that are padding, from 0 to 1."""
        return 1 - self.global_size / (self.data_ranks * self.accumulation * self.micro_size)


def describe_ramp(sizes: BatchSizes, micro_size: int, data_ranks: int) -> list[str]:
    """`describe_batch` for each batch size, preceded by the step from which it holds if sizes
    change."""
    lines = []
    for first, size in sizes.changes:
        line = describe_batch(size, micro_size, data_ranks)
        lines.append(line if len(sizes.changes) == 1 else f"from step {first + 1} on: {line}")
    return lines


def describe_batch(global_size: int, micro_size: int, data_ranks: int) -> str:
    """One line: `global batch 512 = 8 per rank x 32 data ranks x 2 accumulation`, 8 being the
    samples of a forward.

    States the share of padding if shares are uneven or not a multiple of `micro_size`. Raises
    ValueError: a number < 1.
    """
    split = BatchSplit(global_size, micro_size, data_ranks)
    accumulation = split.accumulation
    ranks = "1 data rank" if data_ranks == 1 else f"{data_ranks} data ranks"
    if split.idle == 0:
        return (
            f"global batch {global_size} = {micro_size} per rank x {ranks} x {accumulation} "
            "accumulation"
        )
    fewest, most = split.shares
    if most > fewest:
        samples = f"{fewest} or {most} samples"
    else:
        samples = "1 sample" if most == 1 else f"{most} samples"
    return (
        f"global batch {global_size} over {ranks}: {samples} a rank, {accumulation} accumulation "
        f"of {micro_size}, {100 * split.idle:.2g} % of the slots idle"
    )
