"""The optimizer protocol, the optimizers, learning-rate schedules, and gradient norms. Does not
import torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtrain.optim.grad_norm import clip_gradients, param_groups
    from meshtrain.optim.optimizer import Optimizer

__all__ = ["Optimizer", "clip_gradients", "param_groups"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "optimizer" if name == "Optimizer" else "grad_norm"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
