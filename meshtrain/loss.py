"""The loss of a step: the sum over all valid targets of the global batch, divided by their number.

    loss = sum of -log p(target) / number of targets,    over the valid targets of all ranks

It is one sum over one count, never an average of averages. So it does not matter which rank or
microbatch has which sample and how many targets. Modules add terms in the same way with `attach`,
and log statistics with `record`.

`token_losses`, `log_probs` and `full` are for losses of one's own: with `tp` a model returns logits
that are split over their last dim, and these functions take them as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtrain.data.batch import IGNORE
from meshtrain.errors import AgreedError, InputError, ranges
from meshtrain.layout import LOSS_AXES
from meshtrain.mesh import Mesh
from meshtrain.parallel.cross_entropy import (
    LossOptions,
    argmax,
    full_logits,
    vocab_parallel_cross_entropy,
)
from meshtrain.parallel.step_context import current_context, use_context
from meshtrain.parallel.torch_private import backward_is_running, never_compiled

# Losses of logits, which may be split over `tp` ---------------------------------------------------


def token_losses(
    outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """The loss of every target, with Z = log sum exp of its logits and p their softmax:

        -log p(target) + z_loss * Z^2

    With label smoothing, as in `torch.nn.functional.cross_entropy`, the first term is

        -(1 - label_smoothing) * log p(target) - label_smoothing * (mean over all v of log p)

    Gradients are exact on every layout. Each rank of `tp` has the same losses, and computes the
    same from them.

    Args:
        outputs: logits (b, s, v), or (b, v) for a classifier, in any floating-point type. A DTensor
            over `tp`, as tensor-parallel models return, is not gathered if it is split over v, into
            parts of any width; split over another dim or whole, it is split over v first.
        targets: (b, s) or (b,), whole numbers; -100 (IGNORE) where there is no loss.
        label_smoothing: from 0 to 1. z_loss: at least 0.

    Returns:
        Of the shape of the targets, in float32, or float64 for logits in float64: 0 without a
        gradient where the target is -100.

    Raises:
        InputError: the shapes do not fit, the targets are no whole numbers, an option is outside of
            its range, or the outputs are split over another axis beside `tp`.
    """
    _require_logits(outputs, targets)
    options = LossOptions(label_smoothing, z_loss)
    classes = targets.flatten().long()
    if isinstance(outputs, DTensor):
        return vocab_parallel_cross_entropy(outputs, classes, options).view(targets.shape)

    wide = outputs.float() if outputs.dtype.itemsize < 4 else outputs
    logits = wide.flatten(0, -2)
    losses = F.cross_entropy(
        logits, classes, reduction="none", ignore_index=IGNORE, label_smoothing=label_smoothing
    )
    if z_loss:
        squares = logits.logsumexp(-1).square()
        losses = losses + z_loss * torch.where(classes != IGNORE, squares, 0.0)
    return losses.view(targets.shape)


def log_probs(outputs: Tensor, targets: Tensor) -> Tensor:
    """log p of every target, p the softmax of its logits: 0 where the target is -100. Arguments,
    result and gradients as those of `token_losses`."""
    return -token_losses(outputs, targets)


def full(outputs: Tensor) -> Tensor:
    """The outputs with their whole last dim: (..., v) on every rank of `tp`, a plain tensor.

    What is not split comes back as it is. The backward takes this rank's part of the gradient,
    which is exact where each rank of `tp` computes the same from the result.

    Args:
        outputs: (..., v), plain, or a DTensor over `tp`, split over its last dim or any other.

    Raises:
        InputError: they are split over another axis beside `tp`.
    """
    return full_logits(outputs) if isinstance(outputs, DTensor) else outputs


def sample_losses(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """The loss of every sample, summed over its valid targets: the cross entropy, and with options
    what `token_losses` adds.

    Args:
        logits, targets, label_smoothing, z_loss: as for `token_losses`.

    Returns:
        (b,), 0 for a sample without valid targets.

    Raises:
        InputError: as `token_losses`, for instance because the model returned something else.
    """
    losses = token_losses(logits, targets, label_smoothing, z_loss)
    if losses.dim() == 1:  # of a classifier, one target of each sample
        return losses
    return losses.flatten(1).sum(1)


def _require_logits(output: Any, targets: Tensor) -> None:
    if targets.is_floating_point() or targets.is_complex():
        raise InputError(
            f"the targets are of the type {targets.dtype}: expected classes or tokens, as whole "
            "numbers"
        )
    if not isinstance(output, Tensor):
        found = f"a {type(output).__name__}"
    elif output.shape[:-1] != targets.shape:
        found = f"a tensor {tuple(output.shape)}"
    else:
        return
    raise InputError(
        f"the model's output is {found}: its forward has to return a tensor of logits, "
        f"{(*targets.shape, 'v')} for these targets, and nothing beside it"
    )


def correct_predictions(logits: Tensor, targets: Tensor) -> Tensor:
    """The number of valid targets that have the largest logit: a scalar."""
    predicted = argmax(logits) if isinstance(logits, DTensor) else logits.argmax(-1)
    return ((predicted == targets) & (targets != IGNORE)).sum()


def valid_targets(targets: Tensor) -> int:
    """The number of targets with a loss. `targets` is on the CPU."""
    return int((targets != IGNORE).sum())


# The division -------------------------------------------------------------------------------------


class GlobalCount:
    """The number of valid targets of the global batch, or the sum of its samples' weights, by which
    every rank's loss is divided. The all-reduce starts in the constructor, and the first use waits
    for it, after the first forward."""

    def __init__(self, count: float, mesh: Mesh, device: torch.device) -> None:
        """`count`: the number of this rank's valid targets in all microbatches of the step, or the
        sum of its samples' weights."""
        # Filled on the device: copying a number from the host would wait for all work queued on the
        # device.
        self._total = torch.full((), float(count), dtype=torch.float64, device=device)
        self._work: dist.Work | None = None
        group = mesh.group(*LOSS_AXES)
        if group is not None:
            self._work = dist.all_reduce(self._total, group=group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def total(self) -> Tensor:
        """A scalar in float64 on the device."""
        self.wait()
        return self._total

    def value(self) -> Tensor:
        """The total as a divisor: 1 in the place of 0, so that a batch without any valid target has
        a loss of 0."""
        total = self.total()
        return torch.where(total == 0, 1.0, total)

    def mean(self, losses: Tensor) -> Tensor:
        """The share of a sum of losses, on any rank, in the mean over the global batch: in the
        dtype of the sum."""
        return losses / self.value().to(losses.dtype)


def mean_of(total: float, count: float) -> float:
    """`GlobalCount.mean` of numbers on the host."""
    return total / count if count else total


# What modules add to the step ---------------------------------------------------------------------


FieldKind = Literal[
    "loss", "mean", "metric", "sum", "source_loss", "tally", "expert_loads", "gathers"
]


@dataclass(frozen=True, order=True)
class Field:
    """The name of some float64 numbers of which a step has the sum over all ranks.

    Attributes:
        kind: what the numbers are, and how metrics.jsonl has them.
            loss: the sum of a term that `attach` adds to the loss; divided by the valid targets, or
                the weights of a loss of the user's own.
            mean: of values and of their counts; divided.
            metric: the same, of a loss of the user's own, under its name alone; left out where the
                count is 0.
            sum: of values.
            source_loss: of the losses and the valid targets of one source of a mixture; divided,
                and left out if there were none.
            tally, expert_loads: one for each element of what a module tallies; not by itself.
            gathers: see `parallel.fsdp.require_one_order`; not at all.
        size: how many numbers there are.
    """

    kind: FieldKind
    name: str
    size: int = 1

    def __str__(self) -> str:
        """As in metrics.jsonl."""
        return self.name if self.kind == "metric" else f"{self.kind}/{self.name}"

    def metric(self, values: Sequence[float], targets: float) -> float | None:
        """The number that metrics.jsonl has of these sums; None: it has none. `targets`: what the
        global batch's loss is divided by."""
        match self.kind:
            case "loss":
                return mean_of(values[0], targets)
            case "sum":
                return values[0]
            case "mean":
                total, count = values
                return total / count if count else total
            case "source_loss" | "metric":
                total, count = values
                return total / count if count else None
            case _:
                return None


class _Attach(torch.autograd.Function):
    """Returns x; its backward gives `term` its gradient, `factor()`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor, factor: Callable[[], Tensor]) -> Tensor:
        ctx.factor = factor
        ctx.dtype = term.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.factor().to(ctx.dtype), None


@never_compiled
def attach(x: Tensor, name: str, term: Tensor) -> Tensor:
    """Adds a term to the loss from inside a model, for instance for a router's load balancing.

    The training loss becomes `loss` + the sum of `term` over the global batch / its number of valid
    targets, on every layout: the term's gradient enters together with the gradient of x, even in a
    pipeline stage without a loss, and recomputation does not count it twice. metrics.jsonl has the
    term as `loss/NAME`; `loss` stays the cross entropy.

    With `tp`, attach between the tensor-parallel layers (the residual stream, norms, a router),
    where a rank has all features of a part of the tokens, or, without sequence parallelism, of all
    tokens. These then count once, and terms that differ between ranks raise in the first step. With
    `tp` and `cp` each number must depend on its own token only.

    Args:
        x: a tensor that the model uses afterwards: its gradient has to be computed.
        name: the same in every step; terms with the same name are summed.
        term: (b, ...), one number per sample or token; padding samples are excluded here.

    Returns:
        x. Outside a training step (evaluation, generation, a loop without `StepTerms`) nothing is
        added.

    Raises:
        ValueError: `term` does not have one number per sample, or with `cp` per token.
    """
    terms = current_context().terms
    if terms is None or not torch.is_grad_enabled():
        return x.view_as(x) if x.is_meta else x  # a trace on meta must see that x is used
    total = terms.sum_of_real(name, term)
    terms.add(Field("loss", name), total)
    return attach_sum(x, total, terms.step.factor)


def attach_sum(x: Tensor, total: Tensor, factor: Callable[[], Tensor]) -> Tensor:
    """x, whose backward also runs that of a sum of losses. `factor`: returns its gradient, when the
    backward asks for it."""
    return _Attach.apply(x, total, factor)


@never_compiled
def record(name: str, values: Tensor, counts: Tensor | None = None) -> None:
    """Logs a statistic over the global batch of each step: the sum of `values` as `sum/NAME`, or,
    divided by the sum of `counts`, as `mean/NAME`. Does nothing outside a training step. For where
    to call it with `tp`, see `attach`.

    Args:
        values, counts: (b, ...), one number per sample or token.

    Raises:
        ValueError: they do not have one number per sample, or with `cp` per token.
    """
    terms = current_context().terms
    if terms is None:
        return
    total = terms.sum_of_real(name, values.detach().double())
    if counts is None:
        terms.add(Field("sum", name), total)
    else:
        count = terms.sum_of_real(name, counts.detach().double())
        terms.add(Field("mean", name, size=2), torch.stack([total, count]))


@never_compiled
def tally(
    name: str,
    values: Tensor,
    receive: Callable[[Tensor, Tensor], None],
    owner: object,
    *,
    kind: Literal["tally", "expert_loads"] = "tally",
) -> None:
    """Sums `values` over the real tokens of the step's global batch, for a module that needs the
    global sum.

    Args:
        name: unique to this module, and the same in every step.
        values: (b, s, n), n numbers per token.
        receive: called at the end of the step on every rank that has the module, with the sums (n,)
            in float64 and a boolean scalar: True if the step made no update. Both are on the
            device.
        owner: the module; another owner with the same name is an error.
        kind: expert_loads: metrics.jsonl also has what `experts.load_metrics` makes of the sums.

    Raises:
        ValueError: `values` lacks a number per sample, or with `cp` per token; or two modules have
            the same name.
    """
    terms = current_context().terms
    if terms is None:
        return
    label = name if kind == "tally" else f"{kind}/{name}"
    sums = terms.sum_of_real(label, values.detach(), keep_last=True)
    field = Field(kind, name, size=len(sums))
    first, _ = terms.step.receivers.setdefault(field, (owner, receive))
    if first is not owner:
        raise ValueError(
            f"two modules tally {label}: the number of each layer with experts has to be its own"
        )
    terms.add(field, sums)


def real_tokens(device: torch.device) -> Tensor | None:
    """(b, s) or (b, 1), bool: which tokens of the current forward are not padding; None: all, as
    outside a step."""
    terms = current_context().terms
    return None if terms is None else terms.real_tokens(device)


def by_sample(x: Tensor) -> Tensor:
    """(b·s, n) or (b, s, n) -> (b, s, n), as `attach` takes it, for a module that does not know how
    many samples b the current forward has. Outside a step all tokens are one sample's."""
    terms = current_context().terms
    return x.view(1 if terms is None else terms.size, -1, x.shape[-1])


class StepTerms:
    """This rank's sums of the `attach`, `record` and `tally` calls of one step.

    Attributes:
        sums: (size,) float64 on the device, of each field.
        receivers: of each field of a `tally`, the module and its `receive`.
    """

    def __init__(self, count: GlobalCount | None, scale: Tensor | None = None) -> None:
        """`count`: of the step; None: no backward follows. `scale`: the loss scale of float16."""
        self.count = count
        self.scale = scale
        self.sums: dict[Field, Tensor] = {}
        self.receivers: dict[Field, tuple[object, Callable[[Tensor, Tensor], None]]] = {}

    @contextmanager
    def of_microbatch(self, size: int, real: int, tokens: Tensor | None = None) -> Iterator[None]:
        """Encloses a forward, or its backward, which may recompute it, of `size` samples, of which
        all but the first `real` are padding. `tokens`: with `cp`, which of this rank's positions
        (s,) are not padding."""
        terms = MicrobatchTerms(self, size, real, tokens)
        with use_context(replace(current_context(), terms=terms)):
            yield

    def factor(self) -> Tensor:
        """The factor of the gradient of a sum over tokens: that of the loss in the mean over the
        global batch, times the loss scale."""
        assert self.count is not None
        scale = 1 if self.scale is None else self.scale.double()
        return scale / self.count.value()

    def stack(self, fields: Sequence[Field]) -> Tensor:
        """The concatenated sums of the fields, in float64; zeros for a field that no module of this
        rank has. `split_fields` takes them apart."""
        assert self.count is not None
        zeros = self.count.total().new_zeros
        sums = [zeros(0)]  # there may be no field
        for field in fields:
            own = self.sums.get(field)
            sums.append(zeros(field.size) if own is None else own)
        return torch.cat(sums)

    def receive(self, totals: Mapping[Field, Tensor], bad: Tensor) -> None:
        """Passes the modules the step's sums over all ranks. `bad`: True if the step made no
        update."""
        for field, (_, receive) in self.receivers.items():
            receive(totals[field], bad)


def split_fields(sums: Tensor, fields: Sequence[Field]) -> dict[Field, Tensor]:
    """What `StepTerms.stack` has concatenated."""
    parts = sums.split([field.size for field in fields])
    return dict(zip(fields, parts, strict=True))


@dataclass(frozen=True)
class MicrobatchTerms:
    """Takes the terms and statistics of one microbatch's forward."""

    step: StepTerms
    size: int  # samples
    real: int  # of them, without padding: the first ones
    # Which of this rank's tokens are not padding, by position (s,), as with `cp`, or (b, s); None:
    # all of the real samples.
    tokens: Tensor | None

    def real_tokens(self, device: torch.device) -> Tensor | None:
        """See `loss.real_tokens`."""
        if self.tokens is None and self.real == self.size:
            return None
        samples = torch.arange(self.size, device=device)[:, None] < self.real
        return samples if self.tokens is None else samples & self.tokens

    def sum_of_real(self, name: str, values: Tensor, keep_last: bool = False) -> Tensor:
        """The sum over all dims, or all but the last, without padding samples and tokens, in
        float32 or wider. Raises ValueError: `values` has not a number for each."""
        self._require_samples(name, values)
        values = values[: self.real]
        # Sums of integers and booleans are exact.
        if values.is_floating_point() and values.dtype.itemsize < 4:
            values = values.float()
        if self.tokens is not None:
            real = self.tokens if self.tokens.dim() == 1 else self.tokens[: self.real]
            real = real.view(*real.shape, *[1] * (values.dim() - 2))
            values = torch.where(real, values, 0)
        return _sum(values, keep_last)

    def _require_samples(self, name: str, values: Tensor) -> None:
        if isinstance(values, DTensor) or values.dim() == 0 or values.shape[0] != self.size:
            raise ValueError(
                f"{name} is of shape {tuple(values.shape)}: expected a plain tensor with a number "
                f"for each of the {self.size} samples of the microbatch, or for each of their "
                "tokens"
            )
        if self.tokens is None:
            return
        length = self.tokens.shape[-1]
        if values.dim() < 2 or values.shape[1] != length:
            raise ValueError(
                f"{name} is of shape {tuple(values.shape)}, and some tokens of a sample are "
                f"padding (as with cp): expected a number for each of this rank's {length} tokens "
                "of a sample"
            )

    def add(self, field: Field, values: Tensor) -> None:
        """Adds to the step's sums of the field, unless a backward recomputes a block, whose forward
        has been counted."""
        if backward_is_running():
            return
        values = values.detach().double().view(field.size)
        sums = self.step.sums
        sums[field] = sums[field] + values if field in sums else values


def _sum(values: Tensor, keep_last: bool) -> Tensor:
    return values.sum(tuple(range(values.dim() - 1))) if keep_last else values.sum()


@dataclass(frozen=True)
class _SeenTerms(MicrobatchTerms):
    see: Callable[[str, Tensor], None]

    def sum_of_real(self, name: str, values: Tensor, keep_last: bool = False) -> Tensor:
        self.see(name, values)
        return _sum(values, keep_last)

    def add(self, field: Field, values: Tensor) -> None:
        pass


@contextmanager
def seen_terms(see: Callable[[str, Tensor], None], size: int) -> Iterator[None]:
    """Calls `see` with the name and the values of each term, statistic and tally of forwards of
    `size` samples inside, which have no backward; none is summed."""
    terms = _SeenTerms(StepTerms(count=None), size, real=size, tokens=None, see=see)
    with use_context(replace(current_context(), terms=terms)):
        yield


def agree_on_fields(terms: StepTerms, mesh: Mesh, *, same_tokens: bool) -> tuple[Field, ...]:
    """The fields of all ranks (stages have different ones) in one order. A collective.

    Args:
        same_tokens: the ranks of `tp` had the same tokens, so their values must be equal.

    Raises:
        AgreedError: on every rank, if the values differ.
    """
    own = {field: values.tolist() for field, values in terms.sums.items()}
    of_ranks: list[dict[Field, list[float]]] = [own]
    if mesh.world is not None:
        of_ranks = [{}] * mesh.layout.world_size
        dist.all_gather_object(of_ranks, own, group=mesh.world)
    fields = sorted({field for sums in of_ranks for field in sums})
    if same_tokens:
        for group in mesh.layout.groups("tp"):
            _require_same_values(fields, {rank: of_ranks[rank] for rank in group})
    return tuple(fields)


def _require_same_values(
    fields: Sequence[Field], of_ranks: Mapping[int, Mapping[Field, list[float]]]
) -> None:
    first = next(iter(of_ranks.values()))
    for field in fields:
        if field not in first:
            continue
        missing = [torch.nan] * field.size
        values = torch.tensor([sums.get(field, missing) for sums in of_ranks.values()])
        if not torch.allclose(values, values[0], rtol=1e-6, atol=0, equal_nan=True):
            raise AgreedError(
                f"{field} differs between ranks {', '.join(ranges(of_ranks))}, which have the "
                "same tokens: without sequence parallelism attach and record belong between the "
                "tensor-parallel layers, where every rank of tp has all features"
            )
