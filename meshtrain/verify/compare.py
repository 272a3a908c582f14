"""Compares two runs of the same config step by step: what their rows of metrics.jsonl say, and what
their ranks have recorded. Without torch: it reads numbers."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
FAILURE = "failure"


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
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in (value, expected)):
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


def first_difference(
    rows: Sequence[Row],
    steps: Sequence[Sequence[RankStep]],
    expected_rows: Sequence[Row],
    expected: Sequence[Sequence[RankStep]],
    tolerance: "Tolerances",
) -> list[Difference]:
    """All differences of the first step that has any, in the order in which a step computes:
    samples, losses, gradients, norm, weights.

    Args:
        steps: for each step from 0 (before the first), what each rank has recorded.
    """
    of_rows = compare_rows(rows, expected_rows, tolerance.number)
    first_row = of_rows[0].step if of_rows else math.inf
    for step, ranks in enumerate(steps):
        own = list(_of_ranks(step, ranks, expected[step], tolerance))
        if own or first_row <= step:
            own += of_rows if first_row == step else []
            return sorted(own, key=_order)
    return of_rows


def _order(difference: Difference) -> int:
    """In which order a step computes what is compared."""
    order = (SAMPLES, *SAME, SAMPLE_LOSS, "loss", GRADIENT, "grad_norm", WEIGHT)
    return order.index(difference.what) if difference.what in order else len(order)


@dataclass(frozen=True)
class Tolerances:
    """The largest relative differences that count as none: of numbers of a row, of gradients, and
    of weights."""

    number: float
    gradient: float
    weight: float


def _of_ranks(
    step: int, ranks: Sequence[RankStep], expected: Sequence[RankStep], tolerance: Tolerances
) -> Iterator[Difference]:
    if samples_read(ranks) != samples_read(expected):
        yield Difference(step, SAMPLES, math.inf)
    losses, own = sample_losses(expected), sample_losses(ranks)
    # Beside the largest: a sample may have no target with a loss, and a script tells of none.
    largest = max(map(abs, losses.values()), default=0.0)
    if own.keys() != losses.keys():
        yield Difference(step, SAMPLE_LOSS, math.inf)
    elif largest > 0:
        apart = max(abs(own[n] - losses[n]) for n in losses) / largest
        if not apart <= 10 * tolerance.number:
            yield Difference(step, SAMPLE_LOSS, apart)
    for what, limit in ((GRADIENT, tolerance.gradient), (WEIGHT, tolerance.weight)):
        of_names: dict[str, float] = {}
        for rank in ranks:
            held = rank.gradients if what == GRADIENT else rank.weights
            for name, size in (held or {}).items():
                before = of_names.get(name, 0.0)
                of_names[name] = size if math.isnan(size) else max(before, size)
        for name, size in of_names.items():
            if not size <= limit:
                yield Difference(step, what, size, name)
