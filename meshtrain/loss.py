"""The loss of a step: the sum over all valid targets of the global batch, divided by their number.

It is one sum over one count, never an average of averages. So it does not matter which rank or
microbatch has which sample and how many targets. Modules add terms in the same way with `attach`,
and log statistics with `record`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

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
        logits: (b, s, v), or (b, v) for a classifier, in any floating-point type; summed in float32
            or wider. A DTensor split over v, as tensor-parallel models return, is not gathered.
        targets: (b, s) or (b,), int64; IGNORE where there is no loss.

    Returns:
        (b,), 0 for a sample without valid targets.

    Raises:
        InputError: the model returned something else.
    """
    if not isinstance(logits, Tensor) or logits.shape[:-1] != targets.shape:
        output = (
            f"a tensor {tuple(logits.shape)}"
            if isinstance(logits, Tensor)
            else f"a {type(logits).__name__}"
        )
        raise InputError(
            f"the model's output is {output}: its forward has to return a tensor of logits, "
            f"{(*targets.shape, 'v')} "
            "for these targets, and nothing beside it"
        )
    if isinstance(logits, DTensor):
        return token_losses(logits, targets.flatten()).view(targets.shape[0], -1).sum(1)
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    losses = F.cross_entropy(
        wide.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=IGNORE
    )
    return losses.view(targets.shape[0], -1).sum(1)


def correct_predictions(logits: Tensor, targets: Tensor) -> Tensor:
    """The number of valid targets that have the largest logit: a scalar."""
    predicted = argmax(logits) if isinstance(logits, DTensor) else logits.argmax(-1)
    return ((predicted == targets) & (targets != IGNORE)).sum()


def valid_targets(targets: Tensor) -> int:
    """The number of targets with a loss. `targets` is on the CPU."""
    return int((targets != IGNORE).sum())


class GlobalCount:
    """The number of valid targets of the global batch, by which every rank's loss is divided. The
    all-reduce starts in the constructor, and the first use waits for it, after the first
    forward."""

    def __init__(self, count: int, mesh: Mesh, device: torch.device) -> None:
        """`count`: the number of this rank's valid targets in all microbatches of the step."""
        # Filled on the device: copying a number from the host would wait for all work queued on the
        # device.
        self._total = torch.full((), float(count), dtype=torch.float64, device=device)
        group = mesh.group("dp_replicate", "dp_shard", "cp")
        self._work = (
            dist.all_reduce(self._total, group=group, async_op=True) if group is not None else None
        )

    def total(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total

    def value(self) -> Tensor:
        """The total, but at least 1, as a divisor: a batch without any valid target has a loss of
        0."""
        return self.total().clamp(min=1)


class _Attach(torch.autograd.Function):
    """Returns x; its backward gives `term` its gradient, the factor of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor, factor: Callable[[], Tensor]) -> Tensor:
        ctx.factor, ctx.dtype = factor, term.dtype
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
    if _forward is None or not torch.is_grad_enabled():
        return x.view_as(x) if x.is_meta else x  # a trace on meta must see that x is used
    total = _forward.total(name, term)
    _forward.add(f"loss/{name}", total)
    return _Attach.apply(x, total, _forward.terms.factor)


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
    if _forward is None:
        return
    total = _forward.total(name, values.detach().double())
    if counts is None:
        _forward.add(f"sum/{name}", total)
    else:
        _forward.add(f"mean/{name}", total, _forward.total(name, counts.detach().double()))


@never_compiled
def tally(
    name: str, values: Tensor, receive: Callable[[Tensor, Tensor], None], owner: object
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

    Raises:
        ValueError: `values` lacks a number per sample, or with `cp` per token; or two modules have
            the same name.
    """
    if _forward is not None:
        first, _ = _forward.terms.receivers.setdefault(f"tally/{name}", (owner, receive))
        if first is not owner:
            raise ValueError(
                f"two modules tally {name}: the number of each layer with experts has to be its own"
            )
        _forward.add(f"tally/{name}", _forward.total(name, values.detach(), dims=values.dim() - 1))


def real_tokens(device: torch.device) -> Tensor | None:
    """(b, s) or (b, 1), bool: which tokens of the current forward are not padding; None: all, as
    outside a step."""
    return None if _forward is None else _forward.real_tokens(device)


class StepTerms:
    """This rank's sums of the `attach`, `record` and `tally` calls of one step, by field."""

    def __init__(self, count: GlobalCount, scale: Tensor | None = None) -> None:
        """`scale`: the loss scale of float16."""
        self.count, self.scale = count, scale
        # field -> (2,) float64 on the device, a sum and a count; (n,) for `tally`
        self.sums: dict[str, Tensor] = {}
        # field of `tally` -> the module, and its `receive`
        self.receivers: dict[str, tuple[object, Callable[[Tensor, Tensor], None]]] = {}

    @contextmanager
    def of_microbatch(self, size: int, real: int, tokens: Tensor | None = None) -> Iterator[None]:
        """Encloses a forward, or its backward, which may recompute it, of `size` samples, of which
        all but the first `real` are padding. `tokens`: with `cp`, which of this rank's positions
        (s,) are not padding."""
        global _forward  # noqa: PLW0603
        before, _forward = _forward, _Forward(self, size, real, tokens)
        try:
            yield
        finally:
            _forward = before

    def factor(self) -> Tensor:
        """The factor of the gradient of a sum over tokens."""
        return (1 if self.scale is None else self.scale.double()) / self.count.value()

    def stack(self, fields: Mapping[str, int]) -> Tensor:
        """The concatenated sums of the fields, in float64; zeros for a field that no module of this
        rank has. `fields`: field -> its number of elements."""
        zeros = self.count.total().new_zeros
        return torch.cat(
            [zeros(0), *(self.sums.get(field, zeros(length)) for field, length in fields.items())]
        )

    def receive(self, totals: Mapping[str, Tensor], bad: Tensor) -> None:
        """Passes the modules the step's sums over all ranks, by field."""
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
        """The sum over the first `dims` dims (None: all), without padding samples and tokens, in
        float32 or wider."""
        if isinstance(values, DTensor) or values.dim() == 0 or values.shape[0] != self.size:
            raise ValueError(
                f"{name} is of shape {tuple(values.shape)}: expected a plain tensor with a number "
                "for each of the "
                f"{self.size} samples of the microbatch, or for each of their tokens"
            )
        # sums of integers and booleans are exact
        narrow = values.is_floating_point() and values.dtype.itemsize < 4
        values = (values.float() if narrow else values)[: self.real]
        if self.tokens is not None:
            if values.dim() < 2 or values.shape[1] != len(self.tokens):
                raise ValueError(
                    f"{name} is of shape {tuple(values.shape)}: with cp, a rank has parts of the "
                    "samples: expected a "
                    f"number for each of its {len(self.tokens)} tokens of a sample"
                )
            values = torch.where(self.tokens.view(-1, *[1] * (values.dim() - 2)), values, 0)
        return values.sum(None if dims is None else tuple(range(dims)))

    def add(self, field: str, total: Tensor, count: Tensor | None = None) -> None:
        if backward_is_running():
            return  # a recomputed block has already been counted
        total = total.detach().double()
        if total.dim() == 0:
            total = torch.stack([total, torch.zeros_like(total) if count is None else count])
        sums = self.terms.sums
        sums[field] = sums[field] + total if field in sums else total


@dataclass(frozen=True)
class _Seen(_Forward):
    see: Callable[[str, Tensor], None]

    def total(self, name: str, values: Tensor, dims: int | None = None) -> Tensor:
        self.see(name, values)
        return values.sum() if dims is None else values.sum(tuple(range(dims)))

    def add(self, field: str, total: Tensor, count: Tensor | None = None) -> None:
        pass


@contextmanager
def seen_terms(see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls `see` with the name and the values of each term, statistic and tally of forwards
    inside, which have no backward; none is summed."""
    global _forward  # noqa: PLW0603
    before, _forward = _forward, _Seen(StepTerms(cast(Any, None)), 0, 0, None, see)
    try:
        yield
    finally:
        _forward = before


# not thread-local or a context variable: backward runs in its own threads
_forward: _Forward | None = None


def agree_on_fields(terms: StepTerms, mesh: Mesh, *, same_tokens: bool) -> dict[str, int]:
    """The fields of all ranks (stages have different ones) in one order, with their numbers of
    elements. A collective.

    Args:
        same_tokens: the ranks of `tp` had the same tokens, so their values must be equal.

    Raises:
        AgreedError: on every rank, if the values differ.
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
            values = torch.tensor(
                [every[rank].get(field, [torch.nan] * fields[field]) for rank in group]
            )
            if field in first and not torch.allclose(
                values, values[0], rtol=1e-6, atol=0, equal_nan=True
            ):
                raise AgreedError(
                    f"{field} differs between ranks {', '.join(ranges(group))}, which have the "
                    "same tokens: without "
                    "sequence parallelism attach and record belong between the tensor-parallel "
                    "layers, where every "
                    "rank of tp has all features"
                )
    return dict(sorted(fields.items()))
