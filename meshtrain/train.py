"""The training loop, from a YAML file to a trained model:

    torchrun --standalone --nproc-per-node=4 -m meshtrain.train configs/quickstart.yaml
    train.steps=50

Every rank runs this same code. Nothing in it depends on the layout: the differences between one
process and a thousand are behind `build_mesh`, `build_model` and the process groups that they
create.
"""

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from meshtrain.job.signals import Signals, StopKind, StopRequest, end_with_launcher

if __name__ == "__main__":
    end_with_launcher(os.environ)
    # importing torch takes seconds, and an unhandled signal ends the process
    signals = Signals.install(importing=True)
    # What is imported is no garbage, and each collection would walk through all of torch: `main`
    # turns collections on again.
    gc.disable()

from torch import nn  # only after the signal handlers are installed

from meshtrain import observer
from meshtrain.checkpoint.folder_lock import owner_changed
from meshtrain.checkpoint.local import LocalDisk
from meshtrain.checkpoint.resume import Resume
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.checkpoint.state import State
from meshtrain.config import Config
from meshtrain.config.hub_names import fetch_texts
from meshtrain.config.schema import TrainSection
from meshtrain.data import OpenData
from meshtrain.data.cache import cache_folder
from meshtrain.data.mixture import sample_order
from meshtrain.errors import InputError, StartError
from meshtrain.evaluate import evaluate, evaluation_set
from meshtrain.foresight.start import MemoryForecast
from meshtrain.job.consistency import Fingerprint, require_equal, run_fingerprints
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit, refuse_start
from meshtrain.job.hub import HubAnswer
from meshtrain.job.process import Job, join
from meshtrain.job.storage import show_any_text
from meshtrain.job.watchdog.deadlines import process_group_timeout
from meshtrain.job.watchdog.watchdog import Watchdog, watched
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import build_mesh
from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.metrics.logger import Metrics, NoMetrics
from meshtrain.metrics.profiler import Profiler
from meshtrain.metrics.sink_threads import find_sinks
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.metrics.straggler import StragglerDetector
from meshtrain.modeling.build import compile_choice, objective_of
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel.compile import keep_compiled_code
from meshtrain.parallel.fsdp import unmeasured_wait_phases
from meshtrain.parallel.mixed_precision import reseed, set_numerics
from meshtrain.run.checkpointing import Checkpointer, open_uploads
from meshtrain.run.fault_injection import FaultInjector
from meshtrain.run.phase_monitor import PhaseMonitor
from meshtrain.run.pipeline_trace import TimelineRecorder
from meshtrain.run.rank_table import layout_text
from meshtrain.run.results import show, write_export
from meshtrain.run.run_folder import RunFolder, lock_checkpoints
from meshtrain.run.setup import (
    banner_lines,
    check_first_values,
    load_data,
    model_of_run,
    readers,
    reference_of_run,
    require_host_memory,
    require_whole_steps,
    specify,
)
from meshtrain.run.status import EXIT_RESTART, RunStatus
from meshtrain.run.step_logger import StepLogger
from meshtrain.trainer import Trainer

# Seconds between the first and the last node whose torchrun agent passes a signal on.
AGENTS_S = 10.0


@dataclass(frozen=True)
class RunContext:
    """What a run works with, from its start to its end."""

    spec: RunSpec
    job: Job
    data: OpenData
    status: RunStatus
    resume: Resume
    stop: StopRequest
    watchdog: Watchdog


def main(arguments: Sequence[str] | None = None, signals: Signals | None = None) -> int:
    """Trains as the command line says; returns the exit status, or raises SystemExit with it."""
    show_any_text()
    signals = signals or Signals.install()
    # A signal that came during the imports is handled now.
    signals.modules_imported()
    # Collections leave out what was imported, which is never freed.
    gc.freeze()
    gc.enable()
    try:
        environment = read_environment(os.environ)
        job = join(environment, start_timeout(arguments, environment.world_size))
        if job.rank != 0:
            # libraries warn on every rank; rank 0 prints the warning
            warnings.simplefilter("ignore")
        with watched(job) as watchdog, job_exit(job):
            hub = ask_hub(job, arguments)
            with job.collective_check("reading the config"):
                config = read_config(
                    arguments, job.world_size, job.device.type, again=job.again, hub=hub
                )
            require_equal(job, *run_fingerprints(config, os.environ))
            status = run(config, job, signals, watchdog)
    except (InputError, StartError) as error:
        # It was raised before the ranks watch each other: `job_exit` handles all later ones.
        return refuse_start(error)
    # torchrun takes every status but 0 for a failure, ends the other ranks, and may start them
    # again. That is right where a restart is wanted, and wrong for a run that has stopped as asked.
    if job.environment.launcher == "torchrun" and status != EXIT_RESTART:
        return 0
    return status


def run(
    config: Config, job: Job, signals: Signals | None = None, watchdog: Watchdog | None = None
) -> int:
    """One run of one config in a job that has joined; more runs may follow. `signals`, `watchdog`:
    None for none.

    Returns 0: the run is done; 75: it was asked to stop, and can be resumed; 1: only other nodes
    were asked to stop. Raises InputError: the user's input is wrong. TrainingError: the run could
    not continue.
    """
    watchdog = watchdog or Watchdog(job)
    set_deadlines(watchdog, config)
    place_on_hosts(job, config)
    # Where a phase may compile, a rank that is late is only busy.
    watchdog.deadlines.compiles = choose_compilation(job, config)
    set_numerics(config.train.deterministic)

    folder = RunFolder(Path(config.train.output).expanduser())
    with folder.lock(job), lock_checkpoints(config.checkpoint.path, folder, job) as checkpoints:
        data = load_data(config, job)
        require_whole_steps(config, job, data)
        spec = specify(config, job, data, folder.path, checkpoints)
        resume = Resume(
            job,
            spec,
            local=open_local_disk(config, job, checkpoints),
            uploads=open_uploads(config, job),
        )
        stop = StopRequest(signals or Signals())
        if job.rank == 0:
            stop.watch(folder.path, config.train.time_limit_s, os.environ, owner_changed)
        with RunStatus(folder, job, config.train.on_exit) as status:
            watchdog.on_job_lost(status.write_failed, folder.path / "failures")
            if not status.already_finished(spec.steps, resume, config):
                if resume.checkpoint is None:
                    # A resumed run reads its weights from the checkpoint, and needs no others.
                    check_first_values(config, job)
                # Collectives time out later than the watchdog, which says what is wrong.
                step_deadline_s = watchdog.deadlines.longest("step")
                job.connect(process_group_timeout(step_deadline_s))
                train(RunContext(spec, job, data, status, resume, stop, watchdog))
        return status.status


def train(context: RunContext) -> None:
    """The training loop on one page."""
    spec = context.spec
    config = spec.config
    job = context.job
    data = context.data
    resume = context.resume
    assert job.layout is not None  # run() placed this process

    # The model on the mesh, its optimizer, and the trainer that runs a step of both.
    mesh = build_mesh(job.layout, job.device.type)
    forecast = MemoryForecast(spec.folder, job.device, config, job.rank)
    # Phases that hide waits for other ranks are not counted as this rank's own time.
    timer = StepTimer(job.device, hiding=unmeasured_wait_phases(mesh))
    restores = resume.checkpoint is not None
    model = model_of_run(spec, mesh, job, data, timer, from_checkpoint=restores)
    forecast.follow(model)
    reference = reference_of_run(config, mesh, job, data, lambda: timer.phase("communication"))
    require_host_memory(config, model, mesh, job)
    optimizer = Optimizer(model, config.optimizer, mesh, spec.steps)
    mixture = sample_order(config, data.train).mixture
    objective = objective_of(config, data.task, mesh)
    trainer = Trainer(
        model,
        optimizer,
        config,
        mesh,
        job.device,
        task=data.task,
        timer=timer,
        mixture=mixture,
        objective=objective,
        reference=reference,
    )
    state = State(model, optimizer, mesh, job, trainer.scale)
    resume.restore(state)

    # What the run prints first, and from now on shows in its folder.
    held_out = evaluation_set(data, config.train.eval_samples)
    profiler = Profiler(config.metrics, spec.folder, job.rank, job.device)
    faults = FaultInjector(config.train.chaos, job)
    goodput_folder = spec.folder if job.rank == 0 else None
    process_began = context.stop.signals.since
    goodput = GoodputTracker(goodput_folder, resume.step, process_began)
    banner = (
        *banner_lines(spec, job, data, held_out, model),
        *profiler.about(resume.step, spec.steps),
        *resume.about(),
        *faults.about(),
        *goodput.about(),
        *forecast.note(),
    )
    for line in banner:
        job.say(line)
    layout_table = layout_text(job.layout) if job.rank == 0 else ""
    context.status.begin(config, layout_table, goodput)

    # Its batches, which worker processes read ahead from the first step on.
    batches, eval_set = readers(
        config, mesh, data, held_out, first_step=resume.step, steps=spec.steps
    )

    # What looks at the run and records it. A file of the run's folder that rank 0 cannot open ends
    # all ranks together.
    with job.collective_check("opening metrics.jsonl"):
        metrics = NoMetrics()
        if job.rank == 0:
            sinks = context.status.open_sinks(config, spec.steps, resume.step)
            metrics = Metrics(
                spec.folder, task=data.task, steps=spec.steps, step=resume.step, sinks=sinks
            )
        stragglers = StragglerDetector(job, resume.step + 1, metrics.say, spec.folder)
        monitor = PhaseMonitor(
            mesh, timer, goodput, context.watchdog, stragglers, profiler, faults, metrics.say
        )
        logger = StepLogger(spec, job, mesh, data, monitor, metrics, counters=resume.counters)
    timeline = TimelineRecorder(config, model, job, mesh.layout, spec.folder, metrics.say)
    checkpointer = Checkpointer(spec, resume, state, logger, monitor, job, metrics.say)

    with forecast, logger, checkpointer, context.stop.active(), monitor:
        for step in range(resume.step + 1, spec.steps + 1):
            with monitor.step(step):
                reseed(config.train.seed, step, mesh.index(*DATA_AXES))
                with timer.phase("data"):
                    microbatches = next(batches)
                with timeline.record(step):
                    trainer.forward_backward(step, microbatches)

                # The row of the previous step, read while this one computes: nothing in a step
                # waits for the device. If that step was not finite the run may end here, before
                # this update.
                logger.flush()
                if logger.stop_asked:
                    # Some rank was asked to stop before that step, and its sums have told all: so
                    # all leave the loop here, and drop the gradients of this step.
                    context.stop.mark_agreed()
                    break

                # Whether this rank is asked to stop: the sums of this step tell the others. A time
                # limit has to leave room for the steps until then and for a save.
                own_stop_reason = checkpointer.stop_reason() or context.stop.reason(
                    monitor.slowest_s, checkpointer.seconds
                )
                logger.defer(trainer.optimizer_step(step, stop_asked=bool(own_stop_reason)))

            if eval_set is not None and logger.evaluates_after(step):
                logger.flush()
                with monitor.phase("evaluation"), weights_used(config, optimizer, model):
                    eval_batches = context.watchdog.iterate(eval_set, "evaluation")
                    result = evaluate(
                        model,
                        eval_batches,
                        mesh,
                        job.device,
                        trainer.dtype,
                        objective,
                        reference,
                    )
                    # Up to its last batch the first evaluation may compile, for which the watchdog
                    # allows more time. From now on it does not.
                    context.watchdog.deadlines.warm_phases.add("evaluation")
                    logger.evaluation(step, result, eval_set.samples)

            if checkpointer.due(step):
                logger.flush()
                with monitor.phase("checkpoint"):
                    checkpointer.save()

        logger.flush()
        with monitor.phase("last checkpoint"):
            checkpointer.finish()
    finish(context, model, optimizer, checkpointer, monitor)


def finish(
    context: RunContext,
    model: nn.Module,
    optimizer: Optimizer,
    checkpointer: Checkpointer,
    monitor: PhaseMonitor,
) -> None:
    """After the last step of this job: writes the results of the run, or, if it was asked to stop,
    how to resume."""
    spec = context.spec
    config = spec.config
    job = context.job
    monitor.end()

    if context.status.step < spec.steps:
        checkpointer.check()
        context.status.stop(context.stop.reason_given, checkpointer.checkpoint, spec)
        context.stop.clear()
        exit_or_restart(job, context.status, context.stop)
        return

    # An observer compares runs (`meshtrain verify`): it needs neither sample text nor a plot.
    if observer.current is None:
        with monitor.phase("results"), weights_used(config, optimizer, model):
            show(config, job, monitor.mesh, context.data, model, spec.folder)
    if config.train.export is not None:
        with monitor.phase("export"), weights_used(config, optimizer, model):
            write_export(config, job, monitor.mesh, model, config.train.export)
    checkpointer.check()


def set_deadlines(watchdog: Watchdog, config: Config) -> None:
    watchdog.deadlines.start_s = config.train.start_timeout_s
    watchdog.deadlines.given_s = config.train.step_timeout_s
    watchdog.deadlines.save_limit_s = config.checkpoint.timeout_s


def place_on_hosts(job: Job, config: Config) -> None:
    """Tells the job the layout, placed on its hosts."""
    names, counts = job.hosts()
    assert config.resolved is not None  # the config was loaded for this number of processes
    job.layout = config.resolved.on_hosts(counts, names)


def choose_compilation(job: Job, config: Config) -> bool:
    """Settles `parallel.compile`: returns whether the run compiles its blocks. Raises InputError:
    `auto` is not the same on all ranks."""
    assert job.layout is not None
    choice = compile_choice(config, job.layout, job.device)
    remedy = "mend it there, or use parallel.compile=false"
    require_equal(
        job, Fingerprint("what parallel.compile: auto chooses", {"auto": str(choice)}, remedy)
    )
    if choice.compiles:
        keep_compiled_code(cache_folder(config.data.cache))
    return choice.compiles


def open_local_disk(config: Config, job: Job, checkpoints: Path) -> LocalDisk | None:
    """Each host's own copy of the checkpoints; None: `checkpoint.local` names no folder."""
    if config.checkpoint.local is None:
        return None
    return LocalDisk(Path(config.checkpoint.local).expanduser(), checkpoints, job)


def weights_used(
    config: Config, optimizer: Optimizer, model: nn.Module
) -> AbstractContextManager[None]:
    """Encloses every use of the weights other than training: inside, they are the EMA weights if
    `train.use_ema`."""
    return optimizer.averaged(model) if config.train.use_ema else nullcontext()


def exit_or_restart(job: Job, status: RunStatus, stop: StopRequest) -> None:
    """After a stop by SIGTERM under torchrun: the node that got the signal leaves, and the others
    go on without it. Their processes exit with `EXIT_RESTART`, and torchrun starts them again."""
    if job.environment.launcher != "torchrun" or StopKind.SIGTERM not in status.stop_kinds:
        return
    # All ranks stop together, so this one may be here before the signal to its own node is.
    has_signal = stop.wait_for_signal(AGENTS_S)
    if not has_signal and job.environment.restarts_left > 0:
        print(
            f"{job} was not told to end itself: its torchrun starts it again, with the nodes that "
            "are left"
        )
        status.status = EXIT_RESTART


def ask_hub(job: Job, arguments: Sequence[str] | None) -> dict[str, HubAnswer]:
    """What the hub says of the names in the config: rank 0 asks, once for all ranks, which get the
    same commits. Then one process of each host fetches the small files by which a config is
    checked."""
    fields_by_name: dict[str, Any] = {}  # as JSON, in which values travel between ranks
    if job.rank == 0:
        with suppress(InputError):  # reading the config says what is wrong with it
            options = train_parser().parse_args(arguments)
            answers = Config.ask(options.config, options.overrides)
            fields_by_name = {name: asdict(answer) for name, answer in answers.items()}
    of_rank_0 = itemgetter(0)
    fields_by_name = job.reduce("asking the hub", fields_by_name, of_rank_0)
    hub = {name: HubAnswer(**fields) for name, fields in fields_by_name.items()}
    if hub:
        with job.collective_check("fetching what the hub has of the config's names"):
            if job.environment.local_rank == 0:
                fetch_texts(hub)
    return hub


def read_config(
    arguments: Sequence[str] | None,
    world_size: int,
    device: str,
    *,
    again: bool = False,
    hub: Mapping[str, HubAnswer] | None = None,
) -> Config:
    """The config named on the command line, with its overrides; `again` and `hub` as in
    Config.load. Raises InputError."""
    options = train_parser().parse_args(arguments)
    config = Config.load(
        options.config,
        options.overrides,
        world_size=world_size,
        device=device,
        for_training=True,
        again=again,
        hub=hub,
    )
    find_sinks(config.metrics)
    return config


def start_timeout(arguments: Sequence[str] | None, world_size: int) -> float:
    """`train.start_timeout_s`: seconds that ranks wait for each other, from their first meeting on.

    It has to be known before they meet, and so before the config is checked. If it cannot be read,
    the default counts: what is wrong with the config is said once they have met, by one for all.
    """
    if world_size > 1:
        with suppress(Exception):
            options = train_parser().parse_args(arguments)
            given = Config.read_key(options.config, options.overrides, "train.start_timeout_s")
            return float(given)
    return TrainSection.start_timeout_s


def train_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m meshtrain.train",
        description="Trains the model of a YAML file on the processes of this job.",
        epilog="examples:\n  python -m meshtrain.train quickstart train.steps=50\n"
        "  torchrun --standalone --nproc-per-node=4 -m meshtrain.train quickstart layout.tp=2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="a YAML file, or the name of a built-in config: quickstart")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="override a key: train.steps=50"
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors reach all ranks before any of them exits."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}\n{self.format_usage().strip()}")


if __name__ == "__main__":
    sys.exit(main(signals=signals))
