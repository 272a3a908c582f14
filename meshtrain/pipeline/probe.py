"""Probe of a model for pipeline stages: its own forward, in which every block hands on what it gets, must be nothing.

Every stage runs the model's forward. So whatever that does to the activation outside of the blocks would be done once
in each stage, and what it computes from the activation for a block would be computed from another one. Neither fails by
itself; both are found here, before anything runs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshtrain.errors import InputError
from meshtrain.pipeline.stage import blocks_of, keep_stage, owners

Shape = tuple[int, ...]
GUESS = 8  # the width of an activation that nobody knows


def check_forward(
    model: nn.Module, bounds: Sequence[tuple[int, int]], inputs: Sequence[Tensor | None], dtype: torch.dtype
) -> None:
    """Runs a model's forward without its blocks on what each stage would get.

    Args:
        model: whole, on the meta device; its blocks are taken out of it.
        bounds: of each stage, its first block and the one after its last.
        inputs: what the model takes of a microbatch, on any device; only shapes and types are looked at.
        dtype: what blocks compute in.

    Raises InputError: where stages of this model would compute something else than the model.
    """
    on_meta = tuple(None if x is None else torch.empty_like(x, device="meta") for x in inputs)
    shapes = _received(model, [blocks_of(model)[first] for first, _ in bounds[1:]], on_meta)
    owned, blocks = owners(model), {name for name, module in model.named_modules() if module in set(blocks_of(model))}
    keep_stage(model, 0, 0)
    for shape in shapes:
        for training in (True, False):
            model.train(training)
            passage = _Passage(torch.empty(shape, dtype=dtype, device="meta"))
            for name, number in owned:
                placeholder = model.get_submodule(name)
                placeholder.forward = partial(passage.through, name, number, name in blocks)
            passage.run(model, on_meta[1:])


def _received(model: nn.Module, blocks: Sequence[nn.Module], inputs: tuple[Tensor | None, ...]) -> list[Shape]:
    """The shapes of what these blocks get; if the model does not run without values, one that looks like it."""
    shapes: list[Shape] = []

    def record(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        shapes.extend(tuple(x.shape) for x in inputs[:1] if isinstance(x, Tensor))

    hooks = [block.register_forward_pre_hook(record) for block in blocks]
    try:
        with torch.no_grad():
            model(*inputs)
    except Exception:  # whatever a model raises that asks a tensor for its values: the probe itself will tell
        assert inputs[0] is not None
        guess = inputs[0].shape if inputs[0].is_floating_point() else (*inputs[0].shape, GUESS)
        shapes = shapes or [tuple(guess)]
    for hook in hooks:
        hook.remove()
    return list(dict.fromkeys(shapes))


class _Passage(TorchDispatchMode):
    """Follows one activation through a forward without blocks, and knows what was computed from it."""

    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self._start(activation)

    def _start(self, activation: Tensor) -> None:
        self._activation, self._version = activation, activation._version
        self._derived = {id(activation): activation}  # held, so that no other tensor gets their ids
        self._number, self._name = -1, ""

    def run(self, model: nn.Module, others: tuple[Tensor | None, ...]) -> None:
        """A forward; on the CPU if the model asks for values, which the meta device has none of."""
        try:
            self._run(model, others)
        except InputError:
            raise
        except Exception:
            model.to_empty(device="cpu")  # buffers: all parameters are in blocks
            for buffer in model.buffers():
                buffer.zero_()
            self._start(torch.rand(self._activation.shape).to(self._activation.dtype))
            try:
                self._run(model, tuple(None if x is None else torch.zeros_like(x, device="cpu") for x in others))
            except InputError:
                raise
            except Exception as error:
                self._refuse(f"its forward fails {self._behind()} ({type(error).__name__}: {error})")

    def _run(self, model: nn.Module, others: tuple[Tensor | None, ...]) -> None:
        with self, torch.no_grad():
            output = model(self._activation, *others)
        if not self._same(output):
            self._refuse(f"it computes something {self._behind()}, the last")

    def through(self, name: str, number: int, block: bool, x: Any, *others: Any, **named: Any) -> Any:
        """Stands for a module that a stage does not have: block `number`, or one that goes with it and is in none."""
        module = f"{'block' if block else 'module'} {name}"
        if not self._same(x):
            position = f"between {self._name} and {module}" if self._name else f"before {module}"
            self._refuse(f"it computes something {position}")
        if number < self._number:
            self._refuse(f"{module} runs behind {self._name}, and blocks() has them the other way round")
        leaves = tree_leaves((others, named))
        records = (leaf for leaf in leaves if not isinstance(leaf, Tensor))
        leaves = leaves + [value for record in records for value in getattr(record, "__dict__", {}).values()]
        if any(id(leaf) in self._derived for leaf in leaves):
            self._refuse(f"{module} gets, besides its first argument, something that is computed from the activation")
        self._number, self._name = number, module
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shape_only = func.__name__.startswith("new_") or "_like" in func.__name__
        if not shape_only and any(id(leaf) in self._derived for leaf in tree_leaves((args, kwargs))):
            self._derived |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _same(self, x: Any) -> bool:
        return x is self._activation and x._version == self._version

    def _behind(self) -> str:
        return f"behind {self._name}" if self._name else "before the first block"

    def _refuse(self, problem: str) -> NoReturn:
        raise InputError(
            f"the model cannot be cut into stages: {problem}. With pp every stage runs the model's forward, in which "
            "the blocks of other stages hand on what they get, so all that is done to the activation has to be inside "
            "of blocks: move it into the forward of the block before or behind it, or use pp: 1"
        )
