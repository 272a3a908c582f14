"""The whole of a run, from a YAML file to a trained model:

    torchrun --standalone --nproc-per-node=4 -m meshtrain.train configs/quickstart.yaml train.steps=50

Every rank runs this same page. Nothing on it depends on the layout: what differs between one process and a thousand
is behind `build_mesh`, `build_model` and the groups that they made.
"""

import argparse
import gc
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from meshtrain.orphans import end_with_launcher
from meshtrain.stopping import Requests, Signals

if __name__ == "__main__":
    end_with_launcher(os.environ)
    heard = Signals.heard(importing=True)  # torch takes seconds, and a signal that nobody hears ends the process

from meshtrain.agreement import Topic, agree, flat, ingredients
from meshtrain.build import build_model, check_start, outputs, short_sample
from meshtrain.checkpoint.folder import owner_changed
from meshtrain.checkpoint.resume import Resume, Wanted
from meshtrain.checkpoint.retry import retried
from meshtrain.checkpoint.state import State
from meshtrain.checkpoint.versions import versions
from meshtrain.config import Config
from meshtrain.data import OpenData, Samples, eval_batches, open_data, prepare_data, train_batches
from meshtrain.ending import GOES_ON, Ending
from meshtrain.environment import read_environment
from meshtrain.errors import InputError
from meshtrain.evaluate import evaluate, evaluation_set
from meshtrain.introduction import introduction
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.leaving import leaving
from meshtrain.locate import model_file
from meshtrain.mesh import build_mesh
from meshtrain.metrics import require_tensorboard
from meshtrain.numerics import reseed, set_numerics
from meshtrain.operate.chaos import Chaos
from meshtrain.operate.deadlines import patience
from meshtrain.operate.goodput import Ledger
from meshtrain.operate.stragglers import Stragglers
from meshtrain.operate.watchdog import Watch, watched
from meshtrain.optim import Optimizer
from meshtrain.parallel.data import hidden_waits
from meshtrain.plan import layout_text
from meshtrain.profile import Profiler
from meshtrain.recording import recording
from meshtrain.report import Report
from meshtrain.results import show, write_export
from meshtrain.run_folder import RunFolder, checkpoints_held
from meshtrain.runtime import Job, join
from meshtrain.saving import Saving
from meshtrain.step import Trainer
from meshtrain.timing import StepClock

COLLECT_EVERY = 50  # steps between two runs of Python's garbage collector
AGENTS_S = 10.0  # within which torchrun's agents, each on its node, all send the signal that one of them has sent


def main(arguments: Sequence[str] | None = None, signals: Signals | None = None) -> int:
    """Trains what the command line names; returns the exit status, or raises SystemExit with it."""
    signals = signals or Signals.heard()
    signals.imported()
    try:
        job = join(read_environment(os.environ))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    if job.rank != 0:
        warnings.simplefilter("ignore")  # libraries warn every rank of the same, and rank 0 says it
    with watched(job) as watch, leaving(job):
        with job.together("reading the config"):
            config = read_config(arguments, job.world_size, job.device.type, again=job.again)
        agree(job, *ingredients(config, os.environ))
        status = run(config, job, signals, watch)
    # torchrun takes every other status for a fault, ends the ranks that are still there, and may start them again.
    return 0 if job.environment.launcher == "torchrun" and status != GOES_ON else status


def run(config: Config, job: Job, signals: Signals | None = None, watch: Watch | None = None) -> int:
    """One run of one config in a job that has joined; several may follow one another in one job.

    Args:
        signals: of this process; None: it hears none.
        watch: over this rank; None: nobody watches.

    Returns:
        0: the run is done; 75: it was asked to stop, and can be gone on with; 1: other nodes were asked alone.

    Raises:
        InputError: something that the user gave is wrong. TrainingError: the run could not go on.
    """
    watch = watch or Watch(job)
    watch.deadlines.start_s, watch.deadlines.given_s = config.train.start_timeout_s, config.train.step_timeout_s
    watch.deadlines.compiles = config.parallel.compile
    watch.deadlines.save_limit_s = config.checkpoint.timeout_s
    names, counts = job.hosts()
    job.layout = Layout.resolve(config.layout, job.world_size).on_hosts(counts, names)
    set_numerics(config.train.precision, config.train.deterministic)
    folder = RunFolder(Path(config.train.output).expanduser())
    with folder.held(job), checkpoints_held(config.checkpoint.path, folder, job) as checkpoints:
        with job.together("preparing the data"):
            if job.environment.local_rank == 0:
                prepare_data(config.data, say=job.say)
        with job.together("opening the data"):
            data = open_data(config.data, n_outputs=outputs(config), seed=config.train.seed, say=job.say)
            samples = retried(data.sampled) if job.environment.local_rank == 0 else None
        with job.together("comparing the weights and the layout with the model"):
            check_start(config, job.layout, data.train)
        agree(job, same_data(data))
        agree(job, Topic("what the data files hold", samples, "copy or prepare them anew where they are damaged"))
        code = versions(model_file(config.model.name))
        wanted = Wanted(config, folder.path, checkpoints, data.identity, code, total_steps(config, data.train))
        resume = Resume(job, wanted)
        requests = Requests(signals or Signals())
        if job.rank == 0:
            requests.watch(folder.path, config.train.time_limit_s, os.environ, owner_changed)
        with Ending(folder, job) as ending:
            watch.loses(ending.lose)
            if not ending.done_before(wanted.steps, resume):
                job.connect(patience(watch.deadlines.longest("step")))
                train(wanted, job, data, ending, resume, requests, watch)
        return ending.status


def train(
    wanted: Wanted, job: Job, data: OpenData, ending: Ending, resume: Resume, requests: Requests, watch: Watch
) -> None:
    """The run on one page."""
    assert job.layout is not None  # run() placed this process
    config, steps = wanted.config, wanted.steps
    mesh = build_mesh(job.layout, job.device.type)
    clock = StepClock(job.device, hiding=hidden_waits(mesh))
    # What a checkpoint will fill needs no weights to start from: they are not read once more.
    start = config if resume.checkpoint is None else replace(config, model=replace(config.model, weights=None))
    sample = None
    if config.parallel.verify and mesh.size("tp") > 1:
        with job.together("reading the first samples"):
            sample = short_sample(data, mesh.size("tp"))
    model = build_model(start, mesh, job.device, lambda: clock.phase("communication"), sample)
    optimizer = Optimizer(model, config.optimizer, mesh, steps)
    trainer = Trainer(model, optimizer, config, mesh, job.device, task=data.task, clock=clock)
    folder = ending.folder.path
    profiler = Profiler(config.metrics, folder, job.rank, job.device)
    state = State(model, optimizer, mesh, job, trainer.scale)
    chaos = Chaos(config.train.chaos, job)
    held_out = evaluation_set(data, config.train.eval_samples)
    about = introduction(wanted, job, data, held_out, model)
    for line in [*about, *profiler.about, *resume.loading(state), *chaos.about()]:
        job.say(line)
    ledger = Ledger(folder if job.rank == 0 else None, resume.step, requests.signals.since)
    for line in ledger.about():
        job.say(line)
    ending.begin(config, layout_text(job.layout), resume.step, ledger)

    size, index, ranks = config.batch, mesh.index(*DATA_AXES), mesh.size(*DATA_AXES)
    shared: dict[str, Any] = {"micro_size": size.micro_size, "rank": index, "ranks": ranks, **reading(config)}
    batches = train_batches(
        data.train, seed=config.train.seed, first_step=resume.step, steps=steps, global_size=size.global_size, **shared
    )
    evaluated = None if held_out is None else eval_batches(held_out, **shared)

    with job.together("opening metrics.jsonl"):
        first = resume.step + 1
        report = Report(config, job, mesh, data, clock, ending, ledger, steps, first=first, books=resume.books)
    saving = Saving(wanted, resume, state, report, job, writing=chaos.in_save)
    stragglers = Stragglers(job, first, report.say)
    clock.restart()
    ledger.begin()
    with report, saving, requests.heeded(), between_steps(profiler, chaos, watch) as at_step:
        for step in range(resume.step + 1, steps + 1):
            at_step(step)
            reseed(config.train.seed, step, index)
            with clock.phase("data"):
                microbatches = next(batches)
            with recording(config, model, step, job=job, layout=mesh.layout, folder=folder, say=report.say):
                trainer.accumulate(step, microbatches)
            report.take()  # the step before: if it was not finite the run may end here, before this update
            report.beside |= stragglers.look(report.step, report.times)
            if report.stop_asked:
                requests.agreed()
                break  # on all ranks; what was accumulated is let go
            asked = saving.gives_up() or requests.reason(report.slowest_s, saving.seconds)
            report.later(trainer.update(step, stop_asked=bool(asked)))
            if evaluated is not None and report.evaluates_after(step):
                report.take()
                mesh.set_timeout(patience(watch.deadlines.longest("evaluation")))  # the first one may compile
                with ledger.spent("evaluation"):
                    batches_seen = watch.through(evaluated, "evaluation")
                    found = evaluate(model, batches_seen, mesh, job.device, trainer.dtype)
                    report.evaluation(step, found, evaluated.samples)
                mesh.set_timeout(patience(watch.deadlines.longest("step")))
            if saving.due(step):
                report.take()
                watch.at("saving")
                with ledger.spent("saving"):
                    saving.save()
                ledger.saved()
                clock.restart()  # what the step waits for it is said by the log, and is no step's
            limit_s = watch.pace(step - resume.step, report.slowest_s, saving.measured_s)
            if limit_s is not None:
                mesh.set_timeout(limit_s)
        report.take()
        watch.at("saving")
        with ledger.spent("saving"):
            saving.finish()
    watch.at("end")
    mesh.set_timeout(patience(config.train.start_timeout_s))  # what follows was not measured, and waits for disks
    if ending.step < steps:
        saving.check()
        ending.stop(requests.said, saving.checkpoint, wanted)
        requests.obeyed()
        go_or_stay(job, ending, requests)
        return
    with ledger.spent("evaluation"):
        show(config, job, data, model, folder)
    if config.train.export is not None:
        with ledger.spent("saving"):
            write_export(config, job, mesh, model, config.train.export)
    saving.check()


def go_or_stay(job: Job, ending: Ending, requests: Requests) -> None:
    """After SIGTERM: whether this node was meant too, or only another one, without which the job goes on."""
    if job.environment.launcher == "torchrun" and "SIGTERM" in str(ending.stopped):
        told = requests.wait_for_signal(AGENTS_S)
        if not told and job.environment.restarts_left > 0:
            print(f"{job} was not told to end itself: its torchrun starts it again, with the nodes that are left")
            ending.status = GOES_ON


def read_config(arguments: Sequence[str] | None, world_size: int, device: str, *, again: bool = False) -> Config:
    """The config that the command line names, with its overrides; `again` as in Config.load.

    Raises:
        InputError: the command line or the config is wrong.
    """
    parser = _Parser(
        prog="meshtrain.train", description="Trains the model of a YAML file on the processes of this job."
    )
    parser.add_argument("config", help="a YAML file, for instance configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="for instance train.steps=50")
    options = parser.parse_args(arguments)
    known: dict[str, Any] = {"world_size": world_size, "device": device, "again": again}
    config = Config.load(options.config, options.overrides, for_training=True, **known)
    if config.metrics.tensorboard:
        require_tensorboard()
    return config


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints all ranks hear of before any of them leaves."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}\n{self.format_usage().strip()}")


def same_data(data: OpenData) -> Topic:
    """What all ranks have to see of the corpus."""
    remedy = "every host must have the same files, and the same Python for python-stdlib"
    return Topic("the data", flat(data.identity), remedy)


def total_steps(config: Config, train: Samples) -> int:
    """The steps of a run: as given, or enough for its epochs; a last batch is filled from the next epoch's order."""
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None  # the config has exactly one of them
    return math.ceil(config.train.epochs * len(train) / config.batch.global_size)


def reading(config: Config) -> dict[str, int | bool]:
    """How batches are read ahead."""
    return {"workers": config.data.workers, "prefetch": config.data.prefetch, "pin_memory": config.data.pin_memory}


@contextmanager
def between_steps(profiler: Profiler, chaos: Chaos, watch: Watch) -> Iterator:
    """What happens before each step and in none: bookkeeping, faults on purpose, and Python's garbage collection.

    A collection in the middle of one rank's step makes all other ranks wait for it. Here all collect at once, and what
    was made before the first step is not looked at again.
    """

    def at_step(step: int) -> None:
        profiler.step(step)
        if step % COLLECT_EVERY == 0:
            gc.collect()  # of all ages: nothing else looks again at what outlives one collection
        watch.at("step", step)
        chaos.at_step(step)

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield at_step
    finally:
        profiler.close()
        gc.enable()
        gc.unfreeze()


if __name__ == "__main__":
    sys.exit(main(signals=heard))
