"""Blocks that are alike, and the model with as few layers as have one of each kind."""

import operator
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from meshtrain.config.model_spec import ModelSpec
from meshtrain.pipeline.stage import blocks_of

LAYERS = "num_hidden_layers"
MOST = 8  # layers that are tried
NUMBERS = ("layer_idx", "layer_index", "layer_id", "layer_number", "idx", "index")  # of a layer
SETTINGS = (int, float, str, tuple, Enum, torch.dtype, type(None))
Kind = tuple[Any, ...]


def kind_of(block: nn.Module) -> Kind:
    """What blocks that compute alike have in common: types, settings (a window, but no number of a layer), shapes, and
    what is trained."""
    modules = list(block.modules())
    settings = [
        (name, repr(value))
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, SETTINGS) and name not in NUMBERS
    ]
    shapes = tuple((*parameter.shape, parameter.requires_grad) for parameter in block.parameters())
    return tuple(map(type, modules)), tuple(settings), shapes


@lru_cache(maxsize=8)
def few_layers(spec: ModelSpec) -> tuple[ModelSpec, list[int]]:
    """A model with as few layers as have all kinds of blocks, and for each block of the whole one which is like it.
    What runs outside of blocks makes the last one another; behind the first trained one inputs have gradients."""
    whole = _kinds(spec)
    for count in range(1, min(spec.keys.get(LAYERS, 0), MOST + 1)):
        few = ModelSpec(spec.module, {**spec.keys, LAYERS: count}, spec.freeze, spec.lora)
        try:
            kinds = _kinds(few)
        except Exception:  # the model's own, which has to have more
            continue
        if set(kinds) == set(whole):
            return few, [kinds.index(kind) for kind in whole]
    return spec, list(range(len(whole)))


def _kinds(spec: ModelSpec) -> list[Kind]:
    blocks = blocks_of(spec.meta)
    trained = [any(parameter.requires_grad for parameter in block.parameters()) for block in blocks]
    before = accumulate([False, *trained[:-1]], operator.or_)
    return [(block is blocks[-1], learns, kind_of(block)) for block, learns in zip(blocks, before, strict=True)]
