"""Spreads one plain model over a mesh: every kind of parallelism is a line here, in the order in which they nest."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.dropout import place_dropouts
from meshtrain.errors import AgreedError, InputError
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh
from meshtrain.numerics import cast, compute_dtype, master_dtype
from meshtrain.parallel.collectives import channel
from meshtrain.parallel.compiled import compiled
from meshtrain.parallel.data import replicate, shard, sync_when_last
from meshtrain.parallel.precision import Copies, casting
from meshtrain.parallel.recompute import recomputed
from meshtrain.parallel.stages import Absent, blocks_of
from meshtrain.parallel.swap import sum_partial_gradients, swap_layers
from meshtrain.parallel.verify import verify
from meshtrain.parallel.waiting import Waiting
from meshtrain.split import (
    NO_SEQUENCE,
    REPLICATED,
    Split,
    SplitError,
    shards_sequence,
    split_layers,
    undecided,
)

BUILT = (*DATA_AXES, "tp", "pp")  # axes that a model can be spread over


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is spread over a mesh; only `precision` touches what is computed.

    Attributes:
        precision: what blocks compute in: "float32", "float64", "bfloat16" or "float16".
        tp_plan: how layers split over `tp`; None: by the `tp_plan` in the file of the model's class.
        sequence_parallel: between the tensor-parallel layers each rank has a part of the sequence; None: if the plan
            has an `embedding_rowwise` layer, which is what splits it.
        regather: tensor-parallel layers keep their part of an input and gather it again in backward.
        symmetric_memory: products and their gather or scatter in one kernel, on GPUs that reach each other's memory.
        recompute: what blocks compute again in backward; see `recompute.py`.
        compile: each block by torch.compile.
        reshard_after_forward: see `data.shard`.
        verify: before anything else the split model is compared with the plain one; see `verify.py`.
        sample: for that: what `model(*sample)` takes, a few short samples, the same on each rank of `tp`; None: one
            is made up.
        waiting: a context manager entered wherever this rank waits for others, to measure it.
    """

    precision: str = "float32"
    tp_plan: Mapping[str, str] | None = None
    sequence_parallel: bool | None = None
    regather: bool = False
    symmetric_memory: bool = False
    recompute: str = "none"
    compile: bool = False
    reshard_after_forward: bool = True
    verify: bool = True
    sample: Sequence[Tensor | None] | None = None
    waiting: Waiting = nullcontext


def parallelize(model: nn.Module, mesh: Mesh, **options: Any) -> nn.Module:
    """Makes a plain model train under any layout of data and tensor parallelism; in a world of one it stays plain.

    The model stays the object that it was, with the same names of parameters. A backward of it ends with gradients
    that are summed over the data ranks (see `parallel/data.py`) and, where each has seen a part, over the tensor ranks
    (`parallel/partial.py`). Blocks that share the work of a layout are those of the model's `blocks()`; a model
    without that method is one block.

    Args:
        model: on the mesh's device, with the values of rank 0 taken for all ranks; or, if `dp_shard` is larger than
            1, on the meta device.
        mesh: of the running job.
        options: any of `Options`, by name.

    Returns:
        The same model.

    Raises:
        InputError: the layout splits an axis that models cannot be spread over, or the model cannot be split, or has a
            batch norm that trains, on several data ranks.
        TypeError: there is no such option.
    """
    if mesh.size("pp") > 1:
        raise InputError("parallelize spreads a model over all axes but pp: use pp: 1")
    how = Options(**options)
    cast(model, master_dtype(how.precision))
    start_equal(model, mesh)
    asked, how = how, split_over_tp(model, mesh, how)
    if mesh.rank == 0 and asked.sequence_parallel is None and how.sequence_parallel is False:
        warnings.warn(f"sequence_parallel is off: {NO_SEQUENCE}", stacklevel=2)
    return spread_over_data(model, mesh, how)


def split_over_tp(model: nn.Module, mesh: Mesh, how: Options, *, verified: bool = False) -> Options:
    """The first half of `parallelize`: a model's layers, whole or on the meta device, become their parts over `tp`.

    Args:
        verified: the same model has been verified, for another of its stages.

    Returns:
        The options, with those decided that were left open.

    Raises:
        InputError: the layout splits an axis that models cannot be spread over, or the model cannot be split.
    """
    for axis in mesh.layout.axes:
        if axis not in BUILT and mesh.size(axis) > 1:
            raise InputError(f"a model cannot be spread over {axis} yet: use {', '.join(BUILT)}, with {axis}: 1")
    if mesh.size(*DATA_AXES) > 1:
        _refuse_batch_statistics(model)
    if mesh.size("tp") == 1:
        place_dropouts(model)
        return how
    plan = getattr(sys.modules[type(model).__module__], "tp_plan", None) if how.tp_plan is None else how.tp_plan
    if plan is None:
        raise InputError(
            f"{type(model).__name__} has no tp_plan, which says how its layers split: use tp: 1, or give one"
        )
    try:
        splits = split_layers(model, plan, mesh.size("tp"))
    except SplitError as error:
        raise InputError(str(error)) from error
    sequence = shards_sequence(plan) if how.sequence_parallel is None else how.sequence_parallel
    if sequence and not shards_sequence(plan):
        raise InputError(f"sequence_parallel: {NO_SEQUENCE}: leave it out, or use sequence_parallel: false")
    if sequence:
        _refuse_batch_statistics(model)
    unknown = None if verified else "verify is off"
    shared: dict[str, Any] = {"plan": plan, "sequence_parallel": sequence, "regather": how.regather}
    if how.verify and not verified:
        unknown = verify(model, mesh, splits, how.sample, precision=how.precision, **shared)
    if unknown is not None:
        _refuse_undecided(model, plan, splits, sequence)
    if mesh.rank == 0 and how.verify and unknown is not None:
        warnings.warn(f"the model was not compared with the plain one: {unknown}: give a sample=(...)", stacklevel=3)
    place_dropouts(model, mesh.index("tp") if sequence else 0)
    over = channel(mesh, "tp")
    over.waiting = how.waiting
    if how.symmetric_memory:
        over.fuse()
    swap_layers(model, splits, mesh, **shared)
    return replace(how, sequence_parallel=sequence)


def _refuse_undecided(model: nn.Module, plan: Mapping[str, str], splits: list[Split], sequence: bool) -> None:
    names = [] if sequence else undecided(model, plan, splits)
    if names:
        raise InputError(
            f"{', '.join(names)}: each rank has a part of the features between a colwise and a rowwise layer, and the "
            f"tp_plan does not say whether this lies there: if it does, give it the style {REPLICATED}; verify=True "
            "(parallel.verify) finds it out"
        )


def spread_over_data(model: nn.Module, mesh: Mesh, how: Options) -> nn.Module:
    """The other half of `parallelize`: precision, recomputation and compilation of blocks, then DDP, FSDP or HSDP."""
    blocks = blocks_of(model)
    if mesh.size("tp") > 1 and not how.sequence_parallel:
        _refuse_plain_dropout(model)
    _wrap_blocks(model, blocks, mesh, how)
    if mesh.size("dp_shard") > 1:
        shard(
            model,
            blocks,
            mesh,
            precision=how.precision,
            reshard_after_forward=how.reshard_after_forward,
            waiting=how.waiting,
        )
    elif mesh.size("dp_replicate") > 1:
        replicate(model, mesh, how.waiting)
    if mesh.size("tp") > 1:
        assert how.sequence_parallel is not None  # split_over_tp has decided
        sum_partial_gradients(model, mesh, sequence_parallel=how.sequence_parallel)
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


def _wrap_blocks(model: nn.Module, blocks: list[nn.Module], mesh: Mesh, how: Options) -> None:
    """Recomputation, compilation and 16-bit computing of each block, by replacing its forward.

    Names of parameters stay as they are, because no module is put around another.
    """
    dtype = compute_dtype(how.precision)
    copies = Copies(dtype)
    casts = dtype != master_dtype(how.precision) and mesh.size("dp_shard") == 1  # FSDP casts what it gathers
    if casts:
        sync_when_last(model, copies)
    for block in blocks:
        if isinstance(block, Absent):
            continue
        run = block.forward
        worthwhile = any(True for _ in block.children())  # a single layer has nothing to fuse or to compute again
        if how.compile and worthwhile:
            # The compiler sees the recomputation and plans the backward with it.
            run = compiled(block, recomputed(run, how.recompute))
            run = casting(block, run, copies) if casts else run
        else:
            # A block that runs again has its own casts again, so that it keeps none: they are made inside.
            run = casting(block, run, copies) if casts else run
            run = recomputed(run, how.recompute) if worthwhile else run
        block.forward = run
    if casts and model not in blocks:
        model.forward = casting(model, model.forward, copies, without=blocks)


def start_equal(model: nn.Module, mesh: Mesh) -> None:
    """Ranks whose models were drawn from different seeds would train different models and never notice.

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
                sent = tensor.contiguous()
                dist.broadcast(sent, group_src=0, group=group)
                if sent is not tensor:
                    tensor.copy_(sent)
