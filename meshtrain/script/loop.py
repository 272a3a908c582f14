"""The loop over a script's steps: which samples each has, and what surrounds it (times, metrics,
checkpoints, requests to stop), as the loop of a YAML's run has it (train.py)."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.checkpoint.resume import Resume
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.checkpoint.state import State
from meshtrain.data.loader import Indexable, collated_batches
from meshtrain.data.order import BatchSizes
from meshtrain.data.order_numpy import run_order
from meshtrain.errors import InputError, TrainingError, plural
from meshtrain.job.process import Job
from meshtrain.job.signals import StopRequest
from meshtrain.job.watchdog.watchdog import Watchdog
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh
from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.metrics.logger import Metrics, NoMetrics
from meshtrain.metrics.profiler import Profiler
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.metrics.straggler import StragglerDetector
from meshtrain.parallel.mixed_precision import reseed
from meshtrain.parallel.torch_private import tree_map_only
from meshtrain.run.checkpointing import Checkpointer, describe_saving
from meshtrain.run.fault_injection import FaultInjector
from meshtrain.run.phase_monitor import PhaseMonitor
from meshtrain.run.rank_table import layout_text
from meshtrain.run.status import RunStatus
from meshtrain.script.books import ScriptBooks, StepNumbers
from meshtrain.script.optimizer import SectionOptimizer, SpreadOptimizer


@dataclass(frozen=True)
class ScriptContext:
    """What a script's run works with, from its start to its end."""

    job: Job
    mesh: Mesh
    watchdog: Watchdog
    timer: StepTimer
    stop: StopRequest
    status: RunStatus
    leave: Callable[[], None]  # leaves the job, before the script ends

    @property
    def data_rank(self) -> int:
        """This rank's index among those with different samples."""
        return self.mesh.index(*DATA_AXES)


class Loop(Iterator[tuple[int, Any]]):
    """The steps of a run, from the one after its newest checkpoint on."""

    def __init__(
        self,
        context: ScriptContext,
        spec: RunSpec,
        model: nn.Module,
        optimizer: SpreadOptimizer | SectionOptimizer,
        dataset: Indexable,
        collate: Callable[[list[Any]], Any],
        workers: int,
    ) -> None:
        """Fills model and optimizer from the newest checkpoint, if there is one; all ranks
        construct it together. For the arguments, see `Run`."""
        self.metrics: NoMetrics = NoMetrics()
        self.number = 0  # of the step that is under way; 0: none
        self.loss: Tensor | None = None  # of that step, once its backward has run
        self.count: Tensor | None = None
        self._context = context
        self._spec = spec
        self._model = model
        self._optimizer = optimizer
        self._is_updated = True
        self._stops = False  # all ranks stop
        self._checkpointer: Checkpointer | None = None

        self._resume = resume = Resume(context.job, spec)
        if resume.checkpoint is not None:
            optimizer.make_states()
            resume.restore(self._state())
        samples = len(dataset)
        sizes = BatchSizes.of(spec.config.batch.global_size)
        self._order = run_order(spec.config.train.seed, sizes, samples)
        self._batches = collated_batches(
            dataset,
            collate,
            seed=spec.config.train.seed,
            first_step=resume.step,
            steps=spec.steps,
            global_size=sizes.largest,
            rank=context.data_rank,
            ranks=context.mesh.size(*DATA_AXES),
            workers=workers,
        )
        self._begin()
        self._steps = self._iterate()

    def _begin(self) -> None:
        """Opens what records the run."""
        context, spec, resume = self._context, self._spec, self._resume
        job = context.job
        goodput_folder = spec.folder if job.rank == 0 else None
        goodput = GoodputTracker(goodput_folder, resume.step, context.stop.signals.since)
        first_step = resume.step + 1
        for line in (*resume.about(), describe_saving(spec)):
            job.say(line)
        if resume.step == spec.steps:
            job.say(f"{spec.folder} has all of its {plural(spec.steps, 'step')} already")
        assert job.layout is not None
        layout_table = layout_text(job.layout) if job.rank == 0 else ""
        context.status.begin(spec.config, layout_table, goodput)

        section = spec.config.metrics
        profiler = Profiler(section, spec.folder, job.rank, job.device)
        faults = FaultInjector((), job)
        with job.collective_check("opening metrics.jsonl"):
            if job.rank == 0:
                self.metrics = Metrics(
                    spec.folder, task="classification", steps=spec.steps, step=resume.step
                )
            stragglers = StragglerDetector(job, first_step, self.metrics.say, spec.folder)
        self._monitor = PhaseMonitor(
            context.mesh,
            context.timer,
            goodput,
            context.watchdog,
            stragglers,
            profiler,
            faults,
            self.metrics.say,
        )
        self._books = ScriptBooks(job, self._order, self._monitor, self.metrics, spec.steps)

    def _state(self) -> State:
        return State(self._model, self._optimizer, self._context.mesh, self._context.job)

    def __next__(self) -> tuple[int, Any]:
        try:
            return next(self._steps)
        except StopIteration:
            if self._stops and self._monitor.finished_step < self._spec.steps:
                self._stop_script()
            raise

    def close(self) -> None:
        """Ends the loop where it is, as when the script fails or leaves it."""
        self._steps.close()

    def _iterate(self) -> Generator[tuple[int, Any]]:
        context, spec, monitor = self._context, self._spec, self._monitor
        with context.stop.active(), monitor, self._books, ExitStack() as self._opened:
            if self._resume.checkpoint is not None:
                self._open_checkpointer()
            for step in range(self._resume.step + 1, spec.steps + 1):
                with monitor.step(step):
                    reseed(spec.config.train.seed, step, context.data_rank)
                    with context.timer.phase("data"):
                        batch = self._on_device(next(self._batches))
                    self.number = step
                    self._is_updated = False
                    try:
                        yield step, batch
                    except GeneratorExit:  # the script has left the loop
                        context.status.stopped = f"the script has left its loop in step {step}"
                        raise
                    self._require_update()
                if self._stops:
                    context.stop.mark_agreed()
                    break
                self._save_if_due(step)
            self.number = 0
            self._books.flush()
            if self._checkpointer is not None:
                with monitor.phase("last checkpoint"):
                    self._checkpointer.finish()
        if self._checkpointer is not None:
            self._checkpointer.check()

    def _on_device(self, batch: Any) -> Any:
        device = self._context.job.device
        is_double = self._spec.config.train.precision == "float64"

        def moved(x: Tensor) -> Tensor:
            # A model in float64 takes no other real numbers.
            dtype = torch.float64 if is_double and x.is_floating_point() else None
            return x.to(device, dtype, non_blocking=True)

        return tree_map_only(Tensor, moved, batch)

    def _require_update(self) -> None:
        if not self._is_updated:
            raise InputError(
                f"step {self.number} has ended without run.update: each step calls run.backward "
                "and run.update once"
            )

    # In an update ---------------------------------------------------------------------------------

    def wants_stop(self) -> bool:
        """Whether this rank was asked to stop."""
        checkpointer = self._checkpointer
        if checkpointer is not None and checkpointer.stop_reason():
            return True
        save_s = 0.0 if checkpointer is None else checkpointer.seconds
        return self._context.stop.reason(self._monitor.slowest_s, save_s) is not None

    def require_finite(self, loss: float, grad_norm: float) -> None:
        if torch.isfinite(torch.tensor([loss, grad_norm])).all():
            return
        self._books.flush()
        raise TrainingError(
            f"step {self.number}: the loss of the global batch is {loss}, and the norm of its "
            f"gradient {grad_norm}. Stopped before that update: the parameters are those of step "
            f"{self.number - 1}. Look at the step's samples, clip gradients (clip_norm), or take a "
            "lower learning rate"
        )

    def finish_step(self, numbers: StepNumbers, *, stops: bool) -> None:
        """Called at the end of an update, on all ranks with the same."""
        self._books.flush()
        self._books.take(numbers)
        self.loss = None
        self.count = None
        self._is_updated = True
        self._stops = self._stops or stops

    # Checkpoints ----------------------------------------------------------------------------------

    def _open_checkpointer(self) -> None:
        """Once the optimizer has its state: torch makes it in the first step."""
        self._checkpointer = self._opened.enter_context(
            Checkpointer(
                self._spec,
                self._resume,
                self._state(),
                self._books,
                self._monitor,
                self._context.job,
                self.metrics.say,
            )
        )

    def _save_if_due(self, step: int) -> None:
        if self._checkpointer is None:
            self._open_checkpointer()
        assert self._checkpointer is not None
        if self._checkpointer.due(step):
            self._books.flush()
            with self._monitor.phase("checkpoint"):
                self._checkpointer.save()

    def _stop_script(self) -> None:
        """Ends the script: what follows its loop is for a run that is done."""
        context = self._context
        assert self._checkpointer is not None
        checkpoint = self._checkpointer.checkpoint
        context.status.stop(context.stop.reason_given, checkpoint, self._spec)
        context.stop.clear()
        context.leave()
        by_torchrun = context.job.environment.launcher == "torchrun"
        raise SystemExit(0 if by_torchrun else context.status.status)
