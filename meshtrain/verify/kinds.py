"""Says of what kind the first difference of a run is, from all that was recorded of its step.

A judge below looks at one thing and returns what it has found, or None. They go through a step in
the order in which it computes: what is wrong early makes everything after it wrong.

For gradients there is one more run of one process, with a microbatch for each sample, so that what
each sample adds is known. A wrong gradient that is a sum of these, each times a number, shows which
samples are missing, or count otherwise.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from meshtrain.errors import join_some, plural, ranges
from meshtrain.layout import Layout
from meshtrain.verify.compare import (
    GRADIENT,
    SAMPLE_LOSS,
    SAMPLES,
    WEIGHT,
    Difference,
    RankStep,
    padding_losses,
    sample_losses,
    samples_read,
)
from meshtrain.verify.recording import Held, Tensors

# Equal for a judge, who looks at values of one step: sums in another order differ by much less in
# float64, in which runs are judged.
CLOSE = 1e-6

# The most of a gradient's norm that rounding to bfloat16 moves, whose digits are 2^-8 apart.
MOST_OF_16_BITS = 2**-6
# More than a sum of a few numbers of bfloat16 has, and fewer than those of float32.
DIGITS_OF_16_BITS = 20

# By how much the number of a sample in a gradient may differ from a whole one: it is solved for.
NEAR_A_NUMBER = 1e-3
# Of a gradient's norm, at most so much is called a part of it.
LARGEST_PART = 0.95

FACTOR = "factor"
MISSING_SUM = "missing sum"
MISSING_SAMPLE = "missing sample"
REPEATED_SAMPLE = "repeated sample"
OTHER_SAMPLE = "other sample"
WEIGHTING = "weighting"
FORWARD = "forward"
RANDOM = "random numbers"
NORM = "norm"
CLIPPING = "clipping"
STALE = "stale copies"
DECAY = "weight decay"
RATE = "learning rate"
UPDATE = "update"
INITIAL = "initial values"
MISPLACED = "misplaced"
ROUNDING = "rounding"
BACKWARD = "gradient"
FAILURE = "failure"
METRIC = "metric"

# Kind -> what it means, for the page and the documentation.
KINDS = {
    FACTOR: "every element is multiplied by one number, often the size of an axis",
    MISSING_SUM: "ranks hold parts of a sum that nobody has added up",
    MISSING_SAMPLE: "samples, or targets of theirs, have no part in the loss or in the gradient",
    REPEATED_SAMPLE: "samples, or padding, count more than once",
    OTHER_SAMPLE: "a rank has read other samples",
    WEIGHTING: "samples count in other proportions, as in a mean of means",
    FORWARD: "the same weights compute another loss for the same samples",
    RANDOM: "random numbers depend on the layout: without dropout the runs are equal",
    NORM: "gradients are equal, and their norm is not",
    CLIPPING: "gradients and norm are equal, and clipping multiplies by another number",
    STALE: "ranks hold different values of the same weights",
    DECAY: "weights decay more, or less",
    RATE: "updates have the right direction and another length",
    UPDATE: "gradients are equal, and the update is not",
    INITIAL: "the first weights are others",
    MISPLACED: "the right numbers, in other places",
    ROUNDING: "no more than rounding",
    BACKWARD: "the loss is right, and the gradient is not",
    FAILURE: "the run fails where one process does not",
    METRIC: "the training is right, and a number that is reported is not",
}


class Finding(NamedTuple):
    """What a judge says."""

    kind: str
    reason: str  # a sentence
    parameter: str | None = None


@dataclass
class Evidence:
    """All that is known of the first step that differs.

    Attributes:
        expected, ranks: what one process, and what each rank has recorded of it.
        numbers, expected_numbers: of the step's rows; null, where a number is none.
        whole: `gradient/NAME`, `weight/NAME` (after the update) and `before/NAME` of one process.
        own: for each rank, the parts that it has written; empty: they are those of one process.
        contributions: name -> (samples, ...), what each sample adds to the gradient; None: it is
            not known. Runs one process once more.
        equal_without_dropout: whether the runs are equal if nothing is dropped; None: nothing is.
            Runs both once more.
    """

    layout: Layout
    step: int
    differences: Sequence[Difference]
    expected: Sequence[RankStep]
    ranks: Sequence[RankStep]
    numbers: Mapping[str, float | None]
    expected_numbers: Mapping[str, float | None]
    whole: dict[str, Tensor]
    own: Sequence[Tensors]
    contributions: Callable[[], dict[str, Tensor] | None] = lambda: None
    equal_without_dropout: Callable[[], bool | None] = lambda: None

    def differs(self, what: str) -> list[Difference]:
        return [difference for difference in self.differences if difference.what == what]

    @property
    def loss_differs(self) -> bool:
        return bool(self.differs(SAMPLE_LOSS) or self.differs("loss"))

    def names(self, what: str) -> list[str]:
        """The parameters whose gradient or weight differs, in the order of the model."""
        return [str(difference.parameter) for difference in self.differs(what)]

    def held(self, name: str) -> Iterator[tuple[int, Held]]:
        """The parts that ranks have written of a tensor, by rank; none of one that one process does
        not have."""
        if name not in self.whole:
            return
        for rank, tensors in enumerate(self.own):
            if name in tensors and tensors[name].value.numel():
                yield rank, tensors[name]

    def part(self, name: str, held: Held) -> Tensor:
        """What one process has in the place of a rank's part."""
        whole = self.whole[name]
        value = whole[held.part] if whole.dim() else whole
        return value.double().reshape(held.value.shape)

    def side_by_side(self, name: str) -> tuple[Tensor, Tensor] | None:
        """All elements of a tensor that ranks have written, and those of one process in the same
        places: two long vectors. None: nobody has written any."""
        own, expected = [], []
        for _, held in self.held(name):
            own.append(held.value.double().flatten())
            expected.append(self.part(name, held).flatten())
        return (torch.cat(own), torch.cat(expected)) if own else None

    @cached_property
    def of_samples(self) -> dict[str, Tensor] | None:
        """The contributions, for which one process runs only where a judge asks."""
        return self.contributions()

    def axes(self, size: float) -> list[str]:
        """The axes of this size; where there are none, all axes, if they have it together."""
        layout = self.layout
        alike = [axis for axis in layout.axes if _is_equal(layout.size(axis), size)]
        if not alike and _is_equal(layout.world_size, size):
            return list(layout.axes)
        return alike


def _is_equal(number: float, other: float) -> bool:
    return math.isclose(number, other, rel_tol=CLOSE)


def judge(evidence: Evidence) -> Finding:
    """The likely kind of a difference."""
    for look in JUDGES:
        finding = look(evidence)
        if finding is not None:
            return finding
    first = evidence.differences[0]
    return Finding(METRIC, f"{first.what} is another number, and nothing before it is")


# Before the forward -------------------------------------------------------------------------------


def initial_values(evidence: Evidence) -> Finding | None:
    if evidence.step > 0:
        return None
    names = evidence.names(WEIGHT)
    return Finding(
        INITIAL,
        f"{plural(len(names), 'parameter')} begin with other values: {join_some(names, 3)}",
        names[0],
    )


def other_samples(evidence: Evidence) -> Finding | None:
    if not evidence.differs(SAMPLES) and not evidence.differs("samples_digest"):
        return None
    own, expected = samples_read(evidence.ranks), samples_read(evidence.expected)
    missing, more = expected - own, own - expected
    if not missing and not more:
        return Finding(OTHER_SAMPLE, "the same samples are read in another order")
    if not more:
        return Finding(MISSING_SAMPLE, f"nobody reads {_listed(missing)}")
    if all(sample in expected for sample in more):
        return Finding(REPEATED_SAMPLE, f"{_listed(more)} read more than once")
    if _indices(more) == _indices(missing):
        return Finding(OTHER_SAMPLE, f"{_listed(more)} read with other contents")
    return Finding(OTHER_SAMPLE, f"{_listed(more)} read in the place of {_listed(missing)}")


def _indices(samples: Mapping[tuple, int]) -> list[int]:
    return sorted({int(index) for _, index, _ in samples})


def _listed(samples: Mapping[tuple, int]) -> str:
    indices = _indices(samples)
    return f"{'sample' if len(indices) == 1 else 'samples'} {join_some(ranges(indices))}"


# The forward --------------------------------------------------------------------------------------


class _Losses:
    """The loss of each sample, by position in the global batch."""

    def __init__(self, evidence: Evidence) -> None:
        self.own = sample_losses(evidence.ranks)
        self.expected = sample_losses(evidence.expected)
        self.largest = max((abs(loss) for loss in self.expected.values()), default=0.0)
        # Position -> difference. A sample may have no target, so it is beside the largest loss.
        self.apart: dict[int, float] = {}
        if self.largest > 0:
            for position in sorted(self.own.keys() | self.expected.keys()):
                own = self.own.get(position, 0.0)
                expected = self.expected.get(position, 0.0)
                self.apart[position] = abs(own - expected) / self.largest
        # NaN is wrong, too: it is not at most anything.
        self.wrong = {position for position, size in self.apart.items() if not size <= CLOSE}

    @property
    def all_are_wrong(self) -> bool:
        return len(self.wrong) == len(self.expected)

    def is_nothing(self, loss: float) -> bool:
        return abs(loss) <= CLOSE * self.largest


def losses(evidence: Evidence) -> Finding | None:
    """Which losses of samples are others."""
    if not evidence.loss_differs:
        return None
    found = _Losses(evidence)
    padding = padding_losses(evidence.ranks)
    if not found.wrong and not found.is_nothing(padding):
        return Finding(REPEATED_SAMPLE, "padding has a loss, which is added to that of the samples")

    if found.wrong and all(found.is_nothing(found.own.get(n, 0.0)) for n in found.wrong):
        if found.all_are_wrong:
            return None  # the loss is not where it is looked for
        have = "has" if len(found.wrong) == 1 else "have"
        return Finding(MISSING_SAMPLE, f"{_at(found.wrong)} {have} no loss")

    if _is_the_mean_alone(evidence, found):
        own, expected = evidence.numbers.get("loss"), evidence.expected_numbers.get("loss")
        return Finding(
            WEIGHTING,
            "the loss of each sample is right, and their mean is not: "
            f"{_text(own)} in the place of {_text(expected)}",
        )

    in_place = [found.expected.get(n, 0.0) for n in found.own]
    factor = _factor(list(found.own.values()), in_place)
    if factor is not None and len(found.wrong) > 1:
        return Finding(FACTOR, f"each loss is {_times(evidence, factor)}")
    return None


def _is_the_mean_alone(evidence: Evidence, losses: _Losses) -> bool:
    """Whether the mean is further from one process's than any sample's loss."""
    of_mean = evidence.differs("loss")
    if not of_mean or not losses.apart or losses.wrong:
        return False
    return of_mean[0].size > 10 * max(losses.apart.values())


def _at(positions: set[int]) -> str:
    named = join_some(ranges(sorted(positions)))
    return f"{'position' if len(positions) == 1 else 'positions'} {named} of the global batch"


def _text(number: float | None) -> str:
    """A number of a row, which has null for NaN and infinity."""
    return "no number" if number is None else f"{number:.6g}"


def counts(evidence: Evidence) -> Finding | None:
    """What samples count: of a script, which does not tell the loss of each, or the targets."""
    for name in ("count", "tokens"):
        own, expected = evidence.numbers.get(name), evidence.expected_numbers.get(name)
        if not evidence.differs(name) or own is None or expected is None:
            continue
        kind = MISSING_SAMPLE if own < expected else REPEATED_SAMPLE
        reason = f"samples count {own:g} in the place of {expected:g}"
        if name == "tokens":
            reason = f"{own:g} targets have a loss in the place of {expected:g}"
        return Finding(kind, reason)
    return None


def random_numbers(evidence: Evidence) -> Finding | None:
    if not evidence.loss_differs and not evidence.differs(GRADIENT):
        return None
    if not evidence.equal_without_dropout():
        return None
    return Finding(RANDOM, "with every probability of dropout at 0 the runs are equal")


def forward(evidence: Evidence) -> Finding | None:
    if not evidence.loss_differs:
        return None
    found = _Losses(evidence)
    if found.all_are_wrong:  # of a script, too, which tells of none
        which = "all samples"
    else:
        which = _at(found.wrong) if found.wrong else "some samples"
    of_gradients = evidence.names(GRADIENT)
    return Finding(
        FORWARD,
        f"with the same weights and samples the loss of {which} is another: what the forward "
        "computes depends on the layout",
        of_gradients[0] if of_gradients else None,
    )


# The gradient -------------------------------------------------------------------------------------


def parts_of_a_sum(evidence: Evidence) -> Finding | None:
    """Copies of a gradient differ between the ranks of an axis, and their sum is right."""
    for parameter in evidence.names(GRADIENT):
        name = f"{GRADIENT}/{parameter}"
        held = dict(evidence.held(name))
        for axis in evidence.layout.axes:
            if evidence.layout.size(axis) > 1 and _adds_up(evidence, name, held, axis):
                return Finding(
                    MISSING_SUM,
                    f"the ranks of {axis} hold different gradients of {parameter}, whose sum is "
                    "that of one process",
                    parameter,
                )
    return None


def _adds_up(evidence: Evidence, name: str, held: Mapping[int, Held], axis: str) -> bool:
    """Whether the ranks of an axis have different values for the same part, and all groups of them
    add up to the right one."""
    is_sum = False
    for group in evidence.layout.groups(axis):
        parts = [held[rank] for rank in group if rank in held]
        if not parts or any(part.part != parts[0].part for part in parts):
            continue
        values = [part.value.double() for part in parts]
        if len(values) < 2 or all(_is_near(value, values[0]) for value in values):
            continue
        expected = evidence.part(name, parts[0])
        total = torch.stack(values).sum(0)
        # Parts of a mean add up to as many times the mean.
        if not (_is_near(total, expected) or _is_near(total / len(values), expected)):
            return False
        is_sum = True
    return is_sum


def factor_of_gradients(evidence: Evidence) -> Finding | None:
    names = evidence.names(GRADIENT)
    for parameter in names:
        values = evidence.side_by_side(f"{GRADIENT}/{parameter}")
        factor = None if values is None else _factor(*values)
        if factor is not None:
            others = "" if len(names) == 1 else f", and {len(names) - 1} more differ"
            return Finding(
                FACTOR,
                f"the gradient of {parameter} is {_times(evidence, factor)}{others}",
                parameter,
            )
    return None


def _factor(own: Sequence[float] | Tensor, expected: Sequence[float] | Tensor) -> float | None:
    """The one number by which all values are multiplied; None: there is none, or it is 1."""
    x = torch.as_tensor(own, dtype=torch.float64).flatten()
    y = torch.as_tensor(expected, dtype=torch.float64).flatten()
    square = float(y @ y)
    if x.numel() < 2 or square == 0:
        return None
    factor = float(x @ y) / square
    if factor == 0 or _is_equal(factor, 1):
        return None
    return factor if _is_near(x, factor * y) else None


def _times(evidence: Evidence, factor: float) -> str:
    for size, how in ((factor, "the size of"), (1 / factor, "1 / the size of")):
        axes = evidence.axes(size)
        if axes:
            return f"{factor:.4g} times that of one process, {how} {' x '.join(axes)}"
    return f"{factor:.4g} times that of one process"


def _is_near(value: Tensor, expected: Tensor, limit: float = CLOSE) -> bool:
    size = float(expected.norm())
    return float((value - expected).norm()) <= limit * max(size, 1e-30)


def of_samples(evidence: Evidence) -> Finding | None:
    """A gradient is a sum of what samples add, each times a number."""
    names = evidence.names(GRADIENT)
    by_rank: dict[int, Tensor] = {}
    for rank in range(len(evidence.own)):
        own: dict[str, Held] = {}
        for name in names:
            part = evidence.own[rank].get(f"{GRADIENT}/{name}")
            if part is not None and part.value.numel():
                own[name] = part
        if not own:
            continue  # it has written none, or is another stage of a pipeline
        numbers = _numbers_of_samples(evidence, own)
        if numbers is None:
            return None
        by_rank[rank] = numbers
    if not by_rank:
        return None
    # Where each sample counts once, the samples do not explain what differs.
    if all(bool(_are_near(numbers, 1).all()) for numbers in by_rank.values()):
        return None
    finding = _of_shares(evidence, by_rank) or _of_numbers(by_rank)
    return finding._replace(parameter=names[0])


def _are_near(numbers: Tensor, others: Tensor | float) -> Tensor:
    return (numbers - others).abs() < NEAR_A_NUMBER


def _numbers_of_samples(evidence: Evidence, own: Mapping[str, Held]) -> Tensor | None:
    """By which number each sample is multiplied in a rank's gradients; None: they are no such sum,
    or one of them is not known. `own`: its parts of them, by parameter."""
    added_by_samples = evidence.of_samples
    if added_by_samples is None:
        return None
    # One row for each element, with what every sample adds to it, and its value on the rank.
    rows, values = [], []
    for parameter, held in own.items():
        if parameter not in added_by_samples:
            continue
        added = added_by_samples[parameter].double()  # (samples, ...)
        if not _is_near(added.sum(0), evidence.whole[f"{GRADIENT}/{parameter}"].double()):
            return None  # the step's loss is no sum over samples
        in_part = added[(slice(None), *held.part)] if added.dim() > 1 else added
        rows.append(in_part.reshape(len(added), -1).T)
        values.append(held.value.double().flatten())
    if not rows:
        return None
    matrix, value = torch.cat(rows), torch.cat(values)
    if not bool(matrix.isfinite().all() and value.isfinite().all()):
        return None  # LAPACK takes numbers only
    elements, samples = int(matrix.any(dim=1).sum()), matrix.shape[1]
    if elements <= samples:
        return None  # some numbers would give any gradient
    # Of columns of the same norm: a sample may add much less than another.
    norms = matrix.norm(dim=0).clamp(min=1e-30)
    numbers = torch.linalg.lstsq(matrix / norms, value[:, None], driver="gelsd").solution[:, 0]
    numbers = numbers / norms
    numbers[norms < 1e-20] = 1.0  # a sample without any target
    return numbers if _is_near(matrix @ numbers, value, 1e-5) else None


def _of_shares(evidence: Evidence, by_rank: Mapping[int, Tensor]) -> Finding | None:
    """Whether each rank has its own samples only."""
    shares = {rank: _share(evidence, rank) for rank in by_rank}
    if len(set(shares.values())) < 2:
        return None
    for rank, numbers in by_rank.items():
        is_own = torch.zeros(len(numbers), dtype=torch.bool)
        is_own[list(shares[rank])] = True
        own, others = numbers[is_own], numbers[~is_own]
        if own.numel() == 0 or not bool(_are_near(others, 0).all()):
            return None
        if not torch.allclose(own, own[0], rtol=NEAR_A_NUMBER):
            return None
    return Finding(
        MISSING_SUM,
        "each rank's gradients are those of its own samples, without the samples of other data "
        "ranks",
    )


def _share(evidence: Evidence, rank: int) -> range:
    recorded = evidence.ranks[rank]
    return range(recorded.first, recorded.first + recorded.real)


def _of_numbers(by_rank: Mapping[int, Tensor]) -> Finding:
    """What the numbers of the samples say."""
    numbers = torch.stack(list(by_rank.values()))  # (ranks, samples)
    missing = _positions(_are_near(numbers, 0).any(0))
    more = _positions((numbers > 1 + NEAR_A_NUMBER).any(0))
    are_whole = bool(_are_near(numbers, numbers.round()).all())
    if are_whole and missing:
        return Finding(MISSING_SAMPLE, f"the gradient has nothing of {_at(missing)}")
    if are_whole and more and len(more) < numbers.shape[1]:
        return Finding(REPEATED_SAMPLE, f"the gradient has {_at(more)} more than once")
    low, high = float(numbers.min()), float(numbers.max())
    return Finding(
        WEIGHTING,
        f"samples count {low:.3g} to {high:.3g} times as much in the gradient as in that of one "
        "process",
    )


def _positions(mask: Tensor) -> set[int]:
    return set(mask.nonzero().flatten().tolist())


def in_16_bits(evidence: Evidence) -> Finding | None:
    """Differences as small as the last digit of bfloat16, in numbers that have no further digits.

    A small difference alone may be that of a wrong formula, too.
    """
    if not 0 < _share_of_norm(evidence) < MOST_OF_16_BITS:
        return None
    names = evidence.names(GRADIENT)
    values = [held.value for name in names for _, held in evidence.held(f"{GRADIENT}/{name}")]
    mantissas = torch.cat([value.double().flatten() for value in values]).frexp().mantissa
    digits = mantissas[mantissas != 0] * 2.0**DIGITS_OF_16_BITS
    if not float((digits == digits.round()).double().mean()) > 0.5:
        return None
    return Finding(ROUNDING, f"gradients were rounded to 16 bits, {names[0]} first", names[0])


def _share_of_norm(evidence: Evidence) -> float:
    """The norm of what is wrong with gradients, beside that of the right ones; 0: none is held."""
    moved = size = 0.0
    for parameter in evidence.names(GRADIENT):
        values = evidence.side_by_side(f"{GRADIENT}/{parameter}")
        if values is None:
            continue
        own, expected = values
        moved += float((own - expected).square().sum())
        size += float(expected.square().sum())
    return math.sqrt(moved / size) if size else 0.0


def misplaced(evidence: Evidence) -> Finding | None:
    for parameter in evidence.names(GRADIENT):
        values = evidence.side_by_side(f"{GRADIENT}/{parameter}")
        if values is None:
            continue
        own, expected = values
        if not _is_near(own, expected) and _is_near(own.sort()[0], expected.sort()[0]):
            return Finding(
                MISPLACED, f"the gradient of {parameter} has the right numbers elsewhere", parameter
            )
    return None


def part_of_a_sequence(evidence: Evidence) -> Finding | None:
    """The losses are right and no sum of samples gives the gradient: where ranks share sequences,
    it lacks the tokens of others. Smaller than that of one process, and in its direction."""
    if evidence.layout.size("cp") == 1:
        return None
    for parameter in evidence.names(GRADIENT):
        name = f"{GRADIENT}/{parameter}"
        for _, held in evidence.held(name):
            own, expected = held.value.double().flatten(), evidence.part(name, held).flatten()
            size, whole_size = float(own.norm()), float(expected.norm())
            is_smaller = size < LARGEST_PART * whole_size
            if is_smaller and float(own @ expected) > 0.2 * size * whole_size:
                return Finding(
                    MISSING_SUM,
                    f"the gradient of {parameter} is a part of that of one process, and no sum of "
                    "samples: probably that of one rank's part of the sequences (cp)",
                    parameter,
                )
    return None


def backward(evidence: Evidence) -> Finding | None:
    names = evidence.names(GRADIENT)
    if not names:
        return None
    reason = (
        f"the losses are right, and the gradients of {plural(len(names), 'parameter')} are not: "
        f"{join_some(names, 3)}"
    )
    share = _share_of_norm(evidence)
    if 0 < share < MOST_OF_16_BITS:
        reason += f" (by {share:.1g} of their norm, as messages of 16 bits in a backward may do)"
    return Finding(BACKWARD, reason, names[0])


# The update ---------------------------------------------------------------------------------------


def norm(evidence: Evidence) -> Finding | None:
    if not evidence.differs("grad_norm"):
        return None
    own, expected = evidence.numbers.get("grad_norm"), evidence.expected_numbers.get("grad_norm")
    reason = f"it is {_text(own)}, and that of these gradients is {_text(expected)}"
    if own is None or expected is None:
        return Finding(NORM, reason)
    squares = {
        name.partition("/")[2]: float(gradient.double().square().sum())
        for name, gradient in evidence.whole.items()
        if name.startswith(GRADIENT)
    }
    more = own**2 - expected**2
    experts = sum(square for name, square in squares.items() if ".experts." in name)
    for which, square in (("experts", experts), ("all parameters", sum(squares.values()))):
        times = 1 + more / square if square else 0.0
        if times <= 0:
            continue
        for number, how in ((times, ""), (1 / times, "1 / ")):
            if round(number) > 1 and math.isclose(number, round(number), rel_tol=1e-4):
                counted = f"it counts the gradients of {which} {how}{number:.4g} times"
                return Finding(NORM, f"{reason}: {counted}")
    return Finding(NORM, reason)


def clipping(evidence: Evidence) -> Finding | None:
    """Gradients were multiplied by another number before the update."""
    if not evidence.differs(WEIGHT):
        return None
    expected = evidence.expected[0].scales or {}
    for rank, recorded in enumerate(evidence.ranks):
        for name, scale in (recorded.scales or {}).items():
            right = expected.get(name)
            if scale is None or not right or _is_equal(scale, right):
                continue
            return Finding(
                CLIPPING,
                f"rank {rank} multiplies its gradients by {scale / right:.4g} times the number of "
                "one process",
                evidence.names(WEIGHT)[0],
            )
    return None


def stale_copies(evidence: Evidence) -> Finding | None:
    for parameter in evidence.names(WEIGHT):
        name = f"{WEIGHT}/{parameter}"
        held = dict(evidence.held(name))
        # A rank that has written nothing has what one process has. It is known to have the same
        # part only where every rank has all of the parameter.
        all_have_all = evidence.layout.size("pp") == 1 and all(
            part.value.numel() == evidence.whole[name].numel() for part in held.values()
        )
        some_are_right = all_have_all and len(held) < len(evidence.own)
        for rank, own in held.items():
            copies = [other for other in held.values() if other.part == own.part]
            if some_are_right or not all(_is_copy(own, other) for other in copies):
                return Finding(
                    STALE,
                    f"rank {rank} has other values of {parameter} after the update than ranks with "
                    "the same part",
                    parameter,
                )
    return None


def _is_copy(own: Held, other: Held) -> bool:
    # NaN, which is not equal to itself, is the same value on both.
    return _is_near(own.value.nan_to_num(), other.value.nan_to_num())


def decay_or_rate(evidence: Evidence) -> Finding | None:
    """What an update has too much is a multiple of the weights, or of the update."""
    for parameter in evidence.names(WEIGHT):
        name, before = f"{WEIGHT}/{parameter}", f"before/{parameter}"
        if before not in evidence.whole:
            continue
        for _, held in evidence.held(name):
            after = evidence.part(name, held)
            old = evidence.part(before, held)
            apart = (held.value.double() - after).flatten()
            of_weights = _multiple(apart, old.flatten())
            if of_weights is not None:
                than = "more" if of_weights < 0 else "less"
                return Finding(
                    DECAY,
                    f"{parameter} has lost {abs(of_weights):.3g} of its value {than} than it "
                    "should",
                    parameter,
                )
            of_update = _multiple(apart, (after - old).flatten())
            if of_update is not None:
                return Finding(
                    RATE,
                    f"the update of {parameter} is {1 + of_update:.4g} times that of one process",
                    parameter,
                )
    return None


def _multiple(value: Tensor, of: Tensor) -> float | None:
    """The number by which `of` has to be multiplied; None: there is none, or it is 0, as of a part
    that is right."""
    square = float(of @ of)
    if square == 0 or value.numel() < 2 or not bool(value.any()):
        return None
    number = float(value @ of) / square
    # An update is a small difference of weights, and has fewer digits than these.
    return number if _is_near(value, number * of, 1e-3) else None


def update(evidence: Evidence) -> Finding | None:
    names = evidence.names(WEIGHT)
    if not names:
        return None
    return Finding(
        UPDATE,
        f"gradients and clipping are equal, and the weights after the update are not: "
        f"{join_some(names, 3)}",
        names[0],
    )


JUDGES: tuple[Callable[[Evidence], Finding | None], ...] = (
    initial_values,
    other_samples,
    losses,
    counts,
    random_numbers,
    forward,
    parts_of_a_sum,
    factor_of_gradients,
    of_samples,
    in_16_bits,
    misplaced,
    part_of_a_sequence,
    backward,
    norm,
    clipping,
    stale_copies,
    decay_or_rate,
    update,
)
