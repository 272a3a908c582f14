"""Retention: which checkpoints are kept, in a run and by `meshtrain checkpoint prune`, and deletion
of the others."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from meshtrain.checkpoint.directory import (
    TakenError,
    complete_steps,
    name_of,
    read_manifest,
    remove,
)
from meshtrain.errors import InputError, bytes_text

# metrics in order of preference; whether lower is better
BEST = (
    ("accuracy", False),
    ("eval_loss", True),
)
# number of samples of an evaluation in a manifest; older manifests lack it
SAMPLES = "eval_samples"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: each that any of the rules keeps. The newest is always kept."""

    keep_last: int | None = 3  # how many of the newest; None keeps all
    # keeps steps that are multiples of this number; None: no such rule
    keep_every: int | None = None
    keep_best: bool = False  # keeps the one with the best evaluation, of equal ones the newest


def best_metric(evaluations: Iterable[Mapping[str, float]]) -> tuple[str, bool]:
    """The metric by which the best of these evaluations is chosen, and whether lower is better."""
    names = {name for values in evaluations for name in values}
    return next(((name, lower) for name, lower in BEST if name in names), BEST[-1])


def steps_to_keep(
    steps: Collection[int], evaluations: Mapping[int, Mapping[str, float]], rules: Retention
) -> set[int]:
    """The steps of complete checkpoints to keep, given the evaluations in their manifests, if any.

    NaN and infinity do not count. Evaluations of different numbers of samples are not compared:
    each best one is kept.
    """
    if rules.keep_last is None:
        return set(steps)
    ordered = sorted(steps)
    retained = set(ordered[-max(1, rules.keep_last) :])
    if rules.keep_every is not None:
        retained |= {step for step in ordered if step % rules.keep_every == 0}
    if rules.keep_best:
        evaluated = {step: evaluations[step] for step in ordered if step in evaluations}
        name, lower = best_metric(evaluated.values())
        best: dict[
            float | None, tuple[float, int]
        ] = {}  # samples -> (value, higher is better; step)
        for step, evaluation in evaluated.items():
            value = evaluation.get(name, math.nan)
            if math.isfinite(value):
                samples = evaluation.get(SAMPLES)
                best[samples] = max(
                    (-value if lower else value, step), best.get(samples, (-math.inf, step))
                )
        retained |= {step for _, step in best.values()}
    return retained


class Pruner:
    """On rank 0: deletes checkpoints that no rule keeps, and warns before the disk is full."""

    def __init__(
        self,
        folder: Path,
        keep: Retention,
        checkpoint_bytes: int,
        in_use: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`in_use`: returns the step of a checkpoint that is being read now, which is kept."""
        self.notes: list[str] = []  # lines to print
        self._folder, self._keep, self._checkpoint_bytes = folder, keep, checkpoint_bytes
        self._in_use = in_use
        self._evaluations: dict[
            int, dict[str, float]
        ] = {}  # by step; an empty dict if there was none
        self._warned = False

    def prune(self, step: int, evaluation: Mapping[str, float] | None) -> None:
        """Deletes superfluous checkpoints. Call it when the checkpoint of `step` is complete, with
        its evaluation."""
        self._evaluations[step] = dict(evaluation or {})
        try:
            for old in self._superfluous(step):
                remove(self._folder / name_of(old))
            free = disk_usage(self._folder).free
        except (OSError, TakenError) as error:
            self.notes.append(f"warning: an old checkpoint could not be deleted: {error}")
            return
        short = free < 2 * self._checkpoint_bytes
        if short and not self._warned:
            self.notes.append(
                f"warning: the file system of {self._folder.absolute()} has {bytes_text(free)} "
                "free, "
                "which is not enough for two more checkpoints of "
                f"{bytes_text(self._checkpoint_bytes)} each"
            )
        self._warned = short

    def _superfluous(self, step: int) -> set[int]:
        steps = complete_steps(self._folder)
        for old in steps if self._keep.keep_best else ():
            if old not in self._evaluations:  # written by an earlier job
                self._evaluations[old] = {}
                with suppress(InputError):  # a damaged checkpoint cannot be the best one
                    self._evaluations[old] |= (
                        read_manifest(self._folder / name_of(old))[0].evaluation or {}
                    )
        retained = steps_to_keep({*steps, step}, self._evaluations, self._keep)
        return set(steps) - retained - {step, self._in_use()}
