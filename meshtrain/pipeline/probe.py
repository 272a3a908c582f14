"""Probe of a model for pipeline stages: its forward, with every block replaced by the identity,
must be the identity.

Every stage runs the model's forward. So operations on the activation outside blocks would be
repeated in each stage, and values that it computes from the activation for a block would be
computed from another activation. Neither raises an error by itself; both are detected here, before
anything runs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshtrain.errors import InputError
from meshtrain.pipeline.stage import (
    Derived,
    OutsideModule,
    Skipped,
    blocks_of,
    first_argument,
    first_input,
    has_forward,
    keep_stage,
    owners,
)

Shape = tuple[int, ...]
GUESS = 8  # the assumed width of an activation of unknown shape


def check_forward(
    model: nn.Module,
    bounds: Sequence[tuple[int, int]],
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> None:
    """Runs a model's forward, without its blocks, on an activation as each stage would receive it.

    Args:
        model: whole, on the meta device; its blocks are removed.
        bounds: for each stage, its first block and the one after its last.
        inputs: the model's inputs for a microbatch, on any device; only shapes and dtypes are used.
        dtype: the compute dtype of blocks.

    Raises InputError: stages of this model would compute something other than the whole model.
    """
    for name, module in model.named_modules():
        if module in set(blocks_of(model)) and not has_forward(module):
            raise InputError(
                f"the model cannot be cut into stages: block {name}, a {type(module).__name__}, "
                "has no forward, and a "
                "stage leaves blocks of others out by their forward: put what is done with it into "
                "a module with a "
                "forward, or use pp: 1"
            )
    on_meta = tuple(None if x is None else torch.empty_like(x, device="meta") for x in inputs)
    owned, blocks = (
        owners(model),
        {name for name, module in model.named_modules() if module in set(blocks_of(model))},
    )
    outside = [
        name
        for name, _ in owned
        if name not in blocks and OutsideModule.fits(model.get_submodule(name))
    ]
    results: dict[str, list[Shape]] = {}
    watch = _ParametersUsed(model, [blocks_of(model)[first:end] for first, end in bounds])
    with watch, _recorded(model, outside, results):
        shapes = _received(model, [blocks_of(model)[first] for first, _ in bounds[1:]], on_meta)
    for block, parameter in watch.foreign:
        if block:  # outside blocks the probe itself detects it
            raise InputError(
                f"the model cannot be cut into stages: block {block} computes with {parameter}, "
                "which is a parameter "
                "of a block of another stage and none of its own: register it in both "
                "(`head.weight = embed.weight`), "
                "or use pp: 1"
            )
    keep_stage(model, 0, 0)
    # of what stands for other stages
    forwards = {name: model.get_submodule(name).forward for name, _ in owned}
    for shape in shapes:
        for training in (True, False):
            model.train(training)
            passage = _Passage(
                torch.empty(shape, dtype=dtype, device="meta", requires_grad=True), results
            )
            for name, number in owned:
                passed = partial(passage.through, name, number, name in blocks, forwards[name])
                model.get_submodule(name).forward = passed
            passage.run(model, on_meta[1:])


@contextmanager
def _recorded(
    model: nn.Module, names: Sequence[str], results: dict[str, list[Shape]]
) -> Iterator[None]:
    """Inside, `results` gets the shapes of what these modules return, by name."""

    def record(name: str, module: nn.Module, inputs: Any, result: Any) -> None:
        results[name] = _shapes(result)

    hooks = [
        model.get_submodule(name).register_forward_hook(partial(record, name)) for name in names
    ]
    yield
    for hook in hooks:
        hook.remove()


def _shapes(values: Any) -> list[Shape]:
    return [tuple(x.shape) for x in tree_leaves(values) if isinstance(x, Tensor)]


def _received(
    model: nn.Module, blocks: Sequence[nn.Module], inputs: tuple[Tensor | None, ...]
) -> list[Shape]:
    """The shapes of the inputs of these blocks; if the model does not run without values, a
    plausible shape. Raises InputError: an input is not floating-point, so that it has no gradient
    to send back."""
    shapes: list[Shape] = []
    others: list[str] = []  # inputs that are not real numbers

    def record(block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = first_input(first_argument(block.forward), inputs, named)
        if isinstance(x, Tensor):
            shapes.append(tuple(x.shape))
            if not x.is_floating_point():
                others.append(f"{type(block).__name__} gets {x.dtype}")

    hooks = [block.register_forward_pre_hook(record, with_kwargs=True) for block in blocks]
    try:
        with torch.no_grad():
            model(*inputs)
    except (
        Exception
    ):  # any error of a model that reads values of a tensor: the probe itself will report it
        assert inputs[0] is not None
        guess = inputs[0].shape if inputs[0].is_floating_point() else (*inputs[0].shape, GUESS)
        shapes = shapes or [tuple(guess)]
    for hook in hooks:
        hook.remove()
    if others:
        raise InputError(
            f"the model cannot be cut into stages here: the first block of a stage, a {others[0]}, "
            "and between stages "
            "real numbers travel, with gradients: cut elsewhere by pipeline.split, or use pp: 1"
        )
    return list(dict.fromkeys(shapes))


def blocks_used_outside(
    model: nn.Module, inputs: Sequence[Tensor | None]
) -> tuple[list[str], list[str]]:
    """The blocks whose parameters are used outside of them by code that does not hold them (a head
    that uses the weight of the embedding, or a block whose layers are called and never itself), and
    the parameters that a forward writes to. Both are incomplete if it runs neither without values
    nor with zeros.

    Args:
        model: whole, on the meta device; its blocks are changed. inputs: its arguments, on any
            device.
    """
    blocks, kinds = list(dict.fromkeys(blocks_of(model))), set()
    names = {block: name for name, block in model.named_modules() if block in set(blocks)}
    uncalled = {
        names[block]
        for block in blocks
        if not has_forward(block) and any(True for _ in block.parameters())
    }
    for block in blocks:  # one of each kind: running them all takes seconds for a large model
        kind = type(block), *(parameter.shape for parameter in block.parameters())
        if kind in kinds:
            block.forward = Skipped(block)
        kinds.add(kind)
    used, written, ran = _uses(model, blocks, [None if x is None else x.to("meta") for x in inputs])
    if not ran:  # it reads values
        _fill_with_zeros(model)
        values = [
            x if x is None or not x.is_meta else torch.zeros_like(x, device="cpu") for x in inputs
        ]
        used, written, _ = _uses(model, blocks, [None if x is None else x.cpu() for x in values])
    foreign = {model.get_parameter(name) for name in used}
    outside = [
        name
        for block, name in names.items()
        if name in uncalled or foreign & set(block.parameters())
    ]
    return outside, written


def _uses(
    model: nn.Module, blocks: Sequence[nn.Module], inputs: Sequence[Tensor | None]
) -> tuple[list[str], list[str], bool]:
    """The parameters that a forward uses outside of their blocks, those that it writes to, and
    whether it ran."""
    watch, writes = _ParametersUsed(model, [[block] for block in blocks]), _Writes(model)
    ran = False
    with suppress(Exception), watch, writes, torch.no_grad():  # any error of the model's code
        model(*inputs)
        ran = True
    return [name for _, name in watch.foreign], writes.parameters(), ran


def _fill_with_zeros(model: nn.Module) -> None:
    """Gives a model on the meta device zeros on the CPU: as parameters, one number each, so that
    none takes memory."""
    filled: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = filled.setdefault(
                    parameter, nn.Parameter(zeros, requires_grad=parameter.requires_grad)
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")


class _Writes(TorchDispatchMode):
    """Records the parameters that operators write to, also through `.data`, or whose `.data` is
    replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._storages = [(name, p, p.untyped_storage()) for name, p in model.named_parameters()]
        self._written = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = {
            **dict(zip((x.name for x in func._schema.arguments), args, strict=False)),
            **(kwargs or {}),
        }
        outputs = [
            values.get(x.name)
            for x in func._schema.arguments
            if x.alias_info and x.alias_info.is_write
        ]
        self._written |= {
            x.untyped_storage()._cdata for x in tree_leaves(outputs) if isinstance(x, Tensor)
        }
        return func(*args, **(kwargs or {}))

    def parameters(self) -> list[str]:
        return [
            name
            for name, p, storage in self._storages
            if storage._cdata in self._written or p.untyped_storage()._cdata != storage._cdata
        ]


class _ParametersUsed(TorchFunctionMode):
    """Records parameters of blocks that are used elsewhere: in a block of another group, or outside
    blocks.

    `foreign`: (name of the using block, or "", name of the parameter).
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()
        self.foreign: list[tuple[str, str]] = []
        self._names, parameters = (
            {module: name for name, module in model.named_modules()},
            model.named_parameters(),
        )
        own = [{p for block in group for p in block.parameters()} for group in groups]
        self._own = {
            block: ours for group, ours in zip(groups, own, strict=True) for block in group
        }
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
                self.foreign.append(
                    ("" if block is None else self._names[block], self._of_blocks[leaf])
                )
        return func(*args, **(kwargs or {}))


class _Passage(Derived):
    """Follows one activation through a forward without blocks, and tracks the tensors computed from
    it."""

    def __init__(self, activation: Tensor, results: dict[str, list[Shape]]) -> None:
        """`results`: module that runs in each stage -> shapes of its results, the same for every
        activation."""
        super().__init__(())
        self._results = results
        self._start(activation)

    def _start(self, activation: Tensor) -> None:
        self._activation, self._version = activation, activation._version
        self._derived = {id(activation): activation}
        self._number, self._name = -1, ""

    def run(self, model: nn.Module, others: tuple[Tensor | None, ...]) -> None:
        """Runs a forward; on the CPU if the model reads values, which the meta device does not
        have."""
        try:
            self._run(model, others)
        except InputError:
            raise
        except Exception:
            model.to_empty(device="cpu")  # buffers: all parameters are in blocks
            for buffer in model.buffers():
                buffer.zero_()
            self._start(
                torch.rand(self._activation.shape).to(self._activation.dtype).requires_grad_()
            )
            try:
                self._run(
                    model,
                    tuple(None if x is None else torch.zeros_like(x, device="cpu") for x in others),
                )
            except InputError:
                raise
            except Exception as error:
                self._refuse(
                    f"its forward fails {self._behind()} ({type(error).__name__}: {error})"
                )

    def _run(self, model: nn.Module, others: tuple[Tensor | None, ...]) -> None:
        with self, torch.no_grad():
            output = model(self._activation, *others)
        if not self._same(output):
            self._refuse(f"it computes something {self._behind()}, the last")
        if self._activation._backward_hooks:
            self._refuse(
                "it registers a hook on the activation, which would change its gradient in every "
                "stage"
            )

    def through(
        self, name: str, number: int, block: bool, passes: Any, *inputs: Any, **named: Any
    ) -> Any:
        """The forward of a module that a stage lacks: block `number`, or a module outside blocks
        that belongs to it. `passes`: the forward that stands for it in other stages."""
        if isinstance(passes, OutsideModule) and passes.runs(inputs, named):
            return self._beside(name, passes, inputs, named)
        module = f"{'block' if block else 'module'} {name}"
        x = passes(*inputs, **named)
        if not self._same(x):
            position = f"between {self._name} and {module}" if self._name else f"before {module}"
            self._refuse(f"it computes something {position}")
        if number < self._number:
            blocks = (
                "blocks() has" if block and self._name.startswith("block ") else "the model defines"
            )
            self._refuse(
                f"{module} runs behind {self._name}, and {blocks} them the other way round"
            )
        others = [*inputs, *named.values()]
        others.pop(next(i for i, other in enumerate(others) if other is x))
        if self.derives(others):
            self._refuse(
                f"{module} gets, besides its first argument, something that is computed from the "
                "activation"
            )
        self._number, self._name = number, module
        return x

    def _beside(self, name: str, runs: OutsideModule, inputs: Any, named: Any) -> Any:
        """A module that runs in each stage, because it does not use the activation's values."""
        result = runs(*inputs, **named)
        shapes = _shapes(result)
        if self._results.setdefault(name, shapes) != shapes:
            self._refuse(
                f"module {name} makes something else of the activation's shape, which stages "
                "differ in"
            )
        return result

    def read(self) -> None:
        self._refuse(
            f"it reads a value of the activation {self._behind()}, of which each stage has another"
        )

    def _same(self, x: Any) -> bool:
        return x is self._activation and x._version == self._version

    def _behind(self) -> str:
        return f"behind {self._name}" if self._name else "before the first block"

    def _refuse(self, problem: str) -> NoReturn:
        raise InputError(
            f"the model cannot be cut into stages: {problem}. With pp every stage runs the model's "
            "forward, in which "
            "the blocks of other stages hand on what they get, so all that is done to the "
            "activation has to be inside "
            "of blocks: move it into the forward of the block before or behind it, or use pp: 1"
        )
