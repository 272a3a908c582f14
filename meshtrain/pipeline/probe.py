"""Probe of a model for pipeline stages: its forward, with every block replaced by the identity,
must be the identity.

Every stage runs the model's forward. So operations on the activation outside blocks would be
repeated in each stage, and values that it computes from the activation for a block would be
computed from another activation. Neither raises an error by itself; both are detected here, before
anything runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshtrain.errors import InputError
from meshtrain.parallel.torch_private import (
    TorchDispatchMode,
    has_hooks,
    memory_of,
    own_buffers,
    own_parameters,
    tree_leaves,
    version_of,
    written_tensors,
)
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
    blocks = blocks_of(model)
    named_blocks = {name: m for name, m in model.named_modules() if m in set(blocks)}
    _refuse_containers(named_blocks)
    on_meta = tuple(None if x is None else torch.empty_like(x, device="meta") for x in inputs)
    owned = owners(model)
    beside = [
        name
        for name, _ in owned
        if name not in named_blocks and OutsideModule.fits(model.get_submodule(name))
    ]

    # A forward of the whole model: which parameters its blocks use, what modules outside of blocks
    # return, and what the first block of each stage receives.
    results: dict[str, list[Shape]] = {}
    uses = _ParametersUsed(model, [blocks[first:end] for first, end in bounds])
    with uses, _recorded(model, beside, results):
        shapes = _received(model, [blocks[first] for first, _ in bounds[1:]], on_meta)
    _refuse_foreign_parameters(uses)

    # A forward of a stage without any block: what it does to the activation.
    keep_stage(model, 0, 0)
    stand_ins = {name: model.get_submodule(name).forward for name, _ in owned}
    for shape in shapes:
        activation = torch.empty(shape, dtype=dtype, device="meta")
        for training in (True, False):
            model.train(training)
            passage = _Passage(activation.clone().requires_grad_(), results)
            for name, number in owned:
                is_block = name in named_blocks
                through = partial(passage.through, name, number, is_block, stand_ins[name])
                model.get_submodule(name).forward = through
            passage.run(model, on_meta[1:])


def _refuse_containers(named_blocks: Mapping[str, nn.Module]) -> None:
    for name, block in named_blocks.items():
        if not has_forward(block):
            raise InputError(
                f"the model cannot be cut into stages: block {name}, a {type(block).__name__}, has "
                "no forward, and a stage leaves blocks of others out by their forward: put what is "
                "done with it into a module with a forward, or use pp: 1"
            )


def _refuse_foreign_parameters(uses: "_ParametersUsed") -> None:
    for block, parameter in uses.foreign:
        if block:  # what is done outside of blocks, the passage through a stage shows
            raise InputError(
                f"the model cannot be cut into stages: block {block} computes with {parameter}, "
                "which is a parameter of a block of another stage and none of its own: register it "
                "in both (`head.weight = embed.weight`), or use pp: 1"
            )


@contextmanager
def _recorded(
    model: nn.Module, names: Sequence[str], results: dict[str, list[Shape]]
) -> Iterator[None]:
    """Inside, `results` gets the shapes of what these modules return, by name."""

    def record(name: str, module: nn.Module, inputs: Any, result: Any) -> None:
        results[name] = _shapes(result)

    hooks = []
    for name in names:
        module = model.get_submodule(name)
        hooks.append(module.register_forward_hook(partial(record, name)))
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
    except Exception:
        # Any error of a model that reads values of a tensor: the passage will report it. The
        # activation is then taken to be like the input.
        first = inputs[0]
        assert first is not None
        if not shapes:
            of_features = () if first.is_floating_point() else (GUESS,)
            shapes = [(*first.shape, *of_features)]
    for hook in hooks:
        hook.remove()
    if others:
        raise InputError(
            f"the model cannot be cut into stages here: the first block of a stage, a {others[0]}, "
            "and between stages real numbers travel, with gradients: cut elsewhere by "
            "pipeline.split, or use pp: 1"
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
    blocks = list(dict.fromkeys(blocks_of(model)))
    names = {module: name for name, module in model.named_modules()}
    never_called = {block for block in blocks if not has_forward(block)}
    _skip_alike(blocks)
    on_meta = [None if x is None else x.to("meta") for x in inputs]
    used, written, ran = _uses(model, blocks, on_meta)
    if not ran:  # it reads values
        _fill_with_zeros(model)
        values = [_with_values(x) for x in inputs]
        used, written, _ = _uses(model, blocks, values)
    foreign = {model.get_parameter(name) for name in used}
    outside = []
    for block in blocks:
        parameters = set(block.parameters())
        if parameters and (block in never_called or parameters & foreign):
            outside.append(names[block])
    return outside, written


def _skip_alike(blocks: Sequence[nn.Module]) -> None:
    """Lets one block of each kind run: running them all takes seconds for a large model."""
    kinds = set()
    for block in blocks:
        kind = type(block), *(parameter.shape for parameter in block.parameters())
        if kind in kinds:
            block.forward = Skipped(block)
        kinds.add(kind)


def _with_values(x: Tensor | None) -> Tensor | None:
    """An input on the CPU, with zeros if it has no values."""
    if x is None:
        return None
    return torch.zeros_like(x, device="cpu") if x.is_meta else x.cpu()


def _uses(
    model: nn.Module, blocks: Sequence[nn.Module], inputs: Sequence[Tensor | None]
) -> tuple[list[str], list[str], bool]:
    """The parameters that a forward uses outside of their blocks, those that it writes to, and
    whether it ran."""
    uses = _ParametersUsed(model, [[block] for block in blocks])
    writes = _Writes(model)
    ran = False
    with suppress(Exception), uses, writes, torch.no_grad():  # any error of the model's code
        model(*inputs)
        ran = True
    return [parameter for _, parameter in uses.foreign], writes.parameters(), ran


def _fill_with_zeros(model: nn.Module) -> None:
    """Gives a model on the meta device zeros on the CPU: as parameters, one number each, so that
    none takes memory."""
    filled: dict[Tensor, nn.Parameter] = {}  # so that tied parameters stay tied
    for module in model.modules():
        parameters = own_parameters(module)
        for name, parameter in parameters.items():
            if parameter is None:
                continue
            if parameter not in filled:
                zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                filled[parameter] = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
            parameters[name] = filled[parameter]
        buffers = own_buffers(module)
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = torch.zeros_like(buffer, device="cpu")


class _Writes(TorchDispatchMode):
    """Records the parameters that operators write to, also through `.data`, or whose `.data` is
    replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._memory = [(name, p, memory_of(p)) for name, p in model.named_parameters()]
        # Kept alive, so that no other tensor gets its memory.
        self._storages = [p.untyped_storage() for p in model.parameters()]
        self._written = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._written |= {memory_of(x) for x in written_tensors(func, args, kwargs)}
        return func(*args, **kwargs)

    def parameters(self) -> list[str]:
        return [
            name
            for name, parameter, memory in self._memory
            if memory in self._written or memory_of(parameter) != memory
        ]


class _ParametersUsed(TorchFunctionMode):
    """Records parameters of blocks that are used elsewhere: in a block of another group, or outside
    blocks.

    `foreign`: (name of the using block, or "", name of the parameter).
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()
        self.foreign: list[tuple[str, str]] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._own: dict[nn.Module, set[nn.Parameter]] = {}  # block -> parameters of its group
        for group in groups:
            of_group = {parameter for block in group for parameter in block.parameters()}
            self._own |= dict.fromkeys(group, of_group)
        of_any = {parameter for of_group in self._own.values() for parameter in of_group}
        # Parameter of a block -> its name.
        self._of_blocks = {p: name for name, p in model.named_parameters() if p in of_any}
        self._running: list[nn.Module] = []

    def __enter__(self) -> "_ParametersUsed":
        self._hooks = []
        for block in self._own:
            self._hooks.append(block.register_forward_pre_hook(self._begin))
            self._hooks.append(block.register_forward_hook(self._end))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _begin(self, block: nn.Module, inputs: Any) -> None:
        self._running.append(block)

    def _end(self, block: nn.Module, inputs: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        block, own = "", set[nn.Parameter]()
        if self._running:
            block, own = self._names[self._running[-1]], self._own[self._running[-1]]
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and leaf in self._of_blocks and leaf not in own:
                self.foreign.append((block, self._of_blocks[leaf]))
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
        self._activation = activation
        self._version = version_of(activation)
        self._derived = {id(activation): activation}
        # The block, or module outside of blocks, through which the activation has gone last.
        self._number = -1
        self._name = ""

    def run(self, model: nn.Module, others: tuple[Tensor | None, ...]) -> None:
        """Runs a forward; on the CPU if the model reads values, which the meta device does not
        have."""
        try:
            self._run(model, others)
        except InputError:
            raise
        except Exception:
            self._run_with_values(model, others)

    def _run_with_values(self, model: nn.Module, others: tuple[Tensor | None, ...]) -> None:
        model.to_empty(device="cpu")  # buffers: all parameters are in blocks
        for buffer in model.buffers():
            buffer.zero_()
        values = torch.rand(self._activation.shape).to(self._activation.dtype)
        self._start(values.requires_grad_())
        zeros = tuple(None if x is None else torch.zeros_like(x, device="cpu") for x in others)
        try:
            self._run(model, zeros)
        except InputError:
            raise
        except Exception as error:
            self._refuse(f"its forward fails {self._behind()} ({type(error).__name__}: {error})")

    def _run(self, model: nn.Module, others: tuple[Tensor | None, ...]) -> None:
        with self, torch.no_grad():
            output = model(self._activation, *others)
        if not self._same(output):
            self._refuse(f"it computes something {self._behind()}, the last")
        if has_hooks(self._activation):
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
        module = f"block {name}" if block else f"module {name}"
        x = passes(*inputs, **named)
        if not self._same(x):
            where = f"between {self._name} and {module}" if self._name else f"before {module}"
            self._refuse(f"it computes something {where}")
        if number < self._number:
            says = "the model defines"
            if block and self._name.startswith("block "):
                says = "blocks() has"
            self._refuse(f"{module} runs behind {self._name}, and {says} them the other way round")
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
        return x is self._activation and version_of(x) == self._version

    def _behind(self) -> str:
        return f"behind {self._name}" if self._name else "before the first block"

    def _refuse(self, problem: str) -> NoReturn:
        raise InputError(
            f"the model cannot be cut into stages: {problem}. With pp every stage runs the model's "
            "forward, in which the blocks of other stages hand on what they get, so all that is "
            "done to the activation has to be inside of blocks: move it into the forward of the "
            "block before or behind it, or use pp: 1"
        )
