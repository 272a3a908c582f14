"""Which checkpoints stay: plain rules over steps and evaluations, for a run as for `meshtrain checkpoint prune`."""

import math
from collections.abc import Collection, Iterable, Mapping

BEST = (
    ("accuracy", False),
    ("eval_loss", True),
)  # what an evaluation is judged by if it has it, and if lower is better
SAMPLES = "eval_samples"  # of how many samples an evaluation in a manifest was made; older ones do not say


def judged_by(evaluations: Iterable[Mapping[str, float]]) -> tuple[str, bool]:
    """The number by which the best of these evaluations is found, and whether lower is better."""
    there = {name for values in evaluations for name in values}
    return next(((name, lower) for name, lower in BEST if name in there), BEST[-1])


def which(
    steps: Collection[int],
    evaluations: Mapping[int, Mapping[str, float]],
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: bool,
) -> set[int]:
    """The steps whose checkpoints stay: each that one of the rules keeps. The newest always stays.

    Args:
        steps: of the complete checkpoints.
        evaluations: step -> its evaluation, as a manifest has it; NaN and infinity are no values.
        keep_last: how many of the newest; None keeps all.
        keep_every: the multiples of this number; None keeps none for that reason.
        keep_best: the one with the best value, of equal ones the newest. Evaluations of different numbers of samples
            are not compared: the best of each stays.
    """
    if keep_last is None:
        return set(steps)
    ordered = sorted(steps)
    kept = set(ordered[-max(1, keep_last) :])
    if keep_every is not None:
        kept |= {step for step in ordered if step % keep_every == 0}
    if keep_best:
        found = {step: evaluations[step] for step in ordered if step in evaluations}
        name, lower = judged_by(found.values())
        best: dict[float | None, tuple[float, int]] = {}  # samples -> value, the higher the better, and step
        for step, evaluation in found.items():
            value = evaluation.get(name, math.nan)
            if math.isfinite(value):
                samples = evaluation.get(SAMPLES)
                best[samples] = max((-value if lower else value, step), best.get(samples, (-math.inf, step)))
        kept |= {step for _, step in best.values()}
    return kept
