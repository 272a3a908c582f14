"""Which checkpoints stay: plain rules over steps and evaluations, for a run as for `meshtrain checkpoint prune`."""

import math
from collections.abc import Collection, Iterable, Mapping

BEST = (
    ("accuracy", False),
    ("eval_loss", True),
)  # what an evaluation is judged by if it has it, and if lower is better


def judged_by(evaluations: Iterable[Mapping[str, float]]) -> tuple[str, bool]:
    """The number by which the best of these evaluations is found, and whether lower is better."""
    there = {name for values in evaluations for name in values}
    return next(((name, lower) for name, lower in BEST if name in there), BEST[-1])


def which(
    steps: Collection[int],
    evaluations: Mapping[int, float],
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: bool,
    lower_is_better: bool = True,
) -> set[int]:
    """The steps whose checkpoints stay: each that one of the rules keeps. The newest always stays.

    Args:
        steps: of the complete checkpoints.
        evaluations: step -> value, of the steps that were evaluated; NaN and infinity are no values.
        keep_last: how many of the newest; None keeps all.
        keep_every: the multiples of this number; None keeps none for that reason.
        keep_best: the one with the best value, of equal ones the newest.
    """
    if keep_last is None:
        return set(steps)
    ordered = sorted(steps)
    kept = set(ordered[-max(1, keep_last) :])
    if keep_every is not None:
        kept |= {step for step in ordered if step % keep_every == 0}
    values = {step: evaluations[step] for step in ordered if math.isfinite(evaluations.get(step, math.nan))}
    if keep_best and values:
        sign = -1 if lower_is_better else 1
        kept.add(max(values, key=lambda step: (sign * values[step], step)))
    return kept
