"""When a run saves its state, and what a checkpoint says of the run besides its tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from meshtrain.checkpoint.attempt import needed
from meshtrain.checkpoint.folder import name_of
from meshtrain.checkpoint.resume import Resume, Wanted
from meshtrain.checkpoint.save import Retention, Saver
from meshtrain.checkpoint.state import State
from meshtrain.errors import TrainingError
from meshtrain.report import Report
from meshtrain.runtime import Job

RNG = "before each step torch, numpy and random are seeded from (seed, step, index of the data rank)"
GUESSED_SPEED = 200e6  # bytes that a host writes in a second, before it is known


class Saving:
    """Saves what the section `checkpoint` of the YAML asks for. All ranks do the same after the same steps."""

    def __init__(
        self,
        wanted: Wanted,
        resume: Resume,
        state: State,
        report: Report,
        job: Job,
        writing: Callable[[int, Path], None] | None = None,
    ) -> None:
        """`writing`: as Saver has it."""
        section = wanted.config.checkpoint
        self.wanted, self.report = wanted, report
        self._resumed = resume.step if resume.own else None  # the step of a checkpoint that is there already
        self._saver = Saver(
            state,
            wanted.checkpoints,
            job,
            in_background=section.in_background,
            keep=Retention(section.keep_last, section.keep_every, section.keep_best),
            on_failure=section.on_failure,
            limit_s=section.timeout_s,
            say=report.say,
            writing=writing,
        )
        assert job.layout is not None
        self._guess_s = needed(state.placements, job.world_size) / GUESSED_SPEED / len(job.layout.hosts)
        self._config = json.loads(json.dumps(wanted.config.plain()))

    def __enter__(self) -> "Saving":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TrainingError):  # all ranks are here: what is being written is not given up
            self._saver.wait()
        self._saver.close()

    @property
    def seconds(self) -> float:
        """How long a save takes: as the last one, or about."""
        return self._saver.last_save_s or self._guess_s

    @property
    def measured_s(self) -> float | None:
        """How long the last save took; None: there was none."""
        return self._saver.last_save_s or None

    @property
    def checkpoint(self) -> Path:
        """That of the last step taken."""
        return self.wanted.checkpoints / name_of(self.report.step)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step while the run goes on. The last step's is `finish`'s."""
        every = self.wanted.config.checkpoint.every
        if step == self.wanted.steps:
            return False
        return self.report.ends_epoch(step) if every == "epoch" else bool(every) and step % int(every) == 0

    def save(self) -> None:
        """Saves the state after the step whose result was taken last; waits for a copy in memory."""
        self._saver.save(self.report.step, self._about())

    def gives_up(self) -> str | None:
        """Why the run should not go on, if saving has shown that; to be asked in every step."""
        self._saver.poll()
        return self._saver.wants_stop

    def finish(self) -> None:
        """No step follows: the state is saved when this returns, or `check` says why not.

        Raises:
            TrainingError: on every rank: saving has shown that the run should not go on.
        """
        self._saver.wait()
        self._stop_if_wanted()
        if self.report.step not in (self._saver.saved, self._resumed):
            self._saver.save(self.report.step, self._about(), wait=True)
            self._stop_if_wanted()

    def check(self) -> None:
        """Raises TrainingError, on every rank, if the last state was not saved."""
        if self._saver.problem is not None:
            raise TrainingError(
                f"{self.report.step} steps of {self.wanted.steps} are done and not saved: {self._saver.problem}"
            )

    def _stop_if_wanted(self) -> None:
        if self._saver.wants_stop is not None:
            raise TrainingError(self._saver.wants_stop)

    def _about(self) -> dict[str, Any]:
        step, config = self.report.step, self.wanted.config
        return {
            "samples": step * config.batch.global_size,
            "tokens": self.report.tokens,
            "config": self._config,
            "data": self.wanted.data,
            "versions": self.wanted.versions,
            "rng": {"seed": config.train.seed, "rule": RNG},
            "books": self.report.books(),
            "evaluation": self.report.evaluations.get(step),
        }


def describe_saving(wanted: Wanted) -> str:
    """`checkpoints every 100 steps in runs/a/checkpoints, the last 3 kept`."""
    section = wanted.config.checkpoint
    when = {"epoch": "after each epoch", 0: "at the end", 1: "after each step"}.get(
        section.every, f"every {section.every} steps"
    )
    kept = [f"the last {section.keep_last}" if section.keep_last > 1 else "the last one"]
    kept += [f"those of every {section.keep_every} steps"] if section.keep_every is not None else []
    kept += ["the best one"] if section.keep_best else []
    listed = " and ".join([", ".join(kept[:-1]), kept[-1]] if len(kept) > 1 else kept)
    return f"checkpoints {when} in {wanted.checkpoints}, {listed} kept"
