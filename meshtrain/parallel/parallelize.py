"""Parallelization of a plain model over all axes but `pp`: `parallelize` has every kind of it in
nesting order. `apply_tensor_parallel` and `apply_expert_parallel` change layers, and
`apply_data_parallel` wraps them; attention exchanges keys over `cp` by itself (`context/`)."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from meshtrain.dropout import SequencePart, bind_dropout
from meshtrain.errors import InputError
from meshtrain.layout import NOT_WITH_FSDP
from meshtrain.mesh import Mesh
from meshtrain.parallel.activation_checkpoint import checkpoint_block
from meshtrain.parallel.activation_offload import ActivationOffload
from meshtrain.parallel.collectives import AxisGroup, axis_group
from meshtrain.parallel.compile import compile_block, while_one_graph
from meshtrain.parallel.context import ContextParallel
from meshtrain.parallel.ddp import (
    REPLICATE,
    BucketedAllReduce,
    BucketedReduceScatter,
    NamedParameter,
)
from meshtrain.parallel.expert import apply_expert_parallel, dispatched_modules
from meshtrain.parallel.fsdp import EXPERT_REPLICATE, EXPERT_SHARD, apply_fsdp
from meshtrain.parallel.grad_sync import add_gradient_sync
from meshtrain.parallel.host_link import set_link
from meshtrain.parallel.linear import Linear, use_products
from meshtrain.parallel.linear.float8 import apply_float8
from meshtrain.parallel.linear.matmul import PLAIN
from meshtrain.parallel.linear.shared_input import share_input
from meshtrain.parallel.linear.weight_grad import let_products_accumulate
from meshtrain.parallel.linear_cross_entropy import can_fuse, fuse_loss
from meshtrain.parallel.mixed_precision import (
    ComputeCopies,
    cast,
    cast_to_compute_dtype,
    compute_dtype,
    is_mixed,
    master_dtype,
    message_dtype,
)
from meshtrain.parallel.options import (
    ParallelOptions,
    context_parallel_of,
    tensor_parallel_of,
)
from meshtrain.parallel.predictions import prediction_heads
from meshtrain.parallel.sync_batch_norm import apply_sync_batch_norm
from meshtrain.parallel.tensor_parallel import replace_layers, sum_partial_gradients
from meshtrain.parallel.torch_private import (
    allocate,
    has_backward_hooks,
    never_compiled,
    own_parameters,
)
from meshtrain.parallel.tp_plan import NO_SEQUENCE, Colwise, plan_of, plan_splits_sequence, style_of
from meshtrain.parallel.verify import Moment, Subject, check_model
from meshtrain.pipeline.stage import OtherStageBlock, blocks_of, has_forward

__all__ = ["ParallelOptions", "parallelize"]  # the former is defined in options.py

# Devices on which layers with the same input (q, k and v; gate and up) may multiply by one merged
# weight. On CPUs one large product takes as long as several.
MERGED_ON = ("cuda",)


def parallelize(model: nn.Module, mesh: Mesh, **options: Any) -> nn.Module:
    """Parallelizes a plain model for any layout of data, tensor and context parallelism; on one
    rank it stays plain. With `cp` its inputs are those that `ContextParallel.shard` returns. On the
    mesh of a `Layout.with_experts(p)` its experts are distributed over p ranks.

    Returns the same object, with the same parameter names. Its backward ends with gradients summed
    over the data ranks and, where each has only a part, over the tensor ranks. The blocks of
    `blocks()` are the units that are gathered, compiled or recomputed; a model without `blocks()`
    is one block.

    Args:
        model: on the mesh's device; all ranks get the values of rank 0. Or, under FSDP, on the meta
            device.
        options: any of `ParallelOptions`, by name.

    Raises:
        InputError: the layout has `pp`, the model cannot be split, or it trains a batch norm on
            several data ranks.
    """
    if mesh.size("pp") > 1:
        raise InputError("parallelize spreads a model over all axes but pp: use pp: 1")
    settings = ParallelOptions(**options)
    prepare(model, mesh, settings)
    _warn_of_whole_sequences(model, mesh, settings)
    subject = Subject(model=model, layout=mesh.layout, mesh=mesh, options=settings)
    # The checks also settle options that are left open: they turn sequence parallelism off where
    # the model is right only without it.
    settings = check_model(Moment.PLAIN, subject)
    settings = apply_tensor_parallel(model, mesh, settings)
    apply_expert_parallel(model, mesh, settings)
    return apply_data_parallel(model, mesh, settings)


def prepare(model: nn.Module, mesh: Mesh, options: ParallelOptions) -> None:
    """Makes a plain model equal on all ranks: its values, their dtype, and its batch norms."""
    cast(model, master_dtype(options.precision))
    broadcast_parameters(model, mesh)
    if options.sync_batch_norm:
        apply_sync_batch_norm(model, mesh)


def broadcast_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Gives all ranks the values of rank 0, in contiguous memory, as NCCL and FSDP require."""
    group = mesh.world
    if group is None:
        return
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_meta:
                continue
            values = tensor.contiguous()
            dist.broadcast(values, group_src=0, group=group)
            if values is not tensor:
                tensor.copy_(values)


def _warn_of_whole_sequences(model: nn.Module, mesh: Mesh, options: ParallelOptions) -> None:
    """Warns if sequence parallelism is off because no embedding of the plan splits the sequence:
    nothing else shows that every rank of `tp` then holds the activations of all tokens."""
    if mesh.rank > 0 or mesh.size("tp") == 1 or options.sequence_parallel is not None:
        return
    if not plan_splits_sequence(plan_of(model, "tp_plan", options.tp_plan) or {}):
        warnings.warn(f"sequence_parallel is off: {NO_SEQUENCE}", stacklevel=3)


# Layers that are split over tp --------------------------------------------------------------------


def apply_tensor_parallel(
    model: nn.Module, mesh: Mesh, options: ParallelOptions
) -> ParallelOptions:
    """Splits a plain model's layers over `tp`. Returns the options, with whether ranks have parts
    of the sequence. Raises InputError: it has no plan, or one that does not fit it."""
    part = SequencePart(cp=mesh.size("cp"), cp_index=mesh.index("cp"))
    tp = tensor_parallel_of(model, mesh, options)
    if tp is None:
        bind_dropout(model, part)
        return options
    if tp.sequence_parallel:
        part = part._replace(tp=mesh.size("tp"), tp_index=mesh.index("tp"))
    bind_dropout(model, part, mesh.index("tp"))
    group = axis_group(mesh, "tp")  # one object, which all layers find by the mesh
    group.measured_wait = options.measured_wait
    _fuse_products_with_messages(group, mesh, options, sequence_parallel=tp.sequence_parallel)
    replace_layers(model, tp)
    vars(model)["has_sequence_part"] = tp.sequence_parallel  # see the function of that name
    return replace(options, sequence_parallel=tp.sequence_parallel)


def _fuse_products_with_messages(
    group: AxisGroup, mesh: Mesh, options: ParallelOptions, *, sequence_parallel: bool
) -> None:
    """Lets products and their messages run as one kernel, by `parallel.symmetric_memory`."""
    if options.symmetric_memory is True:
        group.fuse()
        return
    is_auto = options.symmetric_memory == "auto"
    # Only the messages of sequence parallelism have such kernels, and only on GPUs.
    has_kernels = sequence_parallel and not group.on_cpu
    # Stages of a rank share the group: the first has asked the others of `tp` for all of them.
    is_decided = bool(group.choice)
    if is_auto and has_kernels and not is_decided:
        group.fuse_if_possible(torch.device(mesh.device_type))


def has_sequence_part(model: nn.Module, default: bool | None = None) -> bool | None:
    """Whether each rank of `tp` has a part of the sequence between the layers of a parallelized
    model or stage."""
    return vars(model).get("has_sequence_part", default)


# What is wrapped around them ----------------------------------------------------------------------


def apply_data_parallel(model: nn.Module, mesh: Mesh, options: ParallelOptions) -> nn.Module:
    """The second half of `parallelize`, of a whole model or a stage: precision, recomputation and
    compilation of blocks, then DDP, FSDP or HSDP."""
    _warn_of_containers(model, mesh, options)
    blocks = _unit_blocks(model, options)
    experts = dispatched_modules(model)
    _choose_products(model, mesh, options)
    _fuse_loss(model, options)
    if options.offload != "none":
        set_link(model, options.host_link, of_states=options.offloads_optimizer)
    _wrap_blocks(model, blocks, experts, mesh, options)
    _share_samples(model, mesh, options)
    if mesh.uses_fsdp:
        apply_fsdp(
            model,
            blocks,
            mesh,
            precision=options.precision,
            reduce_precision=options.reduce_precision,
            reshard_after_forward=options.reshard_after_forward,
            registered_memory=options.symmetric_memory is True,
            measured_wait=options.measured_wait,
        )
    _sum_over_replicas(model, experts, mesh, options)
    if mesh.size("tp") > 1:
        assert options.sequence_parallel is not None  # apply_tensor_parallel has decided
        sum_partial_gradients(model, mesh, sequence_parallel=options.sequence_parallel)
    subject = Subject(
        model=model,
        layout=mesh.layout,
        mesh=mesh,
        options=options,
        context=_measured_context(mesh, options),
        units=blocks,
    )
    check_model(Moment.PARALLEL, subject)
    return model


def _warn_of_containers(model: nn.Module, mesh: Mesh, options: ParallelOptions) -> None:
    """Warns of blocks that are containers, such as an nn.ModuleList, and have no forward: they are
    gathered where the model's own forward begins, and neither recomputed nor compiled."""
    containers = [block for block in blocks_of(model) if not has_forward(block)]
    if containers and mesh.rank == 0 and (options.recompute != "none" or options.compile):
        kind = type(containers[0]).__name__
        warnings.warn(
            f"blocks() names a {kind}, which has no forward: it is neither recomputed nor compiled "
            "as a block. Put what the model does with it into a module with a forward",
            stacklevel=4,
        )


def _unit_blocks(model: nn.Module, options: ParallelOptions) -> list[nn.Module]:
    """The blocks that are gathered, cast, recomputed and compiled one by one: all but those that
    are used outside of their forward, and containers that have no forward."""
    outside = [model.get_submodule(name) for name in options.used_outside]
    return [block for block in blocks_of(model) if block not in outside and has_forward(block)]


def _choose_products(model: nn.Module, mesh: Mesh, options: ParallelOptions) -> None:
    """How linear layers multiply, and where their weights' gradients are added."""
    # Not under FSDP, where gathered parameters have gradients of their own.
    if not mesh.uses_fsdp:
        # Our layers add a weight's gradient to the one that is there, in the same product. On CPUs
        # torch's layers are faster all the same. And with full recomputation torch's layers take
        # one product less: no backward needs the result of a block's last one, and the
        # recomputation stops before it.
        if mesh.device_type == "cuda" and options.recompute != "full":
            use_products(model)
        let_products_accumulate(model)
    if options.linear_precision is not None:
        apply_float8(
            model,
            compute_dtype(options.precision),
            mesh.device_type,
            compiled=options.compile,
            traced=options.trace,
        )
    # Without compilation parts of the merged output would have to be copied; without 16-bit copies,
    # and under FSDP, which gathers each weight apart, weights are not adjacent in memory.
    merges = options.compile and is_mixed(options.precision) and mesh.device_type in MERGED_ON
    if merges and not mesh.uses_fsdp:
        _merge_weights(model, plan_of(model, "tp_plan", options.tp_plan) or {})


def _merge_weights(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Merges the weights of layers with the same input: those of a module that the plan splits
    column-wise, as over `tp`, here also without `tp`."""
    # (name of the module, width of the input) -> its layers
    columns: dict[tuple[str, int], list[nn.Linear]] = {}
    for name, module in model.named_modules():
        # Not one whose weight a hook computes (pruning, weight norm): then it is no parameter.
        is_plain = type(module) in (nn.Linear, Linear) and "weight" in own_parameters(module)
        if is_plain and style_of(plan, [name]) == Colwise.word:
            module.__class__ = Linear
            parent = name.rpartition(".")[0]
            columns.setdefault((parent, module.in_features), []).append(module)
    for (parent, _), layers in columns.items():
        share_input(layers, model.get_submodule(parent))
    # Layers over `tp` share inputs already. The rows that are merged have to be those that a rank
    # holds, multiplied by plain products.
    for module in model.modules():
        for shared in getattr(module, "shared_inputs", ()):
            shared.merges = all(
                layer.products == PLAIN.name and getattr(layer, "uses_own_rows", True)
                for layer in shared.layers
            )


def _fuse_loss(model: nn.Module, options: ParallelOptions) -> None:
    heads = []
    if options.fuse_loss:
        heads.append(blocks_of(model)[-1])  # of a stage: its own, or a placeholder
    # Heads of further tokens return a loss and nothing else, whatever `fuse_loss` says.
    heads += prediction_heads(model)
    for head in heads:
        if can_fuse(head):
            # On an H100 (torch 2.11) the compiled loss took as much memory as its operators run one
            # by one, and torch does not compile inside of a trace.
            fuse_loss(head, options.compile and not options.trace)


def _share_samples(model: nn.Module, mesh: Mesh, options: ParallelOptions) -> None:
    """Sets `sample_groups` of modules that count the tokens of a sample: groups whose ranks share
    the same samples."""
    axes = []
    if mesh.size("cp") > 1:
        axes.append("cp")
    if mesh.size("tp") > 1 and options.sequence_parallel:
        axes.append("tp")
    for module in model.modules():
        if hasattr(module, "sample_groups"):
            module.sample_groups = [axis_group(mesh, axis) for axis in axes]  # type: ignore[assignment]


def _sum_over_replicas(
    model: nn.Module, experts: list[nn.Module], mesh: Mesh, options: ParallelOptions
) -> None:
    """DDP for parameters that FSDP does not handle. Distributed experts have other replicas than
    the rest."""
    if options.shard_optimizer and mesh.uses_fsdp:
        raise InputError(NOT_WITH_FSDP)
    kind = BucketedReduceScatter if options.shard_optimizer else BucketedAllReduce
    dtype = message_dtype(options.precision, options.reduce_precision)

    def named(*, of_experts: bool) -> list[NamedParameter]:
        inside = {parameter for module in experts for parameter in module.parameters()}
        return [(name, p) for name, p in model.named_parameters() if (p in inside) == of_experts]

    def add_sync(axis: str, *, of_experts: bool) -> None:
        # Looked up at each backward, because a user may replace parameters.
        parameters = partial(named, of_experts=of_experts)
        add_gradient_sync(model, kind(model, mesh, axis, options.measured_wait, parameters, dtype))

    if mesh.size(REPLICATE) > 1 and not mesh.uses_fsdp:
        add_sync(REPLICATE, of_experts=False)
    # FSDP sums the gradients of experts that it shards.
    if experts and mesh.size(EXPERT_REPLICATE) > 1 and mesh.size(EXPERT_SHARD) == 1:
        if not options.trace:
            # Buckets need parameters with memory. Under FSDP the model is still on the meta device,
            # and FSDP leaves these experts there.
            for module in experts:
                allocate(module, torch.device(mesh.device_type))
        add_sync(EXPERT_REPLICATE, of_experts=True)


def _measured_context(mesh: Mesh, options: ParallelOptions) -> ContextParallel | None:
    """The groups over which attention exchanges parts of sequences, made to measure their waits;
    None: without `cp` there is none."""
    if mesh.size("cp") == 1:
        return None
    context = context_parallel_of(mesh, options)  # the same groups that attention uses
    for group in context.groups.values():
        group.measured_wait = options.measured_wait
    return context


# Blocks -------------------------------------------------------------------------------------------

Wrapper = Callable[[Callable], Callable]


class Wrapping(NamedTuple):
    """What is done with a block's forward."""

    compiled: bool
    recomputed: bool


# The wrappers of a block's forward, innermost first. What it saves is offloaded outside of all of
# them: of a recomputed block what the recomputation keeps, and of a compiled one what its graph
# saves.
ORDER: dict[Wrapping, tuple[str, ...]] = {
    Wrapping(compiled=False, recomputed=False): ("cast",),
    # The casts are inside the checkpoint, so that a recomputed block repeats its casts and saves
    # none.
    Wrapping(compiled=False, recomputed=True): ("cast", "checkpoint"),
    # Casts look up copies of weights, which no graph can.
    Wrapping(compiled=True, recomputed=False): ("compile", "cast"),
    # The compiler sees the recomputation and plans the backward with it. That takes a block that is
    # one graph: `while_one_graph` falls back to the block that is only recomputed.
    Wrapping(compiled=True, recomputed=True): ("checkpoint", "compile", "cast"),
}


def _wrap_blocks(
    model: nn.Module,
    blocks: list[nn.Module],
    experts: list[nn.Module],
    mesh: Mesh,
    options: ParallelOptions,
) -> None:
    """Replaces each block's forward. Modules are not wrapped, so parameter names do not change."""
    copies = ComputeCopies(compute_dtype(options.precision))
    mixed = is_mixed(options.precision)
    casts = mixed and not mesh.uses_fsdp  # FSDP casts what it gathers
    # Beside FSDP, experts that it does not shard cast their own parameters.
    casts_experts = mixed and mesh.uses_fsdp and mesh.size(EXPERT_SHARD) == 1
    if casts or (casts_experts and experts):
        # A gradient sync hears when the step's last backward begins and ends: until then weights,
        # and so their copies, stay.
        add_gradient_sync(model, copies)
    if casts_experts:
        for module in experts:
            # Inputs are not cast: among them are the router's weights of each token's experts, in
            # float32, which must not be rounded.
            module.forward = never_compiled(
                cast_to_compute_dtype(module, module.forward, copies, cast_inputs=False)
            )
    offload = ActivationOffload(options.host_link, "meta" if options.trace else mesh.device_type)
    for block, is_trained in _blocks_and_training(model, blocks):
        wrapping = _wrapping_of(block, options, is_trained=is_trained)
        # A block that is a single layer (an embedding, a norm, a head) is not offloaded.
        has_activations = is_trained and not is_single_layer(block)
        offloaded = has_activations and options.offloads_activations
        block.forward = _wrapped(
            block,
            wrapping,
            copies=copies if casts else None,
            recompute=options.recompute,
            offload=offload if offloaded else None,
        )
        if casts or wrapping.compiled or offloaded:
            block.__deepcopy__ = _refuse_copy  # type: ignore[assignment]
    if casts and model not in blocks:
        # What the model computes itself, outside of its blocks.
        model.forward = cast_to_compute_dtype(model, model.forward, copies, without=blocks)


def _blocks_and_training(
    model: nn.Module, blocks: list[nn.Module]
) -> Iterator[tuple[nn.Module, bool]]:
    """The blocks of this stage, and whether a backward goes through each: blocks before the first
    trained one save nothing for it, and so need not be recomputed. Parameters outside of all blocks
    may be used before them, so they count as the first."""
    of_blocks = {parameter for block in blocks for parameter in block.parameters()}
    others = set(model.parameters()) - of_blocks
    is_trained = any(parameter.requires_grad for parameter in others)
    for block in blocks:
        if isinstance(block, OtherStageBlock):
            is_trained = is_trained or block.trained
            continue
        is_trained = is_trained or any(p.requires_grad for p in block.parameters())
        yield block, is_trained


def is_single_layer(block: nn.Module) -> bool:
    """Whether a block has no modules inside. Such blocks are not wrapped: they have nothing to
    fuse, to recompute or to offload."""
    return next(block.children(), None) is None


def _wrapping_of(block: nn.Module, options: ParallelOptions, *, is_trained: bool) -> Wrapping:
    if is_single_layer(block):
        # It has nothing to fuse or recompute.
        return Wrapping(compiled=False, recomputed=False)
    left_out = getattr(block, "left_out", ())  # names of wrappers that its class does without
    recomputed = is_trained and options.recompute != "none" and "checkpoint" not in left_out
    compiled = options.compile and "compile" not in left_out
    obstacle = _compile_obstacle(block, recomputed=recomputed) if compiled else None
    if obstacle is not None:
        warnings.warn(f"{type(block).__name__} is not compiled: {obstacle}", stacklevel=5)
    return Wrapping(compiled=compiled and obstacle is None, recomputed=recomputed)


def _compile_obstacle(block: nn.Module, *, recomputed: bool) -> str | None:
    """Why a block is not compiled; None: it is."""
    # A recomputation has to save the same tensors as the forward did. Experts divide a block into
    # several graphs, and some of them may be compiled again in the recomputation (on GPUs a
    # backward has a thread of its own, and the number of a graph's variants is limited). Then they
    # would save other tensors.
    if recomputed and _experts_in(block):
        return "its experts run between graphs"
    inner = [module for module in block.modules() if module is not block]
    if any(map(has_backward_hooks, inner)):
        return "a graph leaves hooks of its backward out"
    return None


def _experts_in(block: nn.Module) -> list[nn.Module]:
    return [module for module in block.modules() if hasattr(module, "dispatch")]


def _wrapped(
    block: nn.Module,
    wrapping: Wrapping,
    *,
    copies: ComputeCopies | None,
    recompute: str,
    offload: ActivationOffload | None,
) -> Callable:
    """A block's forward in its wrappers. `copies`: for casts; None: nothing is cast. `offload`:
    None: what it saves stays on the device."""
    experts = _experts_in(block)

    def cast_inside(forward: Callable) -> Callable:
        return forward if copies is None else cast_to_compute_dtype(block, forward, copies)

    def wrapped_in(wrapping: Wrapping) -> Callable:
        # Selective recomputation keeps results outside of what autograd saves, so it hands them to
        # the offload itself. A compiled graph saves its results for autograd, where `offload.wrap`
        # gets them.
        keep = None
        if offload is not None and not wrapping.compiled:
            keep = offload.keep
        checkpointed = partial(
            checkpoint_block, recompute=recompute, routes=bool(experts), keep=keep
        )
        wrappers: dict[str, Wrapper] = {
            "cast": cast_inside,
            "checkpoint": checkpointed,
            "compile": partial(
                compile_block, block, without=experts, one_graph=wrapping.recomputed
            ),
        }
        forward: Callable = block.forward
        for name in ORDER[wrapping]:
            forward = wrappers[name](forward)
        return forward

    forward = wrapped_in(wrapping)
    if wrapping.compiled and wrapping.recomputed:
        # Compiled and recomputed takes a block that is one graph, which shows when it first runs.
        eager = wrapped_in(Wrapping(compiled=False, recomputed=True))
        forward = while_one_graph(forward, eager, type(block).__name__)
    return forward if offload is None else offload.wrap(block, forward)


def _refuse_copy(memo: dict[int, Any]) -> None:
    """Replaces `copy.deepcopy`, which would not copy the functions that are set as forwards."""
    raise InputError(
        "a copy of this model would compute with the weights of the original, to which its blocks "
        "refer: copy the plain model and parallelize the copy, or copy its state_dict"
    )
