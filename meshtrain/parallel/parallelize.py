"""Parallelization of a plain model: every kind of parallelism is a line here, in the order in which they nest.

A new kind is a new file beside this one and a line in `apply_tensor_parallel` (it changes layers) or in
`apply_data_parallel` (it changes what happens around them).
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.dropout import bind_dropout
from meshtrain.errors import AgreedError, InputError
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh
from meshtrain.parallel.activation_checkpoint import checkpoint_block
from meshtrain.parallel.collectives import Waiting, axis_group
from meshtrain.parallel.compile import compile_block
from meshtrain.parallel.ddp import REPLICATE, apply_ddp
from meshtrain.parallel.fsdp import apply_fsdp
from meshtrain.parallel.grad_sync import add_gradient_sync
from meshtrain.parallel.mixed_precision import ComputeCopies, cast, cast_to_compute_dtype, compute_dtype, master_dtype
from meshtrain.parallel.tensor_parallel import TensorParallel, replace_layers, sum_partial_gradients
from meshtrain.parallel.tp_plan import NO_SEQUENCE, REPLICATED, SplitError, shards_sequence, split_layers, undecided
from meshtrain.parallel.tp_verify import verify
from meshtrain.pipeline.stage import OtherStageBlock, blocks_of

BUILT = (*DATA_AXES, "tp", "pp")  # axes that a model can be spread over


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How a model is spread over a mesh; only `precision` touches what is computed."""

    precision: str = "float32"  # what blocks compute in: "float32", "float64", "bfloat16" or "float16"
    tp_plan: Mapping[str, str] | None = None  # how layers split over `tp`; None: that in the file of the model's class
    # Between the tensor-parallel layers each rank has a part of the sequence; None: if the plan has an
    # `embedding_rowwise` layer, which is what splits it.
    sequence_parallel: bool | None = None
    regather: bool = False  # tensor-parallel layers keep their part of an input and gather it again in backward
    symmetric_memory: bool = False  # products with their gather or scatter in one kernel, on GPUs that allow it
    recompute: str = "none"  # what blocks compute again in backward; see `activation_checkpoint.py`
    compile: bool = False  # each block by torch.compile
    reshard_after_forward: bool = True  # see `fsdp.apply_fsdp`
    verify: bool = True  # before anything else the split model is compared with the plain one; see `tp_verify.py`
    # For that: what `model(*sample)` takes, a few short samples, the same on each rank of `tp`; None: one is made up.
    sample: Sequence[Tensor | None] | None = None
    waiting: Waiting = nullcontext  # a context manager entered wherever this rank waits for others, to measure it


def parallelize(model: nn.Module, mesh: Mesh, **options: Any) -> nn.Module:
    """Makes a plain model train under any layout of data and tensor parallelism; in a world of one it stays plain.

    It stays the object that it was, with the same names of parameters, and is returned. A backward of it ends with
    gradients that are summed over the data ranks (see `ddp.py`) and, where each has seen a part, over the tensor ranks
    (see `grad_sync.py`). What is gathered, compiled or computed again together is a block of its `blocks()`; a model
    without that method is one block.

    Args:
        model: on the mesh's device, with the values of rank 0 taken for all ranks; or, under FSDP, on the meta device.
        options: any of `ParallelOptions`, by name.

    Raises:
        InputError: the layout splits an axis that models cannot be spread over, or the model cannot be split, or has a
            batch norm that trains, on several data ranks.
    """
    if mesh.size("pp") > 1:
        raise InputError("parallelize spreads a model over all axes but pp: use pp: 1")
    settings = ParallelOptions(**options)
    cast(model, master_dtype(settings.precision))
    broadcast_parameters(model, mesh)
    resolved = apply_tensor_parallel(model, mesh, settings)
    if mesh.rank == 0 and settings.sequence_parallel is None and resolved.sequence_parallel is False:
        warnings.warn(f"sequence_parallel is off: {NO_SEQUENCE}", stacklevel=2)
    return apply_data_parallel(model, mesh, resolved)


def apply_tensor_parallel(
    model: nn.Module, mesh: Mesh, options: ParallelOptions, *, verified: bool = False
) -> ParallelOptions:
    """The first half of `parallelize`: a model's layers, whole or on the meta device, become their parts over `tp`.

    `verified`: the same model was, for another of its stages. Returns the options with those decided that were left
    open. Raises InputError as `parallelize` does.
    """
    for axis in mesh.layout.axes:
        if axis not in BUILT and mesh.size(axis) > 1:
            raise InputError(f"a model cannot be spread over {axis} yet: use {', '.join(BUILT)}, with {axis}: 1")
    if mesh.size(*DATA_AXES) > 1:
        _refuse_batch_statistics(model)
    if mesh.size("tp") == 1:
        bind_dropout(model)
        return options
    plan = _plan_of(model, options)
    try:
        splits = split_layers(model, plan, mesh.size("tp"))
    except SplitError as error:
        raise InputError(str(error)) from error
    sequence = shards_sequence(plan) if options.sequence_parallel is None else options.sequence_parallel
    if sequence and not shards_sequence(plan):
        raise InputError(f"sequence_parallel: {NO_SEQUENCE}: leave it out, or use sequence_parallel: false")
    if sequence:
        _refuse_batch_statistics(model)
    tp = TensorParallel(mesh, plan, splits, sequence, options.regather)
    _check_split(model, tp, options, verified)
    bind_dropout(model, mesh.index("tp") if sequence else 0)
    group = axis_group(mesh, "tp")
    group.waiting = options.waiting
    if options.symmetric_memory:
        group.fuse()
    replace_layers(model, tp)
    return replace(options, sequence_parallel=sequence)


def _plan_of(model: nn.Module, options: ParallelOptions) -> Mapping[str, str]:
    if options.tp_plan is not None:
        return options.tp_plan
    plan = getattr(sys.modules[type(model).__module__], "tp_plan", None)
    if plan is None:
        raise InputError(
            f"{type(model).__name__} has no tp_plan, which says how its layers split: use tp: 1, or give one"
        )
    return plan


def _check_split(model: nn.Module, tp: TensorParallel, options: ParallelOptions, verified: bool) -> None:
    """Compares the split model with the plain one; where that cannot be, the plan has to name all that lies between."""
    unverified = None if verified else "verify is off"
    if options.verify and not verified:
        name_of = {module: name for name, module in model.named_modules()}
        blocks = [name_of[block] for block in dict.fromkeys(blocks_of(model)) if block is not model]
        unverified = verify(model, blocks, tp, options.sample, options.precision)
    names = undecided(model, tp.plan, tp.splits) if unverified is not None and not tp.sequence_parallel else []
    if names:
        raise InputError(
            f"{', '.join(names)}: each rank has a part of the features between a colwise and a rowwise layer, and "
            f"the tp_plan does not say whether this lies there: if it does, give it the style {REPLICATED}; "
            "verify=True (parallel.verify) finds it out"
        )
    if tp.mesh.rank == 0 and options.verify and unverified is not None:
        warnings.warn(f"the model was not compared with the plain one: {unverified}: give a sample=(...)", stacklevel=4)


def apply_data_parallel(model: nn.Module, mesh: Mesh, options: ParallelOptions) -> nn.Module:
    """The other half of `parallelize`: precision, recomputation and compilation of blocks, then DDP, FSDP or HSDP."""
    blocks = blocks_of(model)
    if mesh.size("tp") > 1 and not options.sequence_parallel:
        _refuse_plain_dropout(model)
    _wrap_blocks(model, blocks, mesh, options)
    if mesh.uses_fsdp:
        reshard = options.reshard_after_forward
        apply_fsdp(
            model, blocks, mesh, precision=options.precision, reshard_after_forward=reshard, waiting=options.waiting
        )
    elif mesh.size(REPLICATE) > 1:
        apply_ddp(model, mesh, options.waiting)
    if mesh.size("tp") > 1:
        assert options.sequence_parallel is not None  # apply_tensor_parallel has decided
        sum_partial_gradients(model, mesh, sequence_parallel=options.sequence_parallel)
    return model


def _refuse_plain_dropout(model: nn.Module) -> None:
    """Ranks of `tp` that all have the whole sequence would each draw a mask of their own for it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise InputError(
                f"{name} is a {type(module).__name__}, whose mask each rank of tp would draw for itself, and without "
                "sequence_parallel all of them have the same activations: use meshtrain.dropout.Dropout, or "
                "sequence_parallel true"
            )


def _refuse_batch_statistics(model: nn.Module) -> None:
    """Of a batch that ranks share, by samples or along the sequence, each would see its part alone."""
    for name, module in model.named_modules():
        statistics = isinstance(module, nn.modules.batchnorm._NormBase) and (
            isinstance(module, nn.modules.batchnorm._BatchNorm) or module.track_running_stats
        )
        if statistics and module.training:
            raise AgreedError(
                f"{name} is a {type(module).__name__}, which computes with the samples that a rank happens to have: on "
                "several data ranks, and with sequence_parallel, the loss would depend on the layout. Use nn.GroupNorm "
                "or nn.LayerNorm, freeze it with eval(), or use one data rank and sequence_parallel: false"
            )


def _wrap_blocks(model: nn.Module, blocks: list[nn.Module], mesh: Mesh, options: ParallelOptions) -> None:
    """Replaces each block's forward. No module is put around another, so names of parameters stay as they are."""
    dtype = compute_dtype(options.precision)
    copies = ComputeCopies(dtype)
    casts = dtype != master_dtype(options.precision) and not mesh.uses_fsdp  # FSDP casts what it gathers
    if casts:
        add_gradient_sync(model, copies)
    for block in blocks:
        if isinstance(block, OtherStageBlock):
            continue
        run = block.forward
        has_layers = any(True for _ in block.children())  # a single layer has nothing to fuse or to compute again
        if options.compile and has_layers:
            # The compiler sees the recomputation and plans the backward with it.
            run = compile_block(block, checkpoint_block(run, options.recompute))
            run = cast_to_compute_dtype(block, run, copies) if casts else run
        else:
            # A block that runs again has its own casts again, so that it keeps none: they are made inside.
            run = cast_to_compute_dtype(block, run, copies) if casts else run
            run = checkpoint_block(run, options.recompute) if has_layers else run
        block.forward = run
    if casts and model not in blocks:
        model.forward = cast_to_compute_dtype(model, model.forward, copies, without=blocks)


def broadcast_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Gives all ranks the values of rank 0; from different seeds they would train different models and never notice.

    Parameters become contiguous: NCCL and FSDP take no others, and the optimizer wants gradients that lie as they do.
    """
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
