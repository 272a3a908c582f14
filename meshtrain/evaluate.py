"""The loss on held-out data, exact on any layout: one sum over one count, each sample once."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.data import OpenData
from meshtrain.data.batch import Batch, Samples, Subset
from meshtrain.data.order import Permutation
from meshtrain.errors import AgreedError, InputError
from meshtrain.loss import Field, mean_of
from meshtrain.mesh import Mesh
from meshtrain.objective import CrossEntropy, Objective, OwnLoss
from meshtrain.parallel.gather_samples import SampleShares
from meshtrain.parallel.linear_cross_entropy import LossRequest
from meshtrain.parallel.mixed_precision import weights_stay
from meshtrain.parallel.predictions import Predictions
from meshtrain.parallel.step_context import StepContext, use_context
from meshtrain.pipeline.engine import Pipeline, has_last_stage, shapes_of
from meshtrain.pipeline.forms import Activation
from meshtrain.pipeline.stage import call_stage

if TYPE_CHECKING:
    from meshtrain.modeling.reference import Reference

UNDER_WAY = 4  # batches in flight in a pipeline, per rank of `pp`
TOKEN_SAMPLES = 2048  # samples of a language model's evaluation, unless the config sets a number
NO_TARGET = "the validation data has no target with a loss: use other data, or train.eval_every=0"
NO_WEIGHT = (
    "weight(targets) is 0 for every sample, or no target has a loss, so that there is nothing to "
    "divide by: look at the targets of the data, and at the model file's `weight`"
)
NOTHING_TO_LEARN = (
    "has no target with a loss, so that nothing would be learned: its samples hold prompts only "
    "(look at the keys of the lines, at who speaks in `messages`, and whether data.seq_len ends "
    "before the answers)"
)


@dataclass(frozen=True)
class Evaluation:
    """The result over the whole evaluation set."""

    # mean cross entropy over its valid targets, in nats; or the mean of a loss of the user's own
    loss: float
    targets: int  # number of targets with a loss; where they are no whole numbers, of samples
    # for a classifier: how many of the targets have the largest logit; None: not counted
    correct: int | None
    metrics: dict[str, float] = field(default_factory=dict)  # of a loss of the user's own
    sums_tokens: bool = True  # the loss is a sum over tokens

    def numbers(self, task: str, bytes_per_target: float | None) -> dict[str, float]:
        """The reported metrics: perplexity and bits per byte of a language model, accuracy (0 to 1)
        of a classifier; metrics of a loss of the user's own as `eval_NAME`."""
        numbers = {"eval_loss": self.loss}
        if task == "classification" and self.correct is not None and self.targets:
            numbers["accuracy"] = self.correct / self.targets
        if task == "language" and self.sums_tokens:
            numbers["perplexity"] = math.exp(min(self.loss, 700.0))
            if bytes_per_target:
                numbers["bits_per_byte"] = self.loss / math.log(2) / bytes_per_target
        return numbers | {f"eval_{name}": value for name, value in self.metrics.items()}


def evaluation_set(data: OpenData, most: int | None) -> Samples | None:
    """The held-out samples that every evaluation of a run uses: all, or `most` of them, picked by a
    permutation.

    The pick depends only on the number of held-out samples. `most`=None: 2,048 samples of tokens,
    or all images.
    """
    held_out = data.validation
    limit = most
    if limit is None and data.task == "language":
        limit = TOKEN_SAMPLES
    if held_out is None or limit is None or len(held_out) <= limit:
        return held_out
    permutation = Permutation(len(held_out), seed=0, epoch=0)
    picked = sorted(permutation[i] for i in range(limit))
    return Subset(held_out.name, held_out, picked)


def require_targets(samples: Samples, objective: Objective) -> None:
    """Raises InputError: no target of an evaluation set has a loss. Reads up to the first that has
    one."""
    if not _has_target(samples, objective):
        raise InputError(NO_TARGET)


def require_training_targets(samples: Samples, objective: Objective) -> None:
    """Raises InputError: of the training data, or of one source of a mixture, no target has a
    loss."""
    if not isinstance(objective, CrossEntropy):
        if not _has_target(samples, objective):
            raise InputError(f"data: {samples.name}: {NO_WEIGHT}")
        return
    by_source = samples.loss_targets()
    for name, targets in by_source.items():
        if targets.with_loss == 0:
            raise InputError(f"data: {name} {NOTHING_TO_LEARN}")
    if not by_source and not _has_target(samples, objective):
        raise InputError(f"data: {samples.name} {NOTHING_TO_LEARN}")


def require_sum_over_tokens(objective: Objective, samples: Samples) -> None:
    """Raises InputError: with `cp` the weights of the parts of a sequence are added up, and those
    of the halves of the first sample are not the weight of the whole."""
    if not isinstance(objective, OwnLoss) or objective.weight is None:
        return
    whole = samples.read([(0, 0)], 1).batch()
    shape = whole.sequence_shape()
    if shape is None or shape[1] < 2:
        return
    half = shape[1] // 2
    halves = (
        whole.along_sequence(lambda x, dim: x.narrow(dim, 0, half)),
        whole.along_sequence(lambda x, dim: x.narrow(dim, half, x.shape[dim] - half)),
    )
    total = sum(sum(objective.counts(part).weights) for part in halves)
    weight = sum(objective.counts(whole).weights)
    if not math.isclose(total, weight, rel_tol=1e-4, abs_tol=1e-6):  # float16 is close enough
        raise InputError(
            "with cp, a rank has a part of each sequence, and weight(targets) is no sum over "
            f"tokens: it gives {weight:g} for the first sample and {total:g} for its two halves "
            "together. Sum over the tokens of the targets, or use cp: 1"
        )


def _has_target(samples: Samples, objective: Objective) -> bool:
    for index in range(len(samples)):
        if any(objective.counts(samples.read([(0, index)], 1).batch()).weights):
            return True
    return False


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, where weights must not change; afterwards each module has its
    previous mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with weights_stay(model):
            yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    objective: Objective | None = None,
    reference: "Reference | None" = None,
) -> Evaluation:
    """Runs a parallelized model, which computes in `dtype`, over this rank's share of the
    evaluation set; every rank has the same number of batches. `objective`: None: the cross entropy,
    of a classifier if a sample has one target. `reference`: the frozen model whose outputs it
    takes. Raises AgreedError: no batch of any rank has a valid target."""
    totals = _Totals(mesh, device, dtype, objective, has_last_stage=has_last_stage(model))
    with evaluation_mode(model):
        # A pipeline takes some batches at a time, so that stages work on several and few are in
        # memory.
        together = UNDER_WAY * mesh.size("pp") if isinstance(model, Pipeline) else 1
        remaining = iter(batches)
        while group := list(islice(remaining, together)):
            outputs: list[Any] = [None] * len(group)
            if reference is not None:
                outputs = reference.outputs(group) or outputs
            scored = [_Scored(*pair) for pair in zip(group, outputs, strict=True)]
            if isinstance(model, Pipeline):
                shapes = [shapes_of(batch.inputs) for batch in group]
                model.run_forwards(scored, shapes, totals.run_stage)
            else:
                totals.run_stage(model, scored[0], None, True)

    own = torch.stack(totals.sums)
    if not mesh.speaks_for_samples:
        own.zero_()  # another rank of tp has the same losses
    loss, weight, targets, correct = mesh.sum(own).tolist()
    if weight == 0:
        raise AgreedError(NO_TARGET)
    return Evaluation(
        loss=mean_of(loss, weight),
        targets=int(targets),
        correct=None if math.isnan(correct) else int(correct),
        metrics=_means(totals.metrics, mesh),
        sums_tokens=objective is None or objective.sums_tokens,
    )


class _Totals:
    """Adds up the losses of batches on this rank, whose stages compute in `dtype` on `device`."""

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        objective: Objective | None,
        *,
        has_last_stage: bool,
    ) -> None:
        self.sums = _Sums(*torch.zeros(4, dtype=torch.float64, device=device))
        self.metrics: dict[Field, Tensor] = {}
        self._mesh = mesh
        self._device = device
        self._dtype = dtype
        self._objective = objective
        self._has_last_stage = has_last_stage

    def run_stage(
        self, stage: nn.Module, scored: "_Scored", received: Activation | None, last: bool
    ) -> Any:
        """Runs a stage on a batch; returns what the next one receives, None from the last one. A
        model with a `LossHead` returns no logits, so that evaluation takes no more memory than
        training."""
        batch = scored.batch
        here = batch.to(self._device, self._dtype, with_targets=self._has_last_stage)
        objective = self._objective
        if objective is None:
            objective = CrossEntropy(counts_correct=batch.targets.ndim == 1)
        request = None
        if objective.asks_head:
            request = LossRequest(lambda: here.targets)
        predictions = None
        ahead = here.ahead
        if ahead is not None:
            predictions = Predictions(lambda: ahead, take=self._take_prediction)
        with use_context(StepContext(loss_request=request, predictions=predictions)):
            output = call_stage(stage, here.inputs, received)
        if not last:
            return output

        losses = None if request is None else request.losses_of(output)
        if losses is None:
            losses = self._losses(objective, output, here, scored)
        counts = objective.counts(batch)
        self.sums.loss.add_(losses.double().sum())
        self.sums.weight.add_(math.fsum(counts.weights))
        self.sums.targets.add_(counts.targets)
        return None

    def _losses(self, objective: Objective, output: Any, here: Batch, scored: "_Scored") -> Tensor:
        """The loss of each sample from the model's output; adds up what else is found there."""
        shares = SampleShares.of(scored.batch.together, self._mesh)
        with use_context(StepContext(shares=shares)):
            found = objective.losses(output, here, reference=scored.reference)
        if found.correct is not None:
            self.sums.correct.add_(found.correct)
        for name, values in found.metrics.items():
            self._add_metric(name, values)
        return found.samples

    def _take_prediction(self, depth: int, total: Tensor, count: Tensor) -> None:
        """Adds up the loss of a prediction layer."""
        self._add_metric(Field("metric", f"mtp_{depth}", size=2), torch.stack([total, count]))

    def _add_metric(self, name: Field, values: Tensor) -> None:
        earlier = self.metrics.get(name)
        self.metrics[name] = values if earlier is None else earlier + values


def _means(metrics: dict[Field, Tensor], mesh: Mesh) -> dict[str, float]:
    """The means of the metrics of a loss of the user's own, of which only ranks with the last stage
    have sums."""
    own: dict[Field, list[float]] = {}
    if mesh.speaks_for_samples:
        own = {name: values.tolist() for name, values in metrics.items()}
    of_ranks = [own]
    if mesh.world is not None:
        of_ranks = [{}] * mesh.layout.world_size
        dist.all_gather_object(of_ranks, own, group=mesh.world)

    # Name -> sum and count, over the ranks that have them.
    totals: dict[Field, list[float]] = {}
    for sums in of_ranks:
        for name, (value, count) in sums.items():
            total, total_count = totals.get(name, (0, 0))
            totals[name] = [total + value, total_count + count]

    means = {}
    for name in sorted(totals):
        mean = name.metric(totals[name], 0)
        if mean is not None:
            means[str(name)] = mean
    return means


class _Scored(NamedTuple):
    """What is evaluated at a time."""

    batch: Batch
    reference: Any  # the reference's outputs; None: there are none here


class _Sums(NamedTuple):
    """Scalars in float64 on the device."""

    loss: Tensor
    weight: Tensor
    targets: Tensor
    correct: Tensor
