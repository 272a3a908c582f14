"""Live tensor bytes while code runs, counted after every PyTorch operator."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.parallel.collectives import implementations

# Operators whose implementation reads values: on the meta device only their shape functions can
# run.
WITHOUT_SHAPES = {
    f"meshtrain::{name}"
    for name in ("grouped", "grouped_input_grad", "grouped_weight_grad", "choose")
}


class LiveBytes(TorchDispatchMode):
    """Adds up the storages alive on a device after every operator, each at its current size (FSDP
    resizes them)."""

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()
        self.device_type = device_type
        self.total = self.count = 0
        self.rows = 0  # token rows that this rank sends to experts
        self.part = "other"  # the part of memory to which new storages are attributed
        # of the step, the model, and the block's position in its stage
        self.phase = self.block = self.place = ""
        self.peaks: dict[
            str, tuple[int, int, str]
        ] = {}  # moment -> peak bytes, operator count then, description
        self.watch: Callable[[Any, Any, Any], None] | None = None  # called with every operator
        self.actions: dict[
            int, Callable[[], None]
        ] = {}  # operator count -> what is called after that operator
        self._alive: dict[int, tuple[Any, int, str]] = {}

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
        self._see_all(out)
        if self.watch is not None:
            self.watch(func, args, out)
        self.look(func.__name__)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.name().split(".")[0]
        if args and name == "meshtrain::message_sizes" and args[0].is_meta:
            # no values: assume balanced experts
            sizes = [max(1, self.rows // len(args[1]))] * len(args[1])
            return torch.tensor([sizes, sizes])
        # torch 2.11 has no meta kernel for it
        if name == "aten::addmm" and args[0].is_meta and "out" in kwargs:
            return kwargs["out"]
        run = implementations.get(name) if name not in WITHOUT_SHAPES else None
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
            self._see_all(tuple(value.values()))

    def see(self, tensor: Tensor) -> None:
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            size = storage.nbytes()
            self._alive[key] = weakref.ref(storage, lambda _: self._freed(key)), size, self.part
            self.total += size

    def _freed(self, key: int) -> None:
        self.total -= self._alive.pop(key)[1]

    def look(self, operator: str) -> None:
        """Updates the peak of the current moment, and calls this operator's action."""
        self.count += 1
        key = f"{self.phase} {self.place}"
        if key not in self.peaks or self.total > self.peaks[key][0]:
            words = f"{self.phase}, {operator.split('.')[0]}" + f" of {self.block}" * bool(
                self.block
            )
            self.peaks[key] = self.total, self.count, words
        if self.count in self.actions:
            self.actions[self.count]()

    def resized(self, storage: Any) -> None:
        """Counts a storage's new size: FSDP frees and refills gathered parameters by resizing."""
        if (known := self._alive.get(storage._cdata)) is not None:
            self.total += storage.nbytes() - known[1]
            self._alive[storage._cdata] = known[0], storage.nbytes(), known[2]
            self.look("gather")

    def parts(self, owners: Mapping[int, str]) -> dict[str, int]:
        """part -> live bytes. `owners`: storage -> its part now, in place of the one that it was
        made for."""
        sums: Counter[str] = Counter()
        for key, (_, size, part) in self._alive.items():
            sums[owners.get(key, part)] += size
        return {part: size for part, size in sums.items() if size}


@contextmanager
def watched(live: LiveBytes) -> Iterator[None]:
    """Context in which `live` sees every operator and storage resize, also in code that disables
    dispatch modes."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        live.resized(storage)
        return result

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))
        for module in ("tp_linear", "grad_sync"):
            stack.enter_context(
                patch(f"meshtrain.parallel.{module}.without_dispatch_modes", nullcontext)
            )
        stack.enter_context(live)
        yield


def is_view(operator: Any) -> bool:
    """Whether the operator's result aliases an argument's memory."""
    returns = operator._schema.returns
    return any(part.alias_info is not None and not part.alias_info.is_write for part in returns)
