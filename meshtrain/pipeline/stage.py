"""Pipeline stages: a stage is the whole model, in which the blocks of other stages return their
input.

So a stage runs the model's own `forward`, and its parameters keep the names that they have in the
whole model.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from meshtrain.errors import InputError
from meshtrain.parallel.torch_private import persistent_buffers
from meshtrain.pipeline.partition import blocks_of as blocks_of

SETTINGS = (int, float, str, tuple, Enum, torch.dtype, type(None))


class OtherStageBlock(nn.Module):
    """Placeholder for a block of another stage, which returns its first input. It has the settings
    of the block, which a model's forward may read. A weight that the block shares with a block of
    this stage (tied embeddings) stays in the placeholder too, so that the weight keeps all of its
    names."""

    trained = True  # whether the block has trainable parameters, as far as a stage knows

    def __init__(self, block: nn.Module | None = None) -> None:
        super().__init__()
        self._first = ""
        if block is None:
            return
        self._first = first_argument(block.forward)
        for name, value in vars(block).items():
            if isinstance(value, SETTINGS) and not name.startswith("_"):
                vars(self)[name] = value

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return first_input(self._first, inputs, named)


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


class Derived(TorchDispatchMode):
    """Tracks the tensors that are computed from the values of some, and not only from their shape,
    dtype and device. A value that is read of them, as a number or an array, cannot be followed:
    `read` is called."""

    def __init__(self, roots: Iterable[Tensor]) -> None:
        super().__init__()
        # By their ids; they are kept alive, so that ids are not reused.
        self._derived = {id(root): root for root in roots}
        self._calls = _Calls(self)

    def __enter__(self) -> "Derived":
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)

    def read(self) -> None:
        """A value is read. May raise."""

    def derives(self, values: Any) -> bool:
        """Whether one of these values, or of those in a record among them, is tracked."""
        for leaf in tree_leaves(values):
            if id(leaf) in self._derived:
                return True
            if isinstance(leaf, Tensor):
                continue
            fields = getattr(leaf, "__dict__", {})
            if any(id(value) in self._derived for value in fields.values()):
                return True
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shape_only = func.__name__.startswith("new_") or "_like" in func.__name__
        if shape_only or not any(id(leaf) in self._derived for leaf in tree_leaves((args, kwargs))):
            return result

        is_read = False
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._derived[id(leaf)] = leaf
            elif isinstance(leaf, bool | int | float | complex):
                is_read = True
        if is_read:
            self.read()
        return result


READERS = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__)


class _Calls(TorchFunctionMode):
    """Sees the functions that read values without an operator."""

    def __init__(self, watch: Derived) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READERS and self._watch.derives(args):
            self._watch.read()
        return func(*args, **(kwargs or {}))


class _NeedsValuesError(Exception):
    """Ends the trial of a module outside blocks."""


class _Trial(Derived):
    """Ends where a value is read, or a random number drawn, which would be another one in each
    stage."""

    def read(self) -> None:
        raise _NeedsValuesError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _NeedsValuesError
        return super().__torch_dispatch__(func, types, args, kwargs)


class OutsideModule:
    """The forward, in another stage, of a module without parameters outside blocks. One that gets
    the activation for its dtype and device alone, as rotary embeddings of transformers do, gives
    each stage the same, and so runs in each. Any other (the dropout after an embedding) runs in one
    stage, and hands on its first input in the others.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._run = module.forward
        self._own = vars(module).get("forward")  # one that the module has in place of its class's
        self._first = first_argument(module.forward)
        self._runs: dict[bool, bool] = {}  # by the module's mode: whether it runs here

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Whether a module can be in several stages: one without parameters, and without persistent
        buffers, which would be in the files of several stages, and may be changed by one."""
        if not has_forward(module) or any(True for _ in module.parameters()):
            return False
        return not any(persistent_buffers(inner) for inner in module.modules())

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self.runs(inputs, named):
            return self._run(*inputs, **named)
        return self.activation(inputs, named)

    def activation(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        return first_input(self._first, inputs, named)

    def runs(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> bool:
        """Whether its results follow from its inputs without the values of real numbers. Found out
        by its first call, with a copy of it, which must not change anything."""
        training = self._module.training
        if training in self._runs:
            return self._runs[training]
        try:
            runs = self._is_free_of_values(inputs, named)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the trial has ended, or the module refuses an activation of this shape
            # On the meta device it may have read a value (of the positions), which there is on
            # another device: nothing is known.
            leaves = tree_leaves((inputs, named))
            if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
                raise
            runs = False
        self._runs[training] = runs
        return runs

    def _is_free_of_values(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> bool:
        # The module as it was: `forward` is now this object, which refers to the model.
        now = vars(self._module).pop("forward")
        try:
            trial = copy.deepcopy(self._module)
        finally:
            self._module.forward = now
        if self._own is not None:
            trial.forward = self._own

        inputs, named = tree_map_only(
            Tensor, lambda tensor: tensor.detach().clone(), (tuple(inputs), dict(named))
        )
        # Whole numbers (positions, documents) are the same in every stage, real ones are not.
        reals = [leaf for leaf in tree_leaves((inputs, named)) if _is_real(leaf)]
        with _Trial(reals) as watch, torch.no_grad():
            return not watch.derives(trial(*inputs, **named))


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def keep_stage(model: nn.Module, first: int, end: int) -> None:
    """Removes from a model, on any device, all blocks except those from `first` up to, but not
    including, `end`.

    A module outside blocks (the dropout after an embedding) belongs to the preceding block, in the
    order in which the model defines its modules, or to the first; see `OutsideModule`. Raises
    InputError as `owners` does.
    """
    blocks = blocks_of(model)
    own: set[nn.Parameter] = set()
    for block in blocks[first:end]:
        own.update(block.parameters())
    for name, owner in owners(model):
        if first <= owner < end:
            continue
        module = model.get_submodule(name)
        if module not in blocks and OutsideModule.fits(module):
            module.forward = OutsideModule(module)
            continue
        placeholder = OtherStageBlock(module)
        for path, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in own:
                _register_at(placeholder, path, parameter)
        _replace(model, name, placeholder)


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


def owners(model: nn.Module) -> list[tuple[str, int]]:
    """(name, block) of every block, and of every maximal module that neither is inside a block nor
    contains one. Raises InputError: the model has a parameter outside blocks, or a block that
    occurs twice."""
    blocks = {block: i for i, block in enumerate(blocks_of(model))}
    _refuse_repeated(model, blocks)
    last = 0  # the block that was visited last

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, int]]:
        nonlocal last
        if module in blocks:
            last = blocks[module]
            yield name, last
            return
        contains_blocks = any(inner in blocks for inner in module.modules())
        _refuse_parameters(name, module, inner=not contains_blocks)
        if not contains_blocks:
            yield name, last
            return
        for key, child in module.named_children():
            yield from visit(f"{name}.{key}" if name else key, child)

    return list(visit("", model))


def _refuse_repeated(model: nn.Module, blocks: Mapping[nn.Module, int]) -> None:
    """Rejects a module in two places, which could be needed in two stages."""
    counts: Counter[nn.Module] = Counter()
    for block in blocks_of(model):
        counts.update(inner for inner in block.modules() if inner in blocks)
    for name, module in model.named_modules():
        if counts[module] > 1:
            raise InputError(
                f"the model's blocks() name {name} twice, or within another block, and pp gives "
                "every stage blocks of its own: give each place a module of its own, which may "
                "share its parameters, or use pp: 1"
            )


def _refuse_parameters(name: str, module: nn.Module, inner: bool) -> None:
    """Rejects a parameter outside blocks. `inner`: also in modules below this one."""
    for parameter, _ in module.named_parameters(name, recurse=inner):
        raise InputError(
            f"the parameter {parameter} is in none of the model's blocks(), and pp gives every "
            "stage its blocks: name the module that holds it among them, or use pp: 1"
        )


def _register_at(placeholder: OtherStageBlock, path: str, parameter: nn.Parameter) -> None:
    """Registers a parameter under its path in the block, with empty modules on the way."""
    holder: nn.Module = placeholder
    *above, name = path.split(".")
    for part in above:
        if part not in holder._modules:
            holder.add_module(part, OtherStageBlock())
        holder = holder.get_submodule(part)
    holder.register_parameter(name, parameter)


def stages_of_parameter(
    model: nn.Module, bounds: Sequence[tuple[int, int]]
) -> dict[str, tuple[int, ...]]:
    """First name of each parameter of a whole model -> the stages that hold it: one, or several if
    it is tied. `bounds`: for each stage, its first block and the one after its last. Raises
    InputError as `owners` does."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    blocks = blocks_of(model)
    owners(model)  # raises if the model cannot be split
    parameter_stages: dict[str, tuple[int, ...]] = {}
    for stage, (first, end) in enumerate(bounds):
        held: dict[nn.Parameter, None] = {}  # each once, in order
        for block in blocks[first:end]:
            held |= dict.fromkeys(block.parameters())
        for parameter in held:
            name = names[parameter]
            parameter_stages[name] = (*parameter_stages.get(name, ()), stage)
    return parameter_stages
