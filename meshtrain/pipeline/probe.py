"""Probe of a model for pipeline stages: its forward, with every block replaced by the identity, must be the identity.

Every stage runs the model's forward. So operations on the activation outside blocks would be repeated in each stage,
and values that it computes from the activation for a block would be computed from another activation. Neither raises an
error by itself; both are detected here, before anything runs.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshtrain.errors import InputError
from meshtrain.pipeline.stage import blocks_of, keep_stage, owners

Shape = tuple[int, ...]
GUESS = 8  # the assumed width of an activation of unknown shape


def check_forward(
    model: nn.Module, bounds: Sequence[tuple[int, int]], inputs: Sequence[Tensor | None], dtype: torch.dtype
) -> None:
    """Runs a model's forward, without its blocks, on an activation as each stage would receive it.

    Args:
        model: whole, on the meta device; its blocks are removed.
        bounds: for each stage, its first block and the one after its last.
        inputs: the model's inputs for a microbatch, on any device; only shapes and dtypes are used.
        dtype: the compute dtype of blocks.

    Raises InputError: stages of this model would compute something other than the whole model.
    """
    on_meta = tuple(None if x is None else torch.empty_like(x, device="meta") for x in inputs)
    watch = _ParametersUsed(model, [blocks_of(model)[first:end] for first, end in bounds])
    with watch:
        shapes = _received(model, [blocks_of(model)[first] for first, _ in bounds[1:]], on_meta)
    for block, parameter in watch.foreign:
        if block:  # outside blocks the probe itself detects it
            raise InputError(
                f"the model cannot be cut into stages: block {block} computes with {parameter}, which is a parameter "
                "of a block of another stage and none of its own: register it in both (`head.weight = embed.weight`), "
                "or use pp: 1"
            )
    owned, blocks = owners(model), {name for name, module in model.named_modules() if module in set(blocks_of(model))}
    keep_stage(model, 0, 0)
    for shape in shapes:
        for training in (True, False):
            model.train(training)
            passage = _Passage(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True))
            for name, number in owned:
                placeholder = model.get_submodule(name)
                placeholder.forward = partial(passage.through, name, number, name in blocks)
            passage.run(model, on_meta[1:])


def _received(model: nn.Module, blocks: Sequence[nn.Module], inputs: tuple[Tensor | None, ...]) -> list[Shape]:
    """The shapes of the inputs of these blocks; if the model does not run without values, a plausible shape.
    Raises InputError: an input is not floating-point, so that it has no gradient to send back."""
    shapes: list[Shape] = []
    others: list[str] = []  # inputs that are not real numbers

    def record(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        tensors = [x for x in inputs[:1] if isinstance(x, Tensor)]
        shapes.extend(tuple(x.shape) for x in tensors)
        others.extend(f"{type(block).__name__} gets {x.dtype}" for x in tensors if not x.is_floating_point())

    hooks = [block.register_forward_pre_hook(record) for block in blocks]
    try:
        with torch.no_grad():
            model(*inputs)
    except Exception:  # any error of a model that reads values of a tensor: the probe itself will report it
        assert inputs[0] is not None
        guess = inputs[0].shape if inputs[0].is_floating_point() else (*inputs[0].shape, GUESS)
        shapes = shapes or [tuple(guess)]
    for hook in hooks:
        hook.remove()
    if others:
        raise InputError(
            f"the model cannot be cut into stages here: the first block of a stage, a {others[0]}, and between stages "
            "real numbers travel, with gradients: cut elsewhere by pipeline.split, or use pp: 1"
        )
    return list(dict.fromkeys(shapes))


def blocks_used_outside(model: nn.Module, inputs: Sequence[Tensor | None]) -> tuple[list[str], list[str]]:
    """The blocks whose parameters are used outside of them by code that does not hold them (a head that uses the weight
    of the embedding), and the parameters that a forward writes to. `model`: whole, on the meta device; its blocks are
    changed. Both are incomplete if it does not run there."""
    blocks, kinds = list(dict.fromkeys(blocks_of(model))), set()
    for block in blocks:  # one of each kind: running them all takes seconds for a large model
        kind = type(block), *(parameter.shape for parameter in block.parameters())
        if kind in kinds:
            block.forward = lambda x, *others, **named: x
        kinds.add(kind)
    watch, writes = _ParametersUsed(model, [[block] for block in blocks]), _Writes(model)
    with suppress(Exception), watch, writes, torch.no_grad():  # any error of a model that reads values of a tensor
        model(*(None if x is None else torch.empty_like(x, device="meta") for x in inputs))
    foreign = {model.get_parameter(name) for _, name in watch.foreign}
    used = [name for name, module in model.named_modules() if module in blocks and foreign & set(module.parameters())]
    return used, writes.parameters()


class _Writes(TorchDispatchMode):
    """Records the parameters that operators write to, also through `.data`, or whose `.data` is replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._storages = [(name, p, p.untyped_storage()) for name, p in model.named_parameters()]
        self._written = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = {**dict(zip((x.name for x in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        outputs = [values.get(x.name) for x in func._schema.arguments if x.alias_info and x.alias_info.is_write]
        self._written |= {x.untyped_storage()._cdata for x in tree_leaves(outputs) if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))

    def parameters(self) -> list[str]:
        return [
            name
            for name, p, storage in self._storages
            if storage._cdata in self._written or p.untyped_storage()._cdata != storage._cdata
        ]


class _ParametersUsed(TorchFunctionMode):
    """Records parameters of blocks that are used elsewhere: in a block of another group, or outside blocks.

    `foreign`: (name of the using block, or "", name of the parameter).
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()
        self.foreign: list[tuple[str, str]] = []
        self._names, parameters = {module: name for name, module in model.named_modules()}, model.named_parameters()
        own = [{p for block in group for p in block.parameters()} for group in groups]
        self._own = {block: ours for group, ours in zip(groups, own, strict=True) for block in group}
        self._of_blocks = {p: name for name, p in parameters if any(p in ours for ours in own)}
        self._running: list[nn.Module] = []

    def __enter__(self) -> "_ParametersUsed":
        self._hooks = [
            hook
            for block in self._own
            for hook in (
                block.register_forward_pre_hook(lambda block, _: self._running.append(block)),
                block.register_forward_hook(lambda *_: self._running.pop() and None),
            )
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        block = self._running[-1] if self._running else None
        own = () if block is None else self._own[block]
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and leaf in self._of_blocks and leaf not in own:
                self.foreign.append(("" if block is None else self._names[block], self._of_blocks[leaf]))
        return func(*args, **(kwargs or {}))


class _Passage(TorchDispatchMode):
    """Follows one activation through a forward without blocks, and tracks the tensors computed from it."""

    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self._start(activation)

    def _start(self, activation: Tensor) -> None:
        self._activation, self._version = activation, activation._version
        self._derived = {id(activation): activation}  # kept alive, so that ids are not reused
        self._number, self._name = -1, ""

    def run(self, model: nn.Module, others: tuple[Tensor | None, ...]) -> None:
        """Runs a forward; on the CPU if the model reads values, which the meta device does not have."""
        try:
            self._run(model, others)
        except InputError:
            raise
        except Exception:
            model.to_empty(device="cpu")  # buffers: all parameters are in blocks
            for buffer in model.buffers():
                buffer.zero_()
            self._start(torch.rand(self._activation.shape).to(self._activation.dtype).requires_grad_())
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
        if self._activation._backward_hooks:
            self._refuse("it registers a hook on the activation, which would change its gradient in every stage")

    def through(self, name: str, number: int, block: bool, x: Any, *others: Any, **named: Any) -> Any:
        """The forward of a module that a stage lacks: block `number`, or a module outside blocks that belongs to it."""
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
