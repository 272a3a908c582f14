"""Linear layers with the same input compute together: over `tp` they gather it once, and in
compiled 16-bit blocks their weights, which are contiguous in memory, are merged into one matrix (q,
k and v; gate and up).

The merged product writes and reads the input's gradient once instead of once per layer. The
compiler lets the code around the layers read from and write to the merged output directly; without
it that would need copies.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn

from meshtrain.parallel.torch_private import tree_leaves


class SharedInput:
    """Linear layers of a module with the same input: the first one called computes for all of them.
    If the module gets two different tensors of their width (as cross attention does), so that
    layers may read different ones, each layer computes for itself. Nothing is kept after the
    module's forward.

    Attributes:
        merges: whether a 16-bit forward may merge the layers' weights.
        weight: the merged weight in the current forward; the weights of the layers are then parts
            of it.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        """`layers`: each has `in_features`, and `outputs` for several such layers."""
        self.layers = list(layers)
        self.merges = False
        self.weight: Tensor | None = None
        self._shares = False
        self._input: Tensor | None = None  # the input of `_outputs`, while there are any
        self._outputs: dict[Any, Tensor] = {}  # outputs of layers that have not been called yet

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Called with the tensors that the module's forward gets, before it runs."""
        width = self.layers[0].in_features
        inputs = [x for x in tensors if x.shape[-1:] == (width,)]
        self._shares = all(x is inputs[0] for x in inputs)

    def end(self) -> None:
        self._shares = False
        self._input = None
        self._outputs = {}

    def output(self, layer: Any, x: Tensor) -> Tensor:
        """What the forward of a layer returns for its input x."""
        if self._outputs and self._input is not x:  # the layers read different tensors after all
            self.end()
        if not self._shares:
            [y] = layer.outputs([layer], x, None)
            return y
        if layer not in self._outputs:
            alike = [other for other in self.layers if other.products == layer.products]
            ys = layer.outputs(alike, x, self.weight)
            self._outputs.update(zip(alike, ys, strict=True))
            self._input = x
        y = self._outputs.pop(layer)
        if not self._outputs:
            self._input = None  # does not hold its memory until the end
        return y


def share_input(layers: Sequence[Any], module: nn.Module) -> None:
    """Makes these layers, which a module's forward calls, compute together if they get the same
    tensor."""
    # A forward that is set on the object, as by a hook of the user's, is not ours to replace.
    has_other_forward = "forward" in vars(module) and not hasattr(module, "shared_inputs")
    if len(layers) == 1 or has_other_forward:
        return
    shared = SharedInput(layers)
    for layer in layers:
        layer.shared_input = shared
    module.shared_inputs = (*getattr(module, "shared_inputs", ()), shared)  # type: ignore[assignment]
    # Not by hooks, and with one function for all modules: otherwise the compiler would recompile
    # for each block.
    module.forward = MethodType(_forward, module)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    inputs: tuple[SharedInput, ...] = module.shared_inputs  # type: ignore[assignment]
    tensors = tensors_among((*args, *kwargs.values()))
    for shared in inputs:
        shared.begin(tensors)
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        for shared in inputs:
            shared.end()


def tensors_among(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, also those within lists and the like."""
    tensors = []
    for argument in arguments:
        # Most arguments are tensors themselves, and looking into the others takes long.
        leaves = [argument] if isinstance(argument, Tensor) else tree_leaves(argument)
        tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors


def split_outputs(product: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Each layer's own output, which a model may change in place or view freely. The compiler makes
    no copy if its own kernels read the output."""
    return [part.contiguous() for part in product.split(list(widths), -1)]


def stack(parts: Sequence[Tensor]) -> Tensor | None:
    """One matrix of matrices that are adjacent in memory; None if they are not."""
    first = parts[0]
    storage = first.untyped_storage().data_ptr()
    end = first.data_ptr()
    for part in parts:
        follows = part.untyped_storage().data_ptr() == storage and part.data_ptr() == end
        alike = part.is_contiguous() and part.shape[1:] == first.shape[1:]
        if not follows or not alike:
            return None
        end += part.nbytes
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
