"""Compares two runs of the same config step by step: what their rows of metrics.jsonl say, and what
their ranks have recorded. Without torch: it reads numbers."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The largest relative difference that the precision allows: far above the rounding of sums in
# another order, and far below any mistake.
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}

Row = Mapping[str, Any]

# Of a row, what has to be the same, to the bit.
SAME = ("samples_digest", "samples", "tokens", "epoch", "lr")
# Of a row, what the machine and the layout decide, and the exponential of another number.
PASSED_OVER = re.compile(
    r"step|\w+_s|\w+_gib|\w+_rank|mfu\w*|goodput|sent_bytes_\w+|expert_rows_overflow|perplexity"
)
# What is compared of a parameter, in the order in which a step computes it.
GRADIENT, WEIGHT = "gradient", "weight"
SAMPLES, SAMPLE_LOSS = "samples", "sample_loss"


@dataclass(frozen=True)
class Difference:
    """The first difference of a run from another.

    Attributes:
        step: from 1; 0: before the first step, in the initial weights.
        what: a name of a row (`loss`, `grad_norm`, ...), `samples`, `sample_loss`, or `gradient` or
            `weight`, of the `parameter`.
        size: relative to the other run's value.
    """

    step: int
    what: str
    size: float
    parameter: str | None = None

    def __str__(self) -> str:
        of = f" of {self.parameter}" if self.parameter else ""
        return f"step {self.step}: {self.what}{of} differs by {self.size:.2g} of its value"


def compare_rows(
    rows: Sequence[Row], expected: Sequence[Row], tolerance: float
) -> list[Difference]:
    """The differences between two runs' rows of the first step that has any: the samples, the loss,
    the norm, and whatever else was computed."""
    for n, row in enumerate(expected):
        if n == len(rows):
            return [Difference(row["step"], "step", math.inf)]  # it is not there
        differences = list(_of_row(rows[n], row, tolerance))
        if differences:
            return differences
    if len(rows) > len(expected):
        return [Difference(rows[len(expected)]["step"], "step", math.inf)]
    return []


def _of_row(row: Row, expected: Row, tolerance: float) -> Iterator[Difference]:
    step = expected["step"]
    if row["step"] != step:
        yield Difference(step, "step", math.inf)
        return
    for name in SAME:
        if row.get(name) != expected.get(name):
            yield Difference(step, name, math.inf)
    names = [name for name in expected if name not in SAME]
    names += [name for name in row if name not in expected]
    for name in names:
        if PASSED_OVER.fullmatch(name):
            continue
        size = relative(row.get(name, math.nan), expected.get(name, math.nan))
        if not size <= tolerance:
            yield Difference(step, name, size)


def relative(value: Any, expected: Any) -> float:
    """The difference of two numbers beside the second; infinite where one of them is none."""
    if value == expected:
        return 0.0
    for number in (value, expected):
        if not isinstance(number, int | float) or not math.isfinite(number):
            return math.inf
    return abs(value - expected) / abs(expected) if expected else math.inf


@dataclass(frozen=True)
class RankStep:
    """What one rank has recorded of one step.

    Attributes:
        samples: [epoch, index, digest of what was read] of each.
        first: the position of its first sample in the global batch.
        real: how many of `losses` are of samples; the others are of padding.
        losses: of each sample, or with `cp` this rank's part of it.
        speaks: whether no other rank has the same losses.
        gradients, weights: name -> difference from one process beside the whole tensor's size;
            weights are those after the update.
        scales: name -> by what the update has multiplied the gradient; None: by no one number.
    """

    step: int
    samples: Sequence[Sequence[Any]] = ()
    first: int = 0
    real: int = 0
    losses: Sequence[float] = ()
    speaks: bool = False
    gradients: Mapping[str, float] | None = None
    weights: Mapping[str, float] | None = None
    scales: Mapping[str, float | None] | None = None


def samples_read(ranks: Sequence[RankStep]) -> Counter[tuple[Any, ...]]:
    """How often each sample was read by ranks that count it. Ranks with the same share read the
    same."""
    shares: dict[int, Counter[tuple[Any, ...]]] = {}
    for rank in ranks:
        # Ranks that do not know their share, those of a script, count as one another.
        own = Counter(tuple(sample) for sample in rank.samples)
        shares[rank.first] = shares.get(rank.first, Counter()) | own
    return sum(shares.values(), Counter())


def sample_losses(ranks: Sequence[RankStep]) -> dict[int, float]:
    """Position in the global batch -> its loss, summed over the ranks that have parts of it."""
    losses: dict[int, float] = {}
    for rank in ranks:
        if rank.speaks:
            for n, loss in enumerate(rank.losses[: rank.real]):
                position = rank.first + n
                losses[position] = losses.get(position, 0.0) + loss
    return losses


def padding_losses(ranks: Sequence[RankStep]) -> float:
    """What padding adds to the loss: 0."""
    return sum(sum(rank.losses[rank.real :]) for rank in ranks if rank.speaks)


@dataclass(frozen=True)
class Tolerances:
    """The largest relative differences that count as none: of numbers of a row, of gradients, and
    of weights."""

    number: float
    gradient: float
    weight: float


def first_difference(
    rows: Sequence[Row],
    steps: Sequence[Sequence[RankStep]],
    expected_rows: Sequence[Row],
    expected: Sequence[Sequence[RankStep]],
    tolerances: Tolerances,
    *,
    since: int = 0,
) -> list[Difference]:
    """All differences of the first step that has any, in the order in which a step computes:
    samples, losses, gradients, norm, weights.

    Args:
        steps: for each step from 0 (before the first), what each rank has recorded.
        since: steps before this one are passed over.
    """
    of_rows = compare_rows(
        [row for row in rows if row["step"] >= since],
        [row for row in expected_rows if row["step"] >= since],
        tolerances.number,
    )
    first_of_rows = of_rows[0].step if of_rows else None
    both = min(len(steps), len(expected))
    for step in range(since, both):
        differences = list(_of_ranks(step, steps[step], expected[step], tolerances))
        if step == first_of_rows:
            differences += of_rows
        if differences:
            return sorted(differences, key=_order)
    # What only one of the runs has recorded was not compared.
    if not of_rows and len(steps) != len(expected):
        return [Difference(both, "step", math.inf)]
    return of_rows


def _order(difference: Difference) -> int:
    """In which order a step computes what is compared."""
    order = (SAMPLES, *SAME, SAMPLE_LOSS, "loss", GRADIENT, "grad_norm", WEIGHT)
    return order.index(difference.what) if difference.what in order else len(order)


def _of_ranks(
    step: int, ranks: Sequence[RankStep], expected: Sequence[RankStep], tolerances: Tolerances
) -> Iterator[Difference]:
    if samples_read(ranks) != samples_read(expected):
        yield Difference(step, SAMPLES, math.inf)

    loss_apart = _losses_apart(sample_losses(ranks), sample_losses(expected))
    # One sample's loss has fewer terms than the mean, in which roundings cancel.
    if not loss_apart <= 10 * tolerances.number:
        yield Difference(step, SAMPLE_LOSS, loss_apart)

    gradients = _largest_by_name(rank.gradients for rank in ranks)
    weights = _largest_by_name(rank.weights for rank in ranks)
    for name, size in gradients.items():
        if not size <= tolerances.gradient:
            yield Difference(step, GRADIENT, size, name)
    for name, size in weights.items():
        if not size <= tolerances.weight:
            yield Difference(step, WEIGHT, size, name)


def _losses_apart(losses: Mapping[int, float], expected: Mapping[int, float]) -> float:
    """The largest difference of a sample's loss, beside the largest loss: a sample may have no
    target, and so a loss of 0."""
    if losses.keys() != expected.keys():
        return math.inf
    largest = max(map(abs, expected.values()), default=0.0)
    if largest == 0:
        return 0.0  # a script tells of no sample's loss
    sizes = [abs(losses[n] - expected[n]) / largest for n in expected]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes)


def _largest_by_name(of_ranks: Iterable[Mapping[str, float] | None]) -> dict[str, float]:
    """Each parameter's largest difference on any rank; NaN where one has NaN."""
    largest: dict[str, float] = {}
    for of_rank in of_ranks:
        for name, size in (of_rank or {}).items():
            before = largest.get(name, 0.0)
            if math.isnan(size) or size > before:
                largest[name] = size
            else:
                largest[name] = before
    return largest
