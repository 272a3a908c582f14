"""Says of what kind the first difference of a run is, from all that was recorded of its step.

A judge below looks at one thing and returns what it has found, or None. They go through a step in
the order in which it computes: what is wrong early makes everything after it wrong.

For gradients there is one more run of one process, with a microbatch for each sample, so that what
each sample adds is known. A wrong gradient that is a sum of these, each times a number, shows which
samples are missing, or count otherwise.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    numbers: Mapping[str, float]
    expected_numbers: Mapping[str, float]
    whole: dict[str, Tensor]
    own: Sequence[Tensors]
    contributions: Callable[[], dict[str, Tensor] | None] = lambda: None
    equal_without_dropout: Callable[[], bool | None] = lambda: None
    _samples: list[dict[str, Tensor] | None] = field(default_factory=list)

    def differs(self, what: str) -> list[Difference]:
        return [difference for difference in self.differences if difference.what == what]

    def names(self, what: str) -> list[str]:
        """The parameters whose gradient or weight differs, in the order of the model."""
        return [str(difference.parameter) for difference in self.differs(what)]

    def held(self, name: str) -> Iterator[tuple[int, Held]]:
        """The parts that ranks have written of a tensor, by rank."""
        for rank, tensors in enumerate(self.own):
            if name in tensors and tensors[name].value.numel():
                yield rank, tensors[name]

    def part(self, name: str, held: Held) -> Tensor:
        """What one process has in the place of a rank's part."""
        whole = self.whole[name]
        value = whole[held.part] if whole.dim() else whole
        return value.double().reshape(held.value.shape)

    def of_samples(self) -> dict[str, Tensor] | None:
        if not self._samples:
            self._samples.append(self.contributions())
        return self._samples[0]

    def axes(self, size: float) -> list[str]:
        """The axes of this size, and those that are so together."""
        layout = self.layout
        single = [axis for axis in layout.axes if math.isclose(layout.size(axis), size)]
        if not single and math.isclose(layout.world_size, size):
            return list(layout.axes)
        return single


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
    if missing and not more:
        return Finding(MISSING_SAMPLE, f"nobody reads {_listed(missing)}")
    if more and all(sample in expected for sample in more):
        return Finding(REPEATED_SAMPLE, f"{_listed(more)} read more than once")
    return Finding(OTHER_SAMPLE, f"{_listed(more)} read in the place of {_listed(missing)}")


def _listed(samples: Mapping[tuple, int]) -> str:
    indices = sorted({int(index) for _, index, _ in samples})
    return f"{'sample' if len(indices) == 1 else 'samples'} {join_some(ranges(indices))}"


# The forward --------------------------------------------------------------------------------------


def losses(evidence: Evidence) -> Finding | None:
    """Which losses of samples are others."""
    own, expected = sample_losses(evidence.ranks), sample_losses(evidence.expected)
    padding = padding_losses(evidence.ranks)
    largest = max(map(abs, expected.values()), default=0.0)
    if evidence.differs("loss") and abs(padding) > CLOSE * largest and _same(own, expected):
        return Finding(REPEATED_SAMPLE, "padding has a loss, which is added to that of the samples")
    if not evidence.differs(SAMPLE_LOSS) and not evidence.differs("loss"):
        return None
    apart = {n for n, loss in expected.items() if not _close(own.get(n, 0.0), loss, largest)}
    if apart and all(abs(own.get(n, 0.0)) <= CLOSE * largest for n in apart):
        if len(apart) == len(expected):
            return None  # the loss is not where it is looked for
        return Finding(
            MISSING_SAMPLE, f"{_at(apart)} {'has' if len(apart) == 1 else 'have'} no loss"
        )
    if not apart and expected:
        return Finding(
            WEIGHTING,
            "the loss of each sample is right, and their mean is not: "
            f"{evidence.numbers['loss']:.6g} in the place of "
            f"{evidence.expected_numbers['loss']:.6g}",
        )
    factor = _factor(list(own.values()), [expected.get(n, 0.0) for n in own])
    if factor is not None and len(apart) > 1:
        return Finding(FACTOR, f"each loss is {_times(evidence, factor)}")
    return None


def _same(own: Mapping[int, float], expected: Mapping[int, float]) -> bool:
    largest = max(map(abs, expected.values()), default=0.0)
    return own.keys() == expected.keys() and all(
        _close(own[n], expected[n], largest) for n in expected
    )


def _close(value: float, expected: float, size: float) -> bool:
    return abs(value - expected) <= CLOSE * size


def _at(positions: set[int]) -> str:
    named = join_some(ranges(sorted(positions)))
    return f"{'position' if len(positions) == 1 else 'positions'} {named} of the global batch"


def counts(evidence: Evidence) -> Finding | None:
    """What samples count: of a script, which does not tell the loss of each, or the targets."""
    if not evidence.differs("count") and not evidence.differs("tokens"):
        return None
    name = "count" if evidence.differs("count") else "tokens"
    own, expected = evidence.numbers[name], evidence.expected_numbers[name]
    reason = f"samples count {own:g} in the place of {expected:g}"
    if name == "tokens":
        reason = f"{own:g} targets have a loss in the place of {expected:g}"
    return Finding(MISSING_SAMPLE if own < expected else REPEATED_SAMPLE, reason)


def random_numbers(evidence: Evidence) -> Finding | None:
    forward = evidence.differs(SAMPLE_LOSS) or evidence.differs("loss")
    backward = evidence.differs(GRADIENT)
    if not (forward or backward) or not evidence.equal_without_dropout():
        return None
    return Finding(RANDOM, "with every probability of dropout at 0 the runs are equal")


def forward(evidence: Evidence) -> Finding | None:
    if not evidence.differs(SAMPLE_LOSS) and not evidence.differs("loss"):
        return None
    own, expected = sample_losses(evidence.ranks), sample_losses(evidence.expected)
    largest = max(map(abs, expected.values()), default=0.0)
    apart = {n for n, loss in expected.items() if not _close(own.get(n, 0.0), loss, largest)}
    which = "all samples" if len(apart) == len(expected) else _at(apart)
    first = evidence.names(GRADIENT)
    return Finding(
        FORWARD,
        f"with the same weights and samples the loss of {which} is another: what the forward "
        "computes depends on the layout",
        first[0] if first else None,
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
    for parameter in evidence.names(GRADIENT):
        name = f"{GRADIENT}/{parameter}"
        own = [(held.value.double(), evidence.part(name, held)) for _, held in evidence.held(name)]
        if not own:
            continue
        factor = _factor(
            torch.cat([value.flatten() for value, _ in own]),
            torch.cat([expected.flatten() for _, expected in own]),
        )
        if factor is not None:
            names = evidence.names(GRADIENT)
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
    is_one = abs(factor - 1) <= CLOSE
    return factor if _is_near(x, factor * y) and factor != 0 and not is_one else None


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
    if not evidence.differs(GRADIENT):
        return None
    by_rank = {}
    for rank in range(len(evidence.own)):
        numbers = _numbers_of_samples(evidence, rank)
        if numbers is not None:
            by_rank[rank] = numbers
    # A stage whose gradients are right says nothing about those of another one.
    names = evidence.names(GRADIENT)
    concerned = {rank for name in names for rank, _ in evidence.held(f"{GRADIENT}/{name}")}
    if not by_rank or concerned - by_rank.keys():
        return None
    first = names[0]
    finding = _of_shares(evidence, by_rank) or _of_numbers(evidence, by_rank)
    return finding._replace(parameter=first)


def _numbers_of_samples(evidence: Evidence, rank: int) -> Tensor | None:
    """By which number each sample is multiplied in the gradients of a rank; None: they are no such
    sum, or one of them is not known."""
    parts = evidence.of_samples()
    if parts is None:
        return None
    columns, values = [], []
    for parameter in evidence.names(GRADIENT):
        held = evidence.own[rank].get(f"{GRADIENT}/{parameter}")
        if held is None or held.value.numel() == 0 or parameter not in parts:
            continue
        added = parts[parameter]
        if not _is_near(added.double().sum(0), evidence.whole[f"{GRADIENT}/{parameter}"].double()):
            return None  # the step's loss is no sum over samples
        own = added[(slice(None), *held.part)] if added.dim() > 1 else added
        columns.append(own.double().reshape(len(added), -1))
        values.append(held.value.double().flatten())
    if not columns:
        return None
    matrix, value = torch.cat(columns, 1).T, torch.cat(values)
    if len(matrix) < matrix.shape[1]:
        return None  # any numbers would do
    # By the normal equations of normalized columns: there are few samples, and many elements.
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
        inside = torch.zeros(len(numbers), dtype=torch.bool)
        inside[list(shares[rank])] = True
        if bool((numbers[~inside].abs() > 1e-3).any()) or not bool(numbers[inside].numel()):
            return None
        if not torch.allclose(numbers[inside], numbers[inside][0], rtol=1e-3):
            return None
    return Finding(
        MISSING_SUM,
        "each rank's gradients are those of its own samples, without the samples of other data "
        "ranks",
    )


def _share(evidence: Evidence, rank: int) -> range:
    recorded = evidence.ranks[rank]
    return range(recorded.first, recorded.first + recorded.real)


def _of_numbers(evidence: Evidence, by_rank: Mapping[int, Tensor]) -> Finding:
    """What the numbers of the samples say."""
    numbers = torch.stack(list(by_rank.values()))
    zero = _positions((numbers.abs() < 1e-3).any(0))
    whole = numbers.round()
    if bool(((numbers - whole).abs() < 1e-3).all()):
        more = _positions((whole > 1).any(0))
        if zero:
            return Finding(MISSING_SAMPLE, f"the gradient has nothing of {_at(zero)}")
        if more and len(more) < numbers.shape[1]:
            return Finding(REPEATED_SAMPLE, f"the gradient has {_at(more)} more than once")
    if zero and bool((((numbers - 1).abs() < 1e-3) | (numbers.abs() < 1e-3)).all()):
        return Finding(MISSING_SAMPLE, f"the gradient has nothing of {_at(zero)}")
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
        name = f"{GRADIENT}/{parameter}"
        for _, held in evidence.held(name):
            expected = evidence.part(name, held)
            moved += float((held.value.double() - expected).square().sum())
            size += float(expected.square().sum())
    return math.sqrt(moved / size) if size else 0.0


def misplaced(evidence: Evidence) -> Finding | None:
    for parameter in evidence.names(GRADIENT):
        name = f"{GRADIENT}/{parameter}"
        own, expected = [], []
        for _, held in evidence.held(name):
            own.append(held.value.double().flatten())
            expected.append(evidence.part(name, held).flatten())
        if own and _is_near(torch.cat(own).sort()[0], torch.cat(expected).sort()[0]):
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
            sizes = float(own.norm() * expected.norm())
            if sizes and float(own @ expected) > 0.2 * sizes and own.norm() < expected.norm():
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
    own, expected = evidence.numbers["grad_norm"], evidence.expected_numbers["grad_norm"]
    reason = f"it is {own:.6g}, and that of these gradients is {expected:.6g}"
    squares = {
        name.partition("/")[2]: float(gradient.double().square().sum())
        for name, gradient in evidence.whole.items()
        if name.startswith(GRADIENT)
    }
    more = own**2 - expected**2
    experts = [name for name in squares if ".experts." in name]
    for which, names in (("experts", experts), ("all parameters", list(squares))):
        of_names = sum(squares[name] for name in names)
        if not of_names:
            continue
        times = 1 + more / of_names
        for size, how in ((times, f"{times:.4g} times"), (1 / times, f"1 / {1 / times:.4g} times")):
            if times > 0 and math.isclose(size, round(size), rel_tol=1e-4) and round(size) > 1:
                return Finding(NORM, f"{reason}: it counts the gradients of {which} {how}")
    return Finding(NORM, reason)


def clipping(evidence: Evidence) -> Finding | None:
    """Gradients were multiplied by another number before the update."""
    if not evidence.differs(WEIGHT):
        return None
    expected = evidence.expected[0].scales or {}
    ratios: list[tuple[int, float]] = []
    for rank, recorded in enumerate(evidence.ranks):
        for name, scale in (recorded.scales or {}).items():
            right = expected.get(name)
            if scale is not None and right:
                ratios.append((rank, scale / right))
    wrong = [(rank, ratio) for rank, ratio in ratios if abs(ratio - 1) > CLOSE]
    if not wrong:
        return None
    names = evidence.names(WEIGHT)
    rank, ratio = wrong[0]
    return Finding(
        CLIPPING,
        f"rank {rank} multiplies its gradients by {ratio:.4g} times the number of one process",
        names[0],
    )


def stale_copies(evidence: Evidence) -> Finding | None:
    for parameter in evidence.names(WEIGHT):
        name = f"{WEIGHT}/{parameter}"
        held = [(rank, part) for rank, part in evidence.held(name)]
        ranks = {rank for rank, _ in held}
        # A rank that has written nothing has what one process has.
        others = [rank for rank in range(len(evidence.own)) if rank not in ranks]
        for rank, part in held:
            same_place = [other for _, other in held if other.part == part.part]
            differs = any(not _is_near(other.value, part.value) for other in same_place)
            alone = others and len(same_place) < len(evidence.own) and _covers(part, evidence, name)
            if differs or alone:
                return Finding(
                    STALE,
                    f"rank {rank} has other values of {parameter} after the update than ranks with "
                    "the same part",
                    parameter,
                )
    return None


def _covers(part: Held, evidence: Evidence, name: str) -> bool:
    """Whether a part is the whole tensor, so that every rank with the parameter has it."""
    return part.value.numel() == evidence.whole[name].numel() and evidence.layout.size("pp") == 1


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
                return Finding(
                    DECAY,
                    f"{parameter} has lost {-of_weights:.3g} of its value more than it should",
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
    """The number by which `of` has to be multiplied; None: there is none."""
    square = float(of @ of)
    if square == 0 or value.numel() < 2:
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
