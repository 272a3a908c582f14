"""Retention: which checkpoints stay, for a run as for `meshtrain checkpoint prune`, and the deletion of the others."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from meshtrain.checkpoint.directory import TakenError, complete_steps, name_of, read_manifest, remove
from meshtrain.errors import InputError, bytes_text

BEST = (("accuracy", False), ("eval_loss", True))  # the metric of an evaluation, if it has it; whether lower is better
SAMPLES = "eval_samples"  # of how many samples an evaluation in a manifest was made; older ones do not say


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: each that one of the rules keeps. The newest always stays."""

    keep_last: int | None = 3  # how many of the newest; None keeps all
    keep_every: int | None = None  # the multiples of this number; None keeps none for that reason
    keep_best: bool = False  # the one with the best value, of equal ones the newest


def best_metric(evaluations: Iterable[Mapping[str, float]]) -> tuple[str, bool]:
    """The number by which the best of these evaluations is chosen, and whether lower is better."""
    names = {name for values in evaluations for name in values}
    return next(((name, lower) for name, lower in BEST if name in names), BEST[-1])


def steps_to_keep(steps: Collection[int], evaluations: Mapping[int, Mapping[str, float]], rules: Retention) -> set[int]:
    """The steps of complete checkpoints that stay, by the evaluations that their manifests have, if any.

    NaN and infinity are no values. Evaluations of different numbers of samples are not compared: each best one stays.
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
        best: dict[float | None, tuple[float, int]] = {}  # samples -> value, the higher the better, and step
        for step, evaluation in evaluated.items():
            value = evaluation.get(name, math.nan)
            if math.isfinite(value):
                samples = evaluation.get(SAMPLES)
                best[samples] = max((-value if lower else value, step), best.get(samples, (-math.inf, step)))
        retained |= {step for _, step in best.values()}
    return retained


class Pruner:
    """Rank 0 deletes what no rule keeps, and warns before the disk is full."""

    def __init__(
        self, folder: Path, keep: Retention, checkpoint_bytes: int, in_use: Callable[[], int | None] = lambda: None
    ) -> None:
        """`in_use`: the step of a checkpoint that is being read now; it stays."""
        self.notes: list[str] = []  # lines to print
        self._folder, self._keep, self._checkpoint_bytes = folder, keep, checkpoint_bytes
        self._in_use = in_use
        self._evaluations: dict[int, dict[str, float]] = {}  # by step; empty if there was none
        self._warned = False

    def prune(self, step: int, evaluation: Mapping[str, float] | None) -> None:
        """To be called after the checkpoint of a step is complete, with the evaluation of that step."""
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
                f"warning: the file system of {self._folder.absolute()} has {bytes_text(free)} free, "
                f"which is not enough for two more checkpoints of {bytes_text(self._checkpoint_bytes)} each"
            )
        self._warned = short

    def make_room(self, step: int, evaluation: Mapping[str, float] | None) -> str | None:
        """Deletes the oldest that will be superfluous after the checkpoint of `step`, and says so. None: there is none,
        or only the newest. OSError: it cannot be deleted."""
        self._evaluations[step] = dict(evaluation or {})
        old = min(self._superfluous(step), default=None)
        if old is None or old == complete_steps(self._folder)[-1]:
            return None
        remove(self._folder / name_of(old))
        return f"{name_of(old)} was deleted before step {step} was saved: the disk is full (checkpoint.make_room)"

    def _superfluous(self, step: int) -> set[int]:
        steps = complete_steps(self._folder)
        for old in steps if self._keep.keep_best else ():
            if old not in self._evaluations:  # an earlier job has written it
                self._evaluations[old] = {}
                with suppress(InputError):  # it is damaged, and so it is not the best one
                    self._evaluations[old] |= read_manifest(self._folder / name_of(old))[0].evaluation or {}
        retained = steps_to_keep({*steps, step}, self._evaluations, self._keep)
        return set(steps) - retained - {step, self._in_use()}
