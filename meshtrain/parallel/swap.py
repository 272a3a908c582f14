"""Puts tensor-parallel layers in the places of a model's plain ones."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import channel
from meshtrain.parallel.data import sync_when_last
from meshtrain.parallel.partial import PartialSums
from meshtrain.parallel.tensor import (
    AXIS,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    siblings,
)
from meshtrain.split import Split

PARALLEL = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


def swap_layers(
    model: nn.Module, splits: Sequence[Split], mesh: Mesh, *, sequence_parallel: bool, regather: bool
) -> None:
    """Replaces each layer that is split by its parallel kind, under the same name, with this rank's part of its weight.

    Layers that shared a weight still do. Column-parallel layers of one module that take inputs of one width are made
    siblings: they gather together when they are called with the same tensor.
    """
    held: dict[Tensor, nn.Parameter] = {}  # a plain weight -> what has taken its place
    families: dict[tuple[str, int], list[ColumnParallelLinear]] = {}
    for split in splits:
        above, _, name = split.layer.rpartition(".")
        parent = model.get_submodule(above)
        plain = getattr(parent, name)
        layer = _parallel(split, plain, mesh, sequence_parallel, regather)
        layer.weight = held.setdefault(plain.weight, layer.weight)
        layer.train(plain.training)
        setattr(parent, name, layer)
        if isinstance(layer, ColumnParallelLinear) and not layer.whole:
            families.setdefault((above, layer.in_features), []).append(layer)
    for family in families.values():
        siblings(family)


def _parallel(split: Split, plain: Any, mesh: Mesh, sequence_parallel: bool, regather: bool) -> Any:
    if split.style == "embedding_rowwise":
        return VocabParallelEmbedding(plain, mesh, sequence_parallel=sequence_parallel)
    if split.style == "rowwise":
        return RowParallelLinear(plain, mesh, sequence_parallel=sequence_parallel)
    return ColumnParallelLinear(
        plain,
        mesh,
        sequence_parallel=sequence_parallel,
        regather=regather,
        heads=split.heads_of(mesh.size(AXIS), mesh.index(AXIS)),
        whole=split.style == "colwise_gather_output",
    )


def sum_partial_gradients(model: nn.Module, mesh: Mesh) -> None:
    """From now on a step's last backward ends with whole gradients of what tensor ranks all hold and each used in part.

    With sequence sharding that is every parameter that is not split; without it, each rank computes their whole
    gradients itself.
    """
    layers = [module for module in model.modules() if isinstance(module, PARALLEL)]
    shared = any(layer.sequence_parallel for layer in layers)
    split = {parameter for layer in layers for parameter in layer.parameters(recurse=False)}
    found: dict[Tensor, tuple[nn.Module, str]] = {}
    for module in model.modules():
        if isinstance(module, PARALLEL):
            names = module.partial_parameters()
        else:
            names = [name for name, p in module.named_parameters(recurse=False) if shared and p not in split]
        for name in names:
            parameter = module._parameters[name]
            assert parameter is not None  # it has just been named
            if parameter.requires_grad:
                found.setdefault(parameter, (module, name))
    if found:
        sync_when_last(model, PartialSums(model, list(found.values()), channel(mesh, AXIS)))
