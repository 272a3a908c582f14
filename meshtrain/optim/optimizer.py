"""The optimizer protocol: what all optimizers share, and the `UpdateRule` in which they differ.

A new optimizer is one class with an `UpdateRule`'s methods, and a line in `registry.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshtrain.errors import group_values
from meshtrain.layout import STAGE
from meshtrain.mesh import Mesh
from meshtrain.optim.grad_norm import (
    LocalParameter,
    device_of,
    local_parameters,
    optimizer_shards,
    scale_gradients,
    squared_norm,
)
from meshtrain.optim.groups import EMA, GroupOptions, group_options, state_specs
from meshtrain.optim.lr_schedule import learning_rate
from meshtrain.optim.registry import update_rule
from meshtrain.parallel.sharding import ParameterSpec

if TYPE_CHECKING:
    from meshtrain.config import Optimizer as OptimizerConfig


@dataclass
class ParamGroup:
    """Parameters with the same options; `lr`: of the update that is made."""

    parameters: list[LocalParameter]
    options: GroupOptions
    lr: float = 0.0


class UpdateRule:
    """How one optimizer updates parameters."""

    title: ClassVar[str]  # for people
    states: ClassVar[tuple[str, ...]] = ()  # what is kept for a parameter, as large as it

    def __init__(self, groups: Sequence[ParamGroup], config: "OptimizerConfig", mesh: Mesh) -> None:
        """The state of each parameter is there: zeros, which may be changed."""
        self.groups, self.mesh = groups, mesh

    @classmethod
    def state_specs(cls, parameter: ParameterSpec) -> dict[str, ParameterSpec]:
        """What is kept for a parameter: name -> its shape, type, and how it lies. A checkpoint holds these."""
        return {name: replace(parameter, name=f"{parameter.name}.{name}") for name in cls.states}

    def update(self, skip: Tensor, factor: Tensor | None) -> None:
        """Updates parameters from `local.grad` times `factor` (None: 1), unless `skip` is 1: scalars on the device."""
        scale_gradients([parameter for group in self.groups for parameter in group.parameters], factor)
        for group in self.groups:
            for parameter in group.parameters:
                with unless(skip, parameter.local, *parameter.state.values()), torch.no_grad():
                    self.update_parameter(parameter, group.lr, group.options.weight_decay)

    def update_parameter(self, parameter: LocalParameter, lr: float, weight_decay: float) -> None:
        """Changes `parameter.local` and `parameter.state` in place.

        All ranks call it in the same order, also for empty parts: `parameter.whole(...)` may gather a matrix.
        """
        raise NotImplementedError

    def set_updates(self, updates: Tensor) -> None:
        """The number of updates and the state were set from outside."""


@contextmanager
def unless(skip: Tensor, *tensors: Tensor) -> Iterator[None]:
    """Where the scalar `skip` is 1, tensors that are changed inside have their old values again after it."""
    old = [tensor.detach().clone() for tensor in tensors]
    yield
    for tensor, value in zip(tensors, old, strict=True):
        tensor.detach().copy_(torch.where(skip.bool(), value, tensor.detach()))


class Optimizer:
    """Updates the parts of the parameters that this rank holds, by the rules that the config names.

    Rules see plain local tensors that share memory with the shards: one kernel can then update them all, whatever mesh
    each of them lies on. `updates`: how many were made, none skipped, a scalar on the device.
    """

    def __init__(self, model: nn.Module, config: "OptimizerConfig", mesh: Mesh, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self._parameters, self._shards = local_parameters(model, mesh), optimizer_shards(model)
        self._by_parameter: dict[Tensor, LocalParameter] = {local.parameter: local for local in self._parameters}
        if "muon" in (config.name, *(group.name for group in config.groups)):
            mesh.make_group(STAGE)  # also on ranks whose stage has no matrix
        groups: dict[GroupOptions, ParamGroup] = {}
        for local in self._parameters:
            own = group_options(config, local.spec)
            # The state is there before the first update, so that a checkpoint can be loaded into it.
            local.state_specs = state_specs(config, local.spec)
            local.state = {name: _zeros(spec, local, mesh) for name, spec in local.state_specs.items()}
            if config.ema_decay is not None:
                local.state[EMA].copy_(local.local.detach())
            groups.setdefault(own, ParamGroup([], own)).parameters.append(local)
        self.param_groups = list(groups.values())
        of_rule = group_values((group.options.name, group) for group in self.param_groups)
        self.rules = {
            name: update_rule(name, config.state_precision)(of_rule[name], config, mesh) for name in sorted(of_rule)
        }
        self.updates = torch.zeros((), dtype=torch.float32, device=device_of(model, mesh))

    def state(self, parameter: Tensor) -> dict[str, tuple[ParameterSpec, Tensor]]:
        """What is kept for a parameter: name -> how it lies, and this rank's part of it, on the optimizer's memory.

        Nothing for a tensor that updates do not change.
        """
        local = self._by_parameter.get(parameter)
        if local is None:
            return {}
        return {name: (spec, local.state[name]) for name, spec in local.state_specs.items()}

    def take_updates(self) -> None:
        """`updates` and the state were set from outside: the rules go on from there."""
        for rule in self.rules.values():
            rule.set_updates(self.updates)

    def squared_norm(self) -> Tensor:
        """This rank's contribution to the squared global norm of the gradients: a scalar in float64."""
        return squared_norm(self._parameters, self.updates.device)

    def update(self, step: int, factor: Tensor | None, skip: Tensor) -> float:
        """Update `step` (from 1) with gradients multiplied by `factor`; returns the learning rate of the schedule.

        `factor` (None: 1) and `skip` (1: no parameter changes) are scalars on the device, for which nothing waits.
        """
        lr = learning_rate(self.config, step, self.total_steps)
        for group in self.param_groups:
            group.lr = lr * group.options.lr_scale
        skipped = skip.to(torch.float32)
        for rule in self.rules.values():
            rule.update(skipped, factor)
        if self.config.ema_decay is not None:
            for local in self._parameters:
                weight = ((1 - self.config.ema_decay) * (1 - skipped.double())).to(local.local.dtype)
                local.state[EMA].lerp_(local.local.detach(), weight)
        self.updates += 1 - skipped
        self._gather()
        return lr

    def _gather(self) -> None:
        """Brings the rows that copies have changed to each other (ZeRO-1)."""
        for shards in self._shards:
            shards.gather_parameters()

    @contextmanager
    def averaged(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model's weights are their averages (`optimizer.ema_decay`), and these are kept in their place."""
        self._swap_averages(model)
        try:
            yield
        finally:
            self._swap_averages(model)

    @torch.no_grad()
    def _swap_averages(self, model: nn.Module) -> None:
        for local in self._parameters:
            value = local.local.detach().clone()
            local.local.detach().copy_(local.state[EMA])
            local.state[EMA].copy_(value)
        self._gather()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what a forward without a backward has left gathered is of the other weights

    def zero_grad(self) -> None:
        for local in self._parameters:
            local.parameter.grad = local.local.grad = None


def _zeros(spec: ParameterSpec, parameter: LocalParameter, mesh: Mesh) -> Tensor:
    """This rank's part of a state tensor. One that lies as the parameter does has its memory format, too."""
    dtype = spec.dtype or parameter.local.dtype
    if spec.shape == parameter.spec.shape and spec.cuts == parameter.spec.cuts:
        return torch.zeros_like(parameter.local, dtype=dtype, requires_grad=False)
    part = spec.part({cut.axis: mesh.index(cut.axis) for cut in spec.cuts})
    shape = [rows.stop - rows.start for rows in part] if spec.shape else []
    return torch.zeros(shape, dtype=dtype, device=parameter.local.device)
