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

# elements along the summed dim per scale; None: all
BLOCKS: dict[str, int | None] = {
    "float8": None,
    "mxfp8": 32,
}
MIN_FEATURES = 128  # below, rounding the operands takes longer than the product
_LAYERS = ("Linear", "ColumnParallelLinear", "RowParallelLinear")
# names in Hugging Face models; a rounded score could change a token's experts
_ROUTERS = (
    "gate",
    "router",
)


def float8_layers(model: Any, precision: str) -> tuple[list[str], list[str]]:
    """Names of a model's linear layers, split or not: those that multiply in a precision of
    `BLOCKS`, and the others.

    The former are inside the model's `blocks()` (a head is a block by itself), are not routers, and
    have at least `MIN_FEATURES` inputs and outputs, in multiples of 16 (MXFP8: 32), as the kernels
    require.
    """
    blocks = [block for block in blocks_of(model) if block is not model]
    inside = {module for block in blocks for module in block.modules() if module is not block}
    layers: tuple[list[str], list[str]] = [], []
    for name, module in model.named_modules():
        if type(module).__name__ in _LAYERS:
            sizes = module.in_features, module.out_features
            fits = all(n >= MIN_FEATURES and n % (BLOCKS[precision] or 16) == 0 for n in sizes)
            chosen = fits and module in inside and name.rpartition(".")[2] not in _ROUTERS
            layers[not chosen].append(name)
    return layers


def name_pattern(name: str) -> str:
    """`model.layers.3.mlp.up_proj` as `model.layers.*.mlp.up_proj`, so that messages name each kind
    of layer once."""
    return re.sub(r"\b\d+\b", "*", name)


def float8_problems(
    model: Any, precision: str, splits: Sequence[Split] = (), tp: int = 1
) -> list[str]:
    """Why a plain model, split like this, cannot give the float8 results of one device, and what to
    do instead."""
    names, multiple = float8_layers(model, precision)[0], BLOCKS[precision]
    if not names:
        sizes = f"at least {MIN_FEATURES} inputs and outputs, multiples of {multiple or 16}"
        return [
            f"{type(model).__name__} has no linear layer inside of its blocks() with {sizes}: use "
            "null"
        ]
    heads, parts = {}, {}  # used as ordered sets
    for split in (split for split in splits if split.layer in names):
        layer, dim, name = (
            model.get_submodule(split.layer),
            STYLES[split.style].dim,
            name_pattern(split.layer),
        )
        # each rank would round its own queries' contribution to a head's gradient
        if split.everywhere:
            heads[name] = split.heads
        elif dim is not None:
            size = (layer.out_features, layer.in_features)[dim]
            part = -(-size // tp)  # of every rank except the last ones (torch.chunk)
            if part % (multiple or 1) or part * (tp - 1) >= size:
                parts[name] = size
    way_out = f"cannot be split over tp {tp}: use a smaller tp, or null"
    problems = []
    if heads:
        problems.append(f"{', '.join(heads)}, of {min(heads.values())} heads, {way_out}")
    if parts:
        problems.append(
            f"{', '.join(parts)}, where each rank needs a multiple of {multiple or 1} features, "
            f"{way_out}"
        )
    return problems
