"""Spreads one plain model over a mesh: every kind of parallelism is a line here, in the order in which they nest."""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshtrain.dropout import place_dropouts
from meshtrain.errors import InputError
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh
from meshtrain.numerics import compute_dtype, master_dtype
from meshtrain.parallel.collectives import channel
from meshtrain.parallel.compiled import compiled
from meshtrain.parallel.data import replicate, shard
from meshtrain.parallel.precision import casting
from meshtrain.parallel.recompute import recomputed
from meshtrain.parallel.stages import Absent, blocks_of
from meshtrain.parallel.swap import sum_partial_gradients, swap_layers
from meshtrain.parallel.waiting import Waiting
from meshtrain.split import SplitError, split_layers

BUILT = (*DATA_AXES, "tp", "pp")  # axes that a model can be spread over


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is spread over a mesh; only `precision` touches what is computed.

    Attributes:
        precision: what blocks compute in: "float32", "float64", "bfloat16" or "float16".
        tp_plan: how layers split over `tp`; None: by the `tp_plan` in the file of the model's class.
        sequence_parallel: between the tensor-parallel layers each rank has a part of the sequence.
        regather: tensor-parallel layers keep their part of an input and gather it again in backward.
        symmetric_memory: products and their gather or scatter in one kernel, on GPUs that reach each other's memory.
        recompute: what blocks compute again in backward; see `recompute.py`.
        compile: each block by torch.compile.
        reshard_after_forward: see `data.shard`.
        waiting: a context manager entered wherever this rank waits for others, to measure it.
    """

    precision: str = "float32"
    tp_plan: Mapping[str, str] | None = None
    sequence_parallel: bool = True
    regather: bool = False
    symmetric_memory: bool = False
    recompute: str = "none"
    compile: bool = False
    reshard_after_forward: bool = True
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
        InputError: the layout splits an axis that models cannot be spread over, or the model cannot be split.
        TypeError: there is no such option.
    """
    if mesh.size("pp") > 1:
        raise InputError("parallelize spreads a model over all axes but pp: use pp: 1")
    how = Options(**options)
    model.to(master_dtype(how.precision))
    start_equal(model, mesh)
    split_over_tp(model, mesh, how)
    return spread_over_data(model, mesh, how)


def split_over_tp(model: nn.Module, mesh: Mesh, how: Options) -> None:
    """The first half of `parallelize`: a model's layers, whole or on the meta device, become their parts over `tp`.

    Raises:
        InputError: the layout splits an axis that models cannot be spread over, or the model cannot be split.
    """
    for axis in mesh.layout.axes:
        if axis not in BUILT and mesh.size(axis) > 1:
            raise InputError(f"a model cannot be spread over {axis} yet: use {', '.join(BUILT)}, with {axis}: 1")
    place_dropouts(model, mesh.index("tp") if how.sequence_parallel else 0)
    if mesh.size("tp") == 1:
        return
    plan = getattr(sys.modules[type(model).__module__], "tp_plan", None) if how.tp_plan is None else how.tp_plan
    if plan is None:
        raise InputError(
            f"{type(model).__name__} has no tp_plan, which says how its layers split: use tp: 1, or give one"
        )
    try:
        splits = split_layers(model, plan, mesh.size("tp"))
    except SplitError as error:
        raise InputError(str(error)) from error
    over = channel(mesh, "tp")
    over.waiting = how.waiting
    if how.symmetric_memory:
        over.fuse()
    swap_layers(model, splits, mesh, sequence_parallel=how.sequence_parallel, regather=how.regather)


def spread_over_data(model: nn.Module, mesh: Mesh, how: Options) -> nn.Module:
    """The other half of `parallelize`: precision, recomputation and compilation of blocks, then DDP, FSDP or HSDP."""
    blocks = blocks_of(model)
    if how.recompute != "none":
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
        sum_partial_gradients(model, mesh)
    return model


def _refuse_plain_dropout(model: nn.Module) -> None:
    """A block that runs again would draw another mask, and its gradients would be those of neither."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise InputError(
                f"{name} is a {type(module).__name__}, whose mask cannot be drawn again when a block is recomputed: "
                "use meshtrain.dropout.Dropout, or recompute none"
            )


def _wrap_blocks(model: nn.Module, blocks: list[nn.Module], mesh: Mesh, how: Options) -> None:
    """Recomputation, compilation and 16-bit computing of each block, by replacing its forward.

    Names of parameters stay as they are, because no module is put around another.
    """
    dtype = compute_dtype(how.precision)
    casts = dtype != master_dtype(how.precision) and mesh.size("dp_shard") == 1  # FSDP casts what it gathers
    for block in blocks:
        if isinstance(block, Absent):
            continue
        run = block.forward
        worthwhile = any(True for _ in block.children())  # a single layer has nothing to fuse or to compute again
        if how.compile and worthwhile:
            # The compiler sees the recomputation and plans the backward with it.
            run = compiled(block, recomputed(run, how.recompute))
            run = casting(block, run, dtype) if casts else run
        else:
            # Parameters must be cast anew when the block runs again: the cast is inside.
            run = casting(block, run, dtype) if casts else run
            run = recomputed(run, how.recompute) if worthwhile else run
        block.forward = run
    if casts and model not in blocks:
        model.forward = casting(model, model.forward, dtype, without=blocks)


def start_equal(model: nn.Module, mesh: Mesh) -> None:
    """Ranks whose models were drawn from different seeds would train different models and never notice."""
    group = mesh.world
    if group is None:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                dist.broadcast(tensor, group_src=0, group=group)
