"""Cross entropy and argmax of logits that may be split over the vocabulary, without gathering them.

Over `tp`, per token each rank contributes its largest logit, the sum of exponentials relative to
it, and the target's logit if it holds it: three numbers, which one all-gather sends to all ranks
(after Megatron-LM, https://arxiv.org/abs/1909.08053).
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from meshtrain.data.batch import IGNORE
from meshtrain.parallel.collectives import AxisGroup, axis_group_by_name, ops
from meshtrain.parallel.sharding import chunk_range
from meshtrain.parallel.torch_private import raise_unless


def losses_and_gradient(
    logits: Tensor, targets: Tensor, factor: Tensor | None, first: int, group: str | None
) -> tuple[Tensor, Tensor | None]:
    """Cross entropy of each token, and the gradient of its logits: (softmax - one-hot) * factor.
    Overwrites the logits.

    Args:
        logits: (n, v), or with `group` this rank's part (n, v/t), from token id `first` on. Sums in
            float32 or wider.
        targets: (n,), IGNORE where there is no loss. factor: a scalar; None: no gradient.

    Returns:
        (n,), the same on each rank; and (n, v) or (n, v/t) in the dtype of the logits; both 0 for
        ignored targets.
    """
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    width = logits.shape[1]
    valid = targets != IGNORE
    mine = valid  # the targets whose logits this rank has
    if group is not None:
        mine = (targets >= first) & (targets < first + width)
    index = torch.where(mine, targets - first if first else targets, 0)[:, None]

    # loss = -log softmax(x)[target] = max x + log sum exp(x - max x) - x[target]
    if width > 0:
        largest = wide.amax(-1)
        target = wide.gather(1, index)[:, 0]
        total = wide.sub_(largest[:, None]).exp_().sum(-1)
    else:  # more ranks than parts
        largest = wide.new_full(targets.shape, -torch.inf)
        target = total = wide.new_zeros(targets.shape)
    own_largest = largest
    if group is not None:
        target = torch.where(mine, target, 0.0)
        largest, total, target = _over_ranks(largest, total, target, group)
    losses = torch.where(valid, largest - target + total.log(), 0.0)

    if factor is None:
        return losses, None
    if width == 0:
        return losses, logits
    # `wide` holds exp(x - own largest): softmax(x) * factor is a multiple of it.
    factors = torch.where(valid, factor, 0.0)
    scale = factors / total
    if group is not None:
        scale = scale * (own_largest - largest).exp()
    wide.mul_(scale[:, None])
    # At the target the factor is subtracted before rounding to 16 bits.
    at_target = wide.gather(1, index) - torch.where(mine, factors, 0.0)[:, None]
    return losses, wide.to(logits.dtype).scatter_(1, index, at_target.to(logits.dtype))


def _over_ranks(
    largest: Tensor, total: Tensor, target: Tensor, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each rank's part of the logits of n tokens, the same for all of them: the largest, the sum
    of exponentials relative to it, and the target's, (n,) each."""
    of_ranks = ops.all_gather(torch.stack([largest, total, target])[None], group)  # (t, 3, n)
    largests, totals, targets = of_ranks.unbind(1)
    largest = largests.max(0).values
    return largest, (totals * (largests - largest).exp()).sum(0), targets.sum(0)


def refuse_unknown(targets: Tensor, vocabulary: int) -> None:
    """Raises RuntimeError: no rank has the logit of a target. On a GPU its kernel fails, as that of
    a plain loss."""
    known = (targets == IGNORE) | ((targets >= 0) & (targets < vocabulary))
    raise_unless(
        known.all(),
        f"a target is no output of the model: expected 0 to {vocabulary - 1}, or {IGNORE}",
    )


class VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] from logits (n, v/t) of each rank: (n,) on all; 0 without
    gradient for IGNORE."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: int, group: str) -> Tensor:
        refuse_unknown(targets, vocabulary)
        axis = axis_group_by_name(group)
        first = chunk_range(vocabulary, axis.size, axis.index).start
        losses, gradient = losses_and_gradient(
            logits.clone(), targets, logits.new_ones(()), first, group
        )
        ctx.save_for_backward(gradient, targets)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, targets = ctx.saved_tensors
        return gradient * torch.where(targets != IGNORE, grad, 0.0)[:, None], None, None, None


def token_losses(logits: DTensor, targets: Tensor) -> Tensor:
    """Cross entropy of each token: logits (n, v) split over v, targets (n,) -> (n,), the same on
    each rank."""
    part = _part_of(logits)
    wide = part.float() if part.dtype.itemsize < 4 else part
    flat = wide.flatten(0, -2)
    return VocabParallelCrossEntropy.apply(
        flat, targets, logits.shape[-1], axis_group_of(logits).name
    )


def argmax(logits: DTensor) -> Tensor:
    """The token of the largest logit: (..., v) split over v -> (...), the same on each rank."""
    axis = axis_group_of(logits)
    part = _part_of(logits).detach()
    first = chunk_range(logits.shape[-1], axis.size, axis.index).start
    if part.shape[-1] > 0:
        largest, index = part.max(-1)
    else:
        largest = part.new_full(part.shape[:-1], -torch.inf)
        index = torch.zeros(part.shape[:-1], dtype=torch.int64)
    # Token ids are small enough to be exact in float64.
    mine = torch.stack([largest.double(), (index.to(part.device) + first).double()])
    of_ranks = ops.all_gather(mine[None], axis.name)  # (t, 2, ...)
    best = of_ranks[:, 0].argmax(0, keepdim=True)
    return of_ranks[:, 1].gather(0, best)[0].long()


def gather_logits(logits: Tensor, *position: int | slice) -> Tensor:
    """The full logits (..., v) on each rank, without gradient. `position`: indices into the first
    dims. They are not applied to the DTensor, which would cache the mesh of an earlier run in this
    process with the same ranks."""
    if not isinstance(logits, DTensor):
        return logits[position]
    axis = axis_group_of(logits)
    # Smaller parts are padded to the largest, the first one.
    width = chunk_range(logits.shape[-1], axis.size, 0).stop
    part = _part_of(logits).detach()[position]
    padded = part.new_zeros(*part.shape[:-1], width)
    padded[..., : part.shape[-1]] = part
    of_ranks = ops.all_gather(padded[None], axis.name)
    return of_ranks.movedim(0, -2).flatten(-2)[..., : logits.shape[-1]]


def _part_of(logits: DTensor) -> Tensor:
    """This rank's vocabulary part, also of logits that an operator of the model (a slice,
    torch.cat) has gathered."""
    words = Shard(logits.dim() - 1)
    if logits.placements != (words,):
        logits = logits.redistribute(placements=[words])
    return logits.to_local()


def axis_group_of(logits: DTensor) -> AxisGroup:
    """The group of ranks over which the logits are split."""
    return axis_group_by_name(logits.device_mesh.get_group().group_name)
