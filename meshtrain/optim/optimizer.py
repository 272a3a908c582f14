"""The optimizer protocol: the part that all optimizers share, and the `UpdateRule` in which they
differ.

A new optimizer is one subclass of `UpdateRule`, and a line in `registry.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshtrain import observer
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
    stages_of,
)
from meshtrain.optim.groups import EMA, GroupOptions, group_options, state_specs
from meshtrain.optim.host_states import Home, OnDevice, OnHost
from meshtrain.optim.lr_schedule import learning_rate
from meshtrain.optim.registry import update_rule
from meshtrain.parallel.host_link import states_link
from meshtrain.parallel.sharding import ParameterSpec, shape_of

if TYPE_CHECKING:
    from meshtrain.config.schema import OptimizerSection
    from meshtrain.huggingface.stored_names import Table


@dataclass
class ParamGroup:
    """Parameters with the same options; `lr`: the learning rate of the current update."""

    parameters: list[LocalParameter]
    options: GroupOptions
    lr: float = 0.0


def states_of(parameter: LocalParameter) -> list[str]:
    """The names of the states that a parameter's rule keeps: all but the average of its weights."""
    return [name for name in parameter.state_specs if name != EMA]


def _average_of(parameter: LocalParameter) -> list[str]:
    return [EMA]


class UpdateRule:
    """How one optimizer updates parameters."""

    title: ClassVar[str]  # the display name
    # names of the state tensors of a parameter, each of its shape
    states: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, groups: Sequence[ParamGroup], config: "OptimizerSection", mesh: Mesh
    ) -> None:
        """The state of each parameter already exists, as zeros, which the rule may change."""
        self.groups = groups
        self.mesh = mesh
        self.group_of = {p: group for group in groups for p in group.parameters}
        self.home: Home = OnDevice(list(self.group_of))  # where the state is between updates

    @classmethod
    def state_specs(cls, parameter: ParameterSpec) -> dict[str, ParameterSpec]:
        """The state of a parameter: name -> its shape, dtype and sharding. Checkpoints store it."""
        return {name: replace(parameter, name=f"{parameter.name}.{name}") for name in cls.states}

    @classmethod
    def update_bytes(cls, parameter: ParameterSpec, config: "OptimizerSection", size: int) -> int:
        """Bytes that an update of the whole parameter reads and writes in memory. A rank moves its
        share: that of the elements that it updates.

        Each operator counts as reading its inputs and writing its results once. Products of
        matrices do not count: `update_flops` gives their cost. `size`: bytes per element of the
        parameter and its gradient.

        The default is that of a rule with `update_parameter` only, of which it is assumed that it
        reads the gradient, and reads and writes the parameter and each state once.
        """
        gradient = math.prod(parameter.shape) * size
        kept = cls._kept_bytes(parameter, size)
        return gradient + 2 * kept + cls._bytes_around(parameter, config, size)

    @classmethod
    def _bytes_around(cls, parameter: ParameterSpec, config: "OptimizerSection", size: int) -> int:
        """What `update` reads and writes beside `update_parameter`."""
        # `unless` clones a tensor (2), chooses between two values (3), and copies the result (2).
        nbytes = 7 * cls._kept_bytes(parameter, size)
        if config.clip_norm is not None:
            nbytes += 2 * math.prod(parameter.shape) * size  # `scale_gradients`
        return nbytes

    @classmethod
    def _kept_bytes(cls, parameter: ParameterSpec, size: int) -> int:
        """The size of a parameter and its state."""
        nbytes = 0
        for spec in (parameter, *cls.state_specs(parameter).values()):
            element = size if spec.dtype is None else spec.dtype.itemsize
            nbytes += math.prod(spec.shape) * element
        return nbytes

    @classmethod
    def update_flops(cls, parameter: ParameterSpec, stored_as: "Table") -> int:
        """Floating-point operations of the products of matrices in an update of the whole
        parameter, which all ranks of its stage share, copies included.

        Elementwise arithmetic does not count: it takes less time than its memory traffic.
        `stored_as`: how files divide the model's tensors (see `LocalParameter`).
        """
        return 0

    def update(self, skip: Tensor, factor: Tensor | None) -> None:
        """Updates parameters from `local.grad` times `factor` (None: 1), unless `skip` is 1:
        scalars on the device. Their state is there for those that `home.visit()` yields."""
        # All at once, in one kernel.
        scale_gradients(list(self.group_of), factor)
        for parameters in self.home.visit():
            for parameter in parameters:
                group = self.group_of[parameter]
                kept = parameter.local, *(parameter.state[name] for name in states_of(parameter))
                with unless(skip, *kept), torch.no_grad():
                    self.update_parameter(parameter, group.lr, group.options.weight_decay)

    def update_parameter(self, parameter: LocalParameter, lr: float, weight_decay: float) -> None:
        """Changes `parameter.local` and `parameter.state` in place.

        All ranks call it in the same order, even for empty parts: `parameter.whole(...)` may gather
        a matrix.
        """
        raise NotImplementedError

    def set_updates(self, updates: Tensor) -> None:
        """Called when the number of updates and the state were set from outside, as on resume."""


@contextmanager
def unless(skip: Tensor, *tensors: Tensor) -> Iterator[None]:
    """If the scalar `skip` is 1, restores on exit the values that the tensors had on entry."""
    # Chosen on the device: the host would have to wait for `skip`.
    old = [tensor.detach().clone() for tensor in tensors]
    yield
    for tensor, value in zip(tensors, old, strict=True):
        tensor.detach().copy_(torch.where(skip.bool(), value, tensor.detach()))


class Optimizer:
    """Updates this rank's parts of the parameters, by the rules that the config names.

    Rules get plain local tensors that share memory with the shards: one kernel can then update them
    all, whatever mesh each of them is on. `updates`: the number of updates made, without skipped
    ones, a scalar on the device.
    """

    def __init__(
        self, model: nn.Module, config: "OptimizerSection", mesh: Mesh, total_steps: int
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self._parameters = local_parameters(model, mesh)
        self._shards = optimizer_shards(model)
        self._by_parameter: dict[Tensor, LocalParameter] = {
            local.parameter: local for local in self._parameters
        }
        self._link = states_link(stages_of(model)[0])
        self._device = device_of(model, mesh)
        for local in self._parameters:
            self._make_state(local, mesh)
        self.param_groups = self._grouped()

        if "muon" in (config.name, *(group.name for group in config.groups)):
            mesh.make_group(STAGE)  # a collective: also on ranks whose stage has no matrix
        groups_of_rule = group_values((group.options.name, group) for group in self.param_groups)
        self.rules: dict[str, UpdateRule] = {}
        self._on_host: list[OnHost] = []
        for name in sorted(groups_of_rule):
            groups = groups_of_rule[name]
            home = self._home([p for group in groups for p in group.parameters], states_of)
            self.rules[name] = update_rule(name, config.state_precision)(groups, config, mesh)
            self.rules[name].home = home
        self._averages: Home | None = None
        if config.ema_decay is not None:
            self._averages = self._home(self._parameters, _average_of)
            for local in self._parameters:
                local.state[EMA].copy_(local.local.detach())
        self.updates = torch.zeros((), dtype=torch.float32, device=self._device)

    def _make_state(self, local: LocalParameter, mesh: Mesh) -> None:
        """The state exists before the first update, so that a checkpoint can be loaded into it."""
        local.state_specs = state_specs(self.config, local.spec)
        # On the host they get their memory in `_home`.
        device = self._device if self._link is None else torch.device("meta")
        for name, spec in local.state_specs.items():
            local.state[name] = _zeros(spec, local, mesh, device)

    def _home(
        self, parameters: list[LocalParameter], names: Callable[[LocalParameter], list[str]]
    ) -> Home:
        """Where the states with these names are between updates."""
        if self._link is None:
            return OnDevice(parameters)
        home = OnHost(parameters, names, self._link, self._device)
        self._on_host.append(home)
        return home

    def _grouped(self) -> list[ParamGroup]:
        groups: dict[GroupOptions, ParamGroup] = {}
        for local in self._parameters:
            options = group_options(self.config, local.spec)
            groups.setdefault(options, ParamGroup([], options)).parameters.append(local)
        return list(groups.values())

    def state(self, parameter: Tensor) -> dict[str, tuple[ParameterSpec, Tensor]]:
        """The state of a parameter: name -> its spec, and this rank's part of it, not copied.

        Empty for a tensor that updates do not change. With the states on the host it waits until
        the last update is done.
        """
        local = self._by_parameter.get(parameter)
        if local is None:
            return {}
        for home in self._on_host:
            home.finish()
        return {name: (spec, local.state[name]) for name, spec in local.state_specs.items()}

    def take_updates(self) -> None:
        """Makes the rules continue from `updates` and a state that were set from outside, as on
        resume."""
        for rule in self.rules.values():
            rule.set_updates(self.updates)

    def squared_norm(self) -> Tensor:
        """This rank's contribution to the squared global norm of the gradients: a scalar in
        float64."""
        return squared_norm(self._parameters, self.updates.device)

    def update(self, step: int, factor: Tensor | None, skip: Tensor) -> float:
        """Makes update `step` (from 1) with gradients multiplied by `factor`; returns the
        schedule's learning rate.

        `factor` (None: 1) and `skip` (1: no parameter changes) are scalars on the device; the host
        does not wait.
        """
        lr = learning_rate(self.config, step, self.total_steps)
        for group in self.param_groups:
            group.lr = lr * group.options.lr_scale
        skipped = skip.to(torch.float32)
        with observer.updating(self._parameters):
            for rule in self.rules.values():
                rule.update(skipped, factor)
            if self.config.ema_decay is not None:
                self._update_averages(self.config.ema_decay, skipped)
            self.updates += 1 - skipped
            self._gather()
        return lr

    def _update_averages(self, decay: float, skipped: Tensor) -> None:
        assert self._averages is not None
        weight = (1 - decay) * (1 - skipped.double())  # of the new weights
        for parameters in self._averages.visit():
            for local in parameters:
                local.state[EMA].lerp_(local.local.detach(), weight.to(local.local.dtype))

    def _gather(self) -> None:
        """All-gathers the rows that each copy has updated (ZeRO-1)."""
        for shards in self._shards:
            shards.gather_parameters()

    @contextmanager
    def averaged(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model holds the moving averages (`optimizer.ema_decay`), and the optimizer
        state the weights."""
        self._swap_averages(model)
        try:
            yield
        finally:
            self._swap_averages(model)

    @torch.no_grad()
    def _swap_averages(self, model: nn.Module) -> None:
        assert self._averages is not None
        for parameters in self._averages.visit():
            for local in parameters:
                value = local.local.detach().clone()
                local.local.detach().copy_(local.state[EMA])
                local.state[EMA].copy_(value)
        self._gather()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # A forward without a backward left parameters gathered from the other weights.
                module.reshard()

    def zero_grad(self) -> None:
        for local in self._parameters:
            local.parameter.grad = local.local.grad = None


def state_bytes(model: nn.Module, config: "OptimizerSection", mesh: Mesh) -> int:
    """Bytes of this rank's states of an optimizer of a parallelized model."""
    nbytes = 0
    for local in local_parameters(model, mesh):
        for spec in state_specs(config, local.spec).values():
            nbytes += _zeros(spec, local, mesh, torch.device("meta")).nbytes
    return nbytes


def _zeros(
    spec: ParameterSpec, parameter: LocalParameter, mesh: Mesh, device: torch.device
) -> Tensor:
    """This rank's part of a state tensor. One with the parameter's shape and sharding also has its
    memory format."""
    dtype = spec.dtype or parameter.local.dtype
    if spec.shape == parameter.spec.shape and spec.cuts == parameter.spec.cuts:
        return torch.zeros_like(parameter.local, dtype=dtype, device=device, requires_grad=False)
    position = {cut.axis: mesh.index(cut.axis) for cut in spec.cuts}
    # A scalar has no dim, though it counts as one in its parts.
    shape = shape_of(spec.part(position)) if spec.shape else ()
    return torch.zeros(shape, dtype=dtype, device=device)
