"""Partition of a model into pipeline stages: contiguous runs of its blocks, balanced by cost. Pure.

The slowest stage limits a pipeline, so its cost is minimized; among the splits with that minimum,
the one whose stages differ least is chosen. Costs are numbers per block (from
`modeling.flops.block_flops`).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from meshtrain.errors import plural


def blocks_of(model: Any) -> list[Any]:
    """A model's blocks in execution order: what its function `blocks` returns, or the layers of an
    nn.Sequential; of any other model, the model itself. A submodule or a number of the name
    `blocks`, as the transformers of timm have, is the model's own."""
    blocks = getattr(model, "blocks", None)
    is_submodule = hasattr(blocks, "named_modules")
    if callable(blocks) and not is_submodule:
        return blocks()
    if _runs_in_sequence(model):
        layers = list(model._modules.values())
        # A layer in two places is no block of its own in either of them.
        if layers and len(set(map(id, layers))) == len(layers):
            return layers
    return [model]


def _runs_in_sequence(model: Any) -> bool:
    """Whether a model is an nn.Sequential whose class has not another forward. By name: what is
    pure knows no torch."""
    forward = getattr(type(model), "forward", None)
    return getattr(forward, "__qualname__", "") == "Sequential.forward"


class StageSplitError(ValueError):
    """Blocks that cannot form the requested stages; the message says what would work."""


@dataclass(frozen=True)
class StageSplit:
    """The split of blocks into stages."""

    # for each stage, its first block and the one after its last
    bounds: tuple[tuple[int, int], ...]
    costs: tuple[float, ...]  # for each stage, the sum of its blocks' costs

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(end - first for first, end in self.bounds)

    @property
    def imbalance(self) -> float:
        """The excess of the largest stage over the mean, as a fraction of the mean."""
        total = math.fsum(self.costs)
        if not total:
            return 0.0
        return max(self.costs) * len(self.costs) / total - 1

    def describe(self) -> str:
        """One line of text: `18 blocks in 4 stages: 5 + 5 + 5 + 3, the largest stage 4 % above the
        mean`."""
        stages, blocks = len(self.bounds), self.bounds[-1][1]
        line = f"{plural(blocks, 'block')} in {plural(stages, 'stage')}"
        if stages == 1:
            return line
        if stages > 16:
            sizes = f"{min(self.counts)} to {max(self.counts)} each"
        else:
            sizes = " + ".join(map(str, self.counts))
        excess = f"{100 * self.imbalance:.0f} %" if self.imbalance >= 0.005 else "less than 1 %"
        return f"{line}: {sizes}, the largest stage {excess} above the mean"


def split_blocks(
    costs: Sequence[float],
    ranks: int,
    stages_per_rank: int = 1,
    blocks_per_stage: Sequence[int] | None = None,
) -> StageSplit:
    """Splits blocks into `ranks * stages_per_rank` stages of at least one block each.

    Args:
        costs: the cost of each block, in any unit.
        blocks_per_stage: the number of blocks of each stage; None: balanced.

    Raises StageSplitError: more stages than blocks, or a `blocks_per_stage` that does not fit.
    """
    stages = ranks * stages_per_rank
    if stages < 1:
        raise StageSplitError(
            f"{ranks} ranks x {stages_per_rank} stages per rank: use at least one of each"
        )
    if not all(0 <= cost < math.inf for cost in costs):
        raise StageSplitError(
            f"the costs of the blocks are {list(costs)}: none may be negative or not finite"
        )
    if stages > len(costs):
        raise StageSplitError(_too_many(len(costs), ranks, stages_per_rank))
    if blocks_per_stage is None:
        ends = _balanced_ends([float(cost) for cost in costs], stages)
    else:
        _check_counts(blocks_per_stage, len(costs), stages)
        ends = list(accumulate(blocks_per_stage))
    bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
    stage_costs = tuple(math.fsum(costs[first:end]) for first, end in bounds)
    return StageSplit(bounds, stage_costs)


def _too_many(blocks: int, ranks: int, stages_per_rank: int) -> str:
    """The sentence for more stages than blocks, with all ways to have fewer or more."""
    stages = ranks * stages_per_rank
    most_ranks = blocks // stages_per_rank
    most_each = blocks // ranks
    ways = []
    if most_ranks:
        ways.append(
            f"at most {plural(most_ranks, 'rank')} with {plural(stages_per_rank, 'stage')} each"
        )
    if most_each and stages_per_rank > 1:
        ways.append(f"{plural(ranks, 'rank')} with at most {plural(most_each, 'stage')} each")
    elif stages_per_rank > 1:
        ways.append(f"at most {plural(blocks, 'rank')} with 1 stage each")
    ways.append(f"a model of at least {stages:,} blocks")
    return (
        f"{plural(blocks, 'block')} cannot form {stages:,} stages ({plural(ranks, 'rank')} with "
        f"{plural(stages_per_rank, 'stage')} each): use {', or '.join(ways)}"
    )


def _check_counts(counts: Sequence[int], blocks: int, stages: int) -> None:
    split = f"the split {list(counts)}"
    if len(counts) != stages:
        raise StageSplitError(
            f"{split} has {plural(len(counts), 'number')}, and there are "
            f"{plural(stages, 'stage')}: give the number of blocks of each stage, or none to have "
            "them balanced"
        )
    if min(counts) < 1:
        raise StageSplitError(f"{split} has a stage without blocks: give each at least 1")
    if sum(counts) != blocks:
        raise StageSplitError(
            f"{split} is for {plural(sum(counts), 'block')}, and the model has {blocks} (embedding "
            f"and head included): make the numbers add up to {blocks}"
        )


def _balanced_ends(costs: Sequence[float], stages: int) -> list[int]:
    """The end of each stage: minimizes the largest stage, and then the sum of squares.

    The limit on a stage is found first. Then, by dynamic programming over the stages:

        best[end] = min over begin of best_so_far[begin] + cost(begin, end)^2

    where `best[end]` is the least sum of squares of stages that hold the blocks before `end`.
    """
    before = list(accumulate(costs, initial=0.0))  # the total cost of all earlier blocks
    limit = _smallest_limit(before, stages)
    first_begin = [_reach_back(before, end, limit) for end in range(len(before))]

    best = {0: 0.0}
    begins: list[dict[int, int]] = []  # for each stage: its end -> its best begin
    for _ in range(stages):
        best_so_far, best = best, {}
        begin_of: dict[int, int] = {}
        for end in range(1, len(before)):
            candidates = []
            for begin in range(first_begin[end], end):
                if begin in best_so_far:
                    cost = before[end] - before[begin]
                    candidates.append((best_so_far[begin] + cost**2, begin))
            if candidates:
                best[end], begin_of[end] = min(candidates)
        begins.append(begin_of)

    # Backwards from the last block: a stage ends where the next one begins.
    ends = [len(costs)]
    for begin_of in reversed(begins[1:]):
        ends.append(begin_of[ends[-1]])
    return ends[::-1]


def _smallest_limit(before: Sequence[float], stages: int) -> float:
    """The smallest limit on the cost of a stage that some split satisfies."""
    low, high = 0.0, before[-1]  # `low` is too small, `high` suffices
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return high  # neighbouring floats
        reached = _filled(before, stages, middle)
        if reached is None:
            low = middle
        else:
            high = reached


def _filled(before: Sequence[float], stages: int, limit: float) -> float | None:
    """The cost of the largest stage if each takes as many blocks as the limit allows; None if
    blocks are left over."""
    end, largest = 0, 0.0
    for _ in range(stages):
        begin, end = end, _reach(before, end, limit)
        largest = max(largest, before[end] - before[begin])
    return largest if end == len(before) - 1 else None


def _reach(before: Sequence[float], begin: int, limit: float) -> int:
    """The largest possible end of a stage that begins at `begin`."""
    after = range(begin, len(before))
    return begin + bisect_left(after, True, key=lambda end: before[end] - before[begin] > limit) - 1


def _reach_back(before: Sequence[float], end: int, limit: float) -> int:
    """The smallest possible begin of a stage that ends at `end`."""
    return bisect_left(range(end), True, key=lambda begin: before[end] - before[begin] <= limit)
