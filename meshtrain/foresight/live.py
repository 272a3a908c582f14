"""Live tensor bytes while code runs, counted after every PyTorch operator."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.foresight.memory import GRADIENTS
from meshtrain.foresight.torch_patches import resizes_seen
from meshtrain.parallel.collectives import implementations
from meshtrain.parallel.torch_private import nothing_hidden

# Operators whose implementation reads values: on the meta device only their shape functions can
# run.
WITHOUT_SHAPES = {
    f"meshtrain::{name}"
    for name in ("grouped", "grouped_input_grad", "grouped_weight_grad", "choose")
}


class Peak(NamedTuple):
    """The moment of a step with the most live bytes."""

    nbytes: int = 0
    operators: int = 0  # how many have run until then
    words: str = ""  # for people


class _Storage(NamedTuple):
    """A storage that is alive."""

    reference: Any  # weak; its callback takes the storage off the count
    nbytes: int
    part: str  # of memory, for which it was made


class LiveBytes(TorchDispatchMode):
    """Adds up the storages alive on a device after every operator, each at its current size (FSDP
    resizes them).

    Whoever runs the step sets where it is: `part`, `phase` and `block`.
    """

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()
        self.device_type = device_type
        self.total = 0
        self.sizes: Counter[str] = Counter()  # part for which storages were made -> alive
        self.count = 0  # of operators
        self.rows = 0  # token rows that this rank sends to experts
        self.part = "other"  # the part of memory to which new storages are attributed
        self.phase = ""  # of the step
        self.block = ""  # name of the block
        self.peak = Peak()
        # called with every operator: its function, arguments and results
        self.watch: Callable[[Any, Any, Any], None] | None = None
        # an operator's number, and what is called after it
        self.then: tuple[int, Callable[[], None]] | None = None
        self._alive: dict[int, _Storage] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets the compiler compile under this mode, without watching the compiler's own
        operators."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches again, with local tensors
        out = self._run(func, args, kwargs or {})
        if kwargs:
            self._see_all(kwargs)
        self.ran(func, args, out)
        return out

    def ran(self, func: Any, args: Any, out: Any) -> None:
        """Counts one operator that has run."""
        self._see_all(args)
        part = self.part
        if makes_weight_grad(func):
            self.part = GRADIENTS
        self._see_all(out)
        self.part = part
        if self.watch is not None:
            self.watch(func, args, out)
        self.look(func.__name__)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.name().split(".")[0]
        if name == "meshtrain::message_sizes" and args and args[0].is_meta:
            # There are no values: assume balanced experts.
            experts = len(args[1])
            sizes = [max(1, self.rows // experts)] * experts
            return torch.tensor([sizes, sizes])
        if name == "aten::addmm" and args[0].is_meta and "out" in kwargs:
            return kwargs["out"]  # torch 2.11 has no meta kernel for it
        run = None if name in WITHOUT_SHAPES else implementations.get(name)
        if run is None:
            return func(*args, **kwargs)
        with self:  # count the operators inside of it, too
            return run(*args, **kwargs)

    def _see_all(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.see(value)
        elif isinstance(value, (list, tuple)):
            for part in value:
                self._see_all(part)
        elif isinstance(value, dict):
            for part in value.values():
                self._see_all(part)

    def see(self, tensor: Tensor) -> None:
        """Counts a tensor's storage, unless it is known."""
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            reference = weakref.ref(storage, lambda _: self._freed(key))
            self._alive[key] = _Storage(reference, storage.nbytes(), self.part)
            self._add(self.part, storage.nbytes())

    def _freed(self, key: int) -> None:
        freed = self._alive.pop(key)
        self._add(freed.part, -freed.nbytes)

    def _add(self, part: str, nbytes: int) -> None:
        self.total += nbytes
        self.sizes[part] += nbytes

    def look(self, operator: str) -> None:
        """Updates the peak. Between phases the host computes with tensors of its own, and those of
        the step before are still alive: that is no part of the step."""
        self.count += 1
        if self.phase and self.total > self.peak.nbytes:
            words = f"{self.phase}, {operator.split('.')[0]}"
            if self.block:
                words += f" of {self.block}"
            self.peak = Peak(self.total, self.count, words)
        if self.then is not None and self.count == self.then[0]:
            self.then[1]()

    def resized(self, storage: Any) -> None:
        """Counts a storage's new size: FSDP frees and refills gathered parameters by resizing."""
        known = self._alive.get(storage._cdata)
        if known is not None:
            self._add(known.part, storage.nbytes() - known.nbytes)
            self._alive[storage._cdata] = known._replace(nbytes=storage.nbytes())
            self.look("gather")

    def parts(self, owners: Mapping[int, str]) -> dict[str, int]:
        """part -> live bytes. `owners`: storage -> its part now, in place of the one that it was
        made for."""
        sums: Counter[str] = Counter()
        for key, storage in self._alive.items():
            sums[owners.get(key, storage.part)] += storage.nbytes
        return {part: size for part, size in sums.items() if size}


@contextmanager
def watched(live: LiveBytes) -> Iterator[None]:
    """Context in which `live` sees every operator and storage resize, also in code that disables
    dispatch modes."""
    with resizes_seen(live.resized), nothing_hidden(), live:
        yield


def makes_weight_grad(operator: Any) -> bool:
    """Whether the operator's result is the gradient of an embedding's weight, which no layer of
    meshtrain's computes."""
    return operator.name() == "aten::embedding_dense_backward"


def is_view(operator: Any) -> bool:
    """Whether the operator's result aliases an argument's memory."""
    returns = operator._schema.returns
    return any(part.alias_info is not None and not part.alias_info.is_write for part in returns)
