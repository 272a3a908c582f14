"""Checkpoints: a run's whole state, written on one layout and read on any other. Imports no
torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtrain.checkpoint.weights import load_weights

__all__ = ["load_weights"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("meshtrain.checkpoint.weights"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
