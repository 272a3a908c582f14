"""Checkpointing: when a run saves its state, and what a checkpoint records about the run besides
its tensors."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from meshtrain.checkpoint.directory import name_of
from meshtrain.checkpoint.resume import Resume
from meshtrain.checkpoint.retention import Retention
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.checkpoint.save import Saver
from meshtrain.checkpoint.shard_file import checkpoint_bytes
from meshtrain.checkpoint.staging import snapshot_bytes
from meshtrain.checkpoint.state import State
from meshtrain.checkpoint.upload import Uploads
from meshtrain.config import Config
from meshtrain.data.cache import Say
from meshtrain.errors import TrainingError, any_of, join_some
from meshtrain.job.host_limits import find_short_hosts
from meshtrain.job.process import Job
from meshtrain.run.phase_monitor import PhaseMonitor

RNG = (
    "before each step torch, numpy and random are seeded from (seed, step, index of the data rank)"
)
GUESSED_SPEED = 200e6  # bytes that a host writes per second, until that is measured


class Books(Protocol):
    """What a checkpoint records of the steps so far."""

    tokens: int
    evaluations: dict[int, dict[str, float]]  # step -> numbers of the last evaluation

    def ends_epoch(self, step: int) -> bool:
        """Whether a pass over the data ends with this step."""

    def state_dict(self) -> dict[str, Any]:
        """The counters over the steps so far: JSON values."""


class Checkpointer(AbstractContextManager["Checkpointer"]):
    """Saves as the section `checkpoint` of the config says. All ranks do the same after the same
    steps."""

    def __init__(
        self,
        spec: RunSpec,
        resume: Resume,
        state: State,
        logger: Books,
        monitor: PhaseMonitor,
        job: Job,
        say: Say,
    ) -> None:
        section = spec.config.checkpoint
        short: list[str] = []
        if section.in_background:
            needed = snapshot_bytes(state, job.rank)
            short = find_short_hosts(job, needed, "looking at the memory for checkpoints")
        if short:
            say(
                "checkpoints are written while training waits, because the memory for copies of "
                f"the state is short: {join_some(short)}"
            )
        self.spec = spec
        self._logger = logger
        self._monitor = monitor
        self._job = job
        self._saver = Saver(
            state,
            spec.checkpoints,
            job,
            in_background=section.in_background and not short,
            keep=retention(spec.config),
            limit_s=section.timeout_s,
            local=resume.local,
            uploads=resume.uploads,
            say=say,
            writing=monitor.faults.in_save,
        )
        if resume.own:
            self._saver.saved = resume.step
        assert job.layout is not None
        nbytes = checkpoint_bytes(state.placements, job.world_size)
        self._guess_s = nbytes / GUESSED_SPEED / len(job.layout.hosts)
        self._config = json.loads(json.dumps(spec.config.plain()))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TrainingError):  # all ranks are here: a save in progress is finished
            self._saver.wait()
        self._saver.close()

    @property
    def seconds(self) -> float:
        """How long a save takes: as long as the last one, or else an estimate."""
        return self._saver.last_save_s or self._guess_s

    @property
    def checkpoint(self) -> Path:
        return self.spec.checkpoints / name_of(self._monitor.finished_step)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step. The one after the last step is written by
        `finish`."""
        every = self.spec.config.checkpoint.every
        if step == self.spec.steps:
            return False
        if every == "epoch":
            return self._logger.ends_epoch(step)
        return every != 0 and step % int(every) == 0

    def save(self, *, wait: bool = False) -> None:
        """Saves the state after the last finished step; waits for a copy in memory, or with `wait`
        for the disks."""
        step = self._monitor.finished_step
        self._saver.save(step, self._about(step), wait=wait)
        self._monitor.save_s = self._saver.last_save_s or None

    def stop_reason(self) -> str | None:
        """Why the run should stop, if saving has shown a reason; called in every step."""
        self._saver.poll()
        self._monitor.save_s = self._saver.last_save_s or None
        return self._saver.wants_stop

    def finish(self) -> None:
        """Saves the last state; `check` raises if that failed. Raises TrainingError: saving shows
        the run must stop."""
        self._saver.wait()
        is_saved = self._monitor.finished_step == self._saver.saved
        if self._saver.wants_stop is None and not is_saved:
            self.save(wait=True)
        if self._saver.wants_stop is not None:
            raise TrainingError(self._saver.wants_stop)
        self._saver.wait_for_upload()
        if self.spec.config.checkpoint.upload is not None:
            self._job.reduce("waiting for the upload", None, lambda _: None)

    def check(self) -> None:
        """Raises TrainingError, on every rank, if the last state was not saved."""
        if self._saver.problem is not None:
            steps = f"{self._monitor.finished_step} steps of {self.spec.steps}"
            raise TrainingError(f"{steps} are done and not saved: {self._saver.problem}")

    def _about(self, step: int) -> dict[str, Any]:
        config = self.spec.config
        return {
            "samples": config.batch.sizes.before(step),
            "tokens": self._logger.tokens,
            "config": self._config,
            "data": self.spec.data,
            "versions": self.spec.versions,
            "rng": {"seed": config.train.seed, "rule": RNG},
            "counters": self._logger.state_dict(),
            "evaluation": self._logger.evaluations.get(step),
        }


def open_uploads(config: Config, job: Job) -> Uploads | None:
    """The uploads on rank 0, if the config names storage for them. Raises InputError on every rank:
    it is unusable."""
    url = config.checkpoint.upload
    with job.collective_check("opening checkpoint.upload"):
        if url is None or job.rank != 0:
            return None
        return Uploads(url, retention(config))


def retention(config: Config) -> Retention:
    section = config.checkpoint
    return Retention(section.keep_last, section.keep_every, section.keep_best)


def describe_saving(spec: RunSpec) -> str:
    """`checkpoints every 100 steps in runs/a/checkpoints, the last 3 kept`."""
    section = spec.config.checkpoint
    moments = {"epoch": "after each epoch", 0: "at the end", 1: "after each step"}
    moment = moments.get(section.every, f"every {section.every} steps")
    kept = ["the last one" if section.keep_last == 1 else f"the last {section.keep_last}"]
    if section.keep_every is not None:
        kept.append(f"those of every {section.keep_every} steps")
    if section.keep_best:
        kept.append("the best one")
    return f"checkpoints {moment} in {spec.checkpoints}, {any_of(kept, 'and')} kept"
