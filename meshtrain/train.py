"""The training loop, from a YAML file to a trained model:

    torchrun --standalone --nproc-per-node=4 -m meshtrain.train configs/quickstart.yaml
    train.steps=50

Every rank runs this same code. Nothing in it depends on the layout: the differences between one
process and a thousand are behind `build_mesh`, `build_model` and the process groups that they
create.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from meshtrain.job.signals import Signals, StopKind, StopRequest, end_with_launcher

if __name__ == "__main__":
    end_with_launcher(os.environ)
    # importing torch takes seconds, and an unhandled signal ends the process
    signals = Signals.install(importing=True)

from torch import nn  # only after the signal handlers are installed

from meshtrain.checkpoint.folder_lock import owner_changed
from meshtrain.checkpoint.local import LocalDisk
from meshtrain.checkpoint.resume import Resume
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.checkpoint.state import State
from meshtrain.config import Config
from meshtrain.config.locate import model_file
from meshtrain.config.schema import Train
from meshtrain.data import OpenData
from meshtrain.data.cache import cache_folder
from meshtrain.data.mixture import sample_order
from meshtrain.errors import InputError, StartError
from meshtrain.evaluate import evaluate, evaluation_set
from meshtrain.foresight.start import MemoryForecast
from meshtrain.job.consistency import (
    Fingerprint,
    checkpoint_versions,
    require_equal,
    run_fingerprints,
)
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit, refuse_start
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
from meshtrain.modeling.build import compile_choice
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel.compile import keep_compiled_code
from meshtrain.parallel.fsdp import unmeasured_wait_phases
from meshtrain.parallel.mixed_precision import reseed, set_numerics
from meshtrain.run.checkpointing import Checkpointer, open_uploads
from meshtrain.run.fault_injection import FaultInjector
from meshtrain.run.phase_monitor import PhaseMonitor
from meshtrain.run.pipeline_trace import record_timeline
from meshtrain.run.rank_table import layout_text
from meshtrain.run.results import show, write_export
from meshtrain.run.run_folder import RunFolder, lock_checkpoints
from meshtrain.run.setup import banner_lines, load_data, model_of_run, readers, total_steps
from meshtrain.run.status import EXIT_RESTART, RunStatus
from meshtrain.run.step_logger import StepLogger
from meshtrain.trainer import Trainer

# time within which torchrun's agents on all nodes forward a signal, after the first of them did
AGENTS_S = 10.0


def main(arguments: Sequence[str] | None = None, signals: Signals | None = None) -> int:
    """Trains as the command line says; returns the exit status, or raises SystemExit with it."""
    show_any_text()
    signals = signals or Signals.install()
    signals.modules_imported()
    try:
        environment = read_environment(os.environ)
        job = join(environment, start_timeout(arguments, environment.world_size))
        if job.rank != 0:
            # libraries warn on every rank; rank 0 prints the warning
            warnings.simplefilter("ignore")
        with watched(job) as watchdog, job_exit(job):
            with job.collective_check("reading the config"):
                config = read_config(arguments, job.world_size, job.device.type, again=job.again)
            require_equal(job, *run_fingerprints(config, os.environ))
            status = run(config, job, signals, watchdog)
    except (
        InputError,
        StartError,
    ) as error:  # before the ranks watch each other; later ones are job_exit's
        return refuse_start(error)
    # torchrun treats any other status as a failure, ends the remaining ranks, and may restart them.
    return 0 if job.environment.launcher == "torchrun" and status != EXIT_RESTART else status


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
    watchdog.deadlines.start_s, watchdog.deadlines.given_s = (
        config.train.start_timeout_s,
        config.train.step_timeout_s,
    )
    watchdog.deadlines.save_limit_s = config.checkpoint.timeout_s
    names, counts = job.hosts()
    assert config.resolved is not None  # the config was loaded for this number of processes
    job.layout = config.resolved.on_hosts(counts, names)
    choice = compile_choice(config, job.layout, job.device)
    remedy = "mend it there, or use parallel.compile=false"
    require_equal(
        job, Fingerprint("what parallel.compile: auto chooses", {"auto": str(choice)}, remedy)
    )
    if choice.compiles:
        keep_compiled_code(cache_folder(config.data.cache))
    watchdog.deadlines.compiles = choice.compiles
    set_numerics(config.train.deterministic)
    folder = RunFolder(Path(config.train.output).expanduser())
    wait_s = config.train.lock_timeout_s
    with (
        folder.lock(job, wait_s),
        lock_checkpoints(config.checkpoint.path, folder, job, wait_s) as checkpoints,
    ):
        data = load_data(config, job)
        code = checkpoint_versions(model_file(config.model.name))
        local = (
            None if config.checkpoint.local is None else Path(config.checkpoint.local).expanduser()
        )
        disk = None if local is None else LocalDisk(local, checkpoints, job)
        uploads, steps = open_uploads(config, job), total_steps(config, data.train)
        with job.collective_check("counting the samples of each source"):
            sample_order(config, data.train, steps)
        spec = RunSpec(config, folder.path, checkpoints, data.identity, code, steps)
        checkpoint = Resume(job, spec, local=disk, uploads=uploads)
        stop = StopRequest(signals or Signals())
        if job.rank == 0:
            stop.watch(folder.path, config.train.time_limit_s, os.environ, owner_changed)
        with RunStatus(folder, job, config.train.on_exit) as status:
            watchdog.on_job_lost(status.write_failed, folder.path / "failures")
            if not status.already_finished(spec.steps, checkpoint, config):
                job.connect(process_group_timeout(watchdog.deadlines.longest("step")))
                train(spec, job, data, status, checkpoint, stop, watchdog)
        return status.status


def train(
    spec: RunSpec,
    job: Job,
    data: OpenData,
    status: RunStatus,
    checkpoint: Resume,
    stop: StopRequest,
    watchdog: Watchdog,
) -> None:
    """The training loop on one page."""
    assert job.layout is not None  # run() placed this process
    config, folder = spec.config, spec.folder
    mesh, forecast = (
        build_mesh(job.layout, job.device.type),
        MemoryForecast(folder, job.device, config, job.rank),
    )
    timer = StepTimer(job.device, hiding=unmeasured_wait_phases(mesh))
    model = model_of_run(
        spec, mesh, job, data, timer, from_checkpoint=checkpoint.checkpoint is not None
    )
    forecast.follow(model)
    optimizer = Optimizer(model, config.optimizer, mesh, spec.steps)
    held_out, mixture = (
        evaluation_set(data, config.train.eval_samples),
        sample_order(config, data.train).mixture,
    )
    trainer = Trainer(
        model, optimizer, config, mesh, job.device, task=data.task, timer=timer, mixture=mixture
    )
    state = State(model, optimizer, mesh, job, trainer.scale)
    profiler, faults = (
        Profiler(config.metrics, folder, job.rank, job.device),
        FaultInjector(config.train.chaos, job),
    )
    checkpoint.restore(state)
    goodput = GoodputTracker(folder if job.rank == 0 else None, checkpoint.step, stop.signals.since)
    banner = (
        *banner_lines(spec, job, data, held_out, model),
        *profiler.about(checkpoint.step, spec.steps),
    )
    for line in (*banner, *checkpoint.about(), *faults.about(), *goodput.about(), *forecast.note()):
        job.say(line)
    status.begin(config, layout_text(job.layout) if job.rank == 0 else "", goodput)
    batches, eval_set = readers(
        config, mesh, data, held_out, first_step=checkpoint.step, steps=spec.steps
    )

    with job.collective_check("opening metrics.jsonl"):
        metrics = NoMetrics()
        if job.rank == 0:
            sinks = status.open_sinks(config, spec.steps, checkpoint.step)
            metrics = Metrics(
                folder, task=data.task, steps=spec.steps, step=checkpoint.step, sinks=sinks
            )
        stragglers = StragglerDetector(
            job, checkpoint.step + 1, metrics.say, config.metrics.gpu_probe, folder
        )
        monitor = PhaseMonitor(
            mesh, timer, goodput, watchdog, stragglers, profiler, faults, metrics.say
        )
        logger = StepLogger(spec, job, mesh, data, monitor, metrics, counters=checkpoint.counters)
    checkpointer = Checkpointer(spec, checkpoint, state, logger, monitor, job, metrics.say)
    with forecast, logger, checkpointer, stop.active(), monitor:
        for step in range(checkpoint.step + 1, spec.steps + 1):
            with monitor.step(step):
                reseed(config.train.seed, step, mesh.index(*DATA_AXES))
                with timer.phase("data"):
                    microbatches = next(batches)
                with record_timeline(
                    config, model, step, job=job, layout=mesh.layout, folder=folder, say=metrics.say
                ):
                    trainer.forward_backward(step, microbatches)
                # the previous step: if it was not finite the run may end here, before this update
                logger.flush()
                if logger.stop_asked:
                    stop.mark_agreed()
                    break  # on all ranks; the accumulated gradients are discarded
                stop_asked = checkpointer.stop_reason() or stop.reason(
                    monitor.slowest_s, checkpointer.seconds
                )
                logger.defer(trainer.optimizer_step(step, stop_asked=bool(stop_asked)))
            if eval_set is not None and logger.evaluates_after(step):
                logger.flush()
                with monitor.phase("evaluation"), weights_used(config, optimizer, model):
                    result = evaluate(
                        model,
                        watchdog.iterate(eval_set, "evaluation"),
                        mesh,
                        job.device,
                        trainer.dtype,
                    )
                    # only now: the last batch may have compiled
                    watchdog.deadlines.warm_phases.add("evaluation")
                    logger.evaluation(step, result, eval_set.samples)
            if checkpointer.due(step):
                logger.flush()
                with monitor.phase("checkpoint"):
                    checkpointer.save()
        logger.flush()
        with monitor.phase("last checkpoint"):
            checkpointer.finish()
    finish(spec, job, data, model, optimizer, status, checkpointer, monitor, stop)


def finish(
    spec: RunSpec,
    job: Job,
    data: OpenData,
    model: nn.Module,
    optimizer: Optimizer,
    status: RunStatus,
    checkpointer: Checkpointer,
    monitor: PhaseMonitor,
    stop: StopRequest,
) -> None:
    """After the last step of this job: writes the results of the run, or, if it was asked to stop,
    how to resume."""
    config = spec.config
    monitor.end()
    if status.step < spec.steps:
        checkpointer.check()
        status.stop(stop.reason_given, checkpointer.checkpoint, spec)
        stop.clear()
        exit_or_restart(job, status, stop)
        return
    with monitor.phase("results"), weights_used(config, optimizer, model):
        show(config, job, monitor.mesh, data, model, spec.folder)
    if config.train.export is not None:
        with monitor.phase("export"), weights_used(config, optimizer, model):
            write_export(config, job, monitor.mesh, model, config.train.export)
    checkpointer.check()


def weights_used(
    config: Config, optimizer: Optimizer, model: nn.Module
) -> AbstractContextManager[None]:
    """Encloses every use of the weights other than training: inside, they are the EMA weights if
    `train.use_ema`."""
    return optimizer.averaged(model) if config.train.use_ema else nullcontext()


def exit_or_restart(job: Job, status: RunStatus, stop: StopRequest) -> None:
    """After SIGTERM: decides whether it was for this node too, or only for another, without which
    the job continues."""
    if job.environment.launcher == "torchrun" and StopKind.SIGTERM in status.stop_kinds:
        has_signal = stop.wait_for_signal(AGENTS_S)
        if not has_signal and job.environment.restarts_left > 0:
            print(
                f"{job} was not told to end itself: its torchrun starts it again, with the nodes "
                "that are left"
            )
            status.status = EXIT_RESTART


def read_config(
    arguments: Sequence[str] | None, world_size: int, device: str, *, again: bool = False
) -> Config:
    """The config named on the command line, with its overrides; `again` as in Config.load. Raises
    InputError."""
    options = train_parser().parse_args(arguments)
    known: dict[str, Any] = {"world_size": world_size, "device": device, "again": again}
    config = Config.load(options.config, options.overrides, for_training=True, **known)
    find_sinks(config.metrics)
    return config


def start_timeout(arguments: Sequence[str] | None, world_size: int) -> float:
    """`train.start_timeout_s`, which counts already while the ranks meet. What is wrong with the
    config is said once they have met, by one of them for all."""
    if world_size > 1:
        with suppress(Exception):
            return read_config(arguments, world_size, "cpu").train.start_timeout_s
    return Train.start_timeout_s


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
