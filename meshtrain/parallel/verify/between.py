"""Which parameters lie between a column-wise and a row-wise layer, found by following tensors
through a forward.

There each rank of `tp` has a part of the features, and so a part of these parameters' gradients.
The comparison of `verify` sees it in the values; this looks at one forward without values, for a
model that is not compared.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshtrain.parallel.tp_plan import Colwise, Rowwise, Split
from meshtrain.parallel.verify.comparison import PlainError, Sample, skeleton


def parameters_between(
    model: nn.Module, splits: Sequence[Split], names: Collection[str], sample: Sample
) -> list[str]:
    """Those of the parameters `names` that meet a part of the features. What cannot be followed
    counts as a part.

    Raises PlainError: the model does not run without values.
    """
    plain = skeleton(model, torch.float32, training=True).to("meta")
    inputs = [
        None if x is None else x.to("meta", torch.float32 if x.is_floating_point() else None)
        for x in sample
    ]
    watch = _Features(
        [*plain.parameters(), *plain.buffers(), *(x for x in inputs if x is not None)]
    )
    for split in splits:
        if split.style == Colwise.word:
            plain.get_submodule(split.layer).register_forward_hook(lambda *of: watch.split(of[2]))
        elif split.style == Rowwise.word:
            plain.get_submodule(split.layer).register_forward_hook(lambda *of: watch.join(of[2]))
    try:
        with torch.no_grad(), watch:
            plain(*inputs)
    except Exception as error:
        raise PlainError(f"{type(error).__name__}: {error}") from error
    return [name for name in names if plain.get_parameter(name) in watch.met_parts]


class _Features(TorchDispatchMode):
    """Follows which tensors hold all features, by their memory, so that writes to views count."""

    def __init__(self, whole: Sequence[Tensor]) -> None:
        super().__init__()
        # parameters that an operator took together with a part of the features
        self.met_parts: set[Tensor] = set()
        self._whole = {_memory(x) for x in whole}
        # memory -> its parameters
        self._made_of = {_memory(x): {x} for x in whole if isinstance(x, nn.Parameter)}
        self._alive: list[Any] = list(whole)  # so that memory is not used again

    def split(self, output: Any) -> None:
        self._whole -= {_memory(x) for x in _tensors(output)}

    def join(self, output: Any) -> None:
        self._whole |= {_memory(x) for x in _tensors(output)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = _tensors((args, kwargs))
        result = func(*args, **(kwargs or {}))
        outputs = _tensors(result)
        self._alive.append(outputs)
        parameters = set().union(*(self._made_of.get(_memory(x), ()) for x in inputs))
        if all(_memory(x) in self._whole for x in inputs):
            self.join(outputs)
            if inputs and all(_memory(x) in self._made_of for x in inputs):
                self._made_of |= {_memory(x): parameters for x in outputs}
        else:
            self.met_parts |= parameters
            self.split(outputs)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata
