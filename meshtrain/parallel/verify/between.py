"""Which parameters lie between a column-wise and a row-wise layer, found by following tensors
through a forward.

There each rank of `tp` has a part of the features, and so a part of these parameters' gradients.
The comparison with the plain model sees it in the values; this looks at one forward without values,
for a model that is not compared.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.parallel.torch_private import (
    TorchDispatchMode,
    memory_of,
    tree_leaves,
)
from meshtrain.parallel.tp_plan import STYLES, Split
from meshtrain.parallel.verify.recording import PlainError, Sample, skeleton


def parameters_between(
    model: nn.Module, splits: Sequence[Split], names: Collection[str], sample: Sample
) -> list[str]:
    """Those of the parameters `names` that meet a part of the features. What cannot be followed
    counts as a part.

    Raises PlainError: the model does not run without values.
    """
    plain = skeleton(model, torch.float32, training=True).to("meta")
    inputs: list[Tensor | None] = []
    for x in sample:
        if x is None:
            inputs.append(None)
        else:
            inputs.append(x.to("meta", torch.float32 if x.is_floating_point() else None))
    given = [x for x in inputs if x is not None]
    watch = _Features([*plain.parameters(), *plain.buffers(), *given])
    for split in splits:
        layer = plain.get_submodule(split.layer)
        style = STYLES[split.style]
        if style.gives_part:
            layer.register_forward_hook(lambda layer, inputs, output: watch.split(output))
        elif style.takes_part:
            layer.register_forward_hook(lambda layer, inputs, output: watch.join(output))
    try:
        with torch.no_grad(), watch:
            plain(*inputs)
    except Exception as error:
        raise PlainError(f"{type(error).__name__}: {error}") from error
    return [name for name in names if plain.get_parameter(name) in watch.met_parts]


class _Features(TorchDispatchMode):
    """Follows which tensors hold all features, by their memory, so that writes to views count.

    Attributes:
        met_parts: the parameters that an operator took together with a part of the features.
    """

    def __init__(self, whole: Sequence[Tensor]) -> None:
        super().__init__()
        self.met_parts: set[Tensor] = set()
        self._whole = {memory_of(x) for x in whole}
        # Memory -> the parameters that it is computed from, and from nothing else.
        self._made_of: dict[int, set[Tensor]] = {
            memory_of(x): {x} for x in whole if isinstance(x, nn.Parameter)
        }
        self._alive: list[Any] = list(whole)  # so that memory is not used again

    def split(self, output: Any) -> None:
        """From here on each rank has a part of the features."""
        self._whole -= {memory_of(x) for x in _tensors(output)}

    def join(self, output: Any) -> None:
        """From here on each rank has all features."""
        self._whole |= {memory_of(x) for x in _tensors(output)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [memory_of(x) for x in _tensors((args, kwargs))]
        result = func(*args, **(kwargs or {}))
        outputs = _tensors(result)
        self._alive.append(outputs)

        parameters: set[Tensor] = set()
        for memory in inputs:
            parameters |= self._made_of.get(memory, set())
        if not all(memory in self._whole for memory in inputs):
            self.met_parts |= parameters
            self.split(outputs)
            return result
        self.join(outputs)
        # A reshaped, or otherwise changed, parameter still stands for it.
        if inputs and all(memory in self._made_of for memory in inputs):
            for x in outputs:
                self._made_of[memory_of(x)] = parameters
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
