"""One step of a script's run: backward of this rank's microbatches, and the sums over all ranks.

What the samples of a global batch count together is known only when the last forward has run, which
is after the first backward. So each backward divides by the number of samples, a provisional count;
once all of them have run, gradients are multiplied by that number / the true count.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshtrain import observer
from meshtrain.dropout import set_dropout
from meshtrain.errors import group_values
from meshtrain.loss import GlobalCount, MicrobatchTerms, StepTerms
from meshtrain.mesh import Mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.parallel.gather_samples import SampleShares
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.step_context import StepContext, use_context
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.actions import Action, Kind
from meshtrain.pipeline.engine import Pipeline, shapes_of
from meshtrain.script.loss_call import LossOf, Sums, call_loss, inputs_of, loss_of_output
from meshtrain.script.microbatches import Microbatch
from meshtrain.step_sums import NamedNumbers
from meshtrain.step_terms import TermSums, metrics_of


class ProvisionalCount(GlobalCount):
    """A count that is not known yet, and stands for it until gradients are corrected."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self._total = torch.full((), float(samples), dtype=torch.float64, device=device)
        self._work = None


@dataclass(frozen=True)
class LossSums(NamedNumbers):
    """What the ranks add up after the backwards."""

    loss: Tensor
    count: Tensor


@dataclass(frozen=True)
class UpdateSums(NamedNumbers):
    """What the ranks add up before the update."""

    squared_norm: Tensor  # of the gradients
    stop_requests: Tensor  # ranks that were asked to stop


@dataclass
class _Step:
    number: int  # from 1
    microbatches: Sequence[Microbatch]
    loss_of: LossOf
    terms: StepTerms
    inputs: list[tuple[Tensor | None, ...]] = field(default_factory=list)  # of a pipeline
    sums: list[Sums] = field(default_factory=list)  # without graphs


class ScriptStep:
    """Runs the steps of a spread model: `backward`, then `reduce`. For a pipeline it is the source
    of the step's microbatches (`pipeline.engine.MicrobatchSource`)."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        device: torch.device,
        timer: StepTimer,
        *,
        seed: int,
        global_size: int,
        shares: SampleShares,
    ) -> None:
        """`shares`: of the samples of a step, for `gather_samples`."""
        self.model = model
        self._mesh = mesh
        self._device = device
        self._timer = timer
        self._seed = seed
        self._shares = shares
        self._provisional = ProvisionalCount(global_size, device)
        self._terms = TermSums(model, mesh, device)  # of modules
        self._step: _Step
        self._count: Tensor  # of the global batch, once the backwards have run

    # Forward and backward -------------------------------------------------------------------------

    def backward(
        self, number: int, loss_of: LossOf, microbatches: Sequence[Microbatch]
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of this rank's microbatches; afterwards gradients are those of the
        mean over the global batch. Returns that mean and its count, scalars in float64 on the
        device, the same on every rank."""
        self._mesh.comm_bytes.restart()
        self._mesh.gather_order.restart()
        terms = StepTerms(self._provisional)
        self._step = now = _Step(number, microbatches, loss_of, terms)
        if isinstance(self.model, Pipeline):
            stage = self.model.stages()[0]
            with use_context(StepContext(shares=self._shares)):
                now.inputs = [inputs_of(loss_of, stage, part.samples) for part in microbatches]
            self.model.run(self, len(microbatches))
        else:
            self._run_alone()
        # Frees them before the optimizer needs memory.
        now.microbatches = ()
        now.inputs = []

        sums = self._sums_over_ranks(now.sums)
        self._count = sums.count
        # A batch without any count has no loss, and is no update.
        has_count = sums.count > 0
        loss = torch.where(has_count, sums.loss / sums.count, sums.loss)
        #   gradient so far = d(sum) / provisional count
        #   gradient wanted = d(sum) / count = gradient so far * provisional count / count
        factor = torch.where(has_count, self._provisional.value() / sums.count, 1.0)
        self._correct_gradients(factor)
        return loss, sums.count

    def _run_alone(self) -> None:
        now = self._step
        for number, part in enumerate(now.microbatches):
            set_is_last_backward(self.model, number == len(now.microbatches) - 1)
            with self._microbatch(self.model, number):
                with self._timer.phase("forward"):
                    size = len(part.positions)
                    sums = call_loss(now.loss_of, self.model, part.samples, size, self._device)
                    loss = self._take(part, sums)
                with self._timer.phase("backward"):
                    loss.backward()
            if observer.current is not None:
                observer.current.after_backward(self.model)

    def _take(self, part: Microbatch, sums: Sums) -> Tensor:
        """Notes the sums of a microbatch; returns the scalar to run backward from."""
        total = sums.total
        count = sums.count
        if not part.is_real:  # it is there so that all ranks run equally many
            total = total * 0
            count = count * 0
        self._step.sums.append(Sums(total.detach(), count))
        return self._provisional.mean(total)

    def _sums_over_ranks(self, of_microbatches: Sequence[Sums]) -> LossSums:
        # Of the ranks that share samples, one adds them.
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        count = loss
        if of_microbatches and self._mesh.speaks_for_samples:
            losses = [sums.total.double() for sums in of_microbatches]
            counts = [sums.count for sums in of_microbatches]
            loss = torch.stack(losses).sum()
            count = torch.stack(counts).sum()

        own = LossSums(terms={}, loss=loss, count=count)
        with self._timer.phase("communication"):
            message = self._mesh.sum(own.pack())
            return own.unpack(message)

    def _correct_gradients(self, factor: Tensor) -> None:
        """Multiplies all gradients by a scalar on the device."""
        with self._timer.phase("backward"):
            # One kernel for many gradients, where they and the factor have one dtype.
            grads = [to_local(p.grad) for p in self.model.parameters() if p.grad is not None]
            by_dtype = group_values((grad.dtype, grad) for grad in grads)
            for dtype, of_dtype in by_dtype.items():
                torch._foreach_mul_(of_dtype, factor.to(dtype))

    # A pipeline's microbatches --------------------------------------------------------------------

    def shapes(self, microbatch: int) -> tuple[tuple[int, ...] | None, ...]:
        return shapes_of(self._step.inputs[microbatch])

    def inputs(self, microbatch: int) -> tuple[Tensor | None, ...]:
        return self._step.inputs[microbatch]

    def loss(self, microbatch: int, output: Tensor) -> Tensor:
        now = self._step
        part = now.microbatches[microbatch]
        assert isinstance(self.model, Pipeline)
        stage = self.model.stages()[-1]
        size = len(part.positions)
        sums = loss_of_output(now.loss_of, stage, part.samples, size, output, self._device)
        return self._take(part, sums)

    @contextmanager
    def around(self, stage: nn.Module, action: Action) -> Iterator[None]:
        phase = "forward" if action.kind is Kind.FORWARD else "backward"
        with self._microbatch(stage, action.microbatch), self._timer.phase(phase):
            yield

    def _microbatch(self, model: nn.Module, number: int) -> AbstractContextManager[None]:
        """Encloses a forward or a backward, which may recompute it: sets what modules know about
        their samples."""
        part = self._step.microbatches[number]
        set_dropout(model, seed=self._seed, step=self._step.number, samples=part.positions)
        size = len(part.positions)
        real = size if part.is_real else 0
        terms = MicrobatchTerms(self._step.terms, size, real, tokens=None)
        return use_context(StepContext(terms=terms, shares=self._shares))

    # The sums before the update -------------------------------------------------------------------

    def reduce(self, squared_norm: Tensor, *, stop_asked: bool) -> UpdateSums:
        """The sums over all ranks. `squared_norm`: this rank's part; `stop_asked`: this rank was
        asked to stop."""
        own = UpdateSums(
            terms=self._terms.addends(self._step.number, self._step.terms),
            squared_norm=squared_norm,
            stop_requests=torch.full_like(squared_norm, float(stop_asked)),
        )
        with self._timer.phase("communication"):
            return own.unpack(self._mesh.sum(own.pack()))

    def receive(self, sums: UpdateSums, *, skipped: bool) -> None:
        """Passes modules what they have tallied. `skipped`: the step made no update."""
        bad = torch.tensor(skipped, device=self._device)
        self._step.terms.receive(sums.terms, bad)

    def metrics(self, sums: UpdateSums) -> dict[str, float]:
        """What metrics.jsonl has of the terms of modules. Raises AgreedError: see `metrics_of`."""
        divisor = self._count.item()
        return metrics_of(sums.terms, step=self._step.number, divisor=divisor)
