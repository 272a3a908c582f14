"""The books of a run: what each step's result means for the totals, the rows that people watch, and going on or not."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meshtrain.build import plain_model
from meshtrain.checkpoint.retention import SAMPLES
from meshtrain.data import OpenData
from meshtrain.data.order import samples_digest, share
from meshtrain.data.order_numpy import items
from meshtrain.ending import Ending
from meshtrain.errors import TrainingError
from meshtrain.evaluate import Evaluation
from meshtrain.flops import mfu, peak_flops, sample_flops
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh
from meshtrain.metrics import Metrics, NoMetrics
from meshtrain.runtime import Job
from meshtrain.step import StepResult
from meshtrain.timing import StepClock, memory_gib

if TYPE_CHECKING:
    from meshtrain.config import Config
    from meshtrain.operate.goodput import Ledger


class Report:
    """Takes the results of the steps in their order. All ranks keep one, because all of them stop together."""

    def __init__(
        self,
        config: "Config",
        job: Job,
        mesh: Mesh,
        data: OpenData,
        clock: StepClock,
        ending: Ending,
        ledger: "Ledger",
        steps: int,
        *,
        first: int = 1,
        books: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            ending: learns how far the run is.
            ledger: keeps account of the wall time.
            steps: the run's last step.
            first: the first step of this job; rows of it and of later ones are dropped.
            books: those of the checkpoint that the run goes on from, as `books()` gave them.
        """
        self.config, self.job, self.mesh, self.data, self.clock = config, job, mesh, data, clock
        self.ending, self.ledger, self.steps, self.first = ending, ledger, steps, first
        self.times: dict[str, float] | None = None  # of the last step taken, as StepClock has them
        self.beside: dict[str, float] = {}  # numbers that the next row gets besides its own
        self.slowest_s = 0.0  # of the steps taken so far, the first left out
        self.stop_asked = False  # by some rank, before one of the steps taken so far
        self.evaluations: dict[int, dict[str, float]] = {}  # of the last step that had one, as a manifest has it
        self._n_samples = len(data.train)
        self.tokens = 0 if books is None else books["tokens"]
        self._epoch = _Sums() if books is None else _Sums(**books["epoch"])
        self._pending: Callable[[], StepResult] | None = None
        self._metrics = NoMetrics()
        if job.rank == 0:
            self._metrics = Metrics(
                ending.folder.path,
                task=data.task,
                steps=steps,
                step=first - 1,
                tensorboard=config.metrics.tensorboard,
            )
            self._count_flops()

    def _count_flops(self) -> None:
        first = self.data.train.read([(0, 0)], 1)
        batch = first if isinstance(first, tuple) else first.batch()
        self._flops, of_model = sample_flops(plain_model(self.config), batch.inputs)
        self._peak, of_device = peak_flops(self.job.device, self.config.train.precision)
        self.say(f"{of_model}; {of_device} (for MFU)")

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()

    @property
    def step(self) -> int:
        """The last step whose result was taken."""
        return self.ending.step

    def say(self, text: str) -> None:
        """Rank 0 prints, above its progress line."""
        self._metrics.say(text)

    def later(self, result: Callable[[], StepResult]) -> None:
        """The result of a step that the device may still be working on."""
        self._pending = result

    def take(self) -> None:
        """Books the step that is pending, if there is one, and prints and writes its row.

        Raises:
            TrainingError: on every rank, if the step was not finite and the policy says to stop.
        """
        if self._pending is None:
            return
        result, self._pending = self._pending(), None
        self.times = times = self.clock.pop()
        assert times is not None  # every update ends a step of the clock
        self.stop_asked |= result.stop_asked
        if result.step > self.first:  # the first one starts the readers, and compiles
            self.slowest_s = max(self.slowest_s, times["step_time_s"])
        if not result.finite and not result.overflow:
            self._not_finite(result)
        self.ending.step = result.step
        self.tokens += result.targets
        if result.finite:
            self._epoch.add(result)
        self.ledger.step(result.step, times["time_data_s"])
        if self.job.rank == 0:
            self._metrics.row(self._row(result, times) | self.beside)
            self.beside = {}
        if self.ends_epoch(result.step):
            self._metrics.epoch(result.step * self.config.batch.global_size // self._n_samples, self._epoch.means())
            self._epoch = _Sums()

    def evaluates_after(self, step: int) -> bool:
        """Whether the YAML asks for an evaluation after this step. The last step has one unless there are none."""
        every = self.config.train.eval_every
        if every == "epoch":
            return step == self.steps or self.ends_epoch(step)
        return bool(every) and (step == self.steps or step % int(every) == 0)

    def evaluation(self, step: int, found: Evaluation, samples: int) -> None:
        """Books an evaluation of so many samples after `step`, whose result has been taken."""
        numbers = found.numbers(self.data.task, self.data.bytes_per_target)
        self.evaluations = {step: numbers | {SAMPLES: samples}}
        self._metrics.evaluation(step, numbers)
        self.clock.restart()  # its time is no step's

    def books(self) -> dict[str, Any]:
        """What is counted over the steps taken so far, for a checkpoint: anything that JSON can carry."""
        return {"tokens": self.tokens, "epoch": vars(self._epoch), "steps": self.steps}

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is over after this step."""
        size = self.config.batch.global_size
        return step * size // self._n_samples > (step - 1) * size // self._n_samples

    def _row(self, result: StepResult, times: dict[str, float]) -> dict[str, object]:
        size, seconds = self.config.batch.global_size, times["step_time_s"]
        return {
            "step": result.step,
            "epoch": (result.step * size - 1) // self._n_samples + 1,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": self.tokens,
            "samples": result.step * size,
            "samples_digest": samples_digest(sample for _, sample in self._items(result.step)),
            "tokens_per_s": result.targets / seconds,
            "mfu": mfu(None if self._flops is None else self._flops * size, seconds, self._peak, self.job.world_size),
            "memory_gib": memory_gib(self.job.device),
            **times,
            **self.ledger.account().row(),
            **{f"sent_bytes_{axis}": sent for axis, sent in result.sent.items()},
        }

    def _items(self, step: int) -> list[tuple[int, int]]:
        """The global batch of a step: (epoch, sample) pairs."""
        size = self.config.batch.global_size
        return items(self.config.train.seed, range((step - 1) * size, step * size), self._n_samples)

    def _not_finite(self, result: StepResult) -> None:
        """Says whose samples it was. All ranks are here, because all of them have the same result."""
        size = self.config.batch.global_size
        batch = self._items(result.step)
        own = share(size, self.mesh.size(*DATA_AXES), self.mesh.index(*DATA_AXES))
        mine = [batch[own[i]][1] for i in result.bad_samples if i < len(own) and self.mesh.speaks_for_samples]
        found = self.job.gather("naming what is not finite", [str(self.job), mine])
        named = [f"{who}: samples {', '.join(map(str, samples))}" for who, samples in found if samples]
        what = (
            f"step {result.step}: the loss is not finite ({'; '.join(named)})"
            if named
            else f"step {result.step}: every sample's loss is finite, but the gradient's norm is {result.grad_norm}"
        )
        if self.config.train.on_nonfinite == "stop":
            raise TrainingError(
                f"{what}. Stopped before that update: the parameters are those of step {result.step - 1}. "
                "Look at these samples, lower optimizer.lr, or leave such steps out with train.on_nonfinite=skip"
            )
        self.say(f"{what}; its update is left out (train.on_nonfinite: skip)")


class _Sums:
    """Sums over the steps of an epoch."""

    def __init__(self, loss: float = 0.0, targets: int = 0, correct: int | None = None) -> None:
        self.loss = loss
        self.targets = targets
        self.correct = correct

    def add(self, result: StepResult) -> None:
        self.loss += result.loss * result.targets
        self.targets += result.targets
        if result.correct is not None:
            self.correct = (self.correct or 0) + result.correct

    def means(self) -> dict[str, float]:
        count = max(self.targets, 1)
        means = {"loss": self.loss / count}
        return means if self.correct is None else means | {"accuracy": self.correct / count}
