"""Float8 layers: which linear layers multiply in 8 bits, and which splits over `tp` would change
their results.

The choice is the same on every layout, so it depends only on the names and sizes of the whole
model.
"""

import re
from collections.abc import Sequence
from typing import Any

from meshtrain.parallel.tp_plan import STYLES, Split
from meshtrain.pipeline.partition import blocks_of

MIN_FEATURES = 128  # below, rounding the operands takes longer than the product
MULTIPLE = 16  # of features, as the kernels require
_LAYERS = ("Linear", "ColumnParallelLinear", "RowParallelLinear")
# Names in Hugging Face models. A rounded score could change a token's experts.
_ROUTERS = ("gate", "router")


def float8_layers(model: Any) -> tuple[list[str], list[str]]:
    """Names of a model's linear layers, split or not: those that multiply in float8, and the
    others.

    The former are inside the model's `blocks()` (a head is a block by itself), are not routers, and
    have at least `MIN_FEATURES` inputs and outputs, in multiples of `MULTIPLE`.
    """
    inside = set()
    for block in blocks_of(model):
        if block is not model:
            inside |= {module for module in block.modules() if module is not block}
    chosen: list[str] = []
    others: list[str] = []
    for name, module in model.named_modules():
        if type(module).__name__ not in _LAYERS:
            continue
        is_router = name.rpartition(".")[2] in _ROUTERS
        sizes = (module.in_features, module.out_features)
        fits = all(size >= MIN_FEATURES and size % MULTIPLE == 0 for size in sizes)
        if fits and module in inside and not is_router:
            chosen.append(name)
        else:
            others.append(name)
    return chosen, others


def name_pattern(name: str) -> str:
    """`model.layers.3.mlp.up_proj` as `model.layers.*.mlp.up_proj`, so that messages name each kind
    of layer once."""
    return re.sub(r"\b\d+\b", "*", name)


def float8_problems(model: Any, splits: Sequence[Split] = (), tp: int = 1) -> list[str]:
    """Why a plain model, split like this, cannot give the float8 results of one device, and what to
    do instead."""
    names, _ = float8_layers(model)
    if not names:
        return [
            f"{type(model).__name__} has no linear layer inside of its blocks() with at least "
            f"{MIN_FEATURES} inputs and outputs, multiples of {MULTIPLE}: use null"
        ]
    heads: dict[str, int] = {}  # kind of layer -> its heads
    parts: dict[str, int] = {}  # kind of layer -> its features
    for split in splits:
        if split.layer not in names:
            continue
        kind = name_pattern(split.layer)
        if split.everywhere:
            # Each rank would round its own queries' contribution to a head's gradient.
            heads[kind] = split.heads
            continue
        dim = STYLES[split.style].dim
        if dim is None:
            continue
        layer = model.get_submodule(split.layer)
        size = (layer.out_features, layer.in_features)[dim]
        part = -(-size // tp)  # of every rank except the last ones (torch.chunk)
        last_ranks_are_empty = part * (tp - 1) >= size
        if last_ranks_are_empty:
            parts[kind] = size
    way_out = f"cannot be split over tp {tp}: use a smaller tp, or null"
    problems = []
    if heads:
        problems.append(f"{', '.join(heads)}, of {min(heads.values())} heads, {way_out}")
    if parts:
        problems.append(f"{', '.join(parts)}, where each rank needs a feature, {way_out}")
    return problems
