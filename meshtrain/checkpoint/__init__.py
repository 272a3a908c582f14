"""Checkpoints: a run's whole state, written by the ranks of one layout and read by those of any other.

`load_weights(CHECKPOINT, model)` fills a model with the weights alone. Importing this package does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtrain.checkpoint.weights import load_weights

__all__ = ["load_weights"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("meshtrain.checkpoint.weights"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
