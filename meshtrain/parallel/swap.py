"""Puts tensor-parallel layers in the places of a model's plain ones."""

from collections.abc import Mapping, Sequence
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
from meshtrain.split import Split, replicated

PARALLEL = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


def swap_layers(
    model: nn.Module,
    splits: Sequence[Split],
    mesh: Mesh,
    *,
    plan: Mapping[str, str],
    sequence_parallel: bool,
    regather: bool,
) -> None:
    """Replaces each layer that is split by its parallel kind, under the same name, with this rank's part of its weight.

    Layers that shared a weight still do. Column-parallel layers of one module that take inputs of one width are made
    siblings: they gather together when they are called with the same tensor. Parameters of the plan's style REPLICATED
    are remembered for `sum_partial_gradients`.
    """
    for module, name in replicated(model, plan):
        vars(module).setdefault("partial_over_tp", set()).add(name)
    held: dict[Tensor, nn.Parameter] = {}  # a plain weight -> what has taken its place
    families: dict[tuple[nn.Module, int], list[ColumnParallelLinear]] = {}
    for split in splits:
        above, _, name = split.layer.rpartition(".")
        parent = model.get_submodule(above)
        plain = getattr(parent, name)
        layer = _parallel(split, plain, mesh, sequence_parallel, regather)
        layer.weight = held.setdefault(plain.weight, layer.weight)
        layer.train(plain.training)
        setattr(parent, name, layer)
        if isinstance(layer, ColumnParallelLinear) and not layer.whole:
            families.setdefault((parent, layer.in_features), []).append(layer)
    for (parent, _), family in families.items():
        siblings(family, parent)


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


def sum_partial_gradients(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool) -> None:
    """From now on a step's last backward ends with whole gradients of what tensor ranks all hold and each used in part.

    Args:
        model: parallelized, whole or a stage, which need not have any parallel layer itself.
        sequence_parallel: what the whole model was split with.
    """
    found = [
        (module, name)
        for module, name in partial_parameters(model, sequence_parallel)
        if module._parameters[name].requires_grad  # type: ignore[union-attr]
    ]
    if found:
        sync_when_last(model, PartialSums(model, found, channel(mesh, AXIS)))


def partial_parameters(model: nn.Module, sequence_parallel: bool) -> list[tuple[nn.Module, str]]:
    """Parameters that each rank uses in part, as a module and the name there.

    With sequence sharding that is every parameter that is not split; without it, a rank sees whole samples everywhere
    but between a column-wise and a row-wise layer, and the plan says what lies there.
    """
    layers = [module for module in model.modules() if isinstance(module, PARALLEL)]
    split = {parameter for layer in layers for parameter in layer.parameters(recurse=False)}
    found: dict[Tensor, tuple[nn.Module, str]] = {}
    for module in model.modules():
        if isinstance(module, PARALLEL):
            names = module.partial_parameters()
        else:
            between = vars(module).get("partial_over_tp", ())
            own = module.named_parameters(recurse=False)
            names = [name for name, p in own if p not in split and (sequence_parallel or name in between)]
        for name in names:
            parameter = module._parameters[name]
            assert parameter is not None  # it has just been named
            found.setdefault(parameter, (module, name))
    return list(found.values())
