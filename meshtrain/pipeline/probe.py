"""Probe of a model for pipeline stages: its forward on the meta device, once whole and then as each
stage runs it.

The first finds where the forward uses what lies outside of blocks, and what blocks return. The
others find what a stage would need that it does not have: something of an earlier stage besides
what it receives. It is refused here, before anything runs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshtrain.errors import InputError
from meshtrain.parallel.torch_private import (
    TorchDispatchMode,
    in_autograd_function,
    memory_of,
    own_buffers,
    own_parameters,
    tree_leaves,
    tree_map_only,
    written_tensors,
)
from meshtrain.pipeline.forms import TensorMeta, form_of
from meshtrain.pipeline.stage import (
    SETTINGS,
    Outline,
    Skipped,
    blocks_of,
    has_forward,
    modules_without,
    named_state,
    outside_modules,
    refuse_repeated,
    stand_in_forward,
    state_of,
    take_out,
    tensors_of,
)
from meshtrain.pipeline.stand_in import StandIn, StandInError, first_stand_in, stand_ins

Inputs = Sequence[Any]


def outline_of(model: nn.Module, inputs: Inputs | None) -> Outline:
    """Where a model's forward uses what lies outside of its blocks.

    Args:
        model: whole, on the meta device; if its forward reads values, it is moved.
        inputs: the model's inputs for a microbatch, on any device; only shapes and dtypes are used.
            None: they are not known, and all that it holds has to be in blocks.

    Raises InputError: its blocks cannot form stages.
    """
    if inputs is not None:
        return run_whole(model, inputs).outline
    refuse_repeated(model)
    inside = {tensor for block in blocks_of(model) for tensor in named_state(block).values()}
    for name, tensor in named_state(model).items():
        if tensor not in inside:
            raise InputError(
                f"the parameter or buffer {name} is in none of the model's blocks(), and a forward "
                "would show which stage of the pipeline uses it, but its inputs are not known: "
                "give the model's Config vocab_size (tokens), or image_size and in_channels "
                "(images), or use pp: 1"
            )
    return _Uses(model).outline()


def check_forward(
    model: nn.Module,
    bounds: Sequence[tuple[int, int]],
    inputs: Inputs,
    dtype: torch.dtype,
    whole: "Whole | None" = None,
) -> None:
    """Runs a model's forward as each stage would, but for what its blocks compute.

    Args:
        model: as for `outline_of`; it is changed.
        bounds: for each stage, its first block and the one after its last.
        dtype: the compute dtype.
        whole: what `run_whole` has found with another copy of the model and such inputs, if
            anything.

    Raises InputError: a stage of this model would need more than it has.
    """
    if whole is None:
        whole = run_whole(model, inputs)
    elif whole.device.type != "meta":
        _fill_with_zeros(model)
    _refuse_foreign_parameters(whole, model, bounds)
    parts = _Parts(model)
    for training in (True, False):
        model.train(training)
        for first, end in bounds[1:] or bounds:
            _Walk(whole, parts, first, end, dtype).run()


# A forward of the whole model ---------------------------------------------------------------------


@dataclass
class Whole:
    """What a forward of the whole model has shown."""

    outline: Outline
    inputs: Inputs  # on the meta device
    device: torch.device  # where the model runs
    forms: dict[bool, list[Any]]  # in training, and else -> what each block returns
    foreign: list[tuple[int, str]]  # (using block, name of a parameter that it does not hold)


def run_whole(model: nn.Module, inputs: Inputs) -> Whole:
    """Forwards of a whole model, in training and else, on the meta device; on the CPU, with zeros,
    if the model reads values. Arguments and errors: see `outline_of`."""
    refuse_repeated(model)
    named_blocks = {name: m for name, m in model.named_modules() if m in set(blocks_of(model))}
    _refuse_containers(named_blocks)
    on_meta = [_on_device(x, torch.device("meta")) for x in inputs]
    try:
        return _recorded(model, on_meta, torch.device("meta"))
    except InputError:
        raise
    except Exception:  # any error of a model that reads values of a tensor
        _fill_with_zeros(model)
    try:
        return _recorded(model, on_meta, torch.device("cpu"))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            "the model cannot be cut into stages: its forward runs neither without values nor "
            f"with zeros ({type(error).__name__}: {error}): name in blocks() all modules that have "
            "parameters, and let the forward take any values, or use pp: 1"
        ) from error


def _on_device(x: Any, device: torch.device) -> Any:
    """An input with zeros as values."""
    if not isinstance(x, Tensor):
        return x
    return torch.zeros(x.shape, dtype=x.dtype, device=device)


def _in_dtype(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x.to(dtype) if x is not None and x.is_floating_point() else x


def _recorded(model: nn.Module, inputs: Inputs, device: torch.device) -> Whole:
    """`inputs`: on the meta device, since what is found is kept."""
    on_device = [_on_device(x, device) for x in inputs]
    uses = _Uses(model)
    forms = {}
    was_training = model.training
    for training in (True, False):
        model.train(training)
        with _keeps_nothing(model), uses, torch.set_grad_enabled(training):
            model(*on_device)
        uses.end()
        forms[training] = uses.forms
    model.train(was_training)
    return Whole(uses.outline(), inputs, device, forms, uses.foreign)


@contextmanager
def _keeps_nothing(model: nn.Module) -> Iterator[None]:
    """A forward goes the way of training, and takes no memory for a backward."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


class _Uses(TorchFunctionMode):
    """Records where a forward uses parameters and persistent buffers, and calls modules outside of
    blocks; what its blocks return; and that it calls each of them once, in their order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._blocks = blocks_of(model)
        self._names = {module: name for name, module in model.named_modules()}
        self._outside = list(outside_modules(model))
        self._state = named_state(model)
        self._name_of = {tensor: name for name, tensor in self._state.items()}
        self._own = [set(named_state(block).values()) for block in self._blocks]
        self._trained = [any(p.requires_grad for p in block.parameters()) for block in self._blocks]

        # What forwards have shown. By tensor, because a tied one has several names.
        self.foreign: list[tuple[int, str]] = []
        self._places: dict[Tensor, set[int]] = {tensor: set() for tensor in self._name_of}
        for number, own in enumerate(self._own):
            for tensor in own:
                self._places[tensor].add(number)
        self._called: dict[str, set[int]] = {}

    def __enter__(self) -> "_Uses":
        self.forms: list[Any] = []
        self._running = False  # a block
        self._hooks: list[Any] = []
        for number, block in enumerate(self._blocks):
            self._hooks.append(block.register_forward_pre_hook(partial(self._begin, number)))
            self._hooks.append(block.register_forward_hook(self._end))
        for name, module in self._outside:
            self._hooks.append(module.register_forward_pre_hook(partial(self._call, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    @property
    def _place(self) -> int:
        return min(len(self.forms), len(self._blocks) - 1)

    def _block(self, number: int) -> str:
        return f"block {self._names[self._blocks[number]]}"

    def _begin(self, number: int, block: nn.Module, inputs: Any) -> None:
        done = len(self.forms)
        if number > done:
            _refuse(
                f"{self._block(number)} runs before {self._block(done)}, and blocks() has them the "
                "other way round"
            )
        if number < done:
            _refuse(
                f"{self._block(number)} runs behind {self._block(done - 1)}, and blocks() has them "
                "the other way round, or runs twice"
            )
        if self._model.training and in_autograd_function() and any(self._trained[: done + 1]):
            _refuse(
                f"{self._block(done)} runs inside a torch.autograd.Function (a checkpoint with "
                "use_reentrant=True is one), whose backward goes on to earlier blocks by itself, "
                "and not by what they hand on: call blocks outside of it (parallel.recompute "
                "recomputes them)"
            )
        self._running = True

    def _end(self, block: nn.Module, inputs: Any, output: Any) -> None:
        name = self._block(len(self.forms))
        for leaf in tree_leaves(output):
            if not isinstance(leaf, (Tensor, *SETTINGS)):
                _refuse(
                    f"{name} returns a {type(leaf).__name__}, and between stages tensors, numbers "
                    "and None travel, and tuples, lists and dicts of them"
                )
        self.forms.append(form_of(output))
        self._running = False

    def end(self) -> None:
        """After a forward."""
        if len(self.forms) < len(self._blocks):
            _refuse(f"its forward does not call {self._block(len(self.forms))}")

    def _call(self, name: str, module: nn.Module, inputs: Any) -> None:
        if not self._running:
            self._called.setdefault(name, set()).add(self._place)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf in self._places:
                self._use(leaf)
        return func(*args, **(kwargs or {}))

    def _use(self, tensor: Tensor) -> None:
        if not self._running:
            self._places[tensor].add(self._place)
        elif tensor not in self._own[self._place]:
            self.foreign.append((self._place, self._name_of[tensor]))

    def outline(self) -> Outline:
        state: dict[str, frozenset[int]] = {}
        for name, tensor in self._state.items():
            # What is never used has to be somewhere.
            state[name] = frozenset(self._places[tensor] or {0})
        called = {name: frozenset(places) for name, places in self._called.items()}
        return Outline(state, called)


def _refuse_containers(named_blocks: dict[str, nn.Module]) -> None:
    for name, block in named_blocks.items():
        if not has_forward(block):
            raise InputError(
                f"the model cannot be cut into stages: block {name}, a {type(block).__name__}, has "
                "no forward, and a stage leaves blocks of others out by their forward: put what is "
                "done with it into a module with a forward, or use pp: 1"
            )


def _refuse_foreign_parameters(
    whole: Whole, model: nn.Module, bounds: Sequence[tuple[int, int]]
) -> None:
    """A block may use what its stage holds anyway. In another stage a reference to it would be one
    to a parameter that nobody trains."""
    stage_of = [stage for stage, (first, end) in enumerate(bounds) for _ in range(first, end)]
    names = {module: name for name, module in model.named_modules()}
    blocks = blocks_of(model)
    for number, tensor in whole.foreign:
        holders = {stage_of[place] for place in whole.outline.state[tensor]}
        if stage_of[number] not in holders:
            raise InputError(
                f"the model cannot be cut into stages: block {names[blocks[number]]} computes with "
                f"{tensor}, which is a parameter of a block of another stage and none of its own: "
                "register it in both (`head.weight = embed.weight`), or use pp: 1"
            )


# A forward of a stage -----------------------------------------------------------------------------


class _LeaveForward(BaseException):
    """See `stage._LeaveForward`."""


class _Parts:
    """A model as all walks through it see it: looked up once, as there may be a hundred stages."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = list(model.named_modules())
        self.outside = list(outside_modules(model))
        self.blocks = blocks_of(model)
        names = {module: name for name, module in self.modules}
        self.names = [f"block {names[block]}" for block in self.blocks]
        # In the place of parameters and buffers, by their names.
        self.stand_ins: dict[str, StandIn] = {}


class _Walk:
    """A forward as one stage runs it, in which its blocks compute nothing."""

    def __init__(
        self, whole: Whole, parts: _Parts, first: int, end: int, dtype: torch.dtype
    ) -> None:
        self._whole = whole
        self._parts = parts
        self._model = parts.model
        self._blocks = parts.blocks
        self._names = parts.names
        self._first, self._end = first, end
        self._dtype = dtype
        self._forms = whole.forms[self._model.training]
        self._done = 0

    def run(self) -> None:
        with self._as_stage(), _Draws(self), torch.no_grad(), suppress(_LeaveForward):
            try:
                # In the dtype in which a run gives them, as the stand-ins have it.
                inputs = [_on_device(x, self._whole.device) for x in self._whole.inputs]
                output = self._model(*(_in_dtype(x, self._dtype) for x in inputs))
            except StandInError as error:
                self._refuse(f"{self._where()} it {error}")
            except InputError:
                raise
            except Exception as error:
                self._refuse(f"{self._where()} its forward fails ({type(error).__name__}: {error})")
            self._refuse_stand_ins("what the model returns is", output)

    @contextmanager
    def _as_stage(self) -> Iterator[None]:
        outline, device = self._whole.outline, self._whole.device
        held = outline.held(self._first, self._end)
        own = range(self._first, self._end)
        forwards: dict[nn.Module, Any] = {}
        for number, block in enumerate(self._blocks):
            forwards[block] = partial(self._block, number)
        for name, module in self._parts.outside:
            is_called = any(place in own for place in outline.called.get(name, ()))
            if state_of(module) and not is_called:
                forwards[module] = stand_in_forward(module, name, device, self._dtype)

        before = {module: vars(module).get("forward") for module in forwards}
        undo = []
        others = {*self._blocks[: self._first], *self._blocks[self._end :]}
        kept = modules_without(self._model, others)
        for name, module in self._parts.modules:
            undo += take_out(
                module,
                name,
                held,
                device,
                self._dtype,
                tensors=state_of(module) if module in kept else tensors_of(module),
                known=self._parts.stand_ins,
            )
        # Not by `setattr`, which takes long in a large model.
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for back in undo:
                back()
            for module, forward in before.items():
                del vars(module)["forward"]
                if forward is not None:
                    vars(module)["forward"] = forward

    @property
    def has_received(self) -> bool:
        return self._done >= self._first

    def _block(self, number: int, *inputs: Any, **named: Any) -> Any:
        form = self._forms[number]
        if number < self._first - 1:
            self._done += 1
            return stand_ins(form, self._whole.device, f"what {self._names[number]} returns")
        if number >= self._first:
            self._refuse_stand_ins(f"{self._names[number]} gets something", (inputs, named))
        if number == self._end - 1 < len(self._blocks) - 1:
            raise _LeaveForward
        self._done += 1
        return tree_map_only(TensorMeta, self._fresh, form)

    def _fresh(self, meta: TensorMeta) -> Tensor:
        return meta.view(meta.empty(self._whole.device).zero_())

    def draw(self, result: Any) -> Any:
        """What random numbers are, which another stage would draw again and differently."""

        def stand_in(x: Tensor) -> StandIn:
            if isinstance(x, StandIn):
                return x
            return StandIn.like(x, self._whole.device, "random numbers")

        return tree_map_only(Tensor, stand_in, result)

    def _where(self) -> str:
        return f"behind {self._names[self._done - 1]}" if self._done else "before the first block"

    def _refuse_stand_ins(self, what: str, values: Any) -> None:
        stand_in = first_stand_in(values)
        if stand_in is not None:
            self._refuse(f"{what} computed from {stand_in.source}")

    def _refuse(self, problem: str) -> NoReturn:
        before = self._names[self._first - 1]
        _refuse(
            f"{problem}. A stage that begins behind {before} has the model's inputs, its own "
            f"parameters, and what {before} returns: let blocks hand on what later ones need (a "
            "tuple travels as it is), compute it from the inputs in the block that needs it, cut "
            "elsewhere by pipeline.split"
        )


class _Draws(TorchDispatchMode):
    def __init__(self, walk: _Walk) -> None:
        super().__init__()
        self._walk = walk

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not self._walk.has_received:
            return self._walk.draw(result)
        return result


def _refuse(problem: str) -> NoReturn:
    raise InputError(f"the model cannot be cut into stages: {problem}, or use pp: 1")


# Parameters of blocks that are used elsewhere -----------------------------------------------------


class UsedOutside(NamedTuple):
    """What `blocks_used_outside` finds. It is incomplete if the forward runs neither without values
    nor with zeros."""

    # The blocks whose parameters are used outside of them by code that does not hold them: a head
    # that uses the weight of the embedding, a block whose layers are called and never itself.
    blocks: list[str]
    # Those of them with a backward of the model's own (a torch.autograd.Function), which uses them.
    in_backward: list[str]
    # The parameters that a forward writes to.
    written: list[str]


def blocks_used_outside(model: nn.Module, inputs: Sequence[Tensor | None]) -> UsedOutside:
    """What a model does with parameters where a block's forward does not show it.

    Args:
        model: whole, on the meta device; its blocks are changed. inputs: its arguments, on any
            device.
    """
    blocks = list(dict.fromkeys(blocks_of(model)))
    names = {module: name for name, module in model.named_modules()}
    never_called = {block for block in blocks if not has_forward(block)}
    on_meta = [None if x is None else x.to("meta") for x in inputs]
    with _one_of_each_kind(blocks):
        seen = _see(model, blocks, on_meta)
    if not seen.ran:  # what a block returns may be another thing than its input
        seen = _see(model, blocks, on_meta)
    if not seen.ran:  # it reads values
        _fill_with_zeros(model)
        values = [_with_values(x) for x in inputs]
        with _one_of_each_kind(blocks):
            seen = _see(model, blocks, values)
    foreign = {model.get_parameter(name) for name in seen.foreign}
    in_backward = {model.get_parameter(name) for name in seen.in_backward}
    found = UsedOutside([], [], seen.written)
    for block in blocks:
        parameters = set(block.parameters())
        if parameters & in_backward:
            found.in_backward.append(names[block])
        if parameters and (block in never_called or parameters & (foreign | in_backward)):
            found.blocks.append(names[block])
    return found


@contextmanager
def _one_of_each_kind(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Lets one block of each kind run: running them all takes seconds for a large model."""
    kinds = set()
    skipped = {}
    for block in blocks:
        kind = type(block), *(parameter.shape for parameter in block.parameters())
        if kind in kinds:
            skipped[block] = vars(block).get("forward")
            block.forward = Skipped(block)
        kinds.add(kind)
    try:
        yield
    finally:
        for block, forward in skipped.items():
            del block.forward
            if forward is not None:
                block.forward = forward


def _with_values(x: Tensor | None) -> Tensor | None:
    """An input on the CPU, with zeros if it has no values."""
    if x is None:
        return None
    return torch.zeros_like(x, device="cpu") if x.is_meta else x.cpu()


@dataclass
class _Seen:
    """What a forward has shown."""

    foreign: list[str]  # the parameters that it uses outside of their blocks
    in_backward: list[str]  # those that its backward uses so
    written: list[str]  # the parameters that it writes to
    ran: bool


def _see(model: nn.Module, blocks: Sequence[nn.Module], inputs: Sequence[Tensor | None]) -> _Seen:
    uses = _ParametersUsed(model, [[block] for block in blocks])
    writes = _Writes(model)
    ran = False
    # any error of the model's code
    with suppress(Exception), _keeps_nothing(model), uses, writes, torch.enable_grad():
        model(*inputs)
        ran = True
    foreign = [name for _, name in uses.foreign]
    if uses.in_functions and not _backward_ran(model, inputs, uses):
        for block in uses.in_functions:
            uses.foreign += [("", uses.names[parameter]) for parameter in block.parameters()]
    in_backward = [name for _, name in uses.foreign if name not in foreign]
    return _Seen(foreign, in_backward, writes.parameters(), ran)


def _backward_ran(
    model: nn.Module, inputs: Sequence[Tensor | None], uses: "_ParametersUsed"
) -> bool:
    """Runs a forward and its backward, which may use parameters too, if that takes no memory."""
    if not all(parameter.is_meta for parameter in model.parameters()):
        return False
    with suppress(Exception), uses, torch.enable_grad():
        outputs = [x for x in tree_leaves(model(*inputs)) if isinstance(x, Tensor)]
        torch.stack([x.sum() for x in outputs if x.requires_grad]).sum().backward()
        return True
    return False


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
        names = []
        for name, parameter, memory in self._memory:
            is_replaced = memory_of(parameter) != memory
            if memory in self._written or is_replaced:
                names.append(name)
        return names


class _ParametersUsed(TorchFunctionMode):
    """Records parameters of blocks that are used elsewhere: in a block of another group, or outside
    blocks.

    `foreign`: (name of the using block, or "", name of the parameter). `in_functions`: the blocks
    that run inside a torch.autograd.Function, whose backward uses their parameters as it likes.
    `names`: of all parameters of blocks.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()
        self.foreign: list[tuple[str, str]] = []
        self._running: list[nn.Module] = []  # the innermost block last
        self._names = {module: name for name, module in model.named_modules()}

        self._own: dict[nn.Module, set[nn.Parameter]] = {}  # block -> parameters of its group
        of_any: set[nn.Parameter] = set()
        for group in groups:
            of_group = {parameter for block in group for parameter in block.parameters()}
            of_any |= of_group
            for block in group:
                self._own[block] = of_group

        # Parameter of a block -> its name.
        self.names = {p: name for name, p in model.named_parameters() if p in of_any}
        self.in_functions: set[nn.Module] = set()

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
        if in_autograd_function():
            self.in_functions.add(block)

    def _end(self, block: nn.Module, inputs: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        block = ""
        own: set[nn.Parameter] = set()
        if self._running:
            innermost = self._running[-1]
            block = self._names[innermost]
            own = self._own[innermost]
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and leaf in self.names and leaf not in own:
                self.foreign.append((block, self.names[leaf]))
        # While a function runs, the mode is off. A backward runs code of the model.
        runs_code = func in (Tensor.backward, torch.autograd.backward)
        with _On(self) if runs_code else nullcontext():
            return func(*args, **(kwargs or {}))


class _On(TorchFunctionMode):
    """Hands all functions to another mode."""

    def __init__(self, mode: TorchFunctionMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._mode.__torch_function__(func, types, args, kwargs)
