"""The objective of training: the cross entropy of the targets, or a loss of the user's own.

    loss = sum of all samples' losses / sum of all samples' weights,    over the global batch

The cross entropy weighs a sample by the number of its valid targets. An objective knows one rank's
microbatches; what is summed over the ranks is in `loss.py` and `step_sums.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtrain.data.batch import IGNORE, Batch, each_target, target_tensors
from meshtrain.errors import InputError
from meshtrain.loss import Field, correct_predictions, sample_losses
from meshtrain.parallel.cross_entropy import CROSS_ENTROPY, LossOptions

# What metrics.jsonl has already, so that no metric of a loss can have the name.
TAKEN = {
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "samples",
    "samples_digest",
    "tokens_per_s",
    "step_time_s",
    "mfu",
    "mfu_causal",
    "accuracy",
    "perplexity",
    "bits_per_byte",
    "expert_load_max",
    "experts_idle",
    "expert_rows_overflow",
}
TAKEN_BEGINNINGS = (
    "eval_",
    "time_",
    "own_time_",
    "gpu_probe_",
    "memory_",
    "sent_bytes_",
    "loss/",
    "mean/",
    "sum/",
    "source_loss/",
)


class Counts(NamedTuple):
    """What a microbatch counts.

    Attributes:
        weights: of each sample, what it counts in the mean; padding counts 0, or is left out.
        targets: how many targets have a loss, for what is logged of them; of targets that are no
            whole numbers, how many samples there are.
    """

    weights: Sequence[float]
    targets: int


class Losses(NamedTuple):
    """What an objective finds for a microbatch.

    Attributes:
        samples: the loss of each sample, in float32 or wider, with a gradient; padding has 0 or is
            left out.
        metrics: of each further metric, the sum and the count, (2,) in float64.
        correct: the number of correct predictions of a classifier; None: they are not counted, and
            NaN: they cannot be, because the outputs are no logits.
    """

    samples: Tensor
    metrics: Mapping[Field, Tensor]
    correct: Tensor | None


class Objective(Protocol):
    """What is minimized.

    Attributes:
        asks_head: the model's head may compute the loss, without making logits (`LossRequest`).
        counts_correct: correct predictions are counted.
        sums_tokens: the loss is a sum over tokens, so that the exponential of its mean is a
            perplexity.
    """

    asks_head: bool
    counts_correct: bool
    sums_tokens: bool

    def counts(self, batch: Batch) -> Counts:
        """Of a microbatch on the CPU. Raises InputError: the user's own weights are none."""

    def losses(
        self,
        outputs: Any,
        batch: Batch,
        options: LossOptions = CROSS_ENTROPY,
        reference: Any = None,
    ) -> Losses:
        """`outputs`: what the model returns for the microbatch, which is on the device. `options`:
        what training adds to the cross entropy; `reference`: what the frozen second model returns,
        None without one. Raises InputError: it cannot be computed of them."""


class CrossEntropy:
    """The built-in objective. `counts_correct`: of a classifier, whose predictions need logits."""

    sums_tokens = True

    def __init__(self, counts_correct: bool) -> None:
        self.counts_correct = counts_correct
        self.asks_head = not counts_correct

    def counts(self, batch: Batch) -> Counts:
        valid = _valid(batch.targets)
        return Counts(valid, sum(valid))

    def losses(
        self,
        outputs: Any,
        batch: Batch,
        options: LossOptions = CROSS_ENTROPY,
        reference: Any = None,
    ) -> Losses:
        losses = sample_losses(
            outputs,
            batch.targets,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
        )
        correct = None
        if self.counts_correct:
            correct = correct_predictions(outputs.detach(), batch.targets)
        return Losses(losses, {}, correct)


def _valid(targets: Tensor) -> list[int]:
    """The number of each sample's targets that have a loss."""
    valid = targets != IGNORE
    elements = math.prod(targets.shape[1:])  # also where there is no sample
    return valid.reshape(len(targets), elements).sum(1).tolist()


class OwnLoss:
    """An objective that a model file defines (docs/losses.md). Its functions see samples, and never
    the padding of an uneven share: they may be called without any.

    Args:
        loss: (outputs, targets), or with a reference (outputs, targets, reference) -> (b,), or a
            pair of that and {name: (sums, counts)}.
        weight: (targets) -> (b,); None: of whole numbers the ones that are not IGNORE, else 1.
        dtype: in which losses are added up: float32, or float64.
        first_part: with `cp`, whether this rank has the first part of each sequence, and so counts
            what there is once for a sample.
        counts_correct: the targets are classes, one for each sample.
        over_whole_samples: the loss is no sum over tokens.
    """

    asks_head = False

    def __init__(
        self,
        loss: Callable[..., Any],
        weight: Callable[..., Any] | None,
        *,
        dtype: torch.dtype = torch.float32,
        first_part: bool = True,
        counts_correct: bool = False,
        over_whole_samples: bool = False,
    ) -> None:
        self.loss = loss
        self.weight = weight
        self.dtype = dtype
        self.first_part = first_part
        self.counts_correct = counts_correct
        self.sums_tokens = not over_whole_samples
        self._metrics: list[str] | None = None  # of the first call, and so of every other

    # What samples count --------------------------------------------------------------------------

    def counts(self, batch: Batch) -> Counts:
        targets = _without_padding(batch.targets, batch.real)
        by_default = self._by_default(targets, batch.real)
        weights: Sequence[float] = by_default
        if self.weight is not None and batch.real > 0:
            weights = self._own_weights(self.weight(targets), batch)
        return Counts(weights, sum(by_default))

    def _by_default(self, targets: Any, real: int) -> list[int]:
        if isinstance(targets, Tensor) and _is_whole(targets):
            return _valid(targets)
        return [1 if self.first_part else 0] * real

    def _own_weights(self, weights: Any, batch: Batch) -> list[float]:
        _require_numbers("weight(targets)", weights, batch.real)
        numbers = weights.double().tolist()
        for row, number in enumerate(numbers):
            if not math.isfinite(number) or number < 0:
                raise InputError(
                    f"weight(targets) gives {number} for {_name(batch, row)}: a weight is a finite "
                    "number that is not negative, 0 for a sample that does not count"
                )
        return numbers

    # The loss ------------------------------------------------------------------------------------

    def losses(
        self,
        outputs: Any,
        batch: Batch,
        options: LossOptions = CROSS_ENTROPY,
        reference: Any = None,
    ) -> Losses:
        real = batch.real
        real_outputs = _outputs_of(outputs, batch.rows, real)
        targets = _without_padding(batch.targets, real)
        arguments = [real_outputs, targets]
        if reference is not None:
            arguments.append(_outputs_of(reference, batch.rows, real))
        sums, metrics = self._call(*arguments)
        _require_numbers("loss(outputs, targets)", sums, real)
        sums = sums.to(self.dtype)
        if torch.is_grad_enabled() and not sums.requires_grad:
            # Every rank has a backward, also one without a sample, whose loss may be made of
            # nothing.
            sums = sums + _nothing_of(real_outputs).to(self.dtype)
        correct = None
        if self.counts_correct:
            correct = _correct(real_outputs, targets)
        return Losses(sums, self._sums_of(metrics, real), correct)

    def _call(self, outputs: Any, targets: Any, *reference: Any) -> tuple[Any, Mapping[str, Any]]:
        """What the function returns: sums, and its metrics."""
        try:
            returned = self.loss(outputs, targets, *reference)
        except Exception as error:
            if any(isinstance(x, DTensor) for x in _tensors(outputs)):
                error.add_note(
                    "with tp, each rank has a part of the logits (a DTensor): "
                    "meshtrain.loss.token_losses and log_probs take it as it is, and "
                    "meshtrain.loss.full(outputs) gives every rank all of them"
                )
            raise
        if not isinstance(returned, tuple):
            return returned, {}
        if len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise InputError(
                f"loss(outputs, targets) returned a tuple of {len(returned)}: expected (sums, "
                '{"name": (sums, counts)}), or sums alone'
            )
        return returned

    def _sums_of(self, metrics: Mapping[str, Any], real: int) -> dict[Field, Tensor]:
        """The sum and the count of each metric of a microbatch."""
        names = sorted(map(str, metrics))
        if self._metrics is None:
            _require_free(names)
            self._metrics = names
        elif names != self._metrics:
            raise InputError(
                f"loss(outputs, targets) returned the metrics {names}, and {self._metrics} before: "
                "each call has to return the same names, with counts of 0 where there is nothing"
            )
        sums = {}
        for name, pair in metrics.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise InputError(
                    f"loss(outputs, targets) returned a {type(pair).__name__} for the metric "
                    f"{name}: expected (sums, counts), a number of each for every sample"
                )
            for values, what in zip(pair, ("sums", "counts"), strict=True):
                _require_numbers(
                    f"loss(outputs, targets): {what} of the metric {name}", values, real
                )
            total, count = [values.detach().double().sum() for values in pair]
            sums[Field("metric", name, size=2)] = torch.stack([total, count])
        return sums


def _require_free(names: list[str]) -> None:
    for name in names:
        if name in TAKEN or name.startswith(TAKEN_BEGINNINGS) or not name:
            raise InputError(
                f"loss(outputs, targets) returned a metric called {name!r}, and metrics.jsonl has "
                "other numbers under such a name: call it something else"
            )


def _require_numbers(what: str, values: Any, real: int) -> None:
    """Raises InputError: these are not one number for each sample."""
    remedy = ""
    if not isinstance(values, Tensor):
        found = f"a {type(values).__name__}"
    elif isinstance(values, DTensor):
        found = f"a DTensor {tuple(values.shape)}, made of parts of the logits"
        remedy = ": use meshtrain.loss.full(outputs), token_losses or log_probs"
    elif values.shape != (real,):
        found = f"a tensor {tuple(values.shape)}"
        remedy = ": sum over all dims but the first"
        if values.dim() == 0:
            remedy += ', and in a loss of torch set reduction="none" before'
    elif values.is_complex():
        found = f"a tensor of {values.dtype}"
    else:
        return
    raise InputError(
        f"{what} is {found}: expected a tensor ({real},), one number for each sample of the "
        f"microbatch{remedy} (docs/losses.md)"
    )


def _name(batch: Batch, row: int) -> str:
    if batch.samples is None:
        return f"row {row} of a microbatch"
    return f"sample {batch.samples[row]} of the data set"


def _is_whole(targets: Tensor) -> bool:
    """Whether targets are whole numbers."""
    return not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)


def _tensors(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs.values())


def _without_padding(targets: Any, real: int) -> Any:
    """The targets of the first `real` samples, behind which padding stands."""
    if len(target_tensors(targets)[0]) == real:
        return targets
    return each_target(lambda x: x[:real], targets)


def _outputs_of(outputs: Any, rows: int, real: int) -> Any:
    """A model's outputs as the loss gets them, without padding: a tensor, or a dict of tensors.
    Raises InputError: they are something else."""

    def part(x: Any, what: str) -> Tensor:
        if not isinstance(x, Tensor) or x.ndim == 0 or len(x) != rows:
            found = f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"{what} is {found}: for a loss of its own a model returns a tensor ({rows}, ...) "
                "with a row for each sample, or a dict of such tensors; a term of the loss goes "
                "through meshtrain.loss.attach"
            )
        return x if rows == real else x[:real]

    if not isinstance(outputs, Mapping):
        return part(outputs, "the model's output")
    if not outputs:
        raise InputError("the model's output is an empty dict: a loss needs a tensor to start from")
    return {name: part(x, f"the model's output {name!r}") for name, x in outputs.items()}


def _nothing_of(outputs: Any) -> Tensor:
    """A scalar 0 that depends on every output."""
    zeros = []
    for x in _tensors(outputs):
        local = x.to_local() if isinstance(x, DTensor) else x
        zeros.append(local.flatten()[:0].sum())
    return torch.stack([zero.to(zeros[0].dtype) for zero in zeros]).sum()


def _correct(outputs: Any, targets: Tensor) -> Tensor:
    """The number of correct predictions; NaN: the outputs are no logits of classes."""
    is_logits = isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] > 1
    if not is_logits:
        return targets.new_full((), math.nan, dtype=torch.float64)
    return correct_predictions(outputs.detach(), targets)
