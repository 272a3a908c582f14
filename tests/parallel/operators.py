"""Which operators torch calls: `with Operators() as operators: ...`."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts calls by operator, types of the matrices among its arguments, and options."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        matrices = [x.dtype for x in args if isinstance(x, Tensor) and x.dim() == 2]
        options = [str(value) for value in (kwargs or {}).values()]
        self.calls[func, *matrices, *options] += 1
        return func(*args, **(kwargs or {}))

    def of(self, *operators: Any) -> int:
        """How often these were called with a matrix."""
        return sum(
            count for (func, *types), count in self.calls.items() if func in operators and types
        )
