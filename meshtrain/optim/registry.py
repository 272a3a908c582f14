"""Optimizers by the name that a config gives them. Pure: configs are checked without torch."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshtrain.optim.optimizer import UpdateRule

OPTIMIZERS = {"adamw": "meshtrain.optim.adamw:AdamW"}  # name -> module:class, an `UpdateRule`


def update_rule(name: str) -> "type[UpdateRule]":
    module, _, cls = OPTIMIZERS[name].partition(":")
    return getattr(importlib.import_module(module), cls)
