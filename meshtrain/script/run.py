"""`meshtrain.Run`: a training loop in one's own script, on any mesh.

    run = meshtrain.Run("{dp_shard: -1}", global_size=16, output="runs/mine")
    model, optimizer = run.prepare(model, optimizer)
    for step, batch in run.steps(dataset, steps=200):
        loss = run.backward(loss_of, batch)
        run.update(optimizer)

The loop, its model, data, loss and optimizer are the script's. `Run` puts together what surrounds a
step: its parts are those of a YAML's run (train.py).
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import meshtrain
from meshtrain.checkpoint.folder_lock import owner_changed
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.data.loader import Indexable
from meshtrain.data.order import share
from meshtrain.errors import InputError
from meshtrain.job.consistency import checkpoint_versions, require_equal, run_fingerprints
from meshtrain.job.signals import Signals, StopRequest, in_main_thread
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.modeling.build import parameter_count
from meshtrain.optim.grad_norm import clip_factor
from meshtrain.parallel.fsdp import unmeasured_wait_phases
from meshtrain.parallel.options import ParallelOptions
from meshtrain.pipeline.engine import Pipeline
from meshtrain.run.rank_table import describe_hosts
from meshtrain.run.run_folder import RunFolder, lock_checkpoints, lock_for_job
from meshtrain.run.status import RunStatus
from meshtrain.script.books import StepNumbers
from meshtrain.script.data import data_fingerprint
from meshtrain.script.loop import Loop, ScriptContext
from meshtrain.script.loss_call import LossOf
from meshtrain.script.membership import Membership
from meshtrain.script.microbatches import count_microbatches, shares_of_step, split_batch
from meshtrain.script.optimizer import (
    SectionOptimizer,
    SpreadOptimizer,
    carry_over,
    scheduler_note,
)
from meshtrain.script.settings import OUTPUT, PRECISION, VARIABLE, most_steps, script_config
from meshtrain.script.spread import spread
from meshtrain.script.step import ScriptStep

Model = TypeVar("Model", bound=nn.Module)

# within which all ranks have to join, and then to come to each message
WAIT_S = 600.0


class Run:
    """A run of a script: `prepare` the model and its optimizer, then loop over `steps`, in each of
    which `backward` and `update` are called once.

    The process leaves its job when the script ends. `with meshtrain.Run(...) as run:` leaves it at
    the end of the block.

    Attributes:
        job: this process in its job: `rank`, `world_size`, `device`.
        mesh: the layout's process groups, for communication of the script's own.
    """

    def __init__(
        self,
        layout: str | Mapping[str, int] = "{dp_shard: -1}",
        *,
        global_size: int,
        micro_size: int | None = None,
        seed: int = 0,
        precision: str = "float32",
        clip_norm: float | None = None,
        output: str | os.PathLike[str],
        every: int = 100,
        schedule: str | None = None,
    ) -> None:
        """Joins the job that the environment describes: torchrun, srun, or a world of one.

        Args:
            layout: the axes of the mesh, as in a YAML; the variable MESHTRAIN_LAYOUT, if it is set,
                has the last word.
            global_size: samples of a step, over all ranks.
            micro_size: the most samples of a forward on one rank; None: all that the rank has.
            seed: of the order of samples, of dropout, and of random numbers in a step.
            precision: of forward and backward: float32, bfloat16 (weights stay float32), float64;
                the variable MESHTRAIN_PRECISION has the last word.
            clip_norm: limits the global norm of the gradient; None: it is not clipped.
            output: the run's folder, for checkpoints and metrics.jsonl; the variable
                MESHTRAIN_OUTPUT has the last word.
            every: steps between checkpoints; 0: only at the end.
            schedule: of a pipeline (`pp`), by name; None: 1f1b.

        Raises SystemExit: with status 2, if an argument is wrong, which is printed.
        """
        signals = Signals.install() if in_main_thread() else Signals()
        self._membership = Membership(WAIT_S)
        self.job = job = self._membership.job
        try:
            # What the script does in a step, and how fast, is unknown here.
            deadlines = self._membership.watchdog.deadlines
            deadlines.start_s, deadlines.adapts = float("inf"), False
            with job.collective_check("reading the arguments of meshtrain.Run"):
                self._config = script_config(
                    layout,
                    job.world_size,
                    launched=job.environment.launcher != "none",
                    variable=os.environ.get(VARIABLE),
                    global_size=global_size,
                    micro_size=micro_size,
                    seed=seed,
                    precision=os.environ.get(PRECISION) or precision,
                    clip_norm=clip_norm,
                    output=os.environ.get(OUTPUT) or os.fspath(output),
                    every=every,
                    schedule=schedule,
                )
            require_equal(job, *run_fingerprints(self._config, os.environ))
            names, counts = job.hosts()
            assert self._config.resolved is not None
            job.layout = self._config.resolved.on_hosts(counts, names)
            self._open_folder(signals)
            job.connect(WAIT_S)
        except BaseException as error:
            self._membership.leave(error)
            raise
        self._membership.leave_with_script()

        self.mesh: Mesh = build_mesh(job.layout, job.device.type)
        self.model: nn.Module | None = None  # from `prepare` on
        self._clip_norm = clip_norm
        self._micro_size = micro_size
        ranks = self.mesh.size(*DATA_AXES)
        self._data_rank = self.mesh.index(*DATA_AXES)
        self._share = share(global_size, ranks, self._data_rank)
        self._microbatches = count_microbatches(global_size, micro_size, ranks)
        self._timer = StepTimer(job.device, hiding=unmeasured_wait_phases(self.mesh))
        self._optimizer: SpreadOptimizer | SectionOptimizer
        self._step: ScriptStep
        self._loop: Loop | None = None  # while there are steps

    def _open_folder(self, signals: Signals) -> None:
        job = self.job
        self._folder = folder = RunFolder(Path(self._config.train.output).expanduser())
        enter = self._membership.enter
        option = 'output="FOLDER"'
        enter(lock_for_job(folder.path, job, "the run's folder", option=option))
        self._checkpoints = enter(lock_checkpoints(None, folder, job))
        self._stop = StopRequest(signals)
        if job.rank == 0:
            self._stop.watch(folder.path, None, os.environ, owner_changed)
        self._status = enter(RunStatus(folder, job))
        self._membership.watchdog.on_job_lost(self._status.write_failed, folder.path / "failures")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._membership.leave(error)

    def say(self, text: str) -> None:
        """Prints a line, on rank 0."""
        if self._loop is None:
            self.job.say(text)
        else:
            self._loop.metrics.say(text)

    # Before the loop ------------------------------------------------------------------------------

    def prepare(
        self, model: Model, optimizer: torch.optim.Optimizer | Mapping[str, Any], **options: Any
    ) -> tuple[Model, Any]:
        """Spreads a model and its optimizer over the ranks. All ranks get the values of rank 0.

        Returns both: the same objects, but with `pp` a `Pipeline` of this rank's stages in the
        place of the model.

        Args:
            model: plain, on any device. Its blocks, which FSDP gathers and `pp` deals out, are what
                its function `blocks()` returns, or the layers of an nn.Sequential.
            optimizer: of torch.optim, or like it, on parameters of the model, with no step made. Or
                the keys of a YAML's section `optimizer`, such as `{"name": "muon", "lr": 1e-3}`:
                then one of meshtrain's own is returned.
            options: any of `ParallelOptions` by name: `tp_plan` for a model whose file has none;
                `sample`, the arguments of `model(*sample)`, which `pp` needs if the model has
                parameters outside of its blocks; `recompute`, `compile`.

        Raises:
            InputError: the layout would change what the model computes, or the optimizer.
        """
        if self.model is not None:
            raise InputError("run.prepare was called before: a run has one model")
        # What is wrong with it is seen on the plain model.
        make_optimizer = carry_over(optimizer, model, self._clip_norm)
        batch = self._config.batch
        settings = ParallelOptions(
            precision=self._config.train.precision,
            measured_wait=lambda: self._timer.phase("communication"),
            **options,
        )
        if isinstance(optimizer, torch.optim.Optimizer):
            _refuse_torchs(optimizer, settings)
        kind, parameters = type(model).__name__, parameter_count(model)
        spread_model = spread(
            model,
            self.mesh,
            self.job.device,
            settings,
            schedule=self._config.pipeline.schedule,
            microbatches=self._microbatches,
            global_size=batch.sizes.largest,
            micro_size=batch.micro_size,
        )
        self.model = spread_model
        self._optimizer = make_optimizer(spread_model, self.mesh)
        self._step = ScriptStep(
            spread_model,
            self.mesh,
            self.job.device,
            self._timer,
            seed=self._config.train.seed,
            global_size=batch.sizes.largest,
            shares=shares_of_step(batch.sizes.largest, self._microbatches, self.mesh),
        )
        layout = self.job.layout
        assert layout is not None
        self.say(f"{describe_hosts(layout)}, on {self.job.device_name()}, layout {layout}")
        self.say(f"model {kind}: {parameters:,} parameters")
        if isinstance(spread_model, Pipeline):
            self.say(spread_model.about)
        return spread_model, self._optimizer.optimizer  # type: ignore[return-value]

    # The loop -------------------------------------------------------------------------------------

    def steps(
        self,
        dataset: Indexable,
        *,
        steps: int,
        collate: Callable[[list[Any]], Any] = default_collate,
        workers: int = 0,
    ) -> Iterator[tuple[int, Any]]:
        """The steps of the run that are left, each with this rank's samples of its global batch:
        step n, from 1, takes the samples `batch_samples(seed, n - 1, global_size, len(dataset))`.

        The first is the one after the run's newest checkpoint in `output`, if there is one. After
        the last, or when the run is asked to stop (SIGTERM, SIGUSR1, Ctrl-C, a file STOP in
        `output`), the state is saved; a stop then ends the script with status 75, under torchrun
        with 0.

        Args:
            dataset: has a length, and `dataset[i]` depends on i alone.
            steps: the last step of the run; the variable MESHTRAIN_STEPS has the last word.
            collate: stacks a list of samples; its tensors, in tuples, lists and dicts, come to the
                device.
            workers: processes that read samples ahead.

        Raises:
            InputError: there is no such data set, or the checkpoint is of another run.
            TrainingError: a step's loss or gradient is not finite, or the state cannot be saved.
        """
        if self.model is None:
            raise InputError("run.steps comes after run.prepare, whose model it trains")
        if self._loop is not None:
            raise InputError("run.steps was called before: a run has one loop")
        if not isinstance(steps, int) or steps < 1:
            raise InputError(f"run.steps: steps is {steps!r}: expected at least 1")
        steps = most_steps(steps, os.environ)
        samples = _length_of(dataset)
        require_equal(self.job, data_fingerprint(dataset))
        self._config = self._config.of_steps(steps)
        data = {"fingerprint": str(samples), "train": samples}
        code = checkpoint_versions(_script())
        spec = RunSpec(
            config=self._config,
            folder=self._folder.path,
            checkpoints=self._checkpoints,
            data=data,
            versions=code,
            steps=steps,
            in_yaml=False,
        )
        self._optimizer.set_steps(steps)
        if isinstance(self._optimizer, SpreadOptimizer):
            note = scheduler_note(self._optimizer.optimizer)
            if note is not None:
                self.say(note)
        context = ScriptContext(
            job=self.job,
            mesh=self.mesh,
            watchdog=self._membership.watchdog,
            timer=self._timer,
            stop=self._stop,
            status=self._status,
            leave=self._membership.leave,
        )
        self._loop = Loop(context, spec, self.model, self._optimizer, dataset, collate, workers)
        self._membership.enter(closing(self._loop))  # if it is still open when the script ends
        return self._loop

    def backward(self, loss_of: LossOf, batch: Any) -> Tensor:
        """Forward and backward of this rank's batch, in microbatches. All ranks call it.

        Args:
            loss_of: (model, microbatch) -> (sum, count): the sum of the losses of its samples, a
                scalar tensor, and what they count, a number of the data alone. With `pp` it calls
                the model once. It is called with real samples only, each once; but if a rank has
                fewer samples than microbatches, another time with one of them, which then counts 0.
            batch: from `steps`, or of as many samples along each tensor's first dim.

        Returns:
            The sum of all sums / the sum of all counts of the global batch: a scalar in float64,
            the same on every rank. The gradients of the parameters are those of this mean.

        Raises:
            InputError: `loss_of` or the batch is not as it should be.
        """
        loop = self._current_loop("run.backward")
        if loop.loss is not None:
            raise InputError(
                f"run.backward was called twice in step {loop.number}: once in each step, for the "
                "whole batch; join losses in loss_of"
            )
        microbatches = split_batch(batch, self._share, self._microbatches)
        loss, count = self._step.backward(loop.number, loss_of, microbatches)
        loop.loss, loop.count = loss, count
        return loss.clone()

    def update(self, optimizer: Any) -> None:
        """Ends a step: clips, updates the parameters, sets their gradients to None, and notes the
        step in metrics.jsonl. A step whose counts add up to 0 updates nothing.

        Raises:
            TrainingError: on every rank: the loss or the gradient is not finite. The parameters are
                those of the step before.
        """
        loop = self._current_loop("run.update")
        if optimizer is not self._optimizer.optimizer:
            raise InputError("run.update takes the optimizer that run.prepare has returned")
        if loop.loss is None or loop.count is None:
            raise InputError("run.update comes after run.backward, once in each step")
        with self._timer.phase("optimizer"):
            stop_asked = loop.wants_stop()
            squared = self._optimizer.squared_norm()
            sums = self._step.reduce(squared, stop_asked=stop_asked)
            norm = sums.squared_norm.sqrt()
            # The one moment of a step at which the host waits for the device.
            numbers = torch.stack([loop.loss, loop.count, norm, sums.stop_requests]).tolist()
            loss, count, grad_norm, stops = numbers
            is_empty = count == 0
            if not is_empty:
                loop.require_finite(loss, grad_norm)
                self._optimizer.update(loop.number, clip_factor(norm, self._clip_norm))
            lr = self._optimizer.lr
            self._optimizer.zero_grad()
            self._step.receive(sums, skipped=is_empty)
            terms = self._step.metrics(sums)
        self._timer.end_step()
        loop.finish_step(
            StepNumbers(
                step=loop.number,
                loss=None if is_empty else loss,
                grad_norm=grad_norm,
                count=count,
                lr=lr,
                sent=self.mesh.comm_bytes.by_axis(),
                terms=terms,
            ),
            stops=stops > 0,
        )

    def _current_loop(self, what: str) -> Loop:
        if self._loop is None or self._loop.number == 0:
            raise InputError(f"{what} belongs into the loop over run.steps(...)")
        return self._loop


def _refuse_torchs(optimizer: torch.optim.Optimizer, options: ParallelOptions) -> None:
    """Raises InputError: an option is about the updates of meshtrain's own optimizers."""
    keys = "give run.prepare the keys of one, such as {'name': 'adamw', 'lr': 1e-3}"
    kind = type(optimizer).__name__
    if options.shard_optimizer:
        raise InputError(
            f"shard_optimizer divides the updates of meshtrain's own optimizers, and {kind} is "
            f"none of them: use dp_shard, or {keys}"
        )
    if options.offloads_optimizer:
        raise InputError(
            f"offload: {options.offload} keeps the states of meshtrain's own optimizers on the "
            f"host, and {kind} is none of them: use offload: activations, or {keys}"
        )


def _length_of(dataset: Any) -> int:
    kind = type(dataset).__name__
    if not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"run.steps deals out the samples of a data set by their index, and {kind} has none: "
            "give it the data set itself, such as the `dataset` of a DataLoader, with the loader's "
            "collate_fn as `collate`"
        )
    try:
        samples = len(dataset)
    except TypeError:
        raise InputError(
            f"run.steps takes a data set with a length and samples by index, and {kind} has no "
            "length: give it __len__ and __getitem__"
        ) from None
    if samples < 1:
        raise InputError("run.steps: the data set is empty")
    return samples


def _script() -> ModuleType:
    """The module that is run; meshtrain's own where it has no file, as in a notebook."""
    script = sys.modules["__main__"]
    return script if getattr(script, "__file__", None) else meshtrain
