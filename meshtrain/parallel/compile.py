"""torch.compile of a block."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from meshtrain.parallel.torch_private import allow_side_effects_in_recomputation, replace_parameters, to_local


def compile_block(block: nn.Module, forward: Callable, without: Collection[nn.Module] = ()) -> Callable:
    """A forward of `block`, compiled at its first call.

    The compiler is given what it can recompute: while the forward runs, parameters that are split appear as this
    rank's parts, because a graph with a recomputation in it cannot hold DTensors. Autograd leads gradients back to the
    parameters themselves. Modules in `without` are left out of that: those that are not compiled, and that FSDP gathers
    by themselves.
    """
    compiled = torch.compile(forward)
    # Column-parallel layers hand each other what they have computed together, and are left as they were. Without leave
    # to do that inside of a recomputation, nothing of the block would be compiled.
    allowed = allow_side_effects_in_recomputation()

    def run(*args: Any, **kwargs: Any) -> Any:
        with replace_parameters((m for m in block.modules() if m not in without), to_local), allowed:
            return compiled(*args, **kwargs)

    return run
