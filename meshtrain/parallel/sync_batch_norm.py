"""Batch norm over the samples of all data ranks, as one process computes it
(`parallel.sync_batch_norm`).

Mean and variance of a channel are sums over all ranks divided by the number of all values, so they
do not depend on how the samples are shared out. They are those of one process if a step is one
microbatch. `torch.nn.SyncBatchNorm` does the same on GPUs alone, with statistics merged from those
of each rank.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from meshtrain.errors import AgreedError
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import AllReduce, AxisGroup, SumGradient, axis_group
from meshtrain.parallel.torch_private import AnyBatchNorm


class _Groups(tuple[AxisGroup, ...]):
    """The data ranks of a layer, axis by axis. Copies of a model share it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Groups":
        return self


class SyncBatchNorm(AnyBatchNorm):
    """A batch norm with the statistics of the samples of all data ranks; (b, c, ...) -> (b, c,
    ...). For each channel, with sums over its n values on all ranks:

        mean = sum(x) / n,    variance = sum((x - mean)^2) / n
        y = weight (x - mean) / sqrt(variance + eps) + bias
    """

    axis_groups: _Groups

    def _check_input_dim(self, input: Tensor) -> None:
        """The plain layer has its number of dims in its class."""

    def forward(self, input: Tensor) -> Tensor:  # named as in torch
        if not self.training:
            return super().forward(input)
        x = input
        ranks = math.prod(group.size for group in self.axis_groups)
        count = x.numel() // x.shape[1] * ranks
        if count < 2:
            raise ValueError("a batch norm in training needs more than one value of a channel")
        all_but_channels = [0, *range(2, x.dim())]
        of_channels = (1, -1, *[1] * (x.dim() - 2))  # a shape that broadcasts to x
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = self._sum(wide.sum(all_but_channels)) / count
        centred = wide - mean.view(of_channels)
        variance = self._sum(centred.square().sum(all_but_channels)) / count
        # Running statistics are of the population: divided by n - 1, as in torch.
        of_population = variance.detach() * (count / (count - 1))
        self._follow(mean.detach(), of_population)

        y = centred * torch.rsqrt(variance + self.eps).view(of_channels)
        if self.affine:
            y = y * self.weight.view(of_channels) + self.bias.view(of_channels)
        return y.to(x.dtype)

    def _sum(self, values: Tensor) -> Tensor:
        """The sum over the data ranks, whose gradient is the sum of theirs."""
        for group in self.axis_groups:
            values = SumGradient.apply(AllReduce.apply(values, group.name), group.name)
        return values

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Updates the running statistics, as torch does."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum: float | Tensor
        if self.momentum is None:  # the mean over all batches
            momentum = 1 / self.num_batches_tracked.to(mean.dtype)
        else:
            momentum = self.momentum
        self.running_mean.copy_(self.running_mean + momentum * (mean - self.running_mean))
        self.running_var.copy_(self.running_var + momentum * (variance - self.running_var))


def can_sync(module: nn.Module) -> bool:
    """Whether a module computes batch norm alone: a class derived from torch's may do more in a
    forward of its own (an activation), or compute its weights."""
    if not isinstance(module, AnyBatchNorm) or parametrize.is_parametrized(module):
        return False
    forwards = (AnyBatchNorm.forward, nn.SyncBatchNorm.forward)
    return type(module).forward in forwards and "forward" not in vars(module)


def apply_sync_batch_norm(model: nn.Module, mesh: Mesh) -> None:
    """Gives a plain model's batch norms the statistics of all data ranks. Raises AgreedError: one
    has a forward of its own, or keeps no running statistics, so that an evaluation would depend on
    its batches, or `cp` would give it parts of the samples."""
    axes = [axis for axis in DATA_AXES if mesh.size(axis) > 1]
    if not axes and mesh.size("cp") == 1:
        return
    groups = _Groups(axis_group(mesh, axis) for axis in axes)
    for name, module in model.named_modules():
        if isinstance(module, AnyBatchNorm):
            _refuse_what_cannot_sync(name, module, mesh)
            module.__class__ = SyncBatchNorm
            module.axis_groups = groups  # type: ignore[assignment]


def _refuse_what_cannot_sync(name: str, module: nn.Module, mesh: Mesh) -> None:
    if mesh.size("cp") > 1:
        raise AgreedError(
            f"{name} is a batch norm, to which cp gives parts of the samples: use cp: 1"
        )
    if not can_sync(module):
        raise AgreedError(
            f"parallel.sync_batch_norm: {name} is a {type(module).__name__}, which does more than "
            "torch's batch norm, and that would be left out: move the rest into a module of its "
            "own, use a GroupNorm or LayerNorm, or one data rank"
        )
    if not module.track_running_stats:
        raise AgreedError(
            f"{name} keeps no running statistics (track_running_stats=False), so that an "
            "evaluation would depend on its batches: let it keep them, or use a GroupNorm or "
            "LayerNorm"
        )
