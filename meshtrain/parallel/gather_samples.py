"""Samples of all data ranks in a loss: all-gather, whose backward is a reduce-scatter.

A contrastive loss compares each sample with all others of the global batch, wherever they are. Each
data rank returns the losses of its own samples; these depend on the features of all. So the
gradient of a sample's features is a sum over the ranks, each of which adds what its own samples
contribute:

    L = sum over ranks r of L_r(x_0, x_1, ...),    dL/dx_i = sum over ranks r of dL_r/dx_i

The reduce-scatter gives rank i this sum. From there on backward goes as for any other loss: the
gradients of parameters are summed over the data ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtrain.data.order import BatchSizes, microbatches, share
from meshtrain.errors import AgreedError
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import AxisGroup, axis_group, ops
from meshtrain.parallel.step_context import current_context, use_context
from meshtrain.parallel.torch_private import never_compiled

NOT_ALL = (
    "the loss compares each sample with all others of a step (gather_samples), so that these have "
    "to be one microbatch"
)


@never_compiled
def gather_samples(x: Tensor) -> Tensor:
    """The samples of all data ranks in a `loss`, with gradients: those of the microbatch, in the
    order of the global batch, without padding. All ranks of `tp` and `cp` get the same.

    Every data rank has to call it, in the same order, also one that has no sample (b = 0), and its
    loss has to use the result, so that it takes part in the backward.

    Args:
        x: (b, ...), one row for each of this rank's samples, of any dtype.

    Returns:
        (B, ...), one row for each sample of the global batch. `sample_positions` says which of them
        are this rank's. With one process: x.

    Raises:
        ValueError: x is no plain tensor with a row for each sample.
        AgreedError: the step has several microbatches, so that a sample does not meet all others.
        RuntimeError: outside of a loss, in a job of several processes.
    """
    shares = _shares()
    return x if shares is None else shares.gather(x)


@never_compiled
def sample_positions(x: Tensor) -> Tensor:
    """(b,) int64, on the device of `x`: which rows of what `gather_samples` returns are this rank's
    own. `x`, errors: as of `gather_samples`."""
    shares = _shares()
    own = range(len(x)) if shares is None else shares.positions(x)
    return torch.arange(own.start, own.stop, device=x.device)


def _shares() -> "SampleShares | None":
    """How the samples of the loss that is being computed are shared out; None: there is one process
    and no step."""
    shares = current_context().shares
    if shares is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            "gather_samples and sample_positions are for a loss: outside of a step nobody knows "
            "how many samples the other ranks have"
        )
    return shares


@dataclass(frozen=True)
class SampleShares:
    """How the samples of a microbatch are shared out among the data ranks."""

    samples: int | None  # of all ranks together; None: a sample does not meet all others
    ranks: int
    index: int  # of this rank among them
    group: AxisGroup | None  # of these ranks; None: there is one
    refusal: str = NOT_ALL  # said where a sample does not meet all others

    @classmethod
    def of(cls, samples: int | None, mesh: Mesh, refusal: str | None = None) -> "SampleShares":
        """Those of `Batch.together`."""
        ranks, index = mesh.size(*DATA_AXES), mesh.index(*DATA_AXES)
        group = axis_group(mesh, "data") if ranks > 1 else None
        return cls(samples, ranks, index, group, refusal or NOT_ALL)

    @cached_property
    def counts(self) -> list[int]:
        """The samples of each rank."""
        if self.samples is None:
            raise AgreedError(self.refusal)
        return [len(share(self.samples, self.ranks, rank)) for rank in range(self.ranks)]

    def gather(self, x: Tensor) -> Tensor:
        self._require_own(x)
        if self.group is None:
            return x
        return _GatherSamples.apply(x, self.counts, self.group)

    def positions(self, x: Tensor) -> range:
        self._require_own(x)
        first = sum(self.counts[: self.index])
        return range(first, first + len(x))

    def _require_own(self, x: Tensor) -> None:
        own = self.counts[self.index]
        if isinstance(x, DTensor) or x.dim() == 0 or len(x) != own:
            raise ValueError(
                f"gather_samples: x is a {type(x).__name__} {tuple(x.shape)}: expected a plain "
                f"tensor with a row for each of this rank's {own} samples"
            )


@dataclass(frozen=True)
class _Watched(SampleShares):
    calls: list[Tensor] = field(default_factory=list)

    def gather(self, x: Tensor) -> Tensor:
        self.calls.append(x)
        return x


@contextmanager
def watched_gathers(samples: int) -> Iterator[list[Tensor]]:
    """Yields a list of what is given to `gather_samples` inside, where a loss is tried with this
    many samples and without other ranks."""
    shares = _Watched(samples, ranks=1, index=0, group=None)
    with use_context(replace(current_context(), shares=shares)):
        yield shares.calls


def several_microbatches(sizes: BatchSizes, micro_size: int, ranks: int) -> str | None:
    """Why a loss that gathers samples cannot be computed, and what to do; None: each step is one
    microbatch."""
    count = microbatches(sizes.largest, micro_size, ranks)
    if count == 1:
        return None
    whole = -(-sizes.largest // ranks)  # the largest share of a rank
    remedy = f"batch.micro_size={whole}"
    if whole > min(sizes.sizes):
        # micro_size is at most the smallest step, so there have to be more ranks.
        ranks_needed = -(-sizes.largest // min(sizes.sizes))
        remedy = f"{ranks_needed} data ranks, or one batch.global_size for all steps"
    return f"{NOT_ALL}, and a step of {sizes.largest} is {count} microbatches: use {remedy}"


class _GatherSamples(torch.autograd.Function):
    """(b, ...) -> (B, ...); backward: this rank's rows of the sum of the ranks' gradients.

    Messages have equal sizes, so a rank with fewer samples sends rows of zeros after its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], group: AxisGroup) -> Tensor:
        ctx.counts = counts
        ctx.group = group
        ctx.own = len(x)
        most = max(counts)
        gathered = ops.all_gather(_with_rows(x, most), group.name)
        parts = gathered.split(most)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Ranks that hold few samples add to a gradient as many times as there are ranks: in 16 bits
        # each addition would be rounded.
        wide = grad if grad.dtype.itemsize >= 4 else grad.float()
        most = max(ctx.counts)
        parts = [_with_rows(part, most) for part in wide.split(list(ctx.counts))]
        summed = ops.reduce_scatter(torch.cat(parts), ctx.group.name)
        return summed[: ctx.own].to(grad.dtype), None, None


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """x (b, ...) with rows of zeros after it."""
    missing = rows - len(x)
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
