"""One training step: `forward_backward` of the microbatches, then `optimizer_step`.

Two all-reduces belong to it, besides those of gradients: the number of valid targets (or the weight
of all samples), which the first forward hides, and at the end one of everything else that is summed
over the ranks.

Nothing in it waits for the device. The device decides whether the step was finite; the host reads
the outcome a step later. Only with `parallel.expert_rows`, which limits the rows (tokens) of each
message to experts, the host waits at the end of a step, and repeats it if some rows had no room.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshtrain import observer
from meshtrain.data.batch import Batch
from meshtrain.data.order import BatchSizes, Mixture, changes_of, share, value_at
from meshtrain.dropout import set_dropout
from meshtrain.layout import DATA_AXES
from meshtrain.loss import (
    Field,
    GlobalCount,
    MicrobatchTerms,
    StepTerms,
)
from meshtrain.mesh import Mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.objective import CrossEntropy, Objective
from meshtrain.optim.grad_norm import clip_factor
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel.context import ShardedContext
from meshtrain.parallel.cross_entropy import LossOptions
from meshtrain.parallel.expert import AXIS, Retry, RowLimit, limit_rows
from meshtrain.parallel.gather_samples import SampleShares, several_microbatches
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.linear_cross_entropy import LossRequest, WeightGradSum
from meshtrain.parallel.mixed_precision import compute_dtype
from meshtrain.parallel.predictions import Predictions
from meshtrain.parallel.step_context import StepContext, current_context, use_context
from meshtrain.pipeline.actions import Action, Kind
from meshtrain.pipeline.engine import Pipeline, has_last_stage, shapes_of
from meshtrain.step_sums import StepOutcome, StepSums, read_later
from meshtrain.step_terms import TermSums, metrics_of

if TYPE_CHECKING:
    from meshtrain.config import Config
    from meshtrain.modeling.reference import Reference


@dataclass(frozen=True)
class StepResult:
    """The results of a step, over the whole global batch."""

    step: int
    # mean over all valid targets, with the terms of train.label_smoothing and train.z_loss; or by
    # the weights of a loss of the user's own
    loss: float
    # global norm of the gradient of that loss (and of attached terms), before clipping
    grad_norm: float
    # number of targets with a loss; where targets are no whole numbers, number of samples
    num_valid_tokens: int
    weight: float  # what the loss is divided by: all valid targets, or the weights
    correct: int | None  # number of correct predictions; None except for classifiers
    lr: float
    finite: bool  # whether loss and norm were finite; if not, there was no update
    overflow: bool  # in float16, whether too large a loss scale was the reason
    # this rank's samples with a loss that was not finite, as indices within its share
    bad_samples: list[int]
    sent: dict[str, int]  # axis -> bytes that this rank sent over it for the step
    stop_asked: bool = False  # whether any rank had been asked to stop when it took this step
    # terms and statistics of modules, as in metrics.jsonl
    terms: dict[str, float] = field(default_factory=dict)


@dataclass
class _Step:
    """What the microbatches of a step need, and what they leave behind."""

    number: int  # from 1
    batches: list[Batch]
    samples: range  # this rank's share, as positions in the global batch
    # what each sample of this rank counts in the mean: its number of valid targets, or its weight
    weights: list[float]
    targets: int  # number of this rank's targets with a loss
    count: GlobalCount
    terms: StepTerms
    # The gradient of the head's weight, summed over microbatches, if the head computes the loss;
    # None: autograd adds up that of each microbatch.
    weight_grad: WeightGradSum | None
    # the same for the heads of further tokens, by depth (multi-token prediction)
    prediction_grads: dict[int, WeightGradSum] | None
    losses: dict[int, Tensor] = field(default_factory=dict)  # microbatch -> those of its samples
    correct: list[Tensor] = field(default_factory=list)
    references: dict[int, Any] = field(default_factory=dict)  # microbatch -> reference's outputs
    on_device: tuple[int, Batch] | None = None  # the microbatch that was used last


class Trainer:
    """Trains a parallelized model step by step: `forward_backward`, then `optimizer_step`, whose
    result is read later. For a pipeline it is the source of the step's microbatches
    (`pipeline.engine.MicrobatchSource`)."""

    term_sums = TermSums  # a trace has its own, which communicates nothing

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: "Config",
        mesh: Mesh,
        device: torch.device,
        *,
        task: str,
        timer: StepTimer,
        mixture: Mixture | None = None,
        objective: Objective | None = None,
        reference: "Reference | None" = None,
    ) -> None:
        """`task`: "language", or "classification", whose correct predictions are counted. `timer`
        measures the step. `mixture`: the mixture of several data sources, for each of which a mean
        loss is reported. `objective`: what is minimized; None: the cross entropy. `reference`:
        the frozen model whose outputs it takes."""
        self.model = model
        self.optimizer = optimizer
        self.mesh = mesh
        self.device = device
        self.timer = timer
        self.mixture = mixture

        self.clip_norm = config.optimizer.clip_norm
        self.seed = config.train.seed
        self.sizes = BatchSizes.of(config.batch.global_size)
        self.dtype = compute_dtype(config.train.precision)
        self.scale = LossScale(device) if config.train.precision == "float16" else None
        self.objective = objective or CrossEntropy(counts_correct=task == "classification")
        self.reference = reference
        # A loss of the user's own may gather the samples of all data ranks, if a step has a single
        # microbatch; `problem` is what its author is told otherwise.
        problem = several_microbatches(self.sizes, config.batch.micro_size, mesh.size(*DATA_AXES))
        self._shares = SampleShares.of(None, mesh, problem)
        self.loss_options = LossOptions(config.train.label_smoothing, config.train.z_loss)
        # The weight of the losses of further tokens, which may change during the run:
        # [(first step, (weight,)), ...].
        self.prediction_weights = changes_of([config.train.mtp_loss_scaling_factor])
        self._terms = self.term_sums(model, mesh, device)  # sums of the terms of modules
        self._expert_rows = config.parallel.expert_rows if mesh.size(AXIS) > 1 else None

        self._step: _Step
        self._limit: RowLimit | None = None  # the limit under which the gradients were computed
        self._retry: Retry | None = None
        self._real_tokens: dict[int, Tensor] = {}  # by the length of a sequence; see `_tokens`

    # Forward and backward -------------------------------------------------------------------------

    def forward_backward(self, step: int, microbatches: list[Batch]) -> None:
        """Forward and backward of this rank's microbatches, which have equal sizes; `step` is
        counted from 1."""
        # What an evaluation has sent and gathered since the last step belongs to no step.
        self.mesh.comm_bytes.restart()
        self.mesh.gather_order.restart()
        self._limit = None
        if self._expert_rows is not None:
            # `optimizer_step` learns whether the limit was too low, and then runs all of it again.
            self._limit = RowLimit(self._expert_rows, self.device)
            self._retry = Retry(self.model, lambda: self._run(step, microbatches))
        with limit_rows(self.model, self._limit):
            self._run(step, microbatches)

    def _run(self, step: int, microbatches: list[Batch]) -> None:
        self.optimizer.zero_grad()
        self._step = now = self._begin(step, microbatches)
        if isinstance(self.model, Pipeline):
            # All at once: the reference is a pipeline too, whose ranks run it together.
            self._run_reference(range(len(microbatches)))
            self.model.run(self, len(microbatches))
        else:
            for i in range(len(microbatches)):
                self._run_reference([i])
                set_is_last_backward(self.model, i == len(microbatches) - 1)
                with self._microbatch(self.model, i):
                    with self.timer.phase("forward"):
                        loss = self.loss(i, self.model(*self.inputs(i)))
                    with self.timer.phase("backward"):
                        loss.backward()
                if observer.current is not None:
                    observer.current.after_backward(self.model)
        # Free before the optimizer needs memory.
        now.batches = []
        now.on_device = None

    def _run_reference(self, numbers: Sequence[int]) -> None:
        """Computes the reference's outputs for some microbatches, before the model's forward: the
        memory that a forward of the reference takes is free again when the model's begins to save
        activations."""
        if self.reference is None:
            return
        now = self._step
        with self.timer.phase("forward"):
            outputs = self.reference.outputs([now.batches[i] for i in numbers])
        # With a pipeline only ranks of the last stage have outputs; on others the list is empty.
        now.references.update(zip(numbers, outputs, strict=False))

    def _begin(self, step: int, microbatches: list[Batch]) -> _Step:
        weights: list[float] = []
        targets = 0
        for batch in microbatches:
            counts = self.objective.counts(batch)
            weights += counts.weights
            targets += counts.targets
        # Starts its all-reduce, which the first forward hides.
        count = GlobalCount(math.fsum(weights), self.mesh, self.device)
        # A head that computes the loss can add up its weight's gradient over the microbatches, in
        # float32, before autograd gets it. Not where FSDP takes gradients in 16 bits: the whole sum
        # would be rounded, which is worse than rounding each microbatch's part.
        sums_weight_grad = not self.mesh.uses_fsdp or self.dtype.itemsize >= 4
        return _Step(
            number=step,
            batches=microbatches,
            samples=share(
                self.sizes.size(step - 1), self.mesh.size(*DATA_AXES), self.mesh.index(*DATA_AXES)
            ),
            weights=weights,
            targets=targets,
            count=count,
            terms=StepTerms(count, None if self.scale is None else self.scale.value),
            weight_grad=WeightGradSum() if sums_weight_grad else None,
            prediction_grads={} if sums_weight_grad else None,
        )

    def shapes(self, microbatch: int) -> tuple[tuple[int, ...] | None, ...]:
        return shapes_of(self._step.batches[microbatch].inputs)

    def inputs(self, microbatch: int) -> tuple[Tensor | None, ...]:
        return self._batch(microbatch).inputs

    @contextmanager
    def around(self, stage: nn.Module, action: Action) -> Iterator[None]:
        phase = "forward" if action.kind is Kind.FORWARD else "backward"
        with self._microbatch(stage, action.microbatch), self.timer.phase(phase):
            yield

    def loss(self, microbatch: int, output: Any) -> Tensor:
        """A microbatch's share of the step's loss, scaled for float16; records the loss of each
        sample. `output`: what the model returns, or that share itself, if the model's head has
        computed it."""
        now = self._step
        request = current_context().loss_request
        losses = None if request is None else request.losses_of(output)
        if losses is not None:
            # The head has computed them, and `output` is their sum, already divided and scaled.
            now.losses[microbatch] = losses
            return output
        found = self.objective.losses(
            output,
            self._batch(microbatch),
            self.loss_options,
            reference=now.references.pop(microbatch, None),
        )
        now.losses[microbatch] = found.samples.detach()
        if found.correct is not None:
            now.correct.append(found.correct)
        self._add_metrics(found.metrics)
        self._wait_for_count()
        loss = now.count.mean(found.samples.sum())
        return loss if self.scale is None else loss * self.scale.value

    def _add_metrics(self, metrics: Mapping[Field, Tensor]) -> None:
        """Adds sums of the loss to the terms of the step, which are summed over all ranks.

        All ranks of `tp` have computed the same sums, and they must count once. Where `tp` repeats
        tokens, the terms of modules are equal on these ranks as well, and `TermSums` takes those of
        one rank alone. With sequence parallelism it adds up the ranks' terms, so that here all but
        one have to add zeros.
        """
        sums = self._step.terms.sums
        for name, values in metrics.items():
            if not self.mesh.speaks_for_samples and not self._terms.tp_repeats_tokens:
                values = torch.zeros_like(values)
            sums[name] = sums[name] + values if name in sums else values

    def _predictions(self, microbatch: int) -> Predictions | None:
        """Asks for the losses of further tokens, which are terms of the step's loss: with the loss
        L_k of depth k, weight / depths * sum_k L_k. None: the model predicts no further tokens."""
        now = self._step
        looks_ahead = now.batches[microbatch].ahead
        if looks_ahead is None:
            return None
        [weight] = value_at(self.prediction_weights, now.number - 1)
        _, _, depths, _ = looks_ahead.shape
        weight /= depths

        def ahead() -> Tensor:
            on_device = self._batch(microbatch).ahead
            assert on_device is not None
            return on_device

        def take(depth: int, total: Tensor, count: Tensor) -> None:
            # All depths make one term of the loss, and each has a mean of its own in the metrics.
            self._add_metrics(
                {
                    Field("loss", "mtp"): weight * total[None],
                    Field("metric", f"mtp_{depth}", size=2): torch.stack([total, count]),
                }
            )

        return Predictions(
            ahead,
            factor=lambda: weight * self._factor(),
            options=self.loss_options,
            take=take,
            weight_grads=now.prediction_grads,
            part=self._part_over_tp,
        )

    def _part_over_tp(self, tokens: Tensor) -> Tensor:
        """Of tokens (b, s) those that this rank has between layers: sequence parallelism splits
        them over tp."""
        if self._terms.tp_repeats_tokens:
            return tokens
        return tokens.chunk(self.mesh.size("tp"), dim=1)[self.mesh.index("tp")]

    def _factor(self) -> Tensor:
        """The factor by which a head multiplies the sum of a microbatch's losses."""
        self._wait_for_count()
        return self._step.terms.factor()

    def _wait_for_count(self) -> None:
        with self.timer.phase("communication"):
            self._step.count.wait()

    def _batch(self, microbatch: int) -> Batch:
        """A microbatch on the device. A pipeline asks for one several times in a row."""
        now = self._step
        if now.on_device is None or now.on_device[0] != microbatch:
            batch = now.batches[microbatch].to(
                self.device, self.dtype, with_targets=has_last_stage(self.model)
            )
            now.on_device = microbatch, batch
        return now.on_device[1]

    @contextmanager
    def _microbatch(self, model: nn.Module, microbatch: int) -> Iterator[None]:
        """Encloses a forward or a backward, which may recompute it: sets what modules know about
        their samples."""
        now = self._step
        batch = now.batches[microbatch]
        size = batch.rows
        # Every rank runs the same number of samples: those after its share are padding.
        first = now.samples.start + microbatch * size
        num_real = min(max(now.samples.stop - first, 0), size)
        set_dropout(model, seed=self.seed, step=now.number, samples=range(first, first + size))

        # The head is not asked where logits are needed: by a classifier, whose correct predictions
        # are counted, and by a loss of the user's own.
        request = None
        if self.objective.asks_head:
            request = LossRequest(
                lambda: self._batch(microbatch).targets,
                self._factor,
                now.weight_grad,
                self.loss_options,
            )
        terms = MicrobatchTerms(now.terms, size, num_real, self._tokens(batch))
        # What a loss may gather over the data ranks.
        shares = replace(self._shares, samples=batch.together)
        context = StepContext(
            loss_request=request,
            predictions=self._predictions(microbatch),
            terms=terms,
            shares=shares,
        )
        with use_context(context):
            yield

    def _tokens(self, batch: Batch) -> Tensor | None:
        """With `cp`: (s,) bool on the device, which of the positions that this rank has between
        layers are not padding. None: all are real."""
        attended = batch.tensors.get("documents")
        if not isinstance(attended, ShardedContext) or attended.part is None:
            return None
        # The same for all sequences of a length, so it is copied to the device once.
        if attended.length not in self._real_tokens:
            is_real = (attended.part < attended.length)[None]  # (1, s)
            own = self._part_over_tp(is_real)[0]
            self._real_tokens[attended.length] = own.to(self.device)
        return self._real_tokens[attended.length]

    # The update -----------------------------------------------------------------------------------

    def optimizer_step(self, step: int, stop_asked: bool = False) -> Callable[[], StepResult]:
        """Updates the weights with the accumulated gradients, unless the loss or norm is not
        finite. `stop_asked`: this rank was asked to stop. Returns a function that waits for the
        step's result."""
        losses, sums = self._reduce(stop_asked)
        # Logged also if the step is repeated: the retry has no limit, and so leaves no row out.
        without_room = sums.rows_without_room
        if self._limit is not None:
            assert self._retry is not None
            # Here the host waits for the device.
            has_left_out_rows = read_later(without_room)().any()
            if has_left_out_rows:
                self._limit = None
                self._retry.run()
                losses, sums = self._reduce(stop_asked)
            self._retry = None  # it holds the batch and copies of the buffers

        with self.timer.phase("optimizer"):
            count = self._step.count
            loss = count.mean(sums.loss)
            norm = sums.squared_norm.sqrt()
            scale = torch.ones_like(norm)
            if self.scale is not None:
                scale = self.scale.value.double()
                norm = norm / scale
            bad = ~(loss.isfinite() & norm.isfinite())
            # A batch without a target with a loss is no update: weight decay and momentum alone
            # would move the weights.
            skip = bad | (count.total() == 0)

            lr = self.optimizer.update(step, self._grad_factor(norm, scale), skip)
            # Modules get the sums that they have asked for: a router corrects its bias by them.
            self._step.terms.receive(sums.terms, skip)
            if self.scale is not None:
                self.scale.update(bad)

            read = StepOutcome(
                loss=loss,
                grad_norm=norm,
                correct=sums.correct,
                targets=sums.targets,
                weight=count.total(),
                loss_scale=scale,
                stop_requests=sums.stop_requests,
                rows_without_room=without_room,
                terms=sums.terms,
            ).read_later()
        self.timer.end_step()
        sent = self.mesh.comm_bytes.by_axis()
        return lambda: self._result(step, read(), losses, lr, sent)

    def _grad_factor(self, norm: Tensor, scale: Tensor) -> Tensor | None:
        """What gradients are multiplied by in the update: clips them, and undoes the loss scale."""
        factor = clip_factor(norm, self.clip_norm)
        if self.scale is None:
            return factor
        return 1 / scale if factor is None else factor / scale

    def _reduce(self, stop_asked: bool) -> tuple[Tensor, StepSums]:
        """The losses of this rank's samples, and the step's sums over all ranks."""
        with self.timer.phase("optimizer"):
            now = self._step
            in_order = [now.losses[i].double() for i in sorted(now.losses)]
            # Beside an empty tensor, since a rank without the last stage has no losses.
            losses = torch.cat([self._zeros(0), *in_order])
            if observer.current is not None:
                observer.current.losses(
                    now.samples.start,
                    len(now.samples),
                    losses,
                    speaks=self.mesh.speaks_for_samples,
                )
            own = self._own_sums(losses, stop_asked)
            # Free before the next step needs memory.
            now.losses.clear()
            now.correct.clear()
            with self.timer.phase("communication"):
                return losses, own.over_ranks(self.mesh)

    def _own_sums(self, losses: Tensor, stop_asked: bool) -> StepSums:
        """This rank's addends of the step's sums over all ranks."""
        now = self._step
        zero = self._zeros()

        # All ranks of `tp` have computed the losses of the same samples: one of them counts them.
        loss = zero
        correct = zero
        targets = zero
        if self.mesh.speaks_for_samples:
            loss = losses.sum()
            if now.correct:
                correct = torch.stack(now.correct).sum().double()
            # A stage without the loss has read the same targets.
            if now.losses:
                targets = self._filled(now.targets)

        without_room = zero if self._limit is None else self._limit.overflow

        return StepSums(
            loss=loss,
            squared_norm=self.optimizer.squared_norm(),
            correct=correct,
            targets=targets,
            stop_requests=self._filled(stop_asked),
            rows_without_room=without_room,
            terms=self._own_terms(losses),
        )

    def _own_terms(self, losses: Tensor) -> dict[Field, Tensor]:
        """This rank's addends of the terms of modules, and of the losses of sources."""
        now = self._step
        if self.mixture is None:
            return self._terms.addends(now.number, now.terms)
        of_sources: dict[Field, Tensor | None]
        of_sources = dict.fromkeys(_source_field(name) for name in self.mixture.names)
        if len(losses) and self.mesh.speaks_for_samples:
            of_sources |= self._source_sums(self.mixture, losses)
        return self._terms.addends(now.number, now.terms, of_sources)

    def _source_sums(self, mixture: Mixture, losses: Tensor) -> dict[Field, Tensor]:
        """For each source (2,): the sum of the losses of this rank's samples, and of their weights.
        Padding is in neither."""
        now = self._step
        first = self.sizes.before(now.number - 1)
        own = range(first + now.samples.start, first + now.samples.stop)

        # (sources, samples), 1 where a sample is of a source; zeros for padding.
        of_source = torch.zeros(len(mixture.names), len(losses), dtype=torch.float64)
        sources = torch.tensor(mixture.sources(own), dtype=torch.int64)
        of_source[sources, torch.arange(len(sources))] = 1
        weights = torch.tensor(now.weights, dtype=torch.float64)
        counts = of_source @ weights

        # One copy to the device, from pinned memory, does not block.
        table = torch.cat([of_source, counts[:, None]], dim=1)
        if losses.is_cuda:
            table = table.pin_memory()
        table = table.to(self.device, non_blocking=True)

        # Chosen, not multiplied: a loss that is not finite must not reach other sources.
        sums = torch.where(table[:, :-1] > 0, losses, 0).sum(1)
        pairs = torch.stack([sums, table[:, -1]], dim=1)
        return {_source_field(name): pair for name, pair in zip(mixture.names, pairs, strict=True)}

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def _filled(self, number: float) -> Tensor:
        """A scalar. It is filled on the device: copying a number from the host would wait for all
        work queued on the device."""
        return torch.full((), float(number), dtype=torch.float64, device=self.device)

    # The result -----------------------------------------------------------------------------------

    def _result(
        self, step: int, outcome: StepOutcome, losses: Tensor, lr: float, sent: dict[str, int]
    ) -> StepResult:
        """`outcome`: on the host. `losses`: of this rank's samples, on the device."""
        loss = outcome.loss.item()
        grad_norm = outcome.grad_norm.item()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        bad_samples: list[int] = []
        if not finite:
            bad_samples = (~losses.isfinite()).nonzero().flatten().tolist()
        # In float16 a finite loss with gradients that are not: too large a loss scale, unless it is
        # already down at its least, 1.
        only_norm_is_bad = math.isfinite(loss) and not math.isfinite(grad_norm)
        overflow = only_norm_is_bad and outcome.loss_scale.item() > 1

        terms = metrics_of(outcome.terms, step=step, divisor=outcome.weight.item())
        if self._expert_rows is not None:
            terms["expert_rows_overflow"] = outcome.rows_without_room.item()
        return StepResult(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            num_valid_tokens=int(outcome.targets),
            weight=outcome.weight.item(),
            correct=self._correct_of(outcome),
            lr=lr,
            finite=finite,
            overflow=overflow,
            bad_samples=bad_samples,
            sent=sent,
            stop_asked=outcome.stop_requests.item() > 0,
            terms=terms,
        )

    def _correct_of(self, outcome: StepOutcome) -> int | None:
        # NaN: the outputs of the user's own loss are no logits of classes.
        is_counted = self.objective.counts_correct and not outcome.correct.isnan()
        return int(outcome.correct) if is_counted else None


def _source_field(source: str) -> Field:
    return Field("source_loss", source, size=2)


class LossScale:
    """The loss scale, which lifts float16 gradients above the smallest number of that type
    (Micikevicius et al., https://arxiv.org/abs/1710.03740). If the loss or the global norm is not
    finite, it halves on all ranks and the step is skipped; after `GROWTH` finite steps in a row it
    doubles."""

    FIRST = 2.0**16
    GROWTH = 2000

    def __init__(self, device: torch.device) -> None:
        self.value = torch.tensor(self.FIRST, device=device)
        self.good = torch.tensor(0, device=device)  # finite steps in a row

    def update(self, bad: Tensor) -> None:
        """`bad`: the outcome of a step, a boolean scalar on the device. Updates `value` and
        `good` in place."""
        good = torch.where(bad, 0, self.good + 1)
        grows = good == self.GROWTH
        # Below 1 it would not lift gradients, and from 0 it could never grow again.
        halved = (self.value / 2).clamp(min=1)
        kept_or_doubled = torch.where(grows, self.value * 2, self.value)
        self.value.copy_(torch.where(bad, halved, kept_or_doubled))
        self.good.copy_(torch.where(grows, 0, good))
