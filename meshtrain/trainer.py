"""One training step: `forward_backward` of the microbatches, then `optimizer_step`, with one
all-reduce over the mesh.

Nothing in it waits for the device. The device decides whether the step was finite; the host reads
the outcome a step later. Only with `parallel.expert_rows` the host waits at the end of a step, and
repeats it if not all rows had room.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshtrain.config.locate import model_file
from meshtrain.data.batch import IGNORE, Batch
from meshtrain.data.order import BatchSizes, Mixture, share
from meshtrain.dropout import set_dropout
from meshtrain.errors import AgreedError
from meshtrain.experts import LOADS, load_metrics
from meshtrain.job.pending import Resource, waiting
from meshtrain.layout import DATA_AXES
from meshtrain.loss import (
    GlobalCount,
    StepTerms,
    agree_on_fields,
    correct_predictions,
    sample_losses,
)
from meshtrain.mesh import Mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.optim.grad_norm import clip_factor
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel.context import ShardedContext
from meshtrain.parallel.expert import AXIS, RowLimit, limit_rows
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.linear_cross_entropy import LossRequest, WeightGradSum, request_loss
from meshtrain.parallel.mixed_precision import compute_dtype, random_state
from meshtrain.parallel.parallelize import shares_sequence
from meshtrain.parallel.tp_plan import has_sequence_parts
from meshtrain.pipeline.actions import Action, Kind
from meshtrain.pipeline.engine import Pipeline, ends_of, shapes_of

if TYPE_CHECKING:
    from meshtrain.config import Config

SOURCE = "source_loss/"  # prefix of the fields with the mean loss of one source
# prefix of the fields by which the ranks of a pipeline stage compare what FSDP gathered
GATHERS = "gathers/"


@dataclass(frozen=True)
class StepResult:
    """The results of a step, over the whole global batch."""

    step: int
    loss: float  # mean over all valid targets
    # global norm of the gradient of that loss (and of attached terms), before clipping
    grad_norm: float
    num_valid_tokens: int
    correct: int | None  # number of correct predictions; None except for classifiers
    lr: float
    finite: bool  # whether loss and norm were finite; if not, there was no update
    overflow: bool  # in float16, whether too large a loss scale was the reason
    # this rank's samples with a loss that was not finite, as indices within its share
    bad_samples: list[int]
    sent: dict[str, int]  # axis -> bytes that this rank sent over it for the step
    stop_asked: bool = False  # whether any rank had been asked to stop when it took this step
    # terms and statistics of modules, by field
    terms: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Trains a parallelized model step by step: `forward_backward`, then `optimizer_step`, whose
    result is read later. For a pipeline it is the source of the step's microbatches
    (`pipeline.engine.MicrobatchSource`)."""

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
    ) -> None:
        """`task`: "language", or "classification", whose correct predictions are counted. `timer`
        measures the step. `mixture`: the mixture of several data sources, for each of which a mean
        loss is reported."""
        self.model, self.optimizer, self.mesh, self.device, self.timer = (
            model,
            optimizer,
            mesh,
            device,
            timer,
        )
        self.clip_norm = config.optimizer.clip_norm
        self.seed = config.train.seed
        self.sizes, self.mixture = BatchSizes.of(config.batch.global_size), mixture
        self.share = range(0)  # this rank's samples, as positions in the global batch
        self.dtype = compute_dtype(config.train.precision)
        self.counts_correct = task == "classification"
        self.scale = LossScale(device) if config.train.precision == "float16" else None
        plan = getattr(model_file(config.model.name), "tp_plan", None)
        # The check before the first step may have turned it off.
        sequence = shares_sequence(
            model, has_sequence_parts(config.parallel.sequence_parallel, plan)
        )
        self._same_tokens = mesh.size("tp") > 1 and not sequence  # between layers, on all tp ranks
        self._real_tokens: dict[int, Tensor] = {}  # by the length of a sequence; see `_tokens`
        # field of attached terms and statistics -> number of elements: known after the first step
        self._fields: dict[str, int] | None = None
        self._expert_rows = config.parallel.expert_rows if mesh.size(AXIS) > 1 else None
        self._limit: RowLimit | None = None  # the limit under which the gradients were computed
        # repeats the step from the same state, without a limit
        self._run_again: Callable[[], None] = lambda: None
        self._step, self._batches = 0, list[Batch]()
        self._on_device: tuple[int, Batch] | None = None  # the microbatch that was used last
        # of the microbatch's forward; None: the model returns logits
        self._request: LossRequest | None = None
        self._losses: dict[int, Tensor] = {}  # microbatch -> loss of each of its samples
        self._correct: list[Tensor] = []

    def forward_backward(self, step: int, microbatches: list[Batch]) -> None:
        """Forward and backward of this rank's microbatches, which have equal sizes; `step` is
        counted from 1."""
        self.mesh.comm_bytes.restart()  # bytes sent by an evaluation belong to no step
        self.mesh.gather_order.restart()
        self._limit = None
        if self._expert_rows is not None:
            self._limit = RowLimit(self._expert_rows, self.device)
            buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
            restore = random_state()

            def run_again() -> None:
                self._limit = None
                restore()
                for buffer, value in buffers:
                    buffer.copy_(value)
                self._run(step, microbatches)

            self._run_again = run_again
        with limit_rows(self.model, self._limit):
            self._run(step, microbatches)

    def _run(self, step: int, microbatches: list[Batch]) -> None:
        self.optimizer.zero_grad()
        self._step, self._batches, self._on_device = step, microbatches, None
        self.share = share(
            self.sizes.size(step - 1), self.mesh.size(*DATA_AXES), self.mesh.index(*DATA_AXES)
        )
        valid = (
            (b.targets != IGNORE).reshape(len(b.targets), -1).sum(1).tolist() for b in microbatches
        )
        # targets of each sample of this rank
        self._valid = [count for counts in valid for count in counts]
        self._losses, self._correct = {}, []
        # FSDP takes 16-bit gradients, to which the sum would be rounded instead of its addends.
        self._weight_grad = (
            None if self.mesh.uses_fsdp and self.dtype.itemsize < 4 else WeightGradSum()
        )
        self._count = GlobalCount(sum(self._valid), self.mesh, self.device)
        self._terms = StepTerms(self._count, None if self.scale is None else self.scale.value)
        if isinstance(self.model, Pipeline):
            self.model.run(self, len(microbatches))
        else:
            for i in range(len(microbatches)):
                set_is_last_backward(self.model, i == len(microbatches) - 1)
                with self._microbatch(self.model, i):
                    with self.timer.phase("forward"):
                        loss = self.loss(i, self.model(*self.inputs(i)))
                    with self.timer.phase("backward"):
                        loss.backward()
        self._batches, self._on_device = [], None

    def shapes(self, microbatch: int) -> tuple[tuple[int, ...] | None, ...]:
        return shapes_of(self._batches[microbatch].inputs)

    def inputs(self, microbatch: int) -> tuple[Tensor | None, ...]:
        return self._batch(microbatch).inputs

    @contextmanager
    def around(self, stage: nn.Module, action: Action) -> Iterator[None]:
        phase = "forward" if action.kind is Kind.FORWARD else "backward"
        with self._microbatch(stage, action.microbatch), self.timer.phase(phase):
            yield

    def loss(self, microbatch: int, output: Tensor) -> Tensor:
        """A microbatch's share of the step's loss, scaled for float16; records the loss of each
        sample. `output`: logits, or that share itself, if the model's head has computed it."""
        losses = None if self._request is None else self._request.losses_of(output)
        if losses is not None:
            self._losses[microbatch] = losses
            return output
        targets = self._batch(microbatch).targets
        losses = sample_losses(output, targets)
        self._losses[microbatch] = losses.detach()
        if self.counts_correct:
            self._correct.append(correct_predictions(output.detach(), targets))
        with self.timer.phase("communication"):
            count = self._count.value()
        loss = losses.sum() / count.to(losses.dtype)
        return loss if self.scale is None else loss * self.scale.value

    def _factor(self) -> Tensor:
        """The factor by which a head multiplies the sum of a microbatch's losses."""
        with self.timer.phase("communication"):
            return self._terms.factor()

    def _batch(self, microbatch: int) -> Batch:
        if self._on_device is None or self._on_device[0] != microbatch:
            self._on_device = (
                microbatch,
                self._batches[microbatch].to(self.device, self.dtype, *ends_of(self.model)),
            )
        return self._on_device[1]

    @contextmanager
    def _microbatch(self, model: nn.Module, microbatch: int) -> Iterator[None]:
        """Encloses a forward or a backward, which may recompute it: sets what modules know about
        their samples."""
        size = len(self._batches[microbatch].targets)
        first = self.share.start + microbatch * size
        set_dropout(model, seed=self.seed, step=self._step, samples=range(first, first + size))
        real = min(max(self.share.stop - first, 0), size)
        request = LossRequest(
            lambda: self._batch(microbatch).targets, self._factor, self._weight_grad
        )
        self._request = None if self.counts_correct else request
        requested = nullcontext() if self.counts_correct else request_loss(request)
        with (
            self._terms.of_microbatch(size, real, self._tokens(self._batches[microbatch])),
            requested,
        ):
            yield

    def _tokens(self, batch: Batch) -> Tensor | None:
        """With `cp`: (s,) bool on the device, which of this rank's positions between layers are not
        padding."""
        context = batch.tensors.get("documents")
        if not isinstance(context, ShardedContext) or context.part is None:
            return None
        if context.length not in self._real_tokens:
            real = context.part < context.length
            real = (
                real
                if self._same_tokens
                else real.chunk(self.mesh.size("tp"))[self.mesh.index("tp")]
            )
            self._real_tokens[context.length] = real.to(self.device)
        return self._real_tokens[context.length]

    def optimizer_step(self, step: int, stop_asked: bool = False) -> Callable[[], StepResult]:
        """Updates the weights with the accumulated gradients, unless the loss or norm is not
        finite. `stop_asked`: this rank was asked to stop. Returns a function that waits for the
        step's result."""
        losses, sums = self._reduce(stop_asked)
        overflow = sums[4]
        if self._limit is not None and any(read_later(sums[4:5])()):
            self._run_again()
            losses, sums = self._reduce(stop_asked)
        with self.timer.phase("optimizer"):
            loss, norm = sums[0] / self._count.value(), sums[1].sqrt()
            scale = torch.ones_like(norm) if self.scale is None else self.scale.value.double()
            unscale = None if self.scale is None else 1 / scale
            norm = norm if unscale is None else norm * unscale
            bad = ~(loss.isfinite() & norm.isfinite())
            # A batch without a target with a loss is no update: weight decay and momentum alone
            # would move the weights.
            skip = bad | (self._count.total() == 0)
            factor = clip_factor(norm, self.clip_norm)
            if unscale is not None:
                factor = unscale if factor is None else factor * unscale
            lr = self.optimizer.update(step, factor, skip)
            self._terms.receive(self._by_field(sums[5:]), skip)
            if self.scale is not None:
                self.scale.update(bad)
            main = torch.stack([loss, norm, sums[2], self._count.total(), scale, sums[3], overflow])
            read = read_later(torch.cat([main, sums[5:]]))
        self.timer.end_step()
        sent = self.mesh.comm_bytes.by_axis()
        return lambda: self._result(step, read(), losses, lr, sent)

    def _reduce(self, stop_asked: bool) -> tuple[Tensor, Tensor]:
        """The losses of this rank's samples, and `_sums` summed over all ranks."""
        with self.timer.phase("optimizer"):
            # none on a rank without the last stage
            in_order = [self._losses[i] for i in sorted(self._losses)]
            losses = torch.cat(in_order).double() if in_order else self._zeros(0)
            sums = self._sums(losses, stop_asked)
            with self.timer.phase("communication"):
                self.mesh.sum(sums)  # the one all-reduce of a step
        return losses, sums

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def _sums(self, losses: Tensor, stop_asked: bool) -> Tensor:
        """This rank's loss, squared gradient norm, number of correct predictions, of stop requests
        and of expert rows without room; then the sums of each field of `StepTerms`."""
        if self.mesh.uses_fsdp:
            order = (
                torch.full_like(self._zeros(), float(self.mesh.gather_order.value**i))
                for i in range(3)
            )
            self._terms.sums[f"{GATHERS}{self.mesh.index('pp')}"] = torch.stack([*order])
        if self._fields is None:
            self._fields = self._agreed_fields()
            self._fields |= (
                {f"{SOURCE}{name}": 2 for name in self.mixture.names}
                if self.mixture is not None
                else {}
            )
        if self.mixture is not None and len(losses) and self.mesh.speaks_for_samples:
            self._terms.sums |= self._source_sums(self.mixture, losses)
        if new := self._terms.sums.keys() - self._fields.keys():
            raise RuntimeError(
                f"step {self._step} attached {', '.join(sorted(new))}, and the first step did not"
            )
        correct = torch.stack(self._correct).sum().double() if self._correct else self._zeros()
        counts_samples = self.mesh.speaks_for_samples
        loss, correct = (x if counts_samples else self._zeros() for x in (losses.sum(), correct))
        # Filled on the device: copying a number from the host would wait for all work queued on the
        # device.
        stop = torch.full_like(loss, float(stop_asked))
        overflow = self._zeros() if self._limit is None else self._limit.overflow
        main = torch.stack([loss, self.optimizer.squared_norm(), correct, stop, overflow])
        terms = self._terms.stack(self._fields)
        if self._same_tokens and not counts_samples:
            terms = torch.zeros_like(terms)
        return torch.cat([main, terms])

    def _agreed_fields(self) -> dict[str, int]:
        return agree_on_fields(self._terms, self.mesh, same_tokens=self._same_tokens)

    def _source_sums(self, mixture: Mixture, losses: Tensor) -> dict[str, Tensor]:
        """For each source, the sum of this rank's losses and its number of valid targets. Padding
        counts in neither."""
        first = self.sizes.before(self._step - 1)
        own = range(first + self.share.start, first + self.share.stop)
        sources = torch.tensor(mixture.sources(own), dtype=torch.int64)
        rows = torch.zeros(len(mixture.names), len(losses) + 1, dtype=torch.float64)
        rows[sources, torch.arange(len(sources))] = 1
        counts = torch.tensor(self._valid[: len(sources)], dtype=torch.float64)
        rows[:, -1] = rows[:, : len(sources)] @ counts
        # From pinned memory the copy does not block.
        rows = (rows.pin_memory() if losses.is_cuda else rows).to(self.device, non_blocking=True)
        sums = torch.where(rows[:, :-1] > 0, losses, 0).sum(1)
        pairs = torch.stack([sums, rows[:, -1]], 1)
        return {f"{SOURCE}{name}": pair for name, pair in zip(mixture.names, pairs, strict=True)}

    def _by_field(self, sums: Tensor) -> dict[str, Tensor]:
        fields = self._fields or {}
        return dict(zip(fields, sums.split(list(fields.values())), strict=True))

    def _result(
        self, step: int, numbers: list[float], losses: Tensor, lr: float, sent: dict[str, int]
    ) -> StepResult:
        loss, norm, correct, targets, scale, stop, without_room, *sums = numbers
        finite = torch.tensor([loss, norm]).isfinite().tolist()
        bad = [] if all(finite) else (~losses.isfinite()).nonzero().flatten().tolist()
        # At a scale of 1 the scale cannot be too large.
        overflow = scale > 1 and finite == [True, False]
        hits = int(correct) if self.counts_correct else None
        terms, loads = {}, []
        for name, values in self._by_field(torch.tensor(sums, dtype=torch.float64)).items():
            if name.startswith(GATHERS):
                _require_one_order(*values.tolist(), step=step)
            elif name.startswith(f"tally/{LOADS}"):
                loads.append(values)
            elif not name.startswith("tally/"):
                if name.startswith(SOURCE) and not values[1]:
                    continue  # the step had no target of this source
                total, count = values.tolist()
                terms[name] = (
                    total / max(targets, 1)
                    if name.startswith("loss/")
                    else total / count
                    if count
                    else total
                )
        terms |= load_metrics(loads)
        if self._expert_rows is not None:
            terms["expert_rows_overflow"] = without_room
        return StepResult(
            step,
            loss,
            norm,
            int(targets),
            hits,
            lr,
            all(finite),
            overflow,
            bad,
            sent,
            stop > 0,
            terms,
        )


def _require_one_order(ranks: float, total: float, squares: float, *, step: int) -> None:
    """The sums over ranks of 1, of a number that stands for an order of gathers, and of its
    square."""
    if ranks * squares - total**2 > ranks / 2:
        raise AgreedError(
            f"step {step}: the model's forward ran its blocks in another order on some ranks, or "
            "others of them. With "
            "dp_shard or cp the ranks gather a block's weights together, and so got a mixture of "
            "those of two blocks: "
            "choose blocks by the step and the seed, the same on all ranks, and not by a rank's "
            "samples, or use "
            "dp_replicate. No checkpoint has this step"
        )


def read_later(numbers: Tensor) -> Callable[[], list[float]]:
    """Copies numbers from the device to the host without waiting; the returned function waits for
    them."""
    if not numbers.is_cuda:
        return numbers.tolist
    copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copied.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> list[float]:
        with waiting("the device", resource=Resource.DEVICE):
            event.synchronize()
        return copied.tolist()

    return read


class LossScale:
    """The loss scale, which lifts float16 gradients above the smallest number of that type
    (Micikevicius et al., https://arxiv.org/abs/1710.03740). If the global norm is not finite, it
    halves on all ranks and the step is skipped; after `GROWTH` finite steps in a row it doubles."""

    FIRST = 2.0**16
    GROWTH = 2000

    def __init__(self, device: torch.device) -> None:
        self.value = torch.tensor(self.FIRST, device=device)
        self.good = torch.tensor(0, device=device)  # finite steps in a row

    def update(self, overflow: Tensor) -> None:
        """`overflow`: the outcome of a step, a boolean scalar on the device. Updates `value` and
        `good` in place."""
        good = torch.where(overflow, 0, self.good + 1)
        grows = good == self.GROWTH
        # Below 1 it would not lift gradients, and from 0 it could never grow again.
        lower, higher = (
            (self.value / 2).clamp(min=1),
            torch.where(grows, self.value * 2, self.value),
        )
        self.value.copy_(torch.where(overflow, lower, higher))
        self.good.copy_(torch.where(grows, 0, good))
