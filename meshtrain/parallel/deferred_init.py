"""Deferred initialization: a constructor runs without memory for parameters, and what it does to
their values is replayed later, a parameter at a time.

`construct` moves each parameter to the meta device when its module registers it, and records every
operator that makes or changes a tensor. The values of a parameter are those that the recorded
operators on which it depends give. So whatever a class does (bare `torch.randn`,
`reset_parameters`, an `_init_weights` applied to all modules, a rescaling by name) is obeyed
without knowing its words. Buffers and other tensors are computed at once. The idea is torchdistX's:
https://pytorch.org/torchdistx/latest/deferred_init.html

Each random operator draws from a seed of its own, by (seed, its number among them). So values do
not depend on which parameters a rank draws, or how often.
"""

import hashlib
import inspect
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from meshtrain.parallel.torch_private import (
    StorageReference,
    TorchDispatchMode,
    has_gradient_hooks,
    memory_of,
    own_buffers,
    own_parameters,
    tree_leaves,
    tree_map_only,
    written_tensors,
)

CPU = torch.device("cpu")
META = torch.device("meta")
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has

aten = torch.ops.aten
# They overwrite a tensor whatever it holds, so that what was done to it before does not count.
FILLS = frozenset(
    (
        aten.normal_,
        aten.uniform_,
        aten.zero_,
        aten.fill_,
        aten.copy_,
        aten.random_,
        aten.exponential_,
        aten.log_normal_,
        aten.cauchy_,
        aten.geometric_,
    )
)
# They take indices on a CPU for tensors on meta, and none on meta, where masks have no values.
INDEXED = frozenset((aten.index, aten.index_put, aten.index_put_))


# As a `TorchFunctionMode` sees attributes of tensors.
_attributes: Any = Tensor
SET_DATA = _attributes.data.__set__
GET_DEVICE = _attributes.device.__get__
GET_IS_META = _attributes.is_meta.__get__


class NotDeferredError(Exception):
    """A constructor cannot run without memory for parameters; the message says why."""


@dataclass(frozen=True)
class _Place:
    """A tensor as a view of a storage."""

    storage: int  # its number
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Of its elements, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return view.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class _Call:
    """A recorded operator, or function of torch.nn.init, with a `_Place` for each tensor."""

    function: Callable[..., Any]
    args: Sequence[Any]
    named: Mapping[str, Any]
    read: frozenset[int]  # numbers of storages whose values it needs
    # The number of the new storage of each tensor that it returns; None: it is no new one.
    made: Sequence[int | None]
    fills: int | None  # number of the storage that it overwrites entirely
    draw: int | None  # its number among the random ones; None: it draws nothing
    dtype: torch.dtype  # torch's default at the time


class _Record(TorchDispatchMode):
    """Records what a constructor does with tensors. Those on meta stand for ones with memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._draws = 0  # random operators so far
        self._calls: list[_Call] = []
        self._numbers: dict[int, int] = {}  # id of a storage -> its number
        # They keep the ids from being used again, and no memory.
        self._references: list[StorageReference] = []
        self._sizes: list[int] = []  # of storages, in bytes
        self._changes: defaultdict[int, list[int]] = defaultdict(list)  # storage -> calls, in order
        # Of storages that no recorded operator has made: what they held when first seen.
        self._given: dict[int, torch.UntypedStorage] = {}
        self._on_meta: dict[int, torch.UntypedStorage] = {}  # storage -> the one for it on meta
        # By the id of a parameter: the one that was registered for it, which tied modules share.
        self._registered: dict[int, tuple[weakref.ref[Any], nn.Parameter]] = {}
        self._paused = False
        self._attributes = _Attributes(self)

    def __enter__(self) -> "_Record":
        self._attributes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._attributes.__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # Recording ------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)

        with self.paused():
            return self._record(func, args, kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = tree_map_only(Tensor, self.place, (args, kwargs))
        written = written_tensors(func, args, kwargs)
        draw: int | None = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            draw = self._next_draw()
            self._reseed(draw)
        if any(tensor.is_meta for tensor in tensors):
            args, kwargs = self._moved(func, args, kwargs, written)
        result = func(*args, **kwargs)

        made: list[int | None] = []
        for tensor in tree_leaves(result):
            number = None
            if isinstance(tensor, Tensor) and memory_of(tensor) not in self._numbers:
                number = self._number(tensor, is_new=True)
            made.append(number)
        makes_any = any(number is not None for number in made)
        # An empty tensor is not recorded: where it is read it has zeros, so that a value that
        # nobody sets is the same everywhere.
        is_empty = func.__name__.startswith(("empty", "new_empty"))
        if written or (makes_any and not is_empty):
            self._append(func, places, [self.place(x) for x in written], made, draw)
        return result

    def record_init(self, function: Callable[..., Any], named: Mapping[str, Any]) -> None:
        """Records a call of a function of torch.nn.init that torch leaves out for a tensor on
        meta."""
        with self.paused():
            places = tree_map_only(Tensor, self.place, ((), dict(named)))
        _, named_places = places
        written = [named_places["tensor"]]
        self._append(function, places, written, made=[], draw=self._next_draw())

    def _append(
        self,
        function: Callable[..., Any],
        places: tuple[Any, Any],
        written: Sequence[_Place],
        made: Sequence[int | None],
        draw: int | None,
    ) -> None:
        # It will run on a CPU, where it was asked for one and has run on meta.
        args, named = tree_map_only(torch.device, lambda d: CPU if d == META else d, places)
        read = self._read_by(function, places)

        # What a storage held before does not count where it is overwritten, all of it.
        fills: int | None = None
        overwrites = getattr(function, "overloadpacket", None) in FILLS
        is_init = inspect.isfunction(function)  # of torch.nn.init
        if len(written) == 1 and (overwrites or is_init):
            place = written[0]
            if place.size == self._sizes[place.storage]:
                fills = place.storage
                read.remove(fills)
        call = _Call(
            function,
            args,
            named,
            read=frozenset(read),
            made=made,
            fills=fills,
            draw=draw,
            dtype=torch.get_default_dtype(),
        )
        index = len(self._calls)
        self._calls.append(call)
        for number in (*made, *(place.storage for place in written)):
            if number is not None:
                self._changes[number].append(index)

    def _read_by(self, function: Callable[..., Any], places: tuple[Any, Any]) -> list[int]:
        """The storages whose values a function needs."""
        name = getattr(function, "__name__", "")
        takes_only_shape = name.startswith("new_") or "_like" in name
        if takes_only_shape:
            return []
        return [place.storage for place in tree_leaves(places) if isinstance(place, _Place)]

    def _moved(
        self, func: Any, args: Any, kwargs: Any, written: Sequence[Tensor]
    ) -> tuple[Any, Any]:
        """The arguments of an operator, all on meta."""
        if not all(tensor.is_meta for tensor in written):
            raise NotDeferredError(
                "its constructor writes values of parameters into another tensor"
            )
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        if func.overloadpacket in INDEXED:
            return args, kwargs
        return tree_map_only(Tensor, self.on_meta, (args, kwargs))

    def place(self, tensor: Tensor) -> _Place:
        if tensor.is_conj() or tensor.is_neg():
            raise NotDeferredError("its constructor uses lazily conjugated tensors")
        return _Place(
            self._number(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def _number(self, tensor: Tensor, is_new: bool = False) -> int:
        """The number of a tensor's storage. `is_new`: an operator has just made it."""
        storage = tensor.untyped_storage()
        key = memory_of(tensor)
        if key in self._numbers:
            return self._numbers[key]
        number = len(self._sizes)
        self._numbers[key] = number
        self._sizes.append(storage.nbytes())
        self._references.append(StorageReference(storage))
        if not is_new and storage.device != META:
            with self.paused():
                self._given[number] = storage.clone()
        return number

    def on_meta(self, tensor: Tensor) -> Tensor:
        """The tensor on meta that stands for one with memory; views of one storage stay so."""
        with self.paused():
            if tensor.is_meta:
                return tensor
            place = self.place(tensor)
            if place.storage not in self._on_meta:
                size = self._sizes[place.storage]
                memory = torch.empty(size, dtype=torch.uint8, device=META)
                self._on_meta[place.storage] = memory.untyped_storage()
                self._numbers[memory_of(memory)] = place.storage
            return place.of(self._on_meta[place.storage])

    def register(self, module: nn.Module, name: str, parameter: Any) -> Any:
        """torch's hook at the registration of a parameter: the one to register instead, or None."""
        if parameter is None or self._paused:
            return None
        with self.paused():
            where = f"its parameter {name} of a {type(module).__name__}"
            if type(parameter) is not nn.Parameter:
                raise NotDeferredError(f"{where} is of the class {type(parameter).__name__}")
            if has_gradient_hooks(parameter):
                raise NotDeferredError(f"{where} has a gradient hook")
            if parameter.is_meta:  # tied, or computed from others
                return None
            known, moved = self._registered.get(id(parameter), (None, None))
            if moved is None or known is None or known() is not parameter:
                moved = nn.Parameter(self.on_meta(parameter), parameter.requires_grad)
                vars(moved).update(vars(parameter))
                self._registered[id(parameter)] = (weakref.ref(parameter), moved)
            return moved

    # Replaying ------------------------------------------------------------------------------------

    def needed(self, place: _Place) -> list[int]:
        """The calls on which a tensor's values depend, in order."""
        needed: set[int] = set()
        # Storages, each as it was before a call. What changed it there is needed, back to where it
        # was made or overwritten; and all that these calls read, as it was before them.
        open_ends = [(place.storage, len(self._calls))]
        seen = set(open_ends)
        while open_ends:
            storage, end = open_ends.pop()
            for index in reversed(self._changes[storage]):
                if index >= end:
                    continue
                call = self._calls[index]
                needed.add(index)
                read = {(other, index) for other in call.read} - seen
                seen |= read
                open_ends += read
                if call.fills == storage or storage in call.made:
                    break
        return sorted(needed)

    def check(self, place: _Place, what: str) -> None:
        """Raises NotDeferredError: values cannot be drawn again."""
        for index in self.needed(place):
            call = self._calls[index]
            if any(isinstance(x, torch.Generator) for x in tree_leaves((call.args, call.named))):
                raise NotDeferredError(f"{what} is drawn by a generator of its own")

    def values(self, place: _Place) -> Tensor:
        """The values of a tensor at the end of the constructor, on the CPU."""
        calls = self.needed(place)
        last_use: dict[int, int] = {}  # storage -> the last call that uses it
        for index in calls:
            call = self._calls[index]
            for leaf in tree_leaves((call.args, call.named)):
                if isinstance(leaf, _Place):
                    last_use[leaf.storage] = index

        memory: dict[int, torch.UntypedStorage] = {}

        def tensor_of(where: _Place) -> Tensor:
            number = where.storage
            if number not in memory and number in self._given:
                memory[number] = self._given[number].clone()
            elif number not in memory:
                zeros = torch.zeros(self._sizes[number], dtype=torch.uint8)
                memory[number] = zeros.untyped_storage()
            return where.of(memory[number])

        default = torch.get_default_dtype()
        try:
            for index in calls:
                call = self._calls[index]
                args, named = tree_map_only(_Place, tensor_of, (call.args, call.named))
                torch.set_default_dtype(call.dtype)
                if call.draw is not None:
                    self._reseed(call.draw)
                result = call.function(*args, **named)
                for tensor, made in zip(tree_leaves(result), call.made, strict=False):
                    if made is not None:
                        memory[made] = tensor.untyped_storage()
                del args, named, result
                for number in list(memory):
                    is_used_later = last_use.get(number, -1) > index
                    if number != place.storage and not is_used_later:
                        del memory[number]
        finally:
            torch.set_default_dtype(default)
        return tensor_of(place)

    def _next_draw(self) -> int:
        self._draws += 1
        return self._draws

    def _reseed(self, draw: int) -> None:
        digest = hashlib.blake2b(f"{self._seed} {draw}".encode(), digest_size=8).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest) >> 1)


class _Attributes(TorchFunctionMode):
    """Lets tensors on meta look as those on a CPU that they stand for."""

    def __init__(self, record: _Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._record._paused:
            return func(*args, **kwargs)
        if func == SET_DATA and args[0].is_meta:
            return func(args[0], self._record.on_meta(args[1]))
        result = func(*args, **kwargs)
        if func == GET_DEVICE and result == META:
            # Where a constructor makes a buffer "on the device of the weight".
            return CPU
        if func == GET_IS_META and result:
            # Some functions of torch.nn.init do nothing for tensors on meta: they read values. So
            # the call itself is recorded, with its arguments.
            frame = inspect.currentframe()
            assert frame is not None
            caller = frame.f_back
            assert caller is not None
            if caller.f_globals.get("__name__") != nn.init.__name__:
                return False
            code = caller.f_code
            parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            arguments = {name: caller.f_locals[name] for name in parameters}
            function = caller.f_globals[code.co_name]
            self._record.record_init(function, arguments)
        return result


class FirstValues:
    """The values that a constructor gives to a model's parameters."""

    def __init__(self, record: _Record, places: Mapping[str, _Place]) -> None:
        self._record = record
        self._places = places
        # Whether a buffer, or another tensor of a module, was computed from parameters.
        self.others_depend = False

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def draw(self, name: str) -> Tensor:
        """The whole values of a parameter, on the CPU, by any of its names. Takes the memory of
        this tensor and of what its operators need."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return self._record.values(self._places[name])


def construct(make: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, FirstValues]:
    """Makes a model with its parameters on the meta device, and all its other tensors on the CPU.

    Args:
        make: the constructor. What it draws by torch is a function of the seed, and leaves torch's
            generator as it was; numpy's and Python's are the caller's.

    Raises NotDeferredError: its parameters need memory, because the constructor reads their values,
    registers hooks of their gradients, or draws from a generator of its own.
    """
    record = _Record(seed)
    handle = register_module_parameter_registration_hook(record.register)
    try:
        with torch.random.fork_rng(devices=[]), record:
            model = make()
    except NotDeferredError:
        raise
    except Exception as error:  # whatever a class raises where a tensor has no values
        line = (str(error).splitlines() or [""])[0]
        raise NotDeferredError(
            f"its constructor does not run without the values of parameters ({line})"
        ) from error
    finally:
        handle.remove()

    values = FirstValues(record, _parameter_places(model, record))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        values.others_depend = _compute_others(model, record)
    return model, values


def _parameter_places(model: nn.Module, record: _Record) -> dict[str, _Place]:
    """By all names of the parameters, which are moved to meta where they are not yet there."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None and not parameter.is_meta:  # registered past torch
                if parameter not in moved:
                    on_meta = record.on_meta(parameter.detach())
                    moved[parameter] = nn.Parameter(on_meta, parameter.requires_grad)
                own_parameters(module)[name] = moved[parameter]
    places = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if has_gradient_hooks(parameter):
            raise NotDeferredError(f"its parameter {name} has a gradient hook")
        places[name] = record.place(parameter)
        record.check(places[name], f"its parameter {name}")
    return places


def _compute_others(model: nn.Module, record: _Record) -> bool:
    """Gives values to buffers, and tensors in attributes, that were computed from parameters.
    Returns whether there are any."""
    computed: dict[Tensor, Tensor] = {}

    def compute(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if tensor not in computed:
            computed[tensor] = record.values(record.place(tensor))
        return computed[tensor]

    own = {*model.modules()}
    for name, module in model.named_modules():
        buffers = own_buffers(module)
        for key, buffer in buffers.items():
            if buffer is not None:
                buffers[key] = compute(buffer)
        for key, value in list(vars(module).items()):
            if key in OF_MODULES:
                continue
            leaves = tree_leaves(value)
            where = f"its module {name}" if name else "it"
            if any(_is_outside(leaf, own) for leaf in leaves):
                raise NotDeferredError(f"{where} has parameters in the plain attribute {key}")
            if any(isinstance(leaf, nn.Parameter) for leaf in leaves):
                if key.startswith("_"):  # torch's own lists of registered ones, in nn.RNNBase
                    continue
                raise NotDeferredError(f"{where} has parameters in the plain attribute {key}")
            if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
                vars(module)[key] = tree_map_only(Tensor, compute, value)
    return bool(computed)


def _is_outside(value: Any, own: set[nn.Module]) -> bool:
    """Whether a value is a module outside of the model whose parameters would get no values."""
    return (
        isinstance(value, nn.Module)
        and value not in own
        and any(tensor.is_meta for tensor in (*value.parameters(), *value.buffers()))
    )
