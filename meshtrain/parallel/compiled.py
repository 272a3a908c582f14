"""A block by torch.compile."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def compiled(block: nn.Module, forward: Callable) -> Callable:
    """A forward of `block`, compiled at its first call.

    The compiler is given what it can recompute: while the forward runs, parameters that are split appear as this
    rank's parts, because a graph with a recomputation in it cannot hold DTensors. Autograd leads gradients back to the
    parameters themselves.
    """
    run = torch.compile(forward)
    # Column-parallel layers hand each other what they have computed together, and are left as they were found. Without
    # leave to do that inside of a recomputation, nothing of the block would be compiled.
    allowed = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)

    def with_parts(*args: Any, **kwargs: Any) -> Any:
        split: list[tuple[nn.Module, str, Any]] = [
            (holder, name, parameter)
            for holder in block.modules()
            for name, parameter in holder._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        try:
            for holder, name, parameter in split:
                holder._parameters[name] = parameter.to_local()
            with allowed:
                return run(*args, **kwargs)
        finally:
            for holder, name, parameter in split:
                holder._parameters[name] = parameter

    return with_parts
