"""Retention: which checkpoints are kept, in a run and by `meshtrain checkpoint prune`, and deletion
of the others."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from meshtrain.checkpoint.directory import complete_steps, name_of, read_manifest, remove
from meshtrain.checkpoint.folder_lock import TakenError
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
    names: set[str] = set()
    for evaluation in evaluations:
        names |= evaluation.keys()
    for name, lower in BEST:
        if name in names:
            return name, lower
    return BEST[-1]


def steps_to_keep(
    steps: Collection[int], evaluations: Mapping[int, Mapping[str, float]], rules: Retention
) -> set[int]:
    """The steps of complete checkpoints to keep, given the evaluations in their manifests, if
    any."""
    if rules.keep_last is None:
        return set(steps)
    ordered = sorted(steps)
    retained = set(ordered[-max(1, rules.keep_last) :])
    if rules.keep_every is not None:
        retained |= {step for step in ordered if step % rules.keep_every == 0}
    if rules.keep_best:
        evaluated = {step: evaluations[step] for step in ordered if step in evaluations}
        retained |= _best_steps(evaluated)
    return retained


def _best_steps(evaluations: Mapping[int, Mapping[str, float]]) -> set[int]:
    """The steps with the best evaluations; `evaluations` by step, ascending.

    NaN and infinity do not count. Evaluations of different numbers of samples are not compared:
    each best one is kept.
    """
    name, lower_is_better = best_metric(evaluations.values())
    best: dict[float | None, tuple[float, int]] = {}  # number of samples -> (score, step)
    for step, evaluation in evaluations.items():
        value = evaluation.get(name, math.nan)
        if not math.isfinite(value):
            continue
        score = -value if lower_is_better else value
        samples = evaluation.get(SAMPLES)
        if samples not in best or score >= best[samples][0]:
            best[samples] = score, step
    return {step for _, step in best.values()}


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
        self._folder = folder
        self._keep = keep
        self._checkpoint_bytes = checkpoint_bytes
        self._in_use = in_use
        # by step; an empty dict if there was none
        self._evaluations: dict[int, dict[str, float]] = {}
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
        # A checkpoint is written before an older one is deleted, so there has to be room for one.
        is_short = free < 2 * self._checkpoint_bytes
        if is_short and not self._warned:
            self.notes.append(
                f"warning: the file system of {self._folder.absolute()} has {bytes_text(free)} "
                "free, which is not enough for two more checkpoints of "
                f"{bytes_text(self._checkpoint_bytes)} each"
            )
        self._warned = is_short

    def _superfluous(self, step: int) -> set[int]:
        """The complete checkpoints that no rule keeps, but not that of `step`."""
        steps = complete_steps(self._folder)
        if self._keep.keep_best:
            for old in steps:
                if old not in self._evaluations:  # written by an earlier job
                    self._evaluations[old] = self._read_evaluation(old)
        retained = steps_to_keep({*steps, step}, self._evaluations, self._keep)
        return set(steps) - retained - {step, self._in_use()}

    def _read_evaluation(self, step: int) -> dict[str, float]:
        with suppress(InputError):  # a damaged checkpoint cannot be the best one
            manifest, _ = read_manifest(self._folder / name_of(step))
            return dict(manifest.evaluation or {})
        return {}
