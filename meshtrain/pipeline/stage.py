"""Pipeline stages: a stage is the whole model, in which the blocks of other stages return their input.

So a stage runs the model's own `forward`, and its parameters keep the names that they have in the whole model.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from meshtrain.errors import InputError

SETTINGS = (int, float, str, tuple, Enum, torch.dtype, type(None))


class OtherStageBlock(nn.Module):
    """Placeholder for a block of another stage, which returns its first input. It has the settings of the block, which
    a model's forward may read. A weight that the block shares with a block of this stage (tied embeddings) stays in the
    placeholder too, so that the weight keeps all of its names."""

    trained = True  # whether the block has trainable parameters, as far as a stage knows

    def __init__(self, block: nn.Module | None = None) -> None:
        super().__init__()
        settings = vars(block).items() if block is not None else ()
        vars(self).update((name, x) for name, x in settings if isinstance(x, SETTINGS) and not name.startswith("_"))

    def forward(self, x: Any, *others: Any, **named: Any) -> Any:
        return x


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """A model's blocks in execution order; the model itself if it has no `blocks`."""
    blocks = getattr(model, "blocks", None)
    return [model] if blocks is None else blocks()


def keep_stage(model: nn.Module, first: int, end: int) -> None:
    """Removes from a model, on any device, all blocks except those from `first` up to, but not including, `end`.

    A module outside blocks (the dropout after an embedding) belongs to the preceding block, in the order in which the
    model defines its modules, or to the first. Raises InputError as `owners` does.
    """
    own = {parameter for block in blocks_of(model)[first:end] for parameter in block.parameters()}
    for name, owner in owners(model):
        if first <= owner < end:
            continue
        module = model.get_submodule(name)
        placeholder = OtherStageBlock(module)
        for path, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in own:
                _register_at(placeholder, path, parameter)
        _replace(model, name, placeholder)


def skip_blocks(model: nn.Module, numbers: Iterable[int]) -> None:
    """Removes blocks that share no weight with others from a model."""
    blocks, names = blocks_of(model), {module: name for name, module in model.named_modules()}
    for block in [blocks[number] for number in numbers]:
        placeholder = OtherStageBlock(block)
        placeholder.trained = any(parameter.requires_grad for parameter in block.parameters())
        _replace(model, names[block], placeholder)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def owners(model: nn.Module) -> list[tuple[str, int]]:
    """(name, block) of every block, and of every maximal module that neither is inside a block nor contains one.
    Raises InputError: the model has a parameter outside blocks, or a block that occurs twice."""
    blocks = {block: i for i, block in enumerate(blocks_of(model))}
    _refuse_repeated(model, blocks)
    last = 0

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, int]]:
        nonlocal last
        around = any(inner in blocks for inner in module.modules())
        last = blocks.get(module, last)
        if module not in blocks:
            _refuse_parameters(name, module, inner=not around)
        if module in blocks or not around:
            yield name, last
            return
        for key, child in module.named_children():
            yield from visit(f"{name}.{key}" if name else key, child)

    return list(visit("", model))


def _refuse_repeated(model: nn.Module, blocks: Mapping[nn.Module, int]) -> None:
    """Rejects a module in two places, which could be needed in two stages."""
    counts = Counter(inner for block in blocks_of(model) for inner in block.modules() if inner in blocks)
    for name, module in model.named_modules():
        if counts[module] > 1:
            raise InputError(
                f"the model's blocks() name {name} twice, or within another block, and pp gives every stage blocks of "
                "its own: give each place a module of its own, which may share its parameters, or use pp: 1"
            )


def _refuse_parameters(name: str, module: nn.Module, inner: bool) -> None:
    for parameter, _ in module.named_parameters(name, recurse=inner):
        raise InputError(
            f"the parameter {parameter} is in none of the model's blocks(), and pp gives every stage its blocks: name "
            "the module that holds it among them, or use pp: 1"
        )


def _register_at(placeholder: OtherStageBlock, path: str, parameter: nn.Parameter) -> None:
    holder: nn.Module = placeholder
    *above, name = path.split(".")
    for part in above:
        if part not in holder._modules:
            holder.add_module(part, OtherStageBlock())
        holder = holder.get_submodule(part)
    holder.register_parameter(name, parameter)


def stages_of_parameter(model: nn.Module, bounds: Sequence[tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """First name of each parameter of a whole model -> the stages that hold it: one, or several if it is tied.
    `bounds`: for each stage, its first block and the one after its last. Raises InputError as `owners` does."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    blocks = blocks_of(model)
    owners(model)  # raises if the model cannot be split
    parameter_stages: dict[str, tuple[int, ...]] = {}
    for stage, (first, end) in enumerate(bounds):
        for parameter in dict.fromkeys(p for block in blocks[first:end] for p in block.parameters()):
            parameter_stages[names[parameter]] = (*parameter_stages.get(names[parameter], ()), stage)
    return parameter_stages
