"""One training step: forwards and backwards of the microbatches, one look at the whole mesh, one update.

Nothing in a step waits for the device. Whether a step was finite is decided there, and its update with it; the host
reads the outcome while the next step is being computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshtrain.data.batch import Batch
from meshtrain.data.order import share
from meshtrain.dropout import set_dropout
from meshtrain.layout import DATA_AXES
from meshtrain.loss import GlobalCount, correct_predictions, sample_losses, valid_targets
from meshtrain.mesh import Mesh
from meshtrain.numerics import compute_dtype
from meshtrain.optim import Optimizer, clip_factor
from meshtrain.parallel.data import last_microbatch
from meshtrain.pipeline.actions import Action, Kind
from meshtrain.pipeline.engine import Pipeline, shapes_of
from meshtrain.timing import StepClock

if TYPE_CHECKING:
    from meshtrain.config import Config


@dataclass(frozen=True)
class StepResult:
    """What a step came to, over the whole global batch.

    Attributes:
        loss: mean over all valid targets.
        grad_norm: global norm of the gradient of that loss, before clipping.
        targets: the number of valid targets.
        correct: how many of them were predicted; None but for classifiers.
        lr: the learning rate of the update.
        finite: whether loss and norm were numbers; if not, there was no update.
        overflow: in float16, whether a too large loss scale was the reason.
        bad_samples: those of this rank's samples, numbered within its share, whose loss was not finite.
        sent: axis -> bytes that this rank sent over it for the step.
        stop_asked: whether some rank was asked to stop when it took this step.
    """

    step: int
    loss: float
    grad_norm: float
    targets: int
    correct: int | None
    lr: float
    finite: bool
    overflow: bool
    bad_samples: list[int]
    sent: dict[str, int]
    stop_asked: bool = False


class Trainer:
    """Takes a parallelized model through steps: `accumulate`, then `update`, then, later, the result of the step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: "Config",
        mesh: Mesh,
        device: torch.device,
        *,
        task: str,
        clock: StepClock,
    ) -> None:
        """
        Args:
            task: "language", or "classification", whose correct predictions are counted.
            clock: measures the phases of the step.
        """
        self.model = model
        self.optimizer = optimizer
        self.clip_norm = config.optimizer.clip_norm
        self.mesh = mesh
        self.device = device
        self.seed = config.train.seed
        self.share = share(config.batch.global_size, mesh.size(*DATA_AXES), mesh.index(*DATA_AXES))
        self.dtype = compute_dtype(config.train.precision)
        self.counts_correct = task == "classification"
        self.clock = clock
        self.scale = LossScale(device) if config.train.precision == "float16" else None
        self.count: GlobalCount | None = None
        self._losses: dict[int, Tensor] = {}  # microbatch -> of each of its samples
        self._correct: list[Tensor] = []

    def accumulate(self, step: int, microbatches: list[Batch]) -> None:
        """Forward and backward of this rank's share of the global batch; the gradients are then those of its loss.

        Args:
            step: counted from 1, as in `update`.
            microbatches: of equal size; those of `train_batches`.
        """
        self.optimizer.zero_grad()
        self.mesh.traffic.restart()  # what an evaluation sent is no step's
        self._losses, self._correct = {}, []
        self.count = GlobalCount(sum(valid_targets(batch.targets) for batch in microbatches), self.mesh, self.device)
        work = _Microbatches(self, step, microbatches)
        if isinstance(self.model, Pipeline):
            self.model.run(work)
            return
        for i in range(len(microbatches)):
            last_microbatch(self.model, i == len(microbatches) - 1)
            work.enter(self.model, i)
            with self.clock.phase("forward"):
                loss = work.loss(i, self.model(*work.inputs(i)))
            with self.clock.phase("backward"):
                loss.backward()

    def seen(self, microbatch: int, losses: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Remembers what a microbatch came to: the loss of each sample, and of a classifier the correct predictions."""
        self._losses[microbatch] = losses
        if self.counts_correct:
            self._correct.append(correct_predictions(logits, targets))

    def update(self, step: int, stop_asked: bool = False) -> Callable[[], StepResult]:
        """The update of step `step` with the accumulated gradients, unless something was not finite.

        Args:
            stop_asked: whether this rank was asked to stop; the result tells it to all of them.

        Returns:
            A function that gives the step's result; it waits until the device has got there.
        """
        assert self.count is not None  # accumulate() came before
        with self.clock.phase("optimizer"):
            in_order = [self._losses[i] for i in sorted(self._losses)]  # none on a rank without the last stage
            losses = (
                torch.cat(in_order).double() if in_order else torch.zeros(0, dtype=torch.float64, device=self.device)
            )
            correct = torch.stack(self._correct).sum() if self._correct else losses.new_zeros(())
            counted = losses.sum(), correct.double()
            if not self.mesh.speaks_for_samples:
                counted = losses.new_zeros(()), losses.new_zeros(())
            asked = losses.new_full((), float(stop_asked))
            seen = torch.stack([counted[0], self.optimizer.squared_norm(), counted[1], asked])
            with self.clock.phase("communication"):
                self.mesh.sum(seen)
            loss, norm = seen[0] / self.count.value(), seen[1].sqrt()
            scale = torch.ones_like(norm) if self.scale is None else self.scale.value.double()
            unscale = None if self.scale is None else 1 / scale
            norm = norm if unscale is None else norm * unscale
            bad = ~(loss.isfinite() & norm.isfinite())
            factor = clip_factor(norm, self.clip_norm)
            if unscale is not None:
                factor = unscale if factor is None else factor * unscale
            lr = self.optimizer.update(step, factor, bad)
            if self.scale is not None:
                self.scale.update(bad)
            numbers = _Later(torch.stack([loss, norm, seen[2], self.count.total(), scale, seen[3]]))
        self.clock.end_step()
        sent = self.mesh.traffic.by_axis()
        return lambda: self._result(step, numbers.read(), losses, lr, sent)

    def _result(self, step: int, numbers: list[float], losses: Tensor, lr: float, sent: dict[str, int]) -> StepResult:
        loss, norm, correct, targets, scale, asked = numbers
        finite = torch.tensor([loss, norm]).isfinite().tolist()
        bad = [] if all(finite) else (~losses.isfinite()).nonzero().flatten().tolist()
        # Where the scale is down to 1 it is not the scale that is too large.
        overflow = scale > 1 and finite == [True, False]
        hits = int(correct) if self.counts_correct else None
        return StepResult(step, loss, norm, int(targets), hits, lr, all(finite), overflow, bad, sent, asked > 0)


class _Microbatches:
    """The microbatches of a step, on their way from batches to losses."""

    def __init__(self, trainer: Trainer, step: int, batches: list[Batch]) -> None:
        self._trainer, self._step, self._batches = trainer, step, batches
        self._latest: tuple[int, Batch] | None = None

    def shapes(self, microbatch: int) -> tuple[tuple[int, ...] | None, ...]:
        """Of what the model takes."""
        return shapes_of(self._batches[microbatch].inputs)

    def inputs(self, microbatch: int) -> tuple[Tensor | None, ...]:
        """What the model takes."""
        return self._batch(microbatch).inputs

    def _batch(self, microbatch: int) -> Batch:
        if self._latest is None or self._latest[0] != microbatch:
            self._latest = microbatch, self._batches[microbatch].to(self._trainer.device, self._trainer.dtype)
        return self._latest[1]

    def enter(self, model: nn.Module, microbatch: int) -> None:
        """Says what the next forward, or a backward that computes it again, is of."""
        trainer, size = self._trainer, len(self._batches[microbatch].targets)
        first = trainer.share.start + microbatch * size
        set_dropout(model, seed=trainer.seed, step=self._step, samples=range(first, first + size))

    @contextmanager
    def around(self, stage: nn.Module, action: Action) -> Iterator[None]:
        """Of an action of a pipeline."""
        self.enter(stage, action.microbatch)
        with self._trainer.clock.phase("forward" if action.kind is Kind.FORWARD else "backward"):
            yield

    def loss(self, microbatch: int, logits: Tensor) -> Tensor:
        """A microbatch's share of the loss of the step, scaled for float16; remembers the loss of each sample."""
        trainer = self._trainer
        assert trainer.count is not None
        targets = self._batch(microbatch).targets
        losses = sample_losses(logits, targets)
        trainer.seen(microbatch, losses.detach(), logits.detach(), targets)
        with trainer.clock.phase("communication"):
            count = trainer.count.value()
        loss = losses.sum() / count.to(losses.dtype)
        return loss if trainer.scale is None else loss * trainer.scale.value


class _Later:
    """Numbers that are on their way from the device to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._numbers = numbers

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


class LossScale:
    """The factor that lifts float16 gradients above the smallest number of that type.

    One scale and one decision for all ranks: the global norm says whether any gradient overflowed. It then halves, and
    the step is skipped; after `GROWTH` good steps in a row it doubles (Micikevicius et al.,
    https://arxiv.org/abs/1710.03740).
    """

    FIRST = 2.0**16
    GROWTH = 2000

    def __init__(self, device: torch.device) -> None:
        self.value = torch.tensor(self.FIRST, device=device)
        self.good = torch.tensor(0, device=device)  # steps in a row

    def update(self, overflow: Tensor) -> None:
        """Takes the outcome of a step: a boolean scalar on the device. `value` and `good` stay on their memory."""
        good = torch.where(overflow, 0, self.good + 1)
        grows = good == self.GROWTH
        # Below 1 it would lift nothing, and from 0 it would never come back.
        lower, higher = (self.value / 2).clamp(min=1), torch.where(grows, self.value * 2, self.value)
        self.value.copy_(torch.where(overflow, lower, higher))
        self.good.copy_(torch.where(grows, 0, good))
