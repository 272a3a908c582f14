"""The loss of a step: the sum over all valid targets of the global batch, divided by their number.

It is a sum over a count, and never an average of averages. So it does not matter which rank or microbatch has which
sample and how many targets. Modules add terms in the same way, with `attach`, and log statistics with `record`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtrain.data.batch import IGNORE
from meshtrain.errors import AgreedError, InputError, ranges
from meshtrain.mesh import Mesh
from meshtrain.parallel.cross_entropy import argmax, token_losses
from meshtrain.parallel.torch_private import backward_is_running, never_compiled


def sample_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of every sample, summed over its valid targets.

    Args:
        logits: (b, s, v), or (b, v) for a classifier, in any floating-point type; the sum is made in float32 at least.
            As a DTensor split over v, as tensor-parallel models give them, they are not gathered.
        targets: (b, s) or (b,), int64; IGNORE where there is no loss.

    Returns:
        (b,), 0 for a sample without valid targets.

    Raises:
        InputError: the model gives something else.
    """
    if not isinstance(logits, Tensor) or logits.shape[:-1] != targets.shape:
        output = f"a tensor {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise InputError(
            f"the model's output is {output}: its forward has to return a tensor of logits, {(*targets.shape, 'v')} "
            "for these targets, and nothing beside it"
        )
    if isinstance(logits, DTensor):
        return token_losses(logits, targets.flatten()).view(targets.shape[0], -1).sum(1)
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    losses = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=IGNORE)
    return losses.view(targets.shape[0], -1).sum(1)


def correct_predictions(logits: Tensor, targets: Tensor) -> Tensor:
    """How many valid targets have the largest logit: a scalar."""
    predicted = argmax(logits) if isinstance(logits, DTensor) else logits.argmax(-1)
    return ((predicted == targets) & (targets != IGNORE)).sum()


def valid_targets(targets: Tensor) -> int:
    """How many targets have a loss. `targets` is on the CPU."""
    return int((targets != IGNORE).sum())


class GlobalCount:
    """The number of valid targets of the global batch, which every rank's loss is divided by. The sum over the ranks
    starts at once and is waited for when it is first needed, after the first forward."""

    def __init__(self, count: int, mesh: Mesh, device: torch.device) -> None:
        """`count`: the number of this rank's valid targets in all microbatches of the step."""
        # Filled on the device: a copy of a host's number would wait until the device has done all work before it.
        self._total = torch.full((), float(count), dtype=torch.float64, device=device)
        group = mesh.group("dp_replicate", "dp_shard", "cp")
        self._work = dist.all_reduce(self._total, group=group, async_op=True) if group is not None else None

    def total(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total

    def value(self) -> Tensor:
        """The same, but at least 1, to divide by: a batch without any valid target has a loss of 0."""
        return self.total().clamp(min=1)


class _Attach(torch.autograd.Function):
    """x, whose backward gives `term` its gradient: the factor of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor, factor: Callable[[], Tensor]) -> Tensor:
        ctx.factor, ctx.dtype = factor, term.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.factor().to(ctx.dtype), None


@never_compiled
def attach(x: Tensor, name: str, term: Tensor) -> Tensor:
    """Adds a term to the loss from inside of a model, for instance a router's load balancing.

    The loss that is trained becomes `loss` + the sum of `term` over the global batch / its number of valid targets,
    on every layout: the term's gradient enters where x's passes, also in a pipeline stage that has no loss, and what is
    recomputed counts once. metrics.jsonl gets the term as `loss/NAME`; `loss` stays the cross entropy.

    With `tp`, attach between the tensor-parallel layers (the residual stream, norms, a router), where a rank has all
    features of a part of the tokens, or without sequence parallelism of all of them, which then count once, and terms
    that differ between ranks are refused in the first step. With `tp` and `cp` each number follows from its own token.

    Args:
        x: what the model goes on with: its gradient has to be computed.
        name: the same in every step; a name used in several places is one sum.
        term: (b, ...), a number for each sample or token; samples that are padding are left out here.

    Returns:
        x. Outside of a training step (evaluation, generation, a loop without `StepTerms`) nothing is added.

    Raises:
        ValueError: `term` has no number for each sample, or with `cp` not for each token.
    """
    if _forward is None or not torch.is_grad_enabled():
        return x.view_as(x) if x.is_meta else x  # who looks at a model there is to see that x is used
    total = _forward.total(name, term)
    _forward.add(f"loss/{name}", total)
    return _Attach.apply(x, total, _forward.terms.factor)


@never_compiled
def record(name: str, values: Tensor, counts: Tensor | None = None) -> None:
    """Logs a statistic over the global batch of each step: the sum of `values` as `sum/NAME`, or divided by that of
    `counts` as `mean/NAME`. Nothing happens outside of a training step; where to call it with `tp`: see `attach`.

    Args:
        values, counts: (b, ...), a number for each sample or token.

    Raises:
        ValueError: they have no number for each sample.
    """
    if _forward is None:
        return
    total = _forward.total(name, values.detach().double())
    if counts is None:
        _forward.add(f"sum/{name}", total)
    else:
        _forward.add(f"mean/{name}", total, _forward.total(name, counts.detach().double()))


@never_compiled
def tally(name: str, values: Tensor, receive: Callable[[Tensor, Tensor], None], owner: object) -> None:
    """Sums `values` over the real tokens of the step's global batch, for a module that needs the sum of all layouts.

    Args:
        name: of this module alone, the same in every step.
        values: (b, s, n), n numbers for each token.
        receive: called at the end of the step, on every rank that has the module, with the sums (n,) in float64 and
            whether the step was not finite, and so made no update: a boolean scalar. Both are on the device.
        owner: the module, to which no other may give the same name.

    Raises:
        ValueError: `values` has no number for each sample, or with `cp` not for each token; two modules have one name.
    """
    if _forward is not None:
        first, _ = _forward.terms.receivers.setdefault(f"tally/{name}", (owner, receive))
        if first is not owner:
            raise ValueError(f"two modules tally {name}: the number of each layer with experts has to be its own")
        _forward.add(f"tally/{name}", _forward.total(name, values.detach(), dims=values.dim() - 1))


def real_tokens(device: torch.device) -> Tensor | None:
    """(b, s) or (b, 1), bool: which tokens of the current forward are no padding; None: all, as outside of a step."""
    return None if _forward is None else _forward.real_tokens(device)


class StepTerms:
    """What `attach`, `record` and `tally` of this rank's modules come to in one step, by field."""

    def __init__(self, count: GlobalCount, scale: Tensor | None = None) -> None:
        """`scale`: float16's factor of the loss."""
        self.count, self.scale = count, scale
        # field -> (2,) float64 on the device, a sum and a count; of `tally` (n,)
        self.sums: dict[str, Tensor] = {}
        # Of the fields of `tally`: the module, and what it is told by.
        self.receivers: dict[str, tuple[object, Callable[[Tensor, Tensor], None]]] = {}

    @contextmanager
    def of_microbatch(self, size: int, real: int, tokens: Tensor | None = None) -> Iterator[None]:
        """Around a forward and its backward, which may compute it again, of `size` samples, the first `real` of them no
        padding. `tokens`: with `cp`, which of this rank's positions (s,) are no padding."""
        global _forward  # noqa: PLW0603
        before, _forward = _forward, _Forward(self, size, real, tokens)
        try:
            yield
        finally:
            _forward = before

    def factor(self) -> Tensor:
        """What the gradient of a sum over tokens is multiplied by."""
        return (1 if self.scale is None else self.scale.double()) / self.count.value()

    def stack(self, fields: Mapping[str, int]) -> Tensor:
        """The sums of each field one behind the other, in float64; zeros where no module of this rank has any.
        `fields`: field -> how many numbers."""
        zeros = self.count.total().new_zeros
        return torch.cat([zeros(0), *(self.sums.get(field, zeros(length)) for field, length in fields.items())])

    def receive(self, totals: Mapping[str, Tensor], bad: Tensor) -> None:
        """Gives modules what the step came to: the sums over all ranks, by field."""
        for field, (_, receive) in self.receivers.items():
            receive(totals[field], bad)


@dataclass(frozen=True)
class _Forward:
    terms: StepTerms
    size: int
    real: int
    tokens: Tensor | None

    def real_tokens(self, device: torch.device) -> Tensor | None:
        if self.tokens is None and self.real == self.size:
            return None
        samples = torch.arange(self.size, device=device)[:, None] < self.real
        return samples if self.tokens is None else samples & self.tokens

    def total(self, name: str, values: Tensor, dims: int | None = None) -> Tensor:
        """Over the samples and tokens that are no padding, in float32 at least: of the first `dims` dims."""
        if isinstance(values, DTensor) or values.dim() == 0 or values.shape[0] != self.size:
            raise ValueError(
                f"{name} is of shape {tuple(values.shape)}: expected a plain tensor with a number for each of the "
                f"{self.size} samples of the microbatch, or for each of their tokens"
            )
        narrow = values.is_floating_point() and values.dtype.itemsize < 4  # sums of integers and booleans are exact
        values = (values.float() if narrow else values)[: self.real]
        if self.tokens is not None:
            if values.dim() < 2 or values.shape[1] != len(self.tokens):
                raise ValueError(
                    f"{name} is of shape {tuple(values.shape)}: with cp, a rank has parts of the samples: expected a "
                    f"number for each of its {len(self.tokens)} tokens of a sample"
                )
            values = torch.where(self.tokens.view(-1, *[1] * (values.dim() - 2)), values, 0)
        return values.sum(None if dims is None else tuple(range(dims)))

    def add(self, field: str, total: Tensor, count: Tensor | None = None) -> None:
        if backward_is_running():
            return  # a block that is computed again has been counted
        total = total.detach().double()
        if total.dim() == 0:
            total = torch.stack([total, torch.zeros_like(total) if count is None else count])
        sums = self.terms.sums
        sums[field] = sums[field] + total if field in sums else total


_forward: _Forward | None = None  # backward runs in threads of its own, so this is no thread's or context's variable


def agree_on_fields(terms: StepTerms, mesh: Mesh, *, same_tokens: bool) -> dict[str, int]:
    """All ranks' fields in one order (stages have different ones), and how many numbers each has. A collective.

    Args:
        same_tokens: the ranks of `tp` have seen the same tokens, and must have computed the same.

    Raises:
        AgreedError: on every rank: they have not.
    """
    own = {field: pair.tolist() for field, pair in terms.sums.items()}
    every: list[Any] = [own]
    if mesh.world is not None:
        every = [None] * mesh.layout.world_size
        dist.all_gather_object(every, own, group=mesh.world)
    fields = {field: len(sums[field]) for sums in every for field in sums}
    for group in mesh.layout.groups("tp") if same_tokens else ():
        first = every[group[0]]
        for field in fields:
            values = torch.tensor([every[rank].get(field, [torch.nan] * fields[field]) for rank in group])
            if field in first and not torch.allclose(values, values[0], rtol=1e-6, atol=0, equal_nan=True):
                raise AgreedError(
                    f"{field} differs between ranks {', '.join(ranges(group))}, which have the same tokens: without "
                    "sequence parallelism attach and record belong between the tensor-parallel layers, where every "
                    "rank of tp has all features"
                )
    return dict(sorted(fields.items()))
