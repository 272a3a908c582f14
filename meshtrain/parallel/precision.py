"""Computing in 16 bits from parameters that stay in 32.

FSDP casts the parameters that it gathers. Without FSDP nobody does, so a block's forward is wrapped to do the same:
parameters and floating-point inputs are cast on entry, gradients come back in float32 and are summed there. One rule
for every layout: a block computes in the 16-bit type, and all that is kept or reduced is float32.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def casting(module: nn.Module, forward: Callable, dtype: torch.dtype, without: Sequence[nn.Module] = ()) -> Callable:
    """A forward of `module` in which its parameters and floating-point inputs appear in `dtype`.

    While it runs, the module's parameters are replaced by their casts; autograd leads gradients through the cast back
    to the parameters themselves. Modules in `without` see to their own parameters.
    """
    others = {inner for other in without for inner in other.modules()}
    holders = [
        (holder, name, parameter)
        for holder in module.modules()
        if holder not in others
        for name, parameter in holder._parameters.items()
        if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype
    ]

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, lambda x: _cast(x, dtype), (args, kwargs))
        try:
            for holder, name, parameter in holders:
                holder._parameters[name] = parameter.to(dtype)  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            for holder, name, parameter in holders:
                holder._parameters[name] = parameter

    return run


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() else x
