"""LoRA: low-rank adapters of linear layers (https://arxiv.org/abs/2106.09685), and frozen
parameters.

    y = W x + alpha / rank · B A dropout(x)

A layer keeps its class and its parameter names. `lora_A` (rank, d) and `lora_B` (f, rank), peft's
names, are child layers whose output a hook adds. Over `tp` they are split like the layer
(`tp_plan.style_of_layer`): for a column-wise layer B is column-wise and gathers `rank` features per
token, for a row-wise one A is row-wise and sums as many.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.dropout import Dropout
from meshtrain.parallel.sharding import local_part
from meshtrain.parallel.tp_plan import LORA_A, LORA_B
from meshtrain.pipeline.partition import blocks_of

# Initial values as in peft: those of an nn.Linear, and zeros, so that the model starts equal to the
# base model.
INIT_PLAN: Mapping[str, str] = {
    f"*.{LORA_A}.weight": "kaiming_uniform",
    f"*.{LORA_B}.weight": "zeros",
}


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the parameters whose names match: no gradient, no optimizer state, and no change by a
    step."""
    for name, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module.named_parameters(recurse=False):
            full_name = f"{name}.{own}".lstrip(".")
            if not any(fnmatchcase(full_name, pattern) for pattern in patterns):
                continue
            parameter.requires_grad_(False)
            balance: Any = getattr(module, "balance", None)
            if own == "e_score_correction_bias" and balance is not None:
                balance.bias_speed = 0.0  # otherwise it changes without a gradient


def adapted_layers(model: nn.Module, match: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers inside a model's blocks whose names match a pattern; without patterns all
    of them. Excludes layers that are blocks themselves, such as a head, and layers with a tied
    weight."""
    blocks = blocks_of(model)
    inside = {module for block in blocks for module in block.modules()} - set(blocks)
    uses: Counter[Any] = Counter(
        parameter for module in model.modules() for parameter in module._parameters.values()
    )
    patterns = match or ("*",)
    layers: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module not in inside or uses[module.weight] > 1:
            continue
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            layers[name] = module
    return layers


def add_adapters(
    model: nn.Module, match: Sequence[str], rank: int, alpha: float, dropout: float
) -> None:
    """Freezes a plain model and adds an adapter to each layer of `adapted_layers`; `initialise`
    gives it values."""
    layers = adapted_layers(model, match)
    freeze(model, ["*"])
    for layer in layers.values():
        device, dtype = layer.weight.device, layer.weight.dtype
        lora_a = nn.Linear(layer.in_features, rank, bias=False, device=device, dtype=dtype)
        lora_b = nn.Linear(rank, layer.out_features, bias=False, device=device, dtype=dtype)
        _attach(layer, lora_a, lora_b, Dropout(dropout), alpha / rank)


def move_adapter(plain: nn.Module, layer: nn.Module, columns: slice | None = None) -> None:
    """Moves the adapter of a plain layer, if any, to the layer that replaces it. `columns`: this
    rank's part of its inputs, if they are split."""
    if not has_adapter(plain):
        return
    own: Any = plain
    if columns is not None:
        own.lora_dropout.columns = own.in_features, columns
    _attach(layer, own.lora_A, own.lora_B, own.lora_dropout, own.lora_scale)


def has_adapter(module: nn.Module) -> bool:
    return LORA_A in module._modules


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return any(fnmatchcase(name, pattern) for pattern in INIT_PLAN)


def _attach(layer: nn.Module, lora_a: Any, lora_b: Any, dropout: Any, scale: Any) -> None:
    layer.lora_A = lora_a
    layer.lora_B = lora_b
    layer.lora_dropout = dropout
    layer.lora_scale = scale
    layer.register_forward_hook(_add, with_kwargs=True)


def _add(
    layer: Any, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
) -> Tensor:
    """A function, not a closure, because a model with hooks is copied by pickle."""
    x = inputs[0] if inputs else named["input"]
    low_rank = layer.lora_A(layer.lora_dropout(x))  # (..., rank)
    return output + layer.lora_scale * layer.lora_B(low_rank)


def merged(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """W + scale · B A: (f, d) plus the scaled product of (f, rank) and (rank, d), rounded once."""
    return (weight.double() + scale * (lora_b.double() @ lora_a.double())).to(weight.dtype)


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Adds the adapters of a model, on any layout, to its weights, and zeroes them. All ranks call
    it together."""
    model.state_dict()  # under FSDP this frees gathered parameters
    for module in model.modules():
        if not has_adapter(module):
            continue
        layer: Any = module
        lora_a = _whole(layer.lora_A.weight)
        lora_b = _whole(layer.lora_B.weight)
        local, (rows, columns) = local_part(layer.weight.detach())
        local.copy_(merged(local, lora_a[:, columns], lora_b[rows], layer.lora_scale))
        own_part, _ = local_part(layer.lora_B.weight.detach())
        own_part.zero_()


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
