"""Pipeline stages: a stage runs the whole model's own `forward` from its start to its last block.

What comes before its first block is the work of other stages. Their blocks, parameters and buffers
are stand-ins there (`stand_in.py`), and so is all that is computed from them. The block before the
stage's first returns what the stage has received. From there on, what the forward does with it (a
scale, a cls token, a norm) is done here, once. After its last block a stage leaves the forward; the
last stage runs it to its end.

Parameters keep the names that they have in the whole model.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.dropout import Dropout
from meshtrain.errors import InputError
from meshtrain.parallel.torch_private import (
    own_buffers,
    own_modules,
    own_parameters,
    persistent_buffers,
)
from meshtrain.pipeline.forms import Activation, form_of
from meshtrain.pipeline.partition import blocks_of as blocks_of
from meshtrain.pipeline.stand_in import StandIn, first_stand_in, stand_ins

SETTINGS = (int, float, str, tuple, Enum, torch.dtype, type(None))


class OtherStageBlock(nn.Module):
    """Placeholder for a block of another stage, or for one that a trace skips; it returns its first
    input. It has the settings of the block, which a model's forward may read, and in a stage it
    shows the modules inside of the block, which are none of its own. A weight that the block shares
    with a block of this stage (tied embeddings) stays in the placeholder too, so that the weight
    keeps all of its names."""

    trained = True  # whether the block has trainable parameters, as far as a stage knows

    def __init__(self, block: nn.Module, *, shows_inside: bool = False) -> None:
        super().__init__()
        self._first = first_argument(block.forward)
        if shows_inside:
            vars(self)["_block"] = block  # not registered, as nothing of it belongs to this stage
        for name, value in vars(block).items():
            if isinstance(value, SETTINGS) and not name.startswith("_"):
                vars(self)[name] = value

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return first_input(self._first, inputs, named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            block = vars(self).get("_block")
            if block is None:
                raise
            found = own_modules(block).get(name, vars(block).get(name))
            if not isinstance(found, (nn.Module, StandIn)):
                raise
            return found


class Skipped:
    """In the place of a block's forward: returns its first input."""

    def __init__(self, block: nn.Module) -> None:
        self._first = first_argument(block.forward)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return first_input(self._first, inputs, named)


def first_argument(forward: Callable) -> str:
    """The name of a forward's first parameter; "" if it has none of its own."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return ""
    with_a_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if not parameters or parameters[0].kind not in with_a_name:
        return ""
    return parameters[0].name


def first_input(name: str, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What a call passes as the first argument, which may be given by keyword. `name`: from
    `first_argument`."""
    if inputs:
        return inputs[0]
    if name in named:
        return named[name]
    for value in named.values():
        if isinstance(value, Tensor):
            return value
    return None


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: an nn.ModuleList cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


# What a stage has ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outline:
    """Where a forward uses what (`probe.outline_of`). A place is the number of a block: what lies
    between two blocks is at the place of the second, and what lies behind the last is at its place.

    Attributes:
        state: each name of a parameter or persistent buffer -> the places that use it.
        called: module outside of blocks -> the places where it is called.
    """

    state: Mapping[str, frozenset[int]]
    called: Mapping[str, frozenset[int]]

    def held(self, first: int, end: int) -> set[str]:
        """The state of a stage, by name."""
        own = range(first, end)
        return {name for name, places in self.state.items() if any(i in own for i in places)}


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and persistent buffers, by their names in it."""
    state = {**own_parameters(module), **persistent_buffers(module)}
    return {name: tensor for name, tensor in state.items() if tensor is not None}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers, also those that are no part of its state."""
    tensors = {**own_parameters(module), **own_buffers(module)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, tied ones under each of their names, and persistent buffers of a model."""
    return {
        f"{path}.{name}".lstrip("."): tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in state_of(module).items()
    }


def stages_of_parameter(
    model: nn.Module, bounds: Sequence[tuple[int, int]], outline: Outline
) -> dict[str, tuple[int, ...]]:
    """First name of each parameter of a whole model -> the stages that hold it: one, or several if
    it is tied. `bounds`: for each stage, its first block and the one after its last."""
    holding = [outline.held(first, end) for first, end in bounds]
    return {
        name: tuple(stage for stage, held in enumerate(holding) if name in held)
        for name, _ in model.named_parameters()
    }


def refuse_repeated(model: nn.Module) -> None:
    """Raises InputError: a block is in two places, and so could be needed in two stages."""
    blocks = blocks_of(model)
    counts: Counter[nn.Module] = Counter()
    for block in blocks:
        counts.update(inner for inner in block.modules() if inner in set(blocks))
    for name, module in model.named_modules():
        if counts[module] > 1:
            raise InputError(
                f"the model's blocks() name {name} twice, or within another block, and pp gives "
                "every stage blocks of its own: give each place a module of its own, which may "
                "share its parameters, or use pp: 1"
            )


def outside_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that neither are in a block nor contain one."""
    blocks = set(blocks_of(model))
    inside = {inner for block in blocks for inner in block.modules()}
    for name, module in model.named_modules():
        if module not in inside and not any(inner in blocks for inner in module.modules()):
            yield name, module


def modules_without(model: nn.Module, blocks: Collection[nn.Module]) -> set[nn.Module]:
    """The modules that a model has besides these blocks, or shares with them."""
    found: set[nn.Module] = set()
    to_visit = [model]
    while to_visit:
        module = to_visit.pop()
        if module not in found and module not in blocks:
            found.add(module)
            to_visit.extend(module.children())
    return found


# A stage ------------------------------------------------------------------------------------------


class _LeaveForward(BaseException):
    """Ends a model's forward behind the last block of a stage. No Exception, so that a model that
    catches those lets it pass."""


class Stage:
    """How a model's forward runs as a stage: `Stage.of(model)`."""

    def __init__(self, model: nn.Module, first: int, end: int, device: torch.device) -> None:
        blocks = blocks_of(model)
        self._first = first
        self._own = blocks[first:end]
        self._is_last = end == len(blocks)
        self._device = device
        self._received: Activation | None = None
        self._forms: list[Any] = []  # of what this stage's blocks have returned in this forward
        self._output: Any = None  # of its last block
        self._forward = model.forward
        vars(model)["pipeline_stage"] = self
        model.forward = self.forward

    @staticmethod
    def of(model: nn.Module) -> "Stage | None":
        """None: a whole model."""
        return vars(model).get("pipeline_stage")

    def call(self, model: nn.Module, inputs: tuple[Any, ...], received: Activation | None) -> Any:
        """Runs the stage; `model` may do more around its forward. Returns an Activation, or from
        the last stage the model's output."""
        self._received, self._forms = received, []
        try:
            output = model(*inputs)
            if self._is_last:
                return output
            earlier: tuple[Any, ...] = ()
            if received is not None:
                earlier = (*received.earlier, form_of(received.value))
            return Activation(output, (*earlier, *self._forms[:-1]))
        finally:
            self._received = self._output = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward, up to the stage's last block."""
        # Registered in each call, so that the blocks' other hooks come before.
        hooks = [block.register_forward_hook(self._returned) for block in self._own]
        try:
            output = self._forward(*inputs, **named)
        except _LeaveForward:
            output, self._output = self._output, None
        finally:
            for hook in hooks:
                hook.remove()
        stand_in = first_stand_in(output)
        if stand_in is not None:
            # The probe has seen no such thing: the forward goes another way now.
            raise InputError(
                f"a stage of the model needs {stand_in.source}, which another stage has, in a "
                "forward that is unlike the one with which the model was checked: use pp: 1"
            )
        return output

    def _returned(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if self._is_last:
            return
        self._forms.append(form_of(output))
        if block is self._own[-1]:
            self._output = output
            raise _LeaveForward

    def other_block(self, number: int, name: str, *inputs: Any, **named: Any) -> Any:
        """What a block of another stage returns here."""
        received = self._received
        assert received is not None  # the first stage leaves the forward before
        if number == self._first - 1:
            return received.value
        return stand_ins(received.earlier[number], self._device, f"what block {name} returns")


def call_stage(stage: nn.Module, inputs: tuple[Any, ...], received: Activation | None) -> Any:
    """Runs a stage, or a whole model."""
    own = Stage.of(stage)
    return stage(*inputs) if own is None else own.call(stage, inputs, received)


def keep_stage(
    model: nn.Module,
    first: int,
    end: int,
    outline: Outline,
    *,
    device: torch.device,
    dtype: torch.dtype,
    plain: Mapping[str, nn.Module] | None = None,
) -> None:
    """Removes from a model what belongs to other stages than that of the blocks from `first` up to,
    but not including, `end`.

    Args:
        device: on which it will run.
        dtype: the compute dtype, which parameters of other stages seem to have.
        plain: the modules by name before layers were split over `tp`: what another stage calls is
            called without messages here.
    """
    held = outline.held(first, end)
    own = frozenset(range(first, end))
    names = {module: name for name, module in model.named_modules()}
    outside = list(outside_modules(model))
    blocks = blocks_of(model)
    kept = modules_without(model, [*blocks[:first], *blocks[end:]])
    stage = Stage(model, first, end, device)

    for number, block in enumerate(blocks):
        if number in own:
            continue
        name = names[block]
        placeholder = OtherStageBlock(block, shows_inside=True)
        vars(placeholder)["forward"] = partial(stage.other_block, number, name)
        for path, tensor in block.named_parameters(remove_duplicate=False):
            _, _, own_name = path.rpartition(".")
            if f"{name}.{path}" in held:
                _holder(placeholder, path).register_parameter(own_name, tensor)
        for path, module in block.named_modules(prefix=name):
            if module not in kept:
                take_out(module, path, (), device, dtype, tensors=tensors_of(module))
        _replace(model, name, placeholder)

    for name, module in outside:
        is_called_here = bool(own & outline.called.get(name, frozenset()))
        if isinstance(module, Dropout):
            vars(module)["forward"] = partial(_unless_stand_in, module.forward)
        elif state_of(module) and not is_called_here:
            as_it_was = module if plain is None else plain[name]
            vars(module)["forward"] = stand_in_forward(as_it_was, name, device, dtype)

    inside = {inner for number in own for inner in blocks[number].modules()}
    for name, module in list(model.named_modules()):
        if module not in inside and not isinstance(module, OtherStageBlock):
            take_out(module, name, held, device, dtype)


def _unless_stand_in(forward: Callable, x: Tensor) -> Tensor:
    """A dropout, which does not make its mask for nothing."""
    return x if isinstance(x, StandIn) else forward(x)


def stand_in_forward(
    module: nn.Module, name: str, device: torch.device, dtype: torch.dtype
) -> Callable:
    """The forward of a module that only other stages call, even where its state is held, as that of
    an embedding in the stage of a tied head."""
    another = copy.copy(module)
    for table in ("_parameters", "_buffers"):
        setattr(another, table, dict(getattr(another, table)))
    take_out(another, name, (), device, dtype)
    return another.forward


def take_out(
    module: nn.Module,
    name: str,
    held: Collection[str],
    device: torch.device,
    dtype: torch.dtype,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    known: dict[str, StandIn] | None = None,
) -> list[Callable[[], None]]:
    """Puts stand-ins in the place of a module's own tensors that are not held. Returns functions
    that undo it.

    Args:
        tensors: by their names in the module; None: its state.
        known: full name -> the stand-in of an earlier call for this device and dtype; this one adds
            its own.
    """
    undo: list[Callable[[], None]] = []
    known = {} if known is None else known
    for own, tensor in (state_of(module) if tensors is None else tensors).items():
        full = f"{name}.{own}".lstrip(".")
        if full in held:
            continue
        kind = "parameter" if own in own_parameters(module) else "buffer"
        table: Any = own_parameters(module) if kind == "parameter" else own_buffers(module)
        del table[own]
        if full not in known:
            known[full] = StandIn.like(tensor, device, f"the {kind} {full}", dtype)
        # Not by `setattr`, which a module may have overridden.
        vars(module)[own] = known[full]

        def put_back(own: str = own, tensor: Tensor = tensor, table: Any = table) -> None:
            del vars(module)[own]
            table[own] = tensor

        undo.append(put_back)
    return undo


def skip_blocks(model: nn.Module, numbers: Iterable[int]) -> None:
    """Removes blocks that share no weight with others from a model."""
    blocks = blocks_of(model)
    names = {module: name for name, module in model.named_modules()}
    for number in numbers:
        block = blocks[number]
        placeholder = OtherStageBlock(block)
        placeholder.trained = any(parameter.requires_grad for parameter in block.parameters())
        _replace(model, names[block], placeholder)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _holder(placeholder: OtherStageBlock, path: str) -> nn.Module:
    """The module that holds the parameter of this path in a placeholder, with placeholders on the
    way."""
    holder: nn.Module = placeholder
    for part in path.split(".")[:-1]:
        if part not in own_modules(holder):
            setattr(holder, part, OtherStageBlock(getattr(holder, part), shows_inside=True))
        holder = getattr(holder, part)
    return holder
