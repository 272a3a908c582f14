"""Cross entropy and argmax of logits that may be split over the vocabulary, without gathering them.

Over `tp`, per token each rank contributes its largest logit, the sum of exponentials relative to
it, and the target's logit if it holds it: three numbers, which one all-gather sends to all ranks
(after Megatron-LM, https://arxiv.org/abs/1909.08053). With label smoothing the third is its share
in a mean of all logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from meshtrain.data.batch import IGNORE
from meshtrain.errors import InputError
from meshtrain.parallel.collectives import AxisGroup, axis_group_by_name, gather_features, ops
from meshtrain.parallel.sharding import chunk_range
from meshtrain.parallel.torch_private import raise_unless


@dataclass(frozen=True)
class LossOptions:
    """What the loss of a token is beside its cross entropy.

    Attributes:
        label_smoothing: the part of the target's weight that all v classes share, from 0 to 1
            (Szegedy et al., https://arxiv.org/abs/1512.00567).
        z_loss: the factor of (log sum exp of the logits)^2, at least 0, which keeps that near 0
            (PaLM, https://arxiv.org/abs/2204.02311).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        """Raises InputError: one is outside of its range."""
        if not 0 <= self.label_smoothing <= 1:
            raise InputError(f"label_smoothing is {self.label_smoothing}: use a number from 0 to 1")
        if not self.z_loss >= 0:
            raise InputError(f"z_loss is {self.z_loss}: use a number of at least 0")


CROSS_ENTROPY = LossOptions()  # and nothing beside it


def losses_and_gradient(
    logits: Tensor,
    targets: Tensor,
    factor: Tensor | None,
    first: int,
    group: str | None,
    *,
    vocabulary: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """The loss of each token, and the gradient of its logits times a factor. Overwrites the logits.

        Z = log sum exp x,    p = exp(x - Z) = softmax(x)
        q = (1 - label_smoothing) * one-hot + label_smoothing / v

        loss = -sum(q * log p) + z_loss * Z^2 = Z - sum(q * x) + z_loss * Z^2
        d loss / dx = p * (1 + 2 * z_loss * Z) - q

    With both options 0 these are the cross entropy Z - x[target] and softmax(x) - one-hot.

    Args:
        logits: (n, v), or with `group` this rank's part (n, v/t), from token id `first` on. Sums in
            float32 or wider.
        targets: (n,), IGNORE where there is no loss. factor: a scalar; None: no gradient.
        vocabulary: v, of all ranks.
        label_smoothing, z_loss: see `LossOptions`. Numbers of Python, so that a compiled pass has
            only what they ask for.

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

    # Z = max x + log sum exp(x - max x), and `wanted` is sum(q * x): the target's logit, or with
    # label smoothing the mean of all logits under q. Each rank has its share of it.
    if width > 0:
        wanted = wide.gather(1, index)[:, 0]
        if group is not None:
            wanted = torch.where(mine, wanted, 0.0)
        if label_smoothing:
            of_all = wide.sum(-1) * (label_smoothing / vocabulary)
            wanted = wanted * (1 - label_smoothing) + of_all
        largest = wide.amax(-1)
        total = wide.sub_(largest[:, None]).exp_().sum(-1)
    else:  # more ranks than parts
        largest = wide.new_full(targets.shape, -torch.inf)
        wanted = total = wide.new_zeros(targets.shape)
    own_largest = largest
    if group is not None:
        largest, total, wanted = _over_ranks(largest, total, wanted, group)
    losses = largest - wanted + total.log()
    if z_loss:
        log_sum_exp = largest + total.log()
        losses = losses + z_loss * log_sum_exp.square()
    losses = torch.where(valid, losses, 0.0)

    if factor is None:
        return losses, None
    if width == 0:
        return losses, logits
    # `wide` holds exp(x - own largest): p * factor is a multiple of it.
    factors = torch.where(valid, factor, 0.0)
    scale = factors / total
    if group is not None:
        scale = scale * (own_largest - largest).exp()
    if z_loss:
        scale = scale * (1 + 2 * z_loss * log_sum_exp)
    wide.mul_(scale[:, None])
    # q times the factor is subtracted before rounding to 16 bits.
    of_target = factors
    if label_smoothing:
        wide.sub_((factors * (label_smoothing / vocabulary))[:, None])
        of_target = factors * (1 - label_smoothing)
    at_target = wide.gather(1, index) - torch.where(mine, of_target, 0.0)[:, None]
    return losses, wide.to(logits.dtype).scatter_(1, index, at_target.to(logits.dtype))


def _over_ranks(
    largest: Tensor, total: Tensor, wanted: Tensor, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each rank's part of the logits of n tokens, the same for all of them: the largest, the sum
    of exponentials relative to it, and the sum of the shares of what is wanted, (n,) each.

        m = max_r m_r
        Z = sum_r Z_r exp(m_r - m)      since Z_r = sum of exp(logit - m_r) over the part of rank r
    """
    own = torch.stack([largest, total, wanted])
    of_ranks = ops.all_gather(own[None], group)  # (t, 3, n)
    largests, totals, shares = of_ranks.unbind(1)
    largest = largests.max(0).values
    total = (totals * (largests - largest).exp()).sum(0)
    return largest, total, shares.sum(0)


def refuse_unknown(targets: Tensor, vocabulary: int) -> None:
    """Raises RuntimeError: no rank has the logit of a target. On a GPU its kernel fails, as that of
    a plain loss."""
    known = (targets == IGNORE) | ((targets >= 0) & (targets < vocabulary))
    raise_unless(
        known.all(),
        f"a target is no output of the model: expected 0 to {vocabulary - 1}, or {IGNORE}",
    )


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The loss of each token from logits (n, v/t) of each rank: (n,) on all; 0 without gradient for
    IGNORE."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: int, group: str, options: LossOptions
    ) -> Tensor:
        refuse_unknown(targets, vocabulary)
        axis = axis_group_by_name(group)
        losses, gradient = losses_and_gradient(
            logits.clone(),
            targets,
            logits.new_ones(()),
            first=chunk_range(vocabulary, axis.size, axis.index).start,
            group=group,
            vocabulary=vocabulary,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
        )
        ctx.save_for_backward(gradient, targets)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        if torch.is_grad_enabled():  # the forward has made the gradient, without a graph
            raise RuntimeError(
                "the loss of logits that are split over tp has no second derivative: call backward "
                "without create_graph, or train with tp: 1"
            )
        gradient, targets = ctx.saved_tensors
        of_logits = gradient * torch.where(targets != IGNORE, grad, 0.0)[:, None]
        return of_logits, None, None, None, None


def vocab_parallel_cross_entropy(logits: DTensor, targets: Tensor, options: LossOptions) -> Tensor:
    """The loss of each token: logits (..., v) split over v, targets (n,) -> (n,), the same on each
    rank."""
    axis = axis_group_of(logits)
    part = _part_of(logits)
    wide = part.float() if part.dtype.itemsize < 4 else part
    return VocabParallelCrossEntropy.apply(
        wide.flatten(0, -2), targets, logits.shape[-1], axis.name, options
    )


def argmax(logits: DTensor) -> Tensor:
    """The token of the largest logit: (..., v) split over v -> (...), the same on each rank."""
    axis = axis_group_of(logits)
    part = _part_of(logits).detach()
    first = chunk_range(logits.shape[-1], axis.size, axis.index).start
    if part.shape[-1] > 0:
        largest, index = part.max(-1)
    else:
        # A rank without words, which is never the one with the largest logit.
        largest = part.new_full(part.shape[:-1], -torch.inf)
        index = torch.zeros_like(largest, dtype=torch.int64)
    token = first + index

    # One message brings both from all ranks: token ids are small enough to be exact in float64.
    candidate = torch.stack([largest.double(), token.double()])  # (2, ...)
    of_ranks = ops.all_gather(candidate[None], axis.name)  # (t, 2, ...)
    logits_of_ranks, tokens_of_ranks = of_ranks.unbind(1)
    best_rank = logits_of_ranks.argmax(0, keepdim=True)
    return tokens_of_ranks.gather(0, best_rank)[0].long()


def gather_logits(logits: Tensor, *position: int | slice) -> Tensor:
    """The full logits (..., v) on each rank, without gradient. `position`: indices into the first
    dims. They are not applied to the DTensor, which would cache the mesh of an earlier run in this
    process with the same ranks."""
    if not isinstance(logits, DTensor):
        return logits[position]
    axis = axis_group_of(logits)
    part = _part_of(logits).detach()[position]
    return gather_features(part, logits.shape[-1], axis)


def full_logits(logits: DTensor) -> Tensor:
    """The full logits (..., v) on each rank. Their gradient, the same on each rank, is that of the
    whole: each rank takes its part of it."""
    axis = axis_group_of(logits)
    return gather_features(_part_of(logits), logits.shape[-1], axis)


def _part_of(logits: DTensor) -> Tensor:
    """This rank's vocabulary part, also of logits that an operator of the model (a slice,
    torch.cat) has gathered, or that are split over another dim: DTensor moves them, with
    gradients."""
    words = Shard(logits.dim() - 1)
    if logits.placements != (words,):
        logits = logits.redistribute(placements=[words])
    return logits.to_local()


def axis_group_of(logits: DTensor) -> AxisGroup:
    """The group of ranks over which the logits are split.

    Raises InputError: they are split over several axes."""
    mesh = logits.device_mesh
    if mesh.ndim != 1:
        raise InputError(
            f"the logits are split over {mesh}: expected a DTensor over the axis tp alone, as the "
            "model's last layer returns it, split over its last dim or any other"
        )
    return axis_group_by_name(mesh.get_group().group_name)
