"""Optimizers by their name in a config. Pure: configs are checked without torch."""

import importlib
from typing import TYPE_CHECKING

from meshtrain.errors import InputError

if TYPE_CHECKING:
    from meshtrain.optim.optimizer import UpdateRule

OPTIMIZERS = {  # name -> module:class, an `UpdateRule`
    "adamw": "meshtrain.optim.adamw:AdamW",
    "muon": "meshtrain.optim.muon:Muon",
    "sgd": "meshtrain.optim.sgd:SGD",
}
IN_BFLOAT16 = {"adamw": "meshtrain.optim.adamw:RoundedAdamW"}  # ... with bfloat16 state


def update_rule(name: str, state_precision: str = "float32") -> "type[UpdateRule]":
    """Raises InputError: this optimizer does not support state in bfloat16."""
    rules = IN_BFLOAT16 if state_precision == "bfloat16" else OPTIMIZERS
    if name not in rules:
        raise InputError(
            f"optimizer.state_precision bfloat16 is built for {', '.join(rules)}, not for {name}"
        )
    module, _, cls = rules[name].partition(":")
    return getattr(importlib.import_module(module), cls)
