"""Data: the samples that each step trains on, the same in every layout. Imports no torch until a
name is used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtrain.data.batch import IGNORE, Batch, Samples
    from meshtrain.data.loader import EvalBatches, train_batches
    from meshtrain.data.sources import OpenData, open_data, prepare_data
    from meshtrain.data.tokens import Document, write

__all__ = (
    "IGNORE",
    "Batch",
    "Document",
    "EvalBatches",
    "OpenData",
    "Samples",
    "open_data",
    "prepare_data",
    "train_batches",
    "write",
)

_MODULES = {
    "batch": ("IGNORE", "Batch", "Samples"),
    "loader": ("EvalBatches", "train_batches"),
    "sources": ("OpenData", "open_data", "prepare_data"),
    "tokens": ("Document", "write"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"meshtrain.data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
