"""Parallelization of a plain model: every kind of parallelism is a line here, in nesting order: in
`apply_tensor_parallel` if it changes layers, in `apply_data_parallel` if it wraps them."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.attention import AttentionContext
from meshtrain.dropout import Dropout, SequencePart, bind_dropout
from meshtrain.errors import AgreedError, InputError
from meshtrain.layout import LOSS_AXES, NOT_WITH_FSDP
from meshtrain.mesh import Mesh
from meshtrain.parallel.activation_checkpoint import checkpoint_block
from meshtrain.parallel.collectives import Waiting, axis_group
from meshtrain.parallel.compile import compile_block, while_one_graph
from meshtrain.parallel.context import ContextParallel, ShardedContext, misplaced_calls
from meshtrain.parallel.ddp import (
    REPLICATE,
    BucketedAllReduce,
    BucketedReduceScatter,
    NamedParameter,
)
from meshtrain.parallel.expert import apply_expert_parallel, dispatched_modules
from meshtrain.parallel.float8_layers import float8_problems
from meshtrain.parallel.fsdp import EXPERT_REPLICATE, EXPERT_SHARD, apply_fsdp
from meshtrain.parallel.grad_sync import add_gradient_sync
from meshtrain.parallel.linear import Linear, use_products
from meshtrain.parallel.linear.float8 import apply_float8
from meshtrain.parallel.linear.matmul import PLAIN
from meshtrain.parallel.linear.shared_input import share_input
from meshtrain.parallel.linear.weight_grad import let_products_accumulate
from meshtrain.parallel.linear_cross_entropy import fuse_loss
from meshtrain.parallel.mixed_precision import (
    ComputeCopies,
    cast,
    cast_to_compute_dtype,
    compute_dtype,
    master_dtype,
    message_dtype,
)
from meshtrain.parallel.sync_batch_norm import apply_sync_batch_norm
from meshtrain.parallel.tensor_parallel import (
    TensorParallel,
    VocabParallelEmbedding,
    replace_layers,
    sum_partial_gradients,
)
from meshtrain.parallel.torch_private import (
    allocate,
    has_backward_hooks,
    never_compiled,
)
from meshtrain.parallel.tp_plan import (
    NO_SEQUENCE,
    REPLICATED,
    Colwise,
    Split,
    context_modules,
    has_sequence_parts,
    no_context_plan,
    plan_of,
    shards_sequence,
    split_layers,
    style_of,
    undecided,
)
from meshtrain.parallel.verify import made_up_sample, verify, verify_context, verify_samples
from meshtrain.parallel.verify.between import parameters_between
from meshtrain.parallel.verify.comparison import PlainError, Terms, no_terms
from meshtrain.parallel.verify.refusals import (
    refuse_accumulation_hooks,
    refuse_batch_statistics,
    refuse_parameters,
    refuse_plain_dropout,
    refuse_single_tokens,
)
from meshtrain.parallel.verify.side_effects import refuse_side_effects
from meshtrain.pipeline.stage import OtherStageBlock, blocks_of, has_forward

# Devices where layers that share an input compute one product, in 16 bits, compiled and without
# FSDP, which gathers each weight into separate memory. On CPUs one product takes as long as
# several.
MERGED_ON = ("cuda",)


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How a model is parallelized over a mesh; only `precision` and `linear_precision` affect the
    results."""

    # compute dtype of blocks: "float32", "float64", "bfloat16" or "float16"
    precision: str = "float32"
    # that of linear layers inside blocks: "float8"; see `float8.py`
    linear_precision: str | None = None
    # how layers are split over `tp`; None: the plan in the model's file
    tp_plan: Mapping[str, str] | None = None
    # between these layers; None: if an `embedding_rowwise` layer is in the plan
    sequence_parallel: bool | None = None
    # modules that mix tokens; None: the plan in the model's file
    cp_plan: Mapping[str, str] | None = None
    context: str = "gather"  # how keys and values are exchanged over `cp`, "gather" or "ring"
    # neighbours on `cp` that split heads instead; None: the layout's
    context_heads: int | None = None
    # modules that hold experts; None: the plan in the model's file
    ep_plan: Mapping[str, str] | None = None
    # tensor-parallel layers save their part of an input and gather it again in backward
    regather: bool = False
    # Fuses products with their gather or scatter; "auto": if the GPUs of `tp` are linked by NVLink.
    # True: also puts FSDP's messages in registered memory.
    symmetric_memory: bool | Literal["auto"] = False
    recompute: str = "none"  # what blocks recompute in backward, from the first trained block on
    compile: bool = False  # compiles each block with torch.compile
    # the last block returns the loss if it is requested (`linear_cross_entropy.py`)
    fuse_loss: bool = False
    reshard_after_forward: bool = True  # see `fsdp.apply_fsdp`
    # dtype of gradient sums over data ranks; None: the dtype of gradients
    reduce_precision: str | None = None
    used_outside: Collection[
        str
    ] = ()  # blocks whose parameters are used outside: gathered and cast with the model
    # batch norms compute with the samples of all data ranks (`sync_batch_norm.py`)
    sync_batch_norm: bool = False
    shard_optimizer: bool = False  # ZeRO-1 (`ddp.py`); only for `meshtrain.optim.Optimizer`
    # First compares the split model with the plain one (`verify/`), and refuses a first forward
    # with side effects (`verify/side_effects.py`).
    verify: bool = True
    # For that: the arguments of `model(*sample)`, a few short samples, equal on all ranks of `tp`;
    # None: made up.
    sample: Sequence[Tensor | None] | None = None
    # a context manager entered wherever this rank waits for others, to measure it
    waiting: Waiting = nullcontext
    # The model is traced on the meta device: no memory is allocated, no values are compared, and
    # the loss head is fused without compiling.
    trace: bool = False

    @property
    def compares(self) -> bool:
        """Whether the model is compared with the plain one before it runs."""
        return self.verify and not self.trace


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
    cast(model, master_dtype(settings.precision))
    broadcast_parameters(model, mesh)
    if settings.sync_batch_norm:
        apply_sync_batch_norm(model, mesh)
    refuse_dependent_samples(model, mesh, settings)
    apply_context_parallel(model, mesh, settings)
    resolved = apply_tensor_parallel(model, mesh, settings)
    apply_expert_parallel(model, mesh, resolved)
    splits_sequence = shards_sequence(plan_of(type(model), "tp_plan", settings.tp_plan) or {})
    if (
        mesh.rank == 0
        and mesh.size("tp") > 1
        and settings.sequence_parallel is None
        and not splits_sequence
    ):
        warnings.warn(f"sequence_parallel is off: {NO_SEQUENCE}", stacklevel=2)
    return apply_data_parallel(model, mesh, resolved)


def refuse_dependent_samples(
    model: nn.Module, mesh: Mesh, options: ParallelOptions, terms: Terms = no_terms
) -> None:
    """Rejects a plain model that computes something else for a sample if others are beside it, on
    several data ranks, or in a second forward, also with `cp` or recomputation. `terms`: see
    `verify_samples`."""
    several = mesh.size(*LOSS_AXES) > 1
    if several:
        refuse_batch_statistics(model)  # before, because it names the module
    if options.compares and options.sample is not None and (several or options.recompute != "none"):
        verify_samples(model, _block_names(model), mesh, options.sample, options.precision, terms)


def apply_context_parallel(
    model: nn.Module, mesh: Mesh, options: ParallelOptions, *, verified: bool = False
) -> None:
    """Rejects a plain model that cannot take parts of sequences. `verified`, raises: see
    `apply_tensor_parallel`."""
    if mesh.size("cp") == 1:
        return
    plan = plan_of(type(model), "cp_plan", options.cp_plan)
    if not plan:
        raise InputError(no_context_plan(type(model).__name__))
    names = context_modules(model, plan)
    if options.compares and not verified:
        context = _context_parallel(mesh, options)
        unverified = verify_context(
            model, _block_names(model), names, context, mesh, options.sample, options.precision
        )
        _warn_unverified(mesh, unverified)


def _context_parallel(mesh: Mesh, options: ParallelOptions) -> ContextParallel:
    heads = mesh.layout.context_heads if options.context_heads is None else options.context_heads
    return ContextParallel(mesh, method=options.context, heads=heads, sequence_parallel=False)


def _take_only_parts(
    model: nn.Module, attention: Sequence[str], mesh: Mesh, options: ParallelOptions
) -> None:
    """Makes a model reject whole sequences and, if unverified, attention calls elsewhere in its
    first forward."""
    # kept by the hook, so that its groups live as long as the model
    context = _context_parallel(mesh, options)
    for group in context.groups.values():
        group.waiting = options.waiting
    forward = model.forward

    def check(
        model: nn.Module, inputs: tuple, named: dict[str, Any], context: ContextParallel = context
    ) -> None:
        _, positions, record = (*inputs, None, None, None)[:3]
        if isinstance(record, AttentionContext) and record.cache is not None:
            return  # in generation each rank has whole sequences
        if (
            not isinstance(named.get("documents", record), ShardedContext)
            or named.get("positions", positions) is None
        ):
            raise InputError(
                "with cp the model takes parts of sequences: call ContextParallel(mesh, "
                "...).shard(batch), and "
                "model(*inputs) with the inputs of what it returns"
            )

    def first(*inputs: Any, **named: Any) -> Any:
        model.forward = forward
        with misplaced_calls(
            model, attention, named["documents"] if "documents" in named else inputs[2]
        ) as misplaced:
            output = forward(*inputs, **named)
        if misplaced:
            raise InputError(
                f"with cp: {misplaced[0]}: mend the model or its cp_plan, or use cp: 1"
            )
        return output

    model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)  # before FSDP's own
    # calls in a compiled block cannot be intercepted
    if not options.verify and not options.compile and not options.trace:
        model.forward = first


def _block_names(model: nn.Module) -> list[str]:
    name_of = {module: name for name, module in model.named_modules()}
    return [name_of[block] for block in dict.fromkeys(blocks_of(model)) if block is not model]


def apply_tensor_parallel(
    model: nn.Module, mesh: Mesh, options: ParallelOptions, *, verified: bool = False
) -> ParallelOptions:
    """The first half of `parallelize`: splits a model's layers over `tp`. Returns the options with
    open ones resolved. `verified`: the model was already verified, for another of its stages.
    Raises as `parallelize`."""
    if mesh.size(*LOSS_AXES) > 1:
        refuse_batch_statistics(model)
        refuse_accumulation_hooks(model)
    if mesh.uses_fsdp or mesh.size("tp") > 1 or mesh.size("ep") > 1:
        refuse_parameters(model, mesh.uses_fsdp)
    part = SequencePart(cp=mesh.size("cp"), cp_index=mesh.index("cp"))
    if mesh.size("tp") == 1:
        _refuse_float8(model, options)
        bind_dropout(model, part)
        return options
    plan = plan_of(type(model), "tp_plan", options.tp_plan)
    if plan is None:
        raise InputError(
            f"{type(model).__name__} has no tp_plan, which says how its layers split: use tp: 1, "
            "or give one"
        )
    splits = split_layers(model, plan, mesh.size("tp"))
    _refuse_float8(model, options, splits, mesh.size("tp"))
    sequence = has_sequence_parts(options.sequence_parallel, plan)
    if sequence and not shards_sequence(plan):
        raise InputError(
            f"sequence_parallel: {NO_SEQUENCE}: leave it out, or use sequence_parallel: false"
        )
    if sequence:
        refuse_batch_statistics(model, of_parts=True)
    tp = TensorParallel(mesh, plan, splits, sequence, options.regather)
    sequence = _check_split(model, tp, options, verified)
    tp = replace(tp, sequence_parallel=sequence)
    bind_dropout(
        model, part._replace(tp=mesh.size("tp"), tp_index=mesh.index("tp")) if sequence else part
    )
    group = axis_group(mesh, "tp")
    group.waiting = options.waiting
    if options.symmetric_memory is True:
        group.fuse()
    elif options.symmetric_memory and sequence and not group.on_cpu and not group.choice:
        group.fuse_if_possible(torch.device(mesh.device_type))
    replace_layers(model, tp)
    vars(model)["shares_sequence"] = sequence
    if sequence and any(isinstance(module, Dropout) and module.p > 0 for module in model.modules()):
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.register_forward_pre_hook(refuse_single_tokens, with_kwargs=True)
    return replace(options, sequence_parallel=sequence)


def shares_sequence(model: nn.Module, default: bool | None = None) -> bool | None:
    """Whether each rank of `tp` has a part of the sequence between the layers of a parallelized
    model or stage."""
    return vars(model).get("shares_sequence", default)


def _refuse_float8(
    model: nn.Module, options: ParallelOptions, splits: Sequence[Split] = (), tp: int = 1
) -> None:
    if options.linear_precision is not None:
        problems = float8_problems(model, splits, tp)
        if options.precision == "float16":
            problems.append(
                "float16 has no room for values rounded to 8 bits: use the precision bfloat16"
            )
        if problems:
            raise InputError(f"linear_precision {options.linear_precision}: {'; '.join(problems)}")


def _check_split(
    model: nn.Module, tp: TensorParallel, options: ParallelOptions, verified: bool
) -> bool:
    """Compares the split model with the plain one. If unverified, the plan must name all parameters
    between layers. Returns whether each rank has a part of the sequence: by default not, if that
    alone passes."""
    unverified = None if verified else "verify is off"
    sequence = tp.sequence_parallel
    if options.compares and not verified:
        # experts need the parts
        by_default = options.sequence_parallel is None and tp.mesh.size("ep") == 1
        verdict = verify(
            model,
            _block_names(model),
            tp,
            options.sample,
            options.precision,
            may_fall_back=by_default,
        )
        unverified = verdict.unverified
        if verdict.without_parts is not None:
            sequence = False
            if tp.mesh.rank == 0:
                reason = (
                    "with it the model does not compute what it does on one device: "
                    f"{verdict.without_parts}"
                )
                warnings.warn(f"parallel.sequence_parallel is off: {reason}", stacklevel=4)
    if unverified is not None and not sequence and not options.trace:
        _refuse_undecided(model, tp, options, unverified)
    if options.compares:
        _warn_unverified(tp.mesh, unverified)
    return sequence


def _refuse_undecided(
    model: nn.Module, tp: TensorParallel, options: ParallelOptions, unverified: str
) -> None:
    """Rejects a plan that leaves out a parameter between a column-wise and a row-wise layer, or
    that leaves it open for a model that does not run without values."""
    names = undecided(model, tp.plan, tp.splits)
    if not names:
        return
    where = (
        "between a colwise and a rowwise layer, where each rank of tp has a part of the features"
    )
    sample = made_up_sample(model, tp.mesh.size("tp")) if options.sample is None else options.sample
    try:
        between = parameters_between(model, tp.splits, names, sample)
    except PlainError as error:
        raise AgreedError(
            f"{', '.join(names)}: whether they lie {where}, the tp_plan does not say, the model "
            "was not compared with "
            f"the plain one ({unverified}), and its forward does not run without values ({error}): "
            "give them the style "
            f"{REPLICATED} if they do, or replicate if not"
        ) from error
    if between:
        raise AgreedError(
            f"{', '.join(between)}: they lie {where}, so that their gradients have to be summed: "
            "give them the style "
            f"{REPLICATED} in the tp_plan"
        )


def _warn_unverified(mesh: Mesh, reason: str | None) -> None:
    if mesh.rank == 0 and reason is not None:
        warnings.warn(
            f"the model was not compared with the plain one: {reason}: give a sample=(...)",
            stacklevel=5,
        )


def apply_data_parallel(model: nn.Module, mesh: Mesh, options: ParallelOptions) -> nn.Module:
    """The second half of `parallelize`: precision, recomputation and compilation of blocks, then
    DDP, FSDP or HSDP."""
    last, others = (
        blocks_of(model)[-1],
        [model.get_submodule(name) for name in options.used_outside],
    )
    # What is never called (an nn.ModuleList) has no forward at which it could be gathered: the
    # model's start does it.
    uncalled = [block for block in blocks_of(model) if not has_forward(block)]
    others += uncalled
    if uncalled and mesh.rank == 0 and (options.recompute != "none" or options.compile):
        kind = type(uncalled[0]).__name__
        warnings.warn(
            f"blocks() names a {kind}, which has no forward: it is neither recomputed nor compiled "
            "as a block. Put "
            "what the model does with it into a module with a forward",
            stacklevel=4,
        )
    blocks = [block for block in blocks_of(model) if block not in others]
    attention: list[str] = []
    if mesh.size("cp") > 1:  # looked up here, because FSDP changes the model's class
        cp_plan = plan_of(type(model), "cp_plan", options.cp_plan) or {}
        # In a stage, some patterns match only blocks of other stages.
        attention = [
            name
            for name, _ in model.named_modules()
            if any(fnmatchcase(name, key) for key in cp_plan)
        ]
    if mesh.size("tp") > 1 and not options.sequence_parallel:
        refuse_plain_dropout(model)
    experts = dispatched_modules(model)
    if not mesh.uses_fsdp:  # FSDP has separate gradients of gathered parameters
        # On CPUs torch's own layers are faster, although their gradients are added in a separate
        # pass. Also, with torch's layers the last product of a block is not recomputed.
        if mesh.device_type == "cuda" and options.recompute != "full":
            use_products(model)
        let_products_accumulate(model)
    if options.linear_precision is not None:
        dtype, compiled = compute_dtype(options.precision), options.compile
        apply_float8(
            model,
            dtype,
            mesh.device_type,
            compiled=compiled,
            traced=options.trace,
        )
    narrow = compute_dtype(options.precision) != master_dtype(options.precision)
    if options.compile and narrow and not mesh.uses_fsdp and mesh.device_type in MERGED_ON:
        _merge_weights(model, plan_of(type(model), "tp_plan", options.tp_plan) or {})
    if options.fuse_loss:
        # On an H100 (torch 2.11) the compiled loss took as much memory as its operators run one by
        # one, and torch does not compile inside of a trace.
        fuse_loss(last, options.compile and not options.trace)
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
            waiting=options.waiting,
        )
    _sum_over_copies(model, experts, mesh, options)
    if mesh.size("tp") > 1:
        assert options.sequence_parallel is not None  # apply_tensor_parallel has decided
        sum_partial_gradients(model, mesh, sequence_parallel=options.sequence_parallel)
    if mesh.size("cp") > 1:
        _take_only_parts(model, attention, mesh, options)
    if options.compares and (mesh.size(*LOSS_AXES) > 1 or options.recompute != "none"):
        recomputed = [
            block
            for block in blocks
            if options.recompute != "none" and any(True for _ in block.children())
        ]
        refuse_side_effects(
            model, mesh, {module for block in recomputed for module in block.modules()}
        )
    return model


def _merge_weights(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Merges the layers of a module that a plan splits column-wise: they share their input, here as
    over `tp`."""
    columns: dict[tuple[str, int], list[nn.Linear]] = {}
    for name, module in model.named_modules():
        # pruning replaces the weight
        plain = type(module) in (nn.Linear, Linear) and "weight" in module._parameters
        if plain and style_of(plan, [name]) == Colwise.word:
            module.__class__ = Linear
            columns.setdefault((name.rpartition(".")[0], module.in_features), []).append(module)
    for (parent, _), layers in columns.items():
        share_input(layers, model.get_submodule(parent))
    for module in model.modules():
        for shared in getattr(module, "shared_inputs", ()):
            shared.merges = all(
                x.products == PLAIN.name and getattr(x, "heads", None) is None
                for x in shared.layers
            )


def _sum_over_copies(
    model: nn.Module, experts: list[nn.Module], mesh: Mesh, options: ParallelOptions
) -> None:
    """DDP for parameters that FSDP does not handle. Distributed experts have other replicas than
    the rest."""
    dtype = message_dtype(options.precision, options.reduce_precision)
    if options.shard_optimizer and mesh.uses_fsdp:
        raise InputError(NOT_WITH_FSDP)
    kind = BucketedReduceScatter if options.shard_optimizer else BucketedAllReduce

    def named(of_experts: bool) -> list[NamedParameter]:
        inside = {parameter for module in experts for parameter in module.parameters()}
        return [(name, p) for name, p in model.named_parameters() if (p in inside) == of_experts]

    copied = bool(experts) and mesh.size(EXPERT_SHARD) == 1
    for axis, of_experts, syncs in (
        (REPLICATE, False, not mesh.uses_fsdp),
        (EXPERT_REPLICATE, True, copied),
    ):
        if syncs and mesh.size(axis) > 1:
            # FSDP's have no memory yet, which buckets need
            for module in experts if of_experts and not options.trace else ():
                allocate(module, torch.device(mesh.device_type))
            add_gradient_sync(
                model, kind(model, mesh, axis, options.waiting, partial(named, of_experts), dtype)
            )


def _share_samples(model: nn.Module, mesh: Mesh, options: ParallelOptions) -> None:
    """Sets `sample_groups` of modules that count the tokens of a sample: groups whose ranks share
    the same samples."""
    axes = ["cp"] * (mesh.size("cp") > 1) + ["tp"] * (
        mesh.size("tp") > 1 and bool(options.sequence_parallel)
    )
    for module in model.modules():
        if hasattr(module, "sample_groups"):
            module.sample_groups = [axis_group(mesh, axis) for axis in axes]  # type: ignore[assignment]


def _wrap_blocks(
    model: nn.Module,
    blocks: list[nn.Module],
    experts: list[nn.Module],
    mesh: Mesh,
    options: ParallelOptions,
) -> None:
    """Replaces each block's forward. Modules are not wrapped, so parameter names do not change."""
    dtype = compute_dtype(options.precision)
    copies = ComputeCopies(dtype)
    narrow = dtype != master_dtype(options.precision)
    casts = narrow and not mesh.uses_fsdp  # FSDP casts what it gathers
    casts_experts = narrow and mesh.uses_fsdp and mesh.size(EXPERT_SHARD) == 1 and bool(experts)
    if casts or casts_experts:
        add_gradient_sync(model, copies)
    for module in experts if casts_experts else ():
        # The weights of a token's experts are float32 inputs that must not be rounded.
        module.forward = never_compiled(
            cast_to_compute_dtype(module, module.forward, copies, cast_inputs=False)
        )
    of_blocks = {parameter for block in blocks for parameter in block.parameters()}
    trained = any(parameter.requires_grad for parameter in set(model.parameters()) - of_blocks)
    for block in blocks:
        if isinstance(block, OtherStageBlock):
            trained = trained or block.trained
            continue
        trained = trained or any(p.requires_grad for p in block.parameters())
        # blocks before it save nothing
        run, recompute = (
            block.forward,
            options.recompute if trained else "none",
        )
        # a single layer has nothing to fuse or recompute
        has_layers = any(True for _ in block.children())
        routed = [module for module in block.modules() if hasattr(module, "dispatch")]  # experts
        # Graph pieces between experts may be compiled again in the recomputation (a GPU's backward
        # has its own thread, and the number of variants is limited), and would then not save the
        # same tensors as the forward.
        in_pieces = bool(routed) and recompute != "none"
        hooked = any(
            has_backward_hooks(module) for module in block.modules() if module is not block
        )
        fused = options.compile and has_layers and not in_pieces and not hooked
        if options.compile and (in_pieces or hooked):
            reason = (
                "its experts run between graphs"
                if in_pieces
                else "a graph leaves hooks of its backward out"
            )
            warnings.warn(f"{type(block).__name__} is not compiled: {reason}", stacklevel=4)
        again_inside = fused and recompute != "none"
        around = compile_block(block, run, without=routed) if fused and not again_inside else run
        # The casts are inside the checkpoint, so that a recomputed block repeats its casts and
        # saves none.
        around = cast_to_compute_dtype(block, around, copies) if casts else around
        around = checkpoint_block(around, recompute, routes=bool(routed)) if has_layers else around
        if again_inside:
            # The compiler sees the recomputation and plans the backward with it, if all of the
            # block is one graph.
            whole = compile_block(block, checkpoint_block(run, recompute), one_graph=True)
            whole = cast_to_compute_dtype(block, whole, copies) if casts else whole
            around = while_one_graph(whole, around, type(block).__name__)
        block.forward = around
        if casts or fused:
            block.__deepcopy__ = _refuse_copy  # type: ignore[assignment]
    if casts and model not in blocks:
        model.forward = cast_to_compute_dtype(model, model.forward, copies, without=blocks)


def _refuse_copy(memo: dict[int, Any]) -> None:
    """Replaces `copy.deepcopy`, which would not copy the functions that are set as forwards."""
    refers = (
        "a copy of this model would compute with the weights of the original, to which its blocks "
        "refer"
    )
    raise InputError(
        f"{refers}: copy the plain model and parallelize the copy, or copy its state_dict"
    )


def broadcast_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Gives all ranks the values of rank 0, in contiguous memory, as NCCL, FSDP and the optimizer
    require."""
    group = mesh.world
    if group is None:
        return
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                values = tensor.contiguous()
                dist.broadcast(values, group_src=0, group=group)
                if values is not tensor:
                    tensor.copy_(values)
