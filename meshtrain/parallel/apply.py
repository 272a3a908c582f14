"""Spreads one plain model over a mesh: every kind of parallelism is a line here, in the order in which they nest."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from meshtrain.errors import InputError
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh
from meshtrain.numerics import compute_dtype, master_dtype
from meshtrain.parallel.data import Waiting, replicate, shard
from meshtrain.parallel.precision import casting
from meshtrain.parallel.recompute import recomputed


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    precision: str = "float32",
    recompute: str = "none",
    compile: bool = False,
    reshard_after_forward: bool = True,
    waiting: Waiting = nullcontext,
) -> nn.Module:
    """Makes a plain model train under any data layout: DDP, FSDP, HSDP, or none of them in a world of one.

    The model stays the object that it was, with the same names of parameters. A backward of it ends with gradients
    that are summed over the data ranks (see `parallel/data.py`). Blocks that share the work of a layout are those of
    the model's `blocks()`; a model without that method is one block.

    Args:
        model: on the mesh's device, with the values of rank 0 taken for all ranks; or, if `dp_shard` is larger than
            1, on the meta device.
        mesh: of the running job.
        precision: what blocks compute in: "float32", "float64", "bfloat16" or "float16".
        recompute: what blocks compute again in backward; see `recompute.py`.
        compile: each block by torch.compile.
        reshard_after_forward: see `data.shard`.
        waiting: a context manager entered wherever this rank waits for others, to measure it.

    Returns:
        The same model.

    Raises:
        InputError: the layout splits an axis that models cannot be spread over.
    """
    for axis in mesh.layout.axes:
        if axis not in DATA_AXES and mesh.size(axis) > 1:
            raise InputError(f"a model cannot be spread over {axis} yet: use {' and '.join(DATA_AXES)}, with {axis}: 1")
    blocks = blocks_of(model)
    model.to(master_dtype(precision))
    _wrap_blocks(model, blocks, mesh, precision, recompute, compile)
    _start_equal(model, mesh)
    if mesh.size("dp_shard") > 1:
        shard(model, blocks, mesh, precision=precision, reshard_after_forward=reshard_after_forward, waiting=waiting)
    elif mesh.size("dp_replicate") > 1:
        replicate(model, mesh, waiting)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """A model's blocks in the order in which they run; the model itself if it does not name any."""
    blocks = getattr(model, "blocks", None)
    return [model] if blocks is None else blocks()


def _wrap_blocks(
    model: nn.Module, blocks: list[nn.Module], mesh: Mesh, precision: str, recompute: str, compile: bool
) -> None:
    """Recomputation, compilation and 16-bit computing of each block, by replacing its forward.

    Names of parameters stay as they are, because no module is put around another.
    """
    dtype = compute_dtype(precision)
    casts = dtype != master_dtype(precision) and mesh.size("dp_shard") == 1  # FSDP casts what it gathers
    for block in blocks:
        run = block.forward
        worthwhile = any(True for _ in block.children())  # a single layer has nothing to fuse or to compute again
        if compile and worthwhile:
            # The compiler sees the recomputation and plans the backward with it.
            run = torch.compile(recomputed(run, recompute))
            run = casting(block, run, dtype) if casts else run
        else:
            # Parameters must be cast anew when the block runs again: the cast is inside.
            run = casting(block, run, dtype) if casts else run
            run = recomputed(run, recompute) if worthwhile else run
        block.forward = run
    if casts and model not in blocks:
        model.forward = casting(model, model.forward, dtype, without=blocks)


def _start_equal(model: nn.Module, mesh: Mesh) -> None:
    """Ranks whose models were drawn from different seeds would train different models and never notice."""
    group = mesh.world
    if group is None:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                dist.broadcast(tensor, group_src=0, group=group)
