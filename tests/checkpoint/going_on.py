"""Runs that are interrupted and resumed: in the tests' own process, or one after another in a job:

    python tests/forked.py PROCESSES tests/checkpoint/going_on.py CASES.json RESULTS.json

with a list of `Case`.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import meshtrain.run.results
import meshtrain.run.step_logger
import meshtrain.train
from meshtrain.config import Config
from meshtrain.data.batch import IGNORE, Batch
from meshtrain.errors import InputError, TrainingError
from meshtrain.job import signals as stopping
from meshtrain.job import storage
from meshtrain.job.environment import Environment, read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import Job, join
from meshtrain.job.signals import Signals
from tests.launching import forked

# A model and data so small that a step takes milliseconds. It draws from the generators of torch,
# numpy and Python.
MODEL = """
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Config:
    vocab_size: int = 256
    width: int = 8
    noise: float = 0.1


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.noise = config.noise
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens, positions, documents):
        x = self.embed(tokens)
        if self.training:
            x = x + self.noise * (torch.rand_like(x) + np.random.rand() + random.random())
        return self.head(torch.tanh(self.mix(x)))
"""


@dataclass(frozen=True)
class Case:
    """A job of a run.

    Attributes:
        interrupt: what happens in the update of step `at` on rank `rank`: the name of a signal,
            `STOP` for the file, or a failure: `crash`, or `end`, a TrainingError that all ranks
            agree on.
        record: a folder into which each rank writes a line per sample that it has seen: the step
            and the tokens.
        again: whether the launcher has restarted the job.
    """

    config: str
    overrides: Sequence[str] = ()
    interrupt: str | None = None
    at: int = 0
    rank: int = 0
    record: str | None = None
    again: bool = False


def small_run(folder: Path) -> Path:
    """A config in a folder, with a model and a text of its own."""
    (folder / "model.py").write_text(MODEL)
    words = (f"{i * i} and {i**3 % 1009} make {i * 7919 % 10007}.\n" for i in range(400))
    (folder / "text.txt").write_text("".join(words))
    config = folder / "small.yaml"
    config.write_text(
        f"model: {{name: {folder}/model.py}}\n"
        f"data: {{source: text, path: {folder}/text.txt, cache: {folder}/cache, validation: 0, "
        f"seq_len: 32}}\n"
        "batch: {global_size: 12, micro_size: 2}\n"
        "optimizer: {lr: 1e-2, warmup_steps: 2}\n"
        f"train: {{steps: 8, eval_every: 0, sample_tokens: 0, output: {folder}/run}}\n"
        "checkpoint: {every: 4}\n"
    )
    return config


def run_case(case: Case, job: Job, signals: Signals | None = None) -> dict[str, Any]:
    """Runs a case; returns its exit status, with the message if it was refused or failed."""
    try:
        config = Config.load(
            case.config, case.overrides, world_size=job.world_size, for_training=True
        )
        with interrupted(case, job.rank, Path(config.train.output)):
            return {"status": meshtrain.train.run(config, job, signals)}
    except (InputError, TrainingError, Crash) as error:
        return {"status": 2 if isinstance(error, InputError) else 1, "error": str(error)}


def alone(case: Case) -> dict[str, Any]:
    """Runs a case in this process, as a world of one on the CPU."""
    job = join(Environment("none", 0, 1, 0, "here", None, restarts=int(case.again)))
    job.device = torch.device("cpu")
    with signals_installed() as signals:
        return run_case(case, job, signals)


@contextmanager
def signals_installed() -> Iterator[Signals]:
    """Has the handlers of a run in this process for a while."""
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    signals = Signals.install()
    try:
        yield signals
    finally:
        signals.restore()  # else its alarm goes off in the next run
        for number, handler in before.items():
            signal.signal(number, handler)


class Crash(Exception):  # noqa: N818  it stands for any exception
    """An unexpected error."""


@contextmanager
def interrupted(case: Case, rank: int, output: Path) -> Iterator[None]:
    """While active, the trainer of a run does what the case says."""
    plain = meshtrain.train.Trainer

    class Interrupted(plain):
        def forward_backward(self, step: int, microbatches: list[Batch]) -> None:
            self.latest = microbatches
            super().forward_backward(step, microbatches)

        def optimizer_step(self, step: int, stop_asked: bool = False) -> Callable:
            if case.record is not None:
                write_down(Path(case.record) / f"rank_{rank}", step, self.latest)
            if case.interrupt is not None and step == case.at and rank == case.rank:
                interrupt(case.interrupt, output)
            return super().optimizer_step(step, stop_asked)

    meshtrain.train.Trainer = Interrupted  # type: ignore[misc]
    try:
        yield
    finally:
        meshtrain.train.Trainer = plain  # type: ignore[misc]


def interrupt(how: str, output: Path) -> None:
    if how == "crash":
        raise Crash("nobody has foreseen this")
    if how == "end":
        raise TrainingError("all ranks have found that the run cannot go on")
    if how == "STOP":
        (output / stopping.FILE).touch()
    else:
        os.kill(os.getpid(), signal.Signals[how])


def write_down(file: Path, step: int, batches: Sequence[Batch]) -> None:
    """Records the samples of a step, without copies that fill up a batch."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as lines:
        for batch in batches:
            for tokens, targets in zip(batch.inputs[0], batch.targets, strict=True):
                if bool((targets != IGNORE).any()):
                    lines.write(f"{step} {bytes(tokens.tolist()).hex()}\n")


def written_down(folder: Path) -> list[str]:
    """The samples that all ranks have seen, as sorted lines `step tokens`."""
    return sorted(line for file in folder.iterdir() for line in file.read_text().splitlines())


def faster(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Leaves out what a run does only once because it takes long; and looks for a file STOP in each
    step."""
    replace(meshtrain.run.step_logger, "sample_flops", lambda *_: (None, "FLOPs are not counted"))
    replace(meshtrain.run.step_logger, "peak_flops", lambda *_: (1.0, "a peak of 1 FLOP/s"))
    replace(meshtrain.run.results, "plot_loss", lambda *_: "no picture is drawn")
    replace(stopping, "LOOK_EVERY_S", 0.0)
    replace(storage, "PAUSES_S", (0.01, 0.01))


def run_cases(
    processes: int, cases: Sequence[Case], folder: Path
) -> tuple[list[dict[str, Any]], str]:
    """Runs cases one after another in a job of its own; returns their results, and what the job
    printed."""
    requests, results = folder / f"cases_{processes}.json", folder / f"results_{processes}.json"
    requests.write_text(json.dumps([asdict(case) for case in cases]))
    job = forked(processes, Path(__file__), requests, results, timeout=900).check()
    return json.loads(results.read_text()), job.out


def main() -> None:
    faster()
    job = join(read_environment(os.environ))
    signals = Signals.install()
    results = []
    with job_exit(job):
        for case in json.loads(Path(sys.argv[1]).read_text()):
            signals.request = None
            results.append(run_case(Case(**case), job, signals))
        if job.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
