"""Computing in 16 bits from parameters that stay in 32.

FSDP casts the parameters that it gathers. Without FSDP nobody does, so a block's forward is wrapped to do the same:
parameters and floating-point inputs are cast on entry, gradients come back in float32 and are summed there. One rule
for every layout: a block computes in the 16-bit type, and all that is kept or reduced is float32.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from meshtrain.parallel.torch_private import unseen


class Copies:
    """The 16-bit copies of a model's parameters: while a step has more microbatches to come, one for all of them.

    They are kept from a microbatch that was said not to be the last to the backward of the last one, and never between
    steps: whoever changes weights there tells nobody, and a write to a part of a DTensor shows in no version.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._kept: dict[Tensor, tuple[int, Tensor]] = {}  # parameter -> its version, and the copy of this rank's part
        self._last = True

    def set_last(self, last: bool) -> None:
        """Whether the next backward is the last of its step."""
        if self._last:
            self._kept.clear()
        self._last = last

    def reduce(self) -> None:
        """The step's backwards are done, none of which was said to be the last."""
        self.set_last(True)
        self._kept.clear()

    def backward_begins(self) -> None:
        if self._last:
            self._kept.clear()

    def cast(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter in 16 bits, with a way for gradients."""
        step = torch.is_grad_enabled()  # an evaluation is of no step, also where a step was given up
        version, copy = self._kept.get(parameter, (None, None)) if step else (None, None)
        if copy is None or version != parameter._version:
            copy = _copy(parameter, self.dtype)
            if step and not self._last:
                self._kept[parameter] = parameter._version, copy
        return Cast.apply(parameter, copy, self)


class Cast(torch.autograd.Function):
    """A forward's own view of a copy: what several forwards send back is summed in the parameter's type."""

    @staticmethod
    def forward(ctx: FunctionCtx, parameter: Tensor, copy: Tensor, copies: Copies) -> Tensor:
        ctx.dtype, ctx.copies = parameter.dtype, copies  # type: ignore[attr-defined]
        ctx.spec = parameter._spec if isinstance(parameter, DTensor) else None  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        ctx.copies.backward_begins()  # type: ignore[attr-defined]
        if grad is None:  # the layer hands its weight gradient over to be computed later
            return None, None, None
        grad, spec = grad.to(ctx.dtype), ctx.spec  # type: ignore[attr-defined]
        return grad if spec is None else DTensor(grad, spec, requires_grad=False), None, None


def casting(module: nn.Module, forward: Callable, copies: Copies, without: Sequence[nn.Module] = ()) -> Callable:
    """A forward of `module` in which its parameters and floating-point inputs appear in the type of `copies`.

    While it runs, casts stand in the places of the module's parameters, of split ones those of this rank's parts;
    autograd leads gradients back to the parameters themselves. Modules in `without` see to their own parameters.
    """
    others = {inner for other in without for inner in other.modules()}
    holders = [holder for holder in module.modules() if holder not in others]

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda x: _cast(x, copies.dtype), (args, kwargs))
        found = [
            (holder, name, parameter)
            for holder in holders
            for name, parameter in holder._parameters.items()
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != copies.dtype
        ]
        try:
            for holder, name, parameter in found:
                holder._parameters[name] = copies.cast(parameter)  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            for holder, name, parameter in found:
                holder._parameters[name] = parameter

    return run


def _copy(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    with unseen():  # selective recomputation wants to see the same operators again, and a copy may be there by then
        return part.detach().to(dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
