"""Tensor parallelism: each rank of `tp` holds a part of a layer's weight and computes with it.

The weight is a DTensor, so FSDP, the optimizer, clipping and checkpoints see one tensor and its
parts; the forward computes on the local part, and every communication is explicit (Shoeybi et al.,
https://arxiv.org/abs/1909.08053). A pair of layers needs one sum of activations each way: with
W1 (f, d) split by rows and W2 (d, f) by columns, rank i has f/t of the f hidden features, and

    Y_i = act(X W1_i^T)     ColumnParallelLinear      forward: -               backward: sum of dX
    Z   = sum_i Y_i W2_i^T  RowParallelLinear         forward: sum             backward: -

With sequence parallelism each rank has its part of the sequence between such pairs (Korthikanti et
al., https://arxiv.org/abs/2205.05198): tensors are (b, s/t, d) there, and (b, s, ...) inside. The
sums become reduce-scatters, and where there was nothing is an all-gather: the same bytes. Tensors
lie in memory as (s, b, d), of which a model sees a transposed view: so gathering the sequence, the
outermost dim, needs no copy. `tp_linear.py` has the products with their communication.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshtrain.errors import InputError
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import (
    AllGather,
    AllReduce,
    ReduceScatter,
    SumGradient,
    axis_group,
    gather_features,
    own_features,
)
from meshtrain.parallel.grad_sync import TPGradSync, add_gradient_sync
from meshtrain.parallel.linear import ProductsLayer
from meshtrain.parallel.linear.lora import move_adapter
from meshtrain.parallel.linear.shared_input import SharedInput, share_input, split_outputs
from meshtrain.parallel.row_exchange import RowExchange
from meshtrain.parallel.sharding import chunk_range, contiguous_strides
from meshtrain.parallel.torch_private import for_product, plain_part, to_local
from meshtrain.parallel.tp_linear import (
    ColumnParallelMatmul,
    RowParallelMatmul,
    flatten_tokens,
    unflatten_tokens,
)
from meshtrain.parallel.tp_plan import (
    STYLES,
    Heads,
    Split,
    styled_parameters,
    unequal_parts,
    unsupported_options,
)

AXIS = "tp"
GROUPS = "num_key_value_groups"  # Hugging Face's name


@dataclass(frozen=True)
class TensorParallel:
    """How a model is split over the mesh's `tp`, and the factory of its parallel layers (see
    `tp_plan.Style.apply`)."""

    mesh: Mesh
    plan: Mapping[str, str]
    splits: Sequence[Split]  # the splits of the model's layers, from the plan
    sequence_parallel: bool = True
    regather: bool = False

    def column_parallel(self, plain: Any, **options: Any) -> "ColumnParallelLinear":
        return ColumnParallelLinear(
            plain,
            self.mesh,
            sequence_parallel=self.sequence_parallel,
            regather=self.regather,
            **options,
        )

    def row_parallel(self, plain: Any, *, splits_input: bool) -> "RowParallelLinear":
        return RowParallelLinear(
            plain,
            self.mesh,
            sequence_parallel=self.sequence_parallel,
            splits_input=splits_input,
        )

    def vocab_parallel(self, plain: Any, *, splits_sequence: bool) -> "VocabParallelEmbedding":
        sequence_parallel = splits_sequence and self.sequence_parallel
        return VocabParallelEmbedding(plain, self.mesh, sequence_parallel=sequence_parallel)

    def feature_parallel(self, plain: Any) -> "FeatureParallelEmbedding":
        return FeatureParallelEmbedding(plain, self.mesh)

    def sequence_gather(self) -> "SequenceGather":
        return SequenceGather(self.mesh, self.sequence_parallel)

    def sum_gradients(self, module: Any, parameters: Sequence[str]) -> None:
        """Marks parameters of which each rank has only a part of the gradient, for
        `sum_partial_gradients`."""
        vars(module).setdefault("partial_over_tp", set()).update(parameters)

    def sum_gradient_of_last(self, layer: nn.Module, width: int) -> None:
        """Sums the gradient of a layer's last `width` outputs over the ranks."""
        name = axis_group(self.mesh, AXIS).name
        layer.register_forward_hook(partial(_sum_gradient_of_last, width=width, group=name))

    def split_parameters(self, module: nn.Module, names: Sequence[str]) -> None:
        """Gives each rank its part of parameters, which the module's forward sees as plain
        tensors."""
        for name in names:
            whole = module._parameters[name]
            assert whole is not None  # the name is from this module
            module._parameters[name] = shard_parameter(whole, self.mesh, Shard(0))
        vars(module)["split_over_tp"] = tuple(names)
        kind: Any = type(module)
        module.__class__ = _with_local_parameters(kind, tuple(names))


def _sum_gradient_of_last(
    layer: nn.Module, inputs: Any, output: Tensor, *, width: int, group: str
) -> Tensor:
    others, last = output.split([output.shape[-1] - width, width], -1)
    return torch.cat([others, SumGradient.apply(last, group)], -1)


@cache
def _with_local_parameters(kind: Any, names: tuple[str, ...]) -> Any:
    """A class of modules whose parameters with these names are read as this rank's part of them."""

    def local(name: str) -> property:
        def read(module: nn.Module) -> Tensor:
            parameter: Any = module._parameters[name]
            # Between forwards FSDP looks for its own shard, over a mesh with its axis, under this
            # name. It has gathered what a forward reads.
            if parameter.device_mesh.ndim > 1:
                return parameter
            return to_local(parameter)

        return property(read)

    return type(
        kind.__name__,
        (kind,),
        {name: local(name) for name in names} | {"__module__": kind.__module__},
    )


def replace_layers(model: nn.Module, tp: TensorParallel) -> None:
    """Replaces each split layer by its parallel version, under the same name, with this rank's part
    of its weight. Shared parameters stay shared. Column-parallel layers of a module with inputs of
    equal width share a gather."""
    sharded: dict[Tensor, nn.Parameter] = {}  # plain parameter -> its replacement
    columns: dict[tuple[nn.Module, int], list[ColumnParallelLinear]] = {}
    for split in (*styled_parameters(model, tp.plan), *tp.splits):
        plain: Any = model.get_submodule(split.layer)
        style = STYLES[split.style]
        layer = style.apply(plain, split, tp)
        if layer is plain:
            continue

        # A parameter that another layer has, too, is the same object in both again.
        for own, parameter in list(layer.named_parameters(recurse=False)):
            original = getattr(plain, own, None)
            if original is not None:
                setattr(layer, own, sharded.setdefault(original, parameter))
        inputs = None
        if style.takes_part:
            inputs = chunk_range(plain.in_features, tp.mesh.size(AXIS), tp.mesh.index(AXIS))
        move_adapter(plain, layer, inputs)
        layer.train(plain.training)

        above, _, name = split.layer.rpartition(".")
        parent = model.get_submodule(above)
        setattr(parent, name, layer)
        if isinstance(layer, ColumnParallelLinear) and layer.use_local_output:
            columns.setdefault((parent, layer.in_features), []).append(layer)
            _count_groups(parent, layer)
    for (parent, _), layers in columns.items():
        share_input(layers, parent)


def _count_groups(attention: Any, layer: "ColumnParallelLinear") -> None:
    """Attention of Hugging Face keeps how many query heads share a key head, which differs on a
    rank that holds other heads than its queries need."""
    if layer.heads is None or not isinstance(attention.__dict__.get(GROUPS), int):
        return
    setattr(attention, GROUPS, layer.heads.shared_by)


def sum_partial_gradients(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Makes a step's last backward sum the gradients of `partial_parameters` over `tp`; a stage may
    have none."""
    parameters = [
        (module, name)
        for module, name in partial_parameters(model, sequence_parallel)
        if module._parameters[name].requires_grad  # type: ignore[union-attr]
    ]
    if parameters:
        add_gradient_sync(model, TPGradSync(model, parameters, axis_group(mesh, AXIS)))


def partial_parameters(model: nn.Module, sequence_parallel: bool) -> list[tuple[nn.Module, str]]:
    """(module, name) of parameters of which each rank has a part of the gradient: with sequence
    parallelism all unsplit ones, except experts over `ep`; without it those that the plan names,
    between column- and row-wise layers."""
    split: set[Tensor] = set()
    for module in model.modules():
        if isinstance(module, TensorParallelLayer):
            split.update(module.parameters(recurse=False))

    partial: dict[Tensor, tuple[nn.Module, str]] = {}  # a shared parameter once
    for module in model.modules():
        if getattr(module, "dispatch", None) is not None:  # experts over `ep`
            continue
        for name in _partial_names(module, split, sequence_parallel):
            parameter = module._parameters[name]
            assert parameter is not None  # the name is from this module
            partial.setdefault(parameter, (module, name))
    return list(partial.values())


def _partial_names(module: nn.Module, split: set[Tensor], sequence_parallel: bool) -> list[str]:
    if isinstance(module, TensorParallelLayer):
        return module.partial_parameters()
    between = vars(module).get("partial_over_tp", ())
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if parameter not in split
        and name not in vars(module).get("split_over_tp", ())
        and (sequence_parallel or name in between)
    ]


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Inside, each rank of `tp` has whole sequences between layers, as without sequence
    parallelism, because a single token cannot be split. Only for forwards without backward."""
    layers = [module for module in model.modules() if isinstance(module, TensorParallelLayer)]
    layers = [layer for layer in layers if layer.sequence_parallel]
    for layer in layers:
        layer.sequence_parallel = False
    try:
        yield
    finally:
        for layer in layers:
            layer.sequence_parallel = True


class TensorParallelLayer(nn.Module):
    """A layer over `tp`. With `sequence_parallel`, inputs and outputs are parts of the sequence or
    of the features."""

    def __init__(self, mesh: Mesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis_group = axis_group(mesh, AXIS)
        self.sequence_parallel = sequence_parallel

    def partial_parameters(self) -> list[str]:
        """Names of the layer's parameters that each rank holds whole, but with only a part of their
        gradient."""
        return []


class ColumnParallelLinear(ProductsLayer, TensorParallelLayer):
    """Y_i = X W_i^T: a linear layer whose f outputs are split over `tp`, (b, s, d) -> (b, s, f/t).

    Backward: dX = sum_i dY_i W_i over the ranks, and dW_i = dY_i^T X on each. With sequence
    parallelism it gathers its input (b, s/t, d) first, and dX is reduce-scattered. After
    `share_input`, layers with the same input (q, k and v) share gather and sum.
    """

    def __init__(
        self,
        plain: nn.Linear,
        mesh: Mesh,
        *,
        sequence_parallel: bool = True,
        regather: bool = False,
        heads: Heads | None = None,
        used: Sequence[Sequence[slice]] | None = None,
        gather_output: bool = False,
        use_local_output: bool = True,
    ) -> None:
        """
        Args:
            plain: the unsplit layer, on any device, meta included.
            sequence_parallel: the input is this rank's part of the sequence.
            regather: save only that part for backward, and gather it again.
            heads: this rank's key/value heads, if there are too few to split; all ranks then hold
                the whole weight.
            used: the rows of the weight that each rank uses, if these are others than its part.
            gather_output: return the outputs of all ranks.
            use_local_output: false: return the output as a DTensor that represents the whole
                output.
        """
        super().__init__(mesh, sequence_parallel)
        self.mesh = mesh
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.regather = regather
        self.heads = heads
        self.gather_output = gather_output
        self.use_local_output = use_local_output
        self.exchange = None
        if used is not None:
            self.exchange = RowExchange(self.axis_group, plain.out_features, used)
        placement = Shard(0) if heads is None else Replicate()
        self.weight = shard_parameter(plain.weight, mesh, placement)
        self.bias = None if plain.bias is None else shard_parameter(plain.bias, mesh, placement)
        self.shared_input = SharedInput([self])

    def forward(self, input: Tensor) -> Tensor:  # named as in torch
        return self.shared_input.output(self, input)

    @staticmethod
    def outputs(
        layers: Sequence["ColumnParallelLinear"], x: Tensor, weight: Tensor | None
    ) -> list[Tensor]:
        """The outputs of layers with the same input x. `weight`: their concatenated weights, if
        they are merged."""
        first = layers[0]
        sequence = first.sequence_parallel
        weights = [layer.weight_for_product() for layer in layers]
        products = ColumnParallelMatmul.apply(
            flatten_tokens(x, sequence),
            first.axis_group,
            sequence,
            not first.regather,  # whether the gathered input is kept for backward
            first.products,
            first.weight_grad_queue,
            *(weights if weight is None else [weight]),
        )
        if weight is not None:
            products = split_outputs(products[0], [len(plain_part(rows)) for rows in weights])

        shape = list(x.shape)
        if sequence:
            shape[-2] *= first.axis_group.size
        outputs = []
        for layer, product in zip(layers, products, strict=True):
            outputs.append(layer.output_of(unflatten_tokens(product, shape, sequence)))
        return outputs

    def weight_for_product(self) -> Tensor:
        """The rows of the weight that this rank uses, as `ColumnParallelMatmul` takes them."""
        return for_product(self.weight) if self.uses_own_rows else self.rows_of(self.weight)

    def rows_of(self, parameter: Tensor) -> Tensor:
        """The rows of the weight or bias that this rank uses."""
        rows = to_local(parameter)
        if self.exchange is not None:
            return self.exchange.used(rows)
        return rows if self.heads is None else rows[self.heads.rows]

    @property
    def uses_own_rows(self) -> bool:
        """Whether it multiplies by the rows that it holds."""
        return self.heads is None and self.exchange is None

    def output_of(self, product: Tensor) -> Tensor:
        """The layer's output from the product (b, s, rows): plus bias, with heads repeated, or as a
        part of a DTensor."""
        y = product
        if self.bias is not None:
            y = y + self.rows_of(self.bias)
        if self.heads is not None and self.heads.repeated is not None:
            # an index tensor would have to be on the device
            heads = y.unflatten(-1, (-1, self.heads.width)).unbind(-2)
            y = torch.stack([heads[i] for i in self.heads.repeated], dim=-2).flatten(-2)
        if self.gather_output:
            return gather_features(y, self.out_features, self.axis_group)
        if self.use_local_output:
            return y
        shape = torch.Size((*y.shape[:-1], self.out_features))
        return DTensor.from_local(
            y,
            self.mesh.submesh(AXIS),
            [Shard(y.dim() - 1)],
            run_check=False,
            shape=shape,
            stride=contiguous_strides(shape),
        )

    def partial_parameters(self) -> list[str]:
        if self.heads is None:
            return []
        return [name for name, _ in self.named_parameters(recurse=False)]

    def extra_repr(self) -> str:
        if self.heads is None:
            return _shape(self)
        return f"{_shape(self)}, {self.heads.count} heads held by all"


class RowParallelLinear(ProductsLayer, TensorParallelLayer):
    """Y = sum_i X_i W_i^T over the ranks: a linear layer whose f inputs are split over `tp`,
    (b, s, f/t) -> (b, s, d), or with sequence parallelism (b, s/t, d) by a reduce-scatter.

    Backward: dX_i = dY W_i and dW_i = dY^T X_i on each rank, with sequence parallelism after
    gathering dY. The bias is added to the sum.
    """

    def __init__(
        self,
        plain: nn.Linear,
        mesh: Mesh,
        *,
        sequence_parallel: bool = True,
        splits_input: bool = False,
    ) -> None:
        """
        Args:
            plain: the unsplit layer, on any device, meta included.
            sequence_parallel: the output is this rank's part of the sequence.
            splits_input: the input has all features, of which each rank takes its part.
        """
        super().__init__(mesh, sequence_parallel)
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.splits_input = splits_input
        self.weight = shard_parameter(plain.weight, mesh, Shard(1))
        self.bias = None if plain.bias is None else shard_parameter(plain.bias, mesh, Replicate())

    def forward(self, input: Tensor) -> Tensor:  # named as in torch
        sequence = self.sequence_parallel
        if self.splits_input:
            input = own_features(input, self.axis_group)
        product = RowParallelMatmul.apply(
            input,
            for_product(self.weight),
            self.axis_group,
            sequence,
            self.products,
            self.weight_grad_queue,
        )
        shape = list(input.shape)
        if sequence:
            shape[-2] //= self.axis_group.size
        y = unflatten_tokens(product, shape, sequence)
        if self.bias is not None:
            y = y + to_local(self.bias)
        return y

    def partial_parameters(self) -> list[str]:
        # With sequence parallelism a rank sees only its tokens' share of the bias's gradient.
        if self.bias is None or not self.sequence_parallel:
            return []
        return ["bias"]

    def extra_repr(self) -> str:
        return _shape(self)


class ParallelEmbedding(TensorParallelLayer):
    """An embedding whose weight is split over `tp`. A class derived from nn.Embedding, which may
    scale what it looks up, does so with this rank's part."""

    def __init__(
        self, plain: nn.Embedding, mesh: Mesh, placement: Shard, *, sequence_parallel: bool
    ) -> None:
        """Raises ValueError: `plain` has an option that is not supported when split
        (`unsupported_options`)."""
        super().__init__(mesh, sequence_parallel)
        problems = unsupported_options(plain)
        if problems:
            raise ValueError("; ".join(problems))
        self.num_embeddings = plain.num_embeddings
        self.embedding_dim = plain.embedding_dim
        self.padding_idx = plain.padding_idx
        self.weight = shard_parameter(plain.weight, mesh, placement)
        for name, buffer in plain.named_buffers():
            persistent = name not in plain._non_persistent_buffers_set
            self.register_buffer(name, buffer, persistent=persistent)
        self.plain_class = type(plain)
        self.settings = {
            name: value for name, value in vars(plain).items() if not name.startswith("_")
        }

    def look_up(self, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """What the plain layer returns for these rows of its weight, or these features of them."""
        if self.plain_class.forward is nn.Embedding.forward:
            return F.embedding(tokens, weight, padding)
        layer = nn.Embedding.__new__(self.plain_class)
        nn.Module.__init__(layer)
        vars(layer).update(self.settings, training=self.training, padding_idx=padding)
        layer._buffers = self._buffers
        layer._parameters["weight"] = weight  # type: ignore[assignment]
        return self.plain_class.forward(layer, tokens)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.axis_group.size}"


class VocabParallelEmbedding(ParallelEmbedding):
    """An embedding with its v rows split over `tp`: each rank looks up the tokens of its rows, has
    zeros for the others, and a sum over the ranks completes them: (b, s) -> (b, s, d), or with
    sequence parallelism (b, s/t, d)."""

    def __init__(self, plain: nn.Embedding, mesh: Mesh, *, sequence_parallel: bool = True) -> None:
        super().__init__(plain, mesh, Shard(0), sequence_parallel=sequence_parallel)

    def forward(self, input: Tensor) -> Tensor:  # named as in torch
        length, size = input.shape[-1], self.axis_group.size
        if self.sequence_parallel and length % size:
            # No AgreedError: other data ranks, and other stages, do not see this sample.
            raise InputError(unequal_parts(f"a sample of {length} tokens", length, size))
        # (s, b), because the sequence is the dim that is scattered
        tokens = input.transpose(0, -1) if self.sequence_parallel else input

        # An id that the vocabulary lacks belongs to the first or the last rank, whose lookup fails
        # as a plain one does.
        own = chunk_range(self.num_embeddings, size, self.axis_group.index)
        from_start, to_end = own.start == 0, own.stop == self.num_embeddings
        mine = ((tokens >= own.start) | from_start) & ((tokens < own.stop) | to_end)
        weight = to_local(self.weight)
        if weight.shape[0] > 0:
            # The rank that has the row of a padding_idx keeps it without a gradient, as the plain
            # layer does.
            padding = self.padding_idx
            if padding is not None:
                padding = padding - own.start if own.start <= padding < own.stop else None
            rows = self.look_up(torch.where(mine, tokens - own.start, 0), weight, padding)
        else:
            # More ranks than parts: nothing to look up, but the other ranks wait for this rank's
            # contribution, and its weight has a gradient.
            rows = weight.sum() * weight.new_ones(*tokens.shape, self.embedding_dim)
        rows = rows * mine[..., None].to(rows.dtype)

        if self.sequence_parallel:
            return ReduceScatter.apply(rows, self.axis_group.name).transpose(0, -2)
        return AllReduce.apply(rows, self.axis_group.name)


class FeatureParallelEmbedding(ParallelEmbedding):
    """An embedding of which each rank has d/t features of every row, and gathers the others:
    (b, s) -> (b, s, d)."""

    def __init__(self, plain: nn.Embedding, mesh: Mesh) -> None:
        super().__init__(plain, mesh, Shard(1), sequence_parallel=False)

    def forward(self, input: Tensor) -> Tensor:  # named as in torch
        rows = self.look_up(input, to_local(self.weight), self.padding_idx)
        return gather_features(rows, self.embedding_dim, self.axis_group)


class SequenceGather(TensorParallelLayer):
    """Gathers a tensor that every rank needs whole for its own heads: (b, s/t, e) -> (b, s, e), the
    same on all ranks. Without sequence parallelism each rank already has it, and only its gradient
    is summed over the ranks."""

    def forward(self, input: Tensor) -> Tensor:  # named as in torch
        if not self.sequence_parallel:
            return SumGradient.apply(input, self.axis_group.name)
        return AllGather.apply(input.movedim(-2, 0), self.axis_group.name).movedim(0, -2)


def shard_parameter(
    parameter: Tensor, mesh: Mesh, placement: Placement, axis: str = AXIS
) -> nn.Parameter:
    """A DTensor parameter of which this rank holds its part, with the values of the plain
    `parameter`."""
    submesh = mesh.submesh(axis)
    assert submesh is not None  # the axis is larger than 1
    part = parameter.data
    if isinstance(placement, Shard):
        dim = placement.dim
        rows = chunk_range(parameter.shape[dim], mesh.size(axis), mesh.index(axis))
        # a copy, so that the whole is freed
        part = part.narrow(dim, rows.start, rows.stop - rows.start)
        part = part.clone(memory_format=torch.contiguous_format)
    sharded = DTensor.from_local(
        part,
        submesh,
        [placement],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _shape(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    return (
        f"{layer.in_features}, {layer.out_features}, bias={layer.bias is not None}, "
        f"tp={layer.axis_group.size}"
    )
