"""A script's optimizer, any of torch's, on parameters that are spread over ranks.

It keeps its groups and their options, and gets other tensors: of a parameter that is split, this
rank's part as a plain tensor, which shares its memory. An update that treats every element by
itself, as that of AdamW or SGD, is then the same as of the whole. Whether one does is tried on a
small matrix and its halves before the first step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain import observer
from meshtrain.config.convert import read_section
from meshtrain.config.errors import ConfigError
from meshtrain.config.keys import keys_of
from meshtrain.config.schema import OptimizerSection
from meshtrain.config.yaml_reader import Place, read_text, write
from meshtrain.errors import InputError
from meshtrain.mesh import Mesh
from meshtrain.optim.grad_norm import (
    LocalParameter,
    device_of,
    local_parameters,
    scale_gradients,
    squared_norm,
)
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel.sharding import ParameterSpec, tensor_spec

# of the matrix on which an optimizer is tried: both halve
ROWS, COLUMNS = 6, 4


@dataclass(frozen=True)
class GroupNames:
    """The names of the parameters in each group of an optimizer, from before a model is spread."""

    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: nn.Module) -> "GroupNames":
        """Raises InputError: the optimizer has a parameter that is not the model's, or has made
        steps."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    raise InputError(
                        f"{type(optimizer).__name__} has in group {number} a parameter of shape "
                        f"{tuple(parameter.shape)} that is not the model's: give it the parameters "
                        "of the model that is given to run.prepare, before which both are made"
                    )
            groups.append(tuple(names[parameter] for parameter in group["params"]))
        for parameter, state in optimizer.state.items():
            if state:
                kept = ", ".join(map(str, state))
                shape = tuple(parameter.shape)
                raise InputError(
                    f"{type(optimizer).__name__} has a state already ({kept} of a parameter of "
                    f"shape {shape}): give run.prepare an optimizer that has made no step, and "
                    "whose constructor makes no state (Adagrad's does)"
                )
        return cls(tuple(groups))


class SpreadOptimizer:
    """An optimizer on this rank's parts of a spread model. Its updates use gradients that
    `squared_norm` has collected.

    Attributes:
        updates: the number of updates made, a scalar on the device.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: GroupNames, model: nn.Module, mesh: Mesh
    ) -> None:
        """Puts this rank's tensors into the groups of `optimizer`. Raises InputError: its updates
        would depend on the layout, or a checkpoint has no room for its state."""
        self.optimizer = optimizer
        self.device = device_of(model, mesh)
        self.updates = torch.zeros((), dtype=torch.float32, device=self.device)
        self._parameters = local_parameters(model, mesh)
        is_split = any(local.spec.cuts for local in self._parameters)
        require_elementwise(optimizer, self.device, is_split=is_split)

        self._updated: dict[Tensor, _Updated] = {}  # by the model's parameter
        by_name: defaultdict[str, list[LocalParameter]] = defaultdict(list)
        for local in self._parameters:
            by_name[local.spec.name].append(local)  # several: tied between stages of this rank
        for group, group_names in zip(optimizer.param_groups, names.groups, strict=True):
            own = [_Updated.of(local) for name in group_names for local in by_name[name]]
            self._updated |= {updated.local.parameter: updated for updated in own}
            group["params"][:] = [updated.tensor for updated in own]
            if "param_names" in group:  # as torch has them of named parameters
                group["param_names"] = [updated.local.spec.name for updated in own]

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def squared_norm(self) -> Tensor:
        """This rank's contribution to the squared global norm of the gradients: a scalar in
        float64."""
        return squared_norm(self._parameters, self.device)

    def update(self, step: int, factor: Tensor | None) -> None:
        """Updates the parameters from the collected gradients times a scalar on the device (None:
        1)."""
        with observer.updating(self._parameters):
            scale_gradients(self._parameters, factor)
            for updated in self._updated.values():
                updated.take_grad()
            self.optimizer.step()
        self.updates += 1

    def set_steps(self, steps: int) -> None:
        """Learning rates are the script's."""

    def zero_grad(self) -> None:
        for local in self._parameters:
            local.parameter.grad = local.local.grad = None
        for updated in self._updated.values():
            updated.tensor.grad = None

    # In a checkpoint ------------------------------------------------------------------------------

    def make_states(self) -> None:
        """Makes the states that torch makes in the first step, for a checkpoint to be loaded into
        them. Parameters and states have wrong values until then."""
        for updated in self._updated.values():
            updated.tensor.grad = torch.zeros_like(updated.tensor)
        type(self.optimizer).step(self.optimizer)
        self.zero_grad()

    def state(self, parameter: Tensor) -> dict[str, tuple[ParameterSpec, Tensor]]:
        """The state of a parameter: name -> its spec, and this rank's part of it, not copied. Empty
        for a tensor that updates do not change."""
        updated = self._updated.get(parameter)
        if updated is None:
            return {}
        of_torch = self.optimizer.state.get(updated.tensor, {})
        return {name: updated.part_of(value) for name, value in _tensors_in(of_torch)}

    def take_updates(self) -> None:
        """Nothing of torch's optimizers follows from `updates`."""


@dataclass(frozen=True)
class _Updated:
    """A parameter, and the tensor that torch's optimizer has in its place."""

    local: LocalParameter
    tensor: Tensor

    @classmethod
    def of(cls, local: LocalParameter) -> "_Updated":
        tensor: Tensor = local.parameter
        if isinstance(tensor, DTensor):
            tensor = local.local
        if tensor.numel() == 0:
            # Kernels over many tensors take no empty one, and counters of steps go on all the same.
            shape = [1] * max(tensor.dim(), 1)
            tensor = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        return cls(local, tensor)

    @property
    def is_placeholder(self) -> bool:
        return self.local.local.numel() == 0

    def take_grad(self) -> None:
        """Gives the tensor the collected gradient."""
        if self.is_placeholder:
            self.tensor.grad = torch.zeros_like(self.tensor)
        else:
            self.tensor.grad = self.local.local.grad

    def part_of(self, value: Tensor) -> tuple[ParameterSpec, Tensor]:
        """The spec of a tensor of the state, and this rank's part of it."""
        spec = self.local.spec
        if value.shape != self.tensor.shape or not spec.shape:
            return tensor_spec(spec.name, value, spec.stages), value
        if self.is_placeholder:
            value = value.flatten()[:0].reshape(self.local.local.shape)
        return replace(spec, dtype=value.dtype), value


def _tensors_in(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield name, value


class SectionOptimizer:
    """One of meshtrain's own optimizers, with the schedule of its learning rate."""

    def __init__(self, section: OptimizerSection, model: nn.Module, mesh: Mesh) -> None:
        self.optimizer = Optimizer(model, section, mesh, total_steps=1)
        self.updates = self.optimizer.updates
        self.lr = 0.0  # of the last update

    def set_steps(self, steps: int) -> None:
        self.optimizer.total_steps = steps

    def squared_norm(self) -> Tensor:
        return self.optimizer.squared_norm()

    def update(self, step: int, factor: Tensor | None) -> None:
        self.lr = self.optimizer.update(step, factor, skip=torch.zeros_like(self.updates))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def make_states(self) -> None:
        """They exist from the start."""

    def state(self, parameter: Tensor) -> dict[str, tuple[ParameterSpec, Tensor]]:
        return self.optimizer.state(parameter)

    def take_updates(self) -> None:
        self.optimizer.take_updates()


def carry_over(
    optimizer: torch.optim.Optimizer | Mapping[str, Any], plain: nn.Module, clip_norm: float | None
) -> Callable[[nn.Module, Mesh], SpreadOptimizer | SectionOptimizer]:
    """What makes the optimizer of the spread model from that of the plain one, or from the keys of
    a section. Raises InputError: it cannot be carried over."""
    if isinstance(optimizer, Mapping):
        return partial(SectionOptimizer, read_optimizer(optimizer, clip_norm))
    return partial(SpreadOptimizer, optimizer, GroupNames.of(optimizer, plain))


def read_optimizer(section: Mapping[str, Any], clip_norm: float | None) -> OptimizerSection:
    """A YAML's section `optimizer`. Raises InputError: one of its keys or values is wrong."""
    if "clip_norm" in section:
        raise InputError("clip_norm is an argument of meshtrain.Run, not of the optimizer")
    errors: list[ConfigError] = []
    text = write({"optimizer": dict(section)})
    root = read_text(text, partial(Place.in_file, "run.prepare"), errors)
    values = {}
    if root is not None:
        node = root.value["optimizer"]
        values = read_section(node, "optimizer", keys_of(OptimizerSection), {}, errors)
    if errors:
        raise InputError(f"the optimizer {dict(section)}: {errors[0].message}")
    return replace(OptimizerSection(**values), clip_norm=clip_norm)


def scheduler_note(optimizer: torch.optim.Optimizer) -> str | None:
    """What to know about an optimizer that has a scheduler of torch's; None: it has none."""
    # as every scheduler of torch.optim.lr_scheduler writes it into the groups
    if all("initial_lr" not in group for group in optimizer.param_groups):
        return None
    return (
        f"{type(optimizer).__name__} has a scheduler, which is in no checkpoint: a script that is "
        "started again has to bring it to its step (docs/own-loop.md#stop-and-go-on)"
    )


# Trying an optimizer ------------------------------------------------------------------------------


def require_elementwise(
    optimizer: torch.optim.Optimizer, device: torch.device, *, is_split: bool
) -> None:
    """Raises InputError: a checkpoint has no room for what the optimizer keeps, or, where
    parameters are split, it computes an element's update from others."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        whole, state = _tried(optimizer, group, device, rows=ROWS, columns=COLUMNS)
        for name, value in state.items():
            is_tensor = isinstance(value, Tensor)
            is_like = is_tensor and (value.shape == whole.shape or value.numel() == 1)
            if not is_like and value is not None:
                shape = tuple(value.shape) if is_tensor else type(value).__name__
                raise InputError(
                    f"{kind} keeps `{name}` of a parameter of shape {tuple(whole.shape)} as "
                    f"{shape}, and a checkpoint for any layout has room for tensors of the "
                    "parameter's shape and for numbers as tensors: use another optimizer, such as "
                    "torch.optim.AdamW, or a loop of meshtrain.start"
                )
        if not is_split:
            continue
        for rows, columns in ((ROWS // 2, COLUMNS), (ROWS, COLUMNS // 2)):
            part, _ = _tried(optimizer, group, device, rows=rows, columns=columns)
            if not torch.allclose(part, whole[:rows, :columns], rtol=1e-9, atol=1e-12):
                raise InputError(
                    f"{kind} updates an element by others of its parameter, of which a rank of "
                    "this layout has only a part: use dp_replicate, or an optimizer that treats "
                    "each element by itself, such as torch.optim.AdamW"
                )


def _tried(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    device: torch.device,
    *,
    rows: int,
    columns: int,
) -> tuple[Tensor, dict[str, Any]]:
    """The first rows and columns of a small matrix after two steps by themselves, and their state.
    Raises InputError: the optimizer makes no such step."""
    # A second optimizer with the settings of the first: its constructor's arguments are unknown.
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, ROWS, COLUMNS, dtype=torch.float64, generator=generator).to(device)
    first, *gradients = [x[:rows, :columns].contiguous() for x in values]
    matrix = nn.Parameter(first)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [matrix]}]
    for gradient in gradients:
        matrix.grad = gradient
        try:
            type(optimizer).step(trial)
        except Exception as error:  # any error of an optimizer that somebody else has written
            raise InputError(
                f"{type(optimizer).__name__} cannot be spread: a step without arguments, on a "
                f"small matrix in float64, raised {type(error).__name__}: {error}"
            ) from error
    return matrix.detach(), dict(trial.state[matrix])
