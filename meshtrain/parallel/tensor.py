"""Tensor-parallel layers: each rank of `tp` holds a part of a layer's weight and computes with it.

The weight is a DTensor, so FSDP, the optimizer, clipping and checkpoints see one tensor and its parts; the forward
computes on the local part, and every communication is a line here (Shoeybi et al., https://arxiv.org/abs/1909.08053).
Between the parallel regions each rank has its part of the sequence (Korthikanti et al., https://arxiv.org/abs/2205.05198):
tensors are (b, s/t, d) there, and (b, s, ...) inside. Their memory is in the order (s, b, d), and what a model sees is
a view: then gathering along the sequence is gathering along the outermost dim, and copies nothing.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves

from meshtrain.cuts import cut
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import AllReduce, ReduceScatter, channel
from meshtrain.parallel.later import Deferrable
from meshtrain.parallel.products import Columns, Row, from_rows, to_rows
from meshtrain.split import Heads

AXIS = "tp"


class ColumnParallelLinear(Deferrable, nn.Module):
    """A linear layer whose outputs are split over `tp`: (b, s, d) -> (b, s, f/t) of all f.

    With sequence sharding the input is (b, s/t, d) and is gathered. Layers that read the same input (q, k and v) share
    one gather, and one sum of the input's gradient, if they are made `siblings`.
    """

    def __init__(
        self,
        plain: nn.Linear,
        mesh: Mesh,
        *,
        sequence_parallel: bool = True,
        regather: bool = False,
        heads: Heads | None = None,
        whole: bool = False,
    ) -> None:
        """
        Args:
            plain: the layer as one device would have it; on any device, meta included.
            mesh: whose `tp` axis is larger than 1.
            sequence_parallel: the input is this rank's part of the sequence.
            regather: keep only that part for the backward, and gather it again.
            heads: of key/value heads that are too few for all ranks: every rank holds all of the weight, and computes
                those heads that its queries need.
            whole: return the output as a DTensor, which stands for all of it.
        """
        super().__init__()
        self.channel = channel(mesh, AXIS)
        self.sequence_parallel, self.regather, self.whole = sequence_parallel, regather, whole
        self.mesh = mesh
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.heads = heads
        placement = Shard(0) if heads is None else Replicate()
        self.weight = hold(plain.weight, mesh, placement)
        self.bias = None if plain.bias is None else hold(plain.bias, mesh, placement)
        self.family = Family([self])

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, d), or its part (b, s/t, d) -> (b, s, f/t)."""
        return self.family.output(self, x)

    def local(self, parameter: Tensor) -> Tensor:
        """The rows of the weight or bias that this rank computes with."""
        rows = local(parameter)
        return rows if self.heads is None else rows[self.heads.rows]

    def finish(self, y: Tensor) -> Tensor:
        if self.bias is not None:
            y = y + self.local(self.bias)
        if self.heads is not None and self.heads.repeated is not None:
            each = y.unflatten(-1, (-1, self.heads.width)).unbind(-2)  # no index, which would have to be on the device
            y = torch.stack([each[head] for head in self.heads.repeated], dim=-2).flatten(-2)
        if not self.whole:
            return y
        shape = (*y.shape[:-1], self.out_features)
        stride = torch.empty(shape, device="meta").stride()
        tp = self.mesh.submesh(AXIS)
        return DTensor.from_local(y, tp, [Shard(y.dim() - 1)], run_check=False, shape=torch.Size(shape), stride=stride)

    def partial_parameters(self) -> list[str]:
        """Names of the parameters whose gradients are to be summed over `tp`."""
        return [] if self.heads is None else [name for name, _ in self.named_parameters(recurse=False)]

    def extra_repr(self) -> str:
        return _shape(self) + (f", {self.heads.count} heads held by all" if self.heads else "")


class Family:
    """Column-parallel layers of a module that read the same input: the first that is called computes for all of them.

    Whether they do is not known before they are called. A module that was given two tensors of their width (as a cross
    attention is) may lead some of them to one and some to the other: then each layer computes for itself. Nothing is
    kept when the module's forward has ended.
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self._layers = list(layers)
        self._together = False
        self._input: Tensor | None = None
        self._ready: dict[ColumnParallelLinear, Tensor] = {}

    def begin(self, arguments: Sequence[Any]) -> None:
        """The module's forward begins, with these arguments."""
        width = self._layers[0].in_features
        given = [x for x in arguments if isinstance(x, Tensor) and x.shape[-1:] == (width,)]
        self._together = all(x is given[0] for x in given)

    def end(self) -> None:
        self._together, self._input, self._ready = False, None, {}

    def output(self, layer: ColumnParallelLinear, x: Tensor) -> Tensor:
        if self._ready and self._input is not x:  # they read different tensors after all
            self.end()
        if not self._together:
            return self._compute([layer], x)[0]
        if self._input is not x or layer not in self._ready:
            self._input, self._ready = x, dict(zip(self._layers, self._compute(self._layers, x), strict=True))
        y = self._ready.pop(layer)
        if not self._ready:
            self._input = None
        return y

    def _compute(self, layers: Sequence[ColumnParallelLinear], x: Tensor) -> list[Tensor]:
        first = layers[0]
        weights = [layer.local(layer.weight) for layer in layers]
        rows = to_rows(x, first.sequence_parallel)
        ys = Columns.apply(rows, first.channel, first.sequence_parallel, not first.regather, first.later, *weights)
        shape = list(x.shape)
        if first.sequence_parallel:
            shape[-2] *= first.channel.size
        return [layer.finish(from_rows(y, shape, layer.sequence_parallel)) for layer, y in zip(layers, ys, strict=True)]


def siblings(layers: Sequence[ColumnParallelLinear], module: nn.Module) -> None:
    """From now on these layers, which a module's forward calls gather a tensor that they share once."""
    if len(layers) == 1 or ("forward" in vars(module) and not hasattr(module, "families")):
        return
    family = Family(layers)
    for layer in layers:
        layer.family = family
    module.families = (*getattr(module, "families", ()), family)  # type: ignore[assignment]
    # Not by hooks, and the same function for all modules: a compiler would compile each block anew.
    module.forward = MethodType(_forward, module)


def _forward(module: nn.Module, *args: Any, **named: Any) -> Any:
    families: tuple[Family, ...] = module.families  # type: ignore[assignment]
    for family in families:
        family.begin(tree_leaves((args, named)))
    try:
        return type(module).forward(module, *args, **named)
    finally:
        for family in families:
            family.end()


class RowParallelLinear(Deferrable, nn.Module):
    """A linear layer whose inputs are split over `tp`: (b, s, f/t) of all f -> (b, s, d), summed over the ranks.

    With sequence sharding each rank gets its part of the sum, (b, s/t, d).
    """

    def __init__(self, plain: nn.Linear, mesh: Mesh, *, sequence_parallel: bool = True) -> None:
        """`plain`, `mesh`, `sequence_parallel`: as for ColumnParallelLinear."""
        super().__init__()
        self.channel = channel(mesh, AXIS)
        self.sequence_parallel = sequence_parallel
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight = hold(plain.weight, mesh, Shard(1))
        self.bias = None if plain.bias is None else hold(plain.bias, mesh, Replicate())

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, f/t) -> (b, s, d), or its part (b, s/t, d)."""
        y = Row.apply(x, local(self.weight), self.channel, self.sequence_parallel, self.later)
        shape = list(x.shape)
        if self.sequence_parallel:
            shape[-2] //= self.channel.size
        y = from_rows(y, shape, self.sequence_parallel)
        return y if self.bias is None else y + local(self.bias)

    def partial_parameters(self) -> list[str]:
        """Names of the parameters whose gradients are to be summed over `tp`."""
        return ["bias"] if self.bias is not None and self.sequence_parallel else []

    def extra_repr(self) -> str:
        return _shape(self)


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows, one per token of the vocabulary, are split over `tp`: (b, s) -> (b, s, d).

    With sequence sharding each rank gets its part of the sequence, (b, s/t, d).
    """

    def __init__(self, plain: nn.Embedding, mesh: Mesh, *, sequence_parallel: bool = True) -> None:
        """`plain`, `mesh`, `sequence_parallel`: as for ColumnParallelLinear.

        Raises ValueError for what a split embedding does not do: max_norm, scale_grad_by_freq, sparse, padding_idx.
        """
        super().__init__()
        for option in ("max_norm", "scale_grad_by_freq", "sparse", "padding_idx"):
            if getattr(plain, option) not in (None, False):
                raise ValueError(f"an embedding with {option} cannot be split over tp: leave {option} out")
        self.channel = channel(mesh, AXIS)
        self.sequence_parallel = sequence_parallel
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.weight = hold(plain.weight, mesh, Shard(0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (b, s) -> (b, s, d), or its part (b, s/t, d)."""
        weight = local(self.weight)
        own = cut(self.num_embeddings, self.channel.size, self.channel.index)
        ordered = tokens.transpose(0, -1) if self.sequence_parallel else tokens
        mine = (ordered >= own.start) & (ordered < own.stop)
        if weight.shape[0] > 0:
            found = F.embedding(torch.where(mine, ordered - own.start, 0), weight)
        else:  # more ranks than parts: nothing to look up, but the others wait for this rank's addend
            found = weight.sum() * weight.new_ones(*ordered.shape, self.embedding_dim)
        found = found * mine[..., None].to(found.dtype)
        if not self.sequence_parallel:
            return AllReduce.apply(found, self.channel.name)
        return ReduceScatter.apply(found, self.channel.name).transpose(0, -2)

    def partial_parameters(self) -> list[str]:
        """Names of the parameters whose gradients are to be summed over `tp`: none."""
        return []

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.channel.size}"


def hold(parameter: Tensor, mesh: Mesh, placement: Placement) -> nn.Parameter:
    """A parameter of which this rank holds its part, as a DTensor; the values of a plain one are taken over."""
    tp = mesh.submesh(AXIS)
    assert tp is not None  # the axis is larger than 1
    part = parameter.data
    if isinstance(placement, Shard):
        dim = placement.dim
        rows = cut(parameter.shape[dim], mesh.size(AXIS), mesh.index(AXIS))
        part = part.narrow(dim, rows.start, rows.stop - rows.start).clone(memory_format=torch.contiguous_format)
    whole = DTensor.from_local(part, tp, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def local(parameter: Tensor) -> Tensor:
    """The tensor that a parameter's part lies in, with a way for gradients."""
    if not isinstance(parameter, DTensor):
        return parameter
    # A compiler knows to_local, and leaves nothing of it in its graph.
    return parameter.to_local() if torch.compiler.is_compiling() else Local.apply(parameter)


class Local(torch.autograd.Function):
    """`DTensor.to_local` of a parameter, whose gradient lies where the parameter does: a third of the CPU time."""

    @staticmethod
    def forward(ctx: FunctionCtx, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        part = parameter._local_tensor
        return part.view_as(part)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor | None) -> DTensor | None:
        # None from a layer that hands its weight gradient over to be computed later.
        return None if grad is None else DTensor(grad, ctx.spec, requires_grad=False)  # type: ignore[attr-defined]


def _shape(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    return f"{layer.in_features}, {layer.out_features}, bias={layer.bias is not None}, tp={layer.channel.size}"
