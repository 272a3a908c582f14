"""Cross entropy and argmax of logits that are split over the vocabulary: the logits are never gathered.

Per token each rank contributes its largest logit, the sum of exponentials relative to that, and the target's logit if
it holds it: three numbers, which one all-gather brings to all (after Megatron-LM, https://arxiv.org/abs/1909.08053).
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtrain.parallel.collectives import AxisGroup, axis_group_by_name, ops
from meshtrain.parallel.sharding import chunk_range


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Per token -log softmax(logits)[target] from logits (n, v/t) on each rank: (n,), the same on each; 0 and without a
    gradient for a target outside of the vocabulary (IGNORE)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: int, group: str) -> Tensor:
        axis = axis_group_by_name(group)
        own = chunk_range(vocabulary, axis.size, axis.index)
        valid = (targets >= 0) & (targets < vocabulary)
        mine = (targets >= own.start) & (targets < own.stop)
        local = torch.where(mine, targets - own.start, 0)
        if logits.shape[1] > 0:
            largest = logits.max(-1).values
            p = (logits - largest[:, None]).exp()
            target = torch.where(mine, logits.gather(1, local[:, None])[:, 0], 0.0)
        else:  # more ranks than parts
            largest = logits.new_full(targets.shape, -torch.inf)
            p, target = logits.clone(), logits.new_zeros(targets.shape)
        of_ranks = ops.all_gather(torch.stack([largest, p.sum(-1), target])[None], group)  # (t, 3, n)
        of_all = of_ranks[:, 0].max(0).values
        total = (of_ranks[:, 1] * (of_ranks[:, 0] - of_all).exp()).sum(0)
        p.mul_(((largest - of_all).exp() / total)[:, None])  # the softmax
        ctx.save_for_backward(p, local, mine, valid)
        return torch.where(valid, total.log() + of_all - of_ranks[:, 2].sum(0), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        p, local, mine, valid = ctx.saved_tensors
        grad = torch.where(valid, grad, 0.0)
        dlogits = p * grad[:, None]
        if dlogits.shape[1] > 0:
            dlogits.scatter_add_(1, local[:, None], torch.where(mine, -grad, 0.0)[:, None])
        return dlogits, None, None, None


def token_losses(logits: DTensor, targets: Tensor) -> Tensor:
    """Cross entropy of each token: logits (n, v) split over v, targets (n,) -> (n,), the same on each rank."""
    part = logits.to_local()
    wide = part.float() if part.dtype.itemsize < 4 else part
    flat = wide.flatten(0, -2)
    return VocabParallelCrossEntropy.apply(flat, targets, logits.shape[-1], axis_group_of(logits).name)


def argmax(logits: DTensor) -> Tensor:
    """The token of the largest logit: (..., v) split over v -> (...), the same on each rank."""
    axis, part = axis_group_of(logits), logits.to_local().detach()
    first = chunk_range(logits.shape[-1], axis.size, axis.index).start
    if part.shape[-1] > 0:
        largest, index = part.max(-1)
    else:
        largest, index = part.new_full(part.shape[:-1], -torch.inf), torch.zeros(part.shape[:-1], dtype=torch.int64)
    # Token ids are small enough to be exact in float64.
    mine = torch.stack([largest.double(), (index.to(part.device) + first).double()])
    of_ranks = ops.all_gather(mine[None], axis.name)  # (t, 2, ...)
    best = of_ranks[:, 0].argmax(0, keepdim=True)
    return of_ranks[:, 1].gather(0, best)[0].long()


def gather_logits(logits: DTensor, *position: int) -> Tensor:
    """All of some logits (..., v) on each rank, without a gradient. `position`: indices into the first dims, which
    given to the DTensor would remember the mesh of an earlier run in this process with the same ranks."""
    axis = axis_group_of(logits)
    width = chunk_range(logits.shape[-1], axis.size, 0).stop  # of the largest part; others are padded to it
    part = logits.to_local().detach()[position]
    padded = part.new_zeros(*part.shape[:-1], width)
    padded[..., : part.shape[-1]] = part
    of_ranks = ops.all_gather(padded[None], axis.name)
    return of_ranks.movedim(0, -2).flatten(-2)[..., : logits.shape[-1]]


def axis_group_of(logits: DTensor) -> AxisGroup:
    """The ranks over which logits are split."""
    return axis_group_by_name(logits.device_mesh.get_group().group_name)
